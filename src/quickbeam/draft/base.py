"""What a source of candidates is told, whatever it drafts from."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.noise import Noise
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

if TYPE_CHECKING:
    from quickbeam.grammar.masks import Masks
    from quickbeam.shortlist.shortlist import Shortlist
    from quickbeam.target.kv_cache import Pool

logger = logging.getLogger(__name__)
DEPTHS = 6  # that are counted apart
GRAMMAR = "grammar"  # the source of tokens that a grammar leaves alone at their place


@dataclass
class Context:
    """What is committed before a step of one sequence.

    `ids`: prompt and output so far; the last one becomes the root of the next tree. `logits`:
    `[vocab]` raw target logits that the last id was chosen from, on the target's device.
    `temperature`: the request's; 0 is greedy. `noise`: what the answer is drawn with, where drafts
    may look at it (`noise.py`); `filters`: the request's parameters, where they rule unlikely
    tokens out; `generator`: what children are drawn with where they may not look at the noise
    (CPU). `states`: what the sources keep of this sequence, by their names. `prices`: what nodes
    are worth, where that is measured; see `TreePolicy.priced`. `grammar`: what the answer has to
    follow, if anything.
    """

    ids: list[int]
    logits: torch.Tensor
    temperature: float = 0.0
    generator: torch.Generator = field(default_factory=torch.Generator)
    states: dict[str, Any] = field(default_factory=dict)
    prices: Prices | None = None
    noise: Noise | None = None
    filters: SamplingParams | None = None
    grammar: Masks | None = None

    @property
    def draws(self) -> bool:
        """Whether children may be drawn from a drafter's distribution, to be verified by the
        residual rule."""
        return self.temperature > 0 and self.noise is None

    @property
    def draft_temperature(self) -> float:
        """Of the distributions that drafters give: 1 where the noise takes care of the request's
        (`trees/perturbed.py`)."""
        return self.temperature if self.draws else 1.0

    def within(self, path: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """As many of `tokens` as the grammar lets follow the `path` below the root."""
        return tokens if self.grammar is None else tokens[: self.grammar.follows(path, tokens)]

    def forced(self, path: Sequence[int]) -> int | None:
        """The only token that the grammar lets follow `path`, where that is so."""
        return None if self.grammar is None else self.grammar.forced(path)

    def begin(self, sources: Sequence[Source]) -> Context:
        """Have sources read the text so far; gives itself."""
        for source in sources:
            self.states[source.name] = source.begin(self.ids)
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens became committed: tell the sources."""
        self.ids.extend(tokens)
        for state in self.states.values():
            state.extend(tokens)


class Prices(ABC):
    """What a node must promise in tokens to be worth its time (`engine/budget.py`). `trial`: the
    first call of a drafter is to be made all the same, to see what came of it."""

    trial: bool = False

    @abstractmethod
    def node(self, nodes: int) -> float:
        """One more in a tree of `nodes` nodes. Never falls as trees grow."""


class DraftRequest(NamedTuple):
    """One sequence's wish: its drafter's laws after `nodes` of a growing `tree`. `gain`: tokens
    that it expects from being answered; infinite where it is not the budget's to refuse."""

    context: Context
    tree: TokenTree
    nodes: Sequence[int]
    gain: float = float("inf")


class Source(ABC):
    """Proposes tokens. Holds no state of a sequence: that is what `begin` gives."""

    name: str  # as statistics and `TokenTree.source` show it

    @abstractmethod
    def begin(self, ids: Sequence[int]) -> SourceState:
        """The state of a sequence that begins with a prompt."""


class SourceState:
    """What a source keeps of one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens that became committed. Called once after the first token and once a step."""


class Laws(NamedTuple):
    """Laws over the same s tokens. `values` `[m, s]` float32, each row sums to 1; `tokens` `[s]`
    int64: what the columns are, `None` where column i is token i. Tokens without a column have
    probability 0; one that has several has it in one of them. `vocab`: how many tokens there are.
    `forced`: by row, the only token that a grammar allows there; the row's values say nothing
    then."""

    values: torch.Tensor
    tokens: torch.Tensor | None = None
    vocab: int = 0
    forced: Mapping[int, int] = MappingProxyType({})

    def names(self, columns: Sequence[int]) -> list[int]:
        """The tokens of these columns."""
        return list(columns) if self.tokens is None else self.tokens[list(columns)].tolist()

    def named(
        self, streams: Sequence[Iterator[tuple[int, float]]]
    ) -> list[Iterator[tuple[int, float]]]:
        """Of columns, each with a probability: their tokens."""
        if self.tokens is None:
            return list(streams)
        tokens = self.tokens.cpu().numpy()
        return [((int(tokens[column]), value) for column, value in stream) for stream in streams]

    def dense(self, row: int | slice = slice(None)) -> torch.Tensor:
        """`[m, vocab]`, or `[vocab]` of one row."""
        values = self.values[row]
        if self.tokens is None:
            return values
        return values.new_zeros(*values.shape[:-1], self.vocab).index_add_(-1, self.tokens, values)


@dataclass
class HeadUse:
    """What became of a drafter's vocabulary, over all calls. `seconds` are those of whatever grows
    with it: routing, the head, the softmax. `tokens`: scored, summed over `calls`. `wanted`: tokens
    that the text went on with after nodes whose laws were made; `held`: those of them that had been
    scored. `rare`: of those wanted, the ones that were neither frequent nor in the context, so that
    only a router could have them scored, by the depth of the node (the last counts for all that are
    deeper); `rare_held`: those of them that it had."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wanted: int = 0
    held: int = 0
    rare: list[int] = field(default_factory=lambda: [0] * DEPTHS)
    rare_held: list[int] = field(default_factory=lambda: [0] * DEPTHS)

    def plus(self, other: HeadUse) -> HeadUse:
        """Both together."""
        found = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        for name in ("rare", "rare_held"):
            found[name] = [
                a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)
            ]
        return HeadUse(**found)


class DrafterState(SourceState):
    """What a drafter keeps of one sequence. `waiting`: committed tokens that it has heard of and
    not read."""

    waiting = 0

    @property
    def used(self) -> HeadUse | None:
        """What is counted of its head, where that is counted."""
        return None

    def hear(self, hidden: torch.Tensor) -> None:
        """Hidden states `[k, layers * d]` of the next k committed tokens, where the target gives
        them."""

    def share(self, chunk: int, tokens: int) -> Any:
        """What another sequence needs to `adopt` tokens `chunk * tokens` to `(chunk + 1) * tokens -
        1`; None where that is not kept."""
        return None

    def adopt(
        self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        """Begin with shared chunks. `hidden`, `[k, layers * d]` each: of the last of their tokens,
        and of whole chunks behind them that nobody has read."""

    def heard(self, chunk: int, tokens: int) -> torch.Tensor | None:
        """Hidden states of tokens `chunk * tokens` to `(chunk + 1) * tokens - 1`, where it has them
        and has read none of them."""
        return None

    def release(self) -> None:
        """Give everything back."""


class Drafter(Source):
    """A source that knows a law of the next token after any node of the tree: a smaller language
    model, a feature drafter."""

    needs_hidden = False  # whether states want to `hear`
    pool: Pool | None = None  # where their keys and values are
    context_length: int | None = None  # tokens that it can read, where that has a limit

    @abstractmethod
    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> DrafterState:
        """The state of a sequence that begins with `ids`, whose head scores what `shortlist` says;
        `None`: the whole vocabulary."""

    def check_shortlist(self, shortlist: Shortlist | None) -> None:
        """Raise `InvalidInput` for a shortlist that this drafter can't take."""
        if shortlist is not None:
            raise InvalidInput("this drafter scores its whole vocabulary: take --vocab full")

    def check_length(self, prompt: int, max_tokens: int) -> None:
        """Raise `InvalidInput` where `prompt` tokens and an answer of `max_tokens` might not fit
        the drafter's context."""
        limit = self.context_length
        if limit is not None and prompt + max_tokens > limit:
            raise InvalidInput(
                f"a prompt of {prompt} tokens and max_tokens={max_tokens} exceed the drafter's "
                f"context of {limit}: "
                f"shorten the prompt, ask for at most {max(0, limit - prompt)} tokens, or take a "
                "method without a drafter"
            )

    def read(self, states: Sequence[DrafterState], least: int = 1) -> None:
        """Bring states up to date that have `least` committed tokens or more to read, as far as the
        text after them is known."""

    @abstractmethod
    def answer(self, requests: Sequence[DraftRequest]) -> list[Laws]:
        """Of each request, laws over the tokens that were scored, of the token after each of its
        nodes, at its `draft_temperature`.

        One batched call for all. Each node is asked for at most once a tree, after its parent; the
        root is the first. A law that is not finite comes as zeros: nothing is proposed there.
        """


def law_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """`[n, vocab]` float32 laws of a drafter's logits. A row that is not finite is zero."""
    scores = logits.float()
    # the peak goes first, and the floor keeps 1/temperature finite in float32, as in `Sampler.law`
    if temperature != 1:
        scores = (scores - scores.amax(-1, keepdim=True)).div_(max(temperature, 1e-30))
    law = scores.softmax(-1)
    if law.device.type != "cpu":
        return law.nan_to_num_(0.0)
    first = law[:, 0].tolist()
    # one bad logit spoils the sum that all of its row is divided by
    if any(value != value for value in first):
        logger.warning("the drafter's logits are not finite (NaN): it proposes nothing there")
        law.nan_to_num_(0.0)
    return law
