"""Makes the shortlist in a drafter's folder: clusters of the vocabulary, then a router over
them."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch

from quickbeam import hub
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.shortlist.artefact import FIELDS, TENSORS, Artefact
from quickbeam.errors import InvalidInput
from quickbeam.models.loading import load_model, pick_device
from quickbeam.train.clusters import make_layout, ranking
from quickbeam.train.drafter import HELD_OUT, for_products, head_of, split
from quickbeam.train.labels import BATCH_TOKENS, FLOATS, Labeller, Rows, collect
from quickbeam.train.router import Epoch, RouterRecipe, RouterReport, train_router
from quickbeam.train.shards import Shards

GIB = 2**30
# The most tokens of a cluster. A product with this many costs about as much as starting it, so
# smaller clusters are no cheaper.
SIZE = 512
FREQUENT_SHARE = 12  # one token in this many is always scored
HELD_ROWS = 20_000  # the most rows that the figures are measured on
OPTIONS = {  # recipe fields on the command line
    "rows": "--rows",
    "epochs": "--router-epochs",
    "width": "--width",
    "depths": "--depths",
    "seed": "--seed",
}
CARD, FIGURES = "ROUTER.md", "router.json"


def default_frequent(vocab: int) -> int:
    """Return the default number of frequent tokens, a twelfth of the vocabulary.

    It is in whole clusters of `SIZE` if the vocabulary is that big: 4,096 of 49,152.
    """
    share = vocab / FREQUENT_SHARE
    return round(share / SIZE) * SIZE or max(1, round(share))


def default_size(vocab: int) -> int:
    """Return the tokens per cluster: 512, or a 64th of a small vocabulary."""
    return min(SIZE, max(1, vocab // 64))


class DrafterFolder:
    """What all trainings of a shortlist read.

    That is the text in `out`, its drafter, and the target's embedding and head. `model`: None is
    the embedded default. Raises `InvalidInput` if the folder lacks one of them or if they don't fit
    one another, before the model is loaded if possible.
    """

    def __init__(self, model: str | None, out: Path) -> None:
        self.model, self.out = model, out
        if not any((out / "text").glob("*.safetensors")):
            raise InvalidInput(
                f"{out} holds no text: make a drafter there first, quickbeam train --only drafter "
                f"--out {out}"
            )
        self.shards = Shards(out / "text")
        config = EagleHead.load(out).config
        if config.own_head:
            raise InvalidInput(
                f"{out}: this drafter has a vocabulary of its own, of "
                f"{config.draft_vocab_size:,} tokens: a fixed shortlist"
            )
        self.device = pick_device(None)
        target, _ = load_model(hub.resolve(model), torch.bfloat16, self.device)
        self.head = for_products(head_of(target))
        embedding = target.get_input_embeddings()
        del target
        gc.collect()
        self._fit(config)
        self.network = EagleHead.load(out, embedding).to(self.device).eval().requires_grad_(False)

    def _fit(self, config: EagleConfig) -> None:
        name = self.model or hub.DEFAULT
        if (config.vocab_size, config.target_size) != tuple(self.head.shape):
            raise InvalidInput(
                f"{self.out} drafts for a model with {config.vocab_size:,} tokens and hidden "
                f"states of {config.target_size}, {name} has "
                f"{self.head.shape[0]:,} and {self.head.shape[1]}: give the --model that it was "
                "trained for"
            )
        if (width := self.shards[0].hidden.shape[1]) != len(config.layers) * config.target_size:
            raise InvalidInput(
                f"{self.out}: the text holds hidden states of {width}, the drafter reads "
                f"{len(config.layers)} times {config.target_size}"
            )

    def to_cpu(self) -> None:
        """Move the drafter, the embedding that it shares with the target, and the head to the CPU.

        What is collected from the text is there.
        """
        self.network.cpu().embedding.cpu()
        self.head = for_products(self.head.cpu())

    def counts(self) -> torch.Tensor:
        """Return how often each token occurs in the text, `[vocab]` int64.

        Held-out conversations are not counted.
        """
        found = self.shards.counts(len(self.head))
        for i in split(self.shards)[1]:
            found -= torch.bincount(self.shards[i].tokens.long(), minlength=len(found))
        return found


class Clustered(NamedTuple):
    """The clusters that were made.

    `share`: how much of the text the frequent tokens are. `dropped`: whether a router over earlier
    clusters was there, which is gone now.
    """

    artefact: Artefact
    share: float
    dropped: bool


class ClusterTraining(DrafterFolder):
    """Makes the clusters of a drafter's vocabulary.

    `frequent`: how many tokens are always scored; None for `default_frequent`. `size`: tokens per
    cluster; None for `default_size`.
    """

    def __init__(
        self,
        model: str | None,
        out: Path,
        frequent: int | None = None,
        size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, out)
        self.frequent = default_frequent(len(self.head)) if frequent is None else frequent
        self.size, self.seed = default_size(len(self.head)) if size is None else size, seed

    def run(self) -> Clustered:
        """Write the artefact, without a router. Raises as `make_layout` does."""
        counts = self.counts()
        layout = make_layout(self.head, counts, self.frequent, self.size, self.seed)
        artefact = Artefact(layout, ranking(counts), None)
        dropped = False
        if Artefact.there(self.out):
            with suppress(InvalidInput):  # a broken artefact has nothing to lose
                dropped = Artefact.load(self.out).router is not None
        artefact.save(self.out)
        for name in (CARD, FIGURES):
            (self.out / name).unlink(missing_ok=True)
        return Clustered(
            artefact,
            float(counts[layout.order[: layout.frequent]].sum() / counts.sum().clamp(min=1)),
            dropped,
        )


class RouterTraining(DrafterFolder):
    """Trains a router over the clusters in a drafter's folder.

    Raises `InvalidInput` as `DrafterFolder` does, and if there are no clusters or they are of
    another vocabulary.
    """

    def __init__(self, model: str | None, out: Path, recipe: RouterRecipe) -> None:
        if not Artefact.there(out):
            raise InvalidInput(
                f"{out} holds no clusters: make them first, quickbeam train --only shortlist "
                f"--clusters heads --out {out}"
            )
        self.artefact, self.recipe = Artefact.load(out), recipe
        super().__init__(model, out)
        if (vocab := self.artefact.layout.vocab) != len(self.head):
            raise InvalidInput(
                f"{out}: the clusters are of {vocab:,} tokens, the model has {len(self.head):,}: "
                "run quickbeam train --only shortlist again"
            )
        if not self.artefact.layout.clusters:
            raise InvalidInput(
                f"{out}: the shortlist has no clusters to choose from: give fewer --listed"
            )

    def memory(self) -> int:
        """Return the bytes that training will take beside what is loaded, an upper estimate.

        It counts the rows, and on a CPU also the head in the layout's order, the distributions and
        a pass of the drafter.
        """
        config, layout, device = self.network.config, self.artefact.layout, self.device
        rows = Rows.memory(
            self.recipe.rows + self._held_rows(), config.hidden_size, layout.clusters
        )
        longest = max(BATCH_TOKENS, max(self.shards.length(i) for i in range(len(self.shards))))
        width = (
            (config.heads + 2 * config.kv_heads) * config.head_dim
            + 3 * config.intermediate_size
            + 12 * config.hidden_size
        )
        laws = 6 * 4 * max(FLOATS, layout.vocab)
        if device.type == "cuda":
            return rows
        return (
            rows
            + self.head.numel() * self.head.element_size()
            + laws
            + longest
            * 4
            * (self.recipe.depths * width + 4 * len(config.layers) * config.target_size)
        )

    def check_memory(self) -> None:
        """Raise `InvalidInput` if the system says that less memory is free."""
        free = available_memory()
        if free is not None and (wanted := self.memory()) > free:
            raise InvalidInput(
                f"{free / GIB:.1f} GiB of memory are free, {wanted / GIB:.1f} are "
                "needed: ask for fewer --rows"
            )

    def _held_rows(self) -> int:
        return min(HELD_ROWS, self.recipe.rows)

    def run(
        self, labelled: Callable[[float], None], trained: Callable[[Epoch], None]
    ) -> RouterReport:
        """Train. Write the artefact and its card after each epoch that is the best so far.

        Whatever ends the training early leaves that best epoch. `labelled(done)`, 0 to 1, reports
        the first part, in which the drafter and the heads run. `trained` is called after every
        epoch. Returns the figures of the router that was written.
        """
        began = time.perf_counter()
        train, held = split(self.shards)
        count = self._held_rows()
        share = count / (count + self.recipe.rows)
        check = self._collect(held, count, 0.0, lambda done: labelled(share * done))
        rows = self._collect(
            train,
            self.recipe.rows,
            self.recipe.mix,
            lambda done: labelled(share + (1 - share) * done),
        )
        labelling = time.perf_counter() - began
        best: RouterReport | None = None
        for epoch in train_router(self.network.embed, rows, check, self.recipe, self.device):
            if epoch.better:
                best = epoch.held
                self._write(epoch, len(rows.tokens), labelling, time.perf_counter() - began)
            trained(epoch)
        assert best is not None, "there is at least one epoch, and its loss is finite"
        return best

    def _collect(
        self, chosen: list[int], count: int, mix: float, report: Callable[[float], None]
    ) -> Rows:
        labeller = Labeller(self.head, self.artefact.layout, mix)
        return collect(
            self.network,
            self.shards,
            chosen,
            labeller,
            self.recipe.depths,
            count,
            self.recipe.seed,
            report,
        )

    def _write(self, epoch: Epoch, rows: int, labelling: float, seconds: float) -> None:
        layout = self.artefact.layout
        Artefact(layout, self.artefact.ranking, epoch.router).save(self.out)
        record = {
            "clusters": layout.clusters,
            "size": layout.size,
            "frequent": layout.frequent,
            "vocab": layout.vocab,
            "recipe": asdict(self.recipe),
            "rows": rows,
            "epoch": epoch.number,
            "label_seconds": round(labelling, 1),
            "seconds": round(seconds, 1),
            "held_out": epoch.held._asdict(),
        }
        replace(self.out / FIGURES, json.dumps(record, indent=2) + "\n")
        replace(self.out / CARD, self.card(epoch, rows, labelling, seconds))

    def command(self) -> str:
        """Return the command line of this training."""
        plain = RouterRecipe()
        parts = ["quickbeam train --only shortlist --clusters heads"]
        parts += [f"--model {self.model}"] if self.model else []
        for name, option in OPTIONS.items():
            if (value := getattr(self.recipe, name)) != getattr(plain, name):
                parts.append(f"{option} {value}")
        return " ".join(parts)

    def card(self, epoch: Epoch, rows: int, labelling: float, seconds: float) -> str:
        """Return the card in Markdown: what the shortlist is, how it was made, what it finds."""
        layout, held, recipe = self.artefact.layout, epoch.held, self.recipe
        parameters = sum(p.numel() for p in epoch.router.parameters())
        recall, covered = table(held.choices, held.recall), table(held.choices, held.covered)
        name = self.model or hub.DEFAULT
        return f"""# A shortlist for the drafter of {name}

{layout.frequent:,} frequent tokens of {layout.vocab:,}, which are always scored, and
{layout.clusters} clusters of {layout.size} tokens whose rows of the head are alike; a router of
{parameters / 1e6:.2f} M parameters says which clusters a row of the drafter calls for. Made with

    {self.command()}

`--vocab clusters` and `--vocab router` ask it. Without them a drafter scores the frequent tokens
and those of the context, and no router: with the context beside both, one of this kind found no
more for the default model than a list of the same length. With `--clusters wanted` the router
does (docs/vocabulary.md).

- **Data:** {rows:,} rows at up to {recipe.depths} drafts ahead, of {self.shards.tokens:,} tokens of
  text that the model wrote itself. One conversation in {HELD_OUT} was held out.
- **Training:** {epoch.number} of {recipe.epochs} epochs (the best on what was held out),
  {timedelta(seconds=round(seconds))} on {machine(self.device)}, of which
  {timedelta(seconds=round(labelling))} went into labels.
- **Size:** {sum((self.out / file).stat().st_size for file in (TENSORS, FIELDS)) / 1e6:.2f} MB
  (`{TENSORS}`, `{FIELDS}`).

On {sum(held.rows):,} held-out rows, by depth (how many tokens are drafted ahead) and by number of
clusters called for:

**Recall**, how often the model's likeliest token is scored

{recall}

**Covered mass**, how much of the model's law at temperature 1 is scored

{covered}
"""


def table(choices: list[int], shares: list[list[float]]) -> str:
    """Return a Markdown table with a row per depth and a column per number of clusters."""
    lines = ["| depth | " + " | ".join(str(k) if k else "frequent alone" for k in choices) + " |"]
    lines.append("| --- |" + " --- |" * len(choices))
    lines += [
        f"| {depth} | " + " | ".join(f"{share:.4f}" for share in row) + " |"
        for depth, row in enumerate(shares, 1)
    ]
    return "\n".join(lines)


def replace(path: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def available_memory() -> int | None:
    """Return the bytes of memory that the system could hand out; None if it doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def machine(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
