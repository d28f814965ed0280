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
from typing import Any

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
    def of(texts: Sequence[Sequence[int]], vocab: int) -> NgramTable:
        """Make the table of texts, each token ids below `vocab`."""
        counts = _counts(texts)
        rows = dict[int, dict[int, float]]()  # by context, the probabilities of what follows
        for order, contexts in enumerate(counts, 1):
            for key, following in contexts.items():
                shorter = _without_first(key, order)
                if order > 1 and following == counts[order - 2][shorter]:
                    continue  # the shorter context occurs nowhere else, so it says the same
                length = order - 1
                while length and shorter not in rows:
                    shorter = _without_first(shorter, length)
                    length -= 1
                rows[key] = _likeliest(following, rows.get(shorter, {}))
        keys = sorted(rows)
        ends = np.cumsum([0, *(len(rows[key]) for key in keys)])
        return NgramTable(
            np.array(keys, np.int64),
            ends.astype(np.int32),
            np.array([token for key in keys for token in rows[key]], np.int32),
            np.array([prob for key in keys for prob in rows[key].values()], np.float32),
            vocab,
            sum(map(len, texts)),
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


def _counts(texts: Sequence[Sequence[int]]) -> list[dict[int, dict[int, int]]]:
    """Return how often which tokens followed each context, for contexts of 1 to `ORDER` tokens."""
    counts = [dict[int, dict[int, int]]() for _ in range(ORDER)]
    for text in texts:
        for end in range(1, len(text)):
            for order in range(1, min(ORDER, end) + 1):
                key = context_key(text[end - order : end])
                following = counts[order - 1].setdefault(key, {})
                following[text[end]] = following.get(text[end], 0) + 1
    return counts


def _without_first(key: int, order: int) -> int:
    """Return the key of a context of `order` tokens without the first one."""
    return key & (1 << TOKEN_BITS * (order - 1)) - 1


def _likeliest(following: dict[int, int], shorter: dict[int, float]) -> dict[int, float]:
    """Return the likeliest tokens after a context and their probabilities, the likeliest first.

    `following`: how often each token followed. `shorter`: probabilities after the shorter context.
    """
    total = sum(following.values()) + len(following)
    probs = {token: len(following) / total * prob for token, prob in shorter.items()}
    for token, count in following.items():
        probs[token] = probs.get(token, 0.0) + count / total
    ranked = sorted(probs.items(), key=lambda item: -item[1])[:KEPT]
    return dict([ranked[0], *(item for item in ranked[1:] if item[1] >= LEAST)])
