"""A bounded index over the texts that this process has finished.

Agents and users repeat tools, files and answers. Where the end of a text agrees with an earlier
text, the continuation of the earlier one is drafted. Drafts never change an answer. They change how
long it takes, so each tenant has a memory of its own: nobody can measure what others were answered.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quickbeam.errors import InvalidInput

logger = logging.getLogger(__name__)

GRAM = 4  # tokens of the n-grams that are looked up
AGREED = 32  # how many tokens before a match are compared at most
SCAN = 8  # how many occurrences of an n-gram are compared
MIN_ENTERED = 32  # so many tokens that an earlier text has, too, are not entered again
FACTOR = 0x9E3779B97F4A7C15  # of the n-grams' hashes
MASK = 2**64 - 1  # keeps them below 2^64
TOKEN_BYTES = 16  # of memory, for each remembered token
KIND = "quickbeam answers"  # of a file that keeps them
TENANTS = 8  # how many tenants are remembered, each with so much of the memory


class Match(NamedTuple):
    """An earlier occurrence of a suffix."""

    position: int  # where in the text its continuation begins
    length: int  # tokens of the suffix that it matches


class Texts:
    """The latest texts of one tenant, `capacity` tokens of them, and where their n-grams occurred.

    The texts lie in a ring of tokens, each in one piece, so the oldest are forgotten first. The
    hash of `GRAM` tokens chooses a slot of a table. The slot says where these tokens occurred last,
    and each occurrence says where the one before was. A match is compared with the text itself. So
    neither two n-grams of one slot nor tokens that were overwritten do any harm.

    All numbers are stored plus one: 0 stands for nothing, and for the end of a text.
    """

    def __init__(self, capacity: int) -> None:
        self._bits = max(4, capacity.bit_length())
        self._ring = np.zeros(capacity, np.int32)
        self._older = np.zeros(capacity, np.int32)
        self._newest = np.zeros(1 << self._bits, np.int32)
        self._end = 0  # where the next token goes

    def add(self, ids: Sequence[int]) -> None:
        """Enter a text. The beginning that an earlier text has, too, is left out."""
        ids = ids[self._remembered(ids) :]
        ids = ids[-(len(self._ring) - 1) :]
        if len(ids) <= GRAM:
            return
        tokens = np.asarray(ids, np.int64)
        begin = self._end if self._end + len(ids) < len(self._ring) else 0
        end = begin + len(ids)
        self._ring[begin:end] = tokens + 1
        self._ring[end] = 0
        self._end = end + 1
        slots = self._slots(tokens[:-1])
        after = np.arange(begin + GRAM, end)
        order = np.argsort(slots, kind="stable")  # occurrences of one slot side by side
        slots = slots[order]
        after = after[order]
        first = np.append(True, slots[1:] != slots[:-1])
        self._older[after] = np.where(first, self._newest[slots], np.roll(after, 1) + 1)
        last = np.roll(first, -1)
        self._newest[slots[last]] = after[last] + 1

    def latest(self, count: int) -> list[int]:
        """Return the last `count` tokens, or all where there are fewer, the newest last."""
        count = min(count, len(self._ring))
        stored = self._ring.take(np.arange(self._end - count, self._end), mode="wrap")
        tokens: list[int] = (stored[stored > 0] - 1).tolist()
        return tokens

    def ring(self) -> npt.NDArray[np.int32]:
        """Return all texts, the oldest first, as they are stored."""
        return np.roll(self._ring, -self._end)

    def match(self, text: Sequence[int], path: Sequence[int] = ()) -> Match | None:
        """Return the occurrence of the end of `text` and `path` that agrees with the most of them.

        `path`: drafted tokens that continue the text. `position` is that of the token that
        followed. Among equals the newest is taken. None where fewer than `GRAM` tokens agree.
        """
        positions = self._positions([*text[-GRAM:], *path][-GRAM:])
        if not positions:
            return None
        suffix = [*text[-AGREED:], *path][-AGREED:]
        best: Match | None = None
        for position in positions:
            before = self._ring[max(0, position - len(suffix)) : position].tolist()
            length = 0
            for theirs, ours in zip(reversed(before), reversed(suffix), strict=False):
                if theirs != ours + 1:
                    break
                length += 1
            if length >= GRAM and (best is None or length > best.length):
                best = Match(position, length)
        return best

    def continuation(self, match: Match, length: int) -> list[int]:
        """Return the tokens that followed a match, up to `length` and to the end of that text."""
        stored = self._ring[match.position : match.position + length].tolist()
        if 0 in stored:
            stored = stored[: stored.index(0)]
        return [token - 1 for token in stored]

    def _remembered(self, ids: Sequence[int]) -> int:
        """Return how many tokens from the beginning of a text need not be entered.

        A conversation comes back with every turn, longer than at the last one.
        """
        entered = GRAM  # so many tokens are those of an earlier text
        while True:
            positions = self._positions(ids[entered - GRAM : entered])
            agreements = [self._agreement(position, ids[entered:]) for position in positions]
            longest = max(agreements, default=0)
            if longest < MIN_ENTERED:
                break
            entered += longest
        return max(0, entered - AGREED) if entered > GRAM else 0

    def _agreement(self, position: int, ids: Sequence[int]) -> int:
        """Return how many of `ids` are equal to the tokens of the ring from `position` on."""
        theirs = self._ring[position : position + len(ids)]
        ours = np.asarray(ids[: len(theirs)], np.int64) + 1
        differ = np.flatnonzero(theirs != ours)
        return int(differ[0]) if len(differ) else len(theirs)

    def _positions(self, gram: Sequence[int]) -> list[int]:
        positions = list[int]()
        if len(gram) < GRAM:
            return positions
        total = 0  # as in `_slots`, without the arrays: every step looks up a few
        for token in gram:
            total = (total + token) * FACTOR & MASK
        position = self._newest.item(total >> (64 - self._bits))
        while position and len(positions) < SCAN:
            positions.append(position - 1)
            position = self._older.item(position - 1)
        return positions

    def _slots(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        count = len(tokens) - GRAM + 1
        sums = np.zeros(count, np.uint64)
        for i in range(GRAM):
            sums = (sums + tokens[i : i + count].astype(np.uint64)) * np.uint64(FACTOR)
        return (sums >> np.uint64(64 - self._bits)).astype(np.int64)  # type: ignore[no-any-return]


class AnswerMemory:
    """The finished texts of every tenant, in `size` bytes.

    A program's own requests, whose tenant is None, may take all of it. The tenants of a server have
    an eighth each, and the one that has asked for nothing the longest is forgotten.

    `keep`: a file that holds the texts from one process to the next. It is read here, and `close`
    writes it, with the `model`. Raises `InvalidInput` for another file, or another model's, and for
    a memory that the machine doesn't have.
    """

    def __init__(self, size: int, keep: Path | None = None, model: str = "") -> None:
        if size > psutil.virtual_memory().total:
            raise InvalidInput(f"a memory of answers of {size} bytes: more than this machine has")
        if keep is not None and not keep.parent.is_dir():
            raise InvalidInput(
                f"keep={str(keep)!r}: there is no folder {keep.parent}; make it first"
            )
        self._tokens = size // TOKEN_BYTES
        self._keep = keep
        self._model = model
        self._texts = OrderedDict[Hashable, Texts]()
        self._forgotten = False  # whether the file may hold more than what is here
        if keep is not None and keep.exists():
            self._read(keep)

    def check(self, vocab: int) -> None:
        """Raise `InvalidInput` where a kept text has a token that is none of `vocab`."""
        if any(texts.ring().max(initial=0) > vocab for texts in self._texts.values()):
            raise InvalidInput(
                f"{self._keep} keeps answers of another vocabulary, or is damaged: remove it"
            )

    def of(self, tenant: Hashable) -> Texts:
        """Return what is remembered for a tenant."""
        if tenant not in self._texts:
            while len(self._texts) >= TENANTS:
                self._texts.popitem(last=False)
            share = 1 if tenant is None else TENANTS
            self._texts[tenant] = Texts(max(1024, self._tokens // share))
        self._texts.move_to_end(tenant)
        return self._texts[tenant]

    def forget(self) -> None:
        self._texts.clear()
        self._forgotten = True

    def close(self) -> None:
        """Write the texts to the file, if there is one, and forget them.

        Texts that the file holds, and that were forgotten here, stay in the file. A file that can't
        be written stays as it was, with a warning.
        """
        if self._keep is not None and self._texts:
            if self._forgotten and self._keep.exists():
                new = self._texts
                self._texts = OrderedDict()
                with suppress(InvalidInput):  # another file by now, which this one replaces
                    self._read(self._keep)
                for tenant, texts in new.items():
                    self._add(tenant, texts.ring())
            part = self._keep.with_name(f".{self._keep.name}.{os.getpid()}.part")
            try:
                self._write(part)
                os.replace(part, self._keep)
            except (OSError, SafetensorError) as error:
                part.unlink(missing_ok=True)
                logger.warning("answers are not kept: %s can't be written (%s)", self._keep, error)
        self.forget()

    def _write(self, path: Path) -> None:
        rings = {str(i): texts.ring() for i, texts in enumerate(self._texts.values())}
        names = json.dumps([tenant_name(tenant) for tenant in self._texts])
        save_file(rings, path, metadata={"kind": KIND, "model": self._model, "tenants": names})

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != KIND:
                    raise ValueError("its metadata don't say so")
                if metadata["model"] != self._model:
                    raise InvalidInput(
                        f"{path} keeps answers of {metadata['model']}, not of {self._model}: name "
                        "another file, one for each model"
                    )
                for i, name in enumerate(json.loads(metadata["tenants"])):
                    ring = file.get_tensor(str(i))
                    if ring.ndim != 1 or ring.dtype != np.int32 or (ring < 0).any():
                        raise ValueError("it holds numbers that are no tokens")
                    self._add(tenant_of_name(name), ring)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise InvalidInput(
                f"{path} is no file of kept answers ({error}): name another one, or remove it"
            ) from error

    def _add(self, tenant: Hashable, ring: npt.NDArray[np.int32]) -> None:
        """Add the texts of a ring as `Texts.ring` returns it."""
        texts = self.of(tenant)
        boundaries = np.flatnonzero(np.diff(ring > 0, prepend=0, append=0))
        for begin, end in boundaries.reshape(-1, 2):
            texts.add((ring[begin:end] - 1).tolist())


def tenant_name(tenant: Hashable) -> str | None:
    """Return a tenant as JSON has it: a key's digest, an address, or None."""
    if tenant is None:
        return None
    return tenant.hex() if isinstance(tenant, bytes) else f"@{tenant}"


def tenant_of_name(name: str | None) -> Hashable:
    """Return the tenant that `tenant_name` named."""
    if name is None:
        return None
    return name[1:] if name.startswith("@") else bytes.fromhex(name)
