"""Opens a folder's model for `StreamedStack`.

That is a file of its packed weights, which is made once and kept in the cache folder.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quickbeam.cache import Progress
from quickbeam.errors import InvalidInput
from quickbeam.models.checkpoint import Checkpoint, local_folder
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.formats import refuse_place
from quickbeam.models.native import library
from quickbeam.models.packed_file import Plan, make
from quickbeam.models.stack import Linear, Tensor
from quickbeam.models.stack_tensors import experts, linears, names
from quickbeam.models.streamed_pass import Source
from quickbeam.models.streamed_stack import BUFFERS, StreamedStack
from quickbeam.models.weight_file import WeightFile

LAYOUT = 1  # version of the file's layout; each version has files of its own


class Streamed(NamedTuple):
    """What `NativeModel` takes for a streamed model. `source`: where its weights are read from."""

    checkpoint: Checkpoint
    source: Source


def refuse_memory(device: torch.device, dtype: torch.dtype | None, device_map: Any) -> None:
    """Raise `InvalidInput` if no model's weights could be streamed under these settings.

    CUDA needs no more than that `device_map` is None. A CPU also needs bfloat16 (or no `dtype`),
    and the native kernels.
    """
    if device_map is not None:
        raise InvalidInput("memory and device_map don't go together: leave one of them out")
    if device.type == "cuda":
        return
    if device.type != "cpu":
        raise InvalidInput(
            f"memory is for a CPU or CUDA, not for {device.type}: leave memory out, "
            "or take device='cpu'"
        )
    if dtype not in (torch.bfloat16, None):
        raise InvalidInput(
            f"memory goes with bfloat16, not {str(dtype).removeprefix('torch.')}: "
            "leave dtype out, or memory"
        )
    if library.kernels() is None:
        raise InvalidInput(
            f"memory needs the native kernels, and {library.describe()} are used "
            "here; leave memory out"
        )


def open_streamed(
    model: str,
    memory: int | None,
    weights: str,
    progress: Progress | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Streamed | None:
    """Open a model that takes at most `memory` bytes for its weights.

    Returns None if all of them fit. If `memory` is None, all weights but the embedding are held in
    memory, and loading takes no more memory than that. From the second load on, the checkpoint's
    own weights are not read, except for norms and biases.

    The first load packs the weights into a file in the cache folder, segment by segment. Raises
    `InvalidInput` for models that can't be streamed and for too small a memory, `QuickbeamError` if
    the disk has no room.
    """
    report = progress or (lambda stage, fraction: None)
    refuse_place(weights, torch.device("cpu"), torch.bfloat16)
    folder, kernels = local_folder(model, revision), library.kernels()
    checkpoint = _described(folder, model, trust_remote_code)
    assert kernels is not None  # or `refuse_memory` would have told
    stack, table = checkpoint.stack, checkpoint.stack.embedding
    tokens, width = checkpoint.shape(table)
    plan = Plan(kernels, StreamedStack.shapes(checkpoint, stack, weights), (tokens, width))
    large = {part.name for linear, _ in linears(stack) for part in linear.weights} | {table}
    few = sum(2 * math.prod(checkpoint.shape(name)) for name in names(stack) - large)
    path = WeightFile.of(str(folder), None, f"{weights}-segments{LAYOUT}", None).path
    assert path is not None
    limited = memory is not None
    memory = few + (len(plan.segments) + BUFFERS) * plan.piece if memory is None else memory
    source = Source(path, plan, memory, few)
    if limited and memory >= source.whole:
        return None
    if memory < source.least:
        raise InvalidInput(
            f"memory={memory}: {model} needs at least {-(-source.least // 10**6)}MB "
            "to be read while computing"
        )
    rows = [
        _Weight(checkpoint, linear, shape.gated)
        for (linear, _), shape in zip(linears(stack), plan.weights, strict=True)
    ]
    all_rows = _Weight(checkpoint, tensors_of(table), False)
    make(path, plan, rows, all_rows, report, f"packing {weights} weights of {model}, once")
    return Streamed(checkpoint, source)


def _described(folder: Path, model: str, trust_remote_code: bool) -> Checkpoint:
    """Return the parameters of a folder whose passes the native kernels run alone.

    Raises `InvalidInput` for others.
    """
    try:
        if (folder / "adapter_config.json").exists():
            raise InvalidInput(
                "it holds an adapter: merge it into its model (peft's merge_and_unload) and give "
                "that folder, or leave memory out"
            )
        found = Checkpoint(folder, torch.bfloat16)
        if any(experts(found.stack)):
            raise NotDescribed("its experts can't be read from disk")
        if found.stack.per_layer is not None:
            raise NotDescribed("its per-layer inputs stay in memory")
        if found.stack.recurrents:
            raise NotDescribed("it is recurrent or hybrid, whose weights stay in memory")
        if any(not part.plain for linear, _ in linears(found.stack) for part in linear.weights):
            raise NotDescribed("its checkpoint stores weights in another order")
        if trust_remote_code and hasattr(found.config, "auto_map"):
            raise NotDescribed("it comes with code of its own")
    except NotDescribed as error:
        raise InvalidInput(
            "memory is for models that the native kernels run in one call, not "
            f"for {model} ({error}); leave memory out"
        ) from error
    except InvalidInput as error:
        raise InvalidInput(f"can't load {model!r}: {error}") from error
    return found


def tensors_of(name: str) -> Linear:
    """Return the whole of one tensor as a weight."""
    return Linear((Tensor(name),))


class _Weight:
    """Gives rows of a weight that consists of several tensors, or of parts of them.

    They are the two halves of a gated weight, or they are stacked one below the other.
    """

    def __init__(self, tensors: Checkpoint, linear: Linear, gated: bool) -> None:
        self._tensors, self._parts, self._gated = tensors, linear.weights, gated
        self._counts = [tensors.shape(part.name)[0] // part.parts for part in linear.weights]

    def __call__(self, first: int, last: int) -> list[torch.Tensor]:
        if self._gated:
            return [self._rows(i, first, last) for i in range(len(self._parts))]
        found, begin = list[torch.Tensor](), 0
        for i, rows in enumerate(self._counts):
            if first < begin + rows and last > begin:
                found.append(self._rows(i, max(0, first - begin), min(rows, last - begin)))
            begin += rows
        return [torch.cat(found)]

    def _rows(self, i: int, first: int, last: int) -> torch.Tensor:
        part, before = self._parts[i], self._parts[i].part * self._counts[i]
        return self._tensors.rows(part.name, before + first, before + last)
