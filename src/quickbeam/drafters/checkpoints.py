"""Loads published feature drafters as an `EagleHead`.

Reads the folders that EAGLE, EAGLE-2, EAGLE-3 and `speculators` write, and quickbeam's own.

The stored tensors decide what they can show: biases, heads, an embedding of its own. The
configuration decides the rest. A tensor that has no place in the network is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quickbeam.drafters.eagle_model import MODEL_TYPE, EagleConfig, EagleHead
from quickbeam.drafters.folder import (
    Parts,
    TargetParts,
    assemble,
    check_tensors,
    layer_fields,
    layer_windows,
    named_errors,
    read_tensors,
    refuse_other_target,
)
from quickbeam.drafters.shortlist.layout import require_distinct
from quickbeam.errors import InvalidInput
from quickbeam.models.base import check_layers
from quickbeam.models.weights.checkpoint import read_json

KNOWN = (
    "EAGLE and EAGLE-2 (fc.weight, layers.0.*), EAGLE-3 (fc.weight, midlayer.*), speculators' "
    "eagle and eagle3, quickbeam's own"
)
DROPPED = "model_type", "activation", "input_norm", "mlp_bias"  # of older configurations
ROWS = 64  # how many rows of the embedding are compared with the target's
# tensors that the network doesn't need, that are read by name, or that it makes itself
IGNORED = {
    *("d2t", "t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"),
    *("tokens", "layers.0.self_attn.rotary_emb.inv_freq"),
    *("midlayer.self_attn.rotary_emb.inv_freq", "transformer.self_attn.rotary_emb.inv_freq"),
}


def is_eagle(folder: Path) -> bool:
    """Whether `folder` holds a feature drafter rather than a causal language model.

    Reads only its configuration and tensor names.
    """
    try:
        record = read_json(folder / "config.json")
        named = record.get("model_type") == MODEL_TYPE or "speculators_model_type" in record
        return named or "fc.weight" in read_tensors(folder)
    except InvalidInput:
        return False


def load_eagle(folder: Path, target: TargetParts) -> EagleHead:
    """Load the drafter in `folder` for a target.

    It keeps an embedding of its own only if the stored one differs from the target's module: in
    width, or in the values of a sample of rows by more than bfloat16's rounding. Without a stored
    head it uses the target's. Weights keep the dtype they are stored in, and stay memory-mapped
    until they are cast or moved.

    Raises `InvalidInput` where the folder is no drafter of a known layout, belongs to another
    target, or holds a variant that `EagleHead` can't represent.
    """
    record, fields = read_json(folder / "config.json"), dict[str, Any]()
    parts: Parts = {}
    ignored = set[str]()
    with named_errors(folder):
        state = read_tensors(folder)
        if record.get("model_type") == MODEL_TYPE:
            known = {k: v for k, v in record.items() if k not in DROPPED}
            config = EagleConfig(**known | {"layers": tuple(record["layers"])})
        else:
            prefix, fc = _layout(record, state)
            fields = {**record, **(record.get("transformer_layer_config") or {})}
            config = _config(fields, state, prefix, target)
            parts, ignored = _parts(config, prefix, fc), set(IGNORED)
            if config.own_embedding:
                ignored.remove("embed_tokens.weight")
            if config.join == "input":  # EAGLE and EAGLE-2 use the target's head
                ignored.add("lm_head.weight")
        with torch.device("meta"):
            network = EagleHead(config, target.embedding, target.head)
        weights = assemble(network, state, parts, ignored)
        if config.draft_vocab_size is not None and "tokens" not in weights:
            whole = config.draft_vocab_size in (fields.get("vocab_size"), target.vocab)
            weights["tokens"] = _tokens(state, config.draft_vocab_size, whole)
        _check_target(config, weights.get("tokens"), target)
    network.load_state_dict(weights, assign=True)
    return network.requires_grad_(False)


def _layout(record: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Return the prefix of the layer's tensor names, and the name of the fusing linear layer.

    Raises `InvalidInput` if the names belong to no known layout.
    """
    kind = record.get("speculators_model_type")
    layers = ("midlayer", "layers.0", "transformer")
    prefixes = [name for name in layers if f"{name}.self_attn.q_proj.weight" in state]
    fc = [name for name in ("fc", "fusion_fc") if f"{name}.weight" in state]
    if kind not in (None, "eagle", "eagle3") or not prefixes or not fc:
        given = f"speculators_model_type {kind!r}, tensors {', '.join(sorted(state)[:3])}, ..."
        raise InvalidInput(f"this is no known feature drafter ({given}); known: {KNOWN}")
    return prefixes[0], fc[0]


def _config(
    fields: dict[str, Any], state: dict[str, torch.Tensor], prefix: str, target: TargetParts
) -> EagleConfig:
    layer, flags = layer_fields(fields), {**(fields.get("eagle_config") or {}), **fields}
    size, activation = layer["hidden_size"], fields.get("hidden_act") or "silu"
    vocab = int(fields.get("vocab_size") or target.vocab)
    wide = f"{prefix}.hidden_norm.weight" in state
    stored, shared = state.get("embed_tokens.weight"), size == target.size
    own = stored is not None and (not shared or _differs(stored, target))
    lm_head = state.get("lm_head.weight") if wide else None
    draft_vocab = fields.get("draft_vocab_size") or (vocab if lm_head is None else len(lm_head))
    if activation != "silu":
        raise InvalidInput(f"its config says hidden_act: {activation!r}; known: silu")
    if wide and lm_head is None and (draft_vocab != vocab or not shared):
        raise InvalidInput(
            "it lacks lm_head.weight, and the target's head can't stand in: the "
            "drafter's vocabulary or width is another"
        )
    read = flags.get("target_hidden_size") if wide else None
    return EagleConfig(
        **layer,
        layers=_layers(fields, target.layers) if wide else (target.layers + 1,),
        target_size=read or size,
        vocab_size=len(stored) if own and stored is not None else target.vocab,
        draft_vocab_size=None if lm_head is None else draft_vocab,
        join="attention" if wide else "input",
        feature_norms=wide and bool(flags.get("fc_norm") or "fc_norm.0.weight" in state),
        fused_norm=wide and bool(flags.get("norm_before_fc") or "input_norm.weight" in state),
        norm_before_residual=wide and bool(flags.get("norm_before_residual")),
        final_norm=wide,
        norm_output=wide and bool(flags.get("norm_output")),
        own_embedding=own,
        fc_bias="fc.bias" in state or "fusion_fc.bias" in state,
        attention_bias=f"{prefix}.self_attn.q_proj.bias" in state,
        window=next(iter(layer_windows(fields, 1)), None),
    )


def _layers(fields: dict[str, Any], count: int) -> tuple[int, ...]:
    """Return the layers whose hidden states an EAGLE-3 drafter reads.

    Ids at the top level of the configuration count the layers before a hidden state (vLLM). Ids in
    `eagle_config` are the index of the layer that outputs it (SGLang). Without ids the layers are
    2, `count // 2` and `count - 3`, for a target of `count` layers.
    """
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = (
        fields.get("eagle_aux_hidden_state_layer_ids")
        or (nested and [i + 1 for i in nested])
        or (2, count // 2, count - 3)
    )
    return tuple(sorted(ids))


def _differs(stored: torch.Tensor, target: TargetParts) -> bool:
    """Whether a drafter's stored embedding differs from the target's.

    Compares the width and a sample of `ROWS` rows, up to bfloat16's rounding.
    """
    ids = torch.linspace(0, min(len(stored), target.vocab) - 1, ROWS).long()
    parameter = next(target.embedding.parameters(), ids)
    with torch.inference_mode():
        theirs = target.embedding(ids.to(parameter.device)).float().cpu()
    return theirs.shape[-1] != stored.shape[-1] or not torch.allclose(
        stored[ids].float(), theirs, rtol=2**-7, atol=1e-5
    )


def _parts(config: EagleConfig, prefix: str, fc: str) -> Parts:
    """Return which stored modules the network's are made of."""
    attention, mlp, inner = f"{prefix}.self_attn", f"{prefix}.mlp", config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    named = {
        "fc": fc,
        "fused_norm": "input_norm",
        "hidden_norm": f"{prefix}.hidden_norm",
        "input_norm": f"{prefix}.input_layernorm",
        "out": f"{attention}.o_proj",
        "mlp_norm": f"{prefix}.post_attention_layernorm",
        "down": f"{mlp}.down_proj",
        "own_embedding": "embed_tokens",
        "own_head": "lm_head",
        **{f"feature_norms.{i}": f"fc_norm.{i}" for i in range(len(config.layers))},
    }
    rows = {"q": query, "k": key, "v": key}
    return {
        **{module: [(stored, None)] for module, stored in named.items()},
        "qkv": [(f"{attention}.{part}_proj", count) for part, count in rows.items()],
        "gate_up": [(f"{mlp}.{part}_proj", inner) for part in ("gate", "up")],
    }


def _tokens(state: dict[str, torch.Tensor], count: int, whole: bool) -> torch.Tensor:
    """Return `[count]`: the target's token for each row of the drafter's head.

    The stored `d2t` holds the difference between token and row. It is ignored where the head has
    the `whole` vocabulary. Raises `InvalidInput` if `d2t` is missing or has another shape.
    """
    if whole:
        return torch.arange(count)
    check_tensors(state, {"d2t": [count]})
    return torch.arange(count) + state["d2t"].long()


def _check_target(config: EagleConfig, tokens: torch.Tensor | None, target: TargetParts) -> None:
    widths = [config.target_size] + [config.hidden_size] * (not config.own_embedding)
    refuse_other_target(*widths, target=target.size)
    check_layers(config.layers, target.layers)
    if config.own_embedding and config.vocab_size < target.vocab:
        raise InvalidInput(
            f"its embedding has {config.vocab_size} tokens, the target has "
            f"{target.vocab}: it was made for another model"
        )
    if tokens is not None:
        require_distinct(tokens, target.vocab, "its head (d2t), which was made for another model,")
