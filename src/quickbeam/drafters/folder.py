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
    """Return what a configuration says of a Llama-like layer, by field of the drafter's own."""
    given = {name: value for name, value in fields.items() if value is not None}
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    sizes = {field: int(given[name]) for field, name in SIZES.items()}
    divisible = sizes["head_dim"] % 2 == 0 and sizes["heads"] % max(1, sizes["kv_heads"]) == 0
    if min(sizes.values()) < 1 or not divisible:
        raise InvalidInput(
            f"its config has sizes that can't be together: {', '.join(SIZES.values())} are "
            f"{', '.join(map(str, sizes.values()))}"
        )
    rope = {name: given[name] for name in ROPE if name in given}
    angles = rope_parameters(rope)
    if kinds := [name for name, one in angles.items() if isinstance(one, dict)]:
        raise InvalidInput(
            f"its config has rotary angles by kind of layer ({', '.join(kinds)}); drafters here "
            "have one kind"
        )
    if (turning := angles.get("rotary_dim", sizes["head_dim"])) != sizes["head_dim"]:
        raise InvalidInput(
            f"its config has heads of {sizes['head_dim']}, of which {turning!r} turn; all must"
        )
    Angles(angles, sizes["head_dim"])  # raises for unknown ones
    return sizes | {"eps": float(given.get("rms_norm_eps", 1e-6)), "rope": rope}


def layer_windows(fields: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`, None for none.

    Without windows, returns nothing. Raises `InvalidInput` where the fields contradict one another.
    """
    kinds, size = list(fields.get("layer_types") or ()), fields.get("sliding_window")
    used = fields.get("use_sliding_window")
    if WINDOWED not in kinds and not (used and not kinds):
        return ()
    whole = type(size) is int and size > 0 and used is not False
    if not whole or len(kinds) != layers or not {*kinds} <= {WINDOWED, "full_attention"}:
        raise InvalidInput(
            f"its config has sliding windows that are not clear: layer_types {kinds} for {layers} "
            f"layers, sliding_window {size!r}, use_sliding_window {used!r}"
        )
    return tuple(size if kind == WINDOWED else None for kind in kinds)


def rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, of which `fields` may have older names."""
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope.setdefault("rope_theta", fields.get("rope_theta") or 10000.0)
    border = rope.get("original_max_position_embeddings")
    length = fields.get("max_position_embeddings")
    if rope.get("rope_type", rope.get("type")) == "yarn" and length:
        rope.setdefault("original_max_position_embeddings", length)
    if rope.get("factor") is None and border and length:
        rope["factor"] = length / border
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
        parts = [_load(folder / Path(name).name) for name in sorted(files)]
        state = {name: one for part in parts for name, one in part.items()}
        tensors = {k: one for k, one in state.items() if isinstance(one, torch.Tensor)}
        return {name.removeprefix("model."): one for name, one in tensors.items()}
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
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    parts = [folder / f"{name}.part" for name in names]
    parts[0].write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, parts[1])
    for part, name in zip(parts, names, strict=True):
        os.replace(part, folder / name)


@contextmanager
def named_errors(folder: Path) -> Iterator[None]:
    """Raise `InvalidInput`, naming the folder, for all that its configuration leads to."""
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
    shapes, made_of = dict[str, list[int]](), dict[str, list[str]]()
    for name, tensor in network.state_dict().items():
        if name in ignored or name.startswith(beginnings):
            continue
        module, _, kind = name.rpartition(".")
        sources = parts.get(module, [(module, None)])
        made_of[name] = [f"{source}.{kind}" if source else kind for source, _ in sources]
        rows = [count or tensor.shape[0] for _, count in sources]
        shapes |= {one: [n, *tensor.shape[1:]] for one, n in zip(made_of[name], rows, strict=True)}
    check_tensors(stored, shapes)
    left = stored.keys() - shapes.keys() - {*ignored}
    if left := {name for name in left if not name.startswith(beginnings)}:
        raise InvalidInput(
            f"a drafter of this kind has no place for {', '.join(sorted(left)[:4])}; use another "
            "drafter"
        )
    return {
        name: torch.cat([stored[one] for one in names]) if len(names) > 1 else stored[names[0]]
        for name, names in made_of.items()
    }


def check_tensors(state: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `InvalidInput` naming tensors that are missing or have other shapes than these."""
    known = [(name, list(state[name].shape), list(shapes[name])) for name in state.keys() & shapes]
    refuse_incomplete(shapes.keys() - state.keys(), [one for one in known if one[1] != one[2]])


def refuse_other_target(*widths: int, target: int) -> None:
    """Raise `InvalidInput` if a drafter reads hidden states of another width than the target's."""
    if other := [width for width in widths if width != target]:
        raise InvalidInput(
            f"it reads hidden states {other[0]} wide, the target's are {target}: it was made for "
            "another model"
        )
