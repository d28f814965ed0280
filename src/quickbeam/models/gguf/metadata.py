"""The metadata of a `.gguf` file's architecture, which notes what is read of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.file import GgufFile
from quickbeam.models.native.quantised import BlockRows

# keys of an architecture that are no part of what it computes here, or follow from tensors
HARMLESS = {
    "attention.causal",
    "attention.layer_norm_epsilon",
    "attention.value_length",
    "attention.value_length_swa",
    "block_count",
    "context_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "vocab_size",
}


class Metadata:
    """The metadata of an architecture, which notes what is read of it."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.name, self._read = file, name, set[str]()

    def __getitem__(self, key: str) -> Any:
        if (found := self.get(key)) is None:
            raise NotDescribed(f"its metadata has no {self.name}.{key}")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number or a text; `default` where it is missing."""
        self._read.add(key)
        found = self.file.metadata.get(f"{self.name}.{key}", default)
        if isinstance(found, np.ndarray):
            if len(set(found.tolist())) != 1:
                raise NotDescribed(f"{self.name}.{key} differs from layer to layer")
            found = found.tolist()[0]
        if isinstance(found, list) or (isinstance(found, float) and not math.isfinite(found)):
            raise NotDescribed(f"{self.name}.{key} is {str(found)[:80]}")
        return found

    def each(self, key: str) -> list[Any]:
        """Return a number for each layer, of an array or of one for all."""
        self._read.add(key)
        found = self.file.metadata.get(f"{self.name}.{key}")
        every = found.tolist() if isinstance(found, np.ndarray) else [found] * self["block_count"]
        if len(every) != self["block_count"]:
            raise NotDescribed(f"{self.name}.{key} is of {len(every)} layers")
        return every

    def numbers(self, tensor: str) -> list[float]:
        """Return those of a tensor that is no matrix."""
        found = self.file[tensor]
        if isinstance(found, BlockRows) or found.dim() > 1:
            raise NotDescribed(f"{tensor} is a matrix")
        numbers: list[float] = found.tolist()
        return numbers

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def refuse_unknown(self) -> None:
        """Raise `NotDescribed` naming keys that are set and were not read."""
        start = f"{self.name}."
        unknown = [
            key
            for key, value in self.file.metadata.items()
            if key.startswith(start)
            and key.removeprefix(start) not in self._read | HARMLESS
            and (isinstance(value, np.ndarray) or value not in (0, False, "", 0.0))
        ]
        if unknown:
            raise NotDescribed(f"its metadata sets {', '.join(sorted(unknown))}")
