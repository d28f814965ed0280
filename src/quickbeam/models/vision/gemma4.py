"""Gemma 4: an image in its own shape, of at most as many rows as the model was trained for."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, sqrt
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.vision.base import CutImage, Grid, ImageFamily, patches_of

TRAINED_ROWS = (70, 140, 280, 560, 1120)  # of an image, at most


class Gemma4(ImageFamily):
    mean = (0.0, 0.0, 0.0)
    std = (1.0, 1.0, 1.0)

    def prepare(self) -> None:
        if self.config.vision_config is None:
            raise InvalidInput("its config.json has no vision_config: give text alone")
        text = self.config.get_text_config()
        self.rows_see_all = text.use_bidirectional_attention == "vision"
        if text.hidden_size_per_layer_input:
            self.rows_token = _padding_token(text)

    def cut(self, image: Any) -> CutImage:
        side = self._patch * int(self.setting("pooling_kernel_size", 3))  # pixels of a row's square
        grid = self._grid(image.size, side)
        resized = self.resized(image, grid.columns * side, grid.rows * side)
        normalises = self.setting("do_normalize", False)
        tile = self.normalised(resized) if normalises else self.scaled(resized)
        begin = self.text_of(self.config.boi_token_id)
        end = self.text_of(self.config.eoi_token_id)
        return CutImage([tile], f"{begin}{self.mark * grid.tiles}{end}")

    def features(self, tower: Any, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        (tile,) = tiles
        patch = self._patch
        rows = torch.arange(tile.shape[1] // patch, device=tile.device)
        columns = torch.arange(tile.shape[2] // patch, device=tile.device)
        positions = torch.cartesian_prod(rows, columns).flip(1)  # the column first
        pooled = tower.get_image_features(
            pixel_values=patches_of(tile, patch)[None],
            image_position_ids=positions[None],
        ).pooler_output
        return torch.cat([*pooled])

    @property
    def _patch(self) -> int:
        return int(self.setting("patch_size", 16))

    def _grid(self, size: tuple[int, int], side: int) -> Grid:
        """Return the largest grid of squares that is near to the image's shape."""
        width, height = size
        most = self._most_rows(side * side)
        factor = sqrt(most * side * side / (width * height))
        columns = floor(factor * width / side)
        rows = floor(factor * height / side)
        if rows == 0:
            return Grid(min(width // height, most), 1)
        if columns == 0:
            return Grid(1, min(height // width, most))
        return Grid(columns, rows)

    def _most_rows(self, pixels_of_row: int) -> int:
        most = self.max_rows(pixels_of_row)
        if self._max_pixels is None:
            most = min(most, int(self.setting("max_soft_tokens", 280)))
        return max((rows for rows in TRAINED_ROWS if rows <= most), default=TRAINED_ROWS[0])


def _padding_token(text: Any) -> int:
    """Return the padding token of the language part. Raises `InvalidInput` where it has none."""
    token = text.pad_token_id
    if not isinstance(token, int) or not 0 <= token < text.vocab_size:
        raise InvalidInput(
            f"its config.json has the pad_token_id {token}, whose per-layer inputs an image's rows "
            f"have: it must be 0 to {text.vocab_size - 1}; give text alone"
        )
    return token
