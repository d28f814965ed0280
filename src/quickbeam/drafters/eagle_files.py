"""Reads and writes a feature drafter's folder, in any layout of EAGLE that `layouts.py` has.

The stored tensors decide what they can show: biases, heads, an embedding of its own. The
configuration decides the rest. A tensor that has no place in the network is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.folder import (
    SIZES,
    Parts,
    TargetParts,
    assemble,
    check_tensors,
    layer_fields,
    layer_windows,
    named_errors,
    read_tensors,
    refuse_other_target,
    write_folder,
)
from quickbeam.drafters.layouts import EAGLE, EAGLE3, LAYOUTS, Fields, layout_of
from quickbeam.drafters.shortlist.layout import require_distinct
from quickbeam.errors import InvalidInput
from quickbeam.models.base import check_layers
from quickbeam.models.weights.checkpoint import read_json

TARGET_HEAD = "quickbeam_target_head"  # in a configuration: a stored head's rows are the target's
ROWS = 64  # how many rows of the embedding are compared with the target's
# tensors that the network doesn't need, that are read by name, or that it makes itself
IGNORED = {
    *("d2t", "t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"),
    *("tokens", "layers.0.self_attn.rotary_emb.inv_freq"),
    *("midlayer.self_attn.rotary_emb.inv_freq", "transformer.self_attn.rotary_emb.inv_freq"),
}


def load_eagle(folder: Path, target: TargetParts) -> EagleHead:
    """Load the drafter in `folder` for a target.

    It keeps an embedding of its own only if the stored one differs from the target's module: in
    width, or in the values of a sample of rows by more than bfloat16's rounding. Without a stored
    head it uses the target's. Weights keep the dtype they are stored in, and stay memory-mapped
    until they are cast or moved.

    Raises `InvalidInput` where the folder is no drafter of a known layout, belongs to another
    target, or holds a variant that `EagleHead` can't represent.
    """
    fields = read_json(folder / "config.json")
    with named_errors(folder):
        state = read_tensors(folder)
        layout = layout_of(folder)
        if layout is None or not layout.modules:
            raise InvalidInput(_not_known(fields, state))
        fields = layout.fields(fields)
        config = _config(fields, state, layout.modules, target)
        parts = _parts(config, layout.modules)
        ignored = set(IGNORED)
        if config.own_embedding:
            ignored.remove("embed_tokens.weight")
        if config.join == "input" or fields.get(TARGET_HEAD):
            # EAGLE and EAGLE-2 use the target's head
            ignored.add("lm_head.weight")
        with torch.device("meta"):
            network = EagleHead(config, target.embedding, target.head)
        weights = assemble(network, state, parts, ignored)
        if config.draft_vocab_size is not None:
            every_token = config.draft_vocab_size in (fields.get("vocab_size"), target.vocab)
            weights["tokens"] = _tokens(state, config.draft_vocab_size, every_token)
        _check_target(config, weights.get("tokens"), target)
    network.load_state_dict(weights, assign=True)
    return network.requires_grad_(False)


def _not_known(fields: Fields, state: Mapping[str, torch.Tensor]) -> str:
    kind = fields.get("speculators_model_type")
    tensors = ", ".join(sorted(state)[:3])
    known = ", ".join(layout.publisher for layout in LAYOUTS if layout.kind == EAGLE)
    return (
        f"this is no known feature drafter (speculators_model_type {kind!r}, tensors {tensors}, "
        f"...); known: {known}"
    )


def _config(
    fields: Fields,
    state: Mapping[str, torch.Tensor],
    modules: Mapping[str, str],
    target: TargetParts,
) -> EagleConfig:
    """Return a network's shape by a configuration's fields and the stored tensors.

    `modules`: the stored names of the network's modules.
    """
    layer = layer_fields(fields)
    size = layer["hidden_size"]
    activation = fields.get("hidden_act") or "silu"
    vocab = int(fields.get("vocab_size") or target.vocab)
    wide = f"{modules['hidden_norm']}.weight" in state
    embedding = state.get("embed_tokens.weight")
    same_size = size == target.size
    own_embedding = embedding is not None and (not same_size or _differs(embedding, target))
    embedded = len(embedding) if own_embedding and embedding is not None else target.vocab
    lm_head = state.get("lm_head.weight") if wide and not fields.get(TARGET_HEAD) else None
    draft_vocab = vocab if fields.get(TARGET_HEAD) else fields.get("draft_vocab_size")
    draft_vocab = draft_vocab or (vocab if lm_head is None else len(lm_head))
    if fields.get(TARGET_HEAD) and vocab != target.vocab:
        raise InvalidInput(
            f"it drafts {vocab} tokens with the target's head, the target has {target.vocab}: it "
            "was made for another model"
        )
    if activation != "silu":
        raise InvalidInput(f"its config says hidden_act: {activation!r}; known: silu")
    if wide and lm_head is None and (draft_vocab != vocab or not same_size):
        raise InvalidInput(
            "it lacks lm_head.weight, and the target's head can't stand in: the "
            "drafter's vocabulary or width is another"
        )
    # EAGLE-3 without ids reads hidden states near the first, the middle and the last layer
    count = target.layers
    aux_layers = fields["eagle_aux_hidden_state_layer_ids"] or (2, count // 2, count - 3)
    return EagleConfig(
        **layer,
        layers=tuple(sorted(aux_layers)) if wide else (count + 1,),
        target_size=(fields.get("target_hidden_size") if wide else None) or size,
        vocab_size=embedded,
        draft_vocab_size=None if lm_head is None else draft_vocab,
        join="attention" if wide else "input",
        feature_norms=wide and bool(fields.get("fc_norm") or "fc_norm.0.weight" in state),
        fused_norm=wide and bool(fields.get("norm_before_fc") or "input_norm.weight" in state),
        norm_before_residual=wide and bool(fields.get("norm_before_residual")),
        final_norm=wide,
        norm_output=wide and bool(fields.get("norm_output")),
        own_embedding=own_embedding,
        fc_bias=f"{modules['fc']}.bias" in state,
        attention_bias=f"{modules['attention']}.q_proj.bias" in state,
        window=next(iter(layer_windows(fields, 1)), None),
    )


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


def _parts(config: EagleConfig, modules: Mapping[str, str]) -> Parts:
    """Return which stored modules the network's are made of.

    `modules`: the stored names.
    """
    query = config.heads * config.head_dim
    key = config.kv_heads * config.head_dim
    attention = modules["attention"]
    mlp = modules["mlp"]
    norms = modules["feature_norms"]
    parts: dict[str, Sequence[tuple[str, int | None]]] = {
        name: [(stored, None)] for name, stored in modules.items()
    }
    for i in range(len(config.layers)):
        parts[f"feature_norms.{i}"] = [(f"{norms}.{i}", None)]
    parts["qkv"] = [
        (f"{attention}.q_proj", query),
        (f"{attention}.k_proj", key),
        (f"{attention}.v_proj", key),
    ]
    inner = config.intermediate_size
    parts["gate_up"] = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
    return parts


def _tokens(state: Mapping[str, torch.Tensor], count: int, every_token: bool) -> torch.Tensor:
    """Return `[count]`: the target's token for each row of the drafter's head.

    The stored `d2t` holds the difference between token and row. It is ignored where the head has
    `every_token`. Raises `InvalidInput` if `d2t` is missing or has another shape.
    """
    if every_token:
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


class FileHead(NamedTuple):
    """Rows of the target's `head` `[vocab, d]` that a drafter's file holds: those of `tokens`."""

    tokens: torch.Tensor
    head: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the rows and, as published, the tokens.

        `d2t` is what is added to a row's number to get its token, `t2d` whether a token has a row.
        """
        tokens = self.tokens.sort().values
        has_row = torch.zeros(len(self.head), dtype=torch.bool)
        has_row[tokens] = True
        offsets = tokens - torch.arange(len(tokens))
        return {"lm_head.weight": self.head[tokens], "d2t": offsets, "t2d": has_row}


def save_eagle(
    network: EagleHead,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    head: FileHead | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` in EAGLE-3's layout.

    The drafter has no embedding and no head of its own: an engine gives it the target's. `head`:
    for engines that want a head in the file; `load_eagle` takes the target's in its place. The
    configuration numbers hidden states by the layers before them, and in `eagle_config` by the
    layer that outputs them.
    """
    config, modules = network.config, EAGLE3.modules
    parts = _parts(config, modules)
    tensors = dict[str, torch.Tensor]()
    for name, tensor in network.state_dict().items():
        module, _, kind = name.rpartition(".")
        stored = parts.get(module, [(module, None)])
        rows = [count or len(tensor) for _, count in stored]
        for (stored_module, _), part in zip(stored, tensor.split(rows), strict=True):
            tensors[f"{stored_module}.{kind}"] = part
    if head is not None:
        tensors |= head.tensors()
    ids = "eagle_aux_hidden_state_layer_ids"
    record: Fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{stored: getattr(config, field) for field, stored in SIZES.items()},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        **config.rope,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size if head is None else len(head.tokens),
        TARGET_HEAD: True,
        "target_hidden_size": config.target_size,
        ids: list(config.layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            ids: [layer - 1 for layer in config.layers],
        },
        "fc_norm": config.feature_norms,
        "tie_word_embeddings": False,
    }
    write_folder(folder, record, tensors, dtype)
