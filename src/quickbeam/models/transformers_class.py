"""Loads a model as transformers' own class, with weights by our reader: for peers.

No answer is computed by such a model: `opening.py` opens those that run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from quickbeam.errors import InvalidInput, refuse_incomplete
from quickbeam.models.opening import open_checkpoint, tokenizer_folder
from quickbeam.models.rotary import limit_context
from quickbeam.models.text.tokenizer import refuse_unconverted
from quickbeam.models.weights.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.weights.parameters import names

MOVING = ("dynamic", "longrope")  # rope types whose angles change with a text's length


def load_model(
    model: str, dtype: torch.dtype | None, device: torch.device
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer by transformers.

    `model`: a folder or a Hugging Face id. `dtype`: None takes the one that the checkpoint's
    configuration names. Weights in few bits are widened, and LoRA adapters are merged.

    Raises `InvalidInput` as `open_checkpoint` does, and for a `.gguf` file.
    """
    if model.endswith(".gguf"):
        raise InvalidInput(
            f"{model} is a .gguf file, and the method hf reads a model's folder: give the folder"
        )
    checkpoint = open_checkpoint(model, dtype)
    assert not isinstance(checkpoint, GgufCheckpoint)
    config: Any = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    config = config.get_text_config()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise InvalidInput(
            f"transformers has no class for the language part of {model} alone "
            f"({config.model_type}): take a checkpoint of a language model"
        )
    config.tie_word_embeddings = checkpoint.config.tie_word_embeddings
    config.vocab_size = checkpoint.config.vocab_size  # an adapter may add tokens
    config.quantization_config = None
    weights = {name: checkpoint(name) for name in sorted(names(checkpoint.stack))}
    loaded, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights | checkpoint.unread(),
        dtype=checkpoint.dtype,
        output_loading_info=True,
    )
    refuse_incomplete(info["missing_keys"], info["mismatched_keys"], info["unexpected_keys"])
    if (checkpoint.path / "generation_config.json").is_file():
        loaded.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    fix_angles(loaded)
    return loaded.to(device), _tokenizer(tokenizer_folder(checkpoint))


def fix_angles(model: PreTrainedModel) -> None:
    """Keep a model's rotary angles from changing with a text's length (`rotary.limit_context`)."""
    limit_context(model.config)
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):  # by kind of layer
            module.rope_type = {
                layer: "default" if kind in MOVING else kind for layer, kind in rope_type.items()
            }
        elif rope_type in MOVING:
            module.rope_type = "default"


def _tokenizer(folder: Path) -> Any:
    refuse_unconverted(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
