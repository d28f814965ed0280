"""What is known of the next token by the last few tokens alone."""

from __future__ import annotations

from typing import NamedTuple

from quickbeam.noise import Array


class Successors(NamedTuple):
    """The likeliest next tokens, the likeliest first, and their probabilities, each `[k]`.

    `known`: by how many of the last tokens they were found.
    """

    tokens: Array
    probs: Array
    known: int
