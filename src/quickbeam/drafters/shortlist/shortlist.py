"""What a drafter's head scores in one call.

This is the frequent block, clusters that a router chose, and tokens of the context.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from quickbeam.drafters.folder import UNREADABLE, write_folder
from quickbeam.drafters.shortlist.layout import Layout, Scores, require_distinct
from quickbeam.drafters.shortlist.native import NativeHead, NativeRows, Prepared, rows_format
from quickbeam.drafters.shortlist.router import NativeRouter, Router, RouterConfig
from quickbeam.drafters.shortlist.torch_head import TorchHead
from quickbeam.errors import InvalidInput
from quickbeam.models.base import inference
from quickbeam.models.native.library import Kernels

TENSORS = "shortlist.safetensors"
FIELDS = "shortlist.json"
PREFIX = "router."
WINDOW = 3072
# A full window drops one token in `SPARE` at once, and is then rebuilt only after that many.
SPARE = 4
NO_BLOCKS = np.empty(0, np.int64)


class ContextTokens:
    """Tokens that are in the context or that the target's last logits make likely (NanoSpec).

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
        self.window = window
        self.rows = rows
        self.version = 0
        self._skip = skip
        # by token: its index in `tokens`; the least recently seen token first
        self._index: dict[int, int] = {}
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)

    @inference
    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens, the newest last."""
        recent = [token for token in dict.fromkeys(reversed(tokens)) if token not in self._skip]
        recent = recent[: self.window][::-1]
        for token in recent:
            self._index[token] = self._index.pop(token, -1)
        if len(self._index) > self.window:
            self._drop(max(len(recent), self.window - self.window // SPARE))
        self._append([token for token in recent if self._index[token] < 0])

    def _drop(self, count: int) -> None:
        """Drop all but the `count` most recently seen tokens, and close the gaps in `tokens`."""
        for token in list(self._index)[:-count]:
            del self._index[token]
        kept = sorted((index, token) for token, index in self._index.items() if index >= 0)
        self.tokens = self.tokens[:0]
        self._append([token for _, token in kept])

    def _append(self, tokens: list[int]) -> None:
        if not tokens:
            return
        first = len(self.tokens)
        ids = torch.tensor(tokens, device=self.tokens.device)
        self.tokens = torch.cat([self.tokens, ids])
        self.version += 1
        for index, token in enumerate(tokens, first):
            self._index[token] = index
        if self.rows is not None:
            self.rows.write(first, ids)


class Shortlist:
    """What a drafter's head scores. All sequences share it; `begin` returns what one of them adds.

    - `weight`: `[vocab, d]`, the drafter's head in the order of token ids.
    - `layout`: the frequent block and the clusters. With `Layout.nothing` and no router only the
      context is scored, which must then hold a token.
    - `kernels`: score a bfloat16 head on a CPU, from a copy in 8 bits (`rows_format`). None:
      PyTorch does (`torch_head.py`).
    - `router`: chooses the `chosen` clusters of a call. Without one no cluster is scored.
    - `window`: the most tokens of the context that are scored; None: none are.

    A drafter runs `route`, the router, in each call, and gives its scores to `choose`. Then
    `ShortlistState.score` computes logits. A pass in PyTorch does the same for all of its sequences
    (`TorchPasses`). Nothing here looks at what is drawn later, so the shortlist is known before any
    token is drawn from it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        layout: Layout,
        kernels: Kernels | None,
        *,
        router: Router | None = None,
        chosen: int = 0,
        window: int | None = None,
    ) -> None:
        self.layout = layout
        self.chosen = min(chosen, layout.clusters)
        self.weight = weight.detach()
        self.window = window
        self._kernels = kernels if _fits_kernels(weight) else None
        self.native: NativeHead | None = None
        self.in_torch: TorchHead | None = None
        self.route: Router | NativeRouter | None = None
        if self._kernels is not None:
            self._format = rows_format(weight)
            self.native = NativeHead(self.weight, layout, self._kernels, self._format)
            if router is not None:
                self.route = NativeRouter(router, self._kernels)
        else:
            self.in_torch = TorchHead(self.weight, layout)
            if router is not None:
                self.route = copy.deepcopy(router).to(weight.device, weight.dtype)
        self.none = torch.empty(0, dtype=torch.int64, device=weight.device)
        # the frequent tokens alone, for several sequences
        alone = router is None and layout.frequent > 0
        self.common = ShortlistState(self, None) if alone else None
        # entries behind those of the clusters, for absent and for frequent tokens, so that ABSENT
        # (-2) and FREQUENT (-1) are valid indices, too
        inside = layout.cluster_of[layout.order[layout.frequent :]]
        self._sizes = torch.bincount(inside, minlength=layout.clusters + 2)
        self._frequent = frozenset(layout.order[: layout.frequent].tolist())

    def begin(self, ids: Sequence[int]) -> ShortlistState:
        """Return the state of a sequence whose context is these `ids`, the newest last."""
        if self.window is None:
            return ShortlistState(self, None)
        rows = None
        if self._kernels is not None:
            rows = NativeRows(self.weight, self._kernels, self._format)
        context = ContextTokens(self.window, self._frequent, rows, self.weight.device)
        state = ShortlistState(self, context)
        state.extend(ids)
        return state

    def choose(self, scores: torch.Tensor, owned: torch.Tensor | None = None) -> torch.Tensor:
        """Return the clusters of each sequence, `[S, k]` ascending.

        `scores`: the router's, `[n, clusters]`. `owned`: which of the n nodes are a sequence's,
        `[S, n]`, 1 or 0; None: all are of one sequence.

        Each cluster is worth the sum of its probabilities (softmax over the clusters) in all nodes
        of a sequence's call: that many of them are expected to need it. The best `chosen` are
        scored; a score that is NaN has probability 0. So a call with few nodes has more room for
        each. DynaSpec (2510.13847, §4.2) decays the number with a node's depth; no formula is
        published.
        """
        if owned is None:
            owned = scores.new_ones(1, len(scores))
        probs = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).softmax(-1)
        worth = owned @ probs.nan_to_num(0.0)
        return worth.topk(self.chosen).indices.sort().values

    def prepare(self, clusters: torch.Tensor, context: torch.Tensor) -> tuple[Prepared, int]:
        """Return what calls on these clusters share, and how many distinct tokens they score.

        `clusters`: `[k]`. `context`: `[m]`, the context's tokens. Raises `ValueError` where there
        is nothing to score.
        """
        require_tokens(self.layout.frequent + len(clusters) + len(context))
        if self.in_torch is not None:
            (tokens,) = self.in_torch.columns(clusters[None], context[None])
            return Prepared(NO_BLOCKS, tokens, None), int((tokens >= 0).sum())
        assert self.native is not None
        count = self.layout.frequent + len(context)
        # the context's tokens that a cluster holds, too; it holds no frequent token
        repeated = torch.zeros(len(context), dtype=torch.bool)
        if len(clusters):
            is_scored = torch.zeros(len(self._sizes), dtype=torch.bool)
            is_scored[clusters] = True
            repeated = is_scored[self.layout.cluster_of[context]]
            count += int(self._sizes[clusters].sum()) - int(repeated.sum())
        prepared = self.native.prepare(clusters) if len(clusters) else self.native.only_frequent
        if len(context):
            bias = torch.zeros(len(context)).masked_fill_(repeated, -torch.inf)
            prepared = Prepared(prepared.blocks, torch.cat([prepared.tokens, context]), bias)
        return prepared, count

    def score(self, feature: torch.Tensor, prepared: Prepared, rows: NativeRows | None) -> Scores:
        """Return the logits of what was prepared.

        `feature`: `[n, d]`, what the head reads of the nodes. `rows`: where the native kernels keep
        the context's rows, if there is a context.
        """
        tokens = prepared.tokens
        if self.native is not None:
            return Scores(self.native.score(feature, prepared, rows), tokens)
        assert self.in_torch is not None
        sequence = tokens.new_zeros(len(feature))
        logits = self.in_torch.logits(feature, tokens[None], sequence)
        return Scores(logits, tokens.clamp(min=0))


class ShortlistState:
    """What one sequence adds to a `Shortlist`.

    - `context`: the tokens of its context, or None.
    - `scored`: how many distinct tokens were scored, summed over all calls of `score`.
    """

    def __init__(self, shared: Shortlist, context: ContextTokens | None) -> None:
        self.shared = shared
        self.context = context
        self.scored = 0
        # of the last call: its clusters, the context's version, what was prepared, and how many
        # tokens that scores
        self._clusters: torch.Tensor | None = None
        self._version = 0
        self._prepared: Prepared | None = None
        self._count = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens of the context. Those that the drafter's vocabulary lacks are left out."""
        if self.context is not None:
            vocab = self.shared.layout.vocab
            self.context.extend([token for token in tokens if token < vocab])

    @property
    def context_tokens(self) -> torch.Tensor:
        """The tokens of its context, `[m]`."""
        return self.shared.none if self.context is None else self.context.tokens

    @inference
    def score(self, feature: torch.Tensor, clusters: torch.Tensor) -> Scores:
        """Return the logits of all nodes of a call for the whole shortlist.

        `feature`: `[n, d]`, what the head reads of the nodes. Raises `ValueError` where there is
        nothing to score. Calls that score the same part of the vocabulary prepare it once.
        """
        prepared = self._prepare(clusters)
        self.scored += self._count
        rows = None if self.context is None else self.context.rows
        return self.shared.score(feature, prepared, rows)

    def _prepare(self, clusters: torch.Tensor) -> Prepared:
        version = 0 if self.context is None else self.context.version
        is_same = self._clusters is clusters and self._version == version
        if self._prepared is None or not is_same:
            self._prepared, self._count = self.shared.prepare(clusters, self.context_tokens)
            self._clusters = clusters
            self._version = version
        return self._prepared


def require_tokens(count: int) -> None:
    """Raise `ValueError` where a shortlist has nothing to score: `count` tokens and clusters."""
    if not count:
        raise ValueError("the shortlist holds no token: begin it with a prompt")


def _fits_kernels(weight: torch.Tensor) -> bool:
    """Whether the native kernels can multiply with this head."""
    plain = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    return plain and weight.shape[1] % 2 == 0


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
        layout = self.layout
        ranked = len(self.ranking)
        require_distinct(self.ranking, layout.vocab, "the ranking")
        routed = layout.clusters if self.router is None else self.router.config.clusters
        if ranked != layout.vocab or routed != layout.clusters:
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
            for name, tensor in self.router.state_dict().items():
                tensors[PREFIX + name] = tensor
        record = {
            "frequent": self.layout.frequent,
            "size": self.layout.size,
            "vocab": self.layout.vocab,
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
            layout = Layout(
                tensors["order"].long(),
                frequent=int(record["frequent"]),
                size=int(record["size"]),
                vocab=int(record["vocab"]),
            )
            if record["router"] is not None:
                with torch.device("meta"):  # makes no random weights that would be thrown away
                    router = Router(RouterConfig(**record["router"]))
                state = {name: tensors[PREFIX + name].float() for name in router.state_dict()}
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
