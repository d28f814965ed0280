"""Lists what on this machine may draft for a model, for `--drafter auto`.

It reads configurations, tokenizers and the sizes of files. Loading a candidate decides whether the
candidate fits, and `engine/gain.py` measures whether it pays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quickbeam.drafters.draft_model import same_tokens
from quickbeam.drafters.layouts import Layout, layout_of
from quickbeam.drafters.mtp import runs_mtp
from quickbeam.errors import first_line
from quickbeam.hub import SELF, drafter_of, on_this_machine
from quickbeam.hub.cache import split_files
from quickbeam.hub.mtp import MTP
from quickbeam.models.base import Model
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.text import gguf_tokenizer
from quickbeam.models.text.tokenizer import read_tokenizer
from quickbeam.models.weights.checkpoint import read_json
from quickbeam.models.weights.gguf.file import GgufFile

logger = logging.getLogger(__name__)

LARGEST = 0.5  # the most that a candidate's weights take of the target's, in bytes of files
MOST_NEARBY = 4  # candidates beside the model and in Hugging Face's cache, smallest first
WEIGHT_FILES = ("*.safetensors", "*.bin")


class Candidate(NamedTuple):
    """What may draft. `name`: what `--drafter` takes. `reason`: why it is a candidate."""

    name: str
    reason: str


def list_candidates(
    source: str | None, folder: str, target: Model, tokenizer: Any
) -> list[Candidate]:
    """Return what may draft for a loaded model.

    First comes the drafter that the model has by itself. Then come smaller models with the same
    tokenizer and published heads, which lie beside the model or in Hugging Face's cache. The last
    is the model's own copy in 4 bits.

    `source`: the model's name, None for the default. `folder`: its folder, file or Hugging Face id.
    """
    candidates = list[Candidate]()
    own = drafter_of(source)
    if own is not None and (own != MTP or runs_mtp(target)):
        candidates.append(Candidate(own, "the model's own drafter"))
    path = on_this_machine(folder)
    if path is not None:
        known = {candidate.name for candidate in candidates}
        nearby = _nearby_candidates(path, target, tokenizer)
        candidates += [candidate for candidate in nearby if candidate.name not in known]
    is_native = isinstance(target, NativeModel) and target.streamed is None
    if is_native and target.dtype is torch.bfloat16 and target.weights == BFLOAT16:
        candidates.append(Candidate(SELF, "a copy of the model in 4 bits"))
    return candidates


def _nearby_candidates(path: Path, target: Model, tokenizer: Any) -> list[Candidate]:
    """Return the candidates beside the model in `path` and in Hugging Face's cache."""
    limit = LARGEST * weight_bytes(path)
    sized = [(weight_bytes(place), place) for place in _nearby(path)]
    candidates = list[Candidate]()
    for size, place in sorted(sized):
        if not 0 < size <= limit or len(candidates) == MOST_NEARBY:
            continue
        try:
            layout = layout_of(place)
            if layout is not None:
                if _head_fits(place, layout, target):
                    kind = layout.publisher or "a feature drafter"
                    candidates.append(Candidate(str(place), f"a head for this width: {kind}"))
            elif _has_same_tokens(place, target, tokenizer):
                share = f"{size / 1e6:.0f} MB of weights"
                candidates.append(Candidate(str(place), f"a smaller model, same tokens, {share}"))
        except Exception as error:  # other people's files, which may hold anything
            logger.debug("%s is no candidate: %s", place, first_line(error))
    return candidates


def weight_bytes(path: Path) -> int:
    """Return the bytes of the files with a model's weights, in a folder or in `.gguf` files."""
    if path.is_file():
        return sum(file.stat().st_size for file in split_files(path))
    for pattern in WEIGHT_FILES:
        sizes = [file.stat().st_size for file in path.glob(pattern) if file.is_file()]
        if sizes:
            return sum(sizes)
    return 0


def _nearby(path: Path) -> Iterator[Path]:
    """Yield the models beside the model in `path`, then those in Hugging Face's cache.

    A model is a folder with a configuration, or the first of its `.gguf` files.
    """
    places = [*_entries(path.parent), *_cached()]
    seen = {path.resolve()}
    for place in places:
        if place.resolve() not in seen and _is_model(place):
            seen.add(place.resolve())
            yield place


def _is_model(place: Path) -> bool:
    if place.suffix == ".gguf" and place.is_file():
        return split_files(place)[0] == place
    return (place / "config.json").is_file()


def _cached() -> Iterator[Path]:
    """Yield the downloads in Hugging Face's cache, and the `.gguf` files in each of them."""
    from huggingface_hub import constants

    for repository in _entries(Path(constants.HF_HUB_CACHE)):
        reference = repository / "refs" / "main"
        if repository.name.startswith("models--") and reference.is_file():
            snapshot = repository / "snapshots" / reference.read_text().strip()
            yield snapshot
            yield from (file for file in _entries(snapshot) if file.suffix == ".gguf")


def _entries(folder: Path) -> list[Path]:
    """Return what a folder holds, in order; nothing for a folder that can't be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _head_fits(place: Path, layout: Layout, target: Model) -> bool:
    """Whether a head's configuration has the target's width and, if it says, its vocabulary."""
    if place.suffix == ".gguf":
        metadata = GgufFile(place).metadata
        architecture = metadata["general.architecture"]
        keys = ("target_hidden_size", "embedding_length_out", "embedding_length")
        widths = [metadata.get(f"{architecture}.{key}") for key in keys]
        width = next((width for width in widths if width), None)
        return bool(width == target.config.hidden_size)
    fields = layout.fields(read_json(place / "config.json"))
    names = ("target_hidden_size", "backbone_hidden_size", "hidden_size")
    width = next((fields[name] for name in names if fields.get(name)), None)
    if width != target.config.hidden_size:
        return False
    return fields.get("vocab_size") in (None, target.vocab_size)


def _has_same_tokens(place: Path, target: Model, tokenizer: Any) -> bool:
    """Whether a model's tokenizer gives its tokens the target's ids."""
    if place.suffix == ".gguf":
        theirs = gguf_tokenizer.load_tokenizer(GgufFile(place))
        size = len(theirs.get_vocab())
    else:
        config = read_json(place / "config.json")
        theirs = read_tokenizer(place, read_json(place / "tokenizer_config.json"))
        size = (config.get("text_config") or config)["vocab_size"]
    return same_tokens(tokenizer, theirs, (target.vocab_size, size))
