"""Qwen2-VL to Qwen3.5: an image in its own shape, and positions of three numbers (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quickbeam.errors import InvalidInput, some_of
from quickbeam.models.vision.base import CutImage, Grid, ImageFamily, size_in_squares


class Qwen2VL(ImageFamily):
    def prepare(self) -> None:
        rope = self.config.get_text_config().rope_parameters
        needed = {"mrope_section"}
        if self.config.model_type.startswith("qwen3"):
            needed.add("mrope_interleaved")
        if missing := needed - rope.keys():
            raise InvalidInput(
                f"its rope_parameters lack {some_of(missing)}, by which images have their "
                "positions: give text alone, or correct its config.json"
            )

    def cut(self, image: Any) -> CutImage:
        side = self._patch * self._merged  # pixels of a row's square
        width, height = self._size(image.size, side)
        grid = Grid(width // side, height // side)
        tile = self.normalised(self.resized(image, width, height))
        return CutImage([tile], self.mark * grid.tiles, grid)

    def features(self, tower: Any, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        (tile,) = tiles
        channels, height, width = tile.shape
        patch, merged = self._patch, self._merged
        rows, columns = height // patch, width // patch
        # squares of patches, each of them row by row, as one of their rows is made from a square
        patches = tile.view(
            channels, rows // merged, merged, patch, columns // merged, merged, patch
        ).permute(1, 4, 2, 5, 0, 3, 6)
        frames = int(self.setting("temporal_patch_size", 2))  # which a still image is repeated for
        patches = patches[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, frames, -1, -1)
        output = tower.get_image_features(
            pixel_values=patches.reshape(rows * columns, -1),
            image_grid_thw=torch.tensor([[1, rows, columns]], device=tile.device),
        )
        (features,) = output.pooler_output
        added = getattr(output, "deepstack_features", None) or ()  # Qwen3-VL alone has them
        return torch.cat([features, *(of_layer for (of_layer,) in added)], -1)

    @property
    def _patch(self) -> int:
        return int(self.setting("patch_size", 14))

    @property
    def _merged(self) -> int:
        return int(self.setting("merge_size", 2))

    def _size(self, size: tuple[int, int], side: int) -> tuple[int, int]:
        """Return the width and height, multiples of `side`, in which an image is read."""
        limits = self.setting("size", {})
        least = self.setting("min_pixels", limits.get("shortest_edge", 56 * 56))
        most = self.setting("max_pixels", limits.get("longest_edge", 28 * 28 * 1280))
        most = min(most, max(1, self.max_rows(side * side)) * side * side)
        least = max(1, min(least, most))
        width, height = (round(length / side) * side for length in size)
        return size_in_squares(size, (width, height), side, least, most)
