"""LoRA adapters: how one in a folder changes the parameters of its base model.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, and Kalajdzievski, "A Rank
Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023. The layout of the folder is that of
peft. This module does not know how a model's own files hold its parameters.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from quickbeam.errors import InvalidInput, first_line
from quickbeam.models import builtin
from quickbeam.models.native.quantised import BlockRows, Weight
from quickbeam.models.weights.checkpoint import Checkpoint, local_folder, read_json
from quickbeam.models.weights.parameters import Parameters, names
from quickbeam.models.weights.shapes import check_shapes, expected
from quickbeam.models.weights.sources import causal_names
from quickbeam.models.weights.tensor_files import weight_files

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # before the names of the base model's parameters
LORA = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
# Fields of a configuration that are read here, or change nothing about a trained adapter. Others
# must be empty.
_FIELDS = """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules
    fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config
    lora_alpha lora_dropout megatron_core modules_to_save peft_type peft_version qalora_group_size
    r rank_pattern revision runtime_config target_modules task_type use_rslora
"""
FIELDS = set(_FIELDS.split())
# values of `init_lora_weights` that leave the base model's weights as they are
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
MERGE = "merge it by peft's merge_and_unload, and give the folder of the merged model"


@dataclass(frozen=True)
class LowRank:
    """A change of a weight: `scale` times `b @ a` is added to it.

    `a`: `[r, inputs]`; `b`: `[outputs, r]`, both float32. `transposed`: the weight is `[inputs,
    outputs]`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool

    @property
    def shape(self) -> list[int]:
        """The weight's shape."""
        shape = [len(self.b), self.a.shape[1]]
        return shape[::-1] if self.transposed else shape

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sum, computed in float32, in the number format of `weight`."""
        added = self.scale * (self.b @ self.a)
        added = added.t() if self.transposed else added
        return (weight.float() + added.to(weight.device)).to(weight.dtype)


class Adapter:
    """A LoRA adapter in a folder, for a base model.

    `base`: the base model's folder. `names`: of the parameters that it changes, as the adapter
    names them until `rename`.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        """Read the adapter.

        Raises `InvalidInput` for another kind than LoRA, and for what can't be read.
        """
        self.folder, self.base = folder, base
        self._low_rank = dict[str, LowRank]()
        self._replaced = dict[str, torch.Tensor]()  # parameters that it has in full
        fields = read_json(folder / CONFIG)
        try:
            _refuse_others(fields)
            self._read(_tensors(folder), fields)
        except InvalidInput:
            raise
        except Exception as error:  # of any kind, by what the files say
            raise InvalidInput(
                f"the adapter in {folder} can't be read ({first_line(error)}): download it again, "
                f"or {MERGE}"
            ) from error

    @property
    def names(self) -> Set[str]:
        return self._low_rank.keys() | self._replaced.keys()

    def rows(self, name: str) -> int | None:
        """Return how many rows the adapter gives a parameter that it has in full, else None."""
        return len(self._replaced[name]) if name in self._replaced else None

    def shape(self, name: str) -> list[int] | None:
        """Return the shape that the adapter's tensors give a parameter; None for no change."""
        if name in self._replaced:
            return list(self._replaced[name].shape)
        return self._low_rank[name].shape if name in self._low_rank else None

    def rename(self, parameters: Set[str]) -> None:
        """Take the names of a model with these `parameters`.

        Raises `InvalidInput` for a change of another parameter.
        """
        self._low_rank = {
            self._renamed(name, parameters): change for name, change in self._low_rank.items()
        }
        self._replaced = {
            self._renamed(name, parameters): tensor for name, tensor in self._replaced.items()
        }

    def _renamed(self, name: str, parameters: Set[str]) -> str:
        for causal_name in causal_names(name):
            if causal_name in parameters:
                return causal_name
        raise InvalidInput(
            f"its adapter changes {name}, which {self.base} doesn't have, or holds in another "
            f"form: {MERGE}"
        )

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a parameter of the adapted model; `weight`: the base model's, as it is loaded.

        Raises `InvalidInput` where their shapes differ.
        """
        if name in self._replaced:
            weight = self._replaced[name].to(weight)
        low_rank = self._low_rank.get(name)
        if low_rank is None:
            return weight
        if low_rank.shape != list(weight.shape):
            raise InvalidInput(
                f"its adapter changes {name} of shape {low_rank.shape}, and {self.base} has "
                f"{list(weight.shape)}: they are not of one model"
            )
        return low_rank.added_to(weight)

    def _read(self, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> None:
        pairs = dict[str, dict[str, torch.Tensor]]()
        embeddings = set[str]()
        for stored, tensor in tensors.items():
            name = stored.removeprefix(PREFIX).replace(".base_layer.", ".")
            matched = LORA.fullmatch(name)
            if matched is not None:
                module, matrix_name = matched.groups()
                pairs.setdefault(module, {})[matrix_name] = tensor.float()
                if "lora_embedding_" in name:
                    embeddings.add(module)
            elif "lora_" in name or "trainable_tokens" in name:
                raise InvalidInput(f"its adapter holds {stored}, which is not read: {MERGE}")
            else:
                self._replaced[name] = tensor
        if not tensors:
            raise InvalidInput(
                f"its adapter ({self.folder}) holds no tensors, so it would change nothing: save "
                "or download it again"
            )
        for module, pair in pairs.items():
            if pair.keys() != {"A", "B"} or any(matrix.dim() != 2 for matrix in pair.values()):
                raise InvalidInput(f"its adapter holds no matrices A and B of {module}: {MERGE}")
            if len(pair["A"]) != pair["B"].shape[1] or not len(pair["A"]):
                shapes = f"{list(pair['B'].shape)} and {list(pair['A'].shape)}"
                raise InvalidInput(
                    f"its adapter's matrices B and A of {module} have shapes {shapes}, which "
                    "can't be multiplied: save or download the adapter again"
                )
            self._low_rank[f"{module}.weight"] = LowRank(
                a=pair["A"],
                b=pair["B"],
                scale=_scale(module, len(pair["A"]), fields),
                transposed=bool(fields.get("fan_in_fan_out")) or module in embeddings,
            )


class AdaptedCheckpoint(Parameters):
    """The parameters of a checkpoint (`Checkpoint`), changed by an adapter.

    `path`, `stack`: those of the checkpoint. `quantised`: never.
    """

    quantised = False

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter) -> None:
        """Raises `InvalidInput` for an adapter that doesn't fit the checkpoint."""
        self._checkpoint, self.adapter = checkpoint, adapter
        self.path, self.config = checkpoint.path, checkpoint.config
        self.dtype = checkpoint.dtype
        self.stack = checkpoint.stack
        adapter.rename(names(self.stack))
        self._recent = dict[str, torch.Tensor]()  # the parameter that was merged last, by name
        for name in adapter.names:
            if checkpoint.quantised or isinstance(checkpoint.like(name), BlockRows):
                raise InvalidInput(
                    f"its adapter can't be merged into {name}, which {self.path} has in few bits: "
                    "name its unquantised base model in adapter_config.json"
                )
        rows = adapter.rows(self.stack.embedding)
        if rows is not None:  # tokens may have been added
            self.config.vocab_size = rows
        wanted = expected(self.stack, self.config)
        for name in adapter.names:
            wanted.setdefault(name, checkpoint.shape(name))
        check_shapes(self.stack, self.shape, wanted)

    def shape(self, name: str) -> list[int]:
        shape = self.adapter.shape(name)
        return self._checkpoint.shape(name) if shape is None else shape

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        if name not in self.adapter.names:
            return self._checkpoint.rows(name, first, last)
        if name not in self._recent:  # all rows are merged at once, for the same bits in any part
            self._recent = {name: self.adapter.merged(name, self._checkpoint(name))}
        return self._recent[name][first:last]

    def mapped(self, name: str) -> Any:
        return self(name) if name in self.adapter.names else self._checkpoint.mapped(name)

    def like(self, name: str) -> Weight:
        return super().like(name) if name in self.adapter.names else self._checkpoint.like(name)

    def unread(self) -> dict[str, torch.Tensor]:
        return self._checkpoint.unread()

    def release(self, layers: str, layer: int | None) -> None:
        self._recent.clear()
        self._checkpoint.release(layers, layer)


def adapter_in(folder: Path) -> Adapter | None:
    """Return the adapter of a folder; None where there is none, or none to merge (`base_of`).

    Raises `InvalidInput` as `base_of` and `Adapter` do.
    """
    base = base_of(folder)
    if base is not None:
        return Adapter(folder, base)
    if (folder / CONFIG).is_file():
        logger.warning(
            "%s holds a whole model beside an adapter (%s): the model runs as it is. To have the "
            "adapter merged, give it a folder of its own",
            folder,
            CONFIG,
        )
    return None


def base_of(folder: Path) -> Path | None:
    """Return the folder of the model that an adapter in `folder` changes; None without one.

    An adapter beside a whole model is not merged, as it may be merged already, unless it names this
    folder as its base. Raises `InvalidInput` for a base that is not there.
    """
    if not (folder / CONFIG).is_file():
        return None
    fields = read_json(folder / CONFIG)
    name = fields.get("base_model_name_or_path")
    if (folder / "config.json").is_file() and weight_files(folder):
        names_itself = (
            isinstance(name, str) and Path(name).expanduser().resolve() == folder.resolve()
        )
        return folder if names_itself else None
    return _base(fields)


def _refuse_others(fields: dict[str, Any]) -> None:
    """Raise `InvalidInput` for what is not LoRA as it is read here."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise InvalidInput(f"it holds an adapter of kind {kind!r}, and LORA alone is read: {MERGE}")
    odd = [name for name, value in fields.items() if value and name not in FIELDS]
    start = fields.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        odd.append(f"init_lora_weights {start!r}")
    if odd:
        named = ", ".join(sorted(odd)).replace("use_dora", "DoRA (use_dora)")
        raise InvalidInput(f"it holds an adapter with {named}, and plain LoRA is read: {MERGE}")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / WEIGHTS).is_file():
        return load_file(folder / WEIGHTS)
    if (folder / PICKLED).is_file():
        pickled: dict[str, torch.Tensor] = torch.load(folder / PICKLED, weights_only=True)
        return pickled
    raise InvalidInput(
        f"{folder} has {CONFIG} and no {WEIGHTS}: download it again, with all of its files"
    )


def _scale(module: str, rank: int, fields: dict[str, Any]) -> float:
    """Return the factor of a module's product of matrices."""
    alpha = fields["lora_alpha"]
    for pattern, module_alpha in (fields.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = module_alpha
            break
    divisor = math.sqrt(rank) if fields.get("use_rslora") else rank
    return float(alpha / divisor)


def _base(fields: dict[str, Any]) -> Path:
    """Return the folder of an adapter's base model."""
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InvalidInput(f"it holds an adapter, and its {CONFIG} names no model for it: {MERGE}")
    try:
        folder = local_folder(builtin.resolve(base), fields.get("revision"))
        if (folder / "config.json").is_file():
            return folder
        reason = f"{folder} is no folder of a model"
    except InvalidInput as error:
        reason = str(error)
    raise InvalidInput(
        f"it holds an adapter (adapter_config.json) for {base}, which is not here ({reason}): "
        f"download {base}, or write its folder into {CONFIG}"
    )
