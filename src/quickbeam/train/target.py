"""The target as training reads it: its hidden states, embedding, head, and weights by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from quickbeam.drafters.loss import fast_bfloat16
from quickbeam.models import builtin
from quickbeam.models.base import Batch, Chain, Model
from quickbeam.models.opening import LoadedModel, open_checkpoint, open_model
from quickbeam.models.stack import Linear, Stack
from quickbeam.models.torch.pages import to_device
from quickbeam.models.weights.parameters import Parameters, rows_of

SAMPLE = 256  # tokens by whose hidden states targets are told apart


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


def padded(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Return rows `[n, …]`, each n its own, side by side, `[b, length, …]`, with zeros behind."""
    batch = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for into, row in zip(batch, rows, strict=True):
        into[: len(row)] = row
    return batch


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
        return batch.to(self.device)._replace(hidden=padded(hidden, batch.tokens.shape[1]))

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


class Embedding(nn.Module):
    """The target's embedding, in float32. `embed_scale`: what its rows are multiplied by."""

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        self._embedding, self.embed_scale = embedding, scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._embedding(tokens)
        return embedded.float()
