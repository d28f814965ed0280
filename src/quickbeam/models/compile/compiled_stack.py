"""A `Stack` as one program of the native kernels, on the weights of a checkpoint or a model.

The equations are those of the modelling code of transformers. The residual stream, products and
rotary angles are in float32 here, where that code rounds each of them to the model's number format.
Embedding and head are modules as well, for drafters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.errors import QuickbeamError
from quickbeam.models.compile.compiler import SmallParameters, StackCompiler
from quickbeam.models.compile.experts import add_per_layer_inputs
from quickbeam.models.compile.hidden_input import add_hidden_input
from quickbeam.models.compile.layer import add_layer
from quickbeam.models.memory import memory_for_weights
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels, Recurrence
from quickbeam.models.native.operands import KVShape, RowList, plain_rows
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import (
    BFLOAT16,
    EXACT_FORMATS,
    FLOAT32,
    BlockRows,
    Packed,
    Weight,
    dense_rows,
)
from quickbeam.models.rotary import AngleTable
from quickbeam.models.stack import Stack
from quickbeam.models.weights.disk import WeightsOnDisk
from quickbeam.models.weights.formats import weights_format
from quickbeam.models.weights.packed_file import PackedFile
from quickbeam.models.weights.packing import PackedWeights
from quickbeam.models.weights.parameters import Parameters


class NativeLinear(nn.Module):
    """The product with a packed weight as a module: `[..., in]` to `[..., out]`.

    Both are bfloat16, or float32 for float32 weights; with `logits` the results are float32.

    A row's bits don't depend on the other rows. `forward` raises `ValueError` for another dtype or
    width.
    """

    def __init__(self, kernels: Kernels, packed: Packed, logits: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.inputs, packed.outputs
        self._dtype = packed.dtype
        self._result_dtype = torch.float32 if logits else self._dtype
        self._program = Program(kernels)
        source = self._program.external("x", packed.inputs, self._dtype is torch.float32)
        target = self._program.external("y", packed.outputs, self._result_dtype is torch.float32)
        self._program.linear(packed, source, target)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a product of {x.dtype} {list(x.shape)}: must be {self._dtype} [..., "
                f"{self.in_features}]"
            )
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features, dtype=self._result_dtype)
        rows = x.numel() // self.in_features
        if rows:
            self._program.run(plain_rows(rows), {"x": x, "y": y})
        return y


class ScaledEmbedding(nn.Module):
    """Token ids `[...]` to rows of a `weight` times `embed_scale`, `[..., d]`.

    Rows of a weight in blocks are bfloat16.
    """

    def __init__(self, kernels: Kernels, weight: Weight, scale: float) -> None:
        super().__init__()
        self.weight, self.embed_scale = weight, scale
        self._kernels = kernels

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, BlockRows):
            return F.embedding(ids, self.weight) * self.embed_scale
        rows = dense_rows(self._kernels, self.weight[ids.flatten()]) * self.embed_scale
        return rows.to(torch.bfloat16).view(*ids.shape, rows.shape[-1])


logger = logging.getLogger(__name__)

SMALL = 64 << 20  # bytes of weights that take less time to pack than a file is worth


def kv_shapes(stack: Stack) -> list[KVShape]:
    """Return the shape of what each layer keeps of a token."""
    shapes = list[KVShape]()
    for layer in stack.layers:
        attention = layer.attention
        if attention is None or attention.source is not None:
            shapes.append(KVShape(0, 0, 0))
        else:
            shapes.append(KVShape(attention.kv_heads, attention.head_dim, attention.value_dim))
    return shapes


class CompiledStack:
    """A `Stack` with its weights, which are released from `parameters` as they are packed.

    `pages`: of `kv_shapes`, in the model's number format, bfloat16 or float32. `name`: the format
    of the weights that products read; float32 for a model in float32. Rows are in float32 for these
    weights, else in bfloat16, whatever the pages have.
    `packed_file`: where packed weights are read or written. `memory`: the bytes that weights may
    take, where they are more (`disk.needed_limit`); then each pass reads from `packed_file` what
    memory lacks (`disk`). The embedding stays as it is; `embedding` is the module from token ids to
    its rows times the scale.
    """

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        pages: PagePool,
        name: str = BFLOAT16,
        packed_file: PackedFile | None = None,
        memory: int | None = None,
    ) -> None:
        self.stack, self._parameters = stack, parameters
        self._pages = pages
        self.mapped_bytes = 0  # of weights that are in a mapped file
        self._kernels = pages.kernels
        name = weights_format(name, pages.dtype)
        self._float32 = name == FLOAT32
        self._small_parameters = SmallParameters(parameters, pages.kernels, self._float32)
        self._angles = AngleTable(parameters.config, stack)
        self.aux_layers: tuple[int, ...] = ()  # layers whose hidden states a pass returns
        self.hidden = torch.empty(0)
        # the likeliest token of each row of the last pass whose logits were wanted, -1 where they
        # are not finite; None where they are not known
        self.best: list[int] | None = None
        self._linear_head: NativeLinear | None = None  # made when it is asked for
        self._embedded: Any = None
        self.embedding: nn.Module = nn.Identity()
        if stack.embedding:
            self._embedded = parameters.mapped(stack.embedding)
            self.embedding = ScaledEmbedding(self._kernels, self._embedded, stack.scale)
            if isinstance(self._embedded, torch.Tensor) and stack.scale == 1:
                kind: Any = nn.Embedding
                self.embedding = kind.from_pretrained(self._embedded)
        self._packed = PackedWeights(parameters, stack, pages.kernels, name)
        self.disk: WeightsOnDisk | None = None
        if packed_file is not None and memory is not None:
            self.disk = WeightsOnDisk(packed_file, self._packed, memory)
            self._make_first_program(None, name)
        else:
            self._load(name, packed_file)

    def _load(self, name: str, packed_file: PackedFile | None) -> None:
        """Bring all weights into memory."""
        packed, keeps_bits = self._packed, name in EXACT_FORMATS
        if keeps_bits and packed.size < SMALL:
            packed_file = None
        memory = packed.spread_memory()
        read = None if packed_file is None else packed_file.read(packed.size, memory)
        packed.is_packed = read is not None
        if read is not None:
            packed.memory = read
        else:
            packed.memory = memory_for_weights(packed.size) if memory is None else memory
        self._make_first_program(packed_file if read is None else None, name)
        if packed_file is None:
            return
        if read is not None:
            self.mapped_bytes = packed.size if packed_file.is_mapped else 0
            return
        try:
            packed_file.write(packed.size, lambda: [packed.memory], f"keeping {name} weights")
        except QuickbeamError as error:
            level = logging.INFO if keeps_bits else logging.WARNING
            logger.log(level, "%s; the next load packs them again", error)

    def _make_first_program(self, packed_file: PackedFile | None, name: str) -> None:
        """Make the first program, for which the weights are packed unless they are already."""
        self._head: Any = self._packed(self.stack.head) if self.stack.head.weights else None
        self.vocab = 0 if self._head is None else self._head.outputs
        stage = "packing weights" if name in EXACT_FORMATS else f"quantising to {name}"
        self._program = self._make(packed_file, stage)
        self._parameters.release(self.stack.inside, None)

    @property
    def head(self) -> NativeLinear:
        """The module from hidden states after the final norm to logits before scale and cap."""
        if self._linear_head is None:
            packed = self._head if self.disk is None else self.disk.head()
            self._linear_head = NativeLinear(self._kernels, packed)
        return self._linear_head

    def set_aux_layers(self, layers: Sequence[int]) -> None:
        """Keep the hidden states after `layers` (numbers of `Model.set_aux_layers`) from now on."""
        self.aux_layers = tuple(layers)
        self._program = self._make()

    # --- the program ---

    def _new_compiler(self) -> StackCompiler:
        return StackCompiler(
            Program(self._kernels),
            self.stack,
            self._packed,
            self._small_parameters,
            self._pages,
            self._angles,
            self._width,
            self._float32,
        )

    def _make(self, packed_file: PackedFile | None = None, stage: str = "") -> Program:
        """Return a program. `packed_file.progress` is called with `stage` and how far it is."""
        stack, parameters = self.stack, self._parameters
        self._compiler = c = self._new_compiler()
        program = c.program
        hidden = program.external("hidden", len(self.aux_layers) * c.width, self._float32)

        # embed
        given: Buffer | None = None
        if stack.hidden_input is None:
            given = program.external("embedded", 1)
        first_source = self._add_input(c, given)
        if stack.embedding_norm is not None:
            c.norm(stack.embedding_norm, c.x, c.x)
        if stack.positions is not None:
            positions = parameters.rows(stack.positions, stack.first_position)
            program.embed(positions, c.x, add=True)
        if stack.per_layer is not None:
            add_per_layer_inputs(c, stack.per_layer, parameters.mapped(stack.per_layer.table))

        # layers
        for i, layer in enumerate(stack.layers):
            if packed_file is not None:
                packed_file.progress(stage, i / len(stack.layers))
            add_layer(c, layer, i, first_source if i == 0 else None)
            parameters.release(stack.inside, i)
            if given is not None and i < stack.deepstack:
                program.add_rows(given, c.x, column=(i + 1) * c.width)
            for column in self._hidden_columns(i + 1):
                program.copy(c.x, hidden, column=column)

        # final norm and head
        for column in self._hidden_columns(len(stack.layers) + 1):
            c.norm(stack.norm, c.x, hidden, column=column)
        if self._head is not None:
            c.norm(stack.norm, c.x, c.normalised, gather=True)
            self._project(program, c.normalised)
        if c.recurrences:  # the pages compute committed states by them
            self._pages.recurrences = (Recurrence * len(c.recurrences))(*c.recurrences)
        return program

    def _hidden_columns(self, layer: int) -> list[int]:
        """Return the first columns of the buffer `hidden` for the states after a layer."""
        width = self._width
        return [k * width for k, aux_layer in enumerate(self.aux_layers) if aux_layer == layer]

    @property
    def _width(self) -> int:
        """The width of the residual stream."""
        hidden_input = self.stack.hidden_input
        if hidden_input is None:
            return self._embedding_width
        if hidden_input.join is None:
            return hidden_input.width
        return int(self._packed(hidden_input.join).outputs)

    @property
    def _embedding_width(self) -> int:
        return int(self._parameters.shape(self.stack.embedding)[1])

    def _add_input(self, c: StackCompiler, given: Buffer | None = None) -> Buffer | None:
        """Add the residual stream before the first layer.

        `given`: the addresses of rows in place of embeddings; a drafter has none. Returns the
        buffer that the first attention reads, None where that is the normed stream.
        """
        hidden_input = self.stack.hidden_input
        if hidden_input is None:
            c.program.embed(self._embedded, c.x, scale=self.stack.scale, given=given)
            return None
        token: Buffer | None = None
        if hidden_input.reads_tokens:
            token = c.buffer("token", self._embedding_width, True)
            c.program.embed(self._embedded, token, scale=self.stack.scale)
        states = c.program.external("states", hidden_input.width, True)
        return add_hidden_input(c, hidden_input, token, states)

    def _project(self, program: Program, source: Buffer) -> None:
        logits, best = program.external("logits", self.vocab, True), program.external("best", 1)
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

    def _tensors(self, rows: RowList) -> dict[str, torch.Tensor]:
        """Return the external buffers of a pass, by name; those of its results are empty."""
        wanted, columns = len(rows.wanted), len(self.aux_layers) * self._width
        dtype = torch.float32 if self._float32 else torch.bfloat16
        results = {"hidden": torch.empty(len(rows), columns, dtype=dtype)}
        if self.stack.hidden_input is None:
            results["embedded"] = rows.embedded_addresses
        if self._head is not None:
            results["logits"] = torch.empty(wanted, self.vocab)
            results["best"] = torch.empty(wanted, dtype=torch.int64)
        return results

    def __call__(self, rows: RowList, states: torch.Tensor | None = None) -> torch.Tensor:
        """Run a pass, and return the logits `[wanted, vocab]` float32; nothing without a head.

        `states`: what a drafter's rows read besides tokens, `[rows, width]` float32. Sets `hidden`
        and `best`.
        """
        tensors = self._tensors(rows)
        if states is not None:
            tensors["states"] = states
        angles = self._angles.of(rows)
        if self.disk is None:
            self._program.run(rows, tensors, angles)
            self.best = tensors["best"].tolist() if "best" in tensors else None
        else:
            self.disk.run(self._program, rows, tensors, angles)
        self.hidden = tensors["hidden"]
        return tensors.get("logits", self.hidden[:0])

    @property
    def block_formats(self) -> set[str]:
        """The formats of weights that stay as a file's blocks have them."""
        return self._packed.block_formats

    @property
    def experts_read(self) -> float:
        """How many experts a layer read in the last pass, on average; 0 if none has any."""
        read = [experts.read for experts in self._compiler.experts]
        return sum(read) / len(read) if read else 0.0

    @property
    def layer_bytes(self) -> int:
        """Bytes of weights that the products of a pass read before the head."""
        return self._packed.layer_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the products of a pass read."""
        return self._packed.size
