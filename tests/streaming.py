"""Models in folders, and the same model in memory and read from disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from models import tiny
from quickbeam.models.native_model import NativeModel
from quickbeam.models.streamed_loading import Streamed, open_streamed
from quickbeam.models.target import Target
from quickbeam.tree import TokenTree

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def saved(
    layout: str, folder: Path, toy_folder: str, layers: int | None = None, **changes: object
) -> str:
    """A tiny model of this layout in a folder, with a tokenizer (of other tokens: it is loaded, no
    more)."""
    model = tiny(layout, torch.bfloat16, wide=True, layers=layers)
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(Path(toy_folder) / name, folder)
    return str(folder)


def opened(folder: str, memory: int, weights: str = "bfloat16") -> Streamed:
    """What `open_streamed` gives for a model that does not fit."""
    found = open_streamed(folder, memory, weights)
    assert found is not None
    return found


def limits(folder: str, weights: str = "bfloat16") -> list[int]:
    """Memory for no resident segment, one, … and all but one, with two buffers, as far as that is
    less than the model takes."""
    source = opened(folder, 120_000, weights).source
    every = (source.least + i * source.plan.piece for i in range(len(source.plan.segments)))
    return [limit for limit in every if limit < source.whole]


def on_disk(folder: str, memory: int, weights: str = "bfloat16") -> Target:
    """The model with so much memory for its weights."""
    found = opened(folder, memory, weights)
    checkpoint = found.checkpoint
    target = Target(NativeModel(checkpoint, checkpoint.stack, weights=weights, source=found.source))
    assert target.model.streamed is not None and target.model.exact
    return target


def bush(width: int, seed: int = 0) -> TokenTree:
    """A random tree of so many nodes."""
    generator = torch.Generator().manual_seed(seed + width)
    tree = TokenTree(5)
    while len(tree) < width:
        parent, token = (
            int(torch.randint(high, (1,), generator=generator)) for high in (len(tree), 97)
        )
        if tree.child(parent, token) is None:
            tree.add(parent, token, "probe")
    return tree


def ids(count: int) -> list[int]:
    return [(7 * i + 3) % 97 for i in range(count)]
