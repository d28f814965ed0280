"""Makes the shortlist that `--vocab` and `--shortlist` ask for, over a drafter's head."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import nn

from quickbeam.drafters.base import OWN_HEAD, UNROUTED, Drafter
from quickbeam.drafters.shortlist.artefact import Artefact
from quickbeam.drafters.shortlist.context import WINDOW
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Model, inference
from quickbeam.models.compiled import NativeLinear
from quickbeam.options import BESIDE, FREQUENCY, FULL, check_vocab, plain_vocab

SHARES = {
    FREQUENCY: 4,
    FREQUENCY + BESIDE: 16,
    "clusters": 8,
    "router": 16,
}  # by kind: the default size is the size of the vocabulary divided by this
BOTH = (FREQUENCY + BESIDE, "router")  # kinds that score the context beside the layout's tokens
ROUTED = ("clusters", "router")  # kinds whose clusters a router picks
KEPT = 2  # how many shortlists are kept: each holds a copy of the head's rows


def make_shortlist(
    drafter: Drafter, model: Model, vocab: str, size: int | None = None
) -> Shortlist | None:
    """Return a shortlist of about `size` tokens, or `None` for `full`.

    - `frequency`: the most frequent tokens of the text that the drafter was trained on (FR-Spec,
      2502.14856).
    - `frequency+context`: `frequency` and the tokens of `context`.
    - `context`: the tokens of prompt and output, and those that the target's last logits make
      likely (NanoSpec); `size` is the most it keeps, `WINDOW` where it isn't given.
    - `clusters`: the frequent block and the clusters that a router picks (DynaSpec, 2510.13847).
    - `router`: `clusters` and the tokens of `context`.

    Without a `size`, all but `context` take a share of the vocabulary (`SHARES`).

    Raises `InvalidInput` for an unknown `vocab`, a `size` that is not 1 to the vocabulary's, a
    drafter that has a head of its own, and a drafter without the files that `quickbeam train`
    writes.
    """
    check_vocab(vocab)
    vocab = plain_vocab(vocab)
    if vocab == FULL:
        return None
    if drafter.head_size is None:
        raise InvalidInput(f"--vocab {vocab}: {OWN_HEAD}")
    if vocab in ROUTED and not drafter.routes:
        raise InvalidInput(f"--vocab {vocab}: {UNROUTED}")
    if size is not None and not 1 <= size <= model.vocab_size:
        raise InvalidInput(
            f"--shortlist {size}: must be 1 to {model.vocab_size}, the tokens of the vocabulary"
        )
    weight = rows_of(model.head, drafter.head_size, model)
    if vocab == "context":
        return Shortlist(weight, Layout.nothing(model.vocab_size), window=size or WINDOW)
    artefact = _artefact(drafter, model, vocab)
    size = size or model.vocab_size // SHARES[vocab]
    window = WINDOW if vocab in BOTH else None
    if vocab.startswith(FREQUENCY):
        layout = Layout.by_frequency(artefact.ranking, size, model.vocab_size)
        return Shortlist(weight, layout, window=window)
    layout = artefact.layout.within(size)
    return Shortlist(
        weight,
        layout,
        router=artefact.router,
        chosen=layout.room(size),
        deepest=artefact.deepest,
        window=window,
    )


class Shortlists:
    """The shortlists of one drafter, each made when it is first requested.

    The `KEPT` most recently used ones are kept.
    """

    def __init__(self, drafter: Drafter, model: Model) -> None:
        self._make = lru_cache(maxsize=KEPT)(partial(make_shortlist, drafter, model))

    def get(self, vocab: str, size: int | None) -> Shortlist | None:
        """Return the shortlist for `vocab` and `size` (see `make_shortlist`)."""
        return self._make(plain_vocab(vocab), size)


def is_listed(drafter: Drafter) -> bool:
    """Whether `drafter` comes with a list of the most frequent tokens."""
    folder = drafter.folder
    return drafter.head_size is not None and folder is not None and Artefact.there(folder)


def _artefact(drafter: Drafter, model: Model, vocab: str) -> Artefact:
    folder = drafter.folder
    if folder is None or not Artefact.there(folder):
        raise InvalidInput(
            f"--vocab {vocab}: the drafter {folder or ''} comes without a shortlist; make one with "
            "quickbeam train --only shortlist,"
            " or take --vocab full or context"
        )
    artefact = Artefact.load(folder)
    if artefact.layout.vocab != model.vocab_size:
        raise InvalidInput(
            f"{folder}: a shortlist over {artefact.layout.vocab} tokens, the model "
            f"has {model.vocab_size}: train it anew"
        )
    if vocab.startswith(FREQUENCY):
        return artefact
    if artefact.router is None:
        raise InvalidInput(
            f"--vocab {vocab}: {folder} has clusters but no router; make one with "
            "quickbeam train --only shortlist"
        )
    config, size = artefact.router.config, drafter.head_size
    if (config.hidden_size, config.embed_size) != (size, size):
        raise InvalidInput(
            f"{folder}: a router for states of {config.hidden_size}, the drafter's "
            f"are {size}: train it anew"
        )
    return artefact


@inference
def rows_of(head: nn.Module, size: int, model: Model) -> torch.Tensor:
    """Return the rows of a head, `[vocab, size]`, in whatever form the head keeps them.

    Where they can't be read off, they are the head's product with the identity matrix, which causes
    no rounding.
    """
    if isinstance(head, NativeLinear):
        return head.packed.rows()[: model.vocab_size]
    weight = getattr(head, "weight", None)
    if type(head) is nn.Linear and weight is not None:
        linear: torch.Tensor = weight.detach()[: model.vocab_size]
        return linear
    identity = torch.eye(size, dtype=model.dtype, device=model.device)
    rows: torch.Tensor = head(identity).T[: model.vocab_size]
    return rows.contiguous()
