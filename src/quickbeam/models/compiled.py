"""A `Stack` as one program of the native kernels, on the weights of a Hugging Face model.

The equations are those of the modelling code of transformers. The residual stream, products and
rotary angles are in float32 here, where that code rounds each of them to the model's number format.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quickbeam.errors import QuickbeamError
from quickbeam.models.angles import AngleTable
from quickbeam.models.beside import CompiledPerLayerInputs
from quickbeam.models.compiled_layer import CompiledLayer
from quickbeam.models.compiled_norm import CompiledNorm, add_norm
from quickbeam.models.disk import WeightsOnDisk
from quickbeam.models.experts import CompiledExperts
from quickbeam.models.formats import weights_format
from quickbeam.models.linear import NativeLinear, embedding_of
from quickbeam.models.memory import room_for_weights
from quickbeam.models.native import library, operations
from quickbeam.models.native.operands import KVShape, Rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.packing import PackedWeights
from quickbeam.models.pages import PagePool
from quickbeam.models.parameters import Parameters
from quickbeam.models.recurrent import place_states
from quickbeam.models.stack import Attention, Experts, Stack
from quickbeam.models.weight_file import WeightFile

logger = logging.getLogger(__name__)


def kv_shapes(stack: Stack) -> list[KVShape]:
    """Return what each layer keeps of a token."""
    return [
        KVShape(0, 0, 0)
        if of is None or of.source is not None
        else KVShape(of.kv_heads, of.head_dim, of.value_dim)
        for of in (layer.attention for layer in stack.layers)
    ]


class CompiledStack:
    """A `Stack` with its weights, which are released from `parameters` as they are packed.

    `pages`: of `kv_shapes`, in the model's number format, bfloat16 or float32, which all rows have.
    `name`: the format of the weights that products read; float32 for a model in float32. `kept`:
    the file where packed weights are found or written. `memory`: the bytes that weights may take,
    where they are more (`disk.limit`); then each pass reads the rest from `kept` (`disk`). The
    embedding stays as it is.
    """

    _per_layer: CompiledPerLayerInputs | None = None

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        pages: PagePool,
        name: str = BFLOAT16,
        kept: WeightFile | None = None,
        memory: int | None = None,
    ) -> None:
        self.stack, self._parameter = stack, parameters
        self._kernels, self._shapes, self._offsets = pages.kernels, pages.shapes, pages.offsets
        self._float32 = pages.dtype is torch.float32
        self._norm = CompiledNorm(stack.norm, self._parameter)
        self._positions = None if stack.positions is None else self._parameter(stack.positions)
        self._angles = AngleTable(parameters.config, stack)
        self.watched: tuple[int, ...] = ()  # layers whose hidden states a pass keeps (`Features`)
        self.hidden = torch.empty(0)
        # the likeliest token of each row of the last pass whose logits were wanted, -1 where they
        # are not finite; None where they are not known
        self.best: list[int] | None = None
        self._program: Program | None = None
        # in place of what lies on disk, made when they are asked for
        self._table: nn.Module | None = None
        self._linear_head: NativeLinear | None = None
        name = weights_format(name, pages.dtype)
        self._packed = PackedWeights(parameters, stack, pages.kernels, name)
        self.disk: WeightsOnDisk | None = None
        self.layers: list[CompiledLayer] = []
        if kept is not None and memory is not None:
            self.disk = WeightsOnDisk(kept, self._packed, parameters, stack.embedding, memory)
            self._place(None, name)
        else:
            self._embedded = parameters.mapped(stack.embedding)
            self._table = embedding_of(self._kernels, self._embedded, stack.scale)
            self._load(name, kept)
        recurrent = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        if recurrent:  # how a state follows from another
            pages.recurrences = place_states(recurrent, self.stack)

    def _load(self, name: str, kept: WeightFile | None) -> None:
        """Bring all weights into memory."""
        packed = self._packed
        found = None if kept is None else kept.read(packed.size)
        packed.filled = found is not None
        packed.memory = room_for_weights(packed.size, torch.uint8) if found is None else found
        self._place(None if packed.filled else kept, name)
        if kept is not None and not packed.filled:
            try:
                kept.write(packed.size, lambda: [packed.memory], f"keeping {name} weights")
            except QuickbeamError as error:
                logger.warning("%s; the next load packs them again", error)

    def _place(self, kept: WeightFile | None, name: str) -> None:
        """Make the layers and the head, whose weights are packed unless they are already."""

        def experts(of: Experts) -> CompiledExperts:
            return CompiledExperts(of, self._packed, self._parameter, self._kernels, self._float32)

        if (of := self.stack.per_layer) is not None:
            self._per_layer = CompiledPerLayerInputs(
                of, len(self.stack.layers), self._packed, self._parameter
            )
        for i, layer in enumerate(self.stack.layers):
            if kept is not None:
                kept.progress(f"quantising to {name}", i / len(self.stack.layers))
            self.layers.append(CompiledLayer(layer, self._packed, self._parameter, experts))
            self._parameter.release(self.stack.inside, i)
        self._head = self._packed(self.stack.head, False)
        self.vocab = self._head.outputs
        self._parameter.release(self.stack.inside, None)

    @property
    def embedding(self) -> nn.Module:
        """The module from token ids to what the first layer reads."""
        if self.disk is not None and self._table is None:
            self._table = embedding_of(self._kernels, self.disk.table(), self.stack.scale)
        assert self._table is not None
        return self._table

    @property
    def head(self) -> NativeLinear:
        """The module from hidden states after the final norm to logits before scale and cap."""
        if self._linear_head is None:
            packed = self._head if self.disk is None else self.disk.head()
            self._linear_head = NativeLinear(self._kernels, packed)
        return self._linear_head

    def watch(self, layers: Sequence[int]) -> None:
        """Keep the hidden states after `layers` (`hf_attention.Features`) from now on."""
        self.watched, self._program = tuple(layers), None

    # --- the program ---

    def _make(self) -> Program:
        program, width, wide = Program(self._kernels), self._width, self._float32
        recurrent = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        widest = max((of.heads * of.head_dim for of in self.stack.attentions), default=0)
        values = max((of.heads * of.value_dim for of in self.stack.attentions), default=0)
        fed = [
            one for layer in self.layers for one in (layer.fed, layer.experts) if one is not None
        ]
        read = [layer.qkv.outputs for layer in self.layers if layer.layer.attention is not None]
        buffers = {
            "x": program.buffer(width, True),
            "made": program.buffer(width, True),  # what a norm reads before it is added
            "normed": program.buffer(width, wide),
            "beside": program.buffer(width, wide),  # what a feed-forward beside attention reads
            "query": program.buffer(widest, wide),
            "attended": program.buffer(values, wide),
            "qkv": program.buffer(max([*read, *(of.into.outputs for of in recurrent)]), True),
            "inner": program.buffer(max((of.inner for of in fed), default=0), wide),
        }
        for name in ("scores", "routes"):  # of routers
            columns = max((getattr(of, name) for of in fed), default=0)
            buffers |= {name: program.buffer(columns, True)} if columns else {}
        if recurrent:
            columns = max(of.out.inputs for of in recurrent)
            buffers["recurred"] = program.buffer(columns, wide)
        if any(layer.beside is not None for layer in self.layers):
            buffers["both"] = program.buffer(width, True)
        x, last = buffers["x"], len(self.layers) + 1
        hidden = program.given("hidden", len(self.watched) * width, wide)
        columns = {layer: i * width for i, layer in enumerate(self.watched)}
        self._embed(program, x)
        if self._positions is not None:
            operations.learned_positions(program, self._positions, x)
        if self._per_layer is not None:
            self._per_layer.add(program, buffers)
        for i, layer in enumerate(self.layers):
            self._mix(program, buffers, layer, i)
            self._feed(program, buffers, layer)
            if layer.per_layer is not None:
                layer.per_layer.add(program, buffers, i)
            if layer.scalar is not None:
                program.copy(x, x, scale=layer.scalar)
            if i + 1 in columns:
                program.copy(x, hidden, column=columns[i + 1])
        if last in columns:
            self._norm.add(program, x, hidden, column=columns[last])
        self._norm.add(program, x, buffers["normed"], gather=True)
        self._project(program, buffers["normed"])
        return program

    def _mix(
        self, program: Program, buffers: dict[str, Buffer], layer: CompiledLayer, i: int
    ) -> None:
        """Add what mixes tokens, and what reads the residual stream before it is added."""
        x, normed, recurrent = buffers["x"], buffers["normed"], layer.layer.recurrent
        if layer.layer.attention is None and recurrent is None:
            return
        add_norm(program, x, normed, layer.attention_before)
        if layer.layer.parallel and layer.fed_before is not None:
            layer.fed_before.add(program, x, buffers["beside"])
        if layer.layer.attention is not None:
            self._attend(program, buffers, layer, layer.layer.attention, i)
        if layer.recurrent is not None and recurrent is not None:
            operations.product(program, layer.recurrent.into, normed, buffers["qkv"])
            layer.recurrent.add(program, buffers["qkv"], buffers["recurred"])
            after, weight = layer.attention_after, layer.recurrent.out
            factor = layer.layer.residual * recurrent.factor
            self._add(program, buffers, weight, "recurred", after, factor)

    def _attend(
        self,
        program: Program,
        buffers: dict[str, Buffer],
        layer: CompiledLayer,
        of: Attention,
        i: int,
    ) -> None:
        """Add a layer's attention."""
        i = i if of.source is None else of.source
        shape, offset = self._shapes[i], self._offsets[i]
        width = of.heads * of.value_dim
        buffers = buffers | {"attended": replace(buffers["attended"], width=width)}
        operations.product(program, layer.qkv, buffers["normed"], buffers["qkv"])
        angles = 0 if of.rotary is None else self._angles.columns[of.rotary]
        if layer.latent is not None:
            layer.latent.add(program, buffers, shape, offset, angles)
        else:
            scale = None if of.query_scale is None else self._angles.end
            layer.heads(program, buffers, of, shape, offset, angles, scale)
        program.attend(
            buffers["query"],
            buffers["attended"],
            of.heads,
            shape,
            offset,
            of.scaling,
            of.window,
            of.softcap,
            layer.sinks,
        )
        if of.gated:
            attended, qkv, dim = buffers["attended"], buffers["qkv"], of.head_dim
            at = (of.heads + 2 * of.kv_heads) * dim
            how: dict[str, Any] = {"activation": "sigmoid", "one": of.one_gate}
            operations.gate(program, attended, qkv, attended, of.heads, dim, gates_of=at, **how)
        factor = layer.layer.residual * of.factor
        self._add(program, buffers, layer.out, "attended", layer.attention_after, factor)

    def _feed(self, program: Program, buffers: dict[str, Buffer], layer: CompiledLayer) -> None:
        """Add a layer's feed-forward."""
        fed, source, factor = layer.fed, "normed", layer.layer.residual
        if fed is None:
            return
        if layer.layer.parallel and layer.fed_before is not None:
            source = "beside"
        elif not layer.layer.parallel:
            add_norm(program, buffers["x"], buffers["normed"], layer.fed_before)
        if isinstance(fed, CompiledExperts):
            fed.add(program, buffers, buffers[source], buffers["made"])
            self._add_made(program, buffers, layer.fed_after, factor)
            return
        epilogue = library.GATED if fed.of.gated else library.ACTIVATE
        more: dict[str, Any] = {"activation": fed.of.activation, "scaling": fed.of.gate_scale}
        operations.product(program, fed.up, buffers[source], buffers["inner"], epilogue, **more)
        if layer.beside is not None and layer.fed_after is not None:
            operations.product(program, fed.down, buffers["inner"], buffers["made"])
            both = layer.beside.add(program, buffers)
            layer.fed_after.add(program, both, buffers["x"], add=factor)
            return
        self._add(program, buffers, fed.down, "inner", layer.fed_after, factor * fed.of.factor)

    def _add(
        self,
        program: Program,
        buffers: dict[str, Buffer],
        weight: Any,
        source: str,
        after: CompiledNorm | None,
        factor: float,
    ) -> None:
        """Add a product, normed or not, to the residual stream."""
        if after is None:
            operations.product(
                program,
                weight,
                buffers[source],
                buffers["x"],
                library.ADD,
                scaling=factor,
            )
            return
        operations.product(program, weight, buffers[source], buffers["made"])
        self._add_made(program, buffers, after, factor)

    @staticmethod
    def _add_made(
        program: Program, buffers: dict[str, Buffer], after: CompiledNorm | None, factor: float
    ) -> None:
        if after is None:
            program.copy(buffers["made"], buffers["x"], add=True, scale=factor)
        else:
            after.add(program, buffers["made"], buffers["x"], add=factor)

    @property
    def _width(self) -> int:
        return int(self._parameter.shape(self.stack.embedding)[1])

    def _embed(self, program: Program, target: Buffer) -> None:
        """Add the tokens' embeddings to the program."""
        if self.disk is not None:
            wide = self._float32 or self.disk.in_blocks
            given = program.given("embedded", self._width, wide)
            program.copy(given, target, scale=self.stack.scale)
            return
        program.embed(self._embedded, target, scale=self.stack.scale)

    def _project(self, program: Program, source: Buffer) -> None:
        """Add the product of the head to the program."""
        logits, best = program.given("logits", self.vocab, True), program.given("best", 1)
        program.linear(
            self._head,
            source,
            logits,
            library.BEST,
            gathered=True,
            best=best,
            scaling=self.stack.head_scale,
            softcap=self.stack.softcap,
        )

    # --- passes ---

    def _whole(self) -> Program:
        if self._program is None:
            self._program = self._make()
            if self.disk is not None:
                self.disk.attach(self._program)
        return self._program

    def _results(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return empty tensors for what a pass gives."""
        wanted, columns = rows.batch.wanted, len(self.watched) * self._width
        dtype = torch.float32 if self._float32 else torch.bfloat16
        return {
            "logits": torch.empty(wanted, self.vocab),
            "best": torch.empty(wanted, dtype=torch.int64),
            "hidden": torch.empty(rows.rows, columns, dtype=dtype),
        }

    def __call__(self, rows: Rows, last_position: int) -> torch.Tensor:
        """Run a pass over `rows`, and return the logits `[wanted, vocab]` float32.

        `last_position`: no row has a larger position. Sets `hidden` and `best`.
        """
        given, program = self._results(rows), self._whole()
        angles = self._angles.up_to(last_position)
        if self.disk is None:
            program.run(rows, given, angles)
            self.best = given["best"].tolist()
        else:
            self.disk.run(rows, given | {"embedded": self.disk.embedded(rows.tokens)}, angles)
        self.hidden = given["hidden"]
        return given["logits"]

    @property
    def stored(self) -> set[str]:
        """The formats that weights keep as they came in blocks."""
        return self._packed.stored

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the products of a pass read."""
        return self._packed.size
