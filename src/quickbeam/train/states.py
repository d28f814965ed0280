"""Hidden states of text, which the target reads once and a training many times."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quickbeam.train.target import FrozenTarget, TrainingBatch, padded

KEPT_BYTES = 16 << 30  # of hidden states on disk, at most


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
        rows = [self._kept_at(name) for name in names]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            part = self._target.read(TrainingBatch(*(column[missing] for column in batch[:3])))
            scarce = _scarce(self._target.device)
            for i, row in zip(missing, part.hidden, strict=True):
                rows[i] = hidden = row[: lengths[i]]
                if not scarce:
                    self._keep(names[i], hidden)
        hidden = padded([row for row in rows if row is not None], batch.tokens.shape[1])
        return batch.to(self._target.device)._replace(hidden=hidden)

    def _kept_at(self, name: str) -> torch.Tensor | None:
        """Return hidden states, or None if they are not there, or their file is damaged."""
        with suppress(KeyError, OSError, SafetensorError):
            return self._kept[name]
        return None

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
