"""The file of answers. Records are only appended.

So no answer is lost or written twice, whatever ends the program.
"""

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

RECORD_START = b'{"id": "batch_req_'  # every record begins with this
SYNC_SECONDS = 1.0  # seconds of writing after which records are synced to the disk


class Journal:
    """Records of answers in the file `path`, one line each. One program at a time may write it.

    - `done`: each record's `id`, by its `custom_id`.
    - `failed`: why a request has no answer, by its `custom_id`.
    - `fingerprint`: that of the model that gave the answers; None while there are none.

    A record is handed to the system as a whole, and synced at least every `SYNC_SECONDS`. A last
    line that is incomplete is cut off.

    Raises `InvalidInput` for a file that holds something else or that another program writes, and
    `QuickbeamError` if it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = dict[str, str]()
        self.failed = dict[str, str]()
        self.fingerprint: str | None = None
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{path}: must be a file")
        if not path.parent.is_dir():
            raise InvalidInput(f"{path}: there is no such folder; make it first")
        with ExitStack() as resources, self._disk_errors():
            target = path.resolve()  # the same through any link
            lock = FileLock(target.parent / f".{target.name}.lock", timeout=0)
            try:
                resources.enter_context(lock)
            except Timeout:
                raise InvalidInput(
                    f"{path}: another program is writing it; wait for its end, or give another file"
                ) from None
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            resources.callback(os.close, self._file)
            self._end = self._load()
            self._resources = resources.pop_all()
        self._synced = time.monotonic()

    def _load(self) -> int:
        """Read the records that are there. Return where the last complete one ends, in bytes."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.startswith(RECORD_START) or not line.endswith(b"\n"):
                        raise ValueError
                    self._count(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    begin = line.rstrip(b"\0")[: len(RECORD_START)]  # a crash may leave zeros
                    is_cut_off = RECORD_START.startswith(begin) and not file.read(1)
                    if not is_cut_off:
                        raise InvalidInput(
                            f"{self.path}, line {number}: not an answer of quickbeam batch; give "
                            "another output"
                        ) from None
                    break
                end += len(line)
        return end

    def _count(self, record: dict[str, Any]) -> None:
        name = record["custom_id"]
        fingerprint = _fingerprint(record)  # raises for what is no record, before it is counted
        if record["error"] is not None or record["response"]["status_code"] != 200:
            error = record["error"] or record["response"]["body"].get("error", {})
            self.failed[name] = error.get("message", "no reason is given")
        self.done[name] = record["id"]
        self.fingerprint = self.fingerprint or fingerprint

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
        unwritten = memoryview(line)
        with self._disk_errors():
            try:
                os.ftruncate(self._file, self._end)  # a last line that was incomplete
                while unwritten:
                    count = os.write(self._file, unwritten)
                    unwritten = unwritten[count:]
            except BaseException:
                os.ftruncate(self._file, self._end)
                raise
            self._end += len(line)
            self._count(record)
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        with self._resources, self._disk_errors():
            if error_type is None:  # where something was refused, the file stays as it was
                os.ftruncate(self._file, self._end)
            os.fsync(self._file)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raise errors of the disk as `QuickbeamError`."""
        try:
            yield
        except OSError as error:
            message = f"{self.path}: not written ({error.strerror})"
            if count := len(self.done):
                message += f"; the {count} answers before stay in it, and the same command goes on"
            raise QuickbeamError(message) from error


def _fingerprint(record: dict[str, Any]) -> str | None:
    """Return the fingerprint of the model that answered; None if the answer has none."""
    body = record["response"]["body"] if record["response"] is not None else {}
    return body.get("system_fingerprint") if isinstance(body, dict) else None
