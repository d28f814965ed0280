"""A `.gguf` file as a model's parameters (`Parameters`), its blocks as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quickbeam.errors import refuse_incomplete
from quickbeam.models.angles import hold
from quickbeam.models.checkpoint import ModelConfig, expected
from quickbeam.models.families import stack_of
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.architecture import ANGLES, architecture_of, stored_names
from quickbeam.models.gguf.file import GgufFile
from quickbeam.models.gguf.tokenizer import load_tokenizer
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.quantised import BlockRows, Weight, dense_rows
from quickbeam.models.stack import Stack
from quickbeam.models.stack_tensors import names, norms

SAMPLED = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
ENDS = ("eos", "eot", "eom")  # tokens that end an answer


class GgufCheckpoint:
    """The parameters of a `.gguf` file, by the names of transformers' causal language model.

    With `dtype` bfloat16 (None), weights in blocks are given as `BlockRows`, others as they are
    stored. With float32, all are widened, exactly. `config`, `stack`: as of `Checkpoint`.
    """

    quantised = True  # most of its weights

    def __init__(self, path: Path, dtype: torch.dtype | None, kernels: Kernels) -> None:
        """Raises `NotDescribed` for what is not described, and `InvalidInput` for a file that is
        not whole, or has weights in other formats."""
        self.path, self.file, self._kernels = path, GgufFile(path), kernels
        self.dtype = dtype or torch.bfloat16
        self._of, fields = architecture_of(self.file)
        self.config: Any = ModelConfig(fields)
        hold(self.config)
        self.stack: Stack = stack_of(self.config, self.dtype)
        self.tokenizer = load_tokenizer(self.file)
        for name in ("tokens", "merges", "scores", "token_type"):  # large, and read
            self.file.metadata.pop(f"tokenizer.ggml.{name}", None)
        self._norms = {name for norm in norms(self.stack) for name in norm.weights}
        self._stored = self._places()
        shapes = expected(self.stack, self.config)
        odd = [(name, self.shape(name), shape) for name, shape in shapes.items()]
        refuse_incomplete([], [one for one in odd if one[1] != one[2]])

    def _places(self) -> dict[str, str]:
        """Return the name in the file of each parameter of the stack."""
        known, wanted = stored_names(self._of, self.config.num_hidden_layers), names(self.stack)
        found = {}
        for name in wanted:
            own, _, kind = name.rpartition(".")
            if own in known and (stored := f"{known[own]}.{kind}") in self.file.tensors:
                found[name] = stored
        (head,) = {one.name for one in self.stack.head.weights}
        if self.config.tie_word_embeddings and self.stack.embedding in found:
            found[head] = found[self.stack.embedding]
        if odd := sorted(self.file.tensors.keys() - set(found.values()) - set(ANGLES)):
            raise NotDescribed(f"the file holds {odd[0]}")
        refuse_incomplete(wanted - found.keys(), [])
        return found

    @property
    def ends(self) -> set[int]:
        """Ids that end an answer."""
        found = (self.file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS)
        return {one for one in found if isinstance(one, int)}

    @property
    def sampling(self) -> dict[str, Any]:
        """What the file says of sampling, in the words of a generation config."""
        of = self.file.metadata
        found = {own: of.get(f"general.sampling.{name}") for name, own in SAMPLED.items()}
        return {name: value for name, value in found.items() if value is not None}

    def __call__(self, name: str) -> Any:
        return self.rows(name)

    def shape(self, name: str) -> list[int]:
        return list(self.file.tensors[self._stored[name]].shape)

    def mapped(self, name: str) -> Any:
        return self.rows(name)

    def like(self, name: str) -> Weight:
        if self.dtype is torch.float32:
            return torch.empty(self.shape(name), device="meta")
        found: Weight = self.rows(name)  # mapped
        return found

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Return rows `first` to `last` (excluded) of a tensor, `BlockRows` or numbers.

        Where `first` is not 0, what was read before it is let go of.
        """
        if first:
            self.file.forget()
        found = self._ordered(name, self.file[self._stored[name]])
        if name in self._norms and self._of.plus_one and isinstance(found, torch.Tensor):
            found = found.float() - 1
        last = len(found) if last is None else last
        if isinstance(found, BlockRows):
            blocks = found[first:last]
            return dense_rows(self._kernels, blocks) if self.dtype is torch.float32 else blocks
        part = found[first:last]
        return part.to(self.dtype) if part.dim() > 1 or self.dtype is torch.float32 else part

    def _ordered(self, name: str, weight: Weight) -> Weight:
        """Return a weight or bias with the halves of a head one behind the other."""
        heads = {
            "q_proj": self.config.num_attention_heads,
            "k_proj": self.config.num_key_value_heads,
        }.get(name.rpartition(".")[0].rpartition(".")[2])
        if heads is None or not self._of.turned:
            return weight
        if isinstance(weight, BlockRows):
            return BlockRows(_halves(weight.data, heads), weight.name)
        return _halves(weight, heads)

    def release(self, layers: str, layer: int | None) -> None:
        """Let go of what was read; it is mapped."""
        self.file.forget()


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows 2i and 2i + 1 of each head to i and i + half."""
    apart = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return apart.transpose(1, 2).reshape(rows.shape)
