"""Gemma 4's assistants: drafters without keys and values of their own.

Each of their layers attends to the target's keys and values, those of its last layer of the same
kind that has its own. So a node needs only its token and the hidden state before it, the target
reads nothing for the drafter, and all nodes stand at the root's position.

The input is `pre_projection` of [the token's embedding in the target; the hidden state]. The root's
hidden state is the target's after the token before it; that of a node is `post_projection` of what
the head reads of its parent. The equations are those of transformers' `Gemma4AssistantForCausalLM`
(`SinglePositionMultiTokenCandidateGenerator` for what is committed when).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.folder import check_tensors, named_errors, read_tensors, refuse_other_target
from quickbeam.drafters.native import CompiledDrafter, DrafterParameters, NativePacker
from quickbeam.drafters.shortlist.layout import Layout, Scores
from quickbeam.drafters.shortlist.native import NativeHead, rows_format
from quickbeam.drafters.shortlist.shortlist import Shortlist, head_kernels
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Model, inference
from quickbeam.models.compile.compiled_stack import NativeLinear
from quickbeam.models.families.gemma import gemma4
from quickbeam.models.families.reading import Config
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.pages import PagedStore, PagePool
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import FLOAT32
from quickbeam.models.stack import Linear, ParameterRows, Stack
from quickbeam.models.weights.checkpoint import ModelConfig, read_config, read_json
from quickbeam.models.weights.parameters import Parameters, names
from quickbeam.models.weights.shapes import expected
from quickbeam.tree import TokenTree

KINDS = "gemma4_assistant", "gemma4_unified_assistant"
MODULES = ("embed_tokens.", "layers.", "norm.")  # of the decoder
JOIN, SPLIT = "pre_projection.weight", "post_projection.weight"
TABLE = "model.embed_tokens.weight"
CENTROIDS = "masked_embedding.centroids.weight"
ORDER = "masked_embedding.token_ordering"

Scored = tuple[torch.Tensor, torch.Tensor | None]  # logits, and the token of each column
Head = Callable[[Sequence[torch.Tensor]], Sequence[Scored]]  # of each request's rows `[n, d]`


# --- layers and head ---


class CompiledAssistant(CompiledDrafter):
    """An assistant's layers. `states`: `[rows, 2 * width]`, what is joined."""

    def _embed(self, program: Program, target: Buffer) -> None:
        states = program.external("states", self._head.inputs, self._float32)
        program.linear(self._head, states, target)


class AssistantPasses:
    """An assistant in the native kernels, which read the pages of the target's pool.

    `stack`: its layers read the keys and values of layers of the target; in the place of the head
    is what joins the input. `weights`: the format of its weights.
    """

    def __init__(self, parameters: Parameters, stack: Stack, pool: PagePool, weights: str) -> None:
        self._compiled = CompiledAssistant(parameters, stack, pool, weights)
        self._compiled.set_aux_layers([len(stack.layers) + 1])
        packed = NativePacker(pool.kernels, weights)(parameters(SPLIT))
        self._split = NativeLinear(pool.kernels, packed)

    def __call__(
        self, caches: Sequence[PagedStore], joined: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `out` `[rows, width]`, which stands in for the next hidden state, and `feature`
        `[rows, d]`, which the head reads.

        `joined`: of each sequence `[n, 2 * width]`, embeddings and hidden states side by side. All
        rows stand behind the target's committed tokens, see these, and not one another.
        """
        listed = RowList()
        for cache, rows in zip(caches, joined, strict=True):
            # a row sees all committed tokens, and nothing of it is written
            n, length = len(rows), cache.length
            none, all_of_them = [0] * n, [length] * n
            listed.add(cache.table, none, all_of_them, none, all_of_them, [()] * n, range(n))
        self._compiled.states = torch.cat(list(joined)).contiguous()
        self._compiled(listed)
        feature = self._compiled.hidden
        return self._split(feature), feature


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
        if (kernels := head_kernels(weight)) is not None:
            self._native = NativeHead(weight, layout, kernels)
            self._rank = NativeLinear(kernels, NativePacker(kernels)(centroids), logits=True)

    def __call__(self, features: Sequence[torch.Tensor]) -> list[Scores]:
        """Return the scores of each call's rows `[n, d]`."""
        return [self._score(one) for one in features]

    def _score(self, rows: torch.Tensor) -> Scores:
        best = self._rank(rows).topk(self._top, -1).indices
        clusters = torch.tensor(sorted({*best.flatten().tolist()}))
        if self._native is not None:
            prepared = self._native.prepare(clusters)
            return Scores(self._native.score(rows, prepared), prepared.tokens)
        tokens = self._layout.scored(clusters)
        return Scores(F.linear(rows, self._weight[tokens]), tokens)


# --- the drafter ---


class AssistantState(DrafterState):
    """What the drafter keeps of one sequence.

    `hidden`: `[1, width]`, the target's hidden state after the last token that it has read. `out`:
    by node of the `tree` that is being grown, `[1, width]`.
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

    `passes` run its layers, `head` scores what they give. `layer`: whose hidden states it reads.
    """

    needs_hidden = True

    def __init__(self, passes: AssistantPasses, head: Head, model: Model, layer: int) -> None:
        self.passes, self.head, self.vocab_size = passes, head, model.vocab_size
        self._embedding = model.embedding
        model.set_aux_layers([layer])

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> AssistantState:
        return AssistantState()

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the tokens that the head scored. See `Drafter.answer`.

        Raises `ValueError` where a tree's first request is not for the root alone, where a node's
        parent was never requested, or where the hidden state before the root is missing.
        """
        joined = [self._joined(request) for request in requests]
        caches: list[Any] = [request.context.cache for request in requests]
        out, feature = self.passes(caches, joined)
        sizes = [len(request.nodes) for request in requests]
        features = feature.split_with_sizes(sizes)
        for request, rows in zip(requests, out.split_with_sizes(sizes), strict=True):
            state = request.state
            if request.nodes[0] == 0:
                state.tree, state.out = request.tree, {}
            state.out.update(zip(request.nodes, rows[:, None], strict=True))
        return [
            DraftProbs(probs_of(logits, request.context.draft_temperature), tokens, self.vocab_size)
            for request, (logits, tokens) in zip(requests, self.head(features), strict=True)
        ]

    def _joined(self, request: DraftRequest) -> torch.Tensor:
        """Return what the requested nodes' rows read, `[n, 2 * width]`."""
        state, tree, nodes = request.state, request.tree, request.nodes
        cache, before = request.context.cache, len(request.context.ids) - 1
        if cache is None or state.hidden is None or cache.length != before:
            read = 0 if cache is None else cache.length
            raise ValueError(f"the target has read {read} of {before} tokens before the root")
        if nodes[0] == 0:
            if len(nodes) > 1:
                raise ValueError("a new tree: ask for its root first, and alone")
            hidden = state.hidden
        else:
            above = [tree.parent[node] for node in nodes]
            if tree is not state.tree or not state.out.keys() >= {*above}:
                raise ValueError(f"nodes {list(nodes)}: ask for their parents first")
            hidden = torch.cat([state.out[node] for node in above])
        tokens = torch.tensor([tree.token[node] for node in nodes])
        return torch.cat([self._embedding(tokens).to(hidden.dtype), hidden], 1)


# --- loading, in transformers' layout ---


def is_assistant(folder: Path) -> bool:
    """Whether `folder` holds an assistant of Gemma 4. Reads only its configuration."""
    return read_json(folder / "config.json").get("model_type") in KINDS


def load_assistant(folder: Path, model: Model) -> AssistantDrafter:
    """Load the assistant in `folder` for `model`, which the native kernels must run.

    It reads the target's hidden states behind the last norm, as transformers gives them.
    Raises `InvalidInput` for another target's assistant, and for one that is not whole.
    """
    with named_errors(folder):
        whole: Any = read_config(folder)
        fields: dict[str, Any] = dict(whole.text_config)
        if window := fields.get("sliding_window"):
            # transformers' mask is inclusive: it reaches `window` tokens back from the last one
            fields["sliding_window"] = window + 1
        config: Any = ModelConfig(fields)
        config = ModelConfig(fields | {"_kv_layers": _sources(whole, config, model)})
        if not isinstance(model.pool, PagePool):
            raise InvalidInput(
                f"an assistant needs the native kernels, and this model runs on "
                f"{model.describe()}; name another drafter"
            )
        stack = replace(gemma4(Config(config, model.dtype)), head=Linear((ParameterRows(JOIN),)))
        for of in stack.attentions:
            kept = model.pool.shapes[of.source or 0]
            if kept.key_dim != of.head_dim or of.heads % kept.kv_heads:
                raise InvalidInput(
                    f"it has {of.heads} heads of {of.head_dim}, the target keeps {kept.kv_heads} "
                    f"of {kept.key_dim}: use the target's own assistant"
                )
        stored = {
            f"model.{name}" if name.startswith(MODULES) else name: tensor
            for name, tensor in read_tensors(folder).items()
        }
        _check_shapes(stored, whole, config, stack)
        parameters = DrafterParameters(config, model.dtype, stored)
        weights = FLOAT32 if model.dtype is torch.float32 else rows_format(parameters(TABLE))
        passes = AssistantPasses(parameters, stack, model.pool, weights)
        head = _head(parameters, whole, model.pool)
    drafter = AssistantDrafter(passes, head, model, model.config.num_hidden_layers + 1)
    drafter.folder = folder
    return drafter


def _sources(whole: Any, config: Any, model: Model) -> dict[str, int]:
    """Return the target's last layer of each kind with keys and values of its own."""
    target, top = model.config, whole.centroid_intermediate_top_k
    if not target.model_type.startswith("gemma4"):
        raise InvalidInput(f"it is an assistant of Gemma 4, the target is a {target.model_type}")
    refuse_other_target(whole.backbone_hidden_size, target=target.hidden_size)
    if config.vocab_size != model.vocab_size:
        raise InvalidInput(f"it has {config.vocab_size} tokens, the target {model.vocab_size}")
    if len(config.layer_types) != config.num_hidden_layers or top < 1:
        raise InvalidInput("its layer_types or centroid_intermediate_top_k can't be used")
    count = target.num_hidden_layers - (target.num_kv_shared_layers or 0)
    return {target.layer_types[i]: i for i in range(count)}


def _check_shapes(stored: dict[str, torch.Tensor], whole: Any, config: Any, stack: Stack) -> None:
    width, d = whole.backbone_hidden_size, config.hidden_size
    shapes = expected(stack, config) | {JOIN: [d, 2 * width], SPLIT: [width, d]}
    for of in stack.attentions:
        shapes[of.qkv.weights[0].name] = [of.heads * of.head_dim, d]
    wanted = names(stack) | {SPLIT, TABLE}
    if whole.use_ordered_embeddings:
        shapes |= {CENTROIDS: [whole.num_centroids, d], ORDER: [config.vocab_size]}
        wanted |= {CENTROIDS, ORDER}
    own = {name: list(one.shape) for name, one in stored.items()}
    check_tensors(stored, {name: shapes.get(name, own.get(name, [])) for name in wanted})


def _head(parameters: DrafterParameters, whole: Any, pool: PagePool) -> Head:
    """Return the assistant's own head, which is its embedding."""
    table = parameters(TABLE)
    if whole.use_ordered_embeddings:
        size = len(table) // whole.num_centroids
        layout = Layout(parameters.given[ORDER].long(), 0, size, len(table))
        return OrderedHead(table, layout, parameters(CENTROIDS), whole.centroid_intermediate_top_k)
    name = FLOAT32 if table.dtype is torch.float32 else None
    product = NativeLinear(pool.kernels, NativePacker(pool.kernels, name)(table), logits=True)

    def head(features: Sequence[torch.Tensor]) -> list[Scored]:
        logits = product(torch.cat(list(features)))
        return [(part, None) for part in logits.split_with_sizes([len(one) for one in features])]

    return head
