"""Models in folders, and the same model in memory and read from disk."""

import random
import shutil
from pathlib import Path

import torch

from features import random_tree
from models import tiny
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native import library
from quickbeam.models.weights import disk
from quickbeam.models.weights.checkpoint import Checkpoint
from quickbeam.models.weights.formats import weights_format
from quickbeam.models.weights.packed_file import PackedFile
from quickbeam.models.weights.packing import PackedWeights
from target import Target

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def saved(layout, folder, toy_folder, layers=None, **changes):
    """A tiny model of this layout in a folder, with a tokenizer of other tokens."""
    model = tiny(layout, torch.bfloat16, wide=True, layers=layers)
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(Path(toy_folder) / name, folder)
    return str(folder)


def stored(folder):
    return Checkpoint(Path(folder), torch.bfloat16, library.kernels())


def limits(checkpoint, weights="bfloat16"):
    """Memory for no resident group, one, … as far as that is less than the model takes."""
    name = weights_format(weights, checkpoint.dtype)
    packed = PackedWeights(checkpoint, checkpoint.stack, library.kernels(), name)
    piece = disk.buffer_size(packed)
    every = range(packed.resident_size + 2 * piece, packed.resident_size + packed.size, piece)
    args = checkpoint, checkpoint.stack, library.kernels(), weights
    return [limit for limit in every if disk.needed_limit(*args, limit)]


def on_disk(checkpoint, memory, weights="bfloat16"):
    kept = PackedFile.for_checkpoint(str(checkpoint.path), None, weights, None)
    more = {"weights": weights, "packed_file": kept, "memory": memory}
    target = Target(NativeModel(checkpoint, checkpoint.stack, library.kernels(), **more))
    assert target.model.streamed is not None and target.model.exact
    return target


def alike(one, other, widths=(1, 2, 3, 16, 17, 40, 128)):
    """Both give the same bits: after a prompt, in trees, and after a path of one was kept."""
    assert torch.equal(one.prefill(ids(150)), other.prefill(ids(150)))
    for width in widths:
        tree = bush(width)
        assert torch.equal(one.verify(tree), other.verify(tree)), width
    tree = bush(20)
    for target in (one, other):
        target.verify(tree)
        target.commit(tree, tree.path(len(tree) - 1))
    assert torch.equal(one.verify(bush(5)), other.verify(bush(5)))


def bush(width):
    return random_tree(random.Random(width), 5, width)


def ids(count):
    return [(7 * i + 3) % 97 for i in range(count)]
