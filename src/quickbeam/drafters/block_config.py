"""The shape of a block drafter, and how the published configurations say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quickbeam.drafters.folder import SIZES, WINDOWED, layer_fields, layer_windows
from quickbeam.drafters.layouts import (
    GEMMA_DSPARK,
    Fields,
    architectures,
    block_layout,
    scale,
    whole,
)
from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import MOST as MAX_LAYERS

MAX_BLOCK_SIZE = 1024  # rows
# fields that may have these values alone, and the same by kind of layer, whether Gemma's
ACCEPTED: tuple[tuple[Any, ...], ...] = (
    ("markov_head_type", "vanilla"),
    ("enable_moe_block", False),
    ("hidden_size_per_layer_input", 0),
    ("projector_type", "dflash", "dflash2", "dspark"),
    ("draft_ffn_type", "dense"),
)
ACTIVATIONS = ("hidden_act", "silu"), ("hidden_activation", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class BlockConfig:
    """The shape of a block drafter, of `depth` layers.

    - `aux_layers`: which hidden states of the target it reads (`Model.set_aux_layers`), each
      `target_size` wide.
    - `block_size`: how many rows a pass has. `mask_token`: the input of all but the anchor's.
    - `from_anchor`: whether the anchor's row drafts the token after the anchor (DSpark). Otherwise
      row k drafts the token at its own position, and the anchor's drafts none (DFlash).
    - `causal`: whether rows see only the rows before them (JetSpec). None: in layers with a window.
    - `windows`: by layer, how many of the last positions a row sees, its own among them; None for
      all. Empty where no layer has a window.
    - `markov_rank`: the rank of the Markov head, or 0 for none.
    - `confidence`: whether a head says how likely a drafted token is accepted, by its row, and with
      a Markov head by the token before it.
    - `draft_vocab_size`: how many tokens its own head has, or None for the target's head.
    - `top_k`: how many tokens of a row the selector of DFlash2 chooses from, of rank `markov_rank`;
      0 for a Markov head or none. `conv_taps`, `conv_group`: how many rows its convolutions read,
      and how many columns share the part of a coefficient that depends on the row; 0 for none.
    - `embedding_scale`: what rows of the target's embedding are taken times; `output_multiplier`:
      the head's logits, which are then soft-capped by `softcap`, if it isn't 0.
    - `gemma`: layers are Gemma 4's, with norms around both sublayers and values that are normed;
      with `values_are_keys` these are what keys are made of.
    - `own_mask`: the mask's embedding is its own, not the target's.
    - `rope`: further fields of a Llama configuration that shape the rotary angles.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    depth: int
    aux_layers: tuple[int, ...]
    target_size: int
    vocab_size: int
    block_size: int
    mask_token: int
    from_anchor: bool = True
    causal: bool | None = False
    windows: tuple[int | None, ...] = ()
    markov_rank: int = 0
    confidence: bool = False
    draft_vocab_size: int | None = None
    top_k: int = 0
    conv_taps: int = 0
    conv_group: int = 0
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float = 0.0
    gemma: bool = False
    values_are_keys: bool = False
    own_mask: bool = False
    eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """How many positions a pass drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def attention(self, layer: int) -> tuple[int | None, bool]:
        """Return a layer's window, and whether it is causal."""
        window = self.windows[layer] if self.windows else None
        return window, window is not None if self.causal is None else self.causal

    @staticmethod
    def of(record: Fields, target_size: int, vocab_size: int) -> BlockConfig:
        """Read the fields of a published `config.json`, for a target of this width and vocabulary.

        Raises `InvalidInput` for fields that the network can't represent.
        """
        fields = block_layout(record).fields(record)
        gemma = GEMMA_DSPARK in architectures(record)
        for name, *accepted in (*ACCEPTED, ACTIVATIONS[gemma]):
            value = fields.get(name)
            if value is not None and value not in accepted:
                raise InvalidInput(
                    f"its config says {name}: {value!r}; known: {', '.join(map(str, accepted))}"
                )
        depth = whole(fields, "num_hidden_layers", 1, MAX_LAYERS)
        block_size = whole(fields, "block_size", 1, MAX_BLOCK_SIZE)
        windows, causal = _windows(fields, depth, block_size)
        top_k = whole(fields, "selector_top_k", 0, None, default=0)
        rank = whole(fields, "markov_rank", 0, None, default=0)
        config = BlockConfig(
            **layer_fields(fields),
            depth=depth,
            aux_layers=_aux_layers(fields),
            target_size=target_size,
            vocab_size=vocab_size,
            block_size=block_size,
            mask_token=whole(fields, "mask_token_id", 0, None),
            from_anchor=bool(fields["sample_from_anchor"]),
            causal=causal,
            windows=windows,
            markov_rank=whole(fields, "selector_rank", 1, None) if top_k else rank,
            confidence=bool(fields.get("enable_confidence_head")),
            draft_vocab_size=_draft_vocab_size(fields, vocab_size),
            top_k=top_k,
            conv_taps=whole(fields, "conv_kernel_size", 0, MAX_BLOCK_SIZE, default=0),
            conv_group=whole(fields, "conv_group_size", 0, None, default=0),
            embedding_scale=scale(fields, "input_embedding_scale", 1.0),
            output_multiplier=scale(fields, "output_multiplier", 1.0),
            softcap=scale(fields, "final_logit_softcapping", 0.0),
            gemma=gemma,
            values_are_keys=gemma and bool(fields.get("attention_k_eq_v")),
            own_mask=fields.get("own_mask_embedding") is True,
        )
        config._refuse_mixtures()
        return config

    def _refuse_mixtures(self) -> None:
        """Raise `InvalidInput` for parts that no known drafter has together."""
        size = self.hidden_size
        group = self.conv_group
        if self.conv_taps and (not group or size % group):
            raise InvalidInput(
                f"its config says conv_group_size: {group}; must divide the width, {size}"
            )
        if self.gemma and self.conv_taps:
            raise InvalidInput("it has Gemma's layers and convolutions, which is not known")
        if self.draft_vocab_size is not None and self.top_k:
            raise InvalidInput("it has a selector and a head of its own, which is not known")

    def record(self) -> Fields:
        """Return the fields that `of` reads, in DSpark's layout."""
        record: Fields = {"architectures": ["Qwen3DSparkModel"]}
        for name, published in SIZES.items():
            record[published] = getattr(self, name)
        record |= {
            "num_hidden_layers": self.depth,
            "rms_norm_eps": self.eps,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token,
            "target_layer_ids": [layer - 1 for layer in self.aux_layers],
            "sample_from_anchor": self.from_anchor,
            "causal_head": self.causal,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "selector_rank": self.markov_rank if self.top_k else 0,
            "selector_top_k": self.top_k,
            "conv_kernel_size": self.conv_taps,
            "conv_group_size": self.conv_group,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": bool(self.markov_rank),
            "draft_vocab_size": self.draft_vocab_size,
            "own_mask_embedding": self.own_mask,
            "input_embedding_scale": self.embedding_scale,
            "output_multiplier": self.output_multiplier,
            "final_logit_softcapping": self.softcap,
        }
        record |= self.rope
        if self.windows:
            kinds = [WINDOWED if window else "full_attention" for window in self.windows]
            record["layer_types"] = kinds
            record["sliding_window"] = max(window or 0 for window in self.windows)
            record["use_sliding_window"] = True
        if self.gemma:
            record["architectures"] = [GEMMA_DSPARK]
            record["attention_k_eq_v"] = self.values_are_keys
            record["global_head_dim"] = self.head_dim
            record["num_global_key_value_heads"] = self.kv_heads
        return record


def _aux_layers(fields: Fields) -> tuple[int, ...]:
    """Return which hidden states are read; configurations count layers from 0."""
    layers = fields.get("target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise InvalidInput(f"its config says target_layer_ids: {layers!r}; must be numbers")
    return tuple(layer + 1 for layer in layers)


def _draft_vocab_size(fields: Fields, vocab_size: int) -> int | None:
    """Return how many tokens its own head has; None where that is the target's."""
    size = fields.get("draft_vocab_size")
    if size in (None, 0, vocab_size, fields.get("vocab_size")):
        return None
    return whole(fields, "draft_vocab_size", 1, vocab_size)


def _windows(
    fields: Fields, depth: int, block_size: int
) -> tuple[tuple[int | None, ...], bool | None]:
    """Return `windows` and `causal` of a `BlockConfig`.

    `use_swa` gives all layers a window where `layer_types` gives none one, and leaves them not
    causal (MiMo, vLLM). Raises `InvalidInput` for a window shorter than a block whose rows see one
    another: no published drafter has one, and engines differ on it.
    """
    causal: bool | None = None
    for name in ("causal", "is_causal", "causal_head"):  # the last counts
        if fields.get(name) is not None:
            causal = bool(fields[name])
    size: Any = fields.get("swa_window_size") or fields.get("sliding_window")
    used = fields.get("use_sliding_window")
    if fields.get("swa_window_size"):  # beside which transformers saves that none is used
        used = used or None
    fields = {**fields, "sliding_window": size, "use_sliding_window": used}
    if fields.get("use_swa") and WINDOWED not in (fields.get("layer_types") or ()):
        fields |= {"layer_types": [WINDOWED] * depth, "use_sliding_window": True}
        causal = bool(causal)
    windows = layer_windows(fields, depth)
    if windows and causal is False and size < block_size:
        raise InvalidInput(
            f"its sliding_window {size} is shorter than its block of {block_size}, whose rows see "
            "one another"
        )
    return windows, causal if windows else bool(causal)
