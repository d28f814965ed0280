"""Reads and writes a drafter's folder: its configuration, and its tensors by name.

Nothing but tensors is unpickled, and no file outside the folder is read.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from quickbeam.errors import InvalidInput, first_line, refuse_incomplete
from quickbeam.models.base import Model
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.rotary import Angles

_NAMES = ("model.safetensors", "pytorch_model.bin")
WEIGHTS = [name + index for name in _NAMES for index in ("", ".index.json")]
UNREADABLE = (
    *(OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError),
    *(ValueError, LookupError, TypeError, AttributeError),
)
SIZES = {  # by field of `EagleConfig` and `BlockConfig`: its name in published configurations
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
WINDOWED = "sliding_attention"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


class TargetParts(NamedTuple):
    """What a drafter has to fit: a target of `layers` layers, `size` wide, with `vocab` tokens.

    `embedding` (`[...]` ids to `[..., size]`) and `head` are the target's modules.
    """

    layers: int
    size: int
    vocab: int
    embedding: nn.Module
    head: nn.Module

    @staticmethod
    def of(model: Model) -> TargetParts:
        config = model.config
        sizes = config.num_hidden_layers, config.hidden_size, model.vocab_size
        return TargetParts(*sizes, model.embedding, model.head)


def embed_scale(embedding: nn.Module) -> float:
    """Return what a target's embedding multiplies the rows of its weight by."""
    return float(getattr(embedding, "embed_scale", 1.0))


def layer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says of a Llama-like layer, by the drafter's names of fields."""
    present = {name: value for name, value in fields.items() if value is not None}
    present.setdefault("num_key_value_heads", present["num_attention_heads"])
    present.setdefault("head_dim", present["hidden_size"] // present["num_attention_heads"])
    sizes = {field: int(present[name]) for field, name in SIZES.items()}
    head_dim = sizes["head_dim"]
    divisible = head_dim % 2 == 0 and sizes["heads"] % max(1, sizes["kv_heads"]) == 0
    if min(sizes.values()) < 1 or not divisible:
        raise InvalidInput(
            f"its config has sizes that can't be together: {', '.join(SIZES.values())} are "
            f"{', '.join(map(str, sizes.values()))}"
        )
    rope = {name: present[name] for name in ROPE if name in present}
    angles = rope_parameters(rope)
    kinds = [name for name, value in angles.items() if isinstance(value, dict)]
    if kinds:
        raise InvalidInput(
            f"its config has rotary angles by kind of layer ({', '.join(kinds)}); drafters here "
            "have one kind"
        )
    rotary_dim = angles.get("rotary_dim", head_dim)
    if rotary_dim != head_dim:
        raise InvalidInput(
            f"its config has heads of {head_dim}, of which {rotary_dim!r} turn; all must"
        )
    Angles(angles, head_dim)  # raises for unknown ones
    return sizes | {"eps": float(present.get("rms_norm_eps", 1e-6)), "rope": rope}


def layer_windows(fields: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`, None for a layer without one.

    Returns nothing where no layer has a window. Raises `InvalidInput` where the fields contradict
    one another.
    """
    kinds = list(fields.get("layer_types") or ())
    size = fields.get("sliding_window")
    used = fields.get("use_sliding_window")
    if WINDOWED not in kinds and (kinds or not used):
        return ()
    has_size = type(size) is int and size > 0 and used is not False
    if not has_size or len(kinds) != layers or not {*kinds} <= {WINDOWED, "full_attention"}:
        raise InvalidInput(
            f"its config has sliding windows that are not clear: layer_types {kinds} for {layers} "
            f"layers, sliding_window {size!r}, use_sliding_window {used!r}"
        )
    return tuple(size if kind == WINDOWED else None for kind in kinds)


def rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `rope_parameters`, for which `fields` may have older names."""
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope.setdefault("rope_theta", fields.get("rope_theta") or 10000.0)
    original = rope.get("original_max_position_embeddings")
    length = fields.get("max_position_embeddings")
    if rope.get("rope_type", rope.get("type")) == "yarn" and length:
        rope.setdefault("original_max_position_embeddings", length)
    if rope.get("factor") is None and original and length:
        rope["factor"] = length / original
    return rope


def _load(path: Path) -> Any:
    if path.suffix == ".bin":
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return load_file(path)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors by name, without a leading `model.`.

    They are memory-mapped: none is read before it is used. Raises `InvalidInput` for weights that
    are missing or can't be read.
    """
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise InvalidInput(
            f"{folder} has no weights: none of {', '.join(WEIGHTS)}; download it again"
        )
    try:
        files = {path.name}
        if path.suffix == ".json":
            files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        tensors = dict[str, torch.Tensor]()
        for name in sorted(files):
            for stored, value in _load(folder / Path(name).name).items():
                if isinstance(value, torch.Tensor):
                    tensors[stored.removeprefix("model.")] = value
        return tensors
    except UNREADABLE as error:
        raise InvalidInput(
            f"{path} can't be read as weights ({first_line(error)}); download it again"
        ) from error


def write_folder(
    folder: Path,
    record: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    names: tuple[str, str] = ("config.json", "model.safetensors"),
) -> None:
    """Write a record and tensors to files of these `names`, each complete or not at all.

    Floating-point tensors are stored as `dtype`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict[str, torch.Tensor]()
    for name, tensor in state.items():
        stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
        tensors[name] = stored.contiguous().cpu()
    parts = [folder / f"{name}.part" for name in names]
    parts[0].write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, parts[1])
    for part, name in zip(parts, names, strict=True):
        os.replace(part, folder / name)


@contextmanager
def named_errors(folder: Path) -> Iterator[None]:
    """Raise what a configuration leads to as `InvalidInput` that names the folder."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from error
    except NotDescribed as error:
        raise InvalidInput(f"{folder}: {error}") from error
    except (*UNREADABLE, ArithmeticError) as error:
        raise InvalidInput(
            f"{folder}: its configuration or weights can't be used: {error!r}"
        ) from error


Parts = Mapping[str, Sequence[tuple[str, int | None]]]
"""By module of a network: the stored modules that it is made of, one below the other, and the rows
of each; None: all rows."""


def assemble(
    network: nn.Module,
    stored: Mapping[str, torch.Tensor],
    parts: Parts = MappingProxyType({}),
    ignored: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Return a network's tensors by name, made of stored ones; `network` may be on "meta".

    Modules that are not in `parts` are stored under their own names. `ignored`: names, or their
    beginnings if they end with a dot, of tensors that need no place in the network. So do those of
    the network itself that are not stored.

    Raises `InvalidInput` naming a tensor that is missing, has another shape, or has no place.
    """
    beginnings = tuple(name for name in ignored if name.endswith("."))

    def is_ignored(name: str) -> bool:
        return name in ignored or name.startswith(beginnings)

    shapes = dict[str, list[int]]()
    made_of = dict[str, list[str]]()
    for name, tensor in network.state_dict().items():
        if is_ignored(name):
            continue
        module, _, kind = name.rpartition(".")
        made_of[name] = []
        for source, rows in parts.get(module, [(module, None)]):
            stored_name = f"{source}.{kind}" if source else kind
            made_of[name].append(stored_name)
            shapes[stored_name] = [rows or tensor.shape[0], *tensor.shape[1:]]
    check_tensors(stored, shapes)
    unused = sorted(name for name in stored.keys() - shapes.keys() if not is_ignored(name))
    if unused:
        raise InvalidInput(
            f"a drafter of this kind has no place for {', '.join(unused[:4])}; use another drafter"
        )
    assembled = dict[str, torch.Tensor]()
    for name, sources in made_of.items():
        tensors = [stored[source] for source in sources]
        assembled[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return assembled


def check_tensors(state: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `InvalidInput` naming tensors that are missing or have other shapes than these."""
    mismatched = list[tuple[str, list[int], list[int]]]()
    for name in state.keys() & shapes:
        shape = list(state[name].shape)
        expected = list(shapes[name])
        if shape != expected:
            mismatched.append((name, shape, expected))
    refuse_incomplete(shapes.keys() - state.keys(), mismatched)


def refuse_other_target(*widths: int, target: int) -> None:
    """Raise `InvalidInput` if a drafter reads hidden states of another width than the target's."""
    if other := [width for width in widths if width != target]:
        raise InvalidInput(
            f"it reads hidden states {other[0]} wide, the target's are {target}: it was made for "
            "another model"
        )
