"""The contract of a model that runs passes: batches in, logits out.

A `Model` holds the weights and no sequence. Each part of a batch brings its sequence's cache. There
are two back ends that run a described architecture (`stack.py`): `native_model.py` over the native
kernels, and `torch/model.py` in PyTorch. `opening.py` picks one.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from quickbeam.errors import InvalidInput
from quickbeam.models.cache.kv import Pool, SequenceCache
from quickbeam.noise import Row
from quickbeam.tree import TokenTree

CHUNK = 512  # tokens of prompts that a pass reads
STREAMED_CHUNK = 1024  # the same where weights are read or copied in every pass
# the same in a step in which answers run, so that a running answer never waits for a long prompt
MIXED_CHUNK = 64

P = ParamSpec("P")
R = TypeVar("R")


def inference(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run in inference mode, as `torch.inference_mode()` does.

    Where that mode is on already, nothing is done. Functions that call each other would otherwise
    enter it several times a step, and entering it takes longer than some of them do.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run


class ImageRows(NamedTuple):
    """Rows of an image, in place of the embeddings of tokens that follow one another.

    `first`: the index of the first of these tokens. `rows`: `[n, d]`, as `Model.embedding` returns
    rows; `[n, (1 + k) * d]` where `Stack.deepstack` is k: behind such a row stands what is added
    after each of the first k layers. `key`: a large number that no other image's rows have.
    `whole`: its rows see one another, so that one pass reads all of them that are left. `token`:
    whose row of the per-layer inputs' table they have (`PerLayerInputs`); None for the tokens that
    they stand for.
    """

    first: int
    rows: torch.Tensor
    key: int
    whole: bool = False
    token: int | None = None

    @property
    def end(self) -> int:
        """The index behind the last of the tokens."""
        return self.first + len(self.rows)


def images_between(images: Sequence[ImageRows], first: int, end: int) -> list[ImageRows]:
    """Return what `images` have of the tokens `first` to `end` (excluded), counted from `first`."""
    between = list[ImageRows]()
    for image in images:
        begin = max(image.first, first)
        rows = image.rows[begin - image.first : max(0, end - image.first)]
        if len(rows):
            between.append(image._replace(first=begin - first, rows=rows))
    return between


def end_of_chunk(images: Sequence[ImageRows], first: int, end: int) -> int:
    """Return where a pass over the tokens from `first` on ends that would end at `end`.

    It ends before an image that would not be read whole, or behind it where it begins with it.
    """
    for image in images:
        if image.whole and image.first < end < image.end:
            return image.first if image.first > first else image.end
    return end


class Chain(NamedTuple):
    """Tokens of a text that follow a sequence's committed tokens.

    `wanted`: how many of the last tokens need logits after them. `images`: in place of some tokens'
    embeddings; their indices count from the first of `tokens`.
    """

    cache: SequenceCache
    tokens: Sequence[int]
    wanted: int = 1
    images: Sequence[ImageRows] = ()

    @property
    def rows(self) -> int:
        return len(self.tokens)


class Draws(NamedTuple):
    """How a request's tokens are drawn from its logits alone, with the noise of their positions.

    `seed`, `choice`: of the noise (`noise.py`). `scale`: 1 / temperature, or 0 where nothing is
    drawn and the likeliest token is taken.
    """

    seed: int
    choice: int
    scale: float


class Draft(NamedTuple):
    """A draft tree whose root follows a sequence's committed tokens.

    `base`: how many of its first nodes an earlier pass has run since the last commit. `draws`: how
    the tokens after its nodes are drawn, where the pass may do so; None where it may not.
    """

    cache: SequenceCache
    tree: TokenTree
    base: int = 0
    draws: Draws | None = None

    @property
    def rows(self) -> int:
        return len(self.tree) - self.base

    @property
    def wanted(self) -> int:
        return self.rows


class Block(NamedTuple):
    """`rows` rows behind a sequence's committed tokens, which see these, and one another.

    The rows are at the positions that follow the committed tokens. They are of the token `anchor`
    and of no others. In a layer that is not `bidirectional`, a row sees of the other rows only
    those before it. `wanted`: how many of the last rows need logits after them.
    """

    cache: SequenceCache
    rows: int
    anchor: int
    wanted: int

    @property
    def tokens(self) -> Sequence[int]:
        return [self.anchor] * self.rows


Part = Chain | Draft | Block


@dataclass
class Batch:
    """Parts of different sequences, at most one for each sequence."""

    parts: list[Part] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The number of rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def tokens(self) -> list[int]:
        """The tokens of all rows."""
        return [
            token
            for part in self.parts
            for token in (part.tree.token[part.base :] if isinstance(part, Draft) else part.tokens)
        ]

    @property
    def wanted(self) -> list[int]:
        """The indices of the rows that need logits after them."""
        rows, end = list[int](), 0
        for part in self.parts:
            end += part.rows
            rows += range(end - part.wanted, end)
        return rows


class RankedRows(NamedTuple):
    """The distributions of a pass's rows, at temperature 1.

    `probs`: `[wanted, s]` float32, of the s tokens that are scored, on the model's device.
    `likeliest`: of each row, the likeliest tokens and their probabilities, on the host. `scored`:
    of each row, how many tokens are scored.
    """

    probs: torch.Tensor
    likeliest: Sequence[Row]
    scored: Sequence[int]

    def part(self, rows: slice) -> RankedRows:
        return RankedRows(self.probs[rows], self.likeliest[rows], self.scored[rows])


class Passed(NamedTuple):
    """The results of a pass for one part.

    `logits` `[wanted, vocab]`: after every node that a draft runs, or after a chain's last tokens.
    `hidden` `[rows, layers * d]`: hidden states of all rows, where the model watches layers.
    `best`: the likeliest token of each row of `logits` where the pass finds it, -1 where the logits
    are not finite. `drawn`: the tokens that are drawn as a draft says, where the pass draws them,
    -1 where the host has to. `ranked`: of each row of `logits`, where the pass ranks tokens.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    best: list[int] | None = None
    drawn: list[int] | None = None
    ranked: RankedRows | None = None


class Streamed(ABC):
    """Reads or copies a part of the weights in every pass, from `source`."""

    source: str

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return bytes, bytes per second and seconds by name."""

    @property
    def in_words(self) -> str:
        """How much of the weights a pass reads, how fast, and the peak memory."""
        stats = self.record()
        streamed = stats["streamed_bytes"] / 1e6
        total = streamed + stats["resident_bytes"] / 1e6
        rate, peak_bytes = stats["bytes_per_second"], stats["peak_bytes"]
        speed = f" at {rate / 1e9:.2f} GB/s" if rate else ""
        peak = "unknown" if peak_bytes is None else f"{peak_bytes / 1e6:.0f} MB"
        return (
            f"{streamed:.0f} of {total:.0f} MB a pass from {self.source}{speed}, peak memory {peak}"
        )

    def close(self) -> None:  # noqa: B027
        """Stop reading until the next pass."""


class Model(ABC):
    """Runs the tokens of a batch with `forward`, and returns the logits after them.

    `exact`: whether a row's bits depend on nothing but the tokens that it sees. Then an answer is
    the same with drafts and without, in any batch. Otherwise that is counted, not guaranteed.
    `pool` makes the sequences' caches. `chunk`: tokens of prompts that a pass reads; `mixed_chunk`:
    the same in a step in which answers run. `weights`: the format of the weights that products
    read. `streamed`: reads or copies weights in every pass; None where all are in memory.
    """

    exact: bool
    chunk = CHUNK
    mixed_chunk = MIXED_CHUNK
    weights = "bfloat16"
    weight_bytes = 0  # of weights that the products of a pass read; 0 where that is not known
    mapped_bytes = 0  # of weights in a mapped file, which count as free memory
    streamed: Streamed | None = None
    experts_read = 0.0  # how many active experts a layer had in the last pass, on average

    def __init__(
        self, config: Any, dtype: torch.dtype, device: torch.device, vocab_size: int, pool: Pool
    ) -> None:
        self.config = config
        self.dtype, self.device = dtype, device
        self.vocab_size, self.pool = vocab_size, pool

    @abstractmethod
    def forward(self, batch: Batch) -> list[Passed]:
        """Run all rows of `batch`, and return the results of each part.

        The keys and values of a part's rows lie behind its sequence's committed tokens, and are not
        committed. Raises `OutOfPages` where the pool has no page left.
        """

    @property
    @abstractmethod
    def embedding(self) -> nn.Module:
        """The module from token ids to the first layer's input."""

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The module from hidden states after the final norm to logits."""

    @abstractmethod
    def set_aux_layers(self, layers: Sequence[int]) -> None:
        """Return hidden states after `layers` with every pass from now on.

        Number i, from 1 to the number of layers, means the residual stream after i layers. One more
        means what the head reads, after the final norm. Raises `InvalidInput` for no layers, and
        for layers that the model doesn't have.
        """

    @abstractmethod
    def describe(self) -> str:
        """Say in words what computes the passes, such as `native (amx, int8)`."""

    @property
    def granularity(self) -> int:
        """How many tokens of a prompt are shared at a time (`PrefixCache`)."""
        return self.pool.page

    @property
    def context_length(self) -> int | None:
        """How many positions the model was made for; None where its configuration doesn't say."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else None

    def close(self) -> None:
        """Stop reading weights from disk until the next pass."""
        if self.streamed is not None:
            self.streamed.close()

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise `InvalidInput` for an empty prompt, and for ids that are not in the vocabulary."""
        if not ids:
            raise InvalidInput("an empty prompt: give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidInput(
                f"token id {low if low < 0 else high} is outside the model's "
                f"vocabulary of {self.vocab_size}"
            )


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise `InvalidInput` where hidden states after `layers` can't be read.

    The model has `count` layers. `layers` must name at least one, from 1 to `count + 1`.
    """
    if not layers or not all(1 <= layer <= count + 1 for layer in layers):
        raise InvalidInput(
            f"hidden states after layers {list(layers)}: the model has 1 to "
            f"{count}, and {count + 1} for the final norm"
        )


def split(
    parts: Sequence[Part],
    logits: torch.Tensor,
    hidden: torch.Tensor | None,
    best: list[int] | None,
    drawn: list[int] | None = None,
    ranked: RankedRows | None = None,
) -> list[Passed]:
    """Divide the results of all rows of a pass among its parts.

    `drawn` is for those drafts alone that say how tokens are drawn.
    """
    passed = list[Passed]()
    row = first_wanted = 0
    for part in parts:
        wanted = slice(first_wanted, first_wanted + part.wanted)
        draws = part.draws if isinstance(part, Draft) else None
        passed.append(
            Passed(
                logits[wanted],
                None if hidden is None else hidden[row : row + part.rows],
                None if best is None else best[wanted],
                None if drawn is None or draws is None else drawn[wanted],
                None if ranked is None else ranked.part(wanted),
            )
        )
        row += part.rows
        first_wanted += part.wanted
    return passed
