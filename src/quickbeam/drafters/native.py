"""A drafter's layer, head and rotary angles in the native kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.models.angles import STEP
from quickbeam.models.base import Model
from quickbeam.models.compiled import CompiledStack, NativeLinear
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels, kernels
from quickbeam.models.native.operands import KVShape, RowList, Rows, plain_rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import WHOLE, Packed, Packer
from quickbeam.models.pages import PagePool
from quickbeam.models.stack_tensors import Parameters
from quickbeam.models.stored import Stored
from quickbeam.models.tensor_files import TensorFiles


def usable_kernels(model: Model, network: Any) -> Kernels | None:
    """Return the native kernels if they can run an EAGLE or block `network` beside `model`.

    Widths have to be even. Embeddings of other classes than PyTorch's may scale their rows.
    """
    config = network.config
    sizes = config.hidden_size, config.intermediate_size, config.head_dim, config.target_size
    plain = type(network.embedding) is nn.Embedding and all(size % 2 == 0 for size in sizes)
    fits = plain and model.device.type == "cpu" and model.dtype is torch.bfloat16
    return kernels() if fits else None


class NativePacker:
    """Packs a drafter's weights: in 8 bits, as a wrong draft costs only its time.

    `name`: another format. A weight with numbers that are not finite stays bfloat16.
    """

    def __init__(self, kernels: Kernels, name: str | None = None) -> None:
        self.kernels, self._name = kernels, name

    def __call__(
        self, *weights: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
    ) -> Packed:
        """Pack weights that are stacked one below the other, or with `gated` a gate's and the
        rest's."""
        name = self._name or rows_format(torch.cat(weights))
        packed: Packed = Packer(self.kernels, name).pack(list(weights), bias, gated)
        return packed

    def head(self, head: Any) -> Packed:
        """Pack a head. If the target keeps it quantised, its own rows are used."""
        if not isinstance(head, NativeLinear):
            return self(head.weight, bias=head.bias)
        if head.packed.name not in WHOLE:
            return head.packed
        return self(head.packed.rows(), bias=head.packed.bias)


class DrafterParameters(Parameters):
    """A drafter's own parameters by the names of its stack (`Parameters`).

    `given`: those that are in memory. `stored`: where the others are in `files`. `dtype`: what all
    are given in.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        given: Mapping[str, torch.Tensor],
        stored: Mapping[str, Stored] = MappingProxyType({}),
        files: TensorFiles | None = None,
    ) -> None:
        self.config, self.dtype, self.given = config, dtype, given
        self._stored, self._files = stored, files

    def shape(self, name: str) -> list[int]:
        if name in self.given:
            return list(self.given[name].shape)
        assert self._files is not None
        return self._stored[name].shape(self._files)

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        if name in self.given:
            return self.given[name][first:last].to(self.dtype)
        assert self._files is not None
        end = self.shape(name)[0] if last is None else last
        return self._stored[name].rows(self._files, first, end).to(self.dtype)

    @property
    def finite(self) -> bool:
        """Whether all numbers that are stored are finite."""
        return all(bool(self(name).isfinite().all()) for name in self._stored)


class NativeHead:
    """A head in the native kernels: `[n, d]` to `[n, vocab]` float32."""

    def __init__(self, packed: Packed, kernels: Kernels) -> None:
        self._program, self.outputs = Program(kernels), packed.outputs
        self._dtype = packed.dtype
        wide = self._dtype is torch.float32
        source = self._program.given("feature", packed.inputs, wide)
        self._program.linear(packed, source, self._program.given("logits", packed.outputs, True))

    def __call__(self, feature: torch.Tensor) -> torch.Tensor:
        logits = torch.empty(len(feature), self.outputs)
        rows = plain_rows(len(feature))
        feature = feature.to(self._dtype).contiguous()
        self._program.run(rows, {"feature": feature, "logits": logits})
        return logits


class NativePasses:
    """What native passes of EAGLE's and block drafters share: packer, pages, angles and the head.

    `layers`: how many the network has. `name`: as of `NativePacker`.
    """

    def __init__(self, network: Any, layers: int, kernels: Kernels, name: str | None) -> None:
        self.network, self.kernels, self.pack = network, kernels, NativePacker(kernels, name)
        config = network.config
        self.shape = KVShape(config.kv_heads, config.head_dim, config.head_dim)
        self.pool = PagePool([self.shape] * layers, kernels)
        self._angles = (torch.empty(0, 1), torch.empty(0, 1))  # cosines and sines, by position

    @cached_property
    def logits(self) -> NativeHead:
        """The whole head, packed where it is needed: shortlists have rows of their own."""
        return NativeHead(self.pack.head(self.network.head), self.kernels)

    def run_program(self, program: Program, rows: RowList, given: dict[str, torch.Tensor]) -> None:
        """Run a program over rows, with the angles of their positions."""
        if (last := max(rows.positions)) >= len(self._angles[0]):
            self._angles = self.network.angles.at(torch.arange((last // STEP + 1) * STEP))
        program.run(rows.rows(), given, self._angles)


class CompiledDrafter(CompiledStack):
    """A `CompiledStack` whose first layer reads `states` besides tokens, and which ends with its
    last norm; the head's place is taken by what joins the input."""

    states: torch.Tensor

    def _project(self, program: Program, source: Buffer) -> None:
        for name in ("logits", "best"):
            program.given(name, 1)

    def _results(self, rows: Rows) -> dict[str, torch.Tensor]:
        return super()._results(rows) | {"states": self.states}


class NativeLayer:
    """A Llama-like layer's packed weights: attention, then a gated feed-forward.

    - `qkv`: queries, keys and values one below the other. `up`: gated.
    - `norm`: before the feed-forward. `head_norms`: of queries and keys, or none.
    - `offset`: of the layer in a page.
    """

    def __init__(
        self,
        qkv: Packed,
        out: Packed,
        up: Packed,
        down: Packed,
        norm: Any,
        shape: KVShape,
        offset: int = 0,
        head_norms: Sequence[Any] | None = None,
    ) -> None:
        self.qkv, self._out, self._up, self._down = qkv, out, up, down
        self._norm, self._shape, self._offset = norm, shape, offset
        self._norms = None if head_norms is None else [one.weight for one in head_norms]
        self._epsilon = 0.0 if head_norms is None else head_norms[0].eps
        self.heads = out.inputs // shape.value_dim

    def project(self, program: Program, source: Buffer) -> Buffer:
        """Add the products of normed rows; keys and values are written. Return the queries."""
        qkv = program.buffer(self.qkv.outputs, True)
        program.linear(self.qkv, source, qkv)
        return self.take_apart(program, qkv, self.heads)

    def take_apart(self, program: Program, qkv: Buffer, heads: int) -> Buffer:
        """Write keys and values that stand behind `heads` queries, and return the queries."""
        query = program.buffer(self._out.inputs)
        program.heads(
            qkv, query, heads, self._shape, self._offset, norms=self._norms, epsilon=self._epsilon
        )
        return query

    def finish(self, program: Program, query: Buffer, residual: Buffer) -> None:
        """Add attention and feed-forward, both of which are added to `residual`."""
        attended, normed = program.buffer(self._out.inputs), program.buffer(residual.width)
        inner, shape = program.buffer(self._down.inputs), self._shape
        scaling = shape.key_dim**-0.5
        program.attend(query, attended, self.heads, shape, self._offset, scaling)
        program.linear(self._out, attended, residual, library.ADD)
        add_norm(program, residual, normed, self._norm)
        program.linear(self._up, normed, inner, library.GATED)
        program.linear(self._down, inner, residual, library.ADD)


def add_norm(program: Program, source: Buffer, target: Buffer, norm: Any, **more: Any) -> None:
    """Add a module's RMS norm to a program. `more`: as of `Program.norm`."""
    program.norm(source, target, norm.weight, norm.eps, **more)
