"""Model and tokenizer from a Hugging Face id, a folder or a `.gguf` file."""

from __future__ import annotations

import os
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from quickbeam.errors import InvalidInput

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parse_dtype(name: str) -> torch.dtype:
    """The torch type of a name. Raises `InvalidInput` naming the known ones."""
    if name not in DTYPES:
        raise InvalidInput(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_device(name: str | None) -> torch.device:
    """The device asked for, or the best one there is. Raises `InvalidInput` for one that is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(f"device {name!r} can't be used: {str(error).splitlines()[0]}") from error
    return device


def _source(model: str) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` takes for `model`, and with which options."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InvalidInput(f"no such file: {path}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInput(f"{path} is not a model folder: it has no config.json")
        return str(path), {}
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise InvalidInput(f"no such model folder or file: {model}")
    return model, {}


def refuse_unfit(kind: type, config: PreTrainedConfig) -> None:
    """Raise `InvalidInput` for a model class that keeps more than keys and values of its own tokens. Needs no weights."""
    name = kind.__name__
    if config.is_encoder_decoder:
        raise InvalidInput(f"{name} is an encoder-decoder; quickbeam runs decoder-only causal language models")
    if getattr(kind, "_is_stateful", False):
        raise InvalidInput(f"{name} is recurrent or hybrid: its state can't take a draft back; use an attention-only model")
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise InvalidInput(f"{name} has layers of kind {', '.join(sorted(kinds))}; quickbeam verifies full and sliding-window attention")


def split_digits(tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    """Have a tokenizer read from a `.gguf` file split off digits first, where the file says so: transformers reads every BPE as GPT-2's."""
    pre = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def load_model(model: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load weights and tokenizer. Raises `InvalidInput` for what is not there, not a causal LM, or not readable."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then asks for huge pages, and packed weights are read a little faster
    name, options = _source(model)
    try:
        if not options:
            config = AutoConfig.from_pretrained(name)
            refuse_unfit(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), type(config)), config)
        quantization = {"quantization_config": GgufConfig(dequantize=True)} if options else {}
        with redirect_stderr(StringIO()) if Path(name).is_dir() else nullcontext():  # bars of a load that is over in a moment
            loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options, **quantization).to(device)
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if options:
            split_digits(tokenizer, Path(model).expanduser())
    except InvalidInput:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(f"can't load {model!r}: {reason} (give a Hugging Face id, a model folder or a .gguf file)") from error
    return loaded, tokenizer


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every id that ends an answer, of generation config, config and tokenizer."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return found
