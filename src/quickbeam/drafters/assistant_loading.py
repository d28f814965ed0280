"""Loads Gemma 4's assistants, in transformers' layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.assistant import (
    JOIN,
    SPLIT,
    AssistantDrafter,
    Head,
    NativeAssistant,
    Passes,
    Scored,
    TorchAssistant,
    borrowing,
)
from quickbeam.drafters.folder import check_shape, named_errors, read_tensors
from quickbeam.drafters.native import DrafterParameters, NativeHead, NativePacker
from quickbeam.drafters.shortlist.layout import Layout, Scores
from quickbeam.drafters.shortlist.native import NativeBlocks, rows_format
from quickbeam.drafters.shortlist.shortlist import usable_kernels
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Model
from quickbeam.models.checkpoint import ModelConfig, read_config, read_json
from quickbeam.models.families.gemma4 import gemma4
from quickbeam.models.families.reading import Config
from quickbeam.models.native.quantised import FLOAT32
from quickbeam.models.pages import PagePool
from quickbeam.models.shapes import expected
from quickbeam.models.stack import Stack
from quickbeam.models.stack_tensors import names


class OrderedHead:
    """Scores the tokens of the `top` clusters of each row whose centroids fit it best.

    - `weight`: `[vocab, d]`. bfloat16 on a CPU is scored by the native kernels where they run.
    - `layout`: the clusters. `centroids`: `[clusters, d]`; a cluster's logit is its product.

    All rows of a call are scored on the clusters of all of them: more than each asks for.
    """

    def __init__(
        self, weight: torch.Tensor, layout: Layout, centroids: torch.Tensor, top: int
    ) -> None:
        self._weight, self._layout, self._top = weight, layout, min(top, layout.clusters)
        self._rank: Callable[[torch.Tensor], torch.Tensor] = partial(F.linear, weight=centroids)
        self._native = None
        if (found := usable_kernels(weight)) is not None:
            self._native = NativeBlocks(weight, layout, found)
            self._rank = NativeHead(NativePacker(found)(centroids), found)

    def __call__(self, features: Sequence[torch.Tensor]) -> list[Scores]:
        """Return the scores of each call's rows `[n, d]`."""
        return [self._score(one) for one in features]

    def _score(self, rows: torch.Tensor) -> Scores:
        best = self._rank(rows).topk(self._top, -1).indices
        clusters = torch.tensor(sorted({*best.flatten().tolist()}))
        if self._native is not None:
            prepared = self._native.prepare(clusters)
            return Scores(self._native.score(rows, prepared), prepared.tokens)
        tokens = self._layout.scored(clusters).to(rows.device)
        return Scores(F.linear(rows, self._weight[tokens]), tokens)


CLASSES = {  # transformers', by the configuration's model_type
    "gemma4_assistant": "Gemma4AssistantForCausalLM",
    "gemma4_unified_assistant": "Gemma4UnifiedAssistantForCausalLM",
}
DEFAULTS = {  # transformers', of what a configuration may leave out
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": False,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
}
MODULES = ("embed_tokens.", "layers.", "norm.")  # of the decoder
TABLE = "model.embed_tokens.weight"
CENTROIDS = "masked_embedding.centroids.weight"
ORDER = "masked_embedding.token_ordering"


def is_assistant(folder: Path) -> bool:
    """Whether `folder` holds an assistant of Gemma 4. Reads only its configuration."""
    return read_json(folder / "config.json").get("model_type") in CLASSES


def load_assistant(folder: Path, model: Model, *, normed: bool = True) -> AssistantDrafter:
    """Load the assistant in `folder` for `model`.

    `normed`: whether it reads the target's hidden states behind the last norm, as transformers
    gives them; else before it.

    Raises `InvalidInput` for another target's assistant, and for one that is not whole.
    """
    with named_errors(folder):
        whole: Any = ModelConfig(DEFAULTS | read_config(folder).to_dict())
        fields: dict[str, Any] = dict(whole.text_config)
        config: Any = ModelConfig(fields | {"num_kv_shared_layers": 0})
        sources = _sources(whole, config, model)
        stack = gemma4(Config(config, model.dtype))
        _check_layers(stack, config.layer_types, sources, model)
        ready = borrowing(stack, config.layer_types, sources)
        stored = {
            f"model.{name}" if name.startswith(MODULES) else name: tensor
            for name, tensor in read_tensors(folder).items()
        }
        _check_shapes(stored, whole, config, stack, ready)
        parameters = DrafterParameters(config, model.dtype, stored)
        passes: Passes
        if isinstance(model.pool, PagePool):
            wide = model.dtype is torch.float32
            weights = FLOAT32 if wide else rows_format(parameters(TABLE))
            passes = NativeAssistant(parameters, ready, model, weights)
        else:
            passes = TorchAssistant(_network(folder, whole, model), model, sources)
        layer = model.config.num_hidden_layers + normed
        drafter = AssistantDrafter(passes, _head(parameters, whole, model), model, layer)
    drafter.folder = folder
    return drafter


def _sources(whole: Any, config: Any, model: Model) -> dict[str, int]:
    """Return the target's last layer of each kind with keys and values of its own."""
    target, top = model.config, whole.centroid_intermediate_top_k
    if not target.model_type.startswith("gemma4"):
        raise InvalidInput(f"it is an assistant of Gemma 4, the target is a {target.model_type}")
    for name, own, needed in (
        ("hidden states", whole.backbone_hidden_size, target.hidden_size),
        ("tokens", config.vocab_size, model.vocab_size),
    ):
        if own != needed:
            raise InvalidInput(
                f"it was made for {name} of {own}, the target has {needed}: use its own assistant"
            )
    if len(config.layer_types) != config.num_hidden_layers or top < 1:
        raise InvalidInput("its layer_types or centroid_intermediate_top_k can't be used")
    count = target.num_hidden_layers - (target.num_kv_shared_layers or 0)
    return {target.layer_types[i]: i for i in range(count)}


def _check_layers(
    stack: Stack, kinds: Sequence[str], sources: Mapping[str, int], model: Model
) -> None:
    """Raise `InvalidInput` where the target keeps other keys and values than a layer reads."""
    pool: Any = model.pool
    shapes = pool.shapes if isinstance(pool, PagePool) else [one.shape[1:] for one in pool.key]
    for kind, of in zip(kinds, stack.attentions, strict=True):
        heads, dim = shapes[sources[kind]][:2]
        if dim != of.head_dim or of.heads % heads:
            raise InvalidInput(
                f"its {kind} has {of.heads} heads of {of.head_dim}, the target keeps {heads} of "
                f"{dim}: use the target's own assistant"
            )


def _check_shapes(
    stored: Mapping[str, torch.Tensor], whole: Any, config: Any, stack: Stack, ready: Stack
) -> None:
    """Raise `InvalidInput` for a parameter that is missing or has another shape."""
    width, d = whole.backbone_hidden_size, config.hidden_size
    shapes = expected(stack, config) | {JOIN: [d, 2 * width], SPLIT: [width, d]}
    for of in ready.attentions:
        shapes[of.qkv.weights[0].name] = [of.heads * of.head_dim, d]
    wanted = names(ready) | {SPLIT, TABLE}
    if whole.use_ordered_embeddings:
        shapes |= {CENTROIDS: [whole.num_centroids, d], ORDER: [config.vocab_size]}
        wanted |= {CENTROIDS, ORDER}
    for name in sorted(wanted):
        own = stored[name].shape if name in stored else torch.Size()
        check_shape(stored, name, shapes.get(name, own))


def _head(parameters: DrafterParameters, whole: Any, model: Model) -> Head:
    """Return the assistant's own head, which is its embedding."""
    table = parameters(TABLE).to(model.device)
    if whole.use_ordered_embeddings:
        size = len(table) // whole.num_centroids
        layout = Layout(parameters.given[ORDER].long(), 0, size, len(table))
        centroids = parameters(CENTROIDS).to(model.device)
        return OrderedHead(table, layout, centroids, whole.centroid_intermediate_top_k)
    product: Callable[[torch.Tensor], torch.Tensor] = partial(F.linear, weight=table)
    if isinstance(model.pool, PagePool):
        kernels, wide = model.pool.kernels, model.dtype is torch.float32
        product = NativeHead(NativePacker(kernels, FLOAT32 if wide else None)(table), kernels)

    def head(features: Sequence[torch.Tensor]) -> list[Scored]:
        logits = product(torch.cat(list(features)))
        return [(part, None) for part in logits.split_with_sizes([len(one) for one in features])]

    return head


def _network(folder: Path, whole: Any, model: Model) -> Any:
    """Return transformers' own class of an assistant."""
    import transformers

    kind = getattr(transformers, CLASSES[whole.model_type])
    found = kind.from_pretrained(folder, dtype=model.dtype)
    return found.to(model.device).eval().requires_grad_(False)
