"""Runs any transformers model over quickbeam's KV caches.

It goes through transformers' attention interface, so the modelling code stays Hugging Face's. That
code projects, rotates and normalises, and then calls the attention function named `quickbeam`. The
function finds the model's `Tap` on the attention module, writes the new keys and values to the
cache, and attends over it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.target.attention import Attend, Layer, attend_sdpa
from quickbeam.target.gathered import AnyStep
from quickbeam.target.kv_cache import LayerShape
from quickbeam.target.native_attention import NativeStep

NAME = "quickbeam"


class Tap:
    """What the attention calls of one model share.

    `step`: the pass under way; None while `install` looks at the layers. `attend`: the attention
    for PyTorch's operators. `layers`, `shapes`: what was seen of the layers, by number.
    """

    def __init__(self) -> None:
        self.step: AnyStep | NativeStep | None = None
        self.attend: Attend = attend_sdpa
        self.layers: dict[int, Layer] = {}
        self.shapes: dict[int, LayerShape] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Layer,
    ) -> torch.Tensor:
        if self.step is None:  # `install`: look at the layer, attend to nothing
            self.layers[layer.index] = layer
            self.shapes[layer.index] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        layer = self.layers[layer.index]
        if isinstance(self.step, NativeStep):
            return self.step.attend(query, key, value, layer)
        self.step.write(layer, key[0], value[0])
        out = self.step.run(self.attend, query[0].transpose(0, 1).contiguous(), layer)
        return out.view(1, self.step.n, query.shape[1], -1)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the function that is registered with transformers.

    Takes queries `[1, heads, n, d]`, keys and values `[1, kv_heads, n, d]`. Returns
    `[1, n, heads, d]`, and None in place of weights. Raises `InvalidInput` for a model that adds a
    bias of its own to the scores.
    """
    tap: Tap = module.quickbeam_tap  # type: ignore[assignment]
    if attention_mask is not None or others.get("position_bias") is not None:
        raise InvalidInput(
            f"{type(module).__name__} adds a bias of its own to the attention "
            "scores, which a draft tree can't be given"
        )
    index: int = module.layer_idx  # type: ignore[assignment]
    layer = Layer(
        index,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window,
        softcap,
        s_aux,
    )
    return tap(module, query, key, value, layer), None


AttentionInterface.register(NAME, attention)


def install(model: PreTrainedModel) -> Tap:
    """Route the model's attention through a new `Tap`, and look at every layer with one token.

    Raises `InvalidInput` where the model's attention bypasses transformers' interface, and where
    some layer doesn't keep a key and a value of each token.
    """
    tap = Tap()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.quickbeam_tap = tap
    name = type(model).__name__
    try:
        model.set_attn_implementation(NAME)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forward(model, tap, torch.zeros(1, dtype=torch.int64, device=model.device), None)
    except InvalidInput as error:
        raise InvalidInput(f"{name} can't be used: {error}") from error
    except (ValueError, AttributeError, KeyError, TypeError, ImportError) as error:
        raise InvalidInput(
            f"{name} can't be used: its attention bypasses transformers' attention "
            f"interface ({error})"
        ) from error
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(tap.shapes) != list(range(expected)):
        raise InvalidInput(
            f"{name} can't be used: {len(tap.shapes)} of its {expected} layers keep keys and "
            "values; "
            "recurrent and hybrid layers can't take a draft back"
        )
    return tap


class Features:
    """Hidden states between the layers of a model, caught as it runs.

    `layers`: number i, from 1 to the number of layers, means the residual stream after i layers.
    One more than the number of layers means what the head reads, after the final norm. Raises
    `InvalidInput` for others, and for a model whose layers are not one list.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        count = model.config.get_text_config().num_hidden_layers
        check_layers(layers, count)
        lists = [
            m
            for m in model.modules()
            if isinstance(m, nn.ModuleList) and len(m) == count and _attends(m[0])
        ]
        if not lists:
            raise InvalidInput(
                f"{type(model).__name__} keeps its layers in no list of {count}: "
                "its hidden states can't be read"
            )
        self._caught: dict[int, torch.Tensor] = {}
        self._layers = tuple(layers)
        self._hooks = [
            (model.base_model if layer > count else lists[0][layer - 1]).register_forward_hook(
                partial(self._catch, layer)
            )
            for layer in set(layers)
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._caught.clear()

    def _catch(self, layer: int, module: nn.Module, args: Any, out: Any) -> None:
        self._caught[layer] = out if isinstance(out, torch.Tensor) else out[0]

    def take(self) -> torch.Tensor:
        """Return `[..., n, len(layers) * d]` of the last forward, in the order of `layers`."""
        states = torch.cat([self._caught[layer] for layer in self._layers], -1)
        self._caught.clear()
        return states


def _attends(layer: nn.Module) -> bool:
    return any(hasattr(module, "layer_idx") for module in layer.modules())


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise `InvalidInput` where hidden states after `layers` can't be read.

    The model has `count` layers. `layers` must name at least one, from 1 to `count + 1`.
    """
    if not layers or not all(1 <= layer <= count + 1 for layer in layers):
        raise InvalidInput(
            f"hidden states after layers {list(layers)}: the model has 1 to "
            f"{count}, and {count + 1} for the final norm"
        )


def forward(
    model: PreTrainedModel,
    tap: Tap,
    ids: torch.Tensor,
    step: AnyStep | NativeStep | None,
    wanted: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return the logits of the `wanted` rows of `ids` (`[n]`): `[wanted, vocab]`.

    `wanted`: a number means the last so many rows (0: all), a tensor means rows by their numbers.
    `step`: None while `install` looks at the layers.
    """
    tap.step = step
    try:
        positions = (
            torch.zeros(1, 1, dtype=torch.int64, device=ids.device)
            if step is None
            else step.new_positions[None]
        )
        out = model(
            input_ids=ids[None], position_ids=positions, use_cache=False, logits_to_keep=wanted
        )
    finally:
        tap.step = None
    logits: torch.Tensor = out.logits[0]
    return logits
