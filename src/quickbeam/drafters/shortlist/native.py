"""The router and the head over blocks of a layout, in the native kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quickbeam.drafters.shortlist.head import Scores
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import EPS, Router
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK, Packed, plain_rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16, INT8, Packer


class NativeRouter:
    """A router in the native kernels: the packed weights of a `Router`.

    `clusters`: how many clusters it scores.
    """

    def __init__(self, router: Router, kernels: Kernels) -> None:
        self.config, self.clusters = router.config, router.config.clusters
        odd = self.config.width % 2  # an odd width is padded with one unit that stays 0
        up, bias, down = (
            router.up.weight.detach(),
            router.up.bias.detach(),
            router.down.weight.detach(),
        )
        self._up = Packed(kernels, [F.pad(up, (0, 0, 0, odd))], F.pad(bias, (0, odd)))
        self._down = Packed(kernels, [F.pad(down, (0, odd))], router.down.bias)

    def add(self, program: Program, hidden: Buffer, embedded: Buffer, target: Buffer) -> None:
        """Add the router's operations on the wanted rows to `program`; `target` gets the scores."""
        config = self.config
        both, middle = (
            program.buffer(config.hidden_size + config.embed_size),
            program.buffer(self._up.outputs),
        )
        program.norm(hidden, both, None, EPS, gather=True)
        program.norm(embedded, both, None, EPS, column=config.hidden_size, gather=True)
        program.linear(self._up, both, middle, library.ACTIVATE, gathered=True)
        program.linear(self._down, middle, target, gathered=True)


def rows_format(weight: torch.Tensor) -> str:
    """Return the format in which a drafter's head keeps its rows.

    It is 8 bits, as a wrong draft costs only its time, or bfloat16 where some number is not finite.
    """
    return INT8 if bool(weight.isfinite().all()) else BFLOAT16


class Prepared(NamedTuple):
    """What calls that score the same part of the vocabulary share."""

    blocks: npt.NDArray[np.int64]  # which blocks of 16 outputs
    tokens: torch.Tensor  # [s] int64, the token of each column
    # [m], for the context's columns, which follow the others: -inf for tokens that a block holds
    # too, else 0; None without such columns
    bias: torch.Tensor | None


class NativeBlocks:
    """The packed rows of a head in a layout's order: the frequent block, then the clusters.

    Each of these parts is padded to whole blocks of 16 outputs; the padding has -inf for a logit.
    `name`: the format in which rows are kept, one of `library.FORMATS`; None: that of
    `rows_format`.
    """

    def __init__(
        self, weight: torch.Tensor, layout: Layout, kernels: Kernels, name: str | None = None
    ) -> None:
        packer = Packer(kernels, name or rows_format(weight))
        parts = [
            layout.order[: layout.frequent],
            *(layout.tokens(cluster) for cluster in range(layout.clusters)),
        ]
        sizes = [-(-len(part) // BLOCK) * BLOCK for part in parts]
        tokens = torch.full((sum(sizes),), -1, dtype=torch.int64)
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            tokens[at : at + len(part)] = part
            at += size
        rows = weight.detach()[tokens.clamp(min=0)]
        bias = torch.zeros(len(tokens)).masked_fill_(tokens < 0, -torch.inf)
        self._packed = packer.pack([rows], bias)
        # [blocks, 16], in numpy, whose small operations cost a fifth of torch's
        self._tokens = tokens.clamp_(min=0).view(-1, BLOCK).numpy()
        self._count = np.array(sizes, dtype=np.int64) // BLOCK  # by part: how many blocks
        self._first = self._count.cumsum() - self._count
        self._alone, self._beside = Program(kernels), Program(kernels)
        for program in (self._alone, self._beside):
            h, logits = program.given("h", self._packed.inputs), program.given("logits", 0, True)
            program.chosen(self._packed, h, logits)
        # a placeholder: `score` points the operation at the context's rows
        one = packer.pack([weight[:1]], torch.zeros(1))
        self._beside.linear(one, h, logits)
        nothing = torch.empty(0, dtype=torch.int64)
        self._without_clusters = self._blocks_of(nothing)

    def find(self, clusters: torch.Tensor) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Return the blocks of the frequent tokens and of `clusters`, and the tokens of their
        outputs.

        The tokens are `[s]` int64. Clusters below 0 are padding and have no block.
        """
        return self._blocks_of(clusters) if len(clusters) else self._without_clusters

    def _blocks_of(self, clusters: torch.Tensor) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Return the blocks of the frequent tokens and of `clusters`, and the tokens of their
        columns."""
        chosen = clusters.numpy()
        parts = np.concatenate([[0], chosen[chosen >= 0] + 1])
        count = self._count[parts]
        before = count.cumsum() - count  # how many blocks the parts before each have
        blocks = np.repeat(self._first[parts] - before, count) + np.arange(count.sum())
        return blocks, torch.from_numpy(self._tokens[blocks].reshape(-1))

    def __call__(self, h: torch.Tensor, clusters: torch.Tensor) -> Scores:
        blocks, tokens = self.find(clusters)
        return Scores(self.score(h, Prepared(blocks, tokens, None)), tokens)

    def score(
        self, h: torch.Tensor, prepared: Prepared, rows: NativeRows | None = None
    ) -> torch.Tensor:
        """Return the logits `[n, s]` float32 of what was prepared.

        `h`: `[n, d]` bfloat16. `rows`: where the context's rows are, if it has any.
        """
        # `shape` tells a tensor's length sooner than `len`, which asks for overrides first
        rows_of_h, width = h.shape[0], prepared.tokens.shape[0]
        columns, logits = len(prepared.blocks) * BLOCK, torch.empty(rows_of_h, width)
        if width:
            program = self._beside if prepared.bias is not None else self._alone
            program.set(0, target_stride=width)
            if prepared.bias is not None and rows is not None:
                places = {"weight": rows.address, "bias": prepared.bias.data_ptr()}
                program.set(
                    1,
                    outputs=prepared.bias.shape[0],
                    target_stride=width,
                    target_offset=columns,
                    **places,
                )
            program.run(
                plain_rows(rows_of_h),
                {"h": h.contiguous(), "logits": logits},
                blocks=prepared.blocks,
            )
        return logits


class NativeRows:
    """Packed rows of a head that are added one by one: what `ContextTokens` keeps.

    `name`: as in `NativeBlocks`. Both are scored side by side, so they need the same format.
    """

    def __init__(self, weight: torch.Tensor, kernels: Kernels, name: str | None = None) -> None:
        packer = Packer(kernels, name or rows_format(weight))
        self._weight, self._inputs, self._kernels = weight.contiguous(), weight.shape[1], kernels
        one = packer.pack([weight[:1]])
        # the data of each block of rows
        self._format, self._data = (
            one.format,
            torch.empty(0, one.data.numel(), dtype=one.data.dtype),
        )
        self._program = Program(kernels)
        self._program.linear(
            one, self._program.given("h", self._inputs), self._program.given("logits", 0, True)
        )

    def reserve(self, size: int) -> None:
        """Make room for `size` rows, keeping those that are there."""
        if size > len(self._data) * BLOCK:
            data = torch.zeros(-(-size // BLOCK), self._data.shape[1], dtype=self._data.dtype)
            data[: len(self._data)] = self._data
            self._data = data

    def write(self, first: int, tokens: torch.Tensor) -> None:
        """Copy the rows of `tokens` into the places from `first` on."""
        places = tokens.data_ptr(), len(tokens), first
        self._kernels.put(
            self._format, self._weight.data_ptr(), self._inputs, *places, self._data.data_ptr()
        )

    @property
    def address(self) -> int:
        """The address of the rows. `reserve` may move them."""
        return self._data.data_ptr()

    def logits(self, h: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits `[n, count]` float32 of `h` `[n, d]` for the first `count` rows."""
        logits = torch.empty(len(h), count)
        if count:
            self._program.set(0, weight=self.address, outputs=count, target_stride=count)
            self._program.run(plain_rows(len(h)), {"h": h.contiguous(), "logits": logits})
        return logits
