"""The feature drafter at work: it gives distributions after the nodes of growing trees.

It computes them from the target's hidden states with the network of `eagle_model.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.eagle_native import NativeEagle
from quickbeam.drafters.eagle_state import EagleState, Work
from quickbeam.drafters.largest import largest
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Model, inference
from quickbeam.models.gathered import Behind, GatheredStep, RowPool, RowStore
from quickbeam.models.kv import Layer, LayerShape, Pool
from quickbeam.models.native.library import kernels
from quickbeam.models.native.operands import RowList
from quickbeam.models.pages import PagedStore

CHUNK = 512  # the most rows of committed tokens that one pass runs
# How many of the likeliest tokens of the last logits a shortlist takes up. They hint at the tokens
# that follow the root.
OFFERED = 16
NOTHING = (torch.empty(0), torch.empty(0))  # outputs and features of rows that only leave keys


class EagleDrafter(Drafter):
    """A feature drafter: an `EagleHead` on the target's hidden states.

    The request for a tree's root first reads the tokens that were committed since the last tree,
    with the target's own hidden states. Their rows overwrite those of the last tree, which were
    computed from the drafter's own outputs. Each later request adds one row for each node. A row
    attends to the rows of the node's ancestors. Where the native kernels run the network, the rows
    of all requests go in one pass; otherwise each sequence has its own pass.

    The drafter takes the network over, and makes `model` return the hidden states that the network
    reads (`Model.watch`). `native`: let the native kernels run the network where they can.
    """

    name = "drafter"
    needs_hidden = True
    pool: Pool

    def __init__(self, network: EagleHead, model: Model, *, native: bool = True) -> None:
        config = network.config
        self.network = (
            network.to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)
        )
        self.network.rotary = config.rotary().to(model.device)  # the angles stay float32
        self.vocab_size, self.device = model.vocab_size, model.device
        self.folder: Path | None = None  # where the drafter was read from
        library = (
            kernels()
            if native and model.device.type == "cpu" and model.dtype is torch.bfloat16
            else None
        )
        self._native = (
            NativeEagle(self.network, library)
            if library is not None and NativeEagle.fits(self.network)
            else None
        )
        model.watch(config.layers)
        shape = LayerShape(config.kv_heads, config.head_dim, config.head_dim)
        self.pool = (
            RowPool([shape], model.dtype, model.device)
            if self._native is None
            else self._native.pool
        )
        self._layer = Layer(0, config.head_dim**-0.5, None, None, None)

    def check_shortlist(self, shortlist: Shortlist | None) -> None:
        if shortlist is not None and self.network.config.own_head:
            raise InvalidInput(
                "this drafter's head has a shortlist of its own, trained with it: take --vocab full"
            )

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> EagleState:
        self.check_shortlist(shortlist)
        return EagleState(
            self.pool.new(), ids, shortlist.begin(ids) if shortlist is not None else None
        )

    @inference
    def read(self, states: Sequence[DrafterState], least: int = 1, end: int | None = None) -> None:
        # `end` bounds the hidden states that were given, so it needs no look here
        readable = [
            state
            for state in states
            if isinstance(state, EagleState) and self._readable(state, True) >= max(1, least)
        ]
        self._read(readable, None)

    @staticmethod
    def _readable(state: EagleState, early: bool) -> int:
        """Return how many rows of committed tokens can be computed now.

        A row needs the hidden state of a token and the id of the token after it. `early`: called
        before a tree is requested. Then the last row is left out, as routing and distributions
        start from it.
        """
        return min(state.waiting - early, len(state.ids) - 1 - state.cache.length)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the tokens that the head scored, on the target's device.

        This takes one pass, and one more where a tree's first request asks for nodes beside the
        root. See `Drafter.answer`.

        Raises `ValueError` where a tree's first request doesn't begin with the root, where a node's
        parent was never requested, or where hidden states of unread tokens are missing.
        """
        firsts = [request for request in requests if request.nodes[0] == 0]
        for request in firsts:
            state = self._state(request)
            if state.shortlist is not None:
                began = perf_counter()
                state.shortlist.extend(state.unseen)
                state.shortlist.extend(largest(request.context.logits[None], OFFERED)[0][0])
                state.unseen.clear()
                state.counted.seconds += perf_counter() - began
            state.routed = {0: state.routed[0]} if 0 in state.routed and not state.waiting else {}
            if state.waiting != len(state.ids) - 1 - state.cache.length:
                raise ValueError(
                    f"hidden states of {state.waiting} tokens for "
                    f"{len(state.ids) - 1 - state.cache.length} not read yet"
                )
        self._read(
            [self._state(request) for request in firsts if self._state(request).waiting], {0: 0}
        )
        for request in firsts:
            state = self._state(request)
            state.tree, state.place, state.path = request.tree, {0: 0}, {0: []}
            state.out, state.feature = state.out[:1], state.feature[:1]
            state.visible = torch.zeros(0, 0, dtype=torch.bool)
        works = [
            self._below(request)
            for request in requests
            if request.nodes[-1] != 0 or len(request.nodes) > 1
        ]
        for work, (out, feature) in zip(works, self._run(works), strict=True):
            state, done = work.state, len(work.state.place)
            state.out = torch.cat([state.out, out])
            state.feature = torch.cat([state.feature, feature])
            state.place.update({node: done + i for i, node in enumerate(work.nodes)})
        return self._distributions(requests)

    def _state(self, request: DraftRequest) -> EagleState:
        state: EagleState = request.context.states[self.name]
        return state

    def _read(self, states: Sequence[EagleState], asked: dict[int, int] | None) -> None:
        """Compute rows of the committed tokens that have hidden states.

        With `asked`, the last row of each state stands for the root, whose distribution is
        computed. Without it, that row is left out.
        """
        left = list(states)
        while left:
            works, room = list[Work](), CHUNK
            for state in left:
                count = min(self._readable(state, asked is None), CHUNK)
                if works and count > room:
                    break
                room -= count
                at = state.cache.length
                last = {} if state.waiting > count or asked is None else asked
                works.append(
                    Work(state, state.unread.first(count), state.ids[at + 1 : at + 1 + count], last)
                )
            for work, (out, feature) in zip(works, self._run(works), strict=True):
                work.state.commit(len(work.tokens))
                if work.asked:
                    work.state.out, work.state.feature = out[-1:], feature[-1:]
            left = [state for state in left if self._readable(state, asked is None) > 0]

    def _below(self, request: DraftRequest) -> Work:
        """Return the work for one row for each requested node but the root."""
        state, tree = self._state(request), request.tree
        if tree is not state.tree:
            raise ValueError("a new tree: ask for its root first")
        nodes = [node for node in request.nodes if node]
        for node in nodes:
            if (parent := tree.parent[node]) not in state.place:
                raise ValueError(f"node {node}: ask for its parent {parent} first")
        above = state.out[[state.place[tree.parent[node]] for node in nodes]]
        return Work(
            state,
            above,
            [tree.token[node] for node in nodes],
            {node: tree.depth[node] for node in nodes},
            nodes,
        )

    def _run(self, works: Sequence[Work]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Run the works, and return for each its outputs and the features that the head reads.

        The works are either all of committed rows or all of nodes.
        """
        for work in works:
            work.state.calls += 1
        if self._native is None:
            outputs = [self._run_alone(work) for work in works]
            return iter([(out, self.network.feature(out)) for out in outputs])
        passed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        groups: dict[int, list[int]] = {}  # works with the same router go in one pass
        for i, work in enumerate(works):
            shortlist = work.state.shortlist
            groups.setdefault(id(shortlist and shortlist.shared), []).append(i)
        for group in groups.values():
            parts = self._run_native(self._native, [works[i] for i in group])
            passed.update(zip(group, parts, strict=True))
        return iter([passed[i] for i in range(len(works))])

    def _run_native(
        self, native: NativeEagle, works: Sequence[Work]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Run all works, and the router, in one pass of the kernels.

        A committed row sees the committed rows up to itself. A node's row sees all of these and its
        path. Where no distribution is asked for, only keys and values are computed.
        """
        committed, listed = not works[0].nodes, RowList()
        for work in works:
            state = work.state
            assert isinstance(state.cache, PagedStore)
            if committed:
                state.cache.add_chain(
                    listed,
                    work.tokens,
                    range(len(work.tokens) - 1, len(work.tokens)) if work.asked else (),
                )
                continue
            assert state.tree is not None
            done, length, n = len(state.place) - 1, state.cache.length, len(work.nodes)
            orders = range(length + done, length + done + n)
            paths = [
                [*state.path[state.tree.parent[node]], order]
                for node, order in zip(work.nodes, orders, strict=True)
            ]
            state.cache.reserve(orders.stop)
            positions = [length + len(path) - 1 for path in paths]
            listed.add(
                state.cache.table, work.tokens, positions, orders, [length] * n, paths, range(n)
            )
            state.path.update(zip(work.nodes, paths, strict=True))
        hidden = works[0].hidden if len(works) == 1 else torch.cat([work.hidden for work in works])
        routing = [work for work in works if self._routes(work)]
        shortlist = routing[0].state.shortlist if routing else None
        router = shortlist.shared.native_router if shortlist is not None else None
        rows, last = listed.rows(), max(listed.positions)
        if not listed.wanted:
            native.remember(hidden, rows, last)
            return iter([NOTHING] * len(works))
        out, feature, scores = native.run(hidden, committed, rows, last, router)
        first = 0
        for work in works:
            began, count = perf_counter(), len(work.asked)
            if count and work.state.shortlist is not None:
                above = next(reversed(work.state.routed.values()), None)
                depths, shared = list(work.asked.values()), work.state.shortlist.shared
                routes = scores is not None and shared.routes(depths, above)
                routed = (
                    shared.choose(scores[first : first + count])
                    if routes and scores is not None
                    else shared.kept(above)
                )
                work.state.routed.update(dict.fromkeys(work.asked, routed))
                work.state.counted.seconds += perf_counter() - began
            first += count
        sizes = [len(work.tokens) for work in works]
        return zip(out.split_with_sizes(sizes), feature.split_with_sizes(sizes), strict=True)

    @staticmethod
    def _routes(work: Work) -> bool:
        """Whether this work asks the router."""
        shortlist, above = work.state.shortlist, next(reversed(work.state.routed.values()), None)
        return (
            shortlist is not None
            and bool(work.asked)
            and shortlist.shared.routes(list(work.asked.values()), above)
        )

    def _run_alone(self, work: Work) -> torch.Tensor:
        """Run the rows of one sequence with PyTorch's operators, and return their outputs.

        Where no distribution is asked for, only keys and values are computed.
        """
        state, hidden = work.state, work.hidden
        store = state.cache
        assert isinstance(store, RowStore) and isinstance(self.pool, RowPool)
        if not work.nodes:
            hidden = self.network.fuse(hidden)
            rows = Behind(store, range(len(hidden)))
        else:
            assert state.tree is not None
            done, n = len(state.place) - 1, len(work.nodes)
            visible = torch.zeros(done + n, done + n, dtype=torch.bool)
            visible[:done, :done] = state.visible[:done, :done]
            for row, node in enumerate(work.nodes, done):
                # the root's row is a committed one, so the tree's own rows begin after it
                if place := state.place[state.tree.parent[node]]:
                    visible[row] = visible[place - 1]
                visible[row, row] = True
            nodes = [*list(state.place)[1:], *work.nodes]
            depths = [state.tree.depth[node] - 1 for node in nodes]
            rows = Behind(store, depths, done, visible[done:].numpy())
            state.visible = visible
        step = GatheredStep([rows], self.pool)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            step.write(self._layer, key.transpose(0, 1), value.transpose(0, 1))
            return step.attend(query, self._layer)

        embedded = self.network.embed(
            torch.tensor(work.tokens, dtype=torch.int64, device=hidden.device)
        )
        if not work.asked:
            _, _, key, value = self.network.project(hidden, embedded, step.positions)
            step.write(self._layer, key.transpose(0, 1), value.transpose(0, 1))
            return hidden.new_empty(0, self.network.config.hidden_size)
        if state.shortlist is None:
            return self.network(hidden, embedded, step.positions, attend)  # type: ignore[no-any-return]
        began = perf_counter()
        parents, following = hidden[-len(work.asked) :], embedded[-len(work.asked) :]
        above = next(reversed(state.routed.values()), None)
        routed = state.shortlist.shared.route(parents, following, list(work.asked.values()), above)
        state.routed.update(dict.fromkeys(work.asked, routed))
        state.counted.seconds += perf_counter() - began
        return self.network(hidden, embedded, step.positions, attend)  # type: ignore[no-any-return]

    def _distributions(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return the distributions after the nodes that were run last.

        One product serves all sequences that score the whole vocabulary. Sequences with a shortlist
        take one each.
        """
        whole = [request for request in requests if self._state(request).shortlist is None]
        probs = iter(self._score_whole(whole) if whole else [])
        return [
            next(probs) if self._state(request).shortlist is None else self._score_part(request)
            for request in requests
        ]

    def _features(self, request: DraftRequest, nodes: Sequence[int]) -> torch.Tensor:
        state = self._state(request)
        return state.feature[[state.place[node] for node in nodes]]

    def _score_whole(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        began, network = perf_counter(), self.network
        features = [self._features(request, request.nodes) for request in requests]
        score = network.score if self._native is None else self._native.logits
        logits = score(torch.cat(features))
        tokens: Any = network.tokens if network.config.own_head else None
        parts = zip(requests, logits.split_with_sizes([len(f) for f in features]), strict=True)
        probs = [
            DraftProbs(probs_of(part, request.context.draft_temperature), tokens, self.vocab_size)
            for request, part in parts
        ]
        for request in requests:
            used = self._state(request).counted
            used.tokens, used.calls = used.tokens + logits.shape[-1], used.calls + 1
            used.seconds += (perf_counter() - began) / len(requests)
        return probs

    def _score_part(self, request: DraftRequest) -> DraftProbs:
        nodes = request.nodes
        if len(nodes) > 1 and nodes[0] == 0:  # the root was routed in a pass of its own
            parts = [self._score_nodes(request, part) for part in (nodes[:1], nodes[1:])]
            return DraftProbs(torch.cat([part.dense() for part in parts]))
        return self._score_nodes(request, nodes)

    def _score_nodes(self, request: DraftRequest, nodes: Sequence[int]) -> DraftProbs:
        began, state = perf_counter(), self._state(request)
        assert state.shortlist is not None
        logits, tokens = state.shortlist.score(
            self._features(request, nodes), state.routed[nodes[-1]]
        )
        probs = probs_of(logits, request.context.draft_temperature)
        state.counted.calls += 1
        state.counted.seconds += perf_counter() - began
        return DraftProbs(probs, tokens, self.vocab_size)
