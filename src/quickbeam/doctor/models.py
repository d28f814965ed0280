"""Checks of what answers need: kernels, exactness, the cache folder and the default model."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quickbeam import hub
from quickbeam.doctor.base import NOTE, OK, PROBLEM, WEIGHT_BYTES, Finding
from quickbeam.doctor.machine import read_speed
from quickbeam.errors import InvalidInput
from quickbeam.target.native import build, choice

SMALL = 2 * 10**9  # bytes of free disk space that a few more models would use up
WIDTHS = range(4, 65, 6)  # rows of the passes that the probe compares with a pass of one row
SHAPES = {  # the default model's layer shapes, with two layers
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
COMPILE = "python -m quickbeam.target.native.build"


def check_kernels() -> Finding:
    """Check which kernels a bfloat16 model on a CPU will use. Compiles nothing."""
    forced = {
        name: os.environ[name]
        for name in ("QUICKBEAM_KERNELS", "QUICKBEAM_ISA")
        if os.environ.get(name)
    }
    data: dict[str, Any] = {"forced": forced, "compiler": " ".join(build.compiler() or ()) or None}
    try:
        found = choice.outlook()
    except InvalidInput as error:
        return Finding(
            "kernels",
            PROBLEM,
            str(error),
            f"unset {' and '.join(forced)}",
            {**data, "kernels": None},
        )
    data["kernels"] = found
    if waits(found):
        return Finding("kernels", NOTE, found, f"the first answer waits for that: {COMPILE}", data)
    if found.startswith("native"):
        best = build.machine_sets()[0]
        if best not in found:
            return Finding(
                "kernels",
                NOTE,
                found,
                f"{best} would be faster: {'unset QUICKBEAM_ISA' if forced else COMPILE}",
                data,
            )
        return Finding("kernels", OK, found, data=data)
    if forced:
        return Finding(
            "kernels",
            NOTE,
            found,
            f"slower than the native kernels: unset {' and '.join(forced)}",
            data,
        )
    if not build.has_kernels():
        return Finding(
            "kernels",
            NOTE,
            found,
            "nothing to do here; --weights and batches are slower, answers the same",
            data,
        )
    return Finding(
        "kernels",
        NOTE,
        found,
        "slower than the native kernels: install g++ or clang++, or name one in CXX",
        data,
    )


def waits(outlook: str) -> bool:
    """Whether kernels still have to be compiled. `outlook` is the text of `choice.outlook`."""
    return outlook.endswith("compiled on first use")


def check_exactness() -> Finding:
    """Check whether a row has the same bits in passes of 1 to 64 rows.

    The probe is a small random model with the default model's layer shapes.
    """
    data: dict[str, Any] = {"widths": [1, *WIDTHS], "exact": None}
    if waits(choice.outlook()):
        return Finding(
            "exactness",
            NOTE,
            "not probed: the kernels are not compiled yet",
            f"{COMPILE}, then quickbeam doctor again",
            data,
        )
    todo = (
        "answers may differ from plain decoding's where two tokens are all but equally likely: "
        "docs/guarantee.md"
    )
    try:
        broken = changing_widths(WIDTHS)
    except InvalidInput as error:
        return Finding("exactness", NOTE, str(error), todo, {**data, "exact": False})
    data["exact"] = not broken
    if broken:
        return Finding(
            "exactness",
            NOTE,
            f"a row's bits change in passes of {', '.join(map(str, broken))} rows",
            todo,
            data,
        )
    return Finding(
        "exactness", OK, f"a row has the same bits in passes of 1 to {WIDTHS[-1]} rows", data=data
    )


def changing_widths(widths: Iterable[int]) -> list[int]:
    """Return those of the `widths` (rows of a pass) at which the bits of a row change.

    The bits are compared with those of a pass of one row. Raises `InvalidInput` if they are not
    promised to be the same on this machine.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quickbeam.target.bit_exact import same_bits
    from quickbeam.target.model import Model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES, dtype=torch.bfloat16)
        model = Model(LlamaForCausalLM(config).bfloat16(), exact=True)
    return [width for width in widths if not same_bits(model, nodes=width)]


def check_cache() -> Finding:
    folder = hub.cache_folder()
    held = (
        {one.name: hub.folder_bytes(one) for one in sorted(folder.iterdir()) if one.is_dir()}
        if folder.is_dir()
        else {}
    )
    above = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    free = shutil.disk_usage(above).free
    data: dict[str, Any] = {
        "folder": str(folder),
        "free_bytes": free,
        "bytes": held,
        "writable": os.access(above, os.W_OK),
    }
    names = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in held.items())
    text = f"{folder}: {names or 'empty'}; {free / 1e9:.1f} GB free"
    move = "set QUICKBEAM_CACHE to another folder"
    needed = not all(one.pulled for one in hub.models())
    if not data["writable"]:
        return Finding(
            "cache",
            PROBLEM if needed else NOTE,
            f"{text}; it can't be written",
            f"{move} that you can write to",
            data,
        )
    least = hub.EMBEDDED[hub.DEFAULT].work_bytes
    if needed and free < least:
        return Finding(
            "cache",
            PROBLEM,
            f"{text}; the default model needs {least / 1e6:.0f} MB",
            f"free some space, or {move}",
            data,
        )
    if free < SMALL:
        return Finding(
            "cache",
            NOTE,
            text,
            f"little is free for further models: free some space, or {move}",
            data,
        )
    return Finding("cache", OK, text, data=data)


def check_disk() -> Finding:
    """Check how fast the cache folder's disk is read."""
    found = read_speed(hub.cache_folder())
    data = {"gigabytes_per_second": found}
    if found is None:
        return Finding(
            "disk",
            NOTE,
            "the cache folder can be neither read nor written",
            "set QUICKBEAM_CACHE to another folder",
            data,
        )
    text = (
        f"the cache folder is read at {found:.2f} GB/s: {WEIGHT_BYTES / found / 1e9:.1f} s for "
        "the default model"
    )
    if found < 0.1:
        return Finding(
            "disk",
            NOTE,
            text,
            "models load slowly: set QUICKBEAM_CACHE to a folder on a faster disk",
            data,
        )
    return Finding("disk", OK, text, data=data)


def check_model() -> Finding:
    (info,) = (one for one in hub.models() if one.name == hub.DEFAULT)
    data = {"name": info.name, "pulled": info.pulled, "bytes": info.bytes}
    if info.pulled:
        return Finding("model", OK, f"{info.name} is there, {info.bytes / 1e6:.0f} MB", data=data)
    if importlib.util.find_spec("pip") is None:
        return Finding(
            "model",
            PROBLEM,
            f"{info.name} is not pulled, and this Python has no pip to do it",
            "python -m ensurepip",
            data,
        )
    return Finding(
        "model",
        NOTE,
        f"{info.name} is not pulled: the first answer waits for that",
        "quickbeam pull",
        data,
    )
