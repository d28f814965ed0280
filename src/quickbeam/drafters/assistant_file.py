"""Gemma 4's assistants in `.gguf` files, as llama.cpp's converter writes them.

Clusters of the vocabulary (`masked_embd_centroids`, `masked_embd_ordering`) are not read: all
tokens are scored, as llama.cpp does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from quickbeam.drafters.layouts import GGUF_ASSISTANT
from quickbeam.errors import InvalidInput
from quickbeam.models.native.library import Kernels
from quickbeam.models.weights.checkpoint import ModelConfig
from quickbeam.models.weights.gguf.architecture import gemma4_fields
from quickbeam.models.weights.gguf.file import GgufFile, widened
from quickbeam.models.weights.gguf.metadata import Metadata

# from the file's names to those of transformers; `.weight` follows
MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "nextn.pre_projection": "pre_projection",
    "nextn.post_projection": "post_projection",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "layer_output_scale": "layer_scalar",
}


def read_assistant(
    path: Path, dtype: torch.dtype, kernels: Kernels | None
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Return an assistant's configuration, and its tensors in `dtype` by transformers' names.

    `kernels` widen blocks, or without them the package `gguf`. Raises `InvalidInput` for metadata
    that is missing or not known.
    """
    file = GgufFile(path)
    metadata = Metadata(file, GGUF_ASSISTANT)
    if "token_embd.weight" not in file.tensors:
        raise InvalidInput("its weights lack token_embd.weight: download it again")
    fields: dict[str, Any] = {
        "text_config": gemma4_fields(metadata),
        "backbone_hidden_size": metadata["embedding_length_out"],
        "use_ordered_embeddings": False,
    }
    metadata.note("nextn_predict_layers")
    metadata.refuse_unknown()
    tensors = dict[str, torch.Tensor]()
    for stored in file.tensors:
        name = _name(stored)
        if name is not None:
            tensors[name] = widened(file[stored], kernels).to(dtype)
    return ModelConfig(fields), tensors


def _name(stored: str) -> str | None:
    """Return transformers' name of a tensor, without `model.`; None for what is not read."""
    module = stored.removesuffix(".weight")
    layer = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)", module)
    if layer is None:
        return f"{MODULES[module]}.weight" if module in MODULES else None
    if layer[2] not in IN_LAYER:
        return None
    name = f"layers.{layer[1]}.{IN_LAYER[layer[2]]}"
    return name if name.endswith("layer_scalar") else f"{name}.weight"
