"""Runs any transformers model over quickbeam's KV caches.

It goes through transformers' attention interface, so the modelling code stays Hugging Face's. That
code projects, rotates and normalises, and then calls the attention function named `quickbeam`. The
function finds the model's `AttentionContext` on the attention module, writes the new keys and
values to the cache, and attends over it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.models.base import check_layers
from quickbeam.models.hf_recurrent import RecurrentLayer, is_recurrent
from quickbeam.models.native.operands import KVShape
from quickbeam.models.torch.paged_attention import AttentionParams, attend, write
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import PassRows
from quickbeam.models.torch.states import State

NAME = "quickbeam"
LOOK = "quickbeam-look"  # the same attention while `install` looks at the layers, with masks
INSTEAD = (
    "Use another model (Llama, Mistral, Qwen, Gemma, Phi 3, OLMo 2, GPT-2, ...), or run this one "
    "with transformers"
)
REACH = 1 << 20  # a mask is looked at from a token at this position: larger windows are none


class AttentionContext:
    """What the attention calls of one model share.

    `rows`: those of the pass under way; None while `install` looks at the layers. `pool`: where
    keys and values are. `layers`, `shapes`: what was seen of the layers, by number; `states`: the
    same of recurrent ones, zeros.
    """

    def __init__(self) -> None:
        self.rows: PassRows | None = None
        self.pool: RowPool | None = None
        self.layers: dict[int, AttentionParams] = {}
        self.shapes: dict[int, KVShape] = {}
        self.states: State = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionParams,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.rows is None:  # `install`: look at the layer, attend to nothing
            if layer.index in self.layers:
                raise InvalidInput(
                    f"layer {layer.index} attends more than once in a pass, and a cache holds one "
                    "key and one value of each token and layer"
                )
            self.layers[layer.index] = layer
            self.shapes[layer.index] = KVShape(key.shape[1], key.shape[3], value.shape[3])
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        assert self.pool is not None
        layer = self.layers[layer.index]
        write(self.pool, self.rows, layer.index, key[0].transpose(0, 1), value[0].transpose(0, 1))
        out = attend(self.pool, self.rows, layer, query[0].transpose(0, 1), sinks)
        return out.to(query.dtype).view(1, query.shape[2], query.shape[1], -1)


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
    context: AttentionContext = module.quickbeam_context  # type: ignore[assignment]
    if context.rows is None and _is_seen(attention_mask):
        sliding_window, attention_mask = _window(attention_mask), None
    if attention_mask is not None or others.get("position_bias") is not None:
        raise InvalidInput(
            f"{type(module).__name__} adds a bias of its own to the attention "
            "scores, which a draft tree can't be given"
        )
    index: int = module.layer_idx  # type: ignore[assignment]
    layer = AttentionParams(
        index,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window,
        softcap,
    )
    return context(query, key, value, layer, s_aux), None


def _seen(*, mask_function: Any, device: Any = None, **others: Any) -> torch.Tensor | None:
    """Return what the token at position `REACH - 1` sees, in place of a mask.

    The result is `[1, 1, 1, REACH + 1]` bool, or None for a mask that is not a rule on positions.
    """
    try:
        seen = mask_function(0, 0, torch.tensor(REACH - 1), torch.arange(REACH + 1))
    except (IndexError, TypeError, RuntimeError):
        return None
    return seen.expand(REACH + 1).to(device).view(1, 1, 1, -1)  # type: ignore[no-any-return]


def _is_seen(mask: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return mask is not None and mask.dtype is torch.bool and mask.shape[-1] == REACH + 1


def _window(seen: torch.Tensor) -> int | None:
    """Return the sliding window of `_seen`; None where all earlier tokens are seen.

    Raises `InvalidInput` for a mask of another kind.
    """
    seen = seen.flatten()
    window = int(seen.sum())
    if seen[REACH]:
        raise InvalidInput(
            "its attention is bidirectional (a token sees those behind it), and an answer is "
            "written from left to right"
        )
    if not seen[REACH - window : REACH].all():
        raise InvalidInput("its attention mask is neither causal nor a sliding window")
    return None if window == REACH else window


for name in (NAME, LOOK):
    AttentionInterface.register(name, attention)
AttentionMaskInterface.register(LOOK, _seen)


def install(model: PreTrainedModel) -> AttentionContext:
    """Route the model's attention through a new context, and look at every layer with one token.

    A layer's window is that of the mask that the model makes for it.

    Raises `InvalidInput` where the model's attention bypasses transformers' interface, and where
    some layer doesn't keep one key and one value of each token.
    """
    context = AttentionContext()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.quickbeam_context = context
        if is_recurrent(module):
            module.forward = RecurrentLayer(module, context)
    name = type(model).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # a model without weights is of a described layout, whose windows are known
            model.set_attn_implementation(NAME if model.device.type == "meta" else LOOK)
            forward(model, context, torch.zeros(1, dtype=torch.int64, device=model.device), None)
        model.set_attn_implementation(NAME)
    except InvalidInput as error:
        raise InvalidInput(f"{name} can't be used: {error}. {INSTEAD}") from error
    except (ValueError, AttributeError, KeyError, TypeError, ImportError) as error:
        raise InvalidInput(
            f"{name} can't be used: it doesn't run on a token of text alone ({error}). {INSTEAD}"
        ) from error
    expected = model.config.get_text_config().num_hidden_layers
    if context.states:  # some layers keep nothing, or only a state
        context.shapes = {i: context.shapes.get(i, KVShape(0, 0, 0)) for i in range(expected)}
    if sorted(context.shapes) != list(range(expected)):
        own = {type(m).__name__ for m in model.modules() if "Attention" in type(m).__name__}
        raise InvalidInput(
            f"{name} can't be used: {len(context.shapes)} of its {expected} layers attend through "
            "transformers' attention interface, which is how quickbeam runs a model; the others "
            f"have code of their own ({', '.join(sorted(own)) or 'no attention'}). {INSTEAD}"
        )
    return context


class Features:
    """Hidden states between the layers of a model, caught as it runs.

    `layers`: number i, from 1 to the number of layers, means the residual stream after i layers.
    One more than the number of layers means what the head reads, after the final norm. Raises
    `InvalidInput` for others, and for a model whose layers are not one list.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        count = model.config.get_text_config().num_hidden_layers
        check_layers(layers, count)
        modules = decoder_layers(model)
        self._caught: dict[int, torch.Tensor] = {}
        self._layers = tuple(layers)
        self._hooks = [
            (model.base_model if layer > count else modules[layer - 1]).register_forward_hook(
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


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's layers. Raises `InvalidInput` where they are not one list."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == count)
    for layers in lists:
        if any(hasattr(module, "layer_idx") for module in layers[0].modules()):
            return layers
    raise InvalidInput(
        f"{type(model).__name__} keeps its layers in no list of {count}, where they are looked for"
    )


def forward(
    model: PreTrainedModel,
    context: AttentionContext,
    ids: torch.Tensor,
    rows: PassRows | None,
) -> torch.Tensor:
    """Return the logits of the rows of `ids` (`[n]`) that are wanted: `[wanted, vocab]`.

    `rows`: None while `install` looks at the layers; then all are wanted.
    """
    context.rows = rows
    positions = torch.zeros_like(ids) if rows is None else rows.positions
    wanted = None if rows is None else rows.wanted
    # rows by their numbers: given how many, some models drop the other rows before their last
    # layers, which then write no keys and values of them
    keep: Any = 0 if wanted is None else wanted
    try:
        both = {"input_ids": ids[None], "position_ids": positions[None]}
        out = model(**both, use_cache=False, logits_to_keep=keep)
    finally:
        context.rows = None
    logits: torch.Tensor = out.logits[0]
    if wanted is not None and len(logits) != len(wanted):
        return logits[wanted]  # some models give all rows, whatever is asked for
    return logits
