"""The target as training reads it: hidden states of text, made when they are needed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from quickbeam.drafters.loss import fast_bfloat16
from quickbeam.models import builtin
from quickbeam.models.base import Batch, Chain, Model
from quickbeam.models.opening import LoadedModel, open_checkpoint, open_model
from quickbeam.models.stack import Linear, Stack
from quickbeam.models.torch.pages import to_device
from quickbeam.models.weights.parameters import Parameters, rows_of

SAMPLE = 256  # tokens by whose hidden states targets are told apart
KEPT_BYTES = 16 << 30  # of hidden states on disk, at most


class TrainingBatch(NamedTuple):
    """Conversations side by side, padded at the end.

    `tokens`: `[b, n]` int64. `answer`: `[b, n]` bool. `lengths`: `[b]` int64, without the padding.
    `hidden`: `[b, n, L * d]`, the target's hidden states of L layers after each token, once
    `FrozenTarget.read` made them. They are on the target's device; the rest is made on the CPU.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    lengths: torch.Tensor
    hidden: torch.Tensor = torch.empty(0)

    def to(self, device: torch.device) -> TrainingBatch:
        """Return it with all but the hidden states, which are there, copied from the CPU."""
        tokens, answer, lengths = (to_device(column, device) for column in self[:3])
        return TrainingBatch(tokens, answer, lengths, self.hidden)


class OpenTarget(NamedTuple):
    """A model that writes text and is read, its tokenizer, and its weights by name.

    `loaded`: the model as it is served, with its tokenizer. `parameters`, `stack`: the weights and
    their names; weights in few bits are widened when they are asked for.
    """

    loaded: LoadedModel
    parameters: Parameters
    stack: Stack


def open_target(name: str | None, device: torch.device) -> OpenTarget:
    """Open a model from a folder, a `.gguf` file or a Hugging Face id; None is the built-in one.

    Raises `InvalidInput` as `open_model` does.
    """
    path = builtin.resolve(name)
    loaded = open_model(path, torch.bfloat16, device)
    checkpoint = open_checkpoint(path, torch.bfloat16)
    return OpenTarget(loaded, checkpoint, checkpoint.stack)


def dense(linear: Linear, parameters: Parameters) -> torch.Tensor:
    """Return the weights of a product, one below the other, `[outputs, inputs]`."""
    rows = [rows_of(part, parameters(part.name)) for part in linear.weights]
    return torch.cat(rows) if len(rows) > 1 else rows[0]


class FrozenTarget:
    """The target as training reads it: hidden states, embedding, head, and weights by name.

    `aux_layers`: whose hidden states are read (`Model.set_aux_layers`). `head`: `[vocab, d]`, in
    bfloat16 where the device multiplies that fast. Without AVX-512 or its like, PyTorch multiplies
    matrices in bfloat16 by plain loops. Measured on AVX2, two cores: 1 GFLOP/s for `x @ head` and
    19 for `x @ head.T`, and 150 in float32.
    """

    def __init__(
        self, model: Model, parameters: Parameters, stack: Stack, aux_layers: Sequence[int]
    ) -> None:
        self._model = model
        self._aux_layers = tuple(aux_layers)
        self.dtype = model.dtype
        model.set_aux_layers(self._aux_layers)
        self.parameters, self.stack = parameters, stack
        self.device = model.device
        dtype = torch.bfloat16 if fast_bfloat16(self.device) else torch.float32
        dtype = dtype if model.dtype is torch.bfloat16 else model.dtype
        self.head = dense(stack.head, parameters).to(self.device, dtype).detach()
        self.embedding = Embedding(model.embedding, stack.scale)

    @torch.no_grad()
    def read(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with hidden states, on the target's device."""
        rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
        pool = self._model.pool
        parts = [Chain(pool.new(), tokens[:length], wanted=0) for tokens, length in rows]
        try:
            passed = self._model.forward(Batch([*parts]))
        finally:
            for part in parts:
                part.cache.release()
        hidden = [part.hidden.to(self.dtype) for part in passed if part.hidden is not None]
        return batch.to(self.device)._replace(hidden=pad_sequence(hidden, batch_first=True))

    def digest(self) -> str:
        """Return a hash of the hidden states of a sample of tokens.

        Targets of other weights, formats or `aux_layers` have another one.
        """
        digest = hashlib.blake2b(f"{self._aux_layers}".encode(), digest_size=16)
        digest.update(self._sample().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def size_of_hidden(self, layer: int) -> float:
        """Return the median size (root mean square) of hidden states after one of `aux_layers`.

        The first tokens of a text have much larger ones in many models.
        """
        return float(self.sample_after(layer).square().mean(-1).sqrt().median())

    def sample_after(self, layer: int) -> torch.Tensor:
        """Return hidden states after one of `aux_layers` of sampled tokens, `[n, d]` float32."""
        states = self._sample().float().chunk(len(self._aux_layers), -1)
        return states[self._aux_layers.index(layer)]

    def _sample(self) -> torch.Tensor:
        """Return the hidden states of tokens from the whole vocabulary, on the CPU."""
        vocab = self._model.vocab_size
        tokens = torch.linspace(0, vocab - 1, min(vocab, SAMPLE)).long()[None]
        batch = TrainingBatch(tokens, tokens > 0, torch.tensor([tokens.shape[1]]))
        return self.read(batch).hidden[0].cpu()

    def to_cpu(self) -> None:
        """Give the model up but for the embedding and the head, which move to the CPU."""
        del self._model
        self.device, self.head = torch.device("cpu"), self.head.cpu()
        self.embedding.cpu()


class StateFiles:
    """Hidden states of one target in a folder, a file for each text, by its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def free(self) -> int:
        """Return how many bytes may be added: in all `KEPT_BYTES`, and half of what is free."""
        kept = sum(path.stat().st_size for path in self._folder.iterdir())
        return min(KEPT_BYTES - kept, shutil.disk_usage(self._folder).free // 2)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def __contains__(self, name: str) -> bool:
        return self._path(name).is_file()

    def __getitem__(self, name: str) -> torch.Tensor:
        return load_file(self._path(name))["hidden"]

    def __setitem__(self, name: str, hidden: torch.Tensor) -> None:
        """Write a file, completely or not at all. Raises `OSError` or `SafetensorError`."""
        part = self._path(name).with_suffix(".part")
        try:
            save_file({"hidden": hidden}, part)
            os.replace(part, self._path(name))
        finally:
            part.unlink(missing_ok=True)


def _name(tokens: torch.Tensor) -> str:
    return hashlib.blake2b(tokens.long().numpy().tobytes(), digest_size=16).hexdigest()


def _scarce(device: torch.device) -> bool:
    """Whether less than a quarter of a GPU's memory is free, which longer steps may need."""
    free, whole = torch.cuda.mem_get_info(device) if device.type == "cuda" else (1, 1)
    return free < whole // 4


class StateCache:
    """Hidden states of conversations, each of which the target reads once.

    They are `kept` in the target's number format, at most `limit` bytes. What does not fit is read
    again.
    """

    def __init__(
        self, target: FrozenTarget, kept: StateFiles | dict[str, torch.Tensor], limit: int
    ) -> None:
        self._target, self._kept, self._left = target, kept, limit

    @staticmethod
    def of(target: FrozenTarget, folder: Path) -> StateCache:
        """Return one in `folder`, or of a GPU's target in half of its free memory at most.

        What the folder holds of other targets is removed.
        """
        if target.device.type == "cpu":
            own = folder / target.digest()
            for other in folder.glob("*"):
                if other != own:
                    shutil.rmtree(other, ignore_errors=True)
            files = StateFiles(own)
            return StateCache(target, files, files.free())
        on_cuda = target.device.type == "cuda"
        free = torch.cuda.mem_get_info(target.device)[0] if on_cuda else 0
        return StateCache(target, {}, free // 2)

    def read(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch, which is on the CPU, with hidden states, on the target's device."""
        lengths = batch.lengths.tolist()
        names = [_name(row[:n]) for row, n in zip(batch.tokens, lengths, strict=True)]
        if all(name in self._kept for name in names):
            with suppress(OSError, SafetensorError):  # a damaged file: its text is read again
                hidden = pad_sequence([self._kept[name] for name in names], batch_first=True)
                return batch.to(self._target.device)._replace(hidden=hidden)
        batch = self._target.read(batch)
        if not _scarce(self._target.device):
            for name, row, length in zip(names, batch.hidden, lengths, strict=True):
                self._keep(name, row[:length])
        return batch

    def add(self, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep the hidden states of a conversation, `[n]`, that was written.

        `hidden`: of all tokens but the last, which says nothing about another one. Fewer are not
        kept.
        """
        if len(hidden) == len(tokens) - 1:
            hidden = F.pad(hidden.to(self._target.dtype), (0, 0, 0, 1))
            self._keep(_name(tokens), hidden)

    def _keep(self, name: str, hidden: torch.Tensor) -> None:
        if name in self._kept or hidden.nbytes > self._left:
            return
        try:
            self._kept[name] = hidden.clone()  # without the padding of its batch
            self._left -= hidden.nbytes
        except (OSError, SafetensorError):  # a full disk: what is not kept is read again
            self._left = 0


class Embedding(nn.Module):
    """The target's embedding, in float32. `embed_scale`: what its rows are multiplied by."""

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        self._embedding, self.embed_scale = embedding, scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._embedding(tokens)
        return embedded.float()
