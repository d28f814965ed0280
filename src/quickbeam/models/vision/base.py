"""The contract of a family of models that read images, and what families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch

MAX_ROWS = 512  # rows of an image, where nothing else is asked for
BILINEAR, BICUBIC = 2, 3  # ways to resize, by Pillow's numbers
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Grid(NamedTuple):
    """How many tiles, or squares, an image is cut into."""

    columns: int
    rows: int

    @property
    def tiles(self) -> int:
        return self.columns * self.rows


class CutImage(NamedTuple):
    """An image as a model reads it.

    `tiles`: what the vision tower reads, `[3, height, width]` float32 each. `text`: what stands for
    the image in the prompt; each `ImageFamily.mark` in it is replaced by one of the tower's rows.
    `grid`: of these rows, where their positions are of three numbers.
    """

    tiles: Sequence[torch.Tensor]
    text: str
    grid: Grid | None = None


class ImageFamily(ABC):
    """How models of a family read an image.

    `config`: the model's, of transformers. `settings`: of its image processor. `text_of`: from a
    token id to text. `max_pixels`: how many of an image's pixels are read at most, as far as the
    model can read fewer; None for those of `MAX_ROWS` rows. `mark`: the token that an image's rows
    stand for, as text. `rows_see_all`: whether an image's rows see those behind them, too.
    `rows_token`: as `token` of `ImageRows`.

    Raises `InvalidInput` for a model whose configuration lacks what images need (`prepare`).
    """

    resample = BICUBIC
    mean: Sequence[float] = CLIP_MEAN
    std: Sequence[float] = CLIP_STD
    rows_see_all = False
    rows_token: int | None = None

    def __init__(
        self,
        config: Any,
        settings: Mapping[str, Any],
        text_of: Callable[[int], str],
        max_pixels: int | None,
    ) -> None:
        self.config = config
        self.text_of = text_of
        self.mark = text_of(config.image_token_id)
        self._settings = settings
        self._max_pixels = max_pixels
        self.prepare()

    def prepare(self) -> None:  # noqa: B027
        """Read what a family needs of the model's configuration. Raises `InvalidInput`."""

    @property
    def placeholder(self) -> str:
        """What chat templates write for an image."""
        return self.mark

    @abstractmethod
    def cut(self, image: Any) -> CutImage:
        """Return what the model reads of an image, an RGB one of Pillow's."""

    def features(self, tower: Any, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tower's rows of an image's tiles, as `ImageRows` has them.

        `tower`: transformers' model. `tiles`: in its number format, on its device.
        """
        pooled = tower.get_image_features(pixel_values=torch.stack([*tiles])).pooler_output
        return torch.cat([*pooled])

    def setting(self, name: str, default: Any) -> Any:
        """Return a setting of the image processor; `default` where it has none."""
        value = self._settings.get(name)
        return default if value is None else value

    def max_rows(self, pixels_of_row: int) -> int:
        """Return how many rows an image may have, where each is made from so many pixels."""
        return MAX_ROWS if self._max_pixels is None else self._max_pixels // pixels_of_row

    def resized(self, image: Any, width: int, height: int) -> Any:
        """Return the image in another size."""
        return image.resize((width, height), self.setting("resample", self.resample))

    def normalised(self, image: Any) -> torch.Tensor:
        """Return an image's pixels less their mean, by their deviation, `[3, height, width]`."""
        mean = torch.tensor(self.setting("image_mean", self.mean))
        std = torch.tensor(self.setting("image_std", self.std))
        return (self.scaled(image) - mean[:, None, None]) / std[:, None, None]

    def scaled(self, image: Any) -> torch.Tensor:
        """Return an image's pixels, most often from 0 to 1, `[3, height, width]` float32."""
        pixels = np.asarray(image, np.float64) * self.setting("rescale_factor", 1 / 255)
        return torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1).copy())


def size_in_squares(
    size: tuple[int, int], rounded: tuple[int, int], side: int, least: int, most: int
) -> tuple[int, int]:
    """Return the width and height, multiples of `side`, in which an image of `size` is read.

    These are `rounded`, or those nearest to the image's shape with `least` to `most` pixels.
    """
    width, height = rounded
    pixels = size[0] * size[1]
    if width * height > most:
        shrink = sqrt(pixels / most)
        width, height = (max(side, floor(length / shrink / side) * side) for length in size)
    elif width * height < least:
        stretch = sqrt(least / pixels)
        width, height = (ceil(length * stretch / side) * side for length in size)
    return width, height


def patches_of(tile: torch.Tensor, side: int) -> torch.Tensor:
    """Return the patches of a tile `[3, height, width]`, row by row: `[patches, side² * 3]`."""
    channels, height, width = tile.shape
    patches = tile.view(channels, height // side, side, width // side, side)
    return patches.permute(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


def cut_up(image: Any, grid: Grid) -> list[Any]:
    """Return the tiles of a grid that an image is cut into, row by row."""
    width, height = image.width // grid.columns, image.height // grid.rows
    tiles = list[Any]()
    for row in range(grid.rows):
        for column in range(grid.columns):
            left, top = column * width, row * height
            tiles.append(image.crop((left, top, left + width, top + height)))
    return tiles


def closest_grid(image: Any, tile_pixels: int, least: int, most: int) -> Grid:
    """Return the grid of `least` to `most` tiles whose ratio of sides is closest to the image's.

    Of two that are equally close, the larger one is taken if the image fills half of its tiles.
    """
    grids = [Grid(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    allowed = [grid for grid in grids if least <= grid.tiles <= most]
    ratio, pixels = image.width / image.height, image.width * image.height
    best, smallest_difference = Grid(1, 1), float("inf")
    for grid in sorted(allowed, key=lambda grid: grid.tiles):
        difference = abs(ratio - grid.columns / grid.rows)
        fills = pixels > 0.5 * tile_pixels * grid.tiles
        if difference < smallest_difference or (difference == smallest_difference and fills):
            best, smallest_difference = grid, difference
    return best
