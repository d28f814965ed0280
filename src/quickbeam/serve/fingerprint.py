"""What clients call a model, and a hash of all that its answers depend on."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download

from quickbeam import __version__
from quickbeam.hub.cache import cache_folder, file_key, split_files
from quickbeam.llm import LLM
from quickbeam.models.weights.adapters import base_of

# suffixes of files that answers depend on
HASHED_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja")
BLOCK_BYTES = 2**20  # read at once


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


def digest_of(model: str) -> str:
    """Return a hash of a model's files, here or in Hugging Face's cache; its name without any."""
    path = Path(model)
    if not path.exists():
        try:
            path = Path(snapshot_download(model, local_files_only=True))
        except Exception:  # only the model's loader knows where it is
            return model
    files = split_files(path) if path.is_file() else sorted(path.iterdir())
    base = base_of(path)
    if base not in (None, path):
        files += sorted(base.iterdir())
    hashed = [file for file in files if file.suffix in HASHED_SUFFIXES]
    lines = [f"{file.name}\0{_digest_of_file(file)}" for file in hashed]
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()


def _digest_of_file(file: Path) -> str:
    """Return the hash of a file's content. The cache folder keeps it by the file's `file_key`."""
    cached = cache_folder() / "digests" / file_key(file)
    if cached.exists():
        stored = cached.read_text()
        if stored:
            return stored
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            digest.update(block)
    with suppress(OSError):  # or the file is read again next time
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(digest.hexdigest())
    return digest.hexdigest()
