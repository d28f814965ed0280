"""The target as training reads it: hidden states of text, made when they are needed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from quickbeam.drafters.folder import embed_scale
from quickbeam.errors import InvalidInput
from quickbeam.models import builtin
from quickbeam.models.base import check_layers
from quickbeam.models.torch.pages import to_device
from quickbeam.models.transformers_class import load_model

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


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which attention is not cuDNN's.

    That plans anew for each shape, 40 ms each (an H200, PyTorch 2.11), and trees have many shapes.
    """
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(others) if device.type == "cuda" else nullcontext()


class HiddenStates:
    """Hidden states between the layers of a model, caught as it runs.

    `layers`: number i, from 1 to the number of layers, means the residual stream after i layers.
    One more than the number of layers means what the head reads, after the final norm. Raises
    `InvalidInput` for others, and for a model whose layers are not one list.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        count = model.config.get_text_config().num_hidden_layers
        check_layers(layers, count)
        modules = [*decoder_layers(model), model.base_model]
        self._layers = tuple(layers)
        self._caught: dict[int, torch.Tensor] = {}
        self._hooks = [
            modules[layer - 1].register_forward_hook(partial(self._catch, layer))
            for layer in set(layers)
        ]

    def close(self) -> None:
        """Catch none any more."""
        for hook in self._hooks:
            hook.remove()
        self._caught.clear()

    def _catch(self, layer: int, module: nn.Module, args: Any, out: Any) -> None:
        self._caught[layer] = out if isinstance(out, torch.Tensor) else out[0]

    def take(self) -> torch.Tensor:
        """Return `[..., n, len(layers) * d]` of the last forward, in the order of `layers`."""
        states = torch.cat([self._caught[layer] for layer in self._layers], -1)
        self._caught.clear()
        return states


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's layers. Raises `InvalidInput` where they are not one list."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == count)
    for layers in lists:
        if any(hasattr(module, "layer_idx") for module in layers[0].modules()):
            return layers
    raise InvalidInput(
        f"{type(model).__name__} keeps its layers in no list of {count}, where they are looked for"
    )


class FrozenTarget:
    """The hidden states of a model's layers, its embedding and its head.

    `layers`: numbers as of `HiddenStates`. `head`: `[vocab, d]`. `norm`: the weight of the last
    norm, `[d]`, where it is found.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._model = model.requires_grad_(False).eval()
        self._numbers = tuple(layers)
        self._hidden_states = HiddenStates(model, layers)
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
        return batch._replace(hidden=self._hidden_states.take())

    def digest(self) -> str:
        """Return a hash of what hidden states depend on: configuration, layers and all weights."""
        about = f"{self._model.config.to_json_string()} {self._numbers}"
        digest = hashlib.blake2b(about.encode(), digest_size=16)
        for parameter in self._model.parameters():
            digest.update(parameter.detach().flatten().view(torch.uint8).cpu().numpy().data)
        return digest.hexdigest()

    def to_cpu(self) -> None:
        """Give the model up but for the embedding and the head, which move to the CPU."""
        del self._model, self.layers
        self._hidden_states.close()
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
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).hexdigest()


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
        """Return one in `folder`, or of a GPU's target in half of its free memory at most."""
        if target.device.type == "cpu":
            files = StateFiles(folder / target.digest())
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

    def _keep(self, name: str, hidden: torch.Tensor) -> None:
        if name in self._kept or hidden.nbytes > self._left:
            return
        try:
            self._kept[name] = hidden.clone()  # without the padding of its batch
            self._left -= hidden.nbytes
        except (OSError, SafetensorError):  # a full disk: what is not kept is read again
            self._left = 0


class Embedding(nn.Module):
    """The target's embedding, in float32."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding, self.embed_scale = embedding, embed_scale(embedding)

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
    return load_model(builtin.resolve(model), dtype, device)


def fast_bfloat16(device: torch.device) -> bool:
    """Return whether PyTorch has fast products in bfloat16 on `device`."""
    return device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast(device: torch.device) -> torch.autocast:
    """Return a context in which products are computed in bfloat16 if that is fast on the device.

    Parameters and sums stay float32.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_bfloat16(device))
