"""A drafter's layer, head and rotary angles in the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.models.angles import STEP
from quickbeam.models.base import Model
from quickbeam.models.compiled import CompiledStack
from quickbeam.models.linear import NativeLinear
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels, kernels
from quickbeam.models.native.operands import KVShape, Packed, Rows, plain_rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import AnyPacked, Packer, QuantisedPacked


def usable_kernels(model: Model, embedding: nn.Module, sizes: Sequence[int]) -> Kernels | None:
    """Return the native kernels if they can run a drafter of these widths beside `model`.

    Embeddings of other classes than PyTorch's may scale their rows.
    """
    plain = type(embedding) is nn.Embedding and all(size % 2 == 0 for size in sizes)
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
    ) -> AnyPacked:
        """Pack weights that are stacked one below the other, or with `gated` a gate's and the
        rest's."""
        name = self._name or rows_format(torch.cat(weights))
        return Packer(self.kernels, name).pack(list(weights), bias, gated)

    def head(self, head: Any) -> AnyPacked:
        """Pack a head. If the target keeps it quantised, its own rows are used."""
        if not isinstance(head, NativeLinear):
            return self(head.weight, bias=head.bias)
        if isinstance(head.packed, QuantisedPacked):
            return head.packed
        return self(head.packed.rows(), bias=head.packed.bias)


class NativeHead:
    """A head in the native kernels: `[n, d]` to `[n, vocab]` float32."""

    def __init__(self, packed: AnyPacked, kernels: Kernels) -> None:
        self._program, self.outputs = Program(kernels), packed.outputs
        self._dtype = packed.dtype if isinstance(packed, Packed) else torch.bfloat16
        wide = self._dtype is torch.float32
        source = self._program.given("feature", packed.inputs, wide)
        self._program.linear(packed, source, self._program.given("logits", packed.outputs, True))

    def __call__(self, feature: torch.Tensor) -> torch.Tensor:
        logits = torch.empty(len(feature), self.outputs)
        rows = plain_rows(len(feature))
        feature = feature.to(self._dtype).contiguous()
        self._program.run(rows, {"feature": feature, "logits": logits})
        return logits


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
        qkv: AnyPacked,
        out: AnyPacked,
        up: AnyPacked,
        down: AnyPacked,
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


class Angles:
    """Cosines and sines of a rotary module by position, as far as they were needed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._table = (torch.empty(0, 1), torch.empty(0, 1))

    def up_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both, `[positions, half]` each, at least up to `position`."""
        if position >= len(self._table[0]):
            positions = torch.arange((position // STEP + 1) * STEP)
            both = self._module(torch.empty(1), positions)
            cosine, sine = (part[:, : part.shape[1] // 2].contiguous() for part in both)
            self._table = cosine, sine
        return self._table
