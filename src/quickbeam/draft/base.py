"""What a source of candidates is told, whatever it drafts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import isnan
from typing import TYPE_CHECKING, NamedTuple

import torch

from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.tree import TokenTree

if TYPE_CHECKING:
    from quickbeam.draft.prices import Prices
    from quickbeam.shortlist.shortlist import Shortlist


@dataclass
class Context:
    """What is certain before a step.

    `ids`: prompt and output so far; the last one becomes the root of the next tree. `logits`: `[vocab]` raw target logits that the
    last id was chosen from, on the target's device. `temperature`: the request's; 0 is greedy. `generator`: what drawn candidates are drawn
    with (CPU). `prices`: what nodes and calls of a drafter are worth, where that is measured; see `TreePolicy.priced`.
    """

    ids: list[int]
    logits: torch.Tensor
    temperature: float = 0.0
    generator: torch.Generator = field(default_factory=torch.Generator)
    prices: Prices | None = None


class Source(ABC):
    """Proposes tokens. Holds state of one sequence at a time."""

    name: str  # as statistics and `TokenTree.source` show it

    @abstractmethod
    def reset(self, ids: Sequence[int]) -> None:
        """Begin a sequence: forget everything, read the prompt."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens that became certain. Called once after the first token and once a step."""


class Laws(NamedTuple):
    """Laws over the same s tokens. `values` `[m, s]` float32, each row sums to 1; `tokens` `[s]` int64: what the columns are, `None`
    where column i is token i. Tokens without a column have probability 0; one that has several has it in one of them. `vocab`: how many
    tokens there are."""

    values: torch.Tensor
    tokens: torch.Tensor | None = None
    vocab: int = 0

    def names(self, columns: Sequence[int]) -> list[int]:
        """The tokens of these columns."""
        return list(columns) if self.tokens is None else self.tokens[list(columns)].tolist()

    def named(self, streams: Sequence[Iterator[tuple[int, float]]]) -> list[Iterator[tuple[int, float]]]:
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
    """What became of a drafter's vocabulary, over all calls. `seconds` are those of whatever grows with it: routing, the head, the softmax.
    `tokens`: scored, summed over `calls`. `wanted`: tokens that the text went on with after nodes whose laws were made; `held`: those of
    them that had been scored."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wanted: int = 0
    held: int = 0

    def since(self, before: HeadUse) -> HeadUse:
        """What was added after `before`."""
        return HeadUse(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


class Drafter(Source):
    """A source that knows a law of the next token after any node of the tree: a smaller language model, a feature drafter."""

    @property
    def head(self) -> HeadUse | None:
        """What is counted of its head, where it counts that."""
        return None

    def use(self, shortlist: Shortlist | None) -> None:
        """Score what `shortlist` says from the next sequence on; `None`: the whole vocabulary. Raises `InvalidInput` for a drafter that
        can't."""
        if shortlist is not None:
            raise InvalidInput("this drafter scores its whole vocabulary: take --vocab full")

    def forget(self) -> None:
        """Drop all that was read, so that the next laws depend on the next sequence alone."""

    def reusable(self, ids: Sequence[int], keep: int) -> int:
        """How many of a new prompt's first tokens the target need not read again, where it could keep `keep` of them."""
        return keep

    def check_length(self, prompt: int, max_tokens: int) -> None:
        """Raise `InvalidInput` where `prompt` tokens and an answer of `max_tokens` might not fit the drafter's context."""

    @abstractmethod
    def laws(self, context: Context, tree: TokenTree, nodes: Sequence[int]) -> torch.Tensor:
        """`[len(nodes), vocab]` float32: the drafter's law of the token after each of `nodes`, temperature included.

        One batched call of the drafter. Each node is asked for at most once a tree, after its parent; the root is the first. At
        temperature 0 the laws are the drafter's own at temperature 1: they then only say what is likely.
        """

    def compact(self, context: Context, tree: TokenTree, nodes: Sequence[int]) -> Laws:
        """What `laws` gives, over the tokens that were scored only. This is what tree policies ask for."""
        return Laws(self.laws(context, tree, nodes))


def law_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """`[n, vocab]` float32 laws of a drafter's logits; temperature 0 stands for 1 (see `Drafter.laws`).

    Raises `QuickbeamError` where logits are not finite.
    """
    scores = logits.float()
    if temperature not in (0, 1):  # the peak goes first, and the floor keeps 1/temperature finite in float32, as in `Sampler.law`
        scores = (scores - scores.amax(-1, keepdim=True)).div_(max(temperature, 1e-30))
    law = scores.softmax(-1)
    if any(map(isnan, law[:, 0].tolist())):  # one bad logit spoils the sum that all of its row is divided by
        raise QuickbeamError("the drafter's logits are not finite (NaN): its weights or this number format are broken; try float32")
    return law
