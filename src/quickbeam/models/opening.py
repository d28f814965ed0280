"""Opens a `Model` by name.

Its folder, or its `.gguf` file, is read as data. Weights are in memory, as they come or quantised.
With a limit of memory, a part of them is read from disk or copied from host memory in every pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quickbeam import hub
from quickbeam.config import ReportProgress
from quickbeam.errors import InvalidInput
from quickbeam.models.base import CHUNK, Model
from quickbeam.models.compile.native_model import NativeModel, kernels_for, kernels_on
from quickbeam.models.families import describe
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.rotary import limit_context
from quickbeam.models.text.eos import eos_ids, known_eos_ids
from quickbeam.models.text.tokenizer import load_tokenizer
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.vision.reader import IMAGE_FAMILIES, ImageReader
from quickbeam.models.weights import disk
from quickbeam.models.weights.adapters import AdaptedCheckpoint, adapter_in
from quickbeam.models.weights.checkpoint import Checkpoint, local_folder, read_json
from quickbeam.models.weights.formats import check_weights, refuse_place, weights_format
from quickbeam.models.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from quickbeam.models.weights.packed_file import PackedFile
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

INEXACT = (
    "an answer may differ in a batch or with drafts where two tokens are nearly as likely, as the "
    "same bits are promised by the native kernels, and on CUDA where a check finds them (%s)"
)

AnyCheckpoint = Checkpoint | AdaptedCheckpoint | GgufCheckpoint
# where embeddings have a scale, most models' images have it, too; those of these have not
UNSCALED = ("gemma3", "gemma4")
# parameters that a generation config may give defaults of
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that a generation config names."""
    sampling = {name: generation[name] for name in SAMPLED if generation.get(name) is not None}
    try:
        SamplingParams(**sampling)
    except InvalidInput as error:
        logger.warning("the model's generation config can't be used: %s", error)
        return {}
    return sampling


class LoadedModel(NamedTuple):
    """A model that is ready to run, and its tokenizer.

    `eos_ids`: ids that end an answer. `sampling`: of `sampling_defaults`. `images`: reads those of
    prompts; None for a model that reads text alone.
    """

    model: Model
    tokenizer: Any
    eos_ids: set[int]
    sampling: dict[str, float]
    images: ImageReader | None = None


def make_model(
    model: PreTrainedModel,
    *,
    native: bool = True,
    chunk: int = CHUNK,
    weights: str = BFLOAT16,
) -> Model:
    """Run a model of transformers, which is taken over.

    With `native`, the native kernels run it if they can, else PyTorch does. The other arguments are
    those of `NativeModel` and `TorchModel`. Raises `NotDescribed` for models of no family, and
    `InvalidInput` for `weights` that need the kernels where they can't be used.
    """
    device = model.device
    refuse_place(check_weights(weights), device, model.dtype)
    limit_context(model.config.get_text_config())
    stack, parameters = describe(model), ModelParameters(model)
    kernels, reason = None, "the torch back end is asked for"
    if native:
        usable = kernels_on(device, parameters.dtype)
        kernels, reason = kernels_for(usable, parameters, stack, device)
    if kernels is not None:
        return NativeModel(parameters, stack, kernels, chunk=chunk, weights=weights)
    _refuse_weights(weights, reason)
    back_end = TorchModel(parameters, stack, device, chunk=chunk, reason=reason)
    if not back_end.exact:
        logger.info(INEXACT, reason)
    return back_end


def _refuse_weights(weights: str, reason: str) -> None:
    """Raise `InvalidInput` for `weights` that need the kernels."""
    if weights != BFLOAT16:
        raise InvalidInput(f"weights={weights!r} need the native kernels: {reason}; leave them out")


def open_model(
    name: str,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    weights: str = BFLOAT16,
    memory: int | None = None,
    progress: ReportProgress | None = None,
    revision: str | None = None,
    max_pixels: int | None = None,
) -> LoadedModel:
    """Load a model from a folder, a `.gguf` file or a Hugging Face id.

    `dtype`: None takes the one that the checkpoint's configuration names. `memory`: bytes that the
    weights may take on `device`, where `refuse_memory` allows a bound; None for no bound. On a CPU,
    the weights beyond it are read from disk in every pass (`disk.py`). On CUDA, they are copied
    from host memory in every pass (`pinned.py`). `revision`: a branch, tag or commit of a Hugging
    Face id. `max_pixels`: of an image (`ImageReader`). The other arguments are those of
    `make_model`.

    Raises `InvalidInput` for what can't be run like this.
    """
    readers = kernels_on(device, dtype)
    checkpoint = open_checkpoint(name, dtype, readers, revision)
    refuse_place(weights, device, checkpoint.dtype)
    kernels, reason = kernels_for(readers, checkpoint, checkpoint.stack, device)
    model: Model
    if kernels is not None:
        model = _native(checkpoint, kernels, weights, memory, progress)
    else:
        _refuse_weights(weights, reason)
        model = TorchModel(checkpoint, checkpoint.stack, device, memory=memory, reason=reason)
        if not model.exact:
            logger.info(INEXACT, reason)
    if isinstance(checkpoint, GgufCheckpoint):
        sampling = sampling_defaults(checkpoint.sampling)
        return LoadedModel(model, checkpoint.tokenizer, checkpoint.eos_ids, sampling)
    generation = read_json(checkpoint.path / "generation_config.json")
    tokenizer = load_tokenizer(tokenizer_folder(checkpoint), checkpoint.config)
    end_ids = eos_ids(generation, checkpoint.config, tokenizer) | known_eos_ids(tokenizer)
    images: ImageReader | None = None
    kind = checkpoint.config.whole_type
    if kind in IMAGE_FAMILIES and (checkpoint.stack.scale == 1 or kind in UNSCALED):
        images = ImageReader(
            checkpoint.path,
            kind,
            checkpoint.shape(checkpoint.stack.embedding)[1] * (1 + checkpoint.stack.deepstack),
            tokenizer,
            model.dtype,
            device,
            native=isinstance(model, NativeModel),
            max_pixels=max_pixels,
        )
    return LoadedModel(model, tokenizer, end_ids, sampling_defaults(generation), images)


def tokenizer_folder(checkpoint: Checkpoint | AdaptedCheckpoint) -> Path:
    """Return where a model's tokenizer is: beside its adapter, if there is one."""
    if isinstance(checkpoint, AdaptedCheckpoint):
        adapter = checkpoint.adapter.folder
        if (adapter / "tokenizer_config.json").is_file():
            return adapter
    return checkpoint.path


def _native(
    checkpoint: AnyCheckpoint,
    kernels: Kernels,
    weights: str,
    memory: int | None,
    progress: ReportProgress | None,
) -> NativeModel:
    stack, name = checkpoint.stack, weights_format(weights, checkpoint.dtype)
    if memory is not None:
        memory = disk.needed_limit(checkpoint, stack, kernels, name, memory)
    kind = name if memory is None else f"{name}-disk"
    packed_file = packed_file_of(checkpoint, kind, progress)
    return NativeModel(
        checkpoint, stack, kernels, weights=weights, packed_file=packed_file, memory=memory
    )


def packed_file_of(
    checkpoint: AnyCheckpoint, kind: str, progress: ReportProgress | None
) -> PackedFile:
    """Return the file of a checkpoint's packed weights, whose format is `kind`."""
    folder, base = checkpoint.path, None
    if isinstance(checkpoint, AdaptedCheckpoint):
        folder, base = checkpoint.adapter.folder, checkpoint.path
    return PackedFile.for_checkpoint(str(folder), None, kind, progress, base=base)


def open_checkpoint(
    name: str,
    dtype: torch.dtype | None,
    kernels: Kernels | None = None,
    revision: str | None = None,
) -> AnyCheckpoint:
    """Return a model's parameters.

    `kernels`: read weights in few bits as blocks; without them these are widened. Raises
    `InvalidInput` for models that no family describes, for incomplete checkpoints, and for a
    revision of a folder or file.
    """
    hub.check_source(name)
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise InvalidInput(
            f"revision {revision!r}: {name} is on this machine, and only a Hugging Face id has "
            "revisions; leave it out"
        )
    try:
        if path.suffix == ".gguf":
            return open_gguf(path, dtype, kernels)
        folder = local_folder(name, revision)
        adapter = adapter_in(folder)
        if adapter is not None:
            return AdaptedCheckpoint(Checkpoint(adapter.base, dtype, kernels), adapter)
        return Checkpoint(folder, dtype, kernels)
    except InvalidInput as error:
        raise InvalidInput(f"can't load {name!r}: {error}") from error
