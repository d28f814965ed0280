"""The feature drafter at work: laws after the nodes of a growing tree, from the target's hidden states (see `eagle_model.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from quickbeam.draft.base import Context, Drafter, HeadUse, Laws, law_of
from quickbeam.draft.eagle_model import EagleHead
from quickbeam.draft.eagle_native import NativeEagle
from quickbeam.errors import InvalidInput
from quickbeam.shortlist.overlap import Overlap
from quickbeam.shortlist.shortlist import Routed, Shortlist
from quickbeam.target.attention import Attend, Layer, Step, attend_plain, attend_sdpa
from quickbeam.target.kv_cache import KVStore, LayerShape
from quickbeam.target.linear import pack_linears
from quickbeam.target.native.library import kernels
from quickbeam.target.native.operands import Rows
from quickbeam.target.pages import PagedStore
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree

CHUNK = 512  # rows a pass at most
OFFERED = 16  # of the target's likeliest tokens after the last certain one, that a shortlist takes up: they tell of the tokens after it
GAPS = (6.0, 10.0, 16.0)  # below the largest logit, tried one after the other
MANY = 2048  # tokens near it, beyond which sorting them is no gain


class EagleDrafter(Drafter):
    """Laws of the next token from an `EagleHead` on the target's hidden states.

    Keeps a key and a value for every row of the certain text. The call for a tree's root first reads what became certain since the last
    tree, with the target's own hidden states; the rows of that tree, which stood on the drafter's outputs, are overwritten. Each later call
    adds one row a node, behind the rows of its ancestors.

    Takes the network over: its linears are packed on a CPU (`fast`). Makes `target` keep the hidden states that the network reads.

    `use` a shortlist, and the head scores that part of the vocabulary only.
    """

    name = "drafter"

    def __init__(self, network: EagleHead, target: Target, *, fast: bool = True) -> None:
        config = network.config
        self.network = network.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.network.rotary = config.rotary().to(target.device)  # angles stay float32
        self.target = target
        self.folder: Path | None = None  # where it was read from
        self.calls = 0  # passes of the network since `reset`
        found = kernels() if fast and target.device.type == "cpu" and target.dtype is torch.bfloat16 else None
        self._native = NativeEagle(self.network, found) if found is not None and NativeEagle.fits(self.network) else None
        if fast and self._native is None:
            pack_linears(self.network)
        target.watch(config.layers)
        shape = LayerShape(config.kv_heads, config.head_dim, config.head_dim)
        self._keys = KVStore([shape], target.dtype, target.device)  # without the kernels
        self.store: KVStore | PagedStore = self._keys if self._native is None else self._native.store
        self._layer = Layer(0, config.head_dim**-0.5, None, None, None)
        # One operation instead of a dozen, each of which finds cold caches; nobody wants the bits that `attend_grouped` keeps.
        self._attend: Attend = attend_sdpa if fast else attend_plain
        self._ids: list[int] = []  # row j stands for the first j + 2 of them
        self._tree: TokenTree | None = None  # being grown
        self._out = torch.empty(0)  # outputs of the root's row, then of the rows of the nodes asked for
        self._feature = torch.empty(0)  # what the head reads of them, where the kernels give it
        self._place: dict[int, int] = {}  # node: its row in `_out`
        self._path: dict[int, list[int]] = {}  # node: orders of what it sees behind the certain rows, for the kernels
        self._visible = torch.empty(0, dtype=torch.bool)  # by node asked for: which of them are its ancestors or itself
        self._used = HeadUse()
        self._shortlist: Shortlist | None = None
        self._counted = 0  # of the shortlist's tokens, in `_used` by now
        self.overlap = Overlap(target.device)
        self._routed: dict[int, Routed] = {}  # by node whose law was made with a shortlist

    @property
    def head(self) -> HeadUse:
        if self._shortlist is not None:  # it counts without waiting for the device
            counted = self._shortlist.scored
            self._used.tokens, self._counted = self._used.tokens + counted - self._counted, counted
        return self._used

    def use(self, shortlist: Shortlist | None) -> None:
        if shortlist is not None and self.network.config.own_head:
            raise InvalidInput("this drafter's head has a shortlist of its own, trained with it: take --vocab full")
        self._used = self.head
        self._shortlist, self._counted = shortlist, shortlist.scored if shortlist is not None else 0

    def reset(self, ids: Sequence[int]) -> None:
        """Begin a sequence whose prompt the target has read. Rows that hold for it stay; raises `ValueError` where they don't reach to what
        the target has computed anew (see `reusable`)."""
        rows = self.reusable(ids, self.target.taken)
        if rows < self.target.taken:
            raise ValueError(f"the target kept {self.target.taken} tokens, the drafter has read {rows} of them")
        self.calls, self._tree = 0, None
        self.store.truncate(rows)
        self._ids = list(ids[: rows + 1])
        self._routed.clear()
        if self._shortlist is not None:
            self._shortlist.reset(ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell the shortlist. The target keeps the hidden states until the next root is asked for."""
        if self._shortlist is None:
            return
        node: int | None = 0
        for token in tokens:
            if self._tree is None or node is None or (routed := self._routed.get(node)) is None:
                break
            self._used.wanted += 1
            self._used.held += self._shortlist.holds(token, routed)
            node = self._tree.child(node, token)
        self._routed.clear()
        self._shortlist.extend(tokens)

    def forget(self) -> None:
        self.store.truncate(0)
        self._ids, self._tree = [], None

    def reusable(self, ids: Sequence[int], keep: int) -> int:
        same = next((i for i, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b), min(len(self._ids), len(ids)))
        return max(0, min(keep, same - 1, self.store.length))

    def laws(self, context: Context, tree: TokenTree, nodes: Sequence[int]) -> torch.Tensor:
        """`[len(nodes), vocab]` float32 laws after `nodes`, on the target's device (see `Drafter`)."""
        return self.compact(context, tree, nodes).dense()

    @torch.inference_mode()
    def compact(self, context: Context, tree: TokenTree, nodes: Sequence[int]) -> Laws:
        """Laws over the tokens that the head scored; one pass, and one more where the first call of a tree asks for further nodes than
        the root.

        Raises `ValueError` where a tree's first call doesn't begin with the root or a node's parent was never asked for, `QuickbeamError`
        for outputs that are not finite.
        """
        first = nodes[0] == 0
        if first:
            if self._shortlist is not None:
                began = perf_counter()
                self._shortlist.offer(_largest(context.logits, OFFERED))
                self._used.seconds += perf_counter() - began
            self._begin(context.ids, tree)
        if tree is not self._tree:
            raise ValueError("a new tree: ask for its root first")
        if below := nodes[1:] if first else nodes:
            self._below(tree, below)
        return self._law(nodes, context.temperature)

    def _begin(self, ids: list[int], tree: TokenTree) -> None:
        """Read the certain tokens that have no row yet, the root last."""
        hidden, start = self.target.take_hidden(), self.store.length
        self._routed = {0: self._routed[0]} if 0 in self._routed and not len(hidden) else {}
        if len(hidden) != len(ids) - 1 - start:
            raise ValueError(f"hidden states of {len(hidden)} tokens for the {len(ids) - 1 - start} that are not read yet")
        out = self._out[:1]  # the root's, where this is not the first tree on it
        self._feature = self._feature[:1]
        for begin in range(0, len(hidden), CHUNK):
            part = hidden[begin : begin + CHUNK]
            at = start + begin
            tokens, last = ids[at + 1 : at + 1 + len(part)], {0: 0} if begin + len(part) == len(hidden) else {}
            if self._native is not None:
                rows = self._native.store.chain(tokens, range(len(part) - 1, len(part)))
                out, self._feature = self._run_native(part, True, rows, at + len(part) - 1, last)
            else:
                step = Step(self._keys, torch.arange(at, at + len(part), device=hidden.device))
                out = self._run(self.network.fuse(part), tokens, step, last)
            self.store.commit(range(len(part)))
        self._ids = list(ids)
        self._tree, self._place, self._out = tree, {0: 0}, out[-1:]
        self._feature, self._path = self._feature[-1:], {0: []}
        self._visible = torch.zeros(0, 0, dtype=torch.bool)

    def _below(self, tree: TokenTree, nodes: Sequence[int]) -> None:
        """One row for each of `nodes`."""
        if self._native is not None:
            self._below_native(self._native, tree, nodes)
            return
        done = len(self._visible)
        visible = torch.zeros(done + len(nodes), done + len(nodes), dtype=torch.bool)
        visible[:done, :done] = self._visible
        above = []
        for row, node in enumerate(nodes, done):
            place = self._place.get(tree.parent[node])
            if place is None:
                raise ValueError(f"node {node}: ask for its parent {tree.parent[node]} first")
            if place:  # rows of the tree begin behind the root's
                visible[row] = visible[place - 1]
            visible[row, row] = True
            above.append(place)
        order = list(self._place)[1:]
        depths = torch.tensor([tree.depth[node] for node in [*order, *nodes]], device=self._out.device)
        step = Step(self._keys, self._keys.length - 1 + depths, visible[done:], base=done)
        asked = {node: tree.depth[node] for node in nodes}
        out = self._run(self._out[above], [tree.token[node] for node in nodes], step, asked)
        self._out = torch.cat([self._out, out])
        self._visible = visible
        self._place.update({node: done + 1 + i for i, node in enumerate(nodes)})

    def _below_native(self, native: NativeEagle, tree: TokenTree, nodes: Sequence[int]) -> None:
        """The same on the kernels: a row sees the certain rows and its path."""
        done, length = len(self._path) - 1, self.store.length
        above = []
        for node in nodes:
            if (parent := tree.parent[node]) not in self._place:
                raise ValueError(f"node {node}: ask for its parent {parent} first")
            above.append(parent)
        orders = range(length + done, length + done + len(nodes))
        paths = [[*self._path[parent], order] for parent, order in zip(above, orders, strict=True)]
        positions = [length + len(path) - 1 for path in paths]
        self.store.reserve(orders.stop)
        spans, every = [(len(nodes), native.store.table)], range(len(nodes))
        rows = Rows([tree.token[node] for node in nodes], positions, orders, [length] * len(nodes), paths, spans, every)
        asked = {node: tree.depth[node] for node in nodes}
        out, feature = self._run_native(self._out[[self._place[parent] for parent in above]], False, rows, max(positions), asked)
        self._out, self._feature = torch.cat([self._out, out]), torch.cat([self._feature, feature])
        self._path.update(zip(nodes, paths, strict=True))
        self._place.update({node: done + 1 + i for i, node in enumerate(nodes)})

    def _run_native(
        self, states: torch.Tensor, committed: bool, rows: Rows, last_position: int, asked: dict[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_run` on the kernels, where the router is part of the pass; also what the head reads of the outputs."""
        assert self._native is not None
        self.calls += 1
        shortlist, depths = self._shortlist, list(asked.values())
        if shortlist is None or not asked:
            out, feature, _ = self._native.run(states, committed, rows, last_position, None)
            return out, feature
        above = next(reversed(self._routed.values()), None)
        router = shortlist.native_router if shortlist.routes(depths, above) else None
        out, feature, scores = self._native.run(states, committed, rows, last_position, router)
        began = perf_counter()
        routed = shortlist.kept(above) if scores is None else shortlist.choose(scores, depths)
        self._routed.update(dict.fromkeys(asked, routed))
        self._used.seconds += perf_counter() - began
        return out, feature

    def _run(self, hidden: torch.Tensor, tokens: Sequence[int], step: Step, asked: dict[int, int]) -> torch.Tensor:
        """One pass of the layer. `asked`: the nodes, with their depths, that its last rows stand for and whose laws are wanted: what the
        head is to score for them is found at the same time."""

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self._keys.write(0, step.rows, key.transpose(0, 1), value.transpose(0, 1))
            return self._attend(query, step, self._layer)

        self.calls += 1
        embedded = self.network.embed(torch.tensor(tokens, dtype=torch.int64, device=hidden.device))
        if self._shortlist is None or not asked:
            return self.network(hidden, embedded, step.positions[step.base :], attend)  # type: ignore[no-any-return]
        began = perf_counter()
        parents, following = hidden[-len(asked) :], embedded[-len(asked) :]
        above = next(reversed(self._routed.values()), None)
        route = partial(self._shortlist.route, parents, following, list(asked.values()), above)
        routed = self.overlap.start(route, parents, following)
        self._used.seconds += perf_counter() - began
        out: torch.Tensor = self.network(hidden, embedded, step.positions[step.base :], attend)
        began = perf_counter()
        self._routed.update(dict.fromkeys(asked, routed()))
        self._used.seconds += perf_counter() - began
        return out

    def _law(self, nodes: Sequence[int], temperature: float) -> Laws:
        """Of the last nodes that were run."""
        if len(nodes) > 1 and nodes[0] == 0 and self._shortlist is not None:  # routed in two passes
            return Laws(torch.cat([self._score(part, temperature).dense() for part in (nodes[:1], nodes[1:])]))
        return self._score(nodes, temperature)

    def _score(self, nodes: Sequence[int], temperature: float) -> Laws:
        began, network = perf_counter(), self.network
        places = [self._place[node] for node in nodes]
        feature = self._feature[places] if self._native is not None else network.feature(self._out[places])
        if self._shortlist is None:
            logits = self._native.logits(feature) if self._native is not None else network.score(feature)
            tokens = network.tokens if network.config.own_head else None
            self._used.tokens += logits.shape[-1]
        else:
            routed = self._routed[nodes[-1]]
            logits, tokens = self._shortlist.score(feature, routed)
        law = law_of(logits, temperature)
        self._used.calls += 1
        self._used.seconds += perf_counter() - began
        return Laws(law, tokens, self.target.vocab_size)  # type: ignore[arg-type]


def _largest(logits: torch.Tensor, count: int) -> list[int]:
    """The tokens with the `count` largest of `[vocab]` logits, the largest first. On a CPU only what is near the peak is sorted."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        numbers = logits.numpy()
        for gap in GAPS:
            near = (numbers > numbers.max() - gap).nonzero()[0]
            if count <= len(near) <= MANY:
                order = (-numbers[near]).argsort(kind="stable")[:count]
                tokens: list[int] = near[order].tolist()
                return tokens
    found: list[int] = logits.topk(min(count, len(logits))).indices.tolist()
    return found
