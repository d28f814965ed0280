"""The server's `system_fingerprint`.

Two servers with the same fingerprint answer alike, bit for bit if the machine allows it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download

from quickbeam import __version__
from quickbeam.cache import cache_folder
from quickbeam.llm import LLM

# suffixes of files that answers depend on
DECIDES = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja")
BLOCK = 2**20  # bytes read at once
KNOWN = "digests.json"  # in the cache folder: digests of files by path, size and modification time


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
    files = [path]
    if not path.is_file():
        files = sorted(one for one in path.iterdir() if one.suffix in DECIDES)
    cache, named, known = cache_folder() / KNOWN, list[str](), dict[str, str]()
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(cache.read_text(encoding="utf-8")))
    digests = dict(known)
    for file in files:
        state = file.stat()
        key = f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}"
        digests[key] = str(digests.get(key) or _digest(file))
        named += [file.name, digests[key]]
    if digests != known:
        work = cache.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):  # or the files are read again next time
            cache.parent.mkdir(parents=True, exist_ok=True)
            work.write_text(json.dumps(digests), encoding="utf-8")
            work.replace(cache)
        with suppress(OSError):  # a full disk leaves it empty
            work.unlink(missing_ok=True)
    return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
