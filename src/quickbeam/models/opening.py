"""Opens a `Model` by name.

Its weights are in memory, as they come or quantised. Or a part of them is read from disk or copied
from host memory in every pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from quickbeam.cache import Progress
from quickbeam.models.loading import eos_ids, load_model, sampling_defaults
from quickbeam.models.model import Model
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.pinned import pin_layers
from quickbeam.models.streamed_loading import open_streamed
from quickbeam.models.weight_file import WeightFile


class Opened(NamedTuple):
    """A model that is ready to run, and its tokenizer.

    `ends`: ids that end an answer. `sampling`: what `sampling_defaults` returns.
    """

    model: Model
    tokenizer: PreTrainedTokenizerBase
    ends: set[int]
    sampling: dict[str, float]


def open_model(
    folder: str,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    fast: bool = True,
    exact: bool | None = None,
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
    The other arguments are those of `Model` and `load_model`.

    Raises `InvalidInput` for what can't be run like this.
    """
    told: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if memory is None:
        loaded, tokenizer = load_model(folder, dtype, device, device_map=device_map, **told)
        return _opened(loaded, tokenizer, folder, weights, progress, fast=fast, exact=exact)
    from_disk = reads_disk(device)
    if from_disk:
        streamed = open_streamed(folder, memory, weights, progress, **told)
        if streamed is not None:
            model = Model(streamed.model, exact=exact, weights=weights, source=streamed.source)
            return _with_defaults(model, streamed.model, streamed.tokenizer)
    loaded, tokenizer = load_model(folder, dtype, torch.device("cpu"), **told)
    pinned = None if from_disk else pin_layers(loaded, memory, device)
    if pinned is None:
        loaded = loaded.to(device)
    return _opened(
        loaded, tokenizer, folder, weights, progress, fast=fast, exact=exact, pinned=pinned
    )


def reads_disk(device: torch.device) -> bool:
    """Whether weights that don't fit are read from disk, not kept in the host's memory."""
    return device.type == "cpu"


def _opened(
    loaded: Any,
    tokenizer: Any,
    folder: str,
    weights: str,
    progress: Progress | None,
    **more: Any,
) -> Opened:
    kept = None
    if weights != BFLOAT16:
        kept = WeightFile.of(
            folder, getattr(loaded.config, "_commit_hash", None), weights, progress
        )
    return _with_defaults(Model(loaded, weights=weights, kept=kept, **more), loaded, tokenizer)


def _with_defaults(model: Model, loaded: Any, tokenizer: Any) -> Opened:
    return Opened(model, tokenizer, eos_ids(loaded, tokenizer), sampling_defaults(loaded))
