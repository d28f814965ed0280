"""What a training is asked for: the text, the drafter, the shortlist.

This module does not import PyTorch: the fields are the options of `quickbeam train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quickbeam.train.openers import LANGUAGES

FIXED = {"option": False}  # fields that no option sets


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained.

    A step has up to `depths` passes of training-time test (`ahead`). The learning rate rises over
    `warmup` steps, stays at `lr`, and falls to zero over the last share `cooldown` of the run.

    The loss is the cross-entropy with the target's distribution over `loss_vocab` tokens
    (`LossVocabulary`), plus `regression` times the smooth L1 distance to the target's hidden state,
    which guides the training while the drafter's distribution is still far off.
    """

    epochs: float = field(default=6, metadata={"min": 0.01})
    """Times the drafter is trained on the text."""
    batch: int = field(default=1024, metadata={"min": 64})
    """Tokens a training step, padding counted."""
    depths: int = field(default=3, metadata={"min": 1, "max": 12})
    """Drafts ahead that drafter and router are trained for."""
    decay: float = field(default=0.8, metadata=FIXED)
    """The weight of a pass over that of the pass before it."""
    lr: float = field(default=1e-3, metadata={"min": 1e-7})
    """Highest learning rate."""
    warmup: int = field(default=50, metadata=FIXED)
    """Steps in which the learning rate rises."""
    cooldown: float = field(default=0.3, metadata={"min": 0, "max": 1})
    """Last part of the run: the rate falls to zero."""
    loss_vocab: int = field(default=8192, metadata={"min": 16})
    """Tokens that a step's loss is taken over."""
    regression: float = field(default=10.0, metadata=FIXED)
    """The weight of the distance to the target's hidden state, at the start."""
    lead: float = field(default=0.5, metadata=FIXED)
    """First share of the run, in which that weight falls to zero."""
    whole: float = field(default=0.5, metadata=FIXED)
    """First share of the run, in which every token counts, those of users too: text is expensive,
    and what users write holds what answers don't. After that only answers count."""
    clip: float = field(default=1.0, metadata=FIXED)
    """The largest norm of the gradient."""
    seed: int = 0
    """Repeats a run on the same machine."""

    def ahead(self, done: float) -> int:
        """Return the number of passes of a step if `done` (0 to 1) of the run is over.

        It is one in the first half, then two, and one more after every further fifth of the run. A
        step of three passes takes three times as long, and what it learns first is the first pass.
        """
        return min(self.depths, 1 if done < 0.5 else 2 + int((done - 0.5) * 5))

    def rate(self, step: int, done: float) -> float:
        """Return the learning rate of a step if `done` (0 to 1) of the run is over."""
        return (
            self.lr
            * min(1.0, (step + 1) / self.warmup)
            * min(1.0, max(0.0, 1 - done) / max(self.cooldown, 1e-9))
        )


@dataclass(frozen=True)
class Plan:
    """What a drafter is made from."""

    model: str | None
    """Folder, .gguf file, Hugging Face id or embedded name. Default: the embedded one."""
    out: Path
    """Folder for text, checkpoints, drafter and shortlist. A second run goes on from there."""
    tokens: int = field(default=1_000_000, metadata={"min": 1000})
    """Tokens of text to write."""
    prompts: Path | None = None
    """Questions of your own, a JSON object a line: {"prompt": …}, {"turns": […]} or
    {"messages": […]}. Default: the model writes questions."""
    slots: int = field(default=128, metadata={"min": 1})
    """Conversations written at a time."""
    length: int = field(default=512, metadata={"min": 32})
    """Longest conversation, in tokens."""
    quote: float = field(default=0.15, metadata={"min": 0, "max": 1})
    """Share of conversations about a longer text, made of what was written before."""
    start: Path | None = None
    """Begin with the weights of this drafter (a folder), to train it on with other text."""
    languages: Sequence[str] = field(
        default=("en",),
        metadata={
            "help": "Of the questions and documents that the model writes, in equal parts, "
            f"comma-separated: {', '.join(LANGUAGES)}."
        },
    )
    recipe: Recipe = field(default_factory=Recipe, metadata=FIXED)
    """How the drafter is trained."""

    @property
    def text(self) -> Path:
        return self.out / "text"


@dataclass(frozen=True)
class ShortlistPlan:
    """What a shortlist is made of: frequent tokens, clusters, and a router over these."""

    clusters: str = field(default="pifa", metadata={"choices": ("pifa", "kmeans")})
    """Which tokens make a cluster. pifa: tokens that follow in the same places, in small clusters,
    and a router trained to find what neither the frequent tokens nor the context have; kmeans:
    DynaSpec's, tokens whose rows of the head are alike."""
    rows: int = field(default=200_000, metadata={"min": 1})
    """Places of the text that the router is trained on, at most."""
    listed: int | None = field(default=None, metadata={"min": 1})
    """Tokens that are always scored. Default: one in 48 of the vocabulary, at most 1,024; kmeans:
    one in 12."""
    list_of: Path | None = None
    """Folder of a drafter whose shortlist says which tokens are frequent, of more text than this
    one's."""
    size: int | None = field(default=None, metadata={"min": 1})
    """Tokens a cluster. Default: 16; kmeans: 512; at most a 64th of the vocabulary."""
    router_epochs: int = field(default=4, metadata={"min": 1})
    """Times the router is trained on the places."""
    width: int = field(default=256, metadata={"min": 1})
    """Of the router's hidden layer."""
