"""Reads the images of a prompt: text and images become token ids, and rows for some of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.base import ImageRows
from quickbeam.models.vision.base import CutImage, Grid, ImageFamily
from quickbeam.models.vision.gemma3 import Gemma3
from quickbeam.models.vision.gemma4 import Gemma4
from quickbeam.models.vision.idefics3 import Idefics3
from quickbeam.models.vision.image import PromptImage, check_total
from quickbeam.models.vision.internvl import InternVL
from quickbeam.models.vision.lfm2_vl import Lfm2VL
from quickbeam.models.vision.llava import Llava
from quickbeam.models.vision.positions import ImagePositions, PlacedGrid
from quickbeam.models.vision.qwen2_vl import Qwen2VL
from quickbeam.models.vision.tower import load_tower
from quickbeam.models.weights.checkpoint import read_json

IMAGE_FAMILIES: dict[str, type[ImageFamily]] = {  # by the whole model's model_type
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "idefics3": Idefics3,
    "internvl": InternVL,
    "lfm2_vl": Lfm2VL,
    "llava": Llava,
    "qwen2_5_vl": Qwen2VL,
    "qwen2_vl": Qwen2VL,
    "qwen3_5": Qwen2VL,
    "qwen3_5_moe": Qwen2VL,
    "qwen3_vl": Qwen2VL,
    "qwen3_vl_moe": Qwen2VL,
    "smolvlm": Idefics3,
}
# whose images PyTorch's passes don't read
NATIVE_ALONE = (
    *("gemma3", "gemma4", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_vl", "qwen3_vl_moe"),
)
CACHED_BYTES = 64 << 20  # of rows that are kept for images that come again
KEY_BITS = 32  # of a row's index in the key of an image


class PromptIds(list[int]):
    """The token ids of a prompt, and the `images` whose rows stand in place of some of them.

    `positions`: of the tokens, where those of images have three numbers.
    """

    def __init__(
        self,
        ids: Sequence[int],
        images: Sequence[ImageRows],
        positions: ImagePositions | None = None,
    ) -> None:
        super().__init__(ids)
        self.images = images
        self.positions = positions


class ReadImage(NamedTuple):
    """What stands for an image in the prompt's text, and its rows, as `ImageRows` has them.

    `grid`: as of `CutImage`.
    """

    text: str
    rows: torch.Tensor
    grid: Grid | None


class ImageReader:
    """Reads images for one model.

    `folder`: the checkpoint's. `kind`: the whole model's `model_type`, one of `IMAGE_FAMILIES`.
    `width`: how many elements the language part reads of an image's row. `native`: whether the
    native kernels run the model. `max_pixels`: as of `ImageFamily`.

    transformers and the weights of the vision tower are loaded for the first image. Each image is a
    call of the tower of its own, so its rows have the same bits whatever else is read. Calls from
    several threads wait for one another.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        width: int,
        tokenizer: Any,
        dtype: torch.dtype,
        device: torch.device,
        native: bool,
        max_pixels: int | None = None,
    ) -> None:
        self._folder, self._kind, self._width = folder, kind, width
        self._tokenizer = tokenizer
        self._dtype, self._device, self._native = dtype, device, native
        self.max_pixels = max_pixels
        self._lock = threading.RLock()
        self._family: ImageFamily | None = None
        self._tower: Any = None
        self._cached = OrderedDict[bytes, ReadImage]()  # by digest, least recently used first

    @property
    def placeholder(self) -> str:
        """What stands in a text for each image."""
        return self._load().placeholder

    def read(self, text: str, images: Sequence[PromptImage], most: int) -> PromptIds:
        """Return the ids of a prompt whose text has a `placeholder` for each of the `images`.

        `most`: how many ids there may be. Raises `InvalidInput` for more, and for a text with
        another number of placeholders.
        """
        check_total(images)
        if len(images) > most:
            raise _too_many(len(images), most)
        with self._lock:
            between = self._texts_between(text, len(images))
            known = self._cut_all(images, most)
            texts = [between[0]]
            for image, following in zip(images, between[1:], strict=True):
                texts += [known[image.digest].text, following]
            ids = self._tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
            if len(ids) > most:
                raise InvalidInput(
                    f"a prompt of {len(ids)} tokens, images included: at most {most} fit; shorten "
                    "it, or give fewer images"
                )
            read = dict[bytes, ReadImage]()
            for digest, cut in known.items():
                read[digest] = cut if isinstance(cut, ReadImage) else self._run_tower(cut)
                self._keep(digest, read[digest])
            return self._place(ids, [read[image.digest] for image in images], images)

    def _texts_between(self, text: str, count: int) -> list[str]:
        """Return the texts before, between and behind `count` placeholders."""
        family = self._load()
        texts = text.split(family.placeholder)
        marked = any(family.mark in each for each in texts)
        if len(texts) != count + 1 or marked:
            raise InvalidInput(
                f"{count} images, and {len(texts) - 1} times {family.placeholder} in the prompt: "
                f"leave {family.mark if marked else 'it'} out of the text, and give images in the "
                "user's messages alone"
            )
        return texts

    def _cut_all(
        self, images: Sequence[PromptImage], most: int
    ) -> dict[bytes, CutImage | ReadImage]:
        """Return the images by digest: cut, or read earlier. They may have `most` rows."""
        family = self._load()
        known = dict[bytes, CutImage | ReadImage]()
        rows = 0
        for number, image in enumerate(images, 1):
            if image.digest not in known:
                known[image.digest] = self._cached.get(image.digest) or self._cut(image, number)
            rows += known[image.digest].text.count(family.mark)
            if rows > most:  # before further images are decoded
                raise _too_many(len(images), most)
        return known

    def _load(self) -> ImageFamily:
        if not self._native and self._kind in NATIVE_ALONE:
            raise InvalidInput(
                f"images of {self._kind} are read where the native kernels run the model alone: "
                "leave them out, or run it on a CPU in bfloat16 or float32"
            )
        with self._lock:
            if self._family is None:
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
                family = IMAGE_FAMILIES[self._kind](
                    config, processor_settings(self._folder), self._text_of, self.max_pixels
                )
                self._tower = load_tower(self._folder, config, self._dtype, self._device)
                self._family = family
            return self._family

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _cut(self, image: PromptImage, number: int) -> CutImage:
        """Return image `number` of a prompt as the model reads it. Raises `InvalidInput`."""
        assert self._family is not None
        try:
            pixels = image.decode()
        except InvalidInput as error:
            raise InvalidInput(f"image {number} of the prompt: {error}") from error
        return self._family.cut(pixels)

    @torch.inference_mode()
    def _run_tower(self, cut: CutImage) -> ReadImage:
        assert self._family is not None
        tiles = [tile.to(self._device, self._dtype) for tile in cut.tiles]
        rows = self._family.features(self._tower, tiles).cpu().contiguous()
        if rows.shape[1] != self._width:
            raise InvalidInput(
                f"rows of images have {rows.shape[1]} elements, and the language part reads "
                f"{self._width}: its config.json is of another model"
            )
        return ReadImage(cut.text, rows, cut.grid)

    def _keep(self, digest: bytes, read: ReadImage) -> None:
        """Keep an image that was read last, and drop those that were read first."""
        self._cached[digest] = read
        self._cached.move_to_end(digest)
        while sum(kept.rows.nbytes for kept in self._cached.values()) > CACHED_BYTES:
            self._cached.popitem(last=False)

    def _place(
        self, ids: Sequence[int], read: Sequence[ReadImage], images: Sequence[PromptImage]
    ) -> PromptIds:
        """Return a prompt with the rows of its images. `read`: of each image."""
        assert self._family is not None
        token = self._family.config.image_token_id
        indices = [index for index, each in enumerate(ids) if each == token]
        rows = sum(len(each.rows) for each in read)
        if len(indices) != rows:
            raise InvalidInput(
                f"the images have {rows} rows, and the prompt {len(indices)} tokens for them: the "
                "files of the image processor, tokenizer and model are of different models"
            )
        placed, grids = list[ImageRows](), list[PlacedGrid]()
        first = 0  # the first of an image's rows among those of all images
        for image, each in zip(images, read, strict=True):
            count = len(each.rows)
            if each.grid is not None:
                grids.append(PlacedGrid(indices[first], each.grid))
            for run in runs_of(indices[first : first + count]):
                placed.append(
                    ImageRows(
                        first=indices[first + run.start],
                        rows=each.rows[run.start : run.stop],
                        key=(int.from_bytes(image.digest, "big") << KEY_BITS) + run.start + 1,
                        whole=self._family.rows_see_all,
                        token=self._family.rows_token,
                    )
                )
            first += count
        return PromptIds(ids, placed, ImagePositions(len(ids), grids) if grids else None)


def runs_of(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the indices of numbers that go up by 1, run by run."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield range(first, i)
            first = i


def _too_many(count: int, most: int) -> InvalidInput:
    return InvalidInput(
        f"{count} images have more rows than the {most} tokens that a prompt may have: give fewer"
    )


def processor_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's image processor; none where no file has any."""
    settings = read_json(folder / "processor_config.json").get("image_processor")
    return settings or read_json(folder / "preprocessor_config.json")
