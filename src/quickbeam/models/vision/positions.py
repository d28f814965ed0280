"""Rotary positions of prompts with images, where these have three numbers each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quickbeam.models.vision.base import Grid

Axes = tuple[int, int, int]


class PlacedGrid(NamedTuple):
    """An image's rows and columns, from the prompt's token `first` on."""

    first: int
    grid: Grid


class ImagePositions:
    """The positions in time, height and width of a text's tokens (M-RoPE, 2409.12191, section 2.1).

    A text's token has one position on all axes. An image's rows have the time at which the image
    begins, and count its rows and columns from there. The text behind an image goes on after the
    largest of these.
    """

    def __init__(self, tokens: int, images: Iterable[PlacedGrid]) -> None:
        """`tokens`: of the prompt. `images`: in order."""
        self._axes = list[Axes]()
        position = 0  # of the next token
        for first, grid in images:
            position = self._add_text(first, position)
            for row in range(grid.rows):
                for column in range(grid.columns):
                    self._axes.append((position, position + row, position + column))
            position += max(grid.rows, grid.columns)
        position = self._add_text(tokens, position)
        self._shift = position - tokens  # of tokens behind the prompt, from their indices

    def _add_text(self, end: int, position: int) -> int:
        """Add the text up to the token `end`, and return the position behind it."""
        count = end - len(self._axes)
        self._axes += [(position + i,) * 3 for i in range(count)]
        return position + count

    def at(self, indices: Sequence[int]) -> list[Axes]:
        """Return the positions of tokens by their indices in the text, answers included."""
        axes, shift = self._axes, self._shift
        return [axes[i] if i < len(axes) else (i + shift,) * 3 for i in indices]
