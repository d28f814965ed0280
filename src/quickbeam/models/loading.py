"""Loads a model and its tokenizer by transformers: for the torch back end, training and peers.

`opening.py` needs it for models that no family describes.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

from quickbeam import hub
from quickbeam.conversion import config_of, tokenizer_of, weights_of
from quickbeam.errors import InvalidInput, first_line, refuse_incomplete
from quickbeam.models.adapters import Adapter, adapter_in
from quickbeam.models.angles import hold
from quickbeam.models.checkpoint import local_folder
from quickbeam.models.families import FAMILIES
from quickbeam.models.formats import AUTO
from quickbeam.models.gguf.checkpoint import open_gguf
from quickbeam.models.prequantised import refuse_mlx
from quickbeam.models.stored import COMPOSITES
from quickbeam.models.tokenizer import refuse_unconverted

# what transformers raises for a configuration that is of no model
UNFIT = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
BROKEN = (pickle.UnpicklingError, EOFError)  # the same for a broken pytorch_model.bin
MOVING = ("dynamic", "longrope")  # rope types whose angles change with a text's length


def _source(model: str) -> str:
    """Return what `from_pretrained` takes for `model`: a folder or a Hugging Face id.

    A `.gguf` file's path is returned as well. Raises `InvalidInput` for a folder or file that is
    not there, or that holds no model.
    """
    path = Path(model).expanduser()
    hub.check_source(model)
    return str(path) if path.exists() else model


def causal_class(config: PreTrainedConfig) -> type:
    """Return the class of a checkpoint's causal language model.

    For code that comes with the model, and for an encoder-decoder, that may be the class of
    `config`. Raises `InvalidInput` for a checkpoint that transformers has no such class for.
    """
    kind: type = type(config)
    own = getattr(config, "auto_map", None) or {}
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[kind]  # type: ignore[no-any-return]
    if config.is_encoder_decoder or "AutoModelForCausalLM" in own:
        return kind
    name = next(iter(config.architectures or ()), kind.__name__)
    inner = config.get_text_config()
    if inner is config:
        raise InvalidInput(
            f"{name} doesn't continue a text from left to right: take a causal language model"
        )
    alone = f"take a checkpoint of its language model alone ({inner.model_type})"
    if config.model_type in COMPOSITES and inner.model_type in FAMILIES:
        alone = (
            "its language part runs in the native kernels, on a CPU in bfloat16 or float32: do "
            f"that, or {alone}"
        )
    raise InvalidInput(
        f"{name} reads more than text ({', '.join(sorted(config.sub_configs))}): {alone}, or "
        "another model for text"
    )


def refuse_unfit(kind: type, config: PreTrainedConfig) -> None:
    """Raise `InvalidInput` for a model that keeps more than keys and values of its own tokens.

    These are encoder-decoders, recurrent and hybrid models, and models with layers other than full
    and sliding-window attention; families that are described are none of them. Needs no weights.
    """
    if config.get_text_config().model_type in FAMILIES:
        return
    name = kind.__name__
    if config.is_encoder_decoder:
        raise InvalidInput(
            f"{name} is an encoder-decoder; quickbeam runs decoder-only causal language models"
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if not kinds and not getattr(kind, "_is_stateful", False):
        return
    has = f"layers of kind {', '.join(sorted(kinds))}" if kinds else "a recurrent state"
    raise InvalidInput(
        f"{name} has {has}, which quickbeam can't take a draft back from: it runs full and "
        "sliding-window attention, and of recurrent families LFM2 and 3, Qwen3-Next, Qwen3.5, "
        "Granite 4 H, Bamba, Nemotron-H and Falcon-H1: use one of these"
    )


def hold_angles(model: PreTrainedModel) -> None:
    """Keep a model's rotary angles from changing with the length of a text (`angles.hold`)."""
    hold(model.config.get_text_config())
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {
                layer: "default" if kind in MOVING else kind for layer, kind in kinds.items()
            }
        elif kinds in MOVING:
            module.rope_type = "default"


def _quantisation(config: PreTrainedConfig) -> str:
    """Return how a model's weights are quantised, in a word; empty where they are not."""
    fields = getattr(config, "quantization_config", None)
    if not isinstance(fields, dict) or not fields:
        return ""
    return str(fields.get("quant_method") or "by a method that it doesn't name")


def _adapter(name: str, revision: str | None) -> Adapter | None:
    """Return the LoRA adapter in a folder or repository; None where whole weights count."""
    if find_adapter_config_file(name, revision=revision) is None:
        return None
    return adapter_in(local_folder(name, revision))


def _merge(model: PreTrainedModel, adapter: Adapter) -> None:
    """Merge an adapter into a model's weights. Raises `InvalidInput` where they don't fit."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    adapter.rename(parameters.keys())
    embedding = model.get_input_embeddings().weight
    rows = next((adapter.rows(name) for name, one in parameters.items() if one is embedding), None)
    if rows is not None and rows != len(embedding):  # tokens were added
        shapes = {name: one.shape for name, one in parameters.items()}
        model.resize_token_embeddings(rows, mean_resizing=False)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        grown = [name for name, one in parameters.items() if one.shape != shapes[name]]
        lacking = [name for name in grown if name not in adapter.names]
        refuse_incomplete([], [(name, shapes[name], parameters[name].shape) for name in lacking])
    owners = Counter(id(parameter) for parameter in parameters.values())
    for name in adapter.names:
        module, _, last = name.rpartition(".")
        merged = adapter.merged(name, parameters[name].detach())
        if merged.shape != parameters[name].shape:
            refuse_incomplete([], [(name, merged.shape, parameters[name].shape)])
        if owners[id(parameters[name])] > 1:  # another layer shares it, which the adapter leaves
            setattr(model.get_submodule(module), last, nn.Parameter(merged, requires_grad=False))
        else:
            parameters[name].data = merged
    model.config._commit_hash = None  # of no commit any more


def load_model(
    model: str,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model's weights and its tokenizer.

    `dtype`: None takes the one that the checkpoint's configuration names. `trust_remote_code`:
    whether Python code that comes with the model may run. `revision`: a branch, tag or commit of a
    Hugging Face id. `device_map`: as of transformers, in place of `device`; it must put all of the
    model on one device. A LoRA adapter is merged into the weights (`adapters.py`). A `.gguf` file
    is read by `conversion.py`.

    Raises `InvalidInput` for what is not there, is no causal LM, can't be read, or lacks weights.
    """
    name = _source(model)
    if revision is not None and Path(name).exists():
        raise InvalidInput(
            f"revision {revision!r}: {model} is on this machine, and only a Hugging "
            "Face id has revisions; leave it out"
        )
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    quantised = ""
    try:
        if name.endswith(".gguf"):
            if device_map is not None:
                raise InvalidInput("device_map is not for .gguf files: leave it out")
            return _of_file(Path(name), dtype, device)
        adapter = _adapter(name, revision)
        source = name if adapter is None else str(adapter.base)
        if adapter is not None:
            options["revision"] = None
        config = _read_config(source, options)
        refuse_mlx(config.to_dict())
        refuse_unfit(causal_class(config), config)
        quantised = _quantisation(config)
        if quantised and device_map is None:
            # most quantised models can't be moved afterwards
            device_map = {"": device}
        if quantised and adapter is not None:
            raise InvalidInput(
                f"its adapter can't be merged into weights quantised by {quantised}: name its "
                "unquantised base model in adapter_config.json"
            )
        loaded = _load(source, dtype, device_map, options)
        if adapter is not None and (adapter.folder / "tokenizer_config.json").is_file():
            source = str(adapter.folder)
        refuse_unconverted(Path(source))
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        if device_map is None:
            loaded = loaded.to(device)
        elif len(places := set(getattr(loaded, "hf_device_map", {}).values())) > 1:
            raise InvalidInput(
                f"device_map spreads it over {', '.join(sorted(map(str, places)))}: "
                "quickbeam needs all of it on one device"
            )
        if adapter is not None:
            _merge(loaded, adapter)
        hold_angles(loaded)
    except InvalidInput as error:
        raise InvalidInput(f"can't load {model!r}: {error}") from error
    except (*UNFIT, *BROKEN, ImportError, RuntimeError, SafetensorError) as error:
        if (reason := _reason(error, quantised)) is None:
            raise
        raise InvalidInput(f"can't load {model!r}: {reason}") from error
    return loaded, tokenizer


def _of_file(
    path: Path, dtype: torch.dtype | None, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a `.gguf` file, and its tokenizer."""
    checkpoint = open_gguf(path, dtype, None)
    config = config_of(checkpoint)
    kind: Any = causal_class(config)
    loaded, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights_of(checkpoint),
        dtype=checkpoint.dtype,
        output_loading_info=True,
    )
    refuse_incomplete(info["missing_keys"], info["mismatched_keys"], info["unexpected_keys"])
    hold_angles(loaded)
    return loaded.to(device), tokenizer_of(checkpoint)


def _read_config(name: str, options: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, ImportError):  # `_reason` knows more
        raise
    except Exception as error:  # of any kind, by what the file says
        raise InvalidInput(f"its config.json can't be read: {first_line(error)}") from error


def _load(
    name: str,
    dtype: torch.dtype | None,
    device_map: str | Mapping[str, Any] | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    # a local load is over in a moment: hide its progress bars
    with redirect_stderr(StringIO()) if Path(name).is_dir() else nullcontext():
        loaded, info = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=AUTO if dtype is None else dtype,
            device_map=device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_incomplete` names them
            adapter_kwargs={"subfolder": "none"},  # or peft would merge what lies beside it
            **options,
        )
        refuse_incomplete(info["missing_keys"], info["mismatched_keys"], info["unexpected_keys"])
        return loaded


def _reason(error: Exception, quantised: str) -> str | None:
    """Say why a model can't be loaded, and what to do; None for what is no fault of the model.

    `quantised`: how its weights are quantised.
    """
    first = first_line(error)
    if "trust_remote_code" in str(error):
        return (
            "it comes with Python code of its own, which runs only where you allow it: "
            "read that code, then add --trust-remote-code (in Python: trust_remote_code=True)"
        )
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    if quantised and isinstance(error, ImportError | RuntimeError) and not out_of_memory:
        return (
            f"its weights are quantised ({quantised}), and what reads them is missing here: "
            f"{first} (or take the model's unquantised weights)"
        )
    if (
        isinstance(error, BROKEN)
        or "PytorchStreamReader" in first
        or first.startswith("[Errno 22]")
    ):
        return f"its weights can't be read ({first}): download it again, with all of its files"
    if isinstance(error, RuntimeError):
        return None
    return f"{first} (give a Hugging Face id, a model folder or a .gguf file)"
