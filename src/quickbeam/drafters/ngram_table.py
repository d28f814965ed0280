"""A table of what follows one to three tokens in text that a model wrote itself.

It drafts without a call and for any question, where the n-grams of the text so far only know what
the text repeats. Probabilities are those of an n-gram language model with the interpolation of
Witten and Bell (1991): where a context was followed n times, by u different tokens, a token that
followed c times has the probability (c + u q) / (n + u), with the probability q that it has after
the context without its first token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quickbeam.drafters.successors import Successors
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.hub import TABLE

KIND = "quickbeam n-grams"
ORDER = 3  # tokens of the longest contexts
KEPT = 8  # tokens that are kept after a context, of at least this probability:
LEAST = 0.02
TOKEN_BITS = 21  # of a token in a key
CONTEXTS = 1 << 16  # whose rows are made at once, for the sake of memory

Ints = npt.NDArray[np.int64]


class NgramTable:
    """What follows the contexts of one to `ORDER` tokens.

    - `keys`: of the contexts, `[c]` int64, in rising order (`context_key`).
    - `starts`: where the tokens after each begin, `[c + 1]` int32.
    - `tokens`, `probs`: all of them, `[n]` int32 and float32, the likeliest of a context first.
    - `vocab`: how many tokens the vocabulary has.
    - `text`: how many tokens of text it was made from.
    """

    def __init__(
        self,
        keys: Ints,
        starts: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        probs: npt.NDArray[np.float32],
        vocab: int,
        text: int,
    ) -> None:
        self._keys, self._starts = keys, starts
        self._tokens, self._probs = tokens, probs
        self.vocab = vocab
        self.text = text

    @staticmethod
    def of(texts: Sequence[npt.ArrayLike], vocab: int) -> NgramTable:
        """Make the table of texts, each token ids below `vocab`."""
        arrays = [np.zeros(0, np.int64), *(np.asarray(text, np.int64) for text in texts)]
        text = np.concatenate(arrays)
        position = np.concatenate([np.arange(len(array)) for array in arrays])
        rows = Rows.of_empty_context()
        # of the shorter contexts, at first the empty one: keys, how often they occur, their rows
        keys = np.zeros(1, np.int64)
        totals = np.full(1, -1)
        row_of = np.zeros(1, np.int64)
        for order in range(1, ORDER + 1):
            followers = Followers.of(text, position, order)
            shorter = keys.searchsorted(_without_first(followers.keys, order))
            # a context that occurs as often as the shorter one says the same
            differs = followers.totals != totals[shorter]
            parents = row_of[shorter]
            row_of = parents.copy()
            row_of[differs] = len(rows.keys) + np.arange(differs.sum())
            rows = rows.with_contexts(followers, np.flatnonzero(differs), parents[differs])
            keys = followers.keys
            totals = followers.totals
        in_order = np.argsort(rows.keys)[1:]  # without the empty context
        sizes = rows.sizes[in_order]
        entries = _entries(rows.starts[in_order], sizes)
        return NgramTable(
            rows.keys[in_order],
            np.append(0, sizes.cumsum()).astype(np.int32),
            rows.tokens[entries].astype(np.int32),
            rows.probs[entries].astype(np.float32),
            vocab,
            len(text),
        )

    def after(self, ids: Sequence[int]) -> Successors | None:
        """Return what follows the longest known context at the end of a text; None without one.

        `ids`: the last `ORDER` tokens of the text, or fewer.
        """
        for order in range(len(ids), 0, -1):
            key = context_key(ids[-order:])
            index = int(self._keys.searchsorted(key))
            if index < len(self._keys) and self._keys[index] == key:
                entries = slice(self._starts[index], self._starts[index + 1])
                return Successors(self._tokens[entries], self._probs[entries], order)
        return None

    def save(self, folder: Path) -> None:
        """Write the table into a folder, completely or not at all.

        Raises `QuickbeamError` if that fails.
        """
        arrays: dict[str, npt.NDArray[Any]] = {
            "keys": self._keys,
            "starts": self._starts,
            "tokens": self._tokens,
            "probs": self._probs,
        }
        metadata = {"kind": KIND, "vocab": str(self.vocab), "text": str(self.text)}
        part = folder / f"{TABLE}.part"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(arrays, part, metadata)
            os.replace(part, folder / TABLE)
        except (OSError, SafetensorError) as error:
            raise QuickbeamError(f"{folder / TABLE} can't be written: {error}") from error
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    @staticmethod
    def load(folder: Path, vocab: int) -> NgramTable:
        """Read the table in a folder.

        Raises `InvalidInput` for a damaged one, and for one of a vocabulary of another size than
        `vocab`.
        """
        path = folder / TABLE
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != KIND:
                    raise ValueError("its metadata don't say so")
                names = ("keys", "starts", "tokens", "probs")
                keys, starts, tokens, probs = (file.get_tensor(name) for name in names)
                table = NgramTable(
                    keys, starts, tokens, probs, int(metadata["vocab"]), int(metadata["text"])
                )
                table._check()
        except Exception as error:  # of any kind, by what the file holds
            raise InvalidInput(f"{path} is no table of n-grams ({error}): remove it") from error
        if table.vocab != vocab:
            raise InvalidInput(
                f"{path} is for a vocabulary of {table.vocab} tokens, and this model has {vocab}: "
                "make one with quickbeam train --only text"
            )
        return table

    def _check(self) -> None:
        """Raise `ValueError` where looking something up could fail."""
        types = [array.dtype.name for array in (self._keys, self._starts, self._tokens)]
        if types != ["int64", "int32", "int32"] or self._probs.dtype != np.float32:
            raise ValueError("its arrays are of other types")
        arrays = (self._keys, self._starts, self._tokens, self._probs)
        fits = all(array.ndim == 1 for array in arrays)
        fits = fits and len(self._starts) == len(self._keys) + 1
        fits = fits and len(self._tokens) == len(self._probs) == self._starts[-1]
        counts = np.diff(self._starts.astype(np.int64))  # of int32, a difference may overflow
        if not fits or self._starts[0] or ((counts < 1) | (counts > KEPT)).any():
            raise ValueError("its arrays do not fit together")
        if len(self._tokens) and not 0 <= self._tokens.min() <= self._tokens.max() < self.vocab:
            raise ValueError("it has tokens beyond its vocabulary")
        if not ((self._probs > 0) & (self._probs <= 1)).all():
            raise ValueError("its probabilities are none")


def context_key(ids: Sequence[int]) -> int:
    """Return the key of a context of one to `ORDER` tokens."""
    key = 0
    for token in ids:
        key = key << TOKEN_BITS | token + 1
    return key


class Followers(NamedTuple):
    """What followed the contexts of one length in a text.

    `keys`: of the contexts, `[c]`, in rising order. `totals`: how often each occurs, `[c]`.
    `starts`, `sizes`: where the different tokens that followed each begin, and how many they are,
    `[c]`. `tokens`, `counts`: these tokens, and how often each followed, `[n]`.
    """

    keys: Ints
    totals: Ints
    starts: Ints
    sizes: Ints
    tokens: Ints
    counts: Ints

    @staticmethod
    def of(text: Ints, position: Ints, order: int) -> Followers:
        """Count what followed contexts of `order` tokens.

        `text`: all texts, one behind the other. `position`: of each token in its own text.
        """
        ends = np.flatnonzero(position >= order)
        keys = np.zeros(len(ends), np.int64)
        for before in range(order, 0, -1):
            keys = keys << TOKEN_BITS | text[ends - before] + 1
        tokens = text[ends]
        in_order = np.lexsort((tokens, keys))
        keys = keys[in_order]
        tokens = tokens[in_order]
        new_key = np.diff(keys, prepend=-1) != 0
        first = np.flatnonzero(new_key | (np.diff(tokens, prepend=-1) != 0))
        starts = np.flatnonzero(new_key[first])
        contexts = first[starts]
        return Followers(
            keys=keys[contexts],
            totals=np.diff(contexts, append=len(keys)),
            starts=starts,
            sizes=np.diff(starts, append=len(first)),
            tokens=tokens[first],
            counts=np.diff(first, append=len(keys)),
        )


class Rows(NamedTuple):
    """The likeliest tokens after contexts, by row.

    `keys`: of the contexts, `[r]`. `starts`, `sizes`: where the tokens of each begin, and how many
    they are, `[r]`. `tokens`, `probs`: these tokens, the likeliest of a row first, `[n]`.
    """

    keys: Ints
    starts: Ints
    sizes: Ints
    tokens: Ints
    probs: npt.NDArray[np.float64]

    @staticmethod
    def of_empty_context() -> Rows:
        """Return one row without any tokens."""
        nothing = np.zeros(0, np.int64)
        zero = np.zeros(1, np.int64)
        return Rows(zero, zero, zero, nothing, np.zeros(0))

    def with_contexts(self, followers: Followers, contexts: Ints, parents: Ints) -> Rows:
        """Return these rows and, behind them, those of some of the contexts of `followers`.

        `parents`: the rows of their shorter contexts.
        """
        sizes, tokens, probs = [self.sizes], [self.tokens], [self.probs]
        for begin in range(0, len(contexts), CONTEXTS):
            part = slice(begin, begin + CONTEXTS)
            row, row_tokens, row_probs = self._likeliest(followers, contexts[part], parents[part])
            sizes.append(np.bincount(row, minlength=len(contexts[part])))
            tokens.append(row_tokens)
            probs.append(row_probs)
        all_sizes = np.concatenate(sizes)
        return Rows(
            keys=np.append(self.keys, followers.keys[contexts]),
            starts=all_sizes.cumsum() - all_sizes,
            sizes=all_sizes,
            tokens=np.concatenate(tokens),
            probs=np.concatenate(probs),
        )

    def _likeliest(
        self, followers: Followers, contexts: Ints, parents: Ints
    ) -> tuple[Ints, Ints, npt.NDArray[np.float64]]:
        """Return the likeliest tokens after contexts, context by context, the likeliest first.

        Of each `[n]`: which of the contexts it is of, the token, and its probability. Of tokens
        that are as likely, that with the smaller id comes first.
        """
        # what the counts say, and what the parents say
        different = followers.sizes[contexts]
        totals = followers.totals[contexts] + different
        counted = _entries(followers.starts[contexts], different)
        inherited = _entries(self.starts[parents], self.sizes[parents])
        row = np.arange(len(contexts))
        counted_row = row.repeat(different)
        inherited_row = row.repeat(self.sizes[parents])
        rows = np.append(counted_row, inherited_row)
        tokens = np.append(followers.tokens[counted], self.tokens[inherited])
        probs = np.append(
            followers.counts[counted] / totals[counted_row],
            (different / totals)[inherited_row] * self.probs[inherited],
        )
        # the sum of both
        pairs, pair_of = np.unique(rows << TOKEN_BITS | tokens, return_inverse=True)
        probs = np.bincount(pair_of, probs, len(pairs))
        rows = pairs >> TOKEN_BITS
        # those of them that are kept
        in_order = np.lexsort((-probs, rows))
        rows = rows[in_order]
        probs = probs[in_order]
        rank = np.arange(len(rows)) - rows.searchsorted(rows)
        kept = (rank == 0) | ((rank < KEPT) & (probs >= LEAST))
        tokens = pairs[in_order] & (1 << TOKEN_BITS) - 1
        return rows[kept], tokens[kept], probs[kept]


def _entries(starts: Ints, sizes: Ints) -> Ints:
    """Return the indices of all entries that begin at `starts`, as many each as `sizes` says."""
    before = sizes.cumsum() - sizes
    return (starts - before).repeat(sizes) + np.arange(sizes.sum())


def _without_first(keys: Ints, order: int) -> Ints:
    """Return the keys of contexts of `order` tokens without the first one."""
    return keys & (1 << TOKEN_BITS * (order - 1)) - 1
