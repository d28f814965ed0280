"""Feed-forwards of experts on the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from quickbeam.models.native import library, operations
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16, FLOAT32, AnyPacked, Packer
from quickbeam.models.stack import Experts, Linear, Routing
from quickbeam.models.stack_tensors import rows_of

Parameter = Callable[[str], torch.Tensor]


class CompiledExperts:
    """A feed-forward of experts: packed weights, and the router's.

    `place` packs a `Linear`. `wide`: rows are float32. `inner`, `scores` and `routes` are the
    widths of the buffers that a pass needs.
    """

    def __init__(
        self,
        of: Experts,
        place: Callable[[Linear, bool], Any],
        parameter: Parameter,
        kernels: Kernels,
        wide: bool,
    ) -> None:
        self._of, routing = of, of.routing
        self._experts = [(place(one.up, True), place(one.down, False)) for one in of.all]
        self._router = _router(of, parameter, Packer(kernels, FLOAT32 if wide else BFLOAT16))
        inner = self._experts[0][1].inputs
        shared = 0 if of.shared is None else self._experts[-1][1].inputs
        self.inner, self.scores = routing.top * inner + shared, self._router.outputs
        self.routes = 2 * routing.top
        self._table = (library.Expert * len(self._experts))(
            *(
                library.Expert(*map(_address, (up.data, down.data, up.bias, down.bias)))
                for up, down in self._experts
            )
        )
        self._correction = (
            None
            if routing.correction is None
            else parameter(routing.correction).detach().float().flatten().contiguous()
        )
        self._scale = (
            None
            if routing.scale is None
            else parameter(routing.scale).detach().float().flatten().contiguous()
        )
        self._struct = library.Experts(
            expert=ctypes.addressof(self._table),
            correction=_address(self._correction),
            scale=_address(self._scale),
            count=len(of.chosen),
            inner=inner,
            shared=shared,
            gated=of.shared_gate is not None,
            down_format=self._experts[0][1].format,
            **_numbers(routing),
        )

    @property
    def count(self) -> int:
        """How many experts there are to choose from."""
        return len(self._of.chosen)

    @property
    def bytes(self) -> int:
        """Bytes of the weights of one of them."""
        return sum(int(part.data.nbytes) for part in self._experts[0])

    @property
    def read(self) -> int:
        """How many of them the last pass read."""
        return int(self._struct.read)

    def add(
        self,
        program: Program,
        buffers: dict[str, Buffer],
        source: Buffer,
        target: Buffer,
        router: Buffer | None = None,
    ) -> None:
        """Add the feed-forward to a program. `target`: float32, which it overwrites. `router`: what
        the router reads, the source if None."""
        program.linear(self._router, source if router is None else router, buffers["scores"])
        operations.experts(
            program,
            self._struct,
            self._experts[0][0].format,
            source,
            buffers["scores"],
            buffers["routes"],
            buffers["inner"],
            target,
            activation=self._of.chosen[0].activation,
            limit=self._of.chosen[0].limit,
            slope=self._of.chosen[0].slope,
        )


def _router(of: Experts, parameter: Parameter, pack: Packer) -> AnyPacked:
    weights, biases = (
        [rows_of(one, parameter(one.name)) for one in parts]
        for parts in (of.scoring.weights, of.scoring.biases)
    )
    return pack.pack([torch.cat(weights)], torch.cat(biases) if biases else None)


def _numbers(routing: Routing) -> dict[str, Any]:
    """Return the fields that the structure `Experts` of the kernels has as well."""
    same = ("top", "groups", "top_groups", "best_of_group", "renormalised")
    found = {name: getattr(routing, name) for name in (*same, "plus", "least", "factor", "jitter")}
    return found | {"scores": library.SCORES.index(routing.scores)}


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
