"""A `Stack` as one program of the native kernels, on the weights of a Hugging Face model.

The equations are those of the modelling code of transformers. The residual stream, products and
rotary angles are in float32 here, where that code rounds each of them to the model's number format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quickbeam.models.angles import AngleTable
from quickbeam.models.beside import CompiledPerLayerInputs
from quickbeam.models.compiled_layer import CompiledLayer
from quickbeam.models.compiled_norm import CompiledNorm, add_norm
from quickbeam.models.experts import CompiledExperts
from quickbeam.models.formats import head_format
from quickbeam.models.linear import NativeLinear
from quickbeam.models.memory import room_for_weights
from quickbeam.models.native import library, operations
from quickbeam.models.native.operands import KVShape, Rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16, FLOAT32, AnyPacked, Packer
from quickbeam.models.pages import PagePool
from quickbeam.models.parameters import Parameters, embedding_of
from quickbeam.models.recurrent import place_states
from quickbeam.models.stack import Attention, Experts, Linear, Stack, Tensor
from quickbeam.models.stack_tensors import linears, rows_of
from quickbeam.models.weight_file import WeightFile


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
    the file where quantised weights are found or written. The embedding stays as it is.
    """

    _per_layer: CompiledPerLayerInputs | None = None

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        pages: PagePool,
        name: str = BFLOAT16,
        kept: WeightFile | None = None,
    ) -> None:
        self._begin(parameters, stack, pages)
        self._table = embedding_of(parameters(stack.embedding), stack.scale)
        name = FLOAT32 if self._float32 else name
        # All weights are in one piece of memory. They follow one another as a pass reads them.
        pack, head_pack = Packer(pages.kernels, name), Packer(pages.kernels, head_format(name))
        *of_layers, _ = linears(stack)
        sizes = [pack.size(self._empty_rows_of(linear), gated) for linear, gated in of_layers]
        total = sum(sizes) + head_pack.size(self._empty_rows_of(stack.head))
        found = None if kept is None else kept.read(total)
        self._weights = room_for_weights(total, pack.dtype) if found is None else found
        used = 0

        def place(linear: Linear, gated: bool, pack: Packer = pack) -> AnyPacked:
            nonlocal used
            weights, first = self._rows_of(linear), used
            used += pack.size(weights, gated)
            room = self._weights[first:used]
            return pack.pack(weights, self._bias_of(linear), gated, room, found is not None)

        def experts(of: Experts) -> CompiledExperts:
            return CompiledExperts(of, place, self._parameter, pages.kernels, self._float32)

        if (of := stack.per_layer) is not None:
            self._per_layer = CompiledPerLayerInputs(of, len(stack.layers), place, parameters)
        self.layers: list[CompiledLayer] = []
        for i, layer in enumerate(stack.layers):
            if kept is not None and found is None:
                kept.progress(f"quantising to {name}", i / len(stack.layers))
            self.layers.append(CompiledLayer(layer, place, self._parameter, experts))
            parameters.release(stack.inside, i)
        self._recur(pages)
        packed = place(stack.head, False, head_pack)
        self._head, self.vocab = NativeLinear(self._kernels, packed), packed.outputs
        if kept is not None and found is None:
            kept.write(self._weights)
        parameters.release(stack.inside, None)

    def _begin(self, parameters: Parameters, stack: Stack, pages: PagePool) -> None:
        """Set what does not depend on where the weights are."""
        self.stack, self._parameter = stack, parameters
        self._kernels, self._shapes, self._offsets = pages.kernels, pages.shapes, pages.offsets
        self._float32 = pages.dtype is torch.float32
        self._norm = CompiledNorm(stack.norm, self._parameter)
        self._positions = None if stack.positions is None else self._parameter(stack.positions)
        self._angles = AngleTable(parameters.config, stack)
        self.watched: tuple[int, ...] = ()  # layers whose hidden states a pass keeps (`Features`)
        self.hidden = torch.empty(0)
        # the likeliest token of each row of the last pass whose logits were wanted; -1 where they
        # are not finite
        self.best: list[int] = []
        self._program: Program | None = None

    def _recur(self, pages: PagePool) -> None:
        """Tell the pool how a state follows from another."""
        found = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        if found:
            pages.recurrences = place_states(found, self.stack)

    def _stored(self, one: Tensor) -> torch.Tensor:
        if one.expert is None:
            return rows_of(one, self._parameter(one.name))
        alone = self._parameter.rows(one.name, one.expert, one.expert + 1)
        return rows_of(replace(one, expert=0), alone)

    def _rows_of(self, linear: Linear) -> list[torch.Tensor]:
        return [self._stored(one) for one in linear.weights]

    def _empty_rows_of(self, linear: Linear) -> list[torch.Tensor]:
        """Return what `_rows_of` does without the numbers."""
        shapes = [(one, self._parameter.shape(one.name)) for one in linear.weights]
        return [rows_of(one, torch.empty(shape, device="meta")) for one, shape in shapes]

    def _bias_of(self, linear: Linear) -> torch.Tensor | None:
        parts = [self._stored(one) for one in linear.biases]
        return torch.cat(parts) if parts else None

    @property
    def embedding(self) -> nn.Module:
        """The module from token ids to what the first layer reads."""
        return self._table

    @property
    def head(self) -> NativeLinear:
        """The module from hidden states after the final norm to logits before scale and cap."""
        return self._head

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
            self._linear(program, layer.recurrent.into, normed, buffers["qkv"])
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
        self._linear(program, layer.qkv, buffers["normed"], buffers["qkv"])
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
            attended, qkv, width = buffers["attended"], buffers["qkv"], of.heads * of.head_dim
            gates = width + 2 * of.kv_heads * of.head_dim
            operations.gate(
                program, attended, qkv, attended, 1, width, gates_of=gates, activation="sigmoid"
            )
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
        more = {"activation": fed.of.activation, "scaling": fed.of.gate_scale}
        self._linear(program, fed.up, buffers[source], buffers["inner"], epilogue, **more)
        if layer.beside is not None and layer.fed_after is not None:
            self._linear(program, fed.down, buffers["inner"], buffers["made"])
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
            self._linear(
                program,
                weight,
                buffers[source],
                buffers["x"],
                library.ADD,
                scaling=factor,
            )
            return
        self._linear(program, weight, buffers[source], buffers["made"])
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
        program.embed(self._table.weight.detach(), target, scale=self.stack.scale)

    def _linear(
        self,
        program: Program,
        weight: Any,
        source: Buffer,
        target: Buffer,
        epilogue: int = library.STORE,
        **more: Any,
    ) -> None:
        """Add a product of a layer to the program."""
        program.linear(weight, source, target, epilogue, **more)

    def _project(self, program: Program, source: Buffer) -> None:
        """Add the product of the head to the program."""
        logits, best = program.given("logits", self.vocab, True), program.given("best", 1)
        program.linear(
            self._head.packed,
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
        given = self._results(rows)
        self._whole().run(rows, given, self._angles.up_to(last_position))
        self.hidden, self.best = given["hidden"], given["best"].tolist()
        return given["logits"]

    def part(self, kinds: Collection[int]) -> Callable[[Rows, int], None]:
        """Return a function that runs a pass of the operations of these kinds alone.

        It takes the time that these operations take (`Program.subset`).
        """
        program = self._whole().subset(kinds)
        return lambda rows, last_position: program.run(
            rows, self._results(rows), self._angles.up_to(last_position)
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the products of a pass read."""
        return self._weights.nbytes
