"""A model without its weights, and the tensors of its checkpoint.

The model's modules are on PyTorch's meta device. The tensors are read by name and row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from quickbeam.conversion import refuse_incomplete
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.models.loading import causal_class, hold_angles, refuse_unfit

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def local_folder(model: str, revision: str | None) -> Path:
    """Return a model's folder: `model` itself, or what a Hugging Face id is downloaded to.

    Raises `InvalidInput` where there is no such model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise InvalidInput(f"no such model folder or file: {model}")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"can't load {model!r}: {reason} (give a Hugging Face id, a model "
            "folder or a .gguf file)"
        ) from error


class Tensors:
    """The tensors of a folder's safetensors files.

    A file is opened for each read, so that none of it stays in memory. Names are those of the
    causal LM, also where the checkpoint holds the model without its head.
    """

    def __init__(self, folder: Path) -> None:
        """Find the file of each tensor.

        Raises `InvalidInput` for a folder without safetensors, and for files that can't be read.
        """
        self._places: dict[str, Path] = {}
        try:
            if (folder / INDEX).is_file():
                names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
                self._places = {name: folder / file for name, file in names.items()}
            elif (folder / SINGLE).is_file():
                with safe_open(folder / SINGLE, "pt") as file:
                    self._places = dict.fromkeys(file.keys(), folder / SINGLE)
        except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
            raise InvalidInput(
                f"the weights in {folder} can't be read ({error}): download them again"
            ) from error
        if not self._places:
            raise InvalidInput(
                f"memory: {folder} has no {SINGLE} and no {INDEX}, which weights are read from: "
                "convert it, or leave memory out"
            )
        # saved from the model without its head: names lack `model.`
        if "model.norm.weight" not in self._places and "norm.weight" in self._places:
            self._places = {
                name if name.startswith("lm_head.") else f"model.{name}": place
                for name, place in self._places.items()
            }
            self._prefix = "model."
        else:
            self._prefix = ""

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape. Raises `QuickbeamError` naming the file where it can't be
        read."""
        with self._reading(name) as file:
            return list(file.get_slice(self._stored(name)).get_shape())

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return rows `first` to `last` (excluded) of a tensor, in bfloat16.

        The numbers are those that loading the model gives. Raises `QuickbeamError` naming the file
        where it can't be read.
        """
        with self._reading(name) as file:
            return file.get_slice(self._stored(name))[first:last].to(torch.bfloat16, copy=True)  # type: ignore[no-any-return]

    @contextmanager
    def _reading(self, name: str) -> Iterator[Any]:
        try:
            with self._open(name) as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise QuickbeamError(
                f"{self._places[name]}: {name} can't be read ({error}): download it again"
            ) from error

    def _open(self, name: str) -> Any:
        return safe_open(self._places[name], "pt")

    def _stored(self, name: str) -> str:
        return name if name.startswith("lm_head.") else name.removeprefix(self._prefix)


def outline(
    folder: Path, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a folder's model on the meta device, in bfloat16, and its tokenizer.

    Raises `InvalidInput` for what is no causal LM, for adapters, and for weights that are quantised
    already.
    """
    told = {"trust_remote_code": trust_remote_code}
    try:
        if (folder / "adapter_config.json").exists():
            raise InvalidInput(
                "it holds an adapter: merge it into its model (peft's merge_and_unload) and give "
                "that folder, or leave memory out"
            )
        config = AutoConfig.from_pretrained(folder, **told)
        refuse_unfit(causal_class(config), config)
        if getattr(config, "quantization_config", None):
            raise InvalidInput(
                "its weights are quantised already: take the unquantised model with --weights int8 "
                "or int4, or leave memory out"
            )
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, **told
            )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, **told)
    except InvalidInput as error:
        raise InvalidInput(f"can't load {str(folder)!r}: {error}") from error
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(
            f"can't load {str(folder)!r}: {reason} (give a Hugging Face id, a model "
            "folder or a .gguf file)"
        ) from error
    return model, tokenizer


def check_tensors(model: PreTrainedModel, tensors: Tensors, tied: bool) -> None:
    """Raise `InvalidInput` where the checkpoint doesn't fit a model on the meta device.

    The message names the tensors that the checkpoint lacks, or has in another shape. `tied`: the
    head's weight is the embedding's, and is not looked for.
    """
    missing, mismatched = [], []
    for name, parameter in model.named_parameters():
        if tied and name == "lm_head.weight":
            continue
        if name not in tensors:
            missing.append(name)
        elif (shape := tensors.shape(name)) != list(parameter.shape):
            mismatched.append((name, shape, list(parameter.shape)))
    refuse_incomplete({"missing_keys": missing, "mismatched_keys": mismatched})


def fill_small(model: PreTrainedModel, tensors: Tensors, names: Iterable[str]) -> None:
    """Read the parameters `names` into a model on the meta device, and make its rotary angles."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        setattr(
            model.get_submodule(owner),
            attribute,
            nn.Parameter(tensors.rows(name), requires_grad=False),
        )
    inner: Any = model.model
    angles = type(inner.rotary_emb)(config=model.config)
    # LongRoPE's factor follows from the context, which `hold_angles` may have lowered since
    if hasattr(angles, "attention_scaling"):
        angles.attention_scaling = inner.rotary_emb.attention_scaling
    inner.rotary_emb = angles
    hold_angles(model)
