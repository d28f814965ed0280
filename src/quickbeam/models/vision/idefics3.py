"""Idefics3 and SmolVLM: an image is cut into square tiles, and read whole behind them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch

from quickbeam.models.vision.base import HALF, CutImage, Grid, ImageFamily, cut_up

LANCZOS = 1
LONGEST = 4096  # pixels of a side
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(ImageFamily):
    resample = LANCZOS
    mean = std = HALF

    def cut(self, image: Any) -> CutImage:
        tile = int(self.setting("max_image_size", {"longest_edge": 364})["longest_edge"])
        longest = int(self.setting("size", {"longest_edge": 4 * 364})["longest_edge"])
        patches = (tile // self.config.vision_config.patch_size) ** 2
        rows_of_tile = patches // self.config.scale_factor**2
        most_tiles = self.max_rows(tile * tile // rows_of_tile) // rows_of_tile

        splits = self.setting("do_image_splitting", True)
        # the largest size whose tiles, and the whole image, have few enough rows
        smaller = range((longest - 1) // tile * tile, 0, -tile)
        for side in [longest, *smaller] if splits else [longest]:
            resized = self._scaled(image, side)
            grid = _grid_of(resized, tile)
            if grid.tiles < most_tiles:
                break
        tiles = list[Any]()
        if splits and grid.tiles > 1:
            resized = self.resized(resized, grid.columns * tile, grid.rows * tile)
            tiles = cut_up(resized, grid)
        tiles.append(self.resized(resized, tile, tile))

        rows = self.mark * rows_of_tile
        text = "" if len(tiles) == 1 else self._text_of_tiles(grid, rows)
        text += f"{AROUND}{WHOLE}{rows}{AROUND}"
        return CutImage([self.normalised(one) for one in tiles], text)

    def features(self, tower: Any, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        pixels = torch.stack([*tiles])[None]
        return torch.cat([*tower.get_image_features(pixel_values=pixels).pooler_output])

    def _scaled(self, image: Any, longest: int) -> Any:
        """Return the image with a longer side of `longest` pixels, and an even shorter one."""
        width, height = image.size
        if width >= height:
            size = longest, _even(int(longest / (width / height)))
        else:
            size = _even(int(longest * (width / height))), longest
        width, height = max(1, size[0]), max(1, size[1])
        if max(width, height) > LONGEST:
            ratio = width / height
            if width >= height:
                width, height = LONGEST, int(LONGEST / ratio)
            else:
                width, height = int(LONGEST * ratio), LONGEST
        return self.resized(image, max(1, width), max(1, height))

    @staticmethod
    def _text_of_tiles(grid: Grid, rows: str) -> str:
        text = ""
        for row in range(1, grid.rows + 1):
            for column in range(1, grid.columns + 1):
                text += f"{AROUND}<row_{row}_col_{column}>{rows}"
            text += "\n"
        return text + "\n"


def _even(size: int) -> int:
    return size + size % 2


def _grid_of(image: Any, tile: int) -> Grid:
    """Return the grid of tiles that covers an image."""
    width, height = image.size
    ratio = width / height
    if width >= height:
        columns = ceil(width / tile)
        return Grid(columns, ceil(int(columns * tile / ratio) / tile))
    rows = ceil(height / tile)
    return Grid(ceil(int(rows * tile * ratio) / tile), rows)
