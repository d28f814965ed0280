"""Opens a `Model` by name.

Its weights are in memory, as they come or quantised. Or a part of them is read from disk or copied
from host memory in every pass.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quickbeam.cache import Progress
from quickbeam.errors import InvalidInput
from quickbeam.models.base import CHUNK, Model
from quickbeam.models.formats import check_weights, refuse_place
from quickbeam.models.loading import eos_ids, hold_angles, load_model, sampling_defaults
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.native_model import NativeModel, why_not_native
from quickbeam.models.pinned import PinnedLayers, pin_layers
from quickbeam.models.streamed_loading import open_streamed
from quickbeam.models.streamed_pass import Source
from quickbeam.models.torch import TorchModel
from quickbeam.models.weight_file import WeightFile

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A model that is ready to run, and its tokenizer.

    `ends`: ids that end an answer. `sampling`: what `sampling_defaults` returns.
    """

    model: Model
    tokenizer: PreTrainedTokenizerBase
    ends: set[int]
    sampling: dict[str, float]


def make_model(
    model: PreTrainedModel,
    *,
    native: bool = True,
    chunk: int = CHUNK,
    weights: str = BFLOAT16,
    kept: WeightFile | None = None,
    source: Source | None = None,
    pinned: PinnedLayers | None = None,
) -> Model:
    """Take `model` over: for the native kernels if they can run it and `native` is set, else for
    PyTorch.

    The other arguments are those of `NativeModel` and `TorchModel`. Raises `InvalidInput` for
    models that neither can run, and for `weights` that need the kernels where they can't be used.
    """
    if source is None:
        refuse_place(check_weights(weights), model.device, model.dtype)
    hold_angles(model)
    if not native:
        reason = "the torch back end is asked for"
    elif pinned is not None:
        reason = "layers are copied from host memory"
    else:
        reason = why_not_native(model)
    if not reason:
        return NativeModel(model, chunk=chunk, weights=weights, kept=kept, source=source)
    if weights != BFLOAT16:
        raise InvalidInput(f"weights={weights!r} need the native kernels: {reason}; leave them out")
    found = TorchModel(model, chunk=chunk, pinned=pinned, reason=reason)
    logger.info(
        "an answer may differ in a batch or with drafts where two tokens are nearly as likely, as "
        "only the native kernels promise the same bits (%s)",
        reason,
    )
    return found


def open_model(
    folder: str,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    weights: str = BFLOAT16,
    memory: int | None = None,
    device_map: Any = None,
    progress: Progress | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Opened:
    """Load a model from a folder, a `.gguf` file or a Hugging Face id.

    `memory`: bytes that the weights may take on `device`, where `refuse_memory` allows a bound;
    None for no bound. On a CPU, the weights beyond it are read from disk in every pass
    (`streamed_loading.py`). On CUDA, they are copied from host memory in every pass (`pinned.py`).
    The other arguments are those of `make_model` and `load_model`.

    Raises `InvalidInput` for what can't be run like this.
    """
    told: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if memory is None:
        loaded, tokenizer = load_model(folder, dtype, device, device_map=device_map, **told)
        return _opened(loaded, tokenizer, folder, weights, progress)
    from_disk = reads_disk(device)
    if from_disk:
        streamed = open_streamed(folder, memory, weights, progress, **told)
        if streamed is not None:
            model = NativeModel(streamed.model, weights=weights, source=streamed.source)
            return _with_defaults(model, streamed.model, streamed.tokenizer)
    loaded, tokenizer = load_model(folder, dtype, torch.device("cpu"), **told)
    pinned = None if from_disk else pin_layers(loaded, memory, device)
    if pinned is None:
        loaded = loaded.to(device)
    return _opened(loaded, tokenizer, folder, weights, progress, pinned)


def reads_disk(device: torch.device) -> bool:
    """Whether weights that don't fit are read from disk, not kept in the host's memory."""
    return device.type == "cpu"


def _opened(
    loaded: Any,
    tokenizer: Any,
    folder: str,
    weights: str,
    progress: Progress | None,
    pinned: PinnedLayers | None = None,
) -> Opened:
    kept = None
    if weights != BFLOAT16:
        kept = WeightFile.of(
            folder, getattr(loaded.config, "_commit_hash", None), weights, progress
        )
    model = make_model(loaded, weights=weights, kept=kept, pinned=pinned)
    return _with_defaults(model, loaded, tokenizer)


def _with_defaults(model: Model, loaded: Any, tokenizer: Any) -> Opened:
    return Opened(model, tokenizer, eos_ids(loaded, tokenizer), sampling_defaults(loaded))
