"""The published layouts of drafters: who publishes each, how to recognise it, and its names.

MTP heads lie in a model's own checkpoint. Their layouts are in `hub/mtp.py`, since models have to
know which tensors belong to a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quickbeam.drafters.folder import WINDOWED, read_tensors
from quickbeam.errors import InvalidInput
from quickbeam.models.weights.checkpoint import read_json
from quickbeam.models.weights.gguf.file import GgufFile

Fields = dict[str, Any]  # of a config.json

# kinds of drafters
EAGLE, BLOCK, ASSISTANT = "eagle", "block", "assistant"
GEMMA_DSPARK = "Gemma4DSparkModel"  # an architecture
DFLASH, GGUF_ASSISTANT = "dflash", "gemma4-assistant"  # architectures of llama.cpp's files
# beginnings of names that need no place in a network: copies of the target's, and derived tensors
COPIES = ("embed_tokens.", "lm_head.")
DERIVED = ("d2t", "t2d", "rotary_emb.", "verifier_lm_head.", "verifier_norm.")


@dataclass(frozen=True)
class Layout:
    """How one publisher stores a kind of drafter.

    - `publisher`: the publisher's name in messages. `kind`: the kind of the drafter.
    - `recognises`: whether a `config.json` may be of this layout. `tensors`: names of tensors that
      the folder then has.
    - `fields`: returns a configuration's fields by the names that `EagleConfig` and `BlockConfig`
      read.
    - `modules`: of EAGLE, the stored name of each of the network's modules.
    - `renamed`: of block drafters, what the network calls names that begin so.
    """

    publisher: str
    kind: str
    recognises: Callable[[Fields], bool]
    tensors: Collection[str] = ()
    fields: Callable[[Fields], Fields] = dict
    modules: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


# --- EAGLE ---


def _eagle_modules(layer: str, fc: str) -> dict[str, str]:
    """Return the stored name of each of a network's modules.

    `layer`, `fc`: the stored names of the layer and of the product that joins its inputs.
    """
    return {
        "fc": fc,
        "fused_norm": "input_norm",
        "feature_norms": "fc_norm",
        "hidden_norm": f"{layer}.hidden_norm",
        "input_norm": f"{layer}.input_layernorm",
        "attention": f"{layer}.self_attn",
        "out": f"{layer}.self_attn.o_proj",
        "mlp_norm": f"{layer}.post_attention_layernorm",
        "mlp": f"{layer}.mlp",
        "down": f"{layer}.mlp.down_proj",
        "own_embedding": "embed_tokens",
        "own_head": "lm_head",
    }


def _eagle_fields(record: Fields) -> Fields:
    """Return the fields with those of a layer, and those of `eagle_config` where they are new.

    Ids of hidden states at the top level count the layers before them (vLLM). Ids in `eagle_config`
    are the index of the layer that outputs them (SGLang).
    """
    nested = record.get("eagle_config") or {}
    fields = nested | record | (record.get("transformer_layer_config") or {})
    ids = "eagle_aux_hidden_state_layer_ids"
    fields[ids] = record.get(ids) or [i + 1 for i in nested.get(ids) or ()]
    return fields


def _eagle(publisher: str, layer: str, fc: str = "fc") -> Layout:
    return Layout(
        publisher,
        EAGLE,
        lambda record: record.get("speculators_model_type") in (None, "eagle", "eagle3"),
        (f"{fc}.weight", f"{layer}.self_attn.q_proj.weight"),
        _eagle_fields,
        _eagle_modules(layer, fc),
    )


EAGLE3 = _eagle("EAGLE-3 (fc.weight, midlayer.*)", "midlayer")


# --- block drafters ---


def _flat(record: Fields) -> Fields:
    """Return a configuration's fields with those of its parts.

    The anchor's row drafts a token in DSpark's drafters, and none in DFlash's drafters.
    """
    layer = record.get("transformer_layer_config") or {}
    nested = record.get("dflash_config") or {}
    fields = record | layer | nested
    if fields.get("sample_from_anchor") is None:
        named_dspark = any("DSpark" in name for name in architectures(record))
        says_dspark = fields.get("projector_type") == "dspark" or fields.get("shift_label")
        is_dspark = named_dspark or says_dspark or "dflash_config" not in record
        fields["sample_from_anchor"] = is_dspark
    return fields


def _speculators_block(record: Fields) -> Fields:
    """Return the fields of a block drafter of speculators.

    Its ids of hidden states count the layers before them. Layers with a window may be causal.
    """
    fields = _flat(record)
    aux_layers: Any = fields.get("aux_hidden_state_layer_ids")
    if isinstance(aux_layers, list) and all(type(layer) is int for layer in aux_layers):
        aux_layers = [layer - 1 for layer in aux_layers]
    if record.get("sample_from_anchor") is None:
        fields["sample_from_anchor"] = record["speculators_model_type"] == "dspark"
    fields["target_layer_ids"] = aux_layers
    fields["is_causal"] = False if fields.get("sliding_window_non_causal") else None
    return fields


def _muse(record: Fields) -> Fields:
    """Return the fields of Muse Glimmer's assistant.

    It is a DFlash whose rows see as far as the window on both sides, the end included
    (`sliding_window_bidirectional_overlay` in transformers).
    """
    fields = _flat(record)
    fields["sliding_window"] = whole(fields, "sliding_window", 1, None) + 1
    if not fields.get("layer_types"):
        fields["layer_types"] = [WINDOWED] * whole(fields, "num_hidden_layers", 1, None)
    fields["sample_from_anchor"] = fields["is_causal"] = False
    return fields


def _gemma_dspark(record: Fields) -> Fields:
    """Return the fields of a DSpark for Gemma 4.

    Its layers are Gemma 4's layers without a window, and embeddings are scaled as in Gemma 4.
    """
    fields = _flat(record)
    keys_only = bool(fields.get("attention_k_eq_v"))
    kv_heads = "num_global_key_value_heads" if keys_only else "num_key_value_heads"
    rope = fields.get("rope_parameters") or {}
    if fields.get("input_embedding_scale") is None:
        fields["input_embedding_scale"] = whole(fields, "hidden_size", 1, None) ** 0.5
    fields["head_dim"] = whole(fields, "global_head_dim", 1, None)
    fields["num_key_value_heads"] = whole(fields, kv_heads, 1, None)
    fields["rope_parameters"] = rope.get("full_attention", rope) or None
    return fields


def architectures(record: Fields) -> list[str]:
    """Return the names of a configuration's architectures."""
    named = record.get("architectures") or []
    return [str(name) for name in (named if isinstance(named, list) else [named])]


def _is_block(record: Fields) -> bool:
    nested = record.get("dflash_config")
    fields = record | nested if isinstance(nested, dict) else record
    return "block_size" in fields and ("dflash_config" in record or "target_layer_ids" in record)


# --- fields ---


def whole(
    fields: Fields, name: str, least: int, most: int | None, default: int | None = None
) -> int:
    """Return a whole number of a configuration, `default` where it is missing if there is one.

    Raises `InvalidInput` for anything else.
    """
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidInput(f"its config says {name}: {value!r}; must be a whole number {bounds}")
    return value


def scale(fields: Fields, name: str, default: float) -> float:
    """Return a factor of a configuration, `default` where it is missing. Raises `InvalidInput`."""
    value = default if fields.get(name) is None else fields[name]
    fits = type(value) in (int, float) and math.isfinite(value) and value >= 0
    if not fits or (value == 0 and default):
        raise InvalidInput(f"its config says {name}: {value!r}; must be a positive number")
    return float(value)


# --- the table ---

LAYOUTS = (
    Layout(
        "Gemma 4's assistants",
        ASSISTANT,
        lambda record: record.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant"),
    ),
    Layout(
        "speculators' dflash, dflash2 and dspark",
        BLOCK,
        lambda record: record.get("speculators_model_type") in ("dflash", "dflash2", "dspark"),
        fields=_speculators_block,
    ),
    Layout(
        "Muse Glimmer's assistant",
        BLOCK,
        lambda record: _is_block(record) and record.get("model_type") == "muse_glimmer_assistant",
        fields=_muse,
        renamed={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
    ),
    Layout(
        "DeepSpec's DSpark for Gemma 4",
        BLOCK,
        lambda record: _is_block(record) and GEMMA_DSPARK in architectures(record),
        fields=_gemma_dspark,
    ),
    Layout("DFlash, DFlash2 and DSpark", BLOCK, _is_block, fields=_flat),
    _eagle("EAGLE and EAGLE-2 (fc.weight, layers.0.*)", "layers.0"),
    EAGLE3,
    _eagle(
        "speculators' eagle and eagle3 (with fusion_fc.weight: transformer.*)",
        "transformer",
        "fusion_fc",
    ),
)
LLAMA_CPP = {  # by architecture
    DFLASH: Layout("llama.cpp's dflash", BLOCK, lambda record: False),
    GGUF_ASSISTANT: Layout("llama.cpp's gemma4-assistant", ASSISTANT, lambda record: False),
}
OTHER = Layout("", EAGLE, lambda record: False)  # a feature drafter in a layout of none of these

# llama.cpp's names of a block drafter's modules, and what the network calls them
GGUF_MODULES = {
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
GGUF_IN_LAYER = {  # the same, of a layer
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
# in the file's metadata, by the names of configurations
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "block_size": "block_size",
}
GGUF_OPTIONAL_KEYS = {
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


def layout_of(path: Path) -> Layout | None:
    """Return the layout of a drafter in a folder or `.gguf` file, None where there is none.

    Only a configuration and names of tensors are read. Raises `InvalidInput` for a file that can't
    be read.
    """
    if not path.is_dir():
        if path.suffix != ".gguf" or not path.is_file():
            return None
        return LLAMA_CPP.get(str(GgufFile(path).metadata.get("general.architecture")))
    record = read_json(path / "config.json")
    possible = [layout for layout in LAYOUTS if layout.recognises(record)]
    if possible and not possible[0].tensors:
        return possible[0]
    try:
        names: Collection[str] = read_tensors(path).keys()
    except InvalidInput:
        names = ()
    for layout in possible:
        if all(name in names for name in layout.tensors):
            return layout
    unknown = "fc.weight" in names or "speculators_model_type" in record
    return OTHER if unknown else None


def is_kind(path: Path, kind: str) -> bool:
    """Whether a folder or `.gguf` file holds a drafter of this kind."""
    layout = layout_of(path)
    return layout is not None and layout.kind == kind


def block_layout(record: Fields) -> Layout:
    """Return the layout of a block drafter's configuration; that of DSpark for any other."""
    blocks = [layout for layout in LAYOUTS if layout.kind == BLOCK]
    return next((layout for layout in blocks if layout.recognises(record)), blocks[-1])
