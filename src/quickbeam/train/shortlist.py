"""Makes the shortlist in a drafter's folder: frequent tokens, clusters, and a router over them.

Nothing is decoded. At each place (`places.py`) it is known which token the target finds likeliest,
and whether the context holds it. A way to choose a part of the vocabulary is measured by whether it
would score that token. Ways are compared at the same number of rows of the head, not counting the
context's tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from quickbeam import hub
from quickbeam.drafters.block_model import is_block
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.shortlist.artefact import Artefact
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router
from quickbeam.errors import InvalidInput
from quickbeam.models.base import check_layers
from quickbeam.models.loading import pick_device
from quickbeam.train.clusters import CLUSTERINGS, halve, ranking
from quickbeam.train.places import Places, collect_places
from quickbeam.train.recipes import ShortlistPlan
from quickbeam.train.router import Recall, RouterRecipe, recall, routed, train_router
from quickbeam.train.shards import HELD_OUT, Shards, split
from quickbeam.train.target import FrozenTarget, load_target

HELD_PLACES = 20_000  # the most places that the figures are measured on
DEEPEST = 5  # the largest depth at which the router is asked
SHARES = (0.01, 0.02, 0.03, 0.06, 0.125, 0.25)  # of the vocabulary, in reports
# By kind of clusters: one token in so many is always scored, but at most so many; tokens of a
# cluster, but at most a 64th of the vocabulary.
DEFAULTS = {"pifa": (48, 1024, 16), "kmeans": (12, 2**31, 512)}
CARD, FIGURES = "ROUTER.md", "router.json"

Figures = dict[int, tuple[Recall, Recall]]
"""By number of rows of the head: what the list has, and what list and router have."""


class DrafterFolder:
    """What the training of a shortlist reads.

    That is the text in `out`, its drafter, and the target. `model`: None is the embedded default.
    Raises `InvalidInput` if the folder lacks one of them or if they don't fit one another, before
    the model is loaded if possible.
    """

    def __init__(self, model: str | None, out: Path) -> None:
        self.model, self.out = model, out
        self.shards = Shards(out / "text")
        if is_block(out):
            raise InvalidInput(
                f"{out} holds a block drafter, which scores its whole vocabulary: a shortlist is "
                "for feature drafters (EAGLE)"
            )
        config = EagleHead.load(out).config
        if config.own_head:
            raise InvalidInput(
                f"{out}: this drafter has a vocabulary of its own, of "
                f"{config.draft_vocab_size:,} tokens: a fixed shortlist"
            )
        model_read, _ = load_target(model, pick_device(None))
        count = model_read.config.get_text_config().num_hidden_layers
        check_layers(config.layers, count)
        self.target = FrozenTarget(model_read, (*config.layers, count + 1))
        if (config.vocab_size, config.target_size) != tuple(self.target.head.shape):
            raise InvalidInput(
                f"{self.out} drafts for a model with {config.vocab_size:,} tokens and hidden "
                f"states of {config.target_size}, {self.model or hub.DEFAULT} has "
                f"{self.target.head.shape[0]:,} and {self.target.head.shape[1]}: give the --model "
                "that it was trained for"
            )
        network = EagleHead.load(out, self.target.embedding)
        self.network = network.to(self.target.device).eval().requires_grad_(False)

    @property
    def head(self) -> torch.Tensor:
        """The target's head, `[vocab, d]`."""
        return self.target.head

    def to_cpu(self) -> None:
        """Move what is used after the text was read to the CPU, where its places are."""
        self.network.cpu()
        self.target.to_cpu()

    def counts(self) -> torch.Tensor:
        """Return how often each token occurs in the text, `[vocab]` int64.

        Held-out conversations are not counted.
        """
        counts = self.shards.counts(len(self.head))
        for i in split(self.shards)[1]:
            counts -= torch.bincount(self.shards[i].tokens.long(), minlength=len(counts))
        return counts


class ShortlistTraining(DrafterFolder):
    """Makes a drafter's shortlist as `plan` says.

    Raises `InvalidInput` as `DrafterFolder` does, for sizes that are out of range, and for a
    `plan.list_of` of another vocabulary.
    """

    def __init__(self, model: str | None, out: Path, plan: ShortlistPlan, seed: int = 0) -> None:
        super().__init__(model, out)
        self.plan, self.seed, vocab = plan, seed, len(self.head)
        share, most, size = DEFAULTS[plan.clusters]
        self.listed = plan.listed or min(max(1, vocab // share), most)
        self.size = plan.size or min(size, max(1, vocab // 64))
        if self.listed >= vocab:
            raise InvalidInput(
                f"--listed {self.listed}: must be 1 to {vocab - 1}, as the vocabulary has {vocab} "
                "tokens"
            )
        self.ranking = ranking(self.counts())
        if plan.list_of is not None:
            self.ranking = Artefact.load(plan.list_of).ranking
            if len(self.ranking) != vocab:
                raise InvalidInput(
                    f"--list-of {plan.list_of}: its shortlist is of {len(self.ranking)} tokens, "
                    f"the vocabulary has {vocab}"
                )
        # without the context beside it, the paper's router has to find everything
        residual = plan.clusters == "pifa"
        self.recipe = RouterRecipe(residual, plan.width, plan.router_epochs, seed=seed)

    def run(self, report: Callable[[str, float | None], None]) -> Figures:
        """Write the artefact, its figures and its card, and return the figures on held-out text."""
        train, held = split(self.shards)
        places = self._collect(train, self.plan.rows, partial(report, "places"))
        counted = self._collect(held, HELD_PLACES, partial(report, "held-out places"))
        self.to_cpu()
        report("clusters", None)
        features = CLUSTERINGS[self.plan.clusters](self.network, self.head, places)
        rest = self.ranking[self.listed :].sort().values
        order = torch.cat([self.ranking[: self.listed], rest[halve(features[rest], self.size)]])
        layout = Layout(order, self.listed, self.size, len(self.head))
        report("router", None)
        router = train_router(self.network, places, layout.cluster_of, self.recipe)
        Artefact(layout, self.ranking, router, DEEPEST).save(self.out)
        figures = self.figures(layout, router, counted)
        held_out = {
            rows: {"list": listed._asdict(), "router": both._asdict()}
            for rows, (listed, both) in figures.items()
        }
        record = {
            "clusters": self.plan.clusters,
            "listed": self.listed,
            "size": self.size,
            "places": len(places.tokens),
            "held_out": held_out,
        }
        replace(self.out / FIGURES, json.dumps(record, indent=2) + "\n")
        replace(self.out / CARD, self.card(layout, router, len(places.tokens), counted, figures))
        return figures

    def _collect(self, chosen: list[int], count: int, report: Callable[[float], None]) -> Places:
        return collect_places(
            self.network,
            self.target,
            self.shards,
            chosen,
            self.plan.depths,
            count,
            self.seed,
            report,
        )

    def figures(self, layout: Layout, router: Router, places: Places) -> Figures:
        """Measure the list and the router on held-out places, at the `SHARES` that have room."""
        rank = torch.empty_like(self.ranking)
        rank[self.ranking] = torch.arange(len(rank))
        rank = rank[places.target]
        figures: Figures = {}
        for rows in (round(len(self.head) * share) for share in SHARES):
            count = (rows - layout.frequent) // layout.size
            if count > 0:
                hit = routed(self.network, router, places, layout.cluster_of, count)
                scored, listed = hit | (rank < layout.frequent), rank < rows
                figures[rows] = recall(places, listed, listed), recall(places, scored, listed)
        return figures

    def command(self) -> str:
        """Return the command line of this training."""
        plan = self.plan
        parts = ["quickbeam train --only shortlist", f"--clusters {plan.clusters}"]
        parts += [f"--model {self.model}"] if self.model else []
        parts += [f"--rows {plan.rows} --listed {self.listed} --size {self.size}"]
        parts += [f"--depths {self.plan.depths} --router-epochs {plan.router_epochs}"]
        parts += [f"--width {plan.width}"]
        parts += [f"--list-of {plan.list_of.name}"] if plan.list_of else []
        return " ".join(parts)

    def card(
        self, layout: Layout, router: Router, places: int, counted: Places, figures: Figures
    ) -> str:
        """Return the card in Markdown: what the shortlist is, how it was made, what it finds."""
        parameters = sum(p.numel() for p in router.parameters()) / 1e6
        alike = "that follow in the same places"
        if self.plan.clusters == "kmeans":
            alike = "whose rows of the head are alike (DynaSpec)"
        aim = "what neither the list nor the context has"
        if not self.recipe.residual:
            aim = "what the list does not have"
        table = "\n".join(
            f"| {rows:,} | {listed.recall:.4f} | {both.recall:.4f} | {listed.alone:.4f} | "
            f"{both.alone:.4f} | {both.rare_recall:.3f} |"
            for rows, (listed, both) in figures.items()
        )
        return f"""# A shortlist for the drafter of {self.model or hub.DEFAULT}

{layout.frequent:,} frequent tokens of {layout.vocab:,}, which are always scored, and
{layout.clusters:,} clusters of {layout.size} tokens {alike}; a router of
{parameters:.2f} M parameters, trained to find {aim}. Made with

    {self.command()}

`--vocab clusters` and `--vocab router` ask it. Without them a drafter scores frequent tokens and
those of the context, and no router.

- **Data:** {places:,} places of {self.shards.tokens:,} tokens of text that the model wrote itself,
  up to {self.plan.depths} drafts ahead. One conversation in {HELD_OUT} was held out.

On {len(counted.tokens):,} held-out places, how often the model's likeliest token is scored, by the
number of rows that list and clusters have together; "of rare": where it is neither among as many
frequent tokens nor in the context:

| rows | list + context | router + context | list | clusters | router, of rare |
| --- | --- | --- | --- | --- | --- |
{table}
"""


def replace(path: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
