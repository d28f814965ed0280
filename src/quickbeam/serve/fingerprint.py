"""What clients call a model, and a hash of all that its answers depend on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quickbeam import __version__
from quickbeam.llm import LLM
from quickbeam.models.weights.digest import digest_of


def name_of(model: str) -> str:
    """Return what clients call a model: its name, or the last part of a path."""
    return Path(model).name if Path(model).exists() else model


def fingerprint_of(llm: LLM) -> str:
    """Return a hash of version, model files, number format, kind of device and kernels, and of how
    many pixels of an image are read.

    Two servers with the same one answer alike, bit for bit if the machine allows it.
    """
    model = llm.model
    parts = [__version__, digest_of(llm.folder), str(model.dtype), model.device.type, llm.kernels]
    if llm.images is not None:
        parts.append(str(llm.images.max_pixels))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
