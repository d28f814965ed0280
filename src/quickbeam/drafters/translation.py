"""The tokens of a drafter with another tokenizer (2502.05202, token-level intersection).

A target's token is read and proposed as the drafter's token of the same bytes. One without such a
token is read as the drafter spells its bytes, and is never proposed. Whatever is mapped wrongly
costs acceptance, as tokens are verified by their equality.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.token_texts import TokenTexts

logger = logging.getLogger(__name__)

LEAST = 0.5  # of the smaller vocabulary's tokens that both must have
Spelling = tuple[bool, bytes]  # whether a token is a special one, and its bytes


class Translation:
    """The drafter's tokens for a target's.

    `shared`: `[s]` int64, the target's tokens that the drafter has, too. `columns`: `[s]`, the ids
    that the drafter has for them. `sizes`: how many tokens the target's logits have, and the
    drafter's. `partner`: from the first to the second. Raises `InvalidInput` where they share too
    few.
    """

    def __init__(self, target: Any, drafter: Any, sizes: tuple[int, int]) -> None:
        self._target, self._drafter, self._spelt = target, drafter, dict[int, list[int]]()
        ours, theirs = _tokens(target, sizes[0]), _tokens(drafter, sizes[1])
        self._texts, self.vocab_size = TokenTexts(target), sizes[0]
        self.partner = {token: theirs[one] for one, token in ours.items() if one in theirs}
        smaller = min(len(ours), len(theirs))
        told = f"{len(self.partner):,} of {smaller:,} tokens"
        if len(self.partner) < LEAST * smaller:
            raise InvalidInput(
                f"the drafter has another tokenizer, and shares {told} with the target "
                f"({len(self.partner) / smaller:.0%}): it takes {LEAST:.0%}; use a drafter whose "
                "tokenizer is more like the target's"
            )
        logger.info("the drafter shares %s with the target", told)
        self.shared = torch.tensor(list(self.partner))
        self.columns = torch.tensor(list(self.partner.values()))

    def read(self, ids: Sequence[int]) -> list[int]:
        """Return a text as the drafter's own tokenizer divides it."""
        text = self._target.decode(list(ids), skip_special_tokens=False)
        return self._drafter.encode(text, add_special_tokens=False) or self.spell(ids)

    def spell(self, ids: Sequence[int]) -> list[int]:
        """Return the drafter's tokens for each of a text's tokens, one after the other."""
        return [one for token in ids for one in self._of(token)]

    def _of(self, token: int) -> list[int]:
        if token in self.partner:
            return [self.partner[token]]
        if token not in self._spelt:
            text = self._texts.text_of(token)
            self._spelt[token] = self._drafter.encode(text, add_special_tokens=False) or [0]
        return self._spelt[token]


def _tokens(tokenizer: Any, size: int) -> dict[Spelling, int]:
    """Return the ids below `size` by what they stand for."""
    texts = TokenTexts(tokenizer)
    special = {i for i, one in tokenizer.added_tokens_decoder.items() if one.special}
    ids = sorted((i for i in tokenizer.get_vocab().values() if i < size), reverse=True)
    spelt = (((i in special, texts.bytes_of(i)), i) for i in ids)
    return {spelling: i for spelling, i in spelt if spelling[1]}
