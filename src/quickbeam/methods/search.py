"""Best-first search for the likeliest paths (DySpec, 2410.11744, App. D.1).

For deterministic proposals only: which paths are kept may then depend on the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter

from quickbeam.drafters.base import GRAMMAR, Context, Drafter, DraftProbs, DraftRequest
from quickbeam.methods.acceptance import (
    LIFT,
    AcceptanceModel,
    CandidateFeatures,
    Estimate,
    drafted_features,
)
from quickbeam.methods.base import Proposal, ProposalSteps
from quickbeam.methods.children import ROUNDING, likeliest_children
from quickbeam.noise import Row
from quickbeam.tree import TokenTree

# The search asks about a path's children only if a child with this share of the path's probability
# would get in. On our own questions, asking about all paths gave an estimated 0.005 tokens more a
# tree (of 3.1 with 16 nodes, 4.1 with 64; on texts trees had 0.004 to 0.028 more). It took a
# quarter more of the drafter's time with 16 nodes, 37 % more with 64.
CHILD_SHARE = 0.5
# One call asks about all such paths that are at least this share as likely as the likeliest.
FRACTION = 0.1
# If a tree may have more nodes than this, a pass is so slow that calls of the drafter cost little
# beside it. The drafter is then asked along what the text repeats, too.
WIDE = 128


@dataclass(slots=True, eq=False)
class Candidate:
    """A path below the root.

    - `path`: its tokens.
    - `source`: what proposed the last of them.
    - `rate`: the estimated probability that the last token is accepted if those before it are.
    - `value`: the product of the rates along the path.
    - `features`: what its rate was estimated from, one for each source that proposed it.
    - `probability`: the drafter's, if it was one of them.
    - `children`: the paths that continue it, by their last token.

    It does not refer to the path before it: without circles the candidates of a tree are freed with
    it, and the garbage collector finds nothing to do.
    """

    path: tuple[int, ...]
    source: str
    rate: float
    value: float
    features: list[CandidateFeatures]
    probability: float | None = None
    children: dict[int, Candidate] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return len(self.path)

    @property
    def left(self) -> float:
        """The probability that no child is accepted, if the children's rates are right.

        They may add up to more than 1.
        """
        if not self.children:
            return 1.0
        return 1 - sum([child.rate for child in self.children.values()])

    def revalue(self, parent_value: float, rate: float) -> None:
        """Set the rate, and the values of this path and of all that continue it."""
        self.rate = rate
        self.value = parent_value * rate
        for child in self.children.values():
            child.revalue(self.value, child.rate)


_by_value = attrgetter("value")


class Search:
    """The `size` likeliest paths among the `candidates` so far, in `best`, in order of value.

    The drafter sees a tree of its own, of the paths that it was asked about only. A token that a
    grammar forces is as likely as the token before it.

    Where the context has costs of nodes, a path is kept only if its value exceeds the cost of its
    node, too. `estimate(rank, probability, confidence)` returns the features of a drafter's
    proposal. Without a drafter there are only free candidates.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        context: Context,
        size: int,
        max_depth: int,
        model: AcceptanceModel,
        estimate: Estimate = drafted_features,
    ) -> None:
        self.estimate = estimate
        self.name = drafter.name if drafter else ""
        self.one_call = drafter.one_call if drafter else True
        self.context = context
        self.max_depth = max_depth
        self.size = size if max_depth > 0 else 0
        self.model = model
        self.costed = context.node_costs is not None
        self._costs = context.node_costs or ()
        self.wide = size > WIDE
        self.root = Candidate((), "root", 1.0, 1.0, [])
        self.best: list[Candidate] = []
        self.candidates: list[Candidate] = []  # in the order of discovery
        self._drafted = TokenTree(context.ids[-1])
        self._drafted_nodes: dict[tuple[int, ...], int] = {(): 0}  # by path
        self.rank()

    def rank(self) -> None:
        """Choose `best` anew from all candidates.

        A path whose value is at most `_next_node_cost` adds no node. It can still replace a less
        likely path.
        """
        # of equal values, that which was discovered first comes first
        self.best = sorted(self.candidates, key=_by_value, reverse=True)[: self.size]
        self._next_node_cost = 0.0
        if self.costed:
            kept = 0
            for path, cost in zip(self.best, self._costs[1:], strict=False):
                if path.value <= cost:
                    break
                kept += 1
            del self.best[kept:]
            self._next_node_cost = self.context.node_cost(kept + 1)

    @property
    def admission_value(self) -> float:
        """The value that a path must exceed to get in."""
        if not self.best:
            return self._next_node_cost
        last = self.best[-1].value
        return last if len(self.best) == self.size else min(last, self._next_node_cost)

    def below_cost(self, value: float, nodes: int) -> bool:
        """Whether a path is not worth its node if there are at least `nodes - 1` likelier ones.

        The path's likelier siblings and its ancestors are such paths, so most paths need not be
        entered at all. (Siblings count as likelier by their rank. Observed rates may make the later
        of two siblings the likelier one. Such a path may be missed.)
        """
        costs = self._costs
        return self.costed and (nodes >= len(costs) or value <= costs[nodes])

    def enter(
        self,
        parent: Candidate,
        token: int,
        source: str,
        rate: float,
        features: list[CandidateFeatures],
        probability: float | None = None,
    ) -> Candidate:
        """Enter the path that continues `parent` with `token`."""
        path = (*parent.path, token)
        candidate = Candidate(path, source, rate, parent.value * rate, features, probability)
        parent.children[token] = candidate
        self.candidates.append(candidate)
        return candidate

    def worth(self, candidate: Candidate) -> float:
        """Return the probability that asking about `candidate` is of use.

        Asking is of use if verification reaches the candidate and accepts none of the children that
        it has already. The probability is 0 if a grammar leaves no choice.
        """
        if self.context.forced(candidate.path) is not None:
            return 0.0
        left = 1.0 if self.wide else candidate.left
        return candidate.value * max(0.0, left)

    def to_ask(self) -> list[Candidate]:
        """Return the paths to ask the drafter about next; see `CHILD_SHARE` and `FRACTION`."""
        admission_value = self.admission_value
        paths = list[Candidate]()
        # if `best` is full, nothing below its last path can get in
        for path in self.best[: self.size - 1]:
            if path.value * CHILD_SHARE <= admission_value:
                break
            if paths and path.value < FRACTION * paths[0].value:
                break
            if self._can_ask(path):
                paths.append(path)
        return paths

    def _can_ask(self, candidate: Candidate) -> bool:
        """Whether a path can be asked about: its parent was, and it was not."""
        path = candidate.path
        asked = self._drafted_nodes
        return len(path) < self.max_depth and path[:-1] in asked and path not in asked

    def ask(
        self, paths: Sequence[Candidate], width: int | None = None, gain: float = float("inf")
    ) -> Generator[DraftRequest, DraftProbs | None, bool]:
        """Ask the drafter once for the `width` likeliest tokens after each of `paths`.

        `paths` is the root at first, later some of `best`. `gain` is the number of tokens expected
        from the call. Returns False if the call was not worth its time.
        """
        nodes = [self._add_draft_node(path) for path in paths]
        admission_value = self.admission_value
        # for each of `paths`, what a child's probability must exceed for its path to get in
        min_probs = [ROUNDING * admission_value / (LIFT * path.value) for path in paths]
        answer = yield DraftRequest(self.context, self._drafted, nodes, gain)
        if answer is None:
            return False
        count = min(width or self.size, self.size)
        depths = [path.depth for path in paths]
        rows = likeliest_children(self.context, answer, depths, count, min_probs)
        for i, (path, row) in enumerate(zip(paths, rows, strict=True)):
            token = answer.forced.get(i)
            if token is None:
                confidence = answer.confidence[i] if answer.confidence else None
                self._enter_children(path, row, admission_value, confidence)
            elif token not in path.children and path.value > admission_value:
                self.enter(path, token, GRAMMAR, 1.0, [])
        return True

    def _add_draft_node(self, candidate: Candidate) -> int:
        """Add a path to the drafter's tree, where the root is already. Returns its node there."""
        nodes = self._drafted_nodes
        path = candidate.path
        if path:
            nodes[path] = self._drafted.add(nodes[path[:-1]], path[-1], self.name, candidate.value)
        return nodes[path]

    def _enter_children(
        self, parent: Candidate, row: Row, admission_value: float, confidence: float | None
    ) -> None:
        """Enter the drafter's tokens after `parent`, the likeliest first.

        A token that is below `parent` already stays one child. Its rate is the larger of two
        estimates: that from the drafter's probability, and that of the free candidate given the
        drafter's answer. The drafter's other tokens share what is left.
        """
        children = parent.children
        share = self._correct_children(parent, row, confidence) if children else 1.0
        likelier = parent.depth  # at least so many paths are
        for rank, (token, probability) in enumerate(zip(*row, strict=True)):
            if token in children:
                continue
            features = self.estimate(rank, probability, confidence)
            rate = self.model.rate(features) * share
            value = parent.value * rate
            if value <= admission_value or self.below_cost(value, likelier + 1 + rank):
                break
            self.enter(parent, token, self.name, rate, [features], probability)

    def _correct_children(self, parent: Candidate, row: Row, confidence: float | None) -> float:
        """Correct the rates of the children that `parent` has by the drafter's answer.

        Returns the factor for the rates of the drafter's other tokens.
        """
        tokens, probabilities = row
        drafter_sum = 0.0
        rate_sum = 0.0
        for token, child in parent.children.items():
            drafter_rate = 0.0
            if token in tokens:
                rank = tokens.index(token)
                child.probability = probabilities[rank]
                drafter_features = self.estimate(rank, child.probability, confidence)
                drafter_rate = min(self.model.rate(drafter_features), 1 - 1e-6)
                drafter_sum += drafter_rate
            free_rate = child.rate
            if tokens and child.features:
                child.features[0] = child.features[0].after_drafter(first_choice=tokens[0] == token)
                free_rate = self.model.rate(child.features[0])
            if drafter_rate:
                child.features.append(drafter_features)
            child.revalue(parent.value, max(drafter_rate, free_rate))
            rate_sum += child.rate
        return max(0.0, 1 - rate_sum) / max(1e-6, 1 - drafter_sum)

    def tree(self) -> TokenTree:
        """Return the tree of the root and `best`: node i is `best[i - 1]`."""
        tree = TokenTree(self.context.ids[-1])
        nodes: dict[tuple[int, ...], int] = {(): 0}  # by path
        for candidate in self.best:
            path = candidate.path
            probability = candidate.probability
            nodes[path] = tree.add(
                nodes[path[:-1]],
                path[-1],
                candidate.source,
                candidate.value,
                probability=candidate.rate if probability is None else probability,
            )
        return tree


def best_first(search: Search, add_free: Callable[[Search], None] = Search.rank) -> ProposalSteps:
    """Ask the drafter about likely paths until none is left that could add a node.

    `add_free` enters free candidates: below the root, and below `search.best` after calls.

    Where nodes have costs, no call is made that is expected to give fewer tokens than it costs. (A
    block drafter's first call is the only one that costs anything.) Then the search's model learns
    from the verified tree what calls bring.
    """
    asked = 0.0  # see `AcceptanceModel.observe_calls`
    paths = [search.root] if search.size > 0 else []
    explore = search.context.explore
    add_free(search)
    while paths:
        worths = [search.worth(path) for path in paths]
        any_gain = not search.costed or explore or (asked > 0 and search.one_call)
        gain = float("inf") if any_gain else _gain(search, worths)
        answered = yield from search.ask(paths, gain=gain)
        if not answered:
            break
        # forced tokens took no call, so exploring is still to come
        explore = explore and not sum(worths)
        if not (asked and search.one_call):  # what a call brings is counted by the calls
            asked += sum(worths)
        search.rank()
        add_free(search)
        paths = search.to_ask()

    def learn(tree: TokenTree, path: Sequence[int]) -> None:
        observe(search, tree, path)
        if search.costed and asked:
            added = sum(search.wide or tree.source[node] == search.name for node in path[1:])
            search.model.observe_calls(added, asked)

    return Proposal(search.tree(), learn)


def _gain(search: Search, worths: Sequence[float]) -> float:
    """Return the tokens expected from asking about nodes, less the cost of a node for each."""
    accepted = search.model.accepted_per_asked
    cost = search.admission_value
    return sum(max(0.0, worth * accepted - cost) for worth in worths)


def observe(search: Search, tree: TokenTree, path: Sequence[int]) -> None:
    """Let acceptance rates learn from a verified tree, maybe only the first nodes of the search's.

    All children of a reached node count, as the target could have chosen any of them.
    """
    for node, accepted in zip_longest(path, path[1:]):
        for child in tree.children[node].values():
            if child > len(search.best):  # forced tokens may follow the search's own nodes
                continue
            for features in search.best[child - 1].features:
                search.model.observe(features, child == accepted)
