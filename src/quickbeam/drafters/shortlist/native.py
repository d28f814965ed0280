"""The head over blocks of a layout in the native kernels, and the context's rows beside it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK, plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BFLOAT16, INT8, Packed, Packer


def rows_format(weight: torch.Tensor) -> str:
    """Return the format in which a drafter's head keeps its rows.

    It is 8 bits, as a wrong draft costs only its time, or bfloat16 where some number is not finite.
    """
    extremes = torch.stack(weight.aminmax())  # NaN if any number is; a copy of a head is large
    return INT8 if bool(extremes.isfinite().all()) else BFLOAT16


class Prepared(NamedTuple):
    """What calls that score the same clusters and context share.

    - `blocks`: which blocks of 16 outputs the kernels compute.
    - `tokens`: `[s]` int64, the token of each column.
    - `bias`: `[m]`, of the context's columns, which are the last: -inf for tokens that stand in
      another column, too, else 0. None where no column is the context's.
    """

    blocks: npt.NDArray[np.int64]
    tokens: torch.Tensor
    bias: torch.Tensor | None


class NativeHead:
    """The packed rows of a head in a layout's order: the frequent block, then the clusters.

    Each of these parts is padded to whole blocks of 16 outputs; the padding has -inf for a logit.
    `name`: the format in which rows are kept, of `library.FORMATS`; None: that of `rows_format`.
    """

    def __init__(
        self, weight: torch.Tensor, layout: Layout, kernels: Kernels, name: str | None = None
    ) -> None:
        packer = Packer(kernels, name or rows_format(weight))
        self._frequent_blocks = -(-layout.frequent // BLOCK)
        self._blocks_of_cluster = -(-layout.size // BLOCK)
        tokens = self._padded_tokens(layout)  # -1 for padding
        bias = torch.zeros(len(tokens)).masked_fill_(tokens < 0, -torch.inf)
        tokens.clamp_(min=0)
        self._tokens = tokens.view(-1, BLOCK)
        self._packed = packer.pack([weight.detach()[tokens]], bias)
        self._without_context = self._program(kernels)
        # `score` points the operation on this row at the context's rows
        placeholder = packer.pack([weight[:1]], torch.zeros(1))
        self._with_context = self._program(kernels, placeholder)
        self.only_frequent = self.prepare(torch.empty(0, dtype=torch.int64))

    def _program(self, kernels: Kernels, row: Packed | None = None) -> Program:
        """Return the product with selected blocks, and with a `row` if there is one."""
        program = Program(kernels)
        h = program.external("h", self._packed.inputs)
        logits = program.external("logits", 0, True)
        program.selected_blocks(self._packed, h, logits)
        if row is not None:
            program.linear(row, h, logits)
        return program

    def _padded_tokens(self, layout: Layout) -> torch.Tensor:
        """Return the tokens of all outputs, -1 for padding."""
        frequent = F.pad(layout.order[: layout.frequent], (0, -layout.frequent % BLOCK), value=-1)
        others = layout.order[layout.frequent :]
        clusters = F.pad(others, (0, -len(others) % layout.size), value=-1)
        clusters = clusters.view(layout.clusters, layout.size)
        padding = self._blocks_of_cluster * BLOCK - layout.size
        clusters = F.pad(clusters, (0, padding), value=-1)
        return torch.cat([frequent, clusters.flatten()])

    def prepare(self, clusters: torch.Tensor) -> Prepared:
        """Return what a call needs that scores the frequent tokens and `clusters`, `[k]` int64."""
        in_cluster = torch.arange(self._blocks_of_cluster)
        first = self._frequent_blocks + clusters * self._blocks_of_cluster
        chosen = first[:, None] + in_cluster
        blocks = torch.cat([torch.arange(self._frequent_blocks), chosen.flatten()])
        return Prepared(blocks.numpy(), self._tokens[blocks].flatten(), None)

    def score(
        self, h: torch.Tensor, prepared: Prepared, rows: NativeRows | None = None
    ) -> torch.Tensor:
        """Return the logits `[n, s]` float32 of what was prepared.

        `h`: `[n, d]` bfloat16. `rows`: where the context's rows are, if it has any.
        """
        width = len(prepared.tokens)
        logits = torch.empty(len(h), width)
        if not width:
            return logits
        bias = prepared.bias
        program = self._without_context if bias is None else self._with_context
        program.set(0, target_stride=width)
        if bias is not None and rows is not None:
            program.set(
                1,
                weight=rows.address,
                bias=bias.data_ptr(),
                outputs=len(bias),
                target_stride=width,
                target_offset=len(prepared.blocks) * BLOCK,
            )
        tensors = {"h": h.contiguous(), "logits": logits}
        program.run(plain_rows(len(h)), tensors, blocks=prepared.blocks)
        return logits


class NativeRows:
    """Packed rows of a head that are added one by one: what `ContextTokens` keeps.

    `name`: as in `NativeHead`. One call scores the rows of both, so both need the same format.
    """

    def __init__(self, weight: torch.Tensor, kernels: Kernels, name: str | None = None) -> None:
        packer = Packer(kernels, name or rows_format(weight))
        self._weight = weight.contiguous()
        self._kernels = kernels
        first_row = packer.pack([weight[:1]])
        self._format = first_row.format
        # the data of each block of rows
        self._data = torch.empty(0, first_row.data.numel(), dtype=first_row.data.dtype)

    def write(self, first: int, tokens: torch.Tensor) -> None:
        """Copy the rows of `tokens` to the positions from `first` on."""
        self._reserve(first + len(tokens))
        self._kernels.put(
            self._format,
            self._weight.data_ptr(),
            self._weight.shape[1],
            tokens.data_ptr(),
            len(tokens),
            first,
            self._data.data_ptr(),
        )

    def _reserve(self, rows: int) -> None:
        """Make the memory large enough for so many rows. It at least doubles."""
        if rows <= len(self._data) * BLOCK:
            return
        blocks = max(-(-rows // BLOCK), 2 * len(self._data))
        data = torch.zeros(blocks, self._data.shape[1], dtype=self._data.dtype)
        data[: len(self._data)] = self._data
        self._data = data

    @property
    def address(self) -> int:
        """The address of the rows, which `write` may move."""
        return self._data.data_ptr()
