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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.native import CompiledDrafter, NativeHead, NativePacker
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.models.base import Model, inference
from quickbeam.models.gathered import RowPool, RowStore
from quickbeam.models.kv import SequenceCache
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.pages import PagedStore, PagePool
from quickbeam.models.parameters import Parameters
from quickbeam.models.stack import Attention, Linear, Stack, Tensor
from quickbeam.tree import TokenTree


class Part(NamedTuple):
    """Rows of one sequence: `joined` `[n, 2 * width]`, embeddings and hidden states side by side.

    All stand behind the target's committed tokens in `cache`, see these, and not one another.
    """

    cache: SequenceCache
    joined: torch.Tensor


Passes = Callable[[Sequence[Part]], tuple[torch.Tensor, torch.Tensor]]
"""Of parts, `out` `[rows, width]`, which stands in for the next hidden state, and `feature`
`[rows, d]`, which the head reads."""

JOIN, SPLIT = "pre_projection.weight", "post_projection.weight"


class TorchAssistant:
    """transformers' class `network` on any device: the reference.

    `sources`: the layer of the target whose keys and values layers of a kind read.
    """

    def __init__(self, network: Any, model: Model, sources: Mapping[str, int]) -> None:
        assert isinstance(model.pool, RowPool)
        self._network, self._pool, self._sources = network, model.pool, sources

    def __call__(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        feature = torch.cat([self._run(one) for one in parts])
        return self._network.post_projection(feature), feature

    def _run(self, part: Part) -> torch.Tensor:
        network, cache, n = self._network, part.cache, len(part.joined)
        assert isinstance(cache, RowStore)
        rows = torch.from_numpy(cache.rows(np.arange(cache.length))).to(self._pool.device)
        # each row is a sequence of its own, since rows of one would count positions
        read = {
            kind: tuple(
                of[i][rows].transpose(0, 1).expand(n, -1, -1, -1)
                for of in (self._pool.key, self._pool.value)
            )
            for kind, i in self._sources.items()
        }
        x = network.pre_projection(part.joined[:, None])
        masks = network.create_attention_masks(x, None, read)
        positions = torch.full((n, 1), cache.length, device=x.device)
        out = network.model(
            inputs_embeds=x,
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=read,
            use_cache=False,
        )
        return out.last_hidden_state[:, 0]  # type: ignore[no-any-return]


def borrowing(stack: Stack, kinds: Sequence[str], sources: Mapping[str, int]) -> Stack:
    """Return an assistant's stack: its layers read the target's keys and values.

    `stack`: as if the layers had their own. `kinds`: of the layers. In the place of the head is
    what joins the input.
    """

    def attention(of: Attention, kind: str) -> Attention:
        assert of.norms is not None
        own = Linear(of.qkv.weights[:1], of.qkv.biases[:1])
        norms, source = (of.norms[0], of.norms[0]), sources[kind]
        # transformers' mask is inclusive: it reaches `window` tokens back from the last one
        window = None if of.window is None else of.window + 1
        changed: dict[str, Any] = {"qkv": own, "norms": norms, "source": source, "window": window}
        return replace(of, **changed, values_are_keys=False)

    layers = []
    for layer, kind in zip(stack.layers, kinds, strict=True):
        assert layer.attention is not None
        layers.append(replace(layer, attention=attention(layer.attention, kind)))
    return replace(stack, layers=tuple(layers), head=Linear((Tensor(JOIN),)))


class CompiledAssistant(CompiledDrafter):
    """An assistant's layers. `states`: `[rows, 2 * width]`, what is joined."""

    def _embed(self, program: Program, target: Buffer) -> None:
        states = program.given("states", self._head.inputs, self._float32)
        program.linear(self._head, states, target)


class NativeAssistant:
    """An assistant in the native kernels, which read the pages of the target's pool.

    `stack`: as of `borrowing`. `weights`: the format of its weights.
    """

    def __init__(self, parameters: Parameters, stack: Stack, model: Model, weights: str) -> None:
        assert isinstance(model.pool, PagePool)
        self._compiled = CompiledAssistant(parameters, stack, model.pool, weights)
        self._compiled.watch([len(stack.layers) + 1])
        kernels = model.pool.kernels
        packed = NativePacker(kernels, weights)(parameters(SPLIT))
        self._split, self._dtype = NativeHead(packed, kernels), parameters.dtype

    def __call__(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        listed = RowList()
        for cache, joined in parts:
            assert isinstance(cache, PagedStore)
            # a row sees all committed tokens, and nothing of it is written
            n, length = len(joined), cache.length
            nothing = [0] * n
            listed.add(
                cache.table, nothing, [length] * n, nothing, [length] * n, [()] * n, range(n)
            )
        self._compiled.states = torch.cat([one.joined for one in parts]).contiguous()
        self._compiled(listed.rows(), max(listed.positions))
        feature = self._compiled.hidden
        return self._split(feature).to(self._dtype), feature


Scored = tuple[torch.Tensor, torch.Tensor | None]  # logits, and the token of each column
Head = Callable[[Sequence[torch.Tensor]], Sequence[Scored]]  # of each request's rows `[n, d]`


class AssistantState(DrafterState):
    """What the drafter keeps of one sequence.

    `hidden`: `[1, width]`, the target's hidden state after the last token that it has read. `out`:
    by node of the `tree` that is being grown, `[1, width]`. `calls`: how many passes were run.
    """

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        self.tree: TokenTree | None = None
        self.out = dict[int, torch.Tensor]()
        self.calls = 0

    def append_hidden(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden[-1:].clone()  # a slice would keep the hidden states of all rows

    def release(self) -> None:
        self.hidden = self.tree = None
        self.out = {}


class AssistantDrafter(Drafter):
    """A drafter that attends to the target's keys and values.

    `passes` run its layers, `head` scores what they give. `layer`: the hidden states that it reads
    (`Model.watch`).
    """

    needs_hidden = True

    def __init__(self, passes: Passes, head: Head, model: Model, layer: int) -> None:
        self.passes, self.head, self.vocab_size = passes, head, model.vocab_size
        self._embedding = model.embedding
        model.watch([layer])

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> AssistantState:
        return AssistantState()

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the tokens that the head scored. See `Drafter.answer`.

        Raises `ValueError` where a tree's first request is not for the root alone, where a node's
        parent was never requested, or where the hidden state before the root is missing.
        """
        out, feature = self.passes([self._part(request) for request in requests])
        sizes = [len(request.nodes) for request in requests]
        features = feature.split_with_sizes(sizes)
        for request, rows in zip(requests, out.split_with_sizes(sizes), strict=True):
            state = request.state
            if request.nodes[0] == 0:
                state.tree, state.out = request.tree, {}
            state.out.update(zip(request.nodes, rows[:, None], strict=True))
            state.calls += 1
        return [
            DraftProbs(probs_of(logits, request.context.draft_temperature), tokens, self.vocab_size)
            for request, (logits, tokens) in zip(requests, self.head(features), strict=True)
        ]

    def _part(self, request: DraftRequest) -> Part:
        """Return the rows of the requested nodes."""
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
        tokens = torch.tensor([tree.token[node] for node in nodes], device=hidden.device)
        return Part(cache, torch.cat([self._embedding(tokens).to(hidden.dtype), hidden], 1))
