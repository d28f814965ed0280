"""Images as callers give them, decoded within bounds.

What clients send may be hostile. So an image's size is read and checked before its pixels are
decoded, only a few formats are tried, and decoding ends at a time limit.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import reprlib
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from quickbeam.errors import InvalidInput, first_line

FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
IMAGE_PARTS = ("image", "image_url")  # types of parts of messages
READ = "PNG, JPEG, WebP and GIF images are read"
DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.ASCII)
MAX_FILE_PIXELS = 32_000_000  # of one image, as it comes
MAX_TOTAL_PIXELS = 4 * MAX_FILE_PIXELS  # of all images of a prompt together
MAX_RATIO = 50  # of an image's longer side to the shorter one
MAX_FILE_BYTES = 64_000_000
DECODE_SECONDS = 5.0  # of the thread that decodes an image
READ_BYTES = 4096  # of a file that are decoded before the time is looked at again


def pillow() -> Any:
    """Return Pillow's package. Raises `InvalidInput` where it is missing."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InvalidInput(
            "images are decoded by Pillow, which is missing here: pip install 'quickbeam[images]'"
        ) from error
    return Image, ImageOps


class TimedFile(io.BytesIO):
    """A file in memory that can be read until a time of its thread, `time.thread_time`.

    Decoders read a file piece by piece. So one that takes long, as for a JPEG of thousands of
    scans, ends soon after that time. Raises `TimeoutError`.
    """

    def __init__(self, data: bytes, end: float) -> None:
        super().__init__(data)
        self._end = end

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self._end:
            raise TimeoutError("it takes too long")
        return super().read(size)


class PromptImage:
    """An image of a prompt: the bytes of a file, or an image of Pillow's.

    `size`: width and height as the file says, before it is turned upright. `digest`: SHA-256 of
    what the pixels are made from. Raises `InvalidInput` for what is no image, is of no format that
    is read, is animated, or has too many pixels.
    """

    def __init__(self, source: Any) -> None:
        self._data: bytes | None = None
        if isinstance(source, bytes | bytearray):
            self._data = bytes(source)
            image = self._open()
            self.size: tuple[int, int] = image.size
            identity = self._data
        else:
            image = source
            _check_size(image)
            try:
                self._pixels = _upright_rgb(image)
            except Exception as error:  # of its file, which Pillow reads only now, or of its mode
                raise _unreadable(error) from error
            self.size = self._pixels.size
            identity = repr(self.size).encode() + self._pixels.tobytes()
        self.digest = hashlib.sha256(identity).digest()

    def decode(self) -> Any:
        """Return the pixels as an upright RGB image of Pillow's. Raises `InvalidInput`."""
        if self._data is None:
            return self._pixels
        image = self._open()
        try:
            return _upright_rgb(image)
        except Exception as error:  # Pillow raises any for damaged files
            raise _unreadable(error) from error

    def _open(self) -> Any:
        assert self._data is not None
        pil_image, _ = pillow()
        file = TimedFile(self._data, time.thread_time() + DECODE_SECONDS)
        try:
            image = pil_image.open(file, formats=tuple(FORMATS.values()))
            image.decodermaxblock = READ_BYTES
            animated = image.format != "MPO" and getattr(image, "is_animated", False)
        except Exception as error:
            raise _unreadable(error) from error
        _check_size(image)
        if animated:
            raise InvalidInput("an animated image: give one of its frames")
        return image


def _unreadable(error: Exception) -> InvalidInput:
    name = type(error).__name__
    if name in ("DecompressionBombError", "DecompressionBombWarning"):
        return _too_large("too many pixels")
    if name == "UnidentifiedImageError":
        return InvalidInput(
            f"the image can't be read: it is no whole file of a known kind ({READ})"
        )
    return InvalidInput(f"the image can't be read ({first_line(error)}): send it again; {READ}")


def _too_large(what: str) -> InvalidInput:
    return InvalidInput(
        f"an image of {what}: at most {MAX_FILE_PIXELS // 1_000_000} million pixels are read; "
        "scale it down"
    )


def _check_size(image: Any) -> None:
    """Raise `InvalidInput` for an image that is too large, too narrow, or empty."""
    width, height = image.size
    if width * height > MAX_FILE_PIXELS:
        raise _too_large(f"{width} x {height} pixels")
    if not 0 < max(width, height) <= MAX_RATIO * min(width, height):
        raise InvalidInput(
            f"an image of {width} x {height} pixels: its longer side may have at most {MAX_RATIO} "
            "times the pixels of the shorter one; cut it"
        )


def _upright_rgb(image: Any) -> Any:
    """Return the first frame as its file says it is to be turned, on white where it is clear."""
    pil_image, operations = pillow()
    image = operations.exif_transpose(image)
    if image.mode == "RGB":
        return image.copy()
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = pil_image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


def image_of(part: Mapping[str, Any], number: int) -> PromptImage:
    """Return the image of a message's part; `number`: the message's, for errors.

    A part is `{"type": "image", "image": …}` with an image of Pillow's, a file's path or its bytes,
    or OpenAI's `{"type": "image_url", "image_url": {"url": "data:…"}}`. No other URL is followed.
    Raises `InvalidInput`.
    """
    kind = part.get("type")
    try:
        if kind == "image":
            return PromptImage(_source(part.get("image")))
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        return PromptImage(bytes_of_data_url(url))
    except InvalidInput as error:
        raise InvalidInput(f"message {number}: {error}") from error


def _source(image: Any) -> Any:
    if isinstance(image, bytes | bytearray):
        return image
    if isinstance(image, str | PathLike):
        try:
            path = Path(image).expanduser()
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InvalidInput(f"{path} has more than {MAX_FILE_BYTES} bytes: scale it down")
            return path.read_bytes()
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"the image can't be read: {error}") from error
    pil_image, _ = pillow()
    if isinstance(image, pil_image.Image):
        return image
    raise InvalidInput(
        f"image={reprlib.repr(image)}: give an image of Pillow's, a file's path, or its bytes"
    )


def check_data_url(url: Any) -> re.Match[str]:
    """Return the head of a `data:` URL of an image. Raises `InvalidInput` for any other URL."""
    head = DATA_URL.match(url[:200]) if isinstance(url, str) else None
    if head is None:
        raise InvalidInput(
            f"the image's URL {reprlib.repr(url)} isn't followed: send the image itself, as "
            "data:image/png;base64,…"
        )
    media_type, options = head.groups()
    if media_type.lower() not in FORMATS or options.lower() != ";base64":
        raise InvalidInput(
            f"an image as data:{media_type}{options}: it must be in base64 and of one of "
            f"{', '.join(FORMATS)}"
        )
    return head


def bytes_of_data_url(url: Any) -> bytes:
    """Return what a `data:` URL of an image holds. Raises `InvalidInput`."""
    head = check_data_url(url)
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"the image's base64 is damaged ({first_line(error)})") from error


def check_total(images: Sequence[PromptImage]) -> None:
    """Raise `InvalidInput` where the images of a prompt have too many pixels together."""
    total = sum(width * height for width, height in (image.size for image in images))
    if total > MAX_TOTAL_PIXELS:
        raise InvalidInput(
            f"{len(images)} images of {total // 1_000_000} million pixels together: at most "
            f"{MAX_TOTAL_PIXELS // 1_000_000} million are read; scale them down, or send fewer"
        )
