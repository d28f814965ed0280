"""What a drafter's head scores in one call.

This is the frequent block, clusters that a router chose, and tokens of the context.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from quickbeam.drafters.folder import UNREADABLE, write_folder
from quickbeam.drafters.shortlist.layout import Layout, Scores, require_distinct
from quickbeam.drafters.shortlist.native import (
    NativeHead,
    NativeRouter,
    NativeRows,
    Prepared,
    Router,
    RouterConfig,
    rows_format,
)
from quickbeam.errors import InvalidInput
from quickbeam.models.base import inference
from quickbeam.models.native.library import Kernels, kernels

if TYPE_CHECKING:
    from quickbeam.drafters.shortlist.fused import FusedHead

TENSORS, FIELDS = "shortlist.safetensors", "shortlist.json"
PREFIX = "router."
WINDOW = 3072
# A full window drops one token in `SPARE` at once, and is then rebuilt only after that many.
SPARE = 4


class ContextTokens:
    """Tokens that are in the context or that other sources proposed (NanoSpec).

    - `window`: the most distinct tokens that are kept. If more come, the quarter of the window that
      was seen least recently is dropped. Tokens to `skip` are never kept.
    - `rows`: where the native kernels keep these tokens' rows of the head, in the same order.
    - `tokens`: `[m]` int64, distinct, `m <= window`. `version`: changes whenever they do.
    """

    def __init__(
        self,
        window: int = WINDOW,
        skip: Collection[int] = (),
        rows: NativeRows | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.window, self.rows, self.version, self._skip = window, rows, 0, skip
        # by token: its place in `tokens`; the least recently seen token first
        self._place: dict[int, int] = {}
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)

    @inference
    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens, the newest last."""
        recent = [token for token in dict.fromkeys(reversed(tokens)) if token not in self._skip]
        recent = recent[: self.window][::-1]
        for token in recent:
            self._place[token] = self._place.pop(token, -1)
        if len(self._place) > self.window:
            self._drop(max(len(recent), self.window - self.window // SPARE))
        self._append([token for token in recent if self._place[token] < 0])

    def _drop(self, keep: int) -> None:
        """Drop all but the `keep` most recently seen tokens, and move the others to the front."""
        for token in list(self._place)[:-keep]:
            del self._place[token]
        kept = sorted((place, token) for token, place in self._place.items() if place >= 0)
        self.tokens = self.tokens[:0]
        self._append([token for _, token in kept])

    def _append(self, tokens: list[int]) -> None:
        if not tokens:
            return
        first, ids = len(self.tokens), torch.tensor(tokens, device=self.tokens.device)
        self.tokens, self.version = torch.cat([self.tokens, ids]), self.version + 1
        self._place.update(zip(tokens, range(first, len(self.tokens)), strict=True))
        if self.rows is not None:
            self.rows.write(first, ids)


class Shortlist:
    """What a drafter's head scores. All sequences share it; `begin` returns what one of them adds.

    - `weight`: `[vocab, d]`, the drafter's head in the order of token ids. bfloat16 on a CPU is
      scored by the native kernels where they run, from a copy in 8 bits (`rows_format`). On CUDA
      one Triton kernel scores all blocks where Triton is installed (`fused.py`).
    - `layout`: the frequent block and the clusters. With `Layout.nothing` and no router only the
      context is scored, which must then hold a token.
    - `router`: chooses the `chosen` clusters of a call. Without one no cluster is scored.
    - `window`: the most tokens of the context that are scored; None: none are.

    A drafter runs `route`, the router, in each call, gives its scores to `choose`, and has
    `ShortlistState.score` compute logits. Nothing here looks at what is drawn later, so the
    shortlist is known before any token is drawn from it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        layout: Layout,
        *,
        router: Router | None = None,
        chosen: int = 0,
        window: int | None = None,
    ) -> None:
        self.layout, self._window = layout, window
        self.chosen, self.weight = min(chosen, layout.clusters), weight.detach()
        self.route: Router | NativeRouter | None = None
        self.native = None
        self._kernels = head_kernels(weight)
        if self._kernels is not None:
            self._format = rows_format(weight)
            self.native = NativeHead(self.weight, layout, self._kernels, self._format)
        self.fused = (
            None if self.native is not None else _fused_for(self.weight, layout, self.chosen)
        )
        if router is not None and self._kernels is not None:
            self.route = NativeRouter(router, self._kernels)
        elif router is not None:
            self.route = copy.deepcopy(router).to(weight.device, weight.dtype)
        self.none = torch.empty(0, dtype=torch.int64, device=weight.device)
        # the frequent tokens alone, for several sequences
        alone = router is None and layout.frequent > 0
        self.common = ShortlistState(self, None) if alone else None
        # entries behind those of the clusters, for absent and for frequent tokens, so that ABSENT
        # (-2) and FREQUENT (-1) are valid indices, too
        self._cluster_of = layout.cluster_of.to(weight.device)
        inside = layout.cluster_of[layout.order[layout.frequent :]]
        self._sizes = torch.bincount(inside, minlength=layout.clusters + 2)
        self._frequent = frozenset(layout.order[: layout.frequent].tolist())

    def begin(self, ids: Sequence[int]) -> ShortlistState:
        """Return the state of a sequence that begins with the prompt `ids`."""
        if self._window is None:
            return ShortlistState(self, None)
        rows, weight = None, self.weight
        if self._kernels is not None:
            rows = NativeRows(weight, self._kernels, self._format)
        context = ContextTokens(self._window, self._frequent, rows, weight.device)
        context.extend(ids)
        return ShortlistState(self, context)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the clusters of a call, `[k]` ascending, from the router's scores `[n, clusters]`.

        Each cluster is worth the sum of its probabilities (softmax over the clusters) in all nodes
        of the call: that many of them are expected to need it. The best `chosen` are scored; a
        score that is NaN has probability 0. So a call with few nodes has more room for each.
        DynaSpec (2510.13847, §4.2) decays the number with a node's depth; no formula is published.
        """
        probs = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).softmax(-1)
        worth = probs.nan_to_num(0.0).sum(0)
        return worth.topk(self.chosen).indices.sort().values

    def prepare(self, clusters: torch.Tensor, beside: torch.Tensor) -> tuple[Prepared, int]:
        """Return what calls on these clusters share, and how many distinct tokens they score.

        `beside`: `[m]`, the context's tokens. Raises `ValueError` where there is nothing to score.
        """
        count = self.layout.frequent + len(beside)
        repeated = torch.zeros(len(beside), dtype=torch.bool, device=beside.device)
        if len(clusters):  # the context holds no frequent token
            clusters = clusters.cpu()  # where the layout's tables are
            scored = torch.zeros(len(self._sizes), dtype=torch.bool)
            scored[clusters] = True
            repeated = scored.to(beside.device)[self._cluster_of[beside]]
            count += int(self._sizes[clusters].sum()) - int(repeated.sum())
        if not count:
            raise ValueError("the shortlist holds no token: begin it with a prompt")
        if self.fused is not None:
            bias = beside.new_zeros(len(beside), dtype=self.weight.dtype)
            bias.masked_fill_(repeated, -torch.inf)
            return Prepared(np.empty(0, np.int64), beside, bias), count
        if self.native is None:
            tokens = self.layout.scored(clusters).to(beside.device)
            tokens = torch.cat([tokens, beside[~repeated]])
            return Prepared(np.empty(0, np.int64), tokens, None), count
        prepared = self.native.prepare(clusters) if len(clusters) else self.native.listed
        if len(beside):  # rows of repeated tokens lie among the others
            bias = torch.zeros(len(beside)).masked_fill_(repeated, -torch.inf)
            prepared = Prepared(prepared.blocks, torch.cat([prepared.tokens, beside]), bias)
        return prepared, count


class ShortlistState:
    """What one sequence adds to a `Shortlist`.

    - `context`: the tokens of its context, or None.
    - `scored`: how many distinct tokens were scored, summed over all calls of `score`.
    """

    def __init__(self, shared: Shortlist, context: ContextTokens | None) -> None:
        self.shared, self.context, self.scored = shared, context, 0
        # of the last call: clusters, the context's version, what was prepared, how many tokens
        self._last: tuple[torch.Tensor, int, Prepared, int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Read committed tokens, and those that the target's last logits make likely."""
        if self.context is not None:
            self.context.extend(tokens)

    @inference
    def score(self, feature: torch.Tensor, clusters: torch.Tensor) -> Scores:
        """Return the logits of all nodes of a call for the whole shortlist.

        `feature`: `[n, d]`, what the head reads of the nodes. Raises `ValueError` where there is
        nothing to score. Calls that score the same part of the vocabulary prepare it once.
        """
        version = 0 if self.context is None else self.context.version
        if self._last is None or self._last[0] is not clusters or self._last[1] != version:
            beside = self.shared.none if self.context is None else self.context.tokens
            self._last = (clusters, version, *self.shared.prepare(clusters, beside))
        prepared, count = self._last[2:]
        self.scored += count
        if self.shared.fused is not None:
            scores, tokens = self.shared.fused(feature, clusters), prepared.tokens
            if not len(tokens):
                return scores
            beside = F.linear(feature, self.shared.weight[tokens], prepared.bias)
            both = torch.cat([scores.logits, beside], 1), torch.cat([scores.tokens, tokens])
            return Scores(*both)
        if self.shared.native is None:
            return Scores(F.linear(feature, self.shared.weight[prepared.tokens]), prepared.tokens)
        rows = None if self.context is None else self.context.rows
        return Scores(self.shared.native.score(feature, prepared, rows), prepared.tokens)


def _fused_for(weight: torch.Tensor, layout: Layout, most: int) -> FusedHead | None:
    """Return the kernel that copies no rows: on CUDA, or in Triton's interpreter."""
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from quickbeam.drafters.shortlist.fused import FusedHead  # Triton is imported only here

    return FusedHead(weight, layout, most)


def head_kernels(weight: torch.Tensor) -> Kernels | None:
    """Return the native kernels if they can multiply with this head."""
    plain = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    return kernels() if plain and weight.shape[1] % 2 == 0 else None


@dataclass(frozen=True, eq=False)
class Artefact:
    """A trained shortlist, as it is stored in a folder.

    - `layout`: the frequent tokens and the clusters. `router`: over these, or None.
    - `ranking`: `[vocab]` int64, all tokens by falling frequency in the training text.

    Raises `InvalidInput` where the parts don't fit one another.
    """

    layout: Layout
    ranking: torch.Tensor
    router: Router | None = None

    def __post_init__(self) -> None:
        layout, ranked = self.layout, len(self.ranking)
        require_distinct(self.ranking, layout.vocab, "the ranking")
        routed = layout.clusters if self.router is None else self.router.config.clusters
        if (ranked, routed) != (layout.vocab, layout.clusters):
            raise InvalidInput(
                f"a layout of {layout.clusters} clusters and {layout.vocab} tokens, a router of "
                f"{routed} and a ranking of {ranked}: they don't fit together"
            )

    def save(self, folder: Path) -> None:
        """Write `shortlist.safetensors` and `shortlist.json`, each complete or not at all.

        Token ids are stored as int32, the router in bfloat16.
        """
        tensors = {"order": self.layout.order.int(), "ranking": self.ranking.int()}
        if self.router is not None:
            tensors |= {PREFIX + name: one for name, one in self.router.state_dict().items()}
        record = {
            **{name: getattr(self.layout, name) for name in ("frequent", "size", "vocab")},
            "router": None if self.router is None else asdict(self.router.config),
        }
        write_folder(folder, record, tensors, torch.bfloat16, (FIELDS, TENSORS))

    @staticmethod
    def load(folder: Path) -> Artefact:
        """Load what `save` wrote. The router is in float32, on the CPU.

        Raises `InvalidInput` naming what is missing or does not fit.
        """
        router = None
        try:
            record = json.loads((folder / FIELDS).read_text(encoding="utf-8"))
            tensors = load_file(folder / TENSORS)
            sizes = (int(record[name]) for name in ("frequent", "size", "vocab"))
            layout = Layout(tensors["order"].long(), *sizes)
            if record["router"] is not None:
                with torch.device("meta"):  # makes no random weights that would be thrown away
                    router = Router(RouterConfig(**record["router"]))
                state = {k.removeprefix(PREFIX): v.float() for k, v in tensors.items()}
                state = {name: state[name] for name in router.state_dict()}
                router.load_state_dict(state, assign=True)
                router.eval()
            return Artefact(layout, tensors["ranking"].long(), router)
        except UNREADABLE as error:
            raise InvalidInput(
                f"{folder} holds no whole shortlist ({FIELDS}, {TENSORS}): {error!r}"
            ) from error

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether `folder` holds the files of a shortlist, broken or not."""
        return all((folder / name).is_file() for name in (FIELDS, TENSORS))
