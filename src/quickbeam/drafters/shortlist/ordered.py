"""A head whose tokens lie in clusters, of which each row's likeliest are scored (Gemma 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from quickbeam.drafters.native import NativeHead, NativePacker
from quickbeam.drafters.shortlist.layout import Layout, Scores
from quickbeam.drafters.shortlist.native import NativeBlocks
from quickbeam.models.native.library import kernels


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
        found = kernels() if weight.device.type == "cpu" and weight.shape[1] % 2 == 0 else None
        self._rank: Callable[[torch.Tensor], torch.Tensor] = partial(F.linear, weight=centroids)
        self._native = None
        if found is not None and weight.dtype is torch.bfloat16:
            self._native = NativeBlocks(weight, layout, found)
            self._rank = NativeHead(NativePacker(found)(centroids), found)

    def __call__(self, features: Sequence[torch.Tensor]) -> list[Scores]:
        """Return the scores of each call's rows `[n, d]`."""
        return [self._score(one) for one in features]

    def _score(self, rows: torch.Tensor) -> Scores:
        best = self._rank(rows).topk(self._top, -1).indices
        clusters = torch.tensor(sorted({*best.flatten().tolist()}))
        if self._native is not None:
            prepared = self._native.prepare(clusters)
            return Scores(self._native.score(rows, prepared), prepared.tokens)
        tokens = torch.cat([self._layout.tokens(one) for one in clusters.tolist()]).to(rows.device)
        return Scores(F.linear(rows, self._weight[tokens]), tokens)
