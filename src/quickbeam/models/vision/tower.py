"""The part of a checkpoint that reads images, run by transformers' code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quickbeam.errors import InvalidInput, first_line, some_of

LANGUAGE = ("language_model", "text_model")  # names of the language part in transformers' models


def load_tower(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' model of a folder without its language part.

    `config`: the whole model's, which is changed. Raises `InvalidInput` where the files lack a
    weight, or hold it in few bits.
    """
    from transformers import AutoModel

    text = config.get_text_config()
    text.num_hidden_layers = 0  # so that none of its weights but the embedding are read
    if getattr(text, "layer_types", None):
        text.layer_types = []
    if getattr(text, "hidden_size_per_layer_input", 0):  # their table is as wide as all layers
        text.hidden_size_per_layer_input = 0
    if getattr(config, "audio_config", None) is not None:  # what reads sound
        config.audio_config = None
    if hasattr(config, "quantization_config"):  # most often of the language part alone
        del config.quantization_config
    try:
        with _quiet():
            model, loaded = AutoModel.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # of any kind, by what the files say
        raise InvalidInput(
            f"the part of {folder} that reads images can't be read: {first_line(error)}"
        ) from error
    for name in LANGUAGE:
        if hasattr(model, name):
            setattr(model, name, None)
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    missing = [name for name in loaded["missing_keys"] if name in parameters]
    if missing:
        raise InvalidInput(
            f"the files of {folder} lack {some_of(missing)}, which reads images, or hold it in few "
            "bits: give text alone, or take the unquantised checkpoint"
        )
    scales = list[str]()  # what weights in few bits have beside them
    for name in loaded["unexpected_keys"]:
        owner = name.rpartition(".")[0].removeprefix("model.")
        if owner and owner in modules:
            scales.append(name)
    if scales:
        raise InvalidInput(
            f"the files of {folder} hold {some_of(scales)} beside the weights that read images, "
            "which are in few bits: give text alone, or take the unquantised checkpoint"
        )
    return model.eval().to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers show no progress, and no warnings of weights that are left out."""
    from transformers.utils import logging as messages

    level, shows_progress = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if shows_progress:
            messages.enable_progress_bar()
