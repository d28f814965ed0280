"""Gemma 3: an image in one size, whose rows see one another."""

from __future__ import annotations

from typing import Any

from quickbeam.models.vision.base import BILINEAR, HALF, CutImage, ImageFamily


class Gemma3(ImageFamily):
    resample = BILINEAR
    mean = std = HALF
    rows_see_all = True

    @property
    def placeholder(self) -> str:
        return self.text_of(self.config.boi_token_index)

    def cut(self, image: Any) -> CutImage:
        size = self.setting("size", {"height": 224, "width": 224})
        tile = self.normalised(self.resized(image, int(size["width"]), int(size["height"])))
        rows = self.mark * self.config.mm_tokens_per_image
        end = self.text_of(self.config.eoi_token_index)
        return CutImage([tile], f"\n\n{self.placeholder}{rows}{end}\n\n")
