"""The target as training reads it: hidden states of text, made when they are needed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from quickbeam import hub
from quickbeam.models.gathered import without_cudnn
from quickbeam.models.hf_attention import Features, decoder_layers
from quickbeam.models.loading import load_model

KEPT_BYTES = 16 << 30  # of hidden states on disk, at most, and at most half of what is free there


class TrainingBatch(NamedTuple):
    """Conversations side by side, padded at the end.

    `tokens`: `[b, n]` int64. `answer`: `[b, n]` bool. `lengths`: `[b]` int64, without the padding.
    `hidden`: `[b, n, L * d]`, the target's hidden states of L layers after each token, once
    `FrozenTarget.read` made them.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    lengths: torch.Tensor
    hidden: torch.Tensor = torch.empty(0)

    def to(self, device: torch.device) -> TrainingBatch:
        return TrainingBatch(*(column.to(device) for column in self))


class FrozenTarget:
    """The hidden states of a model's `layers` (numbers of `Features`), its embedding and its head.

    `head`: `[vocab, d]`. `norm`: the weight of the last norm, `[d]`, where it is found.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._model = model.requires_grad_(False).eval()
        self._features = Features(model, layers)
        self.device: torch.device = model.device
        self.head: torch.Tensor = model.get_output_embeddings().weight.detach()
        self.embedding = Embedding(model.get_input_embeddings())
        self.layers: Sequence[nn.Module] = list(decoder_layers(model))
        self.norm: torch.Tensor | None = getattr(
            getattr(model.base_model, "norm", None), "weight", None
        )

    @torch.no_grad()
    def read(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with hidden states, on the target's device."""
        batch = batch.to(self.device)
        # padding follows the text, and attention is causal: no mask is needed
        with without_cudnn(self.device):
            self._model.base_model(input_ids=batch.tokens, use_cache=False)
        return batch._replace(hidden=self._features.take())

    def to_cpu(self) -> None:
        """Give the model up but for the embedding and the head, which move to the CPU."""
        del self._model, self.layers
        self._features.close()
        self.device, self.head = torch.device("cpu"), self.head.cpu()
        self.embedding.cpu()


class StateCache:
    """Hidden states of conversations, each of which the target reads once.

    They are kept in the target's number format, a file for each text, in `folder` of at most
    `limit` bytes. What does not fit is read again.
    """

    def __init__(self, target: FrozenTarget, folder: Path, limit: int = KEPT_BYTES) -> None:
        self._target, self._folder = target, folder
        folder.mkdir(parents=True, exist_ok=True)
        kept = sum(path.stat().st_size for path in folder.iterdir())
        self._left = min(limit, kept + shutil.disk_usage(folder).free // 2) - kept

    def read(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with hidden states, on the target's device."""
        lengths = batch.lengths.tolist()
        paths = [self._path(row[:n]) for row, n in zip(batch.tokens, lengths, strict=True)]
        if all(path.is_file() for path in paths):
            rows = [load_file(path)["hidden"] for path in paths]
            return batch._replace(hidden=pad_sequence(rows, batch_first=True)).to(
                self._target.device
            )
        batch = self._target.read(batch)
        for path, row, length in zip(paths, batch.hidden, lengths, strict=True):
            self._write(path, row[:length])
        return batch

    def _path(self, tokens: torch.Tensor) -> Path:
        digest = hashlib.blake2b(tokens.cpu().numpy().tobytes(), digest_size=16)
        return self._folder / f"{digest.hexdigest()}.safetensors"

    def _write(self, path: Path, hidden: torch.Tensor) -> None:
        if path.is_file() or hidden.nbytes > self._left:
            return
        part = path.with_suffix(".part")
        try:
            save_file({"hidden": hidden.cpu().contiguous()}, part)
            os.replace(part, path)
            self._left -= hidden.nbytes
        except (OSError, SafetensorError):  # a full disk: what is not kept is read again
            part.unlink(missing_ok=True)
            self._left = 0


class Embedding(nn.Module):
    """The target's embedding, in float32."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._embedding(tokens)
        return embedded.float()


def load_target(model: str | None, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Load a model to be read, and its tokenizer.

    It is in bfloat16 where the device multiplies that fast. Without AVX-512 or its like, PyTorch
    multiplies matrices in bfloat16 by plain loops. Measured on AVX2, two cores: 1 GFLOP/s for
    `x @ head` and 19 for `x @ head.T`, and 150 in float32.
    """
    dtype = torch.bfloat16 if fast_bfloat16(device) else torch.float32
    return load_model(hub.resolve(model), dtype, device)


def fast_bfloat16(device: torch.device) -> bool:
    """Return whether PyTorch has fast products in bfloat16 on `device`."""
    return device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast(device: torch.device) -> torch.autocast:
    """Return a context in which products are computed in bfloat16 if that is fast on the device.

    Parameters and sums stay float32.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_bfloat16(device))
