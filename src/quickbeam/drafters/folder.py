"""Reads and writes a drafter's folder: its configuration, and its tensors by name.

Nothing but tensors is unpickled, and no file outside the folder is read.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from quickbeam.errors import InvalidInput
from quickbeam.models.angles import Angles
from quickbeam.models.base import Model

WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
UNREADABLE = (
    OSError,
    SafetensorError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    AttributeError,
)
SIZES = {  # by field of `EagleConfig` and `BlockConfig`: its name in published configurations
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
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


def whole_numbers(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that have these `names` in a configuration.

    Raises `InvalidInput` for one that is missing or is no whole number.
    """
    for name in names.values():
        if not isinstance(fields.get(name), int):
            raise InvalidInput(f"its config says {name}: {fields.get(name)!r}; want a whole number")
    return {field: fields[name] for field, name in names.items()}


def layer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says of a Llama-like layer, by field of the drafter's own.

    Raises `InvalidInput` for fields that are missing, and for unknown rotary angles.
    """
    said = {name: value for name, value in fields.items() if value is not None}
    sizes = whole_numbers({"num_key_value_heads": said.get("num_attention_heads"), **said}, SIZES)
    usual = sizes["hidden_size"] // max(1, sizes["heads"])
    sizes |= whole_numbers({"head_dim": usual, **said}, {"head_dim": "head_dim"})
    rope = {name: said[name] for name in ROPE if name in said}
    try:
        rotary_angles(rope, sizes["head_dim"])
    except (InvalidInput, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInput(f"its config describes no rotary angles: {error}") from error
    if not isinstance(eps := said.get("rms_norm_eps", 1e-6), int | float):
        raise InvalidInput(f"its config says rms_norm_eps: {eps!r}; want a number")
    return sizes | {"eps": eps, "rope": rope}


def rotary_angles(fields: Mapping[str, Any], dim: int) -> Angles:
    """Return the angles of a drafter's own layers, whose halves turn together.

    `fields`: what its configuration says of them: `rope_parameters`, or older names of the same.
    Raises `InvalidInput` as `Angles` does.
    """
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope.setdefault("rope_theta", fields.get("rope_theta") or 10000.0)
    border = rope.get("original_max_position_embeddings")
    length = fields.get("max_position_embeddings")
    if rope.get("factor") is None and border and length:
        rope["factor"] = length / border
    return Angles(rope, dim)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of `config.json`. Raises `InvalidInput` if it can't be read."""
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder} is no drafter: its config.json can't be read ({error})"
        ) from error
    if not isinstance(record, dict):
        raise InvalidInput(f"{folder} is no drafter: its config.json holds no object")
    return record


def tensor_names(folder: Path) -> set[str]:
    """Return the names of all tensors, without a leading `model.`.

    Raises `InvalidInput` for weights that are missing or can't be read.
    """
    path, files = _weights(folder)
    if files is None and path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                files = dict.fromkeys(file.keys(), "")
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error
    return {name.removeprefix("model.") for name in (_load(path) if files is None else files)}


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors by name, without a leading `model.`.

    They are memory-mapped: none is read before it is used. Raises `InvalidInput` as `tensor_names`.
    """
    path, index = _weights(folder)
    files = [path] if index is None else [folder / name for name in sorted(set(index.values()))]
    return {
        name.removeprefix("model."): tensor
        for file in files
        for name, tensor in _load(file).items()
    }


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
    """Begin the message of every `InvalidInput` with the folder."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from error


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
    made, used = dict[str, torch.Tensor](), set(ignored)
    for name, tensor in network.state_dict().items():
        if name in ignored or name.startswith(beginnings):
            continue
        module, _, kind = name.rpartition(".")
        names = list[str]()
        for source, rows in parts.get(module, [(module, None)]):
            names.append(f"{source}.{kind}" if source else kind)
            check_shape(stored, names[-1], (rows or tensor.shape[0], *tensor.shape[1:]))
        made[name] = (
            torch.cat([stored[one] for one in names]) if len(names) > 1 else stored[names[0]]
        )
        used.update(names)
    left = sorted(name for name in stored.keys() - used if not name.startswith(beginnings))
    if left:
        raise InvalidInput(
            f"a drafter of this kind has no place for {', '.join(left[:4])}; use another drafter"
        )
    return made


def check_shape(state: Mapping[str, torch.Tensor], name: str, shape: Sequence[int]) -> None:
    """Raise `InvalidInput` if a tensor is missing or has another shape."""
    if name not in state:
        raise InvalidInput(f"the drafter lacks {name}, of shape {list(shape)}; download it again")
    if tuple(state[name].shape) != tuple(shape):
        raise InvalidInput(
            f"{name} has shape {list(state[name].shape)}, expected {list(shape)} by config.json "
            "and the target"
        )


def _weights(folder: Path) -> tuple[Path, dict[str, str] | None]:
    """Return the path of the folder's weights and, for an index, the file of each tensor by name.

    A single file of weights comes with None.
    """
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise InvalidInput(
            f"{folder} has no weights: none of {', '.join(WEIGHTS)}; download it again"
        )
    if path.suffix != ".json":
        return path, None
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        index = {str(name): str(file) for name, file in files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is no index of weights ({error!r}); download it again"
        ) from error
    for name in sorted(set(index.values())):
        parts = PureWindowsPath(name)  # splits at both kinds of slashes
        if parts.anchor or ".." in parts.parts:
            raise InvalidInput(
                f"{path} names {name!r}, which is outside its folder: files of weights must lie in "
                "it; download it again"
            )
    return path, index


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before 2020 can't be mapped
            state = torch.load(file, map_location="cpu", weights_only=True)
        return {str(k): tensor for k, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    except UNREADABLE as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> InvalidInput:
    reason = (str(error).splitlines() or [repr(error)])[0]
    return InvalidInput(f"{file} can't be read as weights ({reason}); download it again")
