"""The block drafter's network: one pass drafts several positions at once.

It is DSpark's (2607.05147), with DFlash (2602.06036) as the case without a Markov head, and JetSpec
(2606.18394) as the one whose block is causal.

Hidden states of some of the target's layers ("taps") are fused into one vector for each committed
token before the anchor, which is the last committed token. These vectors are keys and values of
earlier positions, in every layer; they are never rows. The rows are the anchor's embedding and
those of a mask token, at the positions from the anchor on. They see all vectors and one another.

In a layer with a window w, the row at position i sees vectors and rows at positions above i - w.
Such a layer is causal, and one without is not, unless the configuration says of all layers what
they are. That is how vLLM (`_resolve_layer_attention` in `qwen3_dflash.py`) and SGLang (pull
request 34524) run the published drafters.

A distribution depends on its depth and on the token before it alone: it is the softmax of U_k +
W2 · W1[previous token], U_k being the head's logits of the row for depth k. So the search of a tree
needs no further pass. Modules are named as the published checkpoints name their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.eagle_model import DrafterNetwork, RMSNorm
from quickbeam.drafters.folder import (
    SIZES,
    WINDOWED,
    TargetParts,
    assemble,
    layer_fields,
    layer_windows,
    named_errors,
    read_tensors,
    refuse_other_target,
    write_folder,
)
from quickbeam.errors import InvalidInput
from quickbeam.models.base import check_layers
from quickbeam.models.checkpoint import read_json

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a layer's number, `query` `[n, heads, head_dim]`, and `key` and `value` `[n, kv_heads,
head_dim]` of the blocks' rows, one block after the other, to `[n, heads * head_dim]`."""

# tensors that are not read: copies of the target's own
IGNORED = ("embed_tokens.", "lm_head.")
NUMBERS = {  # by field of `BlockConfig`: its name in config.json, beside those of `SIZES`
    "depth": "num_hidden_layers",
    "block_size": "block_size",
    "mask_token": "mask_token_id",
}
# fields that may have these values alone
KNOWN: tuple[tuple[Any, ...], ...] = (
    ("markov_head_type", "vanilla"),
    ("hidden_act", "silu"),
    ("projector_type", "dflash", "dspark"),
    ("output_multiplier", 1),
    ("input_embedding_scale", 1),
    ("final_logit_softcapping", 0),
)


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
        fields = {**record, **(record.get("dflash_config") or {})}
        for name, *known in KNOWN:
            if (value := fields.get(name)) is not None and value not in known:
                raise InvalidInput(
                    f"its config says {name}: {value!r}; known: {', '.join(map(str, known))}"
                )
        names = " ".join(map(str, record.get("architectures") or ()))
        of_dspark = fields.get("projector_type") == "dspark" or fields.get("shift_label")
        from_anchor = bool(of_dspark or "DSpark" in names or "dflash_config" not in record)
        numbers: dict[str, Any] = {field: int(fields[name]) for field, name in NUMBERS.items()}
        return BlockConfig(
            **layer_fields(fields),
            **numbers,
            taps=tuple(int(i) + 1 for i in fields["target_layer_ids"]),
            target_size=target_size,
            vocab_size=vocab_size,
            from_anchor=bool(fields.get("sample_from_anchor", from_anchor)),
            **_attention_fields(fields, numbers["depth"], numbers["block_size"]),
            markov_rank=int(fields.get("markov_rank") or 0),
            confidence=bool(fields.get("enable_confidence_head")),
        )

    def record(self) -> dict[str, Any]:
        """Return the fields that `of` reads."""
        return {
            "architectures": ["Qwen3DSparkModel"],
            **{key: getattr(self, name) for name, key in (SIZES | NUMBERS).items()},
            "target_layer_ids": [tap - 1 for tap in self.taps],
            "sample_from_anchor": self.from_anchor,
            "causal_head": self.causal,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": bool(self.markov_rank),
            "rms_norm_eps": self.eps,
            **self.rope,
            **self._window_fields(),
        }

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


class BlockLayer(nn.Module):
    """A decoder layer with norms of queries and keys, as Qwen3's."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        d, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        self._size = size
        self.input_layernorm = RMSNorm(d, config.eps)
        self.post_attention_layernorm = RMSNorm(d, config.eps)
        rows = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        heads: dict[str, nn.Module] = {
            k: nn.Linear(d, n * size, bias=False) for k, n in rows.items()
        }
        heads["o_proj"] = nn.Linear(config.heads * size, d, bias=False)
        norms = {name: RMSNorm(size, config.eps) for name in ("q_norm", "k_norm")}
        self.self_attn = nn.ModuleDict(heads | norms)
        up = {name: nn.Linear(d, inner, bias=False) for name in ("gate_proj", "up_proj")}
        self.mlp = nn.ModuleDict(up | {"down_proj": nn.Linear(inner, d, bias=False)})

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[n, heads, head_dim]` of rows `[n, d]`, before the rotary angles."""
        query = self.self_attn["q_proj"](x).unflatten(-1, (-1, self._size))
        return self.self_attn["q_norm"](query)  # type: ignore[no-any-return]

    def key_value(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, before the rotary angles, and values: `[n, kv_heads, head_dim]` each."""
        key, value = (
            self.self_attn[name](x).unflatten(-1, (-1, self._size)) for name in ("k_proj", "v_proj")
        )
        return self.self_attn["k_norm"](key), value

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.post_attention_layernorm(x)
        gate = F.silu(self.mlp["gate_proj"](x))
        return self.mlp["down_proj"](gate * self.mlp["up_proj"](x))  # type: ignore[no-any-return]


class BlockNetwork(DrafterNetwork):
    """The network of a block drafter. `d` is `hidden_size`."""

    def __init__(
        self, config: BlockConfig, embedding: nn.Module | None = None, head: nn.Module | None = None
    ) -> None:
        super().__init__(embedding, head)
        self.config, d = config, config.hidden_size
        self.fc = nn.Linear(len(config.taps) * config.target_size, d, bias=False)
        self.hidden_norm, self.norm = RMSNorm(d, config.eps), RMSNorm(d, config.eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.depth))
        if config.markov_rank:
            first = nn.Embedding(config.vocab_size, config.markov_rank)
            second = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": first, "markov_w2": second})
        if config.confidence:
            proj = nn.Linear(d + config.markov_rank, 1)
            self.confidence_head = nn.ModuleDict({"proj": proj})

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the vectors `[n, d]` of committed tokens from the target's hidden states.

        `hidden`: `[n, len(taps) * target_size]`.
        """
        return self.hidden_norm(self.fc(hidden))  # type: ignore[no-any-return]

    def key_value(
        self, layer: int, fused: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys, rotated, and values: `[n, kv_heads, head_dim]` each."""
        key, value = self._layer(layer).key_value(fused)
        return self.rotated(key, positions), value

    def forward(
        self,
        anchors: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Run a block behind each of the `anchors`, and return the rows `[b, block_size, d]`.

        `anchors`: b tokens, at these `positions` of their texts. `attend` lets the rows see the
        committed tokens before their anchor, and one another, as `BlockConfig.attention` says.
        """
        config, device = self.config, self.fc.weight.device
        inputs = torch.full((len(anchors), config.block_size), config.mask_token, device=device)
        inputs[:, 0] = torch.as_tensor(anchors, device=device)
        offsets = torch.arange(config.block_size, device=device)
        places = (torch.as_tensor(positions, device=device)[:, None] + offsets).flatten()
        x = self.embedding(inputs.flatten())
        for i in range(config.depth):
            layer = self._layer(i)
            normed = layer.input_layernorm(x)
            query = self.rotated(layer.query(normed), places)
            key, value = self.key_value(i, normed, places)
            x = x + layer.self_attn["o_proj"](attend(i, query, key, value))
            x = x + layer.feed_forward(x)
        return self.norm(x).unflatten(0, inputs.shape)  # type: ignore[no-any-return]

    @property
    def markov(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W1 and W2, `[vocab, r]` each; r is 0 without a Markov head."""
        if not self.config.markov_rank:
            return (self.fc.weight.new_zeros(self.config.vocab_size, 0),) * 2
        first, second = (self.markov_head[f"markov_{name}"] for name in ("w1", "w2"))
        return first.get_parameter("weight"), second.get_parameter("weight")

    def before(self, previous: torch.Tensor) -> torch.Tensor:
        """Return W1 of the tokens before, `[n]`, in float32: `[n, r]`."""
        return F.embedding(previous, self.markov[0]).float()

    def after(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return W2 of tokens `[s]` in float32, `[s, r]`: `before @ after.T` is added to U."""
        return F.embedding(tokens, self.markov[1]).float()

    def bias(self, previous: torch.Tensor) -> torch.Tensor | None:
        """Return what the tokens before, `[n]`, add to U of all tokens: `[n, vocab]`.

        Returns None without a Markov head.
        """
        if not self.config.markov_rank:
            return None
        head = self.markov_head
        return head["markov_w2"](head["markov_w1"](previous))  # type: ignore[no-any-return]

    def confidence(self, rows: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Return logits `[n]` of the probability that a drafted token is accepted.

        `rows`: `[n, d]`, those that draft. `previous`: `[n]`, the tokens before. None: no head.
        """
        if not self.config.confidence:
            return None
        if self.config.markov_rank:
            rows = torch.cat([rows, self.markov_head["markov_w1"](previous)], -1)
        head: Any = self.confidence_head
        return head["proj"](rows)[..., 0]  # type: ignore[no-any-return]

    def _layer(self, i: int) -> BlockLayer:
        return self.layers[i]  # type: ignore[return-value]

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `config.json` and `model.safetensors` in DSpark's layout."""
        write_folder(folder, self.config.record(), self.state_dict(), dtype)


def is_block(folder: Path) -> bool:
    """Whether `folder` holds a block drafter. Reads only its configuration."""
    record = read_json(folder / "config.json")
    nested = record.get("dflash_config")
    fields = {**record, **nested} if isinstance(nested, dict) else record
    return "block_size" in fields and ("dflash_config" in record or "target_layer_ids" in record)


def load_block(folder: Path, target: TargetParts) -> BlockNetwork:
    """Load the block drafter in `folder`, in the layout of DFlash or DSpark, for a target.

    Raises `InvalidInput` for another target's drafter, and for tensors that don't fit the network.
    """
    with named_errors(folder):
        config = BlockConfig.of(read_json(folder / "config.json"), target.size, target.vocab)
        check_layers(config.taps, target.layers)
        refuse_other_target(config.hidden_size, target=target.size)
        if not 0 <= config.mask_token < target.vocab:
            raise InvalidInput(
                f"its mask_token_id is {config.mask_token}, the target has {target.vocab} tokens: "
                "it was made for another model"
            )
        if config.drafted < 1 or config.depth < 1:
            raise InvalidInput("it drafts nothing: block_size and num_hidden_layers are too small")
        with torch.device("meta"):
            network = BlockNetwork(config, target.embedding, target.head)
        state = assemble(network, read_tensors(folder), ignored=IGNORED)
    network.load_state_dict(state, assign=True)
    return network.requires_grad_(False)
