"""The file of answers. It is only appended to: whatever ends the program, each is there once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from typing_extensions import Self

from quickbeam.errors import InvalidInput, QuickbeamError

START = b'{"id": "batch_req_'  # every record begins with this
GROUP = 1.0  # seconds of writing after which records are synced to the disk


class Journal:
    """Records of answers in the file `path`, one line each, held by one program at a time.

    `done` maps each record's `custom_id` to its `id`; `failed` maps the `custom_id` of those
    without an answer to the reason. All are of the model with this `fingerprint`. A record is
    handed to the system as a whole, and synced at least every `GROUP` seconds; a last line that is
    incomplete is cut off.

    Raises `InvalidInput` for a file that is something else or held by another program, and
    `QuickbeamError` if it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.done, self.failed = path, dict[str, str](), dict[str, str]()
        self.fingerprint: str | None = None
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{path}: must be a file")
        if not path.parent.is_dir():
            raise InvalidInput(f"{path}: there is no such folder; make it first")
        with ExitStack() as held, self._written():
            try:
                real = path.resolve()  # the same through any link
                held.enter_context(FileLock(real.parent / f".{real.name}.lock", timeout=0))
            except Timeout:
                raise InvalidInput(
                    f"{path}: another program is writing it; wait for its end, or give another file"
                ) from None
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            held.callback(os.close, self._file)
            self._end = self._load()
            self._held = held.pop_all()
        self._synced = time.monotonic()

    def _load(self) -> int:
        """Read the records that are there, and return where the last whole one ends, in bytes."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.startswith(START) or not line.endswith(b"\n"):
                        raise ValueError
                    self._count(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    whole = line.rstrip(b"\0")  # what a crash may leave where it was to be written
                    if whole[: len(START)] != START[: len(whole)] or file.read(1):
                        raise InvalidInput(
                            f"{self.path}, line {number}: not an answer of quickbeam batch; give "
                            "another output"
                        ) from None
                    break
                end += len(line)
        return end

    def _count(self, record: dict[str, Any]) -> None:
        name, model = record["custom_id"], _fingerprint(record)
        if record["error"] is not None or record["response"]["status_code"] != 200:
            error = record["error"] or record["response"]["body"].get("error", {})
            self.failed[name] = error.get("message", "no reason is given")
        self.done[name] = record["id"]
        self.fingerprint = self.fingerprint or model

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. Raises `InvalidInput` if it is of another model than the others."""
        model = _fingerprint(record)
        if model is not None and self.fingerprint not in (None, model):
            raise InvalidInput(
                f"{self.path}: its answers are of another model, number format or version "
                f"({self.fingerprint}, this is {model}); go on with that one, or give another "
                "output"
            )
        line = json.dumps(record).encode() + b"\n"
        left = memoryview(line)
        with self._written():
            try:
                os.ftruncate(self._file, self._end)  # a last line that was incomplete
                while left:
                    left = left[os.write(self._file, left) :]
            except BaseException:
                os.ftruncate(self._file, self._end)
                raise
            self._end += len(line)
            self._count(record)
            if time.monotonic() - self._synced >= GROUP:
                os.fsync(self._file)
                self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._held, self._written():
            if kind is None:  # where something was refused, the file stays as it was
                os.ftruncate(self._file, self._end)
            os.fsync(self._file)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Raise errors of the disk as `QuickbeamError`."""
        try:
            yield
        except OSError as error:
            count = len(self.done)
            kept = f"; the {count} answers before stay in it, and the same command goes on"
            raise QuickbeamError(
                f"{self.path}: not written ({error.strerror}){kept if count else ''}"
            ) from error


def _fingerprint(record: dict[str, Any]) -> str | None:
    """Return the fingerprint of the model that answered; None if the answer has none."""
    body = record["response"]["body"] if record["response"] is not None else {}
    return body.get("system_fingerprint") if isinstance(body, dict) else None
