"""Makes the shortlist in a drafter's folder: frequent tokens, clusters, and a router over them.

Nothing is decoded. At each place (`places.py`) it is known which token the target finds likeliest,
and whether the context holds it. A way to choose a part of the vocabulary is measured by whether it
would score that token. Ways are compared at the same number of rows of the head, not counting the
context's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from quickbeam import hub
from quickbeam.drafters.eagle_files import load_eagle
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.layouts import BLOCK, is_kind
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.errors import InvalidInput
from quickbeam.models.weights.formats import pick_device
from quickbeam.train.places import Places, collect_places
from quickbeam.train.recipes import HIDDEN_FOLDER, ShortlistPlan
from quickbeam.train.router import CLUSTERINGS, halve, ranking, recall, routed, train_router
from quickbeam.train.shards import Shards, split, token_counts
from quickbeam.train.states import StateCache
from quickbeam.train.target import FrozenTarget, open_target

HELD_PLACES = 20_000  # the most places that the figures are measured on
SHARES = (0.01, 0.02, 0.03, 0.06, 0.125, 0.25)  # of the vocabulary, in reports
FIGURES = "router.json"

Figures = dict[int, tuple[float, float]]
"""By number of rows of the head: the recall of the list, and of list and router."""


class DefaultSizes(NamedTuple):
    """The sizes of a kind of clusters.

    One token in `vocab_per_listed` is always scored, at most `most_listed`. A cluster has
    `cluster_size` tokens, at most a 64th of the vocabulary.
    """

    vocab_per_listed: int
    most_listed: int
    cluster_size: int


DEFAULT_SIZES = {
    "pifa": DefaultSizes(vocab_per_listed=48, most_listed=1024, cluster_size=16),
    "kmeans": DefaultSizes(vocab_per_listed=12, most_listed=2**31, cluster_size=512),
}


class ShortlistTraining:
    """Makes a drafter's shortlist as `plan` says.

    It reads the text in `out`, its drafter, and the target. `model`: None is the built-in default.
    Raises `InvalidInput` if the folder lacks one of them or they don't fit one another, and for
    sizes that are out of range.
    """

    def __init__(
        self,
        model: str | None,
        out: Path,
        plan: ShortlistPlan = ShortlistPlan(),  # noqa: B008
        seed: int = 0,
    ) -> None:
        self.out = out
        self.plan = plan
        self.seed = seed
        self.shards = Shards(out / "text")
        if is_kind(out, BLOCK):
            raise InvalidInput(
                f"{out} holds a block drafter: clusters and routers are for feature drafters "
                "(EAGLE), and its list of frequent tokens was written when it was trained"
            )
        opened = open_target(model, pick_device(None))
        loaded = opened.loaded.model
        vocab, last = loaded.vocab_size, loaded.config.num_hidden_layers + 1
        network = load_eagle(out, TargetParts.of(loaded)).float()
        config = network.config
        if config.own_head or config.vocab_size != vocab:
            raise InvalidInput(
                f"{out} drafts for a model with {config.vocab_size:,} tokens, with a head for "
                f"{config.draft_vocab_size or 'all'} of them; {model or hub.DEFAULT} has "
                f"{vocab:,}: give the --model that it was trained for, and a drafter without a "
                "head of its own"
            )
        self.target = FrozenTarget(loaded, opened.parameters, opened.stack, (*config.layers, last))
        self.network = network.to(self.target.device).eval()
        # of the text, where a training has left them
        hidden = out / HIDDEN_FOLDER
        self._states = StateCache.of(self.target, hidden) if hidden.is_dir() else None
        sizes = DEFAULT_SIZES[plan.clusters]
        default_listed = min(max(1, vocab // sizes.vocab_per_listed), sizes.most_listed)
        self.listed = plan.listed or default_listed
        self.size = plan.size or min(sizes.cluster_size, max(1, vocab // 64))
        if self.listed >= vocab:
            raise InvalidInput(f"--listed {self.listed}: must be 1 to {vocab - 1}")
        self.ranking = ranking(self.counts())
        if plan.list_of is not None:
            self.ranking = Artefact.load(plan.list_of).ranking
            if len(self.ranking) != vocab:
                raise InvalidInput(f"--list-of {plan.list_of}: of another vocabulary")

    def to_cpu(self) -> None:
        """Move network, embedding and head to the CPU, where the places of the text are."""
        self.network.cpu()
        self.target.to_cpu()

    def counts(self) -> torch.Tensor:
        """Return how often each token occurs in the text, `[vocab]` int64.

        Held-out conversations are not counted.
        """
        trained = [self.shards[i] for i in split(self.shards)[0]]
        return token_counts(trained, len(self.target.head))

    def run(self, report: Callable[[str, float | None], None]) -> Figures:
        """Write the artefact and its figures, and return the figures on held-out text."""
        plan = self.plan
        train, held = split(self.shards)
        places = self._collect(train, plan.rows, lambda done: report("places", done))
        held_places = self._collect(held, HELD_PLACES, lambda done: report("held-out places", done))
        self.to_cpu()
        report("clusters", None)
        layout = self._clustered(places)
        report("router", None)
        router = train_router(
            self.network,
            places,
            layout.cluster_of,
            residual=plan.clusters == "pifa",
            width=plan.width,
            epochs=plan.router_epochs,
            seed=self.seed,
        )
        Artefact(layout, self.ranking, router).save(self.out)
        figures = self.figures(layout, router, held_places)
        record = {
            "clusters": plan.clusters,
            "width": plan.width,
            "depths": plan.depths,
            "listed": self.listed,
            "size": self.size,
            "text": self.shards.tokens,
            "places": len(places.tokens),
            "held_out": {
                rows: {"list": by_list, "router": by_both}
                for rows, (by_list, by_both) in figures.items()
            },
        }
        (self.out / FIGURES).write_text(json.dumps(record, indent=2) + "\n")
        return figures

    def _collect(self, indices: list[int], count: int, report: Callable[[float], None]) -> Places:
        """Return at most `count` places of the conversations at `indices`."""
        return collect_places(
            self.network,
            self.target,
            self.shards,
            indices,
            self.plan.depths,
            count,
            self.seed,
            report,
            self._states,
        )

    def _clustered(self, places: Places) -> Layout:
        """Return the vocabulary with its frequent tokens first, and all others in clusters."""
        features = CLUSTERINGS[self.plan.clusters](self.network, self.target.head, places)
        frequent = self.ranking[: self.listed]
        others = self.ranking[self.listed :].sort().values
        order = torch.cat([frequent, others[halve(features[others], self.size)]])
        return Layout(order, self.listed, self.size, len(self.target.head))

    def figures(self, layout: Layout, router: Router, places: Places) -> Figures:
        """Measure the list and the router on held-out places.

        They are measured at those `SHARES` that hold the frequent tokens and a cluster.
        """
        rank = torch.empty_like(self.ranking)
        rank[self.ranking] = torch.arange(len(rank))
        rank = rank[places.target]
        figures: Figures = {}
        for share in SHARES:
            rows = round(len(self.target.head) * share)
            clusters = (rows - layout.frequent) // layout.size
            if clusters > 0:
                by_router = routed(self.network, router, places, layout.cluster_of, clusters)
                by_both = by_router | (rank < layout.frequent)
                figures[rows] = (recall(places, rank < rows), recall(places, by_both))
        return figures
