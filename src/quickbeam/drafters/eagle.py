"""The EAGLE drafter at work: it gives distributions after the nodes of draft trees.

The network of `eagle_model.py`, or that of an MTP head (`mtp.py`), computes them from the target's
hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from quickbeam.drafters.base import DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.feature import FeatureDrafter, FeatureState, HiddenRecord, in_chunks
from quickbeam.drafters.passes import (
    Head,
    NativePasses,
    Outputs,
    ScoredRows,
    TorchPasses,
    passes_of,
)
from quickbeam.drafters.scoring import choose_scorers, score
from quickbeam.drafters.shadow import ShadowTree
from quickbeam.drafters.shortlist.shortlist import Shortlist, ShortlistState
from quickbeam.models.base import Batch, Chain, Model, Part, inference
from quickbeam.models.cache.kv import Page, SequenceCache
from quickbeam.models.native.library import Kernels
from quickbeam.models.torch.likeliest import rank_tokens, ranked_rows

NO_ROWS = torch.empty(0)


class EagleState(FeatureState):
    """What the EAGLE drafter keeps of one sequence.

    It holds a key and a value for every row of the committed text, and of the tree that is being
    proposed. Row j stands for the first j + 2 of `ids` (see `eagle_model.py`).

    - `shadow`: the requested nodes. The root's row is committed once its tree is over.
    - `out`, `feature`: `[k, d]`, the outputs of the shadow's rows that were run, and what the head
      reads of them. Without a shadow, those of the root if its row was run.
    - `clusters`, `root_clusters`: the clusters that the last call scored, and those that the root's
      call scored.
    - `probs`, `root_probs`: the distributions of the last call and of the root's call, at
      temperature 1, where passes score tokens.
    - `passes`: what runs its rows; None: what runs the drafter's.
    - `record`: the hidden states of the latest committed tokens, where they may be learned from.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        super().__init__(cache, ids, shortlist)
        self.out = self.feature = NO_ROWS
        self.shadow: ShadowTree | None = None
        self.clusters: torch.Tensor | None = None
        self.root_clusters: torch.Tensor | None = None
        self.probs: DraftProbs | None = None
        self.root_probs: DraftProbs | None = None
        self.passes: NativePasses | TorchPasses | None = None
        self.record: HiddenRecord | None = None

    def append_hidden(self, hidden: torch.Tensor) -> None:
        super().append_hidden(hidden)
        if self.record is not None:
            self.record.append(hidden)

    def readable(self, early: bool = True) -> int:
        return min(self.waiting - early, self.unread_rows)

    @property
    def unread_rows(self) -> int:
        """How many committed tokens before the root have no row yet."""
        return len(self.ids) - 1 - self.cache.length - (len(self.out) > 0)

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        if self.out.shape[0]:  # `len` of a tensor would ask for overrides first
            self.cache.commit([0])
        self.forget_tree()
        self.clusters = self.root_clusters = None
        self.probs = self.root_probs = None

    def forget_tree(self) -> None:
        self.shadow = None
        self.out = self.feature = NO_ROWS

    def attach(
        self, chunks: Sequence[list[Page]], tokens: int, hidden: Sequence[torch.Tensor]
    ) -> None:
        super().attach(chunks, tokens, hidden)
        if chunks:  # the last row depends on the token after it, too, and is computed anew
            self.cache.truncate(self.cache.length - 1)

    def release(self) -> None:
        super().release()
        self.forget_tree()


class EagleInput(NamedTuple):
    """A sequence's part of a pass, and the hidden states that its rows read, `[rows, d]`."""

    state: EagleState
    part: Part
    hidden: torch.Tensor


class PassKey(NamedTuple):
    """What sequences must have in common whose rows are in one pass."""

    passes: NativePasses | TorchPasses
    shortlist: Shortlist | None


class EagleDrafter(FeatureDrafter):
    """A feature drafter: one layer on the target's hidden states, and the head.

    The request for a tree's root first reads the tokens that were committed since the last tree,
    with the target's own hidden states. Their rows overwrite those of the last tree. Each later
    request adds one row for each node, which attends to the rows of the node's ancestors.

    - `passes`: run the layer.
    - `aux_layers`: the layers of the `model` after which its hidden states are read
      (`Model.set_aux_layers`).
    - `norm_output`: whether the output that stands in for the next hidden state is taken after the
      stack's norm.
    - `norm_feature`: whether what the head reads is taken after that norm.
    - `head_size`: the width of what the target's head reads; None for a head of its own.
    - `tokens`: the tokens of the columns of a head of its own.
    - `routes`: whether a router can choose what is scored.
    - `width`: how much of the target's hidden states it reads; None: all.
    """

    kind = EagleState
    width: int | None = None

    def __init__(
        self,
        passes: NativePasses | TorchPasses,
        model: Model,
        aux_layers: Sequence[int],
        *,
        norm_output: bool,
        norm_feature: bool,
        head_size: int | None,
        tokens: torch.Tensor | None = None,
        routes: bool = True,
    ) -> None:
        self.passes = passes
        self.pool = passes.pool
        self.vocab_size = model.vocab_size
        self.head_size = head_size
        self.tokens = tokens
        self.routes = routes
        self._norm_output = norm_output
        self._norm_feature = norm_feature
        model.set_aux_layers(aux_layers)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the tokens that the head scored, on the target's device.

        See `Drafter.answer`. Raises `ValueError` where a tree's first request is not for the root
        alone, where a node's parent was never requested, or where hidden states of unread tokens
        are missing.
        """
        firsts = [request for request in requests if request.nodes[0] == 0]
        choose_scorers(firsts)
        for request in firsts:
            state = request.state
            state.clusters = None if state.waiting else state.root_clusters
            state.probs = None if state.waiting else state.root_probs
            if state.waiting != state.unread_rows:
                raise ValueError(
                    f"hidden states of {state.waiting} tokens for {state.unread_rows} not read yet"
                )
        states = [request.state for request in firsts]
        self._read([state for state in states if state.waiting], early=False)
        for request in firsts:
            state = request.state
            tree = request.tree
            state.shadow = ShadowTree(tree, tree.token[:1], self.name, run=1)
            state.out = state.out[:1]
            state.feature = state.feature[:1]
        inputs = [self._below(request) for request in requests if list(request.nodes) != [0]]
        for (state, part, _), out, feature in self._run(inputs):
            state.out = torch.cat([state.out, out])
            state.feature = torch.cat([state.feature, feature])
            if state.shadow is not None:
                state.shadow.run += part.rows
        return self._distributions(requests)

    def _read(self, states: Sequence[EagleState], early: bool = True) -> None:
        """Compute rows of the committed tokens that have hidden states.

        A row needs the hidden state of a token and the id of the token after it. The last row of
        each state stands for the root, whose distribution is computed. `early`: the call comes
        before a tree is requested, so the root's row is left out.
        """
        for chunk in in_chunks(states, lambda state: state.readable(early)):
            inputs = list[EagleInput]()
            for state, count in chunk:
                first = state.cache.length + 1
                wanted = int(not early and state.waiting == count)
                rows = Chain(state.cache, state.ids[first : first + count], wanted)
                hidden = state.unread.first(count)[:, : self.width]
                inputs.append(EagleInput(state, rows, hidden))
            for (state, part, _), out, feature in self._run(inputs, fuse=True):
                state.unread.drop(part.rows)
                state.cache.commit(range(part.rows - part.wanted))
                if part.wanted:
                    state.out = out[-1:]
                    state.feature = feature[-1:]

    def _below(self, request: DraftRequest) -> EagleInput:
        """Return a request's part of a pass: the rows of its nodes, which read their parents'."""
        state = request.state
        tree = request.tree
        nodes = request.nodes
        shadow = state.shadow
        if shadow is None or tree is not shadow.tree or nodes[0] == 0:
            raise ValueError("a new tree: ask for its root first, and alone")
        parents = shadow.parent_rows(nodes)
        shadow.add(nodes)
        return EagleInput(state, shadow.part(state.cache), state.out[parents])

    def _run(
        self, inputs: Sequence[EagleInput], fuse: bool = False
    ) -> list[tuple[EagleInput, torch.Tensor, torch.Tensor]]:
        """Run the inputs. Returns each with its outputs and the features that the head reads.

        Outputs and features are empty where no row is wanted. `fuse`: whether the inputs' hidden
        states are the target's.
        """
        groups: dict[PassKey, list[EagleInput]] = {}
        for rows in inputs:
            shortlist = rows.state.shortlist
            shared = None if shortlist is None else shortlist.shared
            key = PassKey(rows.state.passes or self.passes, shared)
            groups.setdefault(key, []).append(rows)
        results = list[tuple[EagleInput, torch.Tensor, torch.Tensor]]()
        for (passes, shared), group in groups.items():
            batch = Batch([rows.part for rows in group])
            hidden = torch.cat([rows.hidden for rows in group])
            if not batch.wanted:
                passes.write_keys(batch, hidden, fuse)
                results += [(rows, hidden[:0], hidden[:0]) for rows in group]
                continue
            head = Head(self._norm_feature, shared, self.tokens, rank)
            scorers = [rows.state.scorer for rows in group]
            outputs = passes.run(batch, hidden, head, scorers, fuse)
            if outputs.finished:
                self._keep_probs(group, outputs)
            elif shared is not None:
                self._choose_clusters(shared, group, outputs.scores)
            sizes = [part.rows for part in batch.parts]
            out = outputs.normed if self._norm_output else outputs.stream
            feature = outputs.normed if self._norm_feature else outputs.stream
            results += zip(
                group,
                out.split_with_sizes(sizes),
                feature.split_with_sizes(sizes),
                strict=True,
            )
        return results

    def _keep_probs(self, group: Sequence[EagleInput], outputs: Outputs) -> None:
        """Divide a pass's distributions among its inputs' states."""
        wanted = sum(part.wanted for _, part, _ in group)
        probs, likeliest = outputs.finished
        ranked = ranked_rows(probs[:wanted], likeliest[:wanted])
        first = 0
        for number, (state, part, _) in enumerate(group):
            rows = slice(first, first + part.wanted)
            first = rows.stop
            if not part.wanted:
                continue
            values, likeliest_of_state, scored = ranked.part(rows)
            tokens = self.tokens if outputs.columns is None else outputs.columns[number]
            state.probs = DraftProbs(values, tokens, self.vocab_size, likeliest=likeliest_of_state)
            if isinstance(part, Chain):
                state.root_probs = state.probs
            state.used.calls += 1
            state.used.tokens += scored[0]

    def _choose_clusters(
        self, shared: Shortlist, group: Sequence[EagleInput], scores: torch.Tensor | None
    ) -> None:
        """Choose the clusters of each input by the router's scores of its wanted rows."""
        first = 0
        for state, part, _ in group:
            last = first + part.wanted
            if part.wanted:
                began = perf_counter()
                state.clusters = shared.none
                if scores is not None:
                    (state.clusters,) = shared.choose(scores[first:last])
                if isinstance(part, Chain):
                    state.root_clusters = state.clusters
                state.used.seconds += perf_counter() - began
            first = last

    def _distributions(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        if isinstance(self.passes, TorchPasses):
            return [
                request.state.probs.at(request.context.draft_temperature) for request in requests
            ]
        probs = dict[int, DraftProbs]()
        states = [request.state for request in requests]
        features = [request.state.feature[-len(request.nodes) :] for request in requests]
        clusters = [state.clusters for state in states]
        for number, logits, tokens in score(states, features, clusters, self.passes.score_all):
            values = probs_of(logits, requests[number].context.draft_temperature)
            tokens = self.tokens if tokens is None else tokens
            probs[number] = DraftProbs(values, tokens, self.vocab_size)
        return [probs[number] for number in range(len(requests))]


def rank(scored: ScoredRows) -> Sequence[torch.Tensor]:
    """Return the distributions of a pass's wanted rows, and their likeliest tokens."""
    return rank_tokens(scored.logits, scored.columns, scored.sequence)


def eagle_drafter(
    network: EagleHead, model: Model, kernels: Kernels | None, weights: str | None = None
) -> EagleDrafter:
    """Take a network over as a drafter of `model`.

    `kernels`: run the network if they can; None: PyTorch does. `weights`: their format; None: 8
    bits.
    """
    config = network.config
    network = network.to(model.device, model.dtype).eval().requires_grad_(False)
    tokens: Any = network.tokens if config.own_head else None
    return EagleDrafter(
        passes_of(network, model, kernels, weights),
        model,
        config.layers,
        norm_output=config.norm_output,
        norm_feature=config.final_norm,
        head_size=None if config.own_head else config.hidden_size,
        tokens=tokens,
    )
