"""Sizes of memory as texts."""

from __future__ import annotations

from typing import Any

from quickbeam.errors import InvalidInput

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
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


def weight_bytes(config: Any, weights: str) -> float:
    """Return about how many bytes of weights a pass over one token reads, right to a factor of 2.

    `config`: of a causal LM of transformers. `weights`: the format of its linear layers. With
    `int4` the head has 8 bits.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 2 * hidden * (heads * head_dim + keys) + 3 * hidden * inner
    each = {"int8": 1.0, "int4": 0.6}.get(weights, 2.0)
    head = hidden * config.vocab_size * max(1.0, each)
    return float(config.num_hidden_layers * layer * each + head)
