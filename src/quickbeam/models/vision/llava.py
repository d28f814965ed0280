"""LLaVA: the middle square of an image in one size, whatever its own."""

from __future__ import annotations

from typing import Any

from quickbeam.errors import NOT_READ, InvalidInput
from quickbeam.models.vision.base import CutImage, ImageFamily
from quickbeam.models.vision.image import pillow

TOWERS = ("clip_vision_model", "siglip_vision_model")
LONGEST = 4096  # pixels of a side of the square around an image


class Llava(ImageFamily):
    def cut(self, image: Any) -> CutImage:
        tower = self.config.vision_config.model_type
        if tower not in TOWERS:
            raise InvalidInput(
                f"images of a LLaVA whose vision tower is {tower} are not read; those of "
                f"{', '.join(TOWERS)} are: {NOT_READ}"
            )
        if self.setting("do_pad", False):
            image = self._on_square(image)
        if self.setting("do_resize", True):
            image = self._resized(image)
        if self.setting("do_center_crop", True):
            image = _middle(image, self.setting("crop_size", {"height": 224, "width": 224}))
        patch = self.config.vision_config.patch_size
        rows = (image.width // patch) * (image.height // patch)
        if tower == TOWERS[0] and self.config.vision_feature_select_strategy == "full":
            rows += 1  # CLIP has one of no patch
        return CutImage([self.normalised(image)], self.mark * rows)

    def _on_square(self, image: Any) -> Any:
        """Return the image in the middle of a square of the mean colour, of at most `LONGEST`."""
        image = image.copy()
        image.thumbnail((LONGEST, LONGEST))
        side = max(image.size)
        colour = tuple(int(value * 255) for value in self.setting("image_mean", self.mean))
        corner = (side - image.width) // 2, (side - image.height) // 2
        pil_image, _ = pillow()
        square = pil_image.new("RGB", (side, side), colour)
        square.paste(image, corner)
        return square

    def _resized(self, image: Any) -> Any:
        size = self.setting("size", {"shortest_edge": 224})
        if "shortest_edge" not in size:
            return self.resized(image, int(size["width"]), int(size["height"]))
        shortest = int(size["shortest_edge"])
        longest = int(shortest * max(image.size) / min(image.size))
        if image.width <= image.height:
            return self.resized(image, shortest, longest)
        return self.resized(image, longest, shortest)


def _middle(image: Any, size: dict[str, int]) -> Any:
    """Return the middle of an image; black around it where it is smaller."""
    width, height = int(size["width"]), int(size["height"])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
