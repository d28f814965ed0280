"""A forward of Llama's layout in one call of the native kernels.

It runs on the weights of the Hugging Face model. The equations are those of the modelling code of
transformers. The residual stream, products and rotary angles are in float32 here, where that code
rounds each of them to bfloat16. Rotary angles come from the model's own module, so every way of
scaling them that doesn't change with the text's length is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quickbeam.models.formats import head_format
from quickbeam.models.kv import Layer
from quickbeam.models.linear import NativeLinear, bias_of
from quickbeam.models.loading import MOVING
from quickbeam.models.memory import room_for_weights
from quickbeam.models.native import library
from quickbeam.models.native.operands import Rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16, AnyPacked, Packer
from quickbeam.models.pages import PagePool
from quickbeam.models.weight_file import WeightFile

LAYOUTS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ANGLES = 1024  # the table of angles grows by so many positions


class FusedLayer:
    """Packed weights of one decoder layer.

    `place` packs linears into one weight; its second argument says whether the first of them gates
    the second.
    """

    def __init__(self, layer: Any, info: Layer, place: Callable[..., AnyPacked]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.info = info
        self.norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        self.epsilon = float(layer.input_layernorm.variance_epsilon)
        self.qk_norms = (
            (attention.q_norm.weight, attention.k_norm.weight)
            if hasattr(attention, "q_norm")
            else None
        )
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv, self.out = place(qkv), place((attention.o_proj,))
        self.gate_up, self.down = place((mlp.gate_proj, mlp.up_proj), True), place((mlp.down_proj,))


class FusedLlama:
    """Embedding, layers, final norm and head of a causal LM.

    They are taken over from `model`, whose layers are emptied one by one. `name`: the format of the
    weights that products read. `kept`: the file where quantised weights are found or written. The
    embedding stays as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[int, Layer],
        pages: PagePool,
        name: str = BFLOAT16,
        kept: WeightFile | None = None,
    ) -> None:
        base, kernels, shapes, offsets = model.model, pages.kernels, pages.shapes, pages.offsets
        self._table: nn.Embedding = base.embed_tokens
        self._kernels, self._shapes, self._offsets = kernels, shapes, offsets
        self._norm, self._epsilon, self._rotary = (
            base.norm.weight,
            float(base.norm.variance_epsilon),
            base.rotary_emb,
        )
        head, self.heads = (
            model.lm_head,
            base.layers[0].self_attn.q_proj.out_features // shapes[0].key_dim,
        )
        # All weights are in one piece of memory. They follow one another as a pass reads them.
        pack = Packer(kernels, name)
        sizes = [
            pack.size([linear.weight for linear in linears], gated)
            for layer in base.layers
            for linears, gated in self._linears(layer)
        ]
        head_pack = Packer(kernels, head_format(name))
        total = sum(sizes) + head_pack.size([head.weight])
        found = None if kept is None else kept.read(total)
        self._weights = room_for_weights(total, pack.dtype) if found is None else found
        used = 0

        def place(
            linears: Sequence[nn.Linear], gated: bool = False, pack: Packer = pack
        ) -> AnyPacked:
            nonlocal used
            weights = [linear.weight for linear in linears]
            size = pack.size(weights, gated)
            used += size
            return pack.pack(
                weights,
                bias_of(linears),
                gated,
                self._weights[used - size : used],
                found is not None,
            )

        self.layers: list[FusedLayer] = []
        for i in range(len(base.layers)):
            if kept is not None and found is None:
                kept.progress(f"quantising to {name}", i / len(base.layers))
            self.layers.append(FusedLayer(base.layers[i], layers[i], place))
            base.layers[i] = nn.Identity()  # frees the weights that were packed
        self.vocab = head.out_features
        self._head = NativeLinear(kernels, place((head,), False, head_pack))
        if kept is not None and found is None:
            kept.write(self._weights)
        model.lm_head = nn.Identity()  # frees a head that is not the embedding's
        self.watched: tuple[int, ...] = ()  # layers whose hidden states a pass keeps (`Features`)
        self.hidden = torch.empty(0)
        # the likeliest token of each row of the last pass whose logits were wanted; -1 where they
        # are not finite
        self.best: list[int] = []
        self._depth = len(self.layers)  # layers that a pass runs
        self._program: Program | None = None
        self._angles = (torch.empty(0, 1), torch.empty(0, 1))

    @staticmethod
    def _linears(layer: Any) -> list[tuple[tuple[nn.Linear, ...], bool]]:
        attention, mlp = layer.self_attn, layer.mlp
        return [
            ((attention.q_proj, attention.k_proj, attention.v_proj), False),
            ((attention.o_proj,), False),
            ((mlp.gate_proj, mlp.up_proj), True),
            ((mlp.down_proj,), False),
        ]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is of this layout, with nothing but plain linears in it.

        The linears need an even number of inputs, and the MLP the activation SiLU. Other linears
        (adapters, quantised weights) may compute something else. So may a class of the same name
        that came with the model.
        """
        kind = type(model)
        if (
            kind.__name__ not in LAYOUTS
            or not kind.__module__.startswith("transformers.")
            or getattr(model.config, "hidden_act", "") not in ("silu", "swish")
        ):
            return False
        # these angles change with the text's length: `hold_angles` was not called
        if getattr(model.model.rotary_emb, "rope_type", "default") in MOVING:
            return False
        linears = [
            linear
            for layer in model.model.layers
            for group, _ in FusedLlama._linears(layer)
            for linear in group
        ]
        return type(model.model.embed_tokens) is nn.Embedding and all(
            type(linear) is nn.Linear and linear.in_features % 2 == 0
            for linear in [*linears, model.lm_head]
        )

    @property
    def embedding(self) -> nn.Embedding:
        """The module from token ids to what the first layer reads."""
        return self._table

    @property
    def head(self) -> NativeLinear:
        """The module from hidden states after the final norm to logits."""
        return self._head

    def watch(self, layers: Sequence[int]) -> None:
        """Keep the hidden states after `layers` (`hf_attention.Features`) from now on."""
        self.watched, self._program = tuple(layers), None

    def _make(self) -> Program:
        program, width = Program(self._kernels), self._width
        x, normed = program.buffer(width, True), program.buffer(width)
        heads, widest = self.heads, max(shape.key_dim for shape in self._shapes)
        query, attended = program.buffer(heads * widest), program.buffer(heads * widest)
        qkv = program.buffer(max(layer.qkv.outputs for layer in self.layers), True)
        inner = program.buffer(max(layer.down.inputs for layer in self.layers))
        hidden = program.given("hidden", len(self.watched) * width)
        columns = {layer: i * width for i, layer in enumerate(self.watched)}
        self._embed(program, x)
        for i, layer in enumerate(self.layers[: self._depth]):
            info, shape, offset = layer.info, self._shapes[i], self._offsets[i]
            program.norm(x, normed, layer.norms[0], layer.epsilon)
            self._linear(program, layer.qkv, normed, qkv)
            program.heads(qkv, query, heads, shape, offset, layer.qk_norms, layer.epsilon)
            program.attend(
                query,
                attended,
                heads,
                shape,
                offset,
                info.scaling,
                info.window,
                info.softcap,
                info.sinks,
            )
            self._linear(program, layer.out, attended, x, library.ADD)
            program.norm(x, normed, layer.norms[1], layer.epsilon)
            self._linear(program, layer.gate_up, normed, inner, library.GATED)
            self._linear(program, layer.down, inner, x, library.ADD)
            if i + 1 in columns:
                program.copy(x, hidden, column=columns[i + 1])
        if len(self.layers) + 1 in columns:
            program.norm(x, hidden, self._norm, self._epsilon, column=columns[len(self.layers) + 1])
        program.norm(x, normed, self._norm, self._epsilon, gather=True)
        self._project(program, normed)
        return program

    @property
    def _width(self) -> int:
        return self._table.embedding_dim

    def _embed(self, program: Program, target: Buffer) -> None:
        """Add the tokens' embeddings to the program."""
        program.embed(self._table.weight.detach(), target)

    def _linear(
        self,
        program: Program,
        weight: Any,
        source: Buffer,
        target: Buffer,
        epilogue: int = library.STORE,
    ) -> None:
        """Add a product of a layer to the program."""
        program.linear(weight, source, target, epilogue)

    def _project(self, program: Program, source: Buffer) -> None:
        """Add the product of the head to the program."""
        logits, best = program.given("logits", self.vocab, True), program.given("best", 1)
        program.linear(self._head.packed, source, logits, library.BEST, gathered=True, best=best)

    def _angles_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[positions, head_dim / 2]` each, at least up to `position`."""
        if position >= len(self._angles[0]):
            positions = torch.arange((position // ANGLES + 1) * ANGLES)[None]
            cosine, sine = self._rotary(torch.empty(1, dtype=torch.float32), positions)
            half = cosine.shape[-1] // 2
            self._angles = (cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous())
        return self._angles

    def _whole(self) -> Program:
        if self._program is None:
            self._program = self._make()
        return self._program

    def _results(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return empty tensors for what a pass gives."""
        wanted, columns = rows.batch.wanted, len(self.watched) * self._width
        return {
            "logits": torch.empty(wanted, self.vocab),
            "best": torch.empty(wanted, dtype=torch.int64),
            "hidden": torch.empty(rows.rows, columns, dtype=torch.bfloat16),
        }

    def __call__(self, rows: Rows, last_position: int) -> torch.Tensor:
        """Run a pass over `rows`, and return the logits `[wanted, vocab]` float32.

        `last_position`: no row has a larger position. Sets `hidden` and `best`.
        """
        given = self._results(rows)
        self._whole().run(rows, given, self._angles_to(last_position))
        self.hidden, self.best = given["hidden"], given["best"].tolist()
        return given["logits"]

    def part(self, kinds: Collection[int]) -> Callable[[Rows, int], None]:
        """Return a function that runs a pass of the operations of these kinds alone.

        It takes the time that these operations take (`Program.subset`).
        """
        program = self._whole().subset(kinds)
        return lambda rows, last_position: program.run(
            rows, self._results(rows), self._angles_to(last_position)
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the products of a pass read."""
        return self._weights.nbytes
