"""`quickbeam pull`: the embedded models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from quickbeam import hub
from quickbeam.cli.common import progress_bar, strict_json
from quickbeam.errors import InvalidInput


@dataclass(frozen=True)
class Pulled:
    """What is fetched or listed."""

    name: str = field(
        default=hub.DEFAULT,
        metadata={"argument": True, "help": f"One of: {', '.join(hub.EMBEDDED)}."},
    )
    list: bool = False
    """Fetch nothing: say what is in the cache."""
    json: bool = False
    """With --list: as a JSON list."""


def pull(given: Pulled) -> None:
    """Fetch an embedded model into the cache, unless it is there, and print its folder."""
    if given.json and not given.list:
        raise InvalidInput("--json: add --list")
    if given.json:
        print(strict_json([asdict(info) for info in hub.models()]))
    elif given.list:
        for info in hub.models():
            size = f"{info.bytes / 1e6:.0f} MB" if info.pulled else "not pulled"
            print(f"{info.name}: {size}, {info.license}\n  {info.summary}\n  {info.path}")
    else:
        with progress_bar(f"looking for {given.name}") as report:
            folder = hub.pull(given.name, report)
        print(folder)
