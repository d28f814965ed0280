"""Tree policies on the same text: how many tokens a step emits with their trees, on average.

`bench` lets every method decode on its own, so each grows its trees at places of its own. Over some
hundred steps, places differ more than trees do. Here all policies grow trees at the same places of
the same plain answers. Places are taken evenly from the text, while a method's own steps begin
where its last draft ended. So the figures are not quite a bench's MAT.

At temperature 0 the figure of a tree follows from which of its nodes are accepted. Above
temperature 0 that depends on chance as well, and chance is averaged out:

- A tree's name alone stands for coupled sampling. The tree is grown with the noise of its places
  known, and verified by the same noise (`verify.py`, equality). The text is written with one noise.
  The noise that comes after a place is independent of the text up to there, so other noises serve
  as well as the text's own. At each place the tree is grown and verified with several noises of
  other seeds, the same ones for all policies, and the mean counts. With one noise the same tokens
  are emitted whatever tree is grown (`verify.py`), so the target runs over each of them once for
  all policies and budgets, and over no other node.
- `+residual` stands for the papers' rule. The tree is grown once, without noise, and its children
  are drawn. Then no outcome of verification is drawn. The probabilities of all outcomes are summed
  up instead, from the target's distributions at the tree's nodes (`reached`).

Both figures are means of what a step emits at that place, so they compare with each other.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import mean
from typing import TYPE_CHECKING

import torch

from quickbeam.bench.questions import Question
from quickbeam.bench.run import Skipped
from quickbeam.draft.base import Context, Drafter, DrafterState
from quickbeam.errors import InvalidInput
from quickbeam.noise import Noise
from quickbeam.params import COUPLED, COUPLINGS, RESIDUAL, SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.trees import DRAFTED, make_policy
from quickbeam.trees.base import Grown, TreePolicy, grown
from quickbeam.verify import verify_equal, verify_residual

if TYPE_CHECKING:  # importing transformers takes seconds, and `quickbeam --help` imports this
    from quickbeam.llm import LLM
    from quickbeam.target.target import Target

log = logging.getLogger(__name__)
# the name of a tree of `trees.DRAFTED`, with `DRAWN` added where children are drawn, and its budget
Item = tuple[str, int]
DRAWN = f"+{RESIDUAL}"
DRAWS = 4  # noises at a place by default
APART = 0x9E3779B97F4A7C15  # between the seeds of these noises, and between theirs and the text's


def reached(tree: TokenTree, law: Callable[[int], torch.Tensor]) -> list[float]:
    """Return the probability that verification (`verify.py`) accepts each node, 1 for the root.

    It is the product, over the nodes of its path, of

        a_i * (1 - a_1) * ... * (1 - a_(i-1)),  a_i = min(1, R[y_i] / Q_i[y_i])

    where i is a node's position among its siblings, and R and Q are those of `verify.py`.
    `law(node)` is the target's distribution `[vocab]` after `node`.
    """
    chances = [1.0] + [0.0] * (len(tree) - 1)
    for node, children in enumerate(tree.children):
        if not children or not chances[node]:
            continue
        residual, left = law(node).double(), chances[node]
        tokens = torch.tensor(list(children), device=residual.device)
        for i, (token, child) in enumerate(children.items()):
            drafted = tree.law[child]
            if drafted is None:
                proposal = torch.zeros_like(residual).index_fill_(0, tokens[i : i + 1], 1.0)
            else:
                proposal = drafted.to(residual).index_fill(0, tokens[:i], 0.0)
                proposal /= proposal.sum()
            accepted = min(1.0, float(residual[token] / proposal[token]))
            chances[child], left = left * accepted, left * (1 - accepted)
            residual = (residual - proposal).clamp_(min=0.0)
            if not (mass := float(residual.sum())) > 0:
                break
            residual /= mass
    return chances


@dataclass
class Results:
    """Tokens per step by temperature and item, one number for each place of the text.

    The places are the same for all items. `answer` holds, by temperature, the number of the answer
    that each place belongs to.
    """

    tokens: dict[float, dict[Item, list[float]]]
    answer: dict[float, list[int]] = field(default_factory=lambda: defaultdict(list))
    prompts: int = 0
    complete: bool = False
    skipped: list[Skipped] = field(default_factory=list)

    def places(self, temperature: float) -> int:
        """Return the number of places at which all items were grown."""
        return min(map(len, self.tokens[temperature].values()))

    def drop_unfinished(self) -> None:
        """Drop the place at which an interrupted run had grown only some of the items."""
        for temperature, found in self.tokens.items():
            count = self.places(temperature)
            del self.answer[temperature][count:]
            for numbers in found.values():
                del numbers[count:]

    def mean(self, temperature: float, item: Item) -> float:
        return mean(self.tokens[temperature][item])

    def difference(self, temperature: float, item: Item, other: Item) -> tuple[float, float | None]:
        """Return the mean of `item` less that of `other`, and its standard error by answers.

        Both are compared place by place. Places of one answer are alike, so the error is taken over
        answers: sqrt(G / (G - 1) * sum of squares of the answers' summed deviations) / places, with
        G answers (Liang and Zeger, 1986). It is None with one answer.
        """
        both = zip(self.tokens[temperature][item], self.tokens[temperature][other], strict=True)
        gaps = [a - b for a, b in both]
        middle, sums = mean(gaps), defaultdict[int, float](float)
        for number, gap in zip(self.answer[temperature], gaps, strict=True):
            sums[number] += gap - middle
        answers = len(sums)
        return middle, sqrt(answers / (answers - 1) * sum(x * x for x in sums.values())) / len(
            gaps
        ) if answers > 1 else None


def measure(
    llm: LLM,
    questions: Sequence[Question],
    params: Sequence[SamplingParams],
    items: Sequence[Item],
    every: int,
    results: Results,
    draws: int = DRAWS,
) -> Iterator[None]:
    """Grow the trees of all `items` at the same places of plain answers, and fill `results`.

    The first turn of each question is answered plainly with each of `params`. Trees are grown at
    every `every`-th token. Above temperature 0 coupled trees are grown with `draws` noises. Yields
    after every answer. Policies learn from one answer for the next, separately for each
    temperature.

    A prompt that can't be answered (`InvalidInput`, because it exceeds the context, say) is left
    out and noted in `results.skipped`.
    """
    drafter = llm.prepare("dyspec")
    assert drafter is not None
    learned = {
        request.temperature: {
            item: make_policy(("drafter",), item[0].removesuffix(DRAWN), drafter) for item in items
        }
        for request in params
    }
    for number, question in enumerate(questions):
        try:
            for request in params:
                seeded = (
                    request
                    if request.seed is None
                    else replace(request, seed=request.seed + number)
                )
                temperature = request.temperature
                for place in _places(
                    llm, drafter, question, seeded, learned[temperature], every, draws
                ):
                    results.answer[temperature].append(number)
                    for item, tokens in place.items():
                        results.tokens[temperature][item].append(tokens)
                yield
            results.prompts += 1
        except InvalidInput as error:
            log.warning("question %s is left out: %s", question.question_id, error)
            results.skipped.append(Skipped(question.question_id, 0, str(error)))
    results.complete = True


def _places(
    llm: LLM,
    drafter: Drafter,
    question: Question,
    params: SamplingParams,
    policies: dict[Item, TreePolicy],
    every: int,
    draws: int,
) -> Iterator[dict[Item, float]]:
    """Write one answer, and yield at each place the tokens that a step emits, by item."""
    from quickbeam.target.target import Target

    target = Target(llm.model)
    ids = llm.encode_chat([{"role": "user", "content": question.turns[0]}])
    drafter.check_length(len(ids), params.max_tokens)
    limit = llm.model.context_length
    if limit is not None and len(ids) + params.max_tokens > limit:
        raise InvalidInput(
            f"a prompt of {len(ids)} tokens and {params.max_tokens} more exceed the "
            f"context of {limit}"
        )
    seed, vocab = params.seed or 0, llm.model.vocab_size
    generator, drafting = (torch.Generator().manual_seed(seed + salt) for salt in (0, 1))
    own, *others = (Noise(seed + i * APART, 0, vocab) for i in range(draws + 1))
    sampler = Sampler(params, ids, vocab)

    def choose(logits: torch.Tensor) -> int:
        return sampler.best(logits) if params.greedy else sampler.emitted(logits, own, len(ids))

    logits = target.prefill(ids)
    context = Context(ids, logits, params.temperature, drafting).begin([drafter])
    state: DrafterState = context.states[drafter.name]

    def go_on(logits: torch.Tensor) -> None:
        token = choose(logits)
        sampler.extend([token])
        context.logits = logits
        context.extend([token])
        if len(hidden := target.take_hidden()):
            state.hear(hidden)

    go_on(logits)
    try:
        for number in range(params.max_tokens - 1):
            if ids[-1] in llm.eos_ids:
                break
            if number % every == 0:
                promised, after = dict[Item, float](), following(target, ids[-1])
                for item, policy in policies.items():
                    step = Step(target, drafter, policy, item[1], sampler, llm.eos_ids, after)
                    if params.greedy:
                        promised[item] = step.coupled(context)
                    elif item[0].endswith(DRAWN):
                        promised[item] = step.residual(context, generator)
                    else:
                        promised[item] = mean(
                            step.coupled(replace(context, noise=noise)) for noise in others
                        )
                yield promised
            root = TokenTree(ids[-1])
            logits = target.verify(root)[0]
            target.commit(root, [0])
            go_on(logits)
    finally:
        state.release()
        target.store.release()


def following(target: Target, last: int) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return a function of tokens that gives the target's logits `[vocab]` after them.

    The tokens follow `last`, the last token of the text so far. The logits after each sequence of
    tokens are computed once.
    """
    known = dict[tuple[int, ...], torch.Tensor]()

    def after(tokens: Sequence[int]) -> torch.Tensor:
        if (key := tuple(tokens)) not in known:
            chain = TokenTree(last)
            for parent, token in enumerate(key):
                chain.add(parent, token, "text")
            known[key] = target.verify(chain)[-1].clone()
        return known[key]

    return after


@dataclass(frozen=True)
class Step:
    """A policy's next tree at a place, and how many tokens a step with it emits.

    Tokens behind one of `ends` (ids that end an answer) don't count. `after` gives the target's
    logits behind the place (`following`).
    """

    target: Target
    drafter: Drafter
    policy: TreePolicy
    budget: int
    sampler: Sampler
    ends: Container[int]
    after: Callable[[Sequence[int]], torch.Tensor]

    def coupled(self, context: Context) -> float:
        """Return the number of tokens with the noise of `context`, or at temperature 0.

        The policy learns from the outcome.
        """
        tree, learn, _ = self._grown(context)
        noise, position = context.noise, len(context.ids)

        def token(node: int) -> int:
            below = tree.tokens(node)
            logits = self.after(below)
            if noise is None:
                return self.sampler.best(logits, below)
            return self.sampler.emitted(logits, noise, position + len(below), below)

        path, _ = verify_equal(tree, token)
        learn(tree, path)
        return emitted(tree, [float(node in path) for node in range(len(tree))], self.ends)

    def residual(self, context: Context, generator: torch.Generator) -> float:
        """Return the mean number of tokens where children are drawn.

        The policy learns from one outcome.
        """
        tree, learn, _ = self._grown(context)
        logits = self.target.verify(tree)

        def law(node: int) -> torch.Tensor:
            return self.sampler.law(logits[node], tree.tokens(node))

        path, _ = verify_residual(tree, law, generator)
        learn(tree, path)
        return emitted(tree, reached(tree, law), self.ends)

    def _grown(self, context: Context) -> Grown:
        return grown(
            self.policy.grow(context, self.budget, self.target.depth_limit()), self.drafter.answer
        )


def emitted(tree: TokenTree, chances: Sequence[float], ends: Container[int]) -> float:
    """Return how many tokens a step emits on average.

    `chances` are the probabilities that the step reaches the nodes. It emits one token after each
    node that it reaches, and none after one of `ends`.
    """
    over = [False] * len(tree)
    for node in range(1, len(tree)):
        over[node] = over[tree.parent[node]] or tree.token[node] in ends
    return sum(chance for chance, ended in zip(chances, over, strict=True) if not ended)


def parse_trees(text: str, coupling: str = COUPLED) -> list[str]:
    """Read comma-separated names of `trees.DRAFTED`, as `Item` has them, each once.

    A name may end in `+residual` or `+coupled`. `coupling` is that of the names that don't. Raises
    `InvalidInput` for anything else.
    """
    found = list[str]()
    for part in text.split(","):
        name, plus, own = part.strip().partition("+")
        if not name and not plus:
            continue
        if name not in DRAFTED or (plus and own not in COUPLINGS):
            raise InvalidInput(
                f"--trees {text!r}: must be of {', '.join(DRAFTED)}, "
                f"comma-separated, each alone or with {DRAWN}"
            )
        found.append(name + DRAWN if (own or coupling) == RESIDUAL else name)
    if not found:
        raise InvalidInput(f"--trees {text!r}: names no tree; known: {', '.join(DRAFTED)}")
    return list(dict.fromkeys(found))


def parse_budgets(text: str) -> list[int]:
    """Read comma-separated numbers of nodes, each at least 2.

    Raises `InvalidInput` for anything else.
    """
    try:
        budgets = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        budgets = []
    if not budgets or min(budgets) < 2:
        raise InvalidInput(
            f"--budgets {text!r}: must be numbers of at least 2 nodes, comma-separated"
        )
    return budgets
