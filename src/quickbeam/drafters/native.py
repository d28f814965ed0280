"""A drafter's weights and head in the native kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.models.base import Model
from quickbeam.models.compile.compiled_stack import CompiledStack, NativeLinear, ScaledEmbedding
from quickbeam.models.native.library import Kernels, kernels
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import EXACT_FORMATS, Packed, Packer
from quickbeam.models.weights.parameters import Parameters
from quickbeam.models.weights.sources import ParameterSource, dense
from quickbeam.models.weights.tensor_files import TensorFiles


def network_kernels(model: Model, network: Any, embeds: bool = False) -> Kernels | None:
    """Return the native kernels if they can run an EAGLE or block `network` beside `model`.

    Widths have to be even. `embeds`: the kernels read the target's embedding; those of other
    classes may do something else with their rows.
    """
    config = network.config
    sizes = config.hidden_size, config.intermediate_size, config.head_dim, config.target_size
    known = not embeds or type(network.embedding) in (nn.Embedding, ScaledEmbedding)
    plain = known and all(size % 2 == 0 for size in sizes)
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
        """Pack weights stacked one below the other, or with `gated` a gate's and the rest's."""
        name = self._name or rows_format(torch.cat(weights))
        return Packer(self.kernels, name).pack(list(weights), bias, gated)  # type: ignore[no-any-return]

    def head(self, head: Any) -> NativeLinear:
        """Return a head, packed. If the target keeps it quantised, its own rows are used."""
        if not isinstance(head, NativeLinear):
            packed = self(head.weight, bias=head.bias)
        elif head.packed.name in EXACT_FORMATS:
            packed = self(head.packed.rows(), bias=head.packed.bias)
        else:
            packed = head.packed
        return NativeLinear(self.kernels, packed, logits=True)


class DrafterParameters(Parameters):
    """A drafter's own parameters by the names of its stack (`Parameters`).

    `given`: those that are in memory. `stored`: where the others are in `files`. `dtype`: of all.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        given: Mapping[str, torch.Tensor],
        stored: Mapping[str, ParameterSource] = MappingProxyType({}),
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
        stored = self._stored[name]
        return dense(stored.rows(self._files, first, end), stored).to(self.dtype)


class CompiledDrafter(CompiledStack):
    """A `CompiledStack` whose first layer may read `states` besides tokens, and which ends with its
    last norm; the head's place is taken by what joins the input."""

    states: torch.Tensor | None = None

    def angles(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return its rotary angles up to a position."""
        return self._angles.up_to(position)

    def packed(self, linear: Any) -> Packed:
        """Return one of its weights as the kernels have it."""
        return self._packed(linear)  # type: ignore[no-any-return]

    def _project(self, program: Program, source: Buffer) -> None:
        for name in ("logits", "best"):
            program.external(name, 1)

    def _results(self, rows: RowList) -> dict[str, torch.Tensor]:
        states = {} if self.states is None else {"states": self.states}
        return super()._results(rows) | states
