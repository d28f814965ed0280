"""Many sequences at once, one token each a step: how text is written in bulk. Knows nothing of chats and files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.target.attention import Layer
from quickbeam.target.hf_attention import Features, Tap, install
from quickbeam.target.linear import pack_linears

FEW = 16  # known tokens are cheaper run together than one a step
CHUNK = 512  # known tokens a pass


class BatchDecoder:
    """`slots` sequences of at most `length` tokens side by side, each at its own position.

    A step runs one token of every slot. A slot that is restarted forgets its sequence; its neighbours don't notice. `layers`: whose hidden
    states a step gives beside the logits (`Features`). Takes the model over: its linears are packed on a CPU.

    Raises `InvalidInput` for models that `Target` refuses, and for those with attention sinks or soft caps.
    """

    def __init__(self, model: PreTrainedModel, slots: int, length: int, layers: Sequence[int]) -> None:
        model.eval()
        self.slots, self.length, self.device = slots, length, model.device
        with torch.inference_mode():
            tap = install(model)
            if any(layer.softcap is not None or layer.sinks is not None for layer in tap.layers.values()):
                raise InvalidInput(f"{type(model).__name__} caps its attention scores or has sinks: it can't write text in bulk")
            pack_linears(model)
            self._tap = _BatchTap(tap, slots, length, model.dtype, self.device)
            for module in model.modules():
                if hasattr(module, "quickbeam_tap"):
                    module.quickbeam_tap = self._tap
        self._model = model
        self._features = Features(model, layers)
        self.position = torch.zeros(slots, dtype=torch.int64, device=self.device)  # of the next token

    @staticmethod
    def memory(model: PreTrainedModel, slots: int, length: int) -> int:
        """Bytes of the keys and values that it will hold."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * dim * slots * length * model.dtype.itemsize)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one token (`[slots]`) of every sequence: logits `[slots, vocab]` and hidden states `[slots, len(layers) * d]`."""
        self._tap.begin(self.position)
        out = self._model(input_ids=tokens[:, None], position_ids=self.position[:, None], use_cache=False)
        self.position += 1
        return out.logits[:, -1], self._features.take()[:, 0]

    @torch.inference_mode()
    def fill(self, slot: int, tokens: Sequence[int]) -> torch.Tensor:
        """Run the next tokens of one slot, which are known, at once: their hidden states `[len(tokens), len(layers) * d]`. Cheaper than as
        many steps from about `FEW` on."""
        start, states = int(self.position[slot]), []
        for begin in range(0, len(tokens), CHUNK):
            part = torch.tensor(tokens[begin : begin + CHUNK], device=self.device)
            positions = torch.arange(start + begin, start + begin + len(part), device=self.device)
            self._tap.begin(positions, slot)
            self._model(input_ids=part[None], position_ids=positions[None], use_cache=False, logits_to_keep=1)
            states.append(self._features.take()[0])
        self.position[slot] += len(tokens)
        return torch.cat(states)

    def restart(self, slot: int) -> None:
        """Empty a slot."""
        self.position[slot] = 0


class _BatchTap(Tap):
    """Attention of one query a slot, or of several of one slot, over the slot's own keys. (Calls for few slots of like length each read
    less and were no faster.)"""

    def __init__(self, tap: Tap, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layers, self.shapes = tap.layers, tap.shapes
        shapes = [self.shapes[layer] for layer in sorted(self.shapes)]
        self._keys = [torch.zeros(slots, s.kv_heads, length, s.key_dim, dtype=dtype, device=device) for s in shapes]
        self._values = [torch.zeros(slots, s.kv_heads, length, s.value_dim, dtype=dtype, device=device) for s in shapes]
        self._every = torch.arange(slots, device=device)
        self._dtype = dtype

    def begin(self, position: torch.Tensor, slot: int | None = None) -> None:
        """Say where the next token of each slot stands, or the next tokens of one `slot`."""
        self._position, self._slot = position.clone(), slot
        self._end = int(position.max()) + 1
        self._masks: dict[int | None, torch.Tensor] = {}

    def _mask(self, window: int | None) -> torch.Tensor:
        if window not in self._masks:
            at, now = torch.arange(self._end, device=self._position.device), self._position[:, None]
            hidden = at > now if window is None else (at > now) | (at <= now - window)
            self._masks[window] = torch.zeros(hidden.shape, dtype=self._dtype, device=at.device).masked_fill_(hidden, float("-inf"))
        return self._masks[window]

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer) -> torch.Tensor:
        layer = self.layers[layer.index]
        keys, values = self._keys[layer.index], self._values[layer.index]
        rows, heads, n = query.shape[:3]
        if self._slot is None:
            keys[self._every, :, self._position] = key[:, :, 0]
            values[self._every, :, self._position] = value[:, :, 0]
        else:
            keys, values = keys[self._slot, None], values[self._slot, None]
            keys[:, :, self._position], values[:, :, self._position] = key, value
        # The heads that share keys become queries of one head, beside the tokens of one slot.
        grouped = query.reshape(rows, keys.shape[1], -1, query.shape[-1])
        mask = self._mask(layer.window)
        mask = mask[:, None, None] if self._slot is None else mask.repeat(heads // keys.shape[1], 1)[None, None]
        out = F.scaled_dot_product_attention(
            grouped,
            keys[:, :, : self._end],
            values[:, :, : self._end],
            attn_mask=mask.expand(-1, 1, grouped.shape[2], -1),
            scale=layer.scaling,
        )
        return out.reshape(rows, heads, n, -1).transpose(1, 2)
