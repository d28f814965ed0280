"""The back end over the native kernels: the same bits whatever else is in the pass.

A row's results depend only on the tokens that the row sees, however those were computed. So an
answer is the same with drafts and without, alone and in a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from quickbeam.models.base import (
    CHUNK,
    STREAMED_CHUNK,
    Batch,
    Block,
    Draft,
    Model,
    Passed,
    check_layers,
    inference,
    split,
)
from quickbeam.models.compile.compiled_stack import CompiledStack, kv_shapes
from quickbeam.models.compile.recurrent import state_shape
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.pages import PagedStore, PagePool
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.stack import Stack
from quickbeam.models.weights.packed_file import PackedFile
from quickbeam.models.weights.parameters import Parameters, linears

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float32)


def kernels_on(
    device: torch.device,
    dtype: torch.dtype | None,
    progress: Callable[[str], None] = logger.info,
) -> Kernels | None:
    """Return the native kernels where a model may need them: to run, or to read its weights.

    `dtype`: None stands for the checkpoint's own. `progress`: as of `library.kernels`. Raises
    `InvalidInput` where the environment asks for kernels that can't be had.
    """
    if dtype is torch.float16 or (dtype is torch.float32 and device.type != "cpu"):
        return None
    return library.kernels(progress)


def no_kernels_for(kernels: Kernels | None, device: torch.device, dtype: torch.dtype) -> str:
    """Say why `kernels` can't run a dtype on a device; empty where they can."""
    if device.type != "cpu" or dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} on {device.type}"
    if kernels is None:
        return library.describe().removeprefix("PyTorch's (").removesuffix(")")
    return ""


def kernels_for(
    kernels: Kernels | None, parameters: Parameters, stack: Stack, device: torch.device
) -> tuple[Kernels | None, str]:
    """Return `kernels` if they can run a model; else None and the reason."""
    reason = no_kernels_for(kernels, device, parameters.dtype)
    if not reason and parameters.dtype is torch.bfloat16:
        reason = _odd_inputs(parameters, stack)
    return (None if reason else kernels), reason


def _odd_inputs(parameters: Parameters, stack: Stack) -> str:
    """Name a weight with an odd number of inputs; empty where there is none."""
    for linear, _ in linears(stack):
        for rows in linear.weights:
            inputs = parameters.shape(rows.name)[-2 if rows.transposed else -1]
            if inputs % 2:
                return f"{rows.name} has an odd number of inputs"
    return ""


def list_rows(batch: Batch) -> RowList:
    """Return the rows of a batch as the kernels take them. Raises `OutOfPages`."""
    rows = RowList()
    for part in batch.parts:
        assert isinstance(part.cache, PagedStore)
        if isinstance(part, Draft):
            part.cache.add_tree(rows, part.tree, part.base)
        elif isinstance(part, Block):
            part.cache.add_block(rows, part.rows)
        else:
            part.cache.add_chain(rows, part.tokens, range(part.rows - part.wanted, part.rows))
    return rows


class NativeModel(Model):
    """Runs a model that is described by `stack`, with its `parameters`.

    `weights`: the format of all linear layers' weights, `bfloat16` (as they come), `int8` or
    `int4`. With `int4`, the head has 8 bits. `packed_file` and `memory`: as of `CompiledStack`.
    `pages`: those of another model of the same stack, whose sequences this one runs; None makes
    some of its own.
    """

    exact = True

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        kernels: Kernels,
        *,
        chunk: int = CHUNK,
        weights: str = BFLOAT16,
        packed_file: PackedFile | None = None,
        memory: int | None = None,
        pages: PagePool | None = None,
    ) -> None:
        self.stack = stack
        self.parameters = parameters
        self.weights, self.chunk = weights, chunk
        vocab_size, dtype = parameters.shape(stack.head.weights[0].name)[0], parameters.dtype
        with torch.inference_mode():
            if pages is None:
                pages = PagePool(kv_shapes(stack), kernels, None, dtype, state_shape(stack))
            super().__init__(parameters.config, dtype, torch.device("cpu"), vocab_size, pages)
            self._compiled = CompiledStack(parameters, stack, pages, weights, packed_file, memory)
            if self._compiled.disk is not None:
                self.streamed = self._compiled.disk
                self.chunk, self.mixed_chunk = STREAMED_CHUNK, STREAMED_CHUNK // 4
        self.weight_bytes, self._kernels = self._compiled.weight_bytes, kernels
        self.layer_bytes = self._compiled.layer_bytes
        self.mapped_bytes = self._compiled.mapped_bytes

    @inference
    def forward(self, batch: Batch) -> list[Passed]:
        compiled = self._compiled
        logits = compiled(list_rows(batch))
        self.experts_read = compiled.experts_read
        hidden = compiled.hidden if compiled.aux_layers else None
        return split(batch.parts, logits, hidden, compiled.best)

    @inference
    def features(self, batch: Batch) -> list[torch.Tensor]:
        """Run all rows of `batch` without the head, and return what it would read, `[rows, d]`.

        `aux_layers` must end with the final norm (`set_aux_layers`).
        """
        rows = list_rows(batch)
        rows.wanted = []
        compiled = self._compiled
        compiled(rows)
        self.experts_read = compiled.experts_read
        width = compiled.hidden.shape[1] // len(compiled.aux_layers)
        features = compiled.hidden[:, -width:]
        return list(features.split_with_sizes([part.rows for part in batch.parts]))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what a pass makes of the head's product `[n, s]`: scaled and capped logits."""
        stack = self.stack
        logits = logits * stack.head_scale
        if stack.softcap is not None:
            logits = torch.tanh(logits / stack.softcap) * stack.softcap
        return logits

    @property
    def embedding(self) -> nn.Module:
        return self._compiled.embedding

    @property
    def head(self) -> nn.Module:
        return self._compiled.head

    def set_aux_layers(self, layers: Sequence[int]) -> None:
        check_layers(layers, self.config.num_hidden_layers)
        self._compiled.set_aux_layers(layers)

    def describe(self) -> str:
        formats = sorted(self._compiled.block_formats)
        if self.weights != BFLOAT16:
            formats.append(self.weights)
        return f"native ({', '.join([self._kernels.name, *formats])})"
