"""One sequence on a model, for measurements and tests.

Answers go through the engine, which runs many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from quickbeam.errors import QuickbeamError
from quickbeam.models.base import CHUNK, Batch, Chain, Draft, Model
from quickbeam.models.opening import make_model
from quickbeam.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Target:
    """One sequence: its committed tokens `ids`, and logits after any tree of tokens behind them.

    `model`: a `Model`, or a transformers model to make one from (`chunk` as in `make_model`).
    """

    def __init__(self, model: Model | PreTrainedModel, *, chunk: int = CHUNK) -> None:
        self.model = model if isinstance(model, Model) else make_model(model, chunk=chunk)
        self.store = self.model.pool.new()
        self.ids: list[int] = []
        # the likeliest token after each node verified last, where the kernels tell; -1 where logits
        # are not finite
        self.best: list[int] | None = None
        self._held: list[torch.Tensor] = []  # hidden states of committed tokens that were not taken
        self._drafted: torch.Tensor | None = None  # hidden states of the tree verified last

    @property
    def taken(self) -> int:
        """How many committed tokens, from the first on, `take_hidden` gives no hidden states of."""
        return len(self.ids) - sum(len(hidden) for hidden in self._held)

    def take_hidden(self) -> torch.Tensor:
        """Return the hidden states of the committed tokens that were computed since the last call.

        They are those of the last k committed tokens, `[k, len(layers) * d]`. Without any, the
        result is an empty tensor of one dimension.
        """
        hidden, self._held = self._held, []
        return torch.cat(hidden) if hidden else torch.empty(0)

    def reset(self) -> None:
        """Forget every token."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, and all hidden states that were not taken."""
        self.store.truncate(length)
        del self.ids[length:]
        self._held = []

    def prefill(self, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
        """Make `ids` the committed tokens, and return the logits `[vocab]` after the last one.

        The tokens are read in chunks. The first `keep` of them must be committed already, and are
        not computed again; the last token of `ids` always is.

        Raises `ValueError` where the first `keep` are not the committed ones, `InvalidInput` for an
        empty prompt and for ids outside the vocabulary.
        """
        self.model.check_prompt(ids)
        if keep and self.ids[:keep] != list(ids[:keep]):
            raise ValueError(f"the first {keep} tokens are not the committed ones")
        self.truncate(min(keep, len(ids) - 1))
        logits, chunk = torch.empty(0), self.model.chunk
        for begin in range(self.store.length, len(ids), chunk):
            part = list(ids[begin : begin + chunk])
            (passed,) = self.model.forward(Batch([Chain(self.store, part)]))
            self.store.commit(range(len(part)))
            self.ids.extend(part)
            logits = passed.logits
            if passed.hidden is not None:
                self._held.append(passed.hidden)
        return logits[-1].clone()

    def verify(self, tree: TokenTree, base: int = 0) -> torch.Tensor:
        """Return the logits `[n, vocab]` after every node of a tree.

        The root follows the committed tokens. `commit` keeps a path of the tree.

        `base`: how many of the tree's first nodes an earlier call has run since the last commit.
        The logits are then those of the other nodes, `[n - base, vocab]`.
        """
        (passed,) = self.model.forward(Batch([Draft(self.store, tree, base)]))
        self.best = passed.best
        if passed.hidden is not None:
            self._drafted = (
                torch.cat([self._drafted[:base], passed.hidden])
                if base and self._drafted is not None
                else passed.hidden
            )
        return passed.logits

    def commit(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Commit the nodes of `path` (root first, parents before children).

        Raises `QuickbeamError` where `path` is no path from the root.
        """
        if (
            not path
            or path[0] != 0
            or any(tree.parent[child] != parent for parent, child in pairwise(path))
        ):
            raise QuickbeamError(f"not a path from the root: {list(path)}")
        with torch.inference_mode():
            self.store.commit(path)
            if self._drafted is not None:
                self._held.append(self._drafted[list(path)])
        self.ids.extend(tree.token[node] for node in path)
