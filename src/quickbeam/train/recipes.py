"""The options of a training: of the text, the drafter, the shortlist.

This module does not import PyTorch: the fields are the options of `quickbeam train`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from importlib import resources
from itertools import cycle, islice
from pathlib import Path

from quickbeam.errors import InvalidInput, did_you_mean
from quickbeam.hub import trained_folder

FEATURE, BLOCK = "feature", "block"  # kinds of drafters that are trained
FIXED = {"option": False}  # fields that no option sets
HIDDEN_FOLDER = "hidden"  # of hidden states of the text, in the folder of a training
WARMUP_SHARE = 0.05  # of a run in which the learning rate rises, at most
HIGHEST_RATE = 3e-3  # of learning, by default
# A feature drafter that was trained on `VISITS` tokens has the MAT `MAT_OF_VISITS`, and with twice
# as many `MAT_OF_DOUBLING` more. A block drafter takes `BLOCK_HUNGER` times as many.
VISITS, MAT_OF_VISITS, MAT_OF_DOUBLING, BLOCK_HUNGER = 1_100_000, 2.0, 0.2, 10
# How the model's own questions and documents begin, by language. An instruct model that is given
# the chat template up to where a user speaks writes what a user would ask. Half of the questions
# begin with one of these words, so that the text covers what users ask for and not only what the
# model likes to ask. `code` is about programs, in English. Add none with which the questions of a
# benchmark begin that quickbeam is measured with.
WORDS = json.loads(resources.files(__package__).joinpath("openers.json").read_text("utf-8"))
LANGUAGES: tuple[str, ...] = tuple(WORDS["questions"])


def opening_words(kind: str, languages: str) -> list[str]:
    """Return how `questions` or `documents` in comma-separated `languages` begin, as many of each.

    Raises `InvalidInput` for a language without any.
    """
    words = WORDS[kind]
    names = [name.strip() for name in languages.split(",")]
    for name in names:
        if name not in words:
            raise InvalidInput(
                f"no language {name!r} to write text in: choose among {', '.join(LANGUAGES)}"
                f"{did_you_mean(name, LANGUAGES)}"
            )
    longest = max(len(words[name]) for name in names)
    openers = list[str]()
    for name in names:
        openers += islice(cycle(words[name]), longest)
    return openers


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained.

    The learning rate rises over `warmup` steps, in a short run over its first `WARMUP_SHARE`, and
    falls to zero as a cosine.
    """

    kind: str = field(default=FEATURE, metadata={"choices": (FEATURE, BLOCK), "common": True})
    """What is made. feature: a layer that drafts token by token, as in EAGLE-3; block: layers that
    draft several tokens in a pass, which need ten times the text."""
    epochs: float = field(default=4, metadata={"min": 0.01})
    """Times the drafter is trained on --tokens of text."""
    ahead: int = field(default=4, metadata={"min": 1, "max": 12})
    """Tokens that a feature drafter is trained to draft on its own drafts."""
    batch: int = field(default=1024, metadata={"min": 64})
    """Tokens of a training step, padding counted."""
    lr: float | None = field(default=None, metadata={"min": 1e-7})
    """Highest learning rate. Default: 1 / width of the model, at most 0.003."""
    file_head: int = field(default=0, metadata={"min": 0})
    """So many rows of the model's head are written into a feature drafter's file, of the most
    frequent tokens (d2t), as other engines ask for."""
    block: int = field(default=7, metadata={"min": 1, "max": 32})
    """Tokens that a block drafter drafts in a pass."""
    depth: int = field(default=2, metadata={"min": 1, "max": 16})
    """Layers of a block drafter."""
    rank: int = field(default=64, metadata={"min": 0})
    """Rank of a block drafter's Markov head, which knows the token before each position. 0: no such
    head."""
    spacing: int = field(default=4, metadata={"min": 1})
    """A training step drafts a block for so many tokens of text, with --kind block."""
    loss_vocab: int = field(default=4096, metadata={"min": 16})
    """Tokens of the vocabulary that a training step's loss is taken over."""
    warmup: int = field(default=100, metadata=FIXED)
    """Steps in which the learning rate rises."""
    seed: int = 0
    """Seed of what is random. The same one repeats a run on the same machine."""

    def rate(self, step: int, done: float, width: int) -> float:
        """Return the learning rate of a step if `done` (0 to 1) of the run is over.

        `width`: of the model, in units. The wider a matrix, the smaller are the steps that it
        bears: an output adds up as many changes (Yang et al., 2203.03466).
        """
        highest = self.lr or min(HIGHEST_RATE, 1 / width)
        rising = min(1.0, max((step + 1) / self.warmup, done / WARMUP_SHARE))
        return highest * rising * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True)
class Plan:
    """What a drafter is made from."""

    model: str | None = field(metadata={"common": True})
    """Folder, .gguf file, Hugging Face id or built-in model. Default: the built-in one."""
    out: Path | None = field(default=None, metadata={"common": True, "metavar": "FOLDER"})
    """Folder for text, checkpoints and drafter. A second run goes on from there. Default: one in
    the cache, where generate, chat and serve find the drafter of the model by themselves."""
    tokens: int = field(default=4_000_000, metadata={"min": 1000, "common": True})
    """Tokens of text that the model writes."""
    minutes: float | None = field(default=None, metadata={"min": 1, "common": True})
    """Choose --tokens so that text and training take about so long on this machine, by a
    measurement; router and bench take some minutes more."""
    prompts: Path | None = field(default=None, metadata={"common": True, "metavar": "FILE"})
    """Questions of your own, a JSON object a line: {"prompt": …}, {"turns": […]} or
    {"messages": […]}. Default: the model writes questions."""
    given: Path | None = field(
        default=None, metadata={"option": "--text", "common": True, "metavar": "PATH"}
    )
    """Train on this text, too: a file, all files below a folder, or chats in a .jsonl file with
    {"messages": […]} a line."""
    own: float = field(default=0.5, metadata={"min": 0, "max": 1})
    """With --text: share of the tokens that the model writes itself."""
    slots: int = field(default=64, metadata={"min": 1})
    """Conversations that are written at the same time."""
    length: int = field(default=512, metadata={"min": 32})
    """Longest conversation of the text, in tokens."""
    quote: float = field(default=0.15, metadata={"min": 0, "max": 1})
    """Share of conversations about a longer text, which is made of what was written before."""
    start: Path | None = field(default=None, metadata={"metavar": "FOLDER"})
    """Begin with the weights of this drafter, which `train` made, to train it on."""
    languages: str = field(
        default="en,code",
        metadata={
            "help": "Languages of the questions and documents that the model writes, in equal "
            f"parts, comma-separated: {', '.join(LANGUAGES)}."
        },
    )
    recipe: Recipe = field(default_factory=Recipe, metadata=FIXED)
    """How the drafter is trained."""

    @property
    def visits(self) -> int:
        """How many tokens are trained on, each as often as it is visited."""
        return int(self.tokens * self.recipe.epochs)

    @property
    def expected_mat(self) -> float:
        """About how many tokens a step of a chain of drafts will emit (MAT).

        So it was with the drafters that were trained from nothing, of two models
        (docs/benchmarks.md, Training).
        """
        visits = self.visits if self.recipe.kind == FEATURE else self.visits / BLOCK_HUNGER
        return max(1.0, MAT_OF_VISITS + MAT_OF_DOUBLING * math.log2(visits / VISITS))

    @property
    def folder(self) -> Path:
        """The folder that `out` names."""
        return trained_folder(self.model) if self.out is None else self.out

    @property
    def text(self) -> Path:
        return self.folder / "text"


@dataclass(frozen=True)
class ShortlistPlan:
    """What --only shortlist makes: a list of frequent tokens, clusters, and a router over these."""

    clusters: str = field(default="pifa", metadata={"choices": ("pifa", "kmeans")})
    """Which tokens of the vocabulary make a cluster. pifa: tokens that follow in the same places,
    in small clusters, and a router trained to find what neither the frequent tokens nor the context
    have; kmeans: DynaSpec's, tokens whose rows of the head are alike."""
    rows: int = field(default=200_000, metadata={"min": 1})
    """Most places of the text that the router is trained on."""
    listed: int | None = field(default=None, metadata={"min": 1})
    """Tokens of the vocabulary that the drafter always scores. Default: one in 48 of them, at most
    1,024; kmeans: one in 12."""
    list_of: Path | None = field(default=None, metadata={"metavar": "FOLDER"})
    """Folder of a drafter whose shortlist says which tokens are frequent, of more text than this
    one's."""
    size: int | None = field(default=None, metadata={"min": 1})
    """Tokens of a cluster. Default: 16; kmeans: 512; at most a 64th of the vocabulary."""
    router_epochs: int = field(default=4, metadata={"min": 1})
    """Times that the router is trained on the places of --rows."""
    depths: int = field(default=3, metadata={"min": 1, "max": 12})
    """Positions ahead of the text that the router is trained for."""
    width: int = field(default=256, metadata={"min": 1})
    """Units of the router's hidden layer."""
