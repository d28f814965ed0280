"""Makes the shortlist that `--vocab` and `--shortlist` ask for, over a drafter's head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quickbeam.config import CLUSTERS, CONTEXT, FREQUENCY, FULL, ROUTER, check_vocab, plain_vocab
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router
from quickbeam.drafters.shortlist.shortlist import WINDOW, Artefact, Shortlist
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Model, inference
from quickbeam.models.compile.compiled_stack import NativeLinear
from quickbeam.models.native.library import Kernels

# by kind: the default size is the size of the vocabulary divided by this
SHARES = {FREQUENCY: 4, FREQUENCY + CONTEXT: 16, CLUSTERS: 8, ROUTER: 16}
SHARE_OF_IDS = 4  # the same where ids stand for ranks, which are less exact,
LEAST_IDS = 16_384  # and at least so many tokens
WITH_CONTEXT = (FREQUENCY + CONTEXT, ROUTER)  # kinds that also score the context's tokens
ROUTED = (CLUSTERS, ROUTER)  # kinds whose clusters a router picks


class ShortlistParts(NamedTuple):
    """The arguments of `Shortlist` but for the head's rows and the kernels."""

    layout: Layout
    router: Router | None = None
    chosen: int = 0
    window: int | None = None


def make_shortlist(
    drafter: Drafter,
    model: Model,
    vocab: str,
    size: int | None,
    kernels: Kernels | None,
) -> Shortlist | None:
    """Return a shortlist of about `size` tokens, scored as by `Shortlist`, or `None` for `full`.

    - `frequency`: the most frequent tokens of the drafter's training text (FR-Spec, 2502.14856).
    - `frequency+context`: `frequency` and the tokens of `context`.
    - `context`: the tokens of prompt and output, and those that the target's last logits make
      likely (NanoSpec); `size` is the most it keeps, `WINDOW` where it isn't given.
    - `clusters`: the frequent block and the clusters that a router picks (DynaSpec, 2510.13847).
    - `router`: `clusters` and the tokens of `context`.

    Without a `size`, all but `context` take a share of the vocabulary (`SHARES`). Raises
    `InvalidInput` as `shortlist_parts` does.
    """
    parts = shortlist_parts(drafter, model, vocab, size)
    if parts is None:
        return None
    return Shortlist(
        head_rows(drafter.head_model or model)[: parts.layout.vocab],
        parts.layout,
        None if drafter.scores_in_passes else kernels,
        router=parts.router,
        chosen=parts.chosen,
        window=parts.window,
    )


def shortlist_parts(
    drafter: Drafter, model: Model, vocab: str, size: int | None = None
) -> ShortlistParts | None:
    """Return the parts of the shortlist that `make_shortlist` makes, or `None` for `full`.

    It decides what a drafter can score. Raises `InvalidInput` for what is unknown, and for a
    drafter that has a head of its own or lacks the files that `quickbeam train` writes.
    """
    check_vocab(vocab)
    vocab = plain_vocab(vocab)
    if vocab == FULL:
        return None
    if drafter.head_size is None:
        raise InvalidInput(
            f"--vocab {vocab}: this drafter has a head of its own, which scores all its tokens: "
            "take --vocab full, or a drafter that shares the model's head"
        )
    if vocab in ROUTED and not drafter.routes:
        raise InvalidInput(
            f"--vocab {vocab}: this drafter takes no router: take --vocab frequency+context, "
            "context or full (method dynaspec means --vocab router)"
        )
    tokens = model.vocab_size
    if drafter.head_model is not None:
        tokens = min(tokens, drafter.head_model.vocab_size)
    if size is not None and not 1 <= size <= tokens:
        raise InvalidInput(
            f"--shortlist {size}: must be 1 to {tokens}, the tokens of the vocabulary"
        )
    if vocab == "context":
        return ShortlistParts(Layout.nothing(tokens), window=size or WINDOW)
    window = WINDOW if vocab in WITH_CONTEXT else None
    if drafter.ranks_ids and vocab.startswith(FREQUENCY):
        size = size or min(tokens, max(LEAST_IDS, tokens // SHARE_OF_IDS))
        layout = Layout.by_frequency(torch.arange(tokens), size, tokens)
        return ShortlistParts(layout, window=window)
    artefact = _artefact(drafter, model, vocab)
    size = size or tokens // SHARES[vocab]
    if vocab.startswith(FREQUENCY):
        layout = Layout.by_frequency(artefact.ranking, size, model.vocab_size)
        return ShortlistParts(layout, window=window)
    layout, chosen = artefact.layout.within(size)
    return ShortlistParts(layout, artefact.router, chosen, window)


def is_listed(drafter: Drafter) -> bool:
    """Whether `drafter` comes with a list of the most frequent tokens."""
    folder = drafter.folder
    has_list = drafter.ranks_ids or (folder is not None and Artefact.exists(folder))
    return drafter.head_size is not None and has_list


def _artefact(drafter: Drafter, model: Model, vocab: str) -> Artefact:
    folder = drafter.folder
    size = drafter.head_size
    if folder is None or not Artefact.exists(folder):
        raise InvalidInput(
            f"--vocab {vocab}: the drafter {folder or ''} comes without a shortlist; make one with "
            "quickbeam train --only shortlist, or take --vocab full or context"
        )
    artefact = Artefact.load(folder)
    router = None if vocab.startswith(FREQUENCY) else artefact.router
    if artefact.layout.vocab != model.vocab_size or (
        router is not None and (router.config.hidden_size, router.config.embed_size) != (size, size)
    ):
        raise InvalidInput(
            f"{folder}: a shortlist for {artefact.layout.vocab} tokens, or a router for other "
            f"states than {size} wide; the model has {model.vocab_size}: train it anew"
        )
    if router is None and vocab in ROUTED:
        raise InvalidInput(
            f"--vocab {vocab}: {folder} has clusters but no router; make one with "
            "quickbeam train --only shortlist"
        )
    return artefact


@inference
def head_rows(model: Model) -> torch.Tensor:
    """Return the rows of a model's head, `[vocab, size]`.

    Where the embedding is the same matrix in bfloat16, its rows are not copied.
    """
    head = model.head
    table: Any = model.embedding.weight
    dense = isinstance(table, torch.Tensor) and table.dtype is torch.bfloat16
    if dense and model.config.tie_word_embeddings:
        own_rows: torch.Tensor = table[: model.vocab_size].detach()
        return own_rows
    rows = head.packed.rows() if isinstance(head, NativeLinear) else head.get_parameter("weight")
    return rows[: model.vocab_size].detach()
