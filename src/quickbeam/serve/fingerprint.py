"""The server's `system_fingerprint`.

Two servers with the same fingerprint answer alike, bit for bit if the machine allows it.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download

from quickbeam import __version__
from quickbeam.cache import cache_folder
from quickbeam.llm import LLM

# suffixes of files that answers depend on
DECIDES = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja")
BLOCK = 2**20  # bytes read at once


def fingerprint_of(llm: LLM) -> str:
    """Return a hash of version, model files, number format, kind of device and kernels."""
    model = llm.model
    parts = (__version__, digest_of(llm.folder), str(model.dtype), model.device.type, llm.kernels)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def digest_of(model: str) -> str:
    """Return a hash of a model's files, in a folder or Hugging Face's cache; its name without
    any."""
    path = Path(model)
    if not path.exists():
        try:
            path = Path(snapshot_download(model, local_files_only=True))
        except Exception:  # only the model's loader knows where it is
            return model
    files = [path] if path.is_file() else sorted(path.iterdir())
    named = (f"{one.name}\0{_digest(one)}" for one in files if one.suffix in DECIDES)
    return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _digest(file: Path) -> str:
    """Return the hash of a file, which is kept in the cache folder by path, size and time."""
    state = file.stat()
    key = f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}"
    kept = cache_folder() / "digests" / hashlib.sha256(key.encode()).hexdigest()
    if kept.exists() and (known := kept.read_text()):
        return known
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    with suppress(OSError):  # or the file is read again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(digest.hexdigest())
    return digest.hexdigest()
