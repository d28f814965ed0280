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

import torch

from quickbeam.drafters.assistant_passes import Part, Passes
from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.models.base import Model, inference
from quickbeam.tree import TokenTree

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
