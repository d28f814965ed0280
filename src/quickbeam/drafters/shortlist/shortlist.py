"""What a drafter's head scores in one call.

This is the frequent block, clusters that a router chose, and tokens of the context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from quickbeam.drafters.shortlist.context import ContextTokens
from quickbeam.drafters.shortlist.head import BlockHead, native_fits
from quickbeam.drafters.shortlist.layout import FREQUENT, Layout, Scores
from quickbeam.drafters.shortlist.native import NativeBlocks, NativeRouter, NativeRows, Prepared
from quickbeam.drafters.shortlist.router import Router
from quickbeam.errors import InvalidInput
from quickbeam.models.base import inference
from quickbeam.models.native.library import kernels


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

    The interface is small. A drafter asks `routes` whether a call needs the router, runs `router`
    or `native_router` and gives its scores to `choose` for the call's clusters, an int64 tensor
    `[k]`, and then asks `ShortlistState.score` for the logits of what its layer gives. Routing is
    deterministic and looks at nothing that is drawn later, so the shortlist is known before any
    token is drawn from it. The caller's distributions are softmaxes over the columns.

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
        _check(layout, router, chosen, context)
        self.layout, self.make_context, self.deepest = layout, context, deepest
        self.chosen = min(chosen, layout.clusters)
        self.head = BlockHead(weight, layout, most=self.chosen, backend=backend)
        self.router = self.native_router = None
        if router is not None:
            self.router = copy.deepcopy(router).to(weight.device, weight.dtype)
            if native_fits(weight) and (library := kernels()) is not None:
                self.native_router = NativeRouter(router, library)
        self._none = torch.empty(0, dtype=torch.int64, device=weight.device)
        # `_sizes` has an entry for each cluster and two more at the end, for absent and for
        # frequent tokens. So ABSENT (-2) and FREQUENT (-1) are valid indices, too.
        self._cluster_of = layout.cluster_of.to(weight.device)
        self._sizes = torch.bincount(
            layout.cluster_of[layout.order[layout.frequent :]], minlength=layout.clusters + 2
        ).to(weight.device)
        self._sizes[FREQUENT] = layout.frequent

    def begin(self, ids: Sequence[int]) -> ShortlistState:
        """Return the state of a sequence that begins with the prompt `ids`."""
        return ShortlistState(self, ids)

    def routes(self, depths: Sequence[int], above: torch.Tensor | None = None) -> bool:
        """Whether a call on nodes of these depths asks the router.

        `above`: the clusters of the tree's last call. If all nodes of this call are below
        `deepest`, it keeps them.
        """
        return self.router is not None and (above is None or min(depths) <= self.deepest)

    def kept(self, above: torch.Tensor | None) -> torch.Tensor:
        """Return the clusters of a call that does not ask the router."""
        return self._none if above is None else above

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the clusters of a call, `[k]` ascending, from the router's scores `[n, clusters]`.

        Each cluster is worth the sum of its probabilities (softmax over the clusters) in all nodes
        of the call: that many of them are expected to need it. The best `chosen` are scored; among
        equals the first win, and a score that is NaN has probability 0. So a node that needs one
        cluster for certain leaves room to one that needs many, and a call with few nodes has more
        room for each. DynaSpec (2510.13847, §4.2) decays the number with a node's depth instead;
        its formula is not published in what we could read.
        """
        probs = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).softmax(-1)
        worth = probs.nan_to_num(0.0).sum(0)
        return worth.argsort(descending=True, stable=True)[: self.chosen].sort().values

    def count(
        self, clusters: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return how many distinct tokens are scored, and which of `tokens` are repeats.

        `tokens`: the context's. The second is `[m]` bool: whether the block head scores the token,
        too. It is `None` where `tokens` is. Both stay on the head's device.
        """
        scored = torch.zeros_like(self._sizes, dtype=torch.bool)
        scored[FREQUENT] = True  # padding of -1 marks the frequent block, too
        scored[clusters] = True
        total = (self._sizes * scored).sum()
        if tokens is None:
            return total, None
        repeated = scored[self._cluster_of[tokens]]
        return total + len(tokens) - repeated.sum(), repeated

    def frequent(self, token: int) -> bool:
        """Whether this token is in the frequent block, which is always scored."""
        return int(self.layout.cluster_of[token]) == FREQUENT

    def holds(self, token: int, clusters: torch.Tensor) -> bool:
        """Whether the block head scores this token."""
        return self.frequent(token) or bool((clusters == self._cluster_of[token]).any())


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
        self._last: tuple[torch.Tensor, int, Prepared, int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens for the context.

        They are tokens that became committed, that other sources proposed, or that the target's
        last logits make likely.
        """
        if self.context is not None:
            self.context.extend(tokens)

    @inference
    def score(self, feature: torch.Tensor, clusters: torch.Tensor) -> Scores:
        """Return the logits of all nodes of a call for the whole shortlist.

        `feature`: `[n, d]`, what the head reads of the nodes. If the block head scores a token of
        the context too, its context column is -inf. Raises `ValueError` where there is nothing to
        score.
        """
        head = self.shared.head
        if isinstance(head.run, NativeBlocks):
            return self._score_native(head.run, feature, clusters)
        logits, tokens = head(feature, clusters)
        size, repeated = self.shared.count(clusters, self._tokens)
        if self.context is not None and repeated is not None:
            beside = self.context.logits(feature).masked_fill_(repeated, -torch.inf)
            logits = torch.cat([logits, beside], -1)
            tokens = torch.cat([tokens, self.context.tokens])
        if not logits.shape[1]:
            raise ValueError("the shortlist holds no token: begin it with a prompt")
        self._scored = self._scored + size
        return Scores(logits, tokens)

    def _score_native(
        self, blocks: NativeBlocks, feature: torch.Tensor, clusters: torch.Tensor
    ) -> Scores:
        """Score everything in one call of the kernels.

        Calls of a tree that score the same part of the vocabulary prepare it once.
        """
        context = self.context
        version = 0 if context is None else context.version
        if self._last is None or self._last[0] is not clusters or self._last[1] != version:
            size, repeated = self.shared.count(clusters, self._tokens)
            prepared = blocks.prepare(clusters)
            if context is not None and repeated is not None:
                bias = torch.zeros(len(repeated)).masked_fill_(repeated, -torch.inf)
                tokens = torch.cat([prepared.tokens, context.tokens])
                prepared = Prepared(prepared.blocks, tokens, bias)
            self._last = (clusters, version, prepared, int(size))
        prepared, scored = self._last[2:]
        if not len(prepared.tokens):
            raise ValueError("the shortlist holds no token: begin it with a prompt")
        self._scored = self._scored + scored
        rows = None if context is None else context.rows
        beside = rows if isinstance(rows, NativeRows) else None
        return Scores(blocks.score(feature, prepared, beside), prepared.tokens)

    @property
    def _tokens(self) -> torch.Tensor | None:
        return None if self.context is None or not len(self.context) else self.context.tokens

    def holds(self, token: int, clusters: torch.Tensor) -> bool:
        """Whether `score` gives this token a column that counts, with the context as it is now."""
        return self.shared.holds(token, clusters) or (
            self.context is not None and token in self.context
        )

    def always(self, token: int) -> bool:
        """Whether this token is scored whatever the router says.

        This is so for frequent tokens, and for tokens that are in the context as it is now.
        """
        return self.shared.frequent(token) or (self.context is not None and token in self.context)

    @inference
    def size(self, clusters: torch.Tensor) -> int:
        """Return how many distinct tokens `score` would score, with the context as it is now."""
        return int(self.shared.count(clusters, self._tokens)[0])

    @property
    def scored(self) -> int:
        """How many tokens were scored, summed over all calls of `score`.

        Only columns that count are counted, without padding and repeats. Off the CPU this waits for
        the device.
        """
        return int(self._scored)


def _check(
    layout: Layout, router: Router | None, chosen: int, context: Callable[[], ContextTokens] | None
) -> None:
    if (router is None) != (chosen == 0):
        raise InvalidInput(
            "a router and the number of clusters that it chooses go together: give both or none"
        )
    if chosen < 0:
        raise InvalidInput(f"a shortlist of {chosen} clusters a call: must be at least 1")
    if router is not None and router.config.clusters != layout.clusters:
        raise InvalidInput(
            f"the router scores {router.config.clusters} clusters, the layout has {layout.clusters}"
        )
    if router is None and context is None and not layout.frequent:
        raise InvalidInput(
            "this shortlist is empty: it needs frequent tokens, a router or the context"
        )
