"""The EAGLE drafter at work: it gives distributions after the nodes of growing trees.

It computes them from the target's hidden states with the network of `eagle_model.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from quickbeam.drafters.base import DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.eagle_passes import NativeEagle, TorchEagle
from quickbeam.drafters.feature import FeatureDrafter, FeatureState, choose_scorers, in_parts, score
from quickbeam.drafters.native import network_kernels
from quickbeam.drafters.shortlist.shortlist import Shortlist, ShortlistState
from quickbeam.models.base import Batch, Chain, Draft, Model, Part, inference
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.tree import TokenTree


class EagleState(FeatureState):
    """What the EAGLE drafter keeps of one sequence.

    It holds a key and a value for every row of the committed text, and what is known of the tree
    that is being grown. Row j stands for the first j + 2 of `ids` (see `eagle_model.py`).

    - `shadow`: the root and the requested nodes, in the order of their rows. The root's row is
      committed once its tree is over. `place`: by node of the tree, that of the shadow.
    - `out`, `feature`: `[k, d]`, of the shadow's nodes that were run.
    - `routed`, `root_routed`: the clusters that the last call scored, and that of the root.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        super().__init__(cache, ids, shortlist)
        self.out = self.feature = torch.empty(0)
        self.shadow: TokenTree | None = None
        self.place: dict[int, int] = {}
        self.routed: torch.Tensor | None = None
        self.root_routed: torch.Tensor | None = None

    def readable(self, early: bool = True) -> int:
        return min(self.waiting - early, self.unread_rows)

    @property
    def unread_rows(self) -> int:
        """How many committed tokens before the root have no row yet."""
        return len(self.ids) - 1 - self.cache.length - (self.shadow is not None)

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        if self.shadow is not None:
            self.cache.commit([0])
            self.shadow = None
        self.routed = self.root_routed = None

    def attach(self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor]) -> None:
        super().attach(chunks, tokens, hidden)
        if chunks:  # the last row depends on the token after it, too, and is computed anew
            self.cache.truncate(self.cache.length - 1)

    def release(self) -> None:
        super().release()
        self.shadow, self.out, self.feature = None, torch.empty(0), torch.empty(0)


class EagleInput(NamedTuple):
    """A sequence's part of a pass, and what its rows read besides tokens (`TorchEagle.run`)."""

    state: EagleState
    part: Part
    hidden: torch.Tensor


class EagleDrafter(FeatureDrafter):
    """A feature drafter: one layer on the target's hidden states, and the head.

    The request for a tree's root first reads the tokens that were committed since the last tree,
    with the target's own hidden states. Their rows overwrite those of the last tree. Each later
    request adds one row for each node, which attends to the rows of the node's ancestors.

    The drafter makes `model` return the hidden states after `layers` (`Model.set_aux_layers`),
    which its `passes` read. `head_size`: the width of the target's head's input; None for a head of
    its own, whose columns are of `tokens`. `routes`: whether a router can choose what is scored.
    """

    kind = EagleState

    def __init__(
        self,
        passes: Any,
        model: Model,
        layers: Sequence[int],
        head_size: int | None,
        tokens: torch.Tensor | None = None,
        routes: bool = True,
    ) -> None:
        self.passes, self.pool, self.vocab_size = passes, passes.pool, model.vocab_size
        self.head_size, self.tokens, self.routes = head_size, tokens, routes
        model.set_aux_layers(layers)

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
            state.routed = None if state.waiting else state.root_routed
            if state.waiting != state.unread_rows:
                raise ValueError(
                    f"hidden states of {state.waiting} tokens for {state.unread_rows} not read yet"
                )
        self._read([one.state for one in firsts if one.state.waiting], early=False)
        for request in firsts:
            state = request.state
            state.tree, state.place = request.tree, {0: 0}
            state.shadow = TokenTree(request.tree.token[0])
            state.out, state.feature = state.out[:1], state.feature[:1]
        inputs = [self._below(request) for request in requests if list(request.nodes) != [0]]
        # all passes go before any change: a call that fails is made again
        for (state, *_), out, feature in list(self._run(inputs)):
            state.out = torch.cat([state.out, out])
            state.feature = torch.cat([state.feature, feature])
        return self._distributions(requests)

    def _read(self, states: Sequence[EagleState], early: bool = True) -> None:
        """Compute rows of the committed tokens that have hidden states.

        A row needs the hidden state of a token and the id of the token after it. The last row of
        each state stands for the root, whose distribution is computed. `early`: called before a
        tree is requested, so that row is left out.
        """
        for part in in_parts(states, lambda state: state.readable(early)):
            inputs = list[EagleInput]()
            for state, count in part:
                at = state.cache.length
                wanted = int(not early and state.waiting == count)
                rows = Chain(state.cache, state.ids[at + 1 : at + 1 + count], wanted)
                inputs.append(EagleInput(state, rows, state.unread.first(count)))
            for (state, chain, _), out, feature in self._run(inputs):
                state.unread.drop(chain.rows)
                state.cache.commit(range(chain.rows - chain.wanted))
                if chain.wanted:
                    state.shadow = TokenTree(state.ids[-1])
                    state.out, state.feature = out[-1:], feature[-1:]

    def _below(self, request: DraftRequest) -> EagleInput:
        state, tree, nodes = request.state, request.tree, request.nodes
        if tree is not state.tree or state.shadow is None or nodes[0] == 0:
            raise ValueError("a new tree: ask for its root first, and alone")
        run = len(state.out)
        above = [state.place.get(tree.parent[node], run) for node in nodes]
        if max(above) >= run:
            raise ValueError(f"nodes {list(nodes)}: ask for their parents first")
        for node, parent in zip(nodes, above, strict=True):
            if node not in state.place:  # known where a failed call is made again
                state.place[node] = state.shadow.add(parent, tree.token[node], self.name)
        return EagleInput(state, Draft(state.cache, state.shadow, run), state.out[above])

    def _run(
        self, inputs: Sequence[EagleInput]
    ) -> Iterator[tuple[EagleInput, torch.Tensor, torch.Tensor]]:
        """Run the inputs, and yield each with its outputs and the features that the head reads."""
        groups: dict[Shortlist | None, list[EagleInput]] = {}  # of the same router: one pass
        for one in inputs:
            shortlist = one.state.shortlist
            groups.setdefault(None if shortlist is None else shortlist.shared, []).append(one)
        for shared, group in groups.items():
            batch, first = Batch([one.part for one in group]), 0
            hidden = torch.cat([one.hidden for one in group])
            out, feature, scores = self.passes.run(batch, hidden, shared if batch.wanted else None)
            for state, part, _ in group:
                if shared is not None and part.wanted:
                    began, mine = perf_counter(), slice(first, first + part.wanted)
                    state.routed = shared.none if scores is None else shared.choose(scores[mine])
                    if isinstance(part, Chain):
                        state.root_routed = state.routed
                    state.used.seconds += perf_counter() - began
                first += part.wanted
            sizes = [part.rows if len(out) else 0 for part in batch.parts]
            parts = out.split_with_sizes(sizes), feature.split_with_sizes(sizes)
            yield from zip(group, *parts, strict=True)

    def _distributions(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        states, probs = [request.state for request in requests], dict[int, DraftProbs]()
        features = [one.state.feature[-len(one.nodes) :] for one in requests]
        for scored in score(states, features, [one.routed for one in states], self.passes):
            each = [requests[i].context.draft_temperature for i, n in scored.of for _ in range(n)]
            same, device = len(set(each)) == 1, scored.logits.device
            temperature = each[0] if same else torch.tensor(each, device=device)[:, None]
            values = probs_of(scored.logits, temperature)
            tokens = self.tokens if scored.tokens is None else scored.tokens
            for i, part in scored.split(values):
                probs[i] = DraftProbs(part, tokens, self.vocab_size)
        return [probs[i] for i in range(len(requests))]


def eagle_drafter(
    network: EagleHead, model: Model, *, native: bool = True, weights: str | None = None
) -> EagleDrafter:
    """Take a network over as a drafter of `model`.

    `native`: let the native kernels run it where they can. `weights`: their format; None: 8 bits.
    """
    config = network.config
    network = network.to(model.device, model.dtype).eval().requires_grad_(False)
    kernels = network_kernels(model, network, embeds=True) if native else None
    passes = NativeEagle(network, kernels, weights) if kernels else TorchEagle(network, model)
    tokens: Any = network.tokens if config.own_head else None
    head_size = None if config.own_head else config.hidden_size
    return EagleDrafter(passes, model, config.layers, head_size, tokens)
