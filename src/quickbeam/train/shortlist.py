"""Makes the shortlist in a drafter's folder: frequent tokens, clusters, and a router over them.

Nothing is decoded. At each place (`places.py`) it is known which token the target finds likeliest,
and whether the context holds it. A way to choose a part of the vocabulary is measured by whether it
would score that token. Ways are compared at the same number of rows of the head, not counting the
context's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from quickbeam import hub
from quickbeam.drafters.eagle_files import load_eagle
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.layouts import BLOCK, is_kind
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.native import Router
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.errors import InvalidInput
from quickbeam.models.formats import pick_device
from quickbeam.train.places import Places, collect_places
from quickbeam.train.recipes import ShortlistPlan
from quickbeam.train.router import CLUSTERINGS, halve, ranking, recall, routed, train_router
from quickbeam.train.shards import Shards, split
from quickbeam.train.target import FrozenTarget, load_target

HELD_PLACES = 20_000  # the most places that the figures are measured on
SHARES = (0.01, 0.02, 0.03, 0.06, 0.125, 0.25)  # of the vocabulary, in reports
# By kind of clusters: one token in so many is always scored, but at most so many; tokens of a
# cluster, but at most a 64th of the vocabulary.
DEFAULTS = {"pifa": (48, 1024, 16), "kmeans": (12, 2**31, 512)}
FIGURES = "router.json"

Figures = dict[int, tuple[float, float]]
"""By number of rows of the head: the recall of the list, and of list and router."""


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
        self.out, self.plan, self.seed, self.shards = out, plan, seed, Shards(out / "text")
        if is_kind(out, BLOCK):
            raise InvalidInput(
                f"{out} holds a block drafter: clusters and routers are for feature drafters "
                "(EAGLE), and its list of frequent tokens was written when it was trained"
            )
        read, _ = load_target(model, pick_device(None))
        count, head = read.config.get_text_config().num_hidden_layers, read.get_output_embeddings()
        vocab, size = head.weight.shape
        parts = TargetParts(count, size, vocab, read.get_input_embeddings(), head)
        network = load_eagle(out, parts).float()
        config = network.config
        if config.own_head or config.vocab_size != vocab:
            raise InvalidInput(
                f"{out} drafts for a model with {config.vocab_size:,} tokens, with a head for "
                f"{config.draft_vocab_size or 'all'} of them; {model or hub.DEFAULT} has "
                f"{vocab:,}: give the --model that it was trained for, and a drafter without a "
                "head of its own"
            )
        self.target = FrozenTarget(read, (*config.layers, count + 1))
        self.network = network.to(self.target.device).eval()
        share, most, tokens = DEFAULTS[plan.clusters]
        self.listed = plan.listed or min(max(1, vocab // share), most)
        self.size = plan.size or min(tokens, max(1, vocab // 64))
        if self.listed >= vocab:
            raise InvalidInput(f"--listed {self.listed}: must be 1 to {vocab - 1}")
        self.ranking = ranking(self.counts())
        if plan.list_of is not None:
            self.ranking = Artefact.load(plan.list_of).ranking
            if len(self.ranking) != vocab:
                raise InvalidInput(f"--list-of {plan.list_of}: of another vocabulary")

    def to_cpu(self) -> None:
        """Move what is used after the text was read to the CPU, where its places are."""
        self.network.cpu()
        self.target.to_cpu()

    def counts(self) -> torch.Tensor:
        """Return how often each token occurs in the text, `[vocab]` int64.

        Held-out conversations are not counted.
        """
        counts = self.shards.counts(len(self.target.head))
        for i in split(self.shards)[1]:
            counts -= torch.bincount(self.shards[i].tokens.long(), minlength=len(counts))
        return counts

    def run(self, report: Callable[[str, float | None], None]) -> Figures:
        """Write the artefact and its figures, and return the figures on held-out text."""
        train, held = split(self.shards)
        places = self._collect(train, self.plan.rows, partial(report, "places"))
        counted = self._collect(held, HELD_PLACES, partial(report, "held-out places"))
        self.to_cpu()
        report("clusters", None)
        features = CLUSTERINGS[self.plan.clusters](self.network, self.target.head, places)
        rest = self.ranking[self.listed :].sort().values
        order = torch.cat([self.ranking[: self.listed], rest[halve(features[rest], self.size)]])
        layout = Layout(order, self.listed, self.size, len(self.target.head))
        report("router", None)
        plan, clusters, residual = self.plan, layout.cluster_of, self.plan.clusters == "pifa"
        how = {"width": plan.width, "epochs": plan.router_epochs, "seed": self.seed}
        router = train_router(self.network, places, clusters, residual, **how)
        Artefact(layout, self.ranking, router).save(self.out)
        figures = self.figures(layout, router, counted)
        held_out = {rows: {"list": one, "router": both} for rows, (one, both) in figures.items()}
        record = {
            **{name: getattr(plan, name) for name in ("clusters", "width", "depths")},
            "listed": self.listed,
            "size": self.size,
            "text": self.shards.tokens,
            "places": len(places.tokens),
            "held_out": held_out,
        }
        (self.out / FIGURES).write_text(json.dumps(record, indent=2) + "\n")
        return figures

    def _collect(self, chosen: list[int], count: int, report: Callable[[float], None]) -> Places:
        read, depths = (self.network, self.target, self.shards), self.plan.depths
        return collect_places(*read, chosen, depths, count, self.seed, report)

    def figures(self, layout: Layout, router: Router, places: Places) -> Figures:
        """Measure the list and the router on held-out places, at the `SHARES` that have room."""
        rank = torch.empty_like(self.ranking)
        rank[self.ranking] = torch.arange(len(rank))
        rank = rank[places.target]
        figures: Figures = {}
        for rows in (round(len(self.target.head) * share) for share in SHARES):
            count = (rows - layout.frequent) // layout.size
            if count > 0:
                hit = routed(self.network, router, places, layout.cluster_of, count)
                scored = hit | (rank < layout.frequent)
                figures[rows] = recall(places, rank < rows), recall(places, scored)
        return figures
