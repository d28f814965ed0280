"""Opens a `Model` by name.

A described family is read from its folder as data. Other models are loaded by transformers. Weights
are in memory, as they come or quantised. Or a part of them is read from disk or copied from host
memory in every pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quickbeam import hub
from quickbeam.cache import Progress
from quickbeam.errors import InvalidInput
from quickbeam.models import disk
from quickbeam.models.adapters import AdaptedCheckpoint, adapter_in
from quickbeam.models.base import CHUNK, Model
from quickbeam.models.checkpoint import Checkpoint, local_folder, read_json
from quickbeam.models.eos import eos_ids, known_eos_ids, model_eos_ids
from quickbeam.models.families import describe
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.formats import check_weights, refuse_place, weights_format
from quickbeam.models.gguf.checkpoint import GgufCheckpoint, open_gguf
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.native_model import NativeModel, no_kernels_for, why_not_native
from quickbeam.models.stack_tensors import ModelParameters
from quickbeam.models.tokenizer import load_tokenizer
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.weight_file import WeightFile
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

INEXACT = (
    "an answer may differ in a batch or with drafts where two tokens are nearly as likely, as the "
    "same bits are promised by the native kernels, and on CUDA where a check finds them (%s)"
)

AnyCheckpoint = Checkpoint | AdaptedCheckpoint | GgufCheckpoint
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

    `ends`: ids that end an answer. `sampling`: what `sampling_defaults` returns.
    """

    model: Model
    tokenizer: Any
    ends: set[int]
    sampling: dict[str, float]


def make_model(
    model: PreTrainedModel,
    *,
    native: bool = True,
    chunk: int = CHUNK,
    weights: str = BFLOAT16,
    kept: WeightFile | None = None,
) -> Model:
    """Take `model` over: for the native kernels if they can run it and `native` is set, else for
    PyTorch, and where no family describes it for transformers' modelling code.

    The other arguments are those of `NativeModel` and `TorchModel`. Raises `InvalidInput` for
    models that none can run, and for `weights` that need the kernels where they can't be used.
    """
    from quickbeam.models.loading import hold_angles

    refuse_place(check_weights(weights), model.device, model.dtype)
    hold_angles(model)
    reason = why_not_native(model) if native else "the torch back end is asked for"
    if not reason:
        parameters = ModelParameters(model)
        return NativeModel(parameters, describe(model), chunk=chunk, weights=weights, kept=kept)
    if weights != BFLOAT16:
        raise InvalidInput(f"weights={weights!r} need the native kernels: {reason}; leave them out")
    back_end = _by_pytorch(model, chunk, reason)
    if not back_end.exact:
        logger.info(INEXACT, reason)
    return back_end


def _by_pytorch(model: PreTrainedModel, chunk: int, reason: str) -> Model:
    try:
        stack = describe(model)
    except NotDescribed:
        from quickbeam.models.transformers_model import TransformersModel

        return TransformersModel(model, chunk=chunk, reason=reason)
    return TorchModel(ModelParameters(model), stack, model.device, chunk=chunk, reason=reason)


def open_model(
    name: str,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    weights: str = BFLOAT16,
    memory: int | None = None,
    device_map: Any = None,
    progress: Progress | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model from a folder, a `.gguf` file or a Hugging Face id.

    `memory`: bytes that the weights may take on `device`, where `refuse_memory` allows a bound;
    None for no bound. On a CPU, the weights beyond it are read from disk in every pass
    (`disk.py`). On CUDA, they are copied from host memory in every pass (`pinned.py`).
    The other arguments are those of `make_model` and `loading.load_model`.

    Raises `InvalidInput` for what can't be run like this.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    reason = ""
    if device_map is None:
        try:
            checkpoint = open_checkpoint(name, dtype, **options)
        except NotDescribed as error:
            reason = str(error)
            if memory is not None:
                raise InvalidInput(
                    f"memory is for models of known families, not for {name} ({reason}); leave "
                    "memory out"
                ) from error
            logger.info("%s is loaded by transformers: %s", name, reason)
        else:
            refuse_place(weights, device, checkpoint.dtype)
            return _open(checkpoint, device, weights, memory, progress)
    how: Any = (weights, device_map, progress, options)
    try:
        return _by_transformers(name, dtype, device, *how)
    except InvalidInput as error:
        if not reason or reason in str(error):
            raise
        raise InvalidInput(f"{error} (no family describes it: {reason})") from error


def _open(
    checkpoint: AnyCheckpoint,
    device: torch.device,
    weights: str,
    memory: int | None,
    progress: Progress | None,
) -> LoadedModel:
    reason = no_kernels_for(device, checkpoint.dtype)
    model: Model
    if not reason:
        model = _native(checkpoint, weights, memory, progress)
    elif weights != BFLOAT16:
        raise InvalidInput(f"weights={weights!r} need the native kernels: {reason}; leave them out")
    else:
        model = TorchModel(checkpoint, checkpoint.stack, device, memory=memory, reason=reason)
        if not model.exact:
            logger.info(INEXACT, reason)
    if isinstance(checkpoint, GgufCheckpoint):
        sampling = sampling_defaults(checkpoint.sampling)
        return LoadedModel(model, checkpoint.tokenizer, checkpoint.eos_ids, sampling)
    folder = checkpoint.path
    if isinstance(checkpoint, AdaptedCheckpoint):
        own = checkpoint.adapter.folder
        folder = own if (own / "tokenizer_config.json").is_file() else folder
    generation = read_json(checkpoint.path / "generation_config.json")
    tokenizer = load_tokenizer(folder, checkpoint.config)
    ends = eos_ids(generation, checkpoint.config, tokenizer) | known_eos_ids(tokenizer)
    return LoadedModel(model, tokenizer, ends, sampling_defaults(generation))


def _native(
    checkpoint: AnyCheckpoint, weights: str, memory: int | None, progress: Progress | None
) -> NativeModel:
    stack, name = checkpoint.stack, weights_format(weights, checkpoint.dtype)
    if memory is not None:
        memory = disk.limit(checkpoint, stack, name, memory)
    kind = name if memory is None else f"{name}-disk"
    folder, base = checkpoint.path, None
    if isinstance(checkpoint, AdaptedCheckpoint):
        folder, base = checkpoint.adapter.folder, checkpoint.path
    kept = WeightFile.of(str(folder), None, kind, progress, base=base)
    return NativeModel(checkpoint, stack, weights=weights, kept=kept, memory=memory)


def open_checkpoint(
    name: str, dtype: torch.dtype | None, *, revision: str | None, trust_remote_code: bool
) -> AnyCheckpoint:
    """Return a model's parameters where it is described.

    Raises `NotDescribed` for models that transformers has to load, and `InvalidInput` for
    checkpoints that are not whole, and for `.gguf` files that are not described.
    """
    hub.check_source(name)
    path, kernels = Path(name).expanduser(), library.kernels()
    if revision is not None and path.exists():
        raise NotDescribed("a revision of what is on this machine")
    try:
        if path.suffix == ".gguf":
            return open_gguf(path, dtype, kernels)
        folder = local_folder(name, revision)
        adapter = adapter_in(folder)
        if adapter is not None:
            return AdaptedCheckpoint(Checkpoint(adapter.base, dtype), adapter)
        if trust_remote_code and "auto_map" in read_json(folder / "config.json"):
            raise NotDescribed("it comes with code of its own")
        checkpoint = Checkpoint(folder, dtype)
        if checkpoint.quantised and kernels is None:
            raise NotDescribed("its weights are in few bits, which native kernels read")
        return checkpoint
    except NotDescribed:
        raise
    except InvalidInput as error:
        raise InvalidInput(f"can't load {name!r}: {error}") from error


def _by_transformers(
    name: str,
    dtype: torch.dtype | None,
    device: torch.device,
    weights: str,
    device_map: Any,
    progress: Progress | None,
    options: dict[str, Any],
) -> LoadedModel:
    from quickbeam.models.loading import load_model

    loaded, tokenizer = load_model(name, dtype, device, device_map=device_map, **options)
    commit = getattr(loaded.config, "_commit_hash", None)
    adapted = (Path(name).expanduser() / "adapter_config.json").exists()  # maybe by another folder
    kept = None
    if weights != BFLOAT16 and not adapted:
        kept = WeightFile.of(name, commit, weights, progress)
    model = make_model(loaded, weights=weights, kept=kept)
    generation = getattr(loaded, "generation_config", None)
    sampling = sampling_defaults({} if generation is None else generation.to_diff_dict())
    return LoadedModel(model, tokenizer, model_eos_ids(loaded, tokenizer), sampling)
