"""Recurrent layers of transformers' models, along draft trees: states follow from parents' states.

The modelling code stays Hugging Face's. A layer runs once a level of all trees together: a node's
row, and for its cache the state behind its parent. A text runs as one chunk. So a node's result is
that of its path, up to rounding.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.errors import InvalidInput
from quickbeam.models.torch.states import LayerState, RecurrentCall

NO_LIMIT = (0.0, float("inf"))  # of Mamba's time steps


class LayerCache:
    """What a recurrent layer asks of its cache (`transformers.Cache`), for its own states alone.

    `conv`, `recurrent`: behind the tokens before, and after the layer has run, behind its tokens.
    """

    def __init__(self, conv: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, **_: Any) -> torch.Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, **_: Any) -> torch.Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, **_: Any) -> bool:
        return self.conv is not None

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """Return the tokens before, if there are some, and the new ones: `[b, channels, n]`."""
        if self.conv is None:
            both = F.pad(new, (conv_kernel_size, 0))
        else:
            both = torch.cat([self.conv, new], -1)
        self.conv = both[..., -conv_kernel_size:]
        return both

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        self.recurrent = new
        return new


class RecurrentLayer:
    """Stands in the place of the `forward` of a recurrent layer.

    `context`: the model's `hf_attention.AttentionContext`, whose rows say which ones run together.
    """

    def __init__(self, module: nn.Module, context: Any) -> None:
        self._module, self._forward, self._context = module, module.forward, context
        self._layer: int = module.layer_idx  # type: ignore[assignment]

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the layer's results `[1, n, d]` for all rows of a pass."""
        if self._context.rows is None:  # `install`: look at the layer's states
            if tuple(getattr(self._module, "time_step_limit", NO_LIMIT)) != NO_LIMIT:
                raise InvalidInput(
                    "its time steps have a limit, which transformers' code for one token leaves "
                    "out: only the native kernels run it, on a CPU in bfloat16 or float32"
                )
            cache = LayerCache(None, None)
            result: torch.Tensor = self._forward(hidden_states, cache=cache)
            assert cache.conv is not None
            zeros = None if cache.recurrent is None else torch.zeros_like(cache.recurrent[0])
            self._context.states[self._layer] = LayerState(torch.zeros_like(cache.conv[0]), zeros)
            return result
        out = torch.empty_like(hidden_states)
        for call in self._context.rows.recurrent_calls:
            self._run(call, hidden_states, out)
        return out

    def _run(self, call: RecurrentCall, hidden: torch.Tensor, out: torch.Tensor) -> None:
        before = [states.behind(self._layer, node) for states, node in call.before]
        # copies, as single tokens change them in place
        conv = torch.stack([one.conv for one in before])
        kept = [one.recurrent for one in before if one.recurrent is not None]
        cache = LayerCache(conv, torch.stack(kept) if kept else None)
        rows = hidden[0, call.rows]
        result = self._forward(rows.view(len(before), -1, rows.shape[-1]), cache=cache)
        out[0, call.rows] = result.reshape(rows.shape)
        assert cache.conv is not None
        for i, (states, node) in enumerate(call.behind):
            recurrent = None if cache.recurrent is None else cache.recurrent[i]
            states.put(self._layer, node, LayerState(cache.conv[i], recurrent))


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a layer with a convolution and a state, as transformers writes them."""
    return (
        hasattr(module, "layer_idx")
        and any(isinstance(child, nn.Conv1d) for child in module.children())
        and "cache" in inspect.signature(module.forward).parameters
    )
