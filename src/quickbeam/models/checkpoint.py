"""A model's folder as data: its configuration, and its tensors by name and row.

transformers is imported only for a configuration that another version of it wrote, to fill in what
that leaves out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from quickbeam.cache import cache_folder
from quickbeam.errors import InvalidInput, QuickbeamError, refuse_incomplete
from quickbeam.models.angles import hold
from quickbeam.models.families import stack_of
from quickbeam.models.families.reading import ATTRIBUTES, NotDescribed
from quickbeam.models.stack import Attention, FeedForward, Linear, Stack
from quickbeam.models.stack_tensors import names

logger = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WHOLE = "5."  # versions of transformers whose configurations say all that a family reads
# buffers that older checkpoints hold beside their parameters
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias")


class ModelConfig:
    """A configuration as data: its fields are the attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    @property
    def attribute_map(self) -> dict[str, str]:
        """Other names of attributes, as transformers has them."""
        return ATTRIBUTES.get(self.__dict__.get("model_type", ""), {})

    def __getattr__(self, name: str) -> Any:
        if name in self.attribute_map:
            return getattr(self, self.attribute_map[name])
        raise AttributeError(f"the configuration has no {name}")

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def get_text_config(self) -> ModelConfig:
        return self


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file of the folder says; nothing where there is none.

    Raises `InvalidInput` where it can't be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_hook=_plain)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} can't be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _plain(value: dict[str, Any]) -> Any:
    """Return infinity and NaN for what transformers writes in their place."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def read_config(folder: Path) -> ModelConfig:
    """Return a folder's configuration, with all that transformers fills in.

    Configurations of other versions are read by transformers once, and kept in the cache folder.
    Raises `InvalidInput` where that fails.
    """
    fields = read_json(folder / "config.json")
    if str(fields.get("transformers_version")).startswith(WHOLE):
        return ModelConfig(fields)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
    kept = cache_folder() / "configs" / f"{digest}.json"
    if not (found := read_json(kept)):
        from transformers import AutoConfig

        try:
            text = AutoConfig.from_pretrained(folder).to_json_string(use_diff=False)
            found = json.loads(text, object_hook=_plain)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput(str(error).strip().splitlines()[0]) from error
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(json.dumps(found), encoding="utf-8")
            os.replace(part, kept)
        except OSError as error:
            logger.info("the configuration can't be kept in %s: %s", kept.parent, error)
    return ModelConfig(found)


def local_folder(model: str, revision: str | None) -> Path:
    """Return a model's folder: `model` itself, or what a Hugging Face id is downloaded to.

    Raises `InvalidInput` where there is no such model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise InvalidInput(f"no such model folder or file: {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"can't load {model!r}: {reason} (give a Hugging Face id, a model "
            "folder or a .gguf file)"
        ) from error


class _Shard:
    """A safetensors file, whose tensors are read past PyTorch's memory maps.

    Mapped pages would count as memory of the process, and are slow to come.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `OSError` and `ValueError` where it can't be read."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        size = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if not 0 < size < os.fstat(self._fd).st_size:
            raise ValueError("it is no safetensors file")
        self.tensors: dict[str, dict[str, Any]] = json.loads(os.pread(self._fd, size, 8))
        self.tensors.pop("__metadata__", None)
        self._begin = 8 + size

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows of a tensor as they are stored. Raises `OSError` where that fails."""
        about = self.tensors[name]
        dtype, shape = DTYPES[about["dtype"]], about["shape"]
        row = dtype.itemsize
        for size in shape[1:]:
            row *= size
        data = torch.empty((last - first) * row, dtype=torch.uint8)
        room: Any = data.numpy()
        left, at = memoryview(room), self._begin + about["data_offsets"][0] + first * row
        while left:
            count = os.preadv(self._fd, [left], at)
            if not count:
                raise OSError("the file ends too early")
            left, at = left[count:], at + count
        return data.view(dtype).view(last - first, *shape[1:])


class Checkpoint:
    """The parameters of a folder's safetensors files (`Parameters`).

    Names are those of the causal LM, also where the checkpoint holds the model without its head.
    `config`: read from the folder where it is not given. `dtype`: what tensors are given in; None:
    what the configuration names. `stack`: the model's architecture.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Find each tensor of the stack.

        Raises `NotDescribed` for what no family describes, or is stored otherwise than the family
        says, and `InvalidInput` for tensors that are missing, or have another shape.
        """
        self.folder, self.config = folder, read_config(folder)
        if self.config.__dict__.get("quantization_config"):
            raise NotDescribed("its weights are quantised")
        if dtype is None:
            own = self.config.__dict__.get("dtype") or self.config.__dict__.get("torch_dtype")
            dtype = getattr(torch, str(own), None)
            if dtype not in (torch.bfloat16, torch.float32):
                raise NotDescribed(f"its numbers are {own}")
        self.dtype = dtype
        hold(self.config)
        self.stack: Stack = stack_of(self.config, dtype)
        self._shards = self._open(folder)
        self._places = {name: one for one in self._shards for name in one.tensors}
        self._stored = self._named(self.stack)
        shapes = expected(self.stack, self.config)
        odd = [(name, self.shape(name), shape) for name, shape in shapes.items()]
        refuse_incomplete([], [one for one in odd if one[1] != one[2]])

    @staticmethod
    def _open(folder: Path) -> list[_Shard]:
        files: Iterable[str] = [SINGLE] if (folder / SINGLE).is_file() else []
        try:
            if (folder / INDEX).is_file():
                index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
                files = sorted(set(index["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise InvalidInput(
                f"the weights in {folder} can't be read ({error}): download them again"
            ) from error
        if not files:
            raise NotDescribed(f"{folder} has no {SINGLE} and no {INDEX}")
        shards = []
        for file in files:
            try:
                shards.append(_Shard(folder / file))
            except (OSError, ValueError) as error:
                raise InvalidInput(
                    f"{folder / file} can't be read ({error}): download it again"
                ) from error
        return shards

    def _named(self, stack: Stack) -> dict[str, str]:
        """Return the stored name of each parameter of the stack."""
        base = f"{stack.inside.partition('.')[0]}."
        wanted, stored = names(stack), {name: name for name in self._places}
        if not any(name.startswith(base) for name in stored):  # saved without its head
            stored = {
                name if name.startswith("lm_head.") else f"{base}{name}": name for name in stored
            }
        (head,) = {one.name for one in stack.head.weights}
        if self.config.tie_word_embeddings and head not in stored:
            stored[head] = stored.get(stack.embedding, stack.embedding)
        odd = sorted(name for name in stored.keys() - wanted if not name.endswith(BUFFERS))
        if odd:
            raise NotDescribed(f"its files hold {odd[0]}")
        refuse_incomplete(wanted - stored.keys(), [])
        kinds = {self._places[one].tensors[one]["dtype"] for one in stored.values()} - DTYPES.keys()
        if kinds:
            raise NotDescribed(f"its files hold numbers of type {', '.join(sorted(kinds))}")
        return stored

    def __call__(self, name: str) -> torch.Tensor:
        return self.rows(name)

    def shape(self, name: str) -> list[int]:
        stored = self._stored[name]
        return list(self._places[stored].tensors[stored]["shape"])

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return rows `first` to `last` (excluded) of a tensor.

        The numbers are those that loading the model gives. Raises `QuickbeamError` naming the file
        where it can't be read.
        """
        stored = self._stored[name]
        shard = self._places[stored]
        try:
            found = shard.rows(stored, first, self.shape(name)[0] if last is None else last)
        except OSError as error:
            raise QuickbeamError(
                f"{shard.path}: {name} can't be read ({error}): download it again"
            ) from error
        return found.to(self.dtype)

    def release(self, layers: str, layer: int | None) -> None:
        """Do nothing: what was read is nowhere kept."""


def expected(stack: Stack, config: Any) -> dict[str, list[int]]:
    """Return the shapes that a configuration gives parameters of a stack, by name."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", None)
    if stack.recurrents:  # of which some adjust the size
        inner = None
    found: dict[str, list[int]] = {}

    def put(linear: Linear, rows: Sequence[int], inputs: int) -> None:
        for one, count in zip(linear.weights, rows, strict=False):
            shape = [count * one.parts, inputs]
            found[one.name] = shape[::-1] if one.transposed else shape

    for layer in stack.layers:
        if isinstance(of := layer.attention, Attention):
            sizes = [of.heads, of.kv_heads, of.kv_heads]
            if len(of.qkv.weights) == 3 and all(one.parts == 1 for one in of.qkv.weights):
                put(of.qkv, [size * of.head_dim for size in sizes], width)
            put(of.out, [width], of.heads * of.head_dim)
        if isinstance(fed := layer.feed_forward, FeedForward) and isinstance(inner, int):
            put(fed.up, [inner, inner], width)
            put(fed.down, [width], inner)
        before = [layer.attention_before, layer.feed_forward_before]
        found |= {name: [width] for norm in before if norm is not None for name in norm.weights}
    found |= {name: [width] for name in stack.norm.weights}
    put(stack.head, [config.vocab_size], width)
    return found | {stack.embedding: [config.vocab_size, width]}
