"""Read back the JSON records that bench commands wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quickbeam.errors import InvalidInput

# By kind: the keys that identify it. A record is of the first kind whose keys it all has. A kind is
# named as the bench command that writes it; `methods` is `bench` itself.
KINDS: dict[str, tuple[str, ...]] = {
    "vocabulary": ("by_category", "vocab_size"),
    "methods": ("methods", "reference"),
    "acceptance": ("temperatures", "agreement"),
    "trees": ("temperatures", "complete"),
    "throughput": ("concurrency", "over_ar"),
    "weights": ("weights", "over_first"),
    "passes": ("milliseconds", "contexts"),
    "structured": ("structured",),
    "drafting": ("drafting",),
    "heads": ("heads",),
    "recall": ("ways", "text"),
}


class Saved(NamedTuple):
    """A record that was read back. `name` is that of its file, without the suffix."""

    name: str
    kind: str  # of `KINDS`
    content: dict[str, Any]

    @property
    def where(self) -> dict[str, Any]:
        """What the record's `environment` says of the machine; empty where there is none."""
        return _object(self.content.get("environment"))

    @property
    def model(self) -> str:
        return str(self.content.get("model") or "")

    @property
    def settings(self) -> dict[str, Any]:
        return _object(self.content.get("settings"))

    @property
    def whole(self) -> bool:
        """Whether the run was complete. False where Ctrl-C cut it short."""
        return self.content.get("complete") is not False


def read(path: Path) -> Saved:
    """Read a record from a file.

    Raises `InvalidInput` that names a file that can't be read, is not JSON, or is no record of
    `quickbeam bench`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{path}: not JSON ({error}); give a file that `quickbeam bench … --json` wrote"
        ) from error
    return Saved(path.stem, kind_of(content, str(path)), content)


def kind_of(content: Any, name: str) -> str:
    """Return the kind of a record, one of `KINDS`.

    Raises `InvalidInput` where `content` is of no kind. The error calls it `name`.
    """
    if isinstance(content, dict):
        for kind, keys in KINDS.items():
            if all(key in content for key in keys):
                return kind
    raise InvalidInput(
        f"{name}: not a record of `quickbeam bench … --json`; known: {', '.join(KINDS)}"
    )


@contextmanager
def told(saved: Saved) -> Iterator[None]:
    """Turn the errors from reading a broken record into `InvalidInput` that names the record."""
    try:
        yield
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ZeroDivisionError,
    ) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidInput(
            f"{saved.name}: not a whole record of bench {saved.kind} ({why}); measure it again"
        ) from error


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
