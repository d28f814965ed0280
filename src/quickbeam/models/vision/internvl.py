"""InternVL: an image is resized to a grid of tiles, and read whole behind them."""

from __future__ import annotations

from typing import Any

from quickbeam.models.vision.base import CutImage, ImageFamily, closest_grid, cut_up


class InternVL(ImageFamily):
    def cut(self, image: Any) -> CutImage:
        size = self.setting("size", {"height": 384, "width": 384})
        width, height = int(size["width"]), int(size["height"])
        patch_height, patch_width = self.config.vision_config.patch_size
        patches = (width // patch_width) * (height // patch_height)
        rows_of_tile = int(patches * self.config.downsample_ratio**2)

        # of several tiles, the whole image comes behind them
        allowed = self.max_rows(width * height // rows_of_tile) // rows_of_tile
        most = max(1, min(int(self.setting("max_patches", 12)), allowed - 1))
        least = min(int(self.setting("min_patches", 1)), most)
        grid = closest_grid(image, width * height, least, most)
        resized = self.resized(image, grid.columns * width, grid.rows * height)
        tiles = cut_up(resized, grid)
        if len(tiles) > 1:
            tiles.append(self.resized(image, width, height))
        text = f"<img>{self.mark * (rows_of_tile * len(tiles))}</img>"
        return CutImage([self.normalised(tile) for tile in tiles], text)
