"""LFM2-VL: a small image is read in its own shape, a large one in tiles and in a small version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.models.vision.base import (
    BILINEAR,
    HALF,
    CutImage,
    ImageFamily,
    closest_grid,
    cut_up,
    patches_of,
    size_in_squares,
)

BEGIN, END, SMALL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


class Lfm2VL(ImageFamily):
    resample = BILINEAR
    mean = std = HALF

    def cut(self, image: Any) -> CutImage:
        side = self._patch * int(self.setting("downsample_factor", 2))  # pixels of a row's square
        tile = int(self.setting("tile_size", 512))
        rows_of_tile = (tile // side) ** 2
        max_rows = self.max_rows(side * side)
        most_of_whole = min(int(self.setting("max_image_tokens", 256)), max(1, max_rows))
        least_of_whole = min(int(self.setting("min_image_tokens", 64)), most_of_whole)
        square = side * side
        rounded = self._rounded(image.size, side)
        width, height = size_in_squares(
            image.size, rounded, side, least_of_whole * square, most_of_whole * square
        )
        whole = self.normalised(self.resized(image, width, height))
        rows_of_whole = (width // side) * (height // side)

        shows_whole = bool(self.setting("use_thumbnail", True))
        least = int(self.setting("min_tiles", 2))
        left = max_rows - rows_of_whole * shows_whole
        most = min(int(self.setting("max_tiles", 10)), left // rows_of_tile)
        splits = self.setting("do_image_splitting", True) and least <= most
        if not splits or not self._is_large(image.size, side):
            return CutImage([whole], f"{BEGIN}{self.mark * rows_of_whole}{END}")

        grid = closest_grid(image, tile * tile, least, most)
        resized = self.resized(image, grid.columns * tile, grid.rows * tile)
        tiles = [self.normalised(one) for one in cut_up(resized, grid)]
        text = BEGIN
        for number in range(grid.tiles):
            row, column = divmod(number, grid.columns)
            text += f"<|img_row_{row + 1}_col_{column + 1}|>{self.mark * rows_of_tile}"
        if shows_whole:
            tiles.append(whole)
            text += f"{SMALL}{self.mark * rows_of_whole}"
        return CutImage(tiles, text + END)

    def features(self, tower: Any, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        patches = [patches_of(tile, self._patch) for tile in tiles]
        most = max(map(len, patches))
        masks = [torch.arange(most, device=one.device) < len(one) for one in patches]
        shapes = [[tile.shape[1] // self._patch, tile.shape[2] // self._patch] for tile in tiles]
        pooled = tower.get_image_features(
            pixel_values=torch.stack([F.pad(one, (0, 0, 0, most - len(one))) for one in patches]),
            spatial_shapes=torch.tensor(shapes, device=patches[0].device),
            pixel_attention_mask=torch.stack(masks).int(),
        ).pooler_output
        return torch.cat([*pooled])

    @property
    def _patch(self) -> int:
        return int(self.setting("encoder_patch_size", 16))

    def _rounded(self, size: tuple[int, int], side: int) -> tuple[int, int]:
        width, height = (max(side, round(length / side) * side) for length in size)
        return width, height

    def _is_large(self, size: tuple[int, int], side: int) -> bool:
        """Whether an image is read in tiles, where the model reads as many rows as it likes."""
        width, height = (max(self._patch, round(length / side) * side) for length in size)
        most = self.setting("max_image_tokens", 256) * self.setting("max_pixels_tolerance", 2.0)
        return bool(width * height > most * side * side)
