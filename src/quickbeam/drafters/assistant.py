"""Gemma 4's assistants: drafters without keys and values of their own.

Each layer of an assistant attends to keys and values of the target: those of the target's last
layer of the same kind that has its own. So a node needs only its token and the hidden state before
it. The target reads nothing for the drafter, and all nodes have the root's position.

The input is `pre_projection` of [the token's embedding in the target; the hidden state]. The root's
hidden state is the target's after the token before it. A node's hidden state is `post_projection`
of what the head reads of its parent. The equations are those of transformers'
`Gemma4AssistantForCausalLM` (`SinglePositionMultiTokenCandidateGenerator` for what is committed
when).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.assistant_file import read_assistant
from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.folder import (
    check_tensors,
    embed_scale,
    named_errors,
    read_tensors,
    refuse_other_target,
)
from quickbeam.drafters.network import EMBEDDING, DrafterParameters
from quickbeam.drafters.passes import NativePasses, pack
from quickbeam.drafters.shortlist.layout import Layout, Scores
from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.drafters.shortlist.shortlist import Shortlist, ShortlistState
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Model, inference
from quickbeam.models.compile.compiled_stack import NativeLinear
from quickbeam.models.families.gemma import gemma4
from quickbeam.models.families.reading import Config, linear
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.quantised import FLOAT32
from quickbeam.models.stack import NO_HEAD, HiddenInput, Stack
from quickbeam.models.weights.checkpoint import ModelConfig, read_config
from quickbeam.models.weights.parameters import names
from quickbeam.models.weights.shapes import expected
from quickbeam.tree import TokenTree

MODULES = ("embed_tokens.", "layers.", "norm.")  # of the decoder
JOIN, SPLIT = "pre_projection", "post_projection.weight"
TABLE = "model.embed_tokens.weight"
CENTROIDS = "masked_embedding.centroids.weight"
ORDER = "masked_embedding.token_ordering"

Scored = tuple[torch.Tensor, torch.Tensor | None]  # logits, and the token of each column
Head = Callable[[Sequence[torch.Tensor]], Sequence[Scored]]  # of each request's rows `[n, d]`


class OrderedHead:
    """Scores the tokens of the `top` clusters of each row whose centroids fit it best.

    - `weight`: `[vocab, d]`, scored as by a `Shortlist`, with `kernels` or without.
    - `layout`: the clusters.
    - `centroids`: `[clusters, d]`; a cluster's logit is its product.

    All rows of a call are scored on the clusters of all of them: more than each asks for.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        layout: Layout,
        centroids: torch.Tensor,
        top: int,
        kernels: Kernels | None,
    ) -> None:
        self._scorer = Shortlist(weight, layout, kernels).begin(())
        self._centroids = centroids.float()
        self._top = min(top, layout.clusters)

    def __call__(self, features: Sequence[torch.Tensor]) -> list[Scores]:
        """Return the scores of each call's rows `[n, d]`."""
        return [self._score(rows) for rows in features]

    def _score(self, rows: torch.Tensor) -> Scores:
        best = F.linear(rows.float(), self._centroids).topk(self._top, -1).indices
        return self._scorer.score(rows, torch.unique(best))


class PlainHead:
    """Scores all tokens with one product for all calls."""

    def __init__(self, product: NativeLinear) -> None:
        self._product = product

    def __call__(self, features: Sequence[torch.Tensor]) -> list[Scored]:
        """Return the logits of each call's rows `[n, d]`, of all tokens."""
        logits = self._product(torch.cat(list(features)))
        sizes = [len(rows) for rows in features]
        return [(part, None) for part in logits.split_with_sizes(sizes)]


# --- the drafter ---


class AssistantState(DrafterState):
    """What the drafter keeps of one sequence.

    - `hidden`: `[1, width]`, the target's hidden state after the last token that it has read.
    - `out`: by node of the `tree` that is being proposed, `[1, width]`, what stands in for its
      hidden state.
    """

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        self.tree: TokenTree | None = None
        self.out = dict[int, torch.Tensor]()

    def append_hidden(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden[-1:].clone()  # a slice would keep the hidden states of all rows

    def release(self) -> None:
        self.hidden = self.tree = None
        self.out = {}


class AssistantDrafter(Drafter):
    """A drafter that attends to the target's keys and values.

    - `passes`: run its layers, which read the pages of the target's pool.
    - `split`: makes of what the head reads what stands in for the target's hidden state.
    - `head`: scores tokens.
    - `layer`: the layer of the target whose hidden states it reads.
    """

    needs_hidden = True

    def __init__(
        self, passes: NativePasses, split: NativeLinear, head: Head, model: Model, layer: int
    ) -> None:
        self.passes = passes
        self.split = split
        self.head = head
        self.vocab_size = model.vocab_size
        model.set_aux_layers([layer])

    def begin(self, ids: Sequence[int], shortlist: ShortlistState | None = None) -> AssistantState:
        return AssistantState()

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the tokens that the head scored. See `Drafter.answer`.

        Raises `ValueError` where a tree's first request is not for the root alone, where a node's
        parent was never requested, or where the hidden state before the root is missing.
        """
        listed = RowList()
        states = [self._states(request) for request in requests]
        for request in requests:
            # a row sees all committed tokens and no other row, and nothing of it is written
            cache: Any = request.context.cache
            n = len(request.nodes)
            length = cache.length
            tokens = [request.tree.token[node] for node in request.nodes]
            last = [length - 1] * n  # with which a window ends
            behind = [length] * n
            listed.add(cache.table, tokens, behind, last, behind, [()] * n, range(n))
        feature = self.passes.run_rows(listed, torch.cat(states)).normed.contiguous()
        sizes = [len(request.nodes) for request in requests]
        outs = self.split(feature).split_with_sizes(sizes)
        for request, out in zip(requests, outs, strict=True):
            state = request.state
            if request.nodes[0] == 0:
                state.tree = request.tree
                state.out = {}
            state.out.update(zip(request.nodes, out[:, None], strict=True))
        answers = list[DraftProbs]()
        scored = self.head(feature.split_with_sizes(sizes))
        for request, (logits, columns) in zip(requests, scored, strict=True):
            probs = probs_of(logits, request.context.draft_temperature)
            answers.append(DraftProbs(probs, columns, self.vocab_size))
        return answers

    def _states(self, request: DraftRequest) -> torch.Tensor:
        """Return the hidden states that the requested nodes' rows read, `[n, width]`."""
        state = request.state
        tree = request.tree
        nodes = request.nodes
        cache = request.context.cache
        before = len(request.context.ids) - 1
        if cache is None or state.hidden is None or cache.length != before:
            read = 0 if cache is None else cache.length
            raise ValueError(f"the target has read {read} of {before} tokens before the root")
        if nodes[0] == 0:
            if len(nodes) > 1:
                raise ValueError("a new tree: ask for its root first, and alone")
            last: torch.Tensor = state.hidden
            return last
        parents = [tree.parent[node] for node in nodes]
        if tree is not state.tree or not state.out.keys() >= {*parents}:
            raise ValueError(f"nodes {list(nodes)}: ask for their parents first")
        return torch.cat([state.out[node] for node in parents])


# --- loading ---


def load_assistant(path: Path, model: Model) -> AssistantDrafter:
    """Load the assistant in a folder or `.gguf` file for `model`.

    The native kernels must run `model`. The assistant reads its hidden states after the last norm,
    as transformers gives them. Raises `InvalidInput` for another target's assistant, and for a
    folder or file that holds none.
    """
    with named_errors(path):
        assistant, tensors = _read(path, model)
        fields: dict[str, Any] = dict(assistant.text_config)
        if window := fields.get("sliding_window"):
            # transformers' mask is inclusive: it reaches `window` tokens back from the last one
            fields["sliding_window"] = window + 1
        config: Any = ModelConfig(fields)
        config = ModelConfig(fields | {"_kv_layers": _sources(assistant, config, model)})
        if not isinstance(model.pool, PagePool):
            raise InvalidInput(
                f"an assistant needs the native kernels, and this model runs on "
                f"{model.describe()}; name another drafter"
            )
        stack = replace(
            gemma4(Config(config, model.dtype)),
            embedding=EMBEDDING,
            scale=embed_scale(model.embedding),
            head=NO_HEAD,
            hidden_input=HiddenInput(assistant.backbone_hidden_size, join=linear(JOIN)),
        )
        for attention in stack.attentions:
            heads = attention.heads
            shape = model.pool.shapes[attention.source or 0]
            if shape.key_dim != attention.head_dim or heads % shape.kv_heads:
                raise InvalidInput(
                    f"it has {heads} heads of {attention.head_dim}, the target keeps "
                    f"{shape.kv_heads} of {shape.key_dim}: use the target's own assistant"
                )
        stored = {
            f"model.{name}" if name.startswith(MODULES) else name: tensor
            for name, tensor in tensors.items()
        }
        _check_shapes(stored, assistant, config, stack)
        weights: dict[str, Any] = {**stored, EMBEDDING: model.embedding.weight}
        parameters = DrafterParameters(config, model.dtype, weights)
        name = FLOAT32 if model.dtype is torch.float32 else rows_format(parameters(TABLE))
        kernels = model.pool.kernels
        split = NativeLinear(kernels, pack(kernels, parameters(SPLIT), weights=name))
        passes = NativePasses(parameters, stack, model.pool, None, name)
        head = _head(parameters, assistant, model.pool)
    layer = model.config.num_hidden_layers + 1
    return AssistantDrafter(passes, split, head, model, layer)


def _read(path: Path, model: Model) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an assistant's configuration and its tensors, without a leading `model.`."""
    if path.suffix != ".gguf":
        return read_config(path), read_tensors(path)
    kernels = model.pool.kernels if isinstance(model.pool, PagePool) else None
    return read_assistant(path, model.dtype, kernels)


def _sources(assistant: Any, config: Any, model: Model) -> dict[str, int]:
    """Return, by kind, the target's last layer that has keys and values of its own."""
    target = model.config
    top = assistant.centroid_intermediate_top_k if assistant.use_ordered_embeddings else 1
    if not target.model_type.startswith("gemma4"):
        raise InvalidInput(f"it is an assistant of Gemma 4, the target is a {target.model_type}")
    refuse_other_target(assistant.backbone_hidden_size, target=target.hidden_size)
    if config.vocab_size != model.vocab_size:
        raise InvalidInput(f"it has {config.vocab_size} tokens, the target {model.vocab_size}")
    if len(config.layer_types) != config.num_hidden_layers or top < 1:
        raise InvalidInput("its layer_types or centroid_intermediate_top_k can't be used")
    count = target.num_hidden_layers - (target.num_kv_shared_layers or 0)
    return {target.layer_types[i]: i for i in range(count)}


def _check_shapes(
    stored: dict[str, torch.Tensor], assistant: Any, config: Any, stack: Stack
) -> None:
    width = assistant.backbone_hidden_size
    d = config.hidden_size
    shapes = expected(stack, config) | {f"{JOIN}.weight": [d, 2 * width], SPLIT: [width, d]}
    for attention in stack.attentions:
        shapes[attention.qkv.weights[0].name] = [attention.heads * attention.head_dim, d]
    wanted = names(stack) - {EMBEDDING} | {SPLIT, TABLE}
    if assistant.use_ordered_embeddings:
        shapes |= {CENTROIDS: [assistant.num_centroids, d], ORDER: [config.vocab_size]}
        wanted |= {CENTROIDS, ORDER}
    for name in wanted - shapes.keys():  # of any shape
        shapes[name] = list(stored[name].shape) if name in stored else []
    check_tensors(stored, {name: shapes[name] for name in wanted})


def _head(parameters: DrafterParameters, assistant: Any, pool: PagePool) -> Head:
    """Return the assistant's own head, which is its embedding."""
    table = parameters(TABLE)
    if assistant.use_ordered_embeddings:
        size = len(table) // assistant.num_centroids
        order = parameters.given[ORDER]
        assert isinstance(order, torch.Tensor)
        layout = Layout(order.long(), 0, size, len(table))
        top = assistant.centroid_intermediate_top_k
        return OrderedHead(table, layout, parameters(CENTROIDS), top, pool.kernels)
    name = FLOAT32 if table.dtype is torch.float32 else None
    packed = pack(pool.kernels, table, weights=name)
    return PlainHead(NativeLinear(pool.kernels, packed, logits=True))
