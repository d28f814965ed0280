"""Best-first search for the likeliest paths (DySpec, 2410.11744, App. D.1).

For deterministic proposals only: which paths are kept may then depend on the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

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
# beside it. The drafter is then asked along the text's own continuation, too.
WIDE = 128


@dataclass(slots=True, eq=False)
class Candidate:
    """A path below the root, named by its last token.

    - `rate`: the estimated probability that the token is accepted if its parent is.
    - `value`: the product of the rates along the path.
    - `number`: in the order of discovery.
    - `features`: what its rate was estimated from, one for each source that proposed it.
    - `probability`: the drafter's, if it was one of them.
    - `place`: its node in the drafter's tree, once the drafter was asked about it.
    """

    token: int
    parent: Candidate | None
    source: str
    rate: float = 1.0
    number: int = 0
    probability: float | None = None
    features: list[CandidateFeatures] = field(default_factory=list)
    depth: int = 0
    value: float = 1.0
    path: tuple[int, ...] = ()
    children: dict[int, Candidate] = field(default_factory=dict)
    place: int | None = None

    def revalue(self, rate: float) -> None:
        """Set the rate, and the values of all paths through this one."""
        assert self.parent is not None
        self.rate, self.value = rate, self.parent.value * rate
        for child in self.children.values():
            child.revalue(child.rate)


class Search:
    """The `size` likeliest paths among the `candidates` so far, in `best`, in order of value.

    The drafter sees a tree of its own, of the paths that it was asked about only. A token that a
    grammar forces is as likely as the token before it.

    Where the context has costs of nodes, a path is also kept only if its value exceeds that of its
    node. `estimate(rank, probability, confidence)` is the features of a drafter's proposal. Without
    a drafter, candidates are entered from elsewhere alone.
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
        self.name, self.one_call = (drafter.name, drafter.one_call) if drafter else ("", True)
        self.context, self.max_depth = context, max_depth
        self.size = size if max_depth > 0 else 0
        self.model, self.costed = model, context.node_costs is not None
        self.wide = size > WIDE
        self.root = Candidate(context.ids[-1], None, "root", place=0)
        self.best: list[Candidate] = []
        self.candidates: list[Candidate] = []
        self._drafted = TokenTree(context.ids[-1])
        self.rank()

    def rank(self) -> None:
        """Choose `best` anew from all candidates.

        Paths no likelier than `_next_node_cost` add no node. They can still replace a less likely
        path.
        """
        self.candidates.sort(key=lambda one: (-one.value, one.number))
        self.best, self._next_node_cost = self.candidates[: self.size], 0.0
        if self.costed:
            cost, kept = self.context.node_cost, 0
            while kept < len(self.best) and self.best[kept].value > cost(kept + 1):
                kept += 1
            del self.best[kept:]
            self._next_node_cost = cost(kept + 1)

    @property
    def admission_value(self) -> float:
        """The value that a path must exceed to get in."""
        if not self.best:
            return self._next_node_cost
        last = self.best[-1].value
        return last if len(self.best) == self.size else min(last, self._next_node_cost)

    def below_cost(self, value: float, nodes: int) -> bool:
        """Whether a path is not worth its node if at least `nodes - 1` likelier ones are found.

        Its likelier siblings and all that is on the way to it are such paths, so most paths need
        not be entered at all. (Siblings count as likelier by their rank. Observed rates may turn
        two estimates around; one such path may then be missed.)
        """
        return self.costed and value <= self.context.node_cost(nodes)

    def enter(
        self,
        parent: Candidate,
        token: int,
        source: str,
        rate: float,
        features: Sequence[CandidateFeatures] = (),
        probability: float | None = None,
    ) -> Candidate:
        """Enter the path that continues `parent` with `token`."""
        number, path = len(self.candidates) + 1, (*parent.path, token)
        depth, value = parent.depth + 1, parent.value * rate
        one = Candidate(
            token, parent, source, rate, number, probability, list(features), depth, value, path
        )
        parent.children[token] = one
        self.candidates.append(one)
        return one

    def worth(self, one: Candidate) -> float:
        """Return the probability that asking about `one` is of use.

        Which is that `one` is reached and no known child accepted; 0 if a grammar leaves no choice.
        """
        if self.context.forced(one.path) is not None:
            return 0.0
        known = 0.0 if self.wide else sum(child.rate for child in one.children.values())
        return one.value * max(0.0, 1 - known)

    def open(self) -> list[Candidate]:
        """Return the paths to ask the drafter about next; see `CHILD_SHARE` and `FRACTION`."""
        admission_value = self.admission_value
        paths = [
            one
            # if all places are taken, nothing below the last path can get one
            for one in self.best[: self.size - 1]
            if one.value * CHILD_SHARE > admission_value
            and one.place is None
            and one.parent is not None
            and one.parent.place is not None
            and one.depth < self.max_depth
        ]
        return [one for one in paths if one.value >= FRACTION * paths[0].value]

    def ask(
        self, paths: Sequence[Candidate], width: int | None = None, gain: float = float("inf")
    ) -> Generator[DraftRequest, DraftProbs | None, bool]:
        """Ask the drafter once for the `width` likeliest tokens after each of `paths`.

        `paths` is the root at first, later some of `best`. `gain` is the number of tokens expected
        from the call. Returns False if the call was not worth its time.
        """
        for one in paths:
            if one.parent is not None:
                assert one.parent.place is not None
                parent = one.parent.place
                one.place = self._drafted.add(parent, one.token, self.name, one.value)
        admission_value = self.admission_value
        # for each of `paths`, what a child's probability must exceed for its path to get in
        least = [ROUNDING * admission_value / (LIFT * one.value) for one in paths]
        places = [one.place for one in paths if one.place is not None]
        answer = yield DraftRequest(self.context, self._drafted, places, gain)
        if answer is None:
            return False
        count = min(width or self.size, self.size)
        rows = likeliest_children(self.context, answer, [one.depth for one in paths], count, least)
        for i, (one, row) in enumerate(zip(paths, rows, strict=True)):
            token = answer.forced.get(i)
            if token is None:
                confidence = answer.confidence[i] if answer.confidence else None
                self._take(one, row, admission_value, confidence)
            elif token not in one.children and one.value > admission_value:
                self.enter(one, token, GRAMMAR, 1.0)
        return True

    def _take(
        self, parent: Candidate, row: Row, admission_value: float, confidence: float | None
    ) -> None:
        """Enter the drafter's tokens after `parent`, the likeliest first.

        A token that is below `parent` already stays one child. Its rate is the larger of two
        estimates: that from the drafter's, and its own given the drafter's answer. The drafter's
        other tokens share the rest.
        """
        model, known, share = self.model, parent.children, 1.0
        if known:
            share = self._merge(parent, row, confidence)
        for rank, (token, probability) in enumerate(zip(*row, strict=True)):
            if token in known:
                continue
            features = self.estimate(rank, probability, confidence)
            rate = model.rate(features) * share
            value = parent.value * rate
            if value <= admission_value or self.below_cost(value, parent.depth + 1 + rank):
                break
            self.enter(parent, token, self.name, rate, (features,), probability)

    def _merge(self, parent: Candidate, row: Row, confidence: float | None) -> float:
        """Correct the rates of the children that `parent` has by the drafter's answer.

        Returns by what the rates of the drafter's other tokens are multiplied.
        """
        tokens, probabilities = row
        theirs, both = 0.0, 0.0
        for token, child in parent.children.items():
            rate = 0.0
            if token in tokens:
                rank = tokens.index(token)
                child.probability = probabilities[rank]
                features = self.estimate(rank, child.probability, confidence)
                rate = min(self.model.rate(features), 1 - 1e-6)
                theirs += rate
            own = child.rate
            if tokens and child.features:
                child.features[0] = child.features[0].after_drafter(first_choice=tokens[0] == token)
                own = self.model.rate(child.features[0])
            if rate:
                child.features.append(features)
            child.revalue(max(rate, own))
            both += child.rate
        return max(0.0, 1 - both) / max(1e-6, 1 - theirs)

    def tree(self) -> TokenTree:
        """Return the tree of the root and `best`: node i is `best[i - 1]`."""
        tree, place = TokenTree(self.root.token), {0: 0}
        for one in self.best:
            assert one.parent is not None
            parent, own = place[one.parent.number], one.probability
            own = one.rate if own is None else own
            place[one.number] = tree.add(parent, one.token, one.source, one.value, probability=own)
        return tree


def best_first(search: Search, propose: Callable[[Search], None] = Search.rank) -> ProposalSteps:
    """Ask the drafter about likely paths until none is left that could add a node.

    `propose` enters candidates without a call: below the root, and below `search.best` after calls.

    Where nodes have costs, no call is made that is expected to give fewer tokens than it costs. (A
    block drafter's first call is the only one that costs anything.) Then the search's model learns
    from the verified tree what calls bring.
    """
    asked, paths = 0.0, [search.root] if search.size > 0 else []
    explore = search.context.explore
    propose(search)
    while paths:
        worths = [search.worth(one) for one in paths]
        free = not search.costed or explore or (asked > 0 and search.one_call)
        gain = float("inf") if free else _gain(search, worths)
        if not (yield from search.ask(paths, gain=gain)):
            break
        # forced tokens took no call, so exploring is still to come
        explore = explore and not sum(worths)
        if not (asked and search.one_call):  # what a call brings is counted by the calls
            asked += sum(worths)
        search.rank()
        propose(search)
        paths = search.open()
    return Proposal(search.tree(), partial(_learn, search, asked if search.costed else 0.0))


def _gain(search: Search, worths: Sequence[float]) -> float:
    """Return the tokens expected from asking about nodes, less the cost of a node for each."""
    accepted, node = search.model.accepted_per_asked, search.admission_value
    return sum(max(0.0, worth * accepted - node) for worth in worths)


def observe(search: Search, tree: TokenTree, path: Sequence[int]) -> None:
    """Let acceptance rates learn from a verified tree, maybe only the first nodes of the search's.

    All children of a reached node count, as the target could have chosen any of them.
    """
    for node, accepted in zip_longest(path, path[1:]):
        for child in tree.children[node].values():
            # forced runs may follow the search's own nodes
            for features in search.best[child - 1].features if child <= len(search.best) else ():
                search.model.observe(features, child == accepted)


def _learn(search: Search, asked: float, tree: TokenTree, path: Sequence[int]) -> None:
    """Learn from a verified tree. `asked`: see `AcceptanceModel.observe_calls`; 0: of no calls."""
    observe(search, tree, path)
    if asked:
        added = sum(search.wide or tree.source[node] == search.name for node in path[1:])
        search.model.observe_calls(added, asked)
