"""Sizes of memory as texts."""

from __future__ import annotations

from quickbeam.errors import InvalidInput

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


def parse_bytes(size: int | str) -> int:
    """Return the bytes that a number or a text such as `2GB` or `512 MiB` means.

    Raises `InvalidInput` for other texts, and for less than one byte.
    """
    text = str(size).strip().upper()
    number = text.rstrip("KMGTIB ")
    unit = text[len(number) :].strip()
    try:
        value = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise InvalidInput(f"{size!r} is not a size of memory: give bytes, or as in 2GB or 512MiB")
    return value
