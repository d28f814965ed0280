"""Block drafters in `.gguf` files, as llama.cpp has them (architecture `dflash`).

Names and metadata are those of llama.cpp's converter (`conversion/qwen.py`). It turns queries and
keys of drafters whose dimensions turn in pairs, and counts a hidden state's layers from 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.gguf.file import GgufFile
from quickbeam.models.gguf.metadata import Metadata, rope_of
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BlockRows, dense_rows

ARCHITECTURE = "dflash"
MODULES = {  # of the network, by the file's names
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection",
}
IN_LAYER = {  # the same, of a layer
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
UNREAD = ("token_embd.weight", "output.weight")  # copies of the target's
# in the file's metadata, by the names of configurations
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "block_size": "block_size",
}
OPTIONAL = {
    "head_dim": "attention.key_length",
    "is_causal": "attention.causal",
    "sample_from_anchor": "sample_from_anchor",
    "sliding_window": "attention.sliding_window",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}


def is_block_file(path: Path) -> bool:
    """Whether a `.gguf` file holds a block drafter. Reads its metadata."""
    return GgufFile(path).metadata.get("general.architecture") == ARCHITECTURE


def read_block_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a configuration's fields and tensors by the network's names, in bfloat16.

    Raises `InvalidInput`, and `NotDescribed` for metadata that is not known.
    """
    file = GgufFile(path)
    m, kernels = Metadata(file, ARCHITECTURE), library.kernels()
    fields: dict[str, Any] = {name: m[key] for name, key in KEYS.items()}
    fields |= {name: m.get(key) for name, key in OPTIONAL.items()}
    dim = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    fields |= {"head_dim": dim, "rope_parameters": rope_of(m, dim)}
    taps = file.metadata.get(f"{ARCHITECTURE}.target_layers")
    mask = file.metadata.get("tokenizer.ggml.mask_token_id")
    if taps is None or mask is None:
        raise InvalidInput("its metadata lacks dflash.target_layers or the mask token")
    fields |= {"target_layer_ids": [int(one) - 1 for one in taps], "mask_token_id": mask}
    if fields["sliding_window"]:
        near = [bool(one) for one in m.each("attention.sliding_window_pattern")]
        fields["layer_types"] = [("full_attention", "sliding_attention")[one] for one in near]
    rank = file.tensors["markov_w1.weight"].shape[1] if m.has("markov_w1.weight") else 0
    fields |= {"markov_rank": rank, "enable_confidence_head": m.has("conf_proj.weight")}
    if fields["sample_from_anchor"] is None:  # of files from before there was that key
        fields["sample_from_anchor"] = rank > 0
    fields["is_causal"] = bool(fields["is_causal"])
    m.note("target_hidden_size", "target_layers")
    m.refuse_unknown()
    tensors = dict[str, torch.Tensor]()
    for name in file.tensors.keys() - {*UNREAD}:
        weight = file[name]
        if isinstance(weight, BlockRows):
            if kernels is None:
                raise InvalidInput("its weights are in blocks, which the native kernels read")
            weight = dense_rows(kernels, weight)
        tensors[_own_name(name)] = weight.to(torch.bfloat16)
    return fields, tensors


def _own_name(name: str) -> str:
    """Return the network's name of a tensor; the file's where it is not known."""
    module, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d{1,6})\.(\w+)(\.(?:weight|bias))?", name):
        own = IN_LAYER.get(layer[2], layer[2])
        kind = "" if own.endswith("base_kernel") else layer[3] or ""
        return f"layers.{layer[1]}.{own}{kind}"
    return f"{MODULES[module]}.{kind}" if module in MODULES else name
