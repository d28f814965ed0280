"""The shape of a block drafter, and how the published configurations say it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from quickbeam.drafters.folder import SIZES, WINDOWED, layer_fields, layer_windows
from quickbeam.drafters.layouts import GEMMA_DSPARK, architectures, block_layout, whole
from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import MOST as LAYERS

MOST = 1024  # rows of a block, at most
# by field of `BlockConfig`: its name in config.json, the least and largest number
NUMBERS = {
    "depth": ("num_hidden_layers", 1, LAYERS),
    "block_size": ("block_size", 1, MOST),
    "mask_token": ("mask_token_id", 0, None),
}
OPTIONAL = {  # the same, 0 where it is not given
    "markov_rank": ("markov_rank", 0, None),
    "top_k": ("selector_top_k", 0, None),
    "conv_taps": ("conv_kernel_size", 0, MOST),
    "conv_group": ("conv_group_size", 0, None),
}
SCALES = {  # by field: its name, and what holds where it is not given
    "embedding_scale": ("input_embedding_scale", 1.0),
    "output_multiplier": ("output_multiplier", 1.0),
    "softcap": ("final_logit_softcapping", 0.0),
}
# fields that may have these values alone, and by kind of layer, whether Gemma's
KNOWN: tuple[tuple[Any, ...], ...] = (
    ("markov_head_type", "vanilla"),
    ("enable_moe_block", False),
    ("hidden_size_per_layer_input", 0),
    ("projector_type", "dflash", "dflash2", "dspark"),
    ("draft_ffn_type", "dense"),
)
ACTIVATIONS = ("hidden_act", "silu"), ("hidden_activation", "gelu_pytorch_tanh")


def scale(fields: dict[str, Any], name: str, usual: float) -> float:
    """Return a factor of a configuration, `usual` where it is missing. Raises `InvalidInput`."""
    value = usual if fields.get(name) is None else fields[name]
    fits = type(value) in (int, float) and math.isfinite(value) and value >= 0
    if not fits or (value == 0 and usual):
        raise InvalidInput(f"its config says {name}: {value!r}; must be a positive number")
    return float(value)


@dataclass(frozen=True)
class BlockConfig:
    """The shape of a block drafter, of `depth` layers.

    - `taps`: which hidden states of the target it reads (`Features`), each `target_size` wide.
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
      the head's logits, which are then bent to stay below `softcap`, if it isn't 0.
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
    taps: tuple[int, ...]
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
    def of(record: dict[str, Any], target_size: int, vocab_size: int) -> BlockConfig:
        """Read the fields of a published `config.json`, for a target of this width and vocabulary.

        Raises `InvalidInput` for fields that the network can't represent.
        """
        fields, names = block_layout(record).fields(record), architectures(record)
        gemma = GEMMA_DSPARK in names
        for name, *known in (*KNOWN, ACTIVATIONS[gemma]):
            if (value := fields.get(name)) is not None and value not in known:
                raise InvalidInput(
                    f"its config says {name}: {value!r}; known: {', '.join(map(str, known))}"
                )
        from_anchor = fields.get("sample_from_anchor")
        if from_anchor is None:
            of_dspark = fields.get("projector_type") == "dspark" or fields.get("shift_label")
            of_dspark = of_dspark or any("DSpark" in name for name in names)
            from_anchor = of_dspark or "dflash_config" not in record
        numbers: dict[str, Any] = {own: whole(fields, *how) for own, how in NUMBERS.items()}
        for own, how in OPTIONAL.items():
            numbers[own] = whole(fields, *how) if fields.get(how[0]) is not None else 0
        if numbers["top_k"]:
            numbers["markov_rank"] = whole(fields, "selector_rank", 1, None)
        taps = fields.get("target_layer_ids")
        if not isinstance(taps, list) or not all(type(one) is int for one in taps):
            raise InvalidInput(f"its config says target_layer_ids: {taps!r}; must be numbers")
        vocab = fields.get("draft_vocab_size")
        if vocab in (None, 0, vocab_size, fields.get("vocab_size")):
            vocab = None
        else:
            whole(fields, "draft_vocab_size", 1, vocab_size)
        layer, scales = layer_fields(fields), dict[str, Any]()
        for own, (name, usual) in SCALES.items():
            scales[own] = scale(fields, name, usual)
        group = numbers["conv_group"]
        if numbers["conv_taps"] and (not group or layer["hidden_size"] % group):
            raise InvalidInput(
                f"its config says conv_group_size: {group}; must divide the width, "
                f"{layer['hidden_size']}"
            )
        if gemma and numbers["conv_taps"]:
            raise InvalidInput("it has Gemma's layers and convolutions, which is not known")
        if vocab is not None and numbers["top_k"]:
            raise InvalidInput("it has a selector and a head of its own, which is not known")
        return BlockConfig(
            **layer,
            **numbers,
            taps=tuple(one + 1 for one in taps),
            target_size=target_size,
            vocab_size=vocab_size,
            from_anchor=bool(from_anchor),
            **_attention_fields(fields, numbers["depth"], numbers["block_size"]),
            confidence=bool(fields.get("enable_confidence_head")),
            draft_vocab_size=vocab,
            gemma=gemma,
            values_are_keys=gemma and bool(fields.get("attention_k_eq_v")),
            own_mask=fields.get("own_mask_embedding") is True,
            **scales,
        )

    def record(self) -> dict[str, Any]:
        """Return the fields that `of` reads."""
        return {
            "architectures": ["Qwen3DSparkModel"],
            **{key: getattr(self, name) for name, key in SIZES.items()},
            **{how[0]: getattr(self, own) for own, how in (NUMBERS | OPTIONAL | SCALES).items()},
            "target_layer_ids": [tap - 1 for tap in self.taps],
            "sample_from_anchor": self.from_anchor,
            "causal_head": self.causal,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": bool(self.markov_rank),
            "draft_vocab_size": self.draft_vocab_size,
            "own_mask_embedding": self.own_mask,
            "selector_rank": self.markov_rank if self.top_k else 0,
            "rms_norm_eps": self.eps,
            **self.rope,
            **self._window_fields(),
            **self._gemma_fields(),
        }

    def _gemma_fields(self) -> dict[str, Any]:
        if not self.gemma:
            return {}
        heads = {"global_head_dim": self.head_dim, "num_global_key_value_heads": self.kv_heads}
        return heads | {"architectures": [GEMMA_DSPARK], "attention_k_eq_v": self.values_are_keys}

    def _window_fields(self) -> dict[str, Any]:
        if not self.windows:
            return {}
        kinds = [WINDOWED if window else "full_attention" for window in self.windows]
        size = max(window or 0 for window in self.windows)
        return {"layer_types": kinds, "sliding_window": size, "use_sliding_window": True}


def _attention_fields(fields: dict[str, Any], depth: int, block_size: int) -> dict[str, Any]:
    """Return `causal` and `windows` by a configuration's fields.

    `use_swa` gives all layers a window where `layer_types` gives none one, and leaves them not
    causal (MiMo, vLLM). Raises `InvalidInput` for a window shorter than a block whose rows see one
    another: no published drafter has one, and engines differ on it.
    """
    given = (fields.get(name) for name in ("causal_head", "is_causal", "causal"))
    causal = next((bool(one) for one in given if one is not None), None)
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
    return {"windows": windows, "causal": causal if windows else bool(causal)}
