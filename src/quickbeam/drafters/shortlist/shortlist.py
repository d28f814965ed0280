"""What a drafter's head scores in one call.

This is the frequent block, clusters that a router chose, and tokens of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quickbeam.drafters.shortlist.context import ContextTokens
from quickbeam.drafters.shortlist.head import BlockHead, Scores, native_fits
from quickbeam.drafters.shortlist.layout import FREQUENT, Layout
from quickbeam.drafters.shortlist.native import NativeBlocks, NativeRouter, NativeRows, Prepared
from quickbeam.drafters.shortlist.router import FastRouter, Router
from quickbeam.errors import InvalidInput
from quickbeam.models.inference import inference
from quickbeam.models.native.library import kernels


class Routed(NamedTuple):
    """The clusters that a call scores: `[k]` int64 on the head's device, ascending, no repeats."""

    clusters: torch.Tensor


class Shortlist:
    """What a drafter's head scores.

    It consists of any of the frequent block, clusters chosen by a router, and tokens of the
    context. All sequences share it; `begin` returns what belongs to one of them.

    - `weight`: `[vocab, d]`, the drafter's head in the order of token ids.
    - `layout`: the frequent block and the clusters. With `Layout.nothing` and no router only the
      context is scored, which must then hold a token.
    - `router`: chooses the clusters of a call. Without one no cluster is scored.
    - `chosen`: how many clusters a call scores.
    - `deepest`: if all nodes of a call are deeper in the tree than this, the router is not asked,
      and the call scores what the call before it did. With 0, it is asked for the root alone.
    - `context`: makes a sequence's `ContextTokens`, empty at first.
    - `backend`: see `BlockHead`.

    A call consists of `route` for what goes into the drafter's layer, then `ShortlistState.score`
    for what comes out of it. Routing is deterministic and looks at nothing that is drawn later, so
    the shortlist is known before any token is drawn from it. The caller's distributions are
    softmaxes over the columns.

    Raises `InvalidInput` where the parts don't fit one another.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        layout: Layout,
        *,
        router: Router | None = None,
        chosen: int = 0,
        deepest: int = 0,
        context: Callable[[], ContextTokens] | None = None,
        backend: str | None = None,
    ) -> None:
        if (router is None) != (chosen == 0):
            raise InvalidInput(
                "a router and the number of clusters that it chooses go together: give both or none"
            )
        if chosen < 0:
            raise InvalidInput(f"a shortlist of {chosen} clusters a call: must be at least 1")
        if router is not None and router.config.clusters != layout.clusters:
            raise InvalidInput(
                f"the router scores {router.config.clusters} clusters, the layout "
                f"has {layout.clusters}"
            )
        if router is None and context is None and not layout.frequent:
            raise InvalidInput(
                "this shortlist is empty: it needs frequent tokens, a router or the context"
            )
        self.layout, self.make_context, self.deepest = layout, context, deepest
        self.chosen = min(chosen, layout.clusters)
        self.head = BlockHead(weight, layout, most=self.chosen, backend=backend)
        self.device = weight.device
        self._router = None if router is None else FastRouter(router, weight.dtype, weight.device)
        # the same router for the native kernels, where they are used
        self.native_router: NativeRouter | None = None
        if router is not None and native_fits(weight) and (found := kernels()) is not None:
            self.native_router = NativeRouter(router, found)
        self._nowhere = Routed(torch.empty(0, dtype=torch.int64, device=self.device))
        # `_sizes` and `_always` have an entry for each cluster and two more at the end, for absent
        # and for frequent tokens. So ABSENT (-2) and FREQUENT (-1) are valid indices, too.
        self._cluster_of = layout.cluster_of.to(self.device)
        # the same on the CPU for single tokens: indexing a tensor would find cold caches
        self._places = layout.cluster_of.cpu().numpy().data
        self._sizes = torch.bincount(
            layout.cluster_of[layout.order[layout.frequent :]], minlength=layout.clusters + 2
        ).to(self.device)
        self._sizes[FREQUENT] = layout.frequent
        self._always = torch.zeros(layout.clusters + 2, dtype=torch.bool, device=self.device)
        self._always[FREQUENT] = True

    def begin(self, ids: Sequence[int]) -> ShortlistState:
        """Return the state of a sequence that begins with the prompt `ids`."""
        return ShortlistState(self, ids)

    @inference
    def route(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        depths: Sequence[int],
        above: Routed | None = None,
    ) -> Routed:
        """Choose the clusters of one call on nodes of these `depths`.

        `hidden`: hidden states `[n, dh]`. `embedded`: embeddings `[n, de]`. `above`: what the
        tree's last call scored. If all nodes of this call are below `deepest`, the call scores that
        again.

        Each cluster is worth the sum of its probabilities (softmax over the clusters) in all nodes
        of the call: that many of them are expected to want it. The best `chosen` are scored. So a
        node that wants one cluster for certain leaves room to one that wants many, and a call with
        few nodes has more room for each. DynaSpec (2510.13847, §4.2) decays the number with a
        node's depth instead; its formula is not published in what we could read.
        """
        if self._router is None or not self.routes(depths, above):
            return self.kept(above)
        return self.choose(self._router(hidden, embedded))

    def routes(self, depths: Sequence[int], above: Routed | None = None) -> bool:
        """Whether a call on nodes of these depths asks the router (see `route`)."""
        return self._router is not None and (above is None or min(depths) <= self.deepest)

    def kept(self, above: Routed | None) -> Routed:
        """Return what a call scores that does not ask the router."""
        return above or self._nowhere

    def choose(self, logits: torch.Tensor) -> Routed:
        """Return the clusters of `route`, from the router's scores `[n, clusters]`."""
        if logits.device.type == "cpu":
            return Routed(torch.from_numpy(best_on_cpu(logits.numpy(), self.chosen)))
        return Routed(best(logits, self.chosen))

    def _chosen(self, routed: Routed) -> torch.Tensor:
        """Return `[clusters + 2]` bool: which parts of the layout are scored.

        Padding of -1 marks the frequent block, which is always scored, though it may be empty.
        """
        chosen = self._always.clone()
        chosen[routed.clusters] = True
        return chosen

    def found(
        self, routed: Routed, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor | int, torch.Tensor | None]:
        """Return how many distinct tokens are scored, and which of `tokens` are repeats.

        `tokens`: the context's. The second is `[m]` bool: whether the block head scores the token,
        too. It is `None` where `tokens` is. Off the CPU, the count is a tensor on the device.
        """
        if self.device.type == "cpu":  # in numpy, for the reason given at `best_on_cpu`
            chosen = self._always.numpy().copy()
            chosen[routed.clusters.numpy()] = True
            size = int(self._sizes.numpy()[chosen].sum())
            if tokens is None:
                return size, None
            repeated = chosen[self._cluster_of.numpy()[tokens.numpy()]]
            return size + len(repeated) - int(np.count_nonzero(repeated)), torch.from_numpy(
                repeated
            )
        flags = self._chosen(routed)
        total = (self._sizes * flags).sum()
        if tokens is None:
            return total, None
        again = flags[self._cluster_of[tokens]]
        return total + len(again) - again.sum(), again

    def frequent(self, token: int) -> bool:
        """Whether this token is in the frequent block, which is always scored."""
        return bool(self._places[token] == FREQUENT)

    def holds(self, token: int, routed: Routed) -> bool:
        """Whether the block head scores this token."""
        if self.device.type == "cpu":  # without tensor operations, which would find cold caches
            cluster = self._places[token]
            return cluster == FREQUENT or cluster in routed.clusters.tolist()
        return bool(self._chosen(routed)[self._cluster_of[token]])


class ShortlistState:
    """What one sequence adds to a `Shortlist`.

    It holds the tokens of the sequence's context, and counts how much was scored for it.
    """

    def __init__(self, shared: Shortlist, ids: Sequence[int]) -> None:
        self.shared = shared
        self.context = None if shared.make_context is None else shared.make_context()
        if self.context is not None:
            self.context.reset(ids)
        self._scored: torch.Tensor | int = 0
        # what the native kernels scored last: the clusters, the version of the context, what was
        # prepared for them, and how many tokens that scores
        self._ready: tuple[Routed, int, Prepared, int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens for the context.

        They are tokens that became committed, that other sources proposed, or that the target's
        last logits make likely.
        """
        if self.context is not None:
            self.context.extend(tokens)

    @inference
    def score(self, feature: torch.Tensor, routed: Routed) -> Scores:
        """Return the logits of all nodes of a call for the whole shortlist.

        `feature`: `[n, d]`, what the head reads of the nodes. If the block head scores a token of
        the context too, its context column is -inf. Raises `ValueError` where there is nothing to
        score.
        """
        head = self.shared.head
        if isinstance(head.run, NativeBlocks):
            return self._score_native(head.run, feature, routed)
        logits, tokens = head(feature, routed.clusters)
        size, repeated = self.shared.found(routed, self._tokens)
        if self.context is not None and repeated is not None:
            beside = self.context.logits(feature).masked_fill_(repeated, -torch.inf)
            logits, tokens = (
                torch.cat([logits, beside], -1),
                torch.cat([tokens, self.context.tokens]),
            )
        if not logits.shape[1]:
            raise ValueError("the shortlist holds no token: begin it with a prompt")
        self._scored = self._scored + size
        return Scores(logits, tokens)

    def _score_native(self, blocks: NativeBlocks, feature: torch.Tensor, routed: Routed) -> Scores:
        """Score everything in one call of the kernels.

        Calls of a tree that score the same part of the vocabulary prepare it once.
        """
        context = self.context
        version = 0 if context is None else context.version
        if self._ready is None or self._ready[0] is not routed or self._ready[1] != version:
            size, repeated = self.shared.found(routed, self._tokens)
            found, tokens = blocks.find(routed.clusters)
            bias = None
            if context is not None and repeated is not None:
                found_twice = np.where(repeated.numpy(), -np.inf, 0.0)
                bias = torch.from_numpy(found_twice.astype(np.float32))
                tokens = torch.cat([tokens, context.tokens])
            self._ready = (routed, version, Prepared(found, tokens, bias), int(size))
        prepared, size = self._ready[2:]
        if not len(prepared.tokens):
            raise ValueError("the shortlist holds no token: begin it with a prompt")
        self._scored = self._scored + size
        rows = None if context is None else context.rows
        return Scores(
            blocks.score(feature, prepared, rows if isinstance(rows, NativeRows) else None),
            prepared.tokens,
        )

    @property
    def _tokens(self) -> torch.Tensor | None:
        return None if self.context is None or not len(self.context) else self.context.tokens

    def holds(self, token: int, routed: Routed) -> bool:
        """Whether `score` gives this token a column that counts, with the context as it is now."""
        return self.shared.holds(token, routed) or (
            self.context is not None and token in self.context
        )

    def always(self, token: int) -> bool:
        """Whether this token is scored whatever the router says.

        This is so for frequent tokens, and for tokens that are in the context as it is now.
        """
        return self.shared.frequent(token) or (self.context is not None and token in self.context)

    @inference
    def size(self, routed: Routed) -> int:
        """Return how many distinct tokens `score` would score, with the context as it is now."""
        return int(self.shared.found(routed, self._tokens)[0])

    @property
    def scored(self) -> int:
        """How many tokens were scored, summed over all calls of `score`.

        Only columns that count are counted, without padding and repeats. Off the CPU this waits for
        the device.
        """
        return int(self._scored)


def best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` clusters that the rows want most, `[count]` int64, ascending.

    `logits`: `[n, clusters]`. What they want is the sum of each row's probabilities. Among equals
    the first win. A score that is NaN has probability 0.
    """
    probs = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).softmax(-1)
    wanted = probs.nan_to_num(0.0).sum(0)
    return wanted.argsort(descending=True, stable=True)[:count].sort().values


def best_on_cpu(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Return what `best` returns, without sorting all clusters, which would take longer.

    It is mostly in numpy, whose small operations cost a fifth of torch's.
    """
    clusters = logits.shape[1]
    if count >= clusters:
        return np.arange(clusters)
    wanted = torch.from_numpy(logits).softmax(-1).sum(0).numpy()
    if not wanted[0] < np.inf:  # some row has bad scores, so all sums are NaN
        return best(torch.from_numpy(logits), count).numpy()
    least = np.partition(wanted, clusters - count)[clusters - count]
    found: npt.NDArray[np.int64] = (wanted >= least).nonzero()[0]
    if len(found) > count:  # of equal ones the first
        above = wanted[found] > least
        kept = above | ((~above).cumsum() <= count - np.count_nonzero(above))
        found = found[kept]
    return found
