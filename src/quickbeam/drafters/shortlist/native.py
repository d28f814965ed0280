"""The router (DynaSpec, 2510.13847) and, in the native kernels, the head over blocks of a layout.

The router runs before the drafter's layer has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK, plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BFLOAT16, INT8, Packer

EPS = 1e-6


@dataclass(frozen=True)
class RouterConfig:
    """The shape of a router."""

    hidden_size: int
    embed_size: int
    width: int
    clusters: int


class Router(nn.Module):
    """A two-layer MLP that gives each cluster a score.

    It reads what goes into the drafter's layer: the hidden state of the row before, and the
    embedding of the token. Each of these is RMS-normed, without weights. `forward` is the plain
    product; `NativeRouter` is the same in the native kernels.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.hidden_size + config.embed_size, config.width)
        self.down = nn.Linear(config.width, config.clusters)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the scores `[..., clusters]` as float32 logits.

        `hidden`: `[..., hidden_size]`. `embedded`: `[..., embed_size]`.
        """
        x = normed(hidden, embedded).to(self.up.weight.dtype)
        return self.down(F.silu(self.up(x))).float()  # type: ignore[no-any-return]


def normed(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Return both inputs concatenated, each divided by its root mean square, in float32."""
    parts = [F.rms_norm(part.float(), (part.shape[-1],), eps=EPS) for part in (hidden, embedded)]
    return torch.cat(parts, -1)


class NativeRouter:
    """A router in the native kernels: the packed weights of a `Router`. It is called as that.

    `name`: as of `NativeHead`.
    """

    def __init__(self, router: Router, kernels: Kernels, name: str | None = None) -> None:
        config = router.config
        self._clusters, program = config.clusters, Program(kernels)
        odd = config.width % 2  # an odd width is padded with one unit that stays 0
        up_weight = F.pad(router.up.weight.detach(), (0, 0, 0, odd))
        down_weight = F.pad(router.down.weight.detach(), (0, odd))
        bias = F.pad(router.up.bias.detach(), (0, odd))
        up = Packer(kernels, name or rows_format(up_weight)).pack([up_weight], bias)
        packer = Packer(kernels, name or rows_format(down_weight))
        down = packer.pack([down_weight], router.down.bias)
        hidden = program.external("hidden", config.hidden_size, True)
        embedded = program.external("embedded", config.embed_size, True)
        both = program.buffer(config.hidden_size + config.embed_size)
        middle = program.buffer(up.outputs)
        program.norm(hidden, both, None, EPS)
        program.norm(embedded, both, None, EPS, column=config.hidden_size)
        program.linear(up, both, middle, library.ACTIVATE)
        program.linear(down, middle, program.external("scores", config.clusters, True))
        self._program = program

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the scores `[n, clusters]` float32. See `Router.forward`."""
        scores = torch.empty(len(hidden), self._clusters)
        rows = {"hidden": hidden, "embedded": embedded}
        given = {name: part.float().contiguous() for name, part in rows.items()}
        self._program.run(plain_rows(len(hidden)), given | {"scores": scores})
        return scores


def rows_format(weight: torch.Tensor) -> str:
    """Return the format in which a drafter's head keeps its rows.

    It is 8 bits, as a wrong draft costs only its time, or bfloat16 where some number is not finite.
    """
    ends = torch.stack(weight.aminmax())  # both NaN if any is; a copy of a head would be large
    return INT8 if bool(ends.isfinite().all()) else BFLOAT16


class Prepared(NamedTuple):
    """What calls that score the same part of the vocabulary share."""

    blocks: npt.NDArray[np.int64]  # which blocks of 16 outputs
    tokens: torch.Tensor  # [s] int64, the token of each column
    # [m], of the context's columns, the last: -inf for tokens that a block holds, else 0; or None
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
        frequent, rest = layout.order[: layout.frequent], layout.order[layout.frequent :]
        self._first = -(-layout.frequent // BLOCK)  # blocks of 16 outputs before the clusters'
        self._each = torch.arange(-(-layout.size // BLOCK))  # blocks of a cluster
        clusters = F.pad(rest, (0, -len(rest) % layout.size), value=-1)
        clusters = clusters.view(layout.clusters, layout.size)
        clusters = F.pad(clusters, (0, len(self._each) * BLOCK - layout.size), value=-1)
        frequent = F.pad(frequent, (0, -layout.frequent % BLOCK), value=-1)
        tokens = torch.cat([frequent, clusters.flatten()])
        bias = torch.zeros(len(tokens)).masked_fill_(tokens < 0, -torch.inf)
        tokens.clamp_(min=0)
        self._packed = packer.pack([weight.detach()[tokens]], bias)
        self._tokens = tokens.view(-1, BLOCK)
        self._alone, self._beside = Program(kernels), Program(kernels)
        for program in (self._alone, self._beside):
            h, logits = (
                program.external("h", self._packed.inputs),
                program.external("logits", 0, True),
            )
            program.selected_blocks(self._packed, h, logits)
        # a placeholder: `score` points the operation at the context's rows
        self._beside.linear(packer.pack([weight[:1]], torch.zeros(1)), h, logits)
        # what `prepare` gives for no cluster: the frequent tokens alone
        self.listed = self.prepare(torch.empty(0, dtype=torch.int64))

    def prepare(self, clusters: torch.Tensor) -> Prepared:
        """Return what a call needs that scores the frequent tokens and `clusters`, `[k]` int64."""
        chosen = self._first + clusters[:, None] * len(self._each) + self._each
        blocks = torch.cat([torch.arange(self._first), chosen.flatten()])
        return Prepared(blocks.numpy(), self._tokens[blocks].flatten(), None)

    def score(
        self, h: torch.Tensor, prepared: Prepared, rows: NativeRows | None = None
    ) -> torch.Tensor:
        """Return the logits `[n, s]` float32 of what was prepared.

        `h`: `[n, d]` bfloat16. `rows`: where the context's rows are, if it has any.
        """
        width, bias = len(prepared.tokens), prepared.bias
        columns, logits = len(prepared.blocks) * BLOCK, torch.empty(len(h), width)
        if width:
            program = self._alone if bias is None else self._beside
            program.set(0, target_stride=width)
            if bias is not None and rows is not None:
                given = {"weight": rows.address, "bias": bias.data_ptr(), "outputs": len(bias)}
                program.set(1, target_stride=width, target_offset=columns, **given)
            program.run(
                plain_rows(len(h)), {"h": h.contiguous(), "logits": logits}, blocks=prepared.blocks
            )
        return logits


class NativeRows:
    """Packed rows of a head that are added one by one: what `ContextTokens` keeps.

    `name`: as in `NativeHead`. Both are scored side by side, so they need the same format.
    """

    def __init__(self, weight: torch.Tensor, kernels: Kernels, name: str | None = None) -> None:
        packer = Packer(kernels, name or rows_format(weight))
        self._weight, self._inputs, self._kernels = weight.contiguous(), weight.shape[1], kernels
        one = packer.pack([weight[:1]])
        # the data of each block of rows
        self._format = one.format
        self._data = torch.empty(0, one.data.numel(), dtype=one.data.dtype)

    def write(self, first: int, tokens: torch.Tensor) -> None:
        """Copy the rows of `tokens` into the places from `first` on."""
        if (size := first + len(tokens)) > len(self._data) * BLOCK:
            blocks = max(-(-size // BLOCK), 2 * len(self._data))
            data = torch.zeros(blocks, self._data.shape[1], dtype=self._data.dtype)
            data[: len(self._data)] = self._data
            self._data = data
        places = tokens.data_ptr(), len(tokens), first
        self._kernels.put(
            self._format, self._weight.data_ptr(), self._inputs, *places, self._data.data_ptr()
        )

    @property
    def address(self) -> int:
        """The address of the rows, which `write` may move."""
        return self._data.data_ptr()
