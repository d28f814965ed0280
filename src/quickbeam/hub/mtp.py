"""MTP heads: drafters for several tokens ahead that come in a model's own checkpoint.

transformers doesn't load their tensors. This says how they are called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

MTP = "mtp"  # names them where a drafter is named
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GGUF_HEADER = 32 << 20  # bytes of a .gguf file in which the names of its tensors are
GGUF_HEADS = "qwen35", "qwen35moe", "qwen3next"  # architectures whose heads are read


class MtpLayout(NamedTuple):
    """The modules of the first MTP head of a checkpoint.

    `layer`: its decoder layer. `fc`: the linear layer before that, which reads the token's
    embedding behind `token_norm` and the hidden state behind `hidden_norm`, in this order unless
    `hidden_first`. `norm`: what the head reads goes through it.
    """

    layer: str
    fc: str
    token_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool = False


# Qwen3-Next and Qwen3.5
QWEN = MtpLayout(
    "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
)


def _inside(layer: str, *names: str, hidden_first: bool = False) -> MtpLayout:
    fc, token, hidden, norm = (f"{layer}.{name}" for name in names)
    return MtpLayout(layer, fc, token, hidden, norm, hidden_first)


def mtp_layout(names: Collection[str], layers: int) -> MtpLayout | None:
    """Return the layout of a checkpoint with tensors of these names, None where it has no head.

    `layers`: how many layers the model has.
    """
    norms = "token_layernorm", "hidden_layernorm", "final_layernorm"
    layouts = (
        QWEN,
        # DeepSeek-V3 and GLM-4-MoE: a layer more than the model has
        _inside(f"model.layers.{layers}", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
        # MiMo
        _inside("model.mtp_layers.0", "input_proj", *norms, hidden_first=True),
    )
    return next((one for one in layouts if _parts(one) <= {*names}), None)


def _parts(layout: MtpLayout) -> set[str]:
    attention = f"{layout.layer}.self_attn.o_proj"
    parts = layout.fc, layout.token_norm, layout.hidden_norm, layout.norm, attention
    return {f"{one}.weight" for one in parts}


def is_mtp(name: str, config: Any) -> bool:
    """Whether a tensor belongs to an MTP head. `config`: the model's configuration."""
    if name.startswith(("mtp.", "model.mtp.", "model.mtp_layers.")):
        return True
    heads = [getattr(config, one, 0) for one in ("num_nextn_predict_layers", "num_mtp_layers")]
    number, layers = re.match(r"model\.layers\.(\d+)\.", name), config.num_hidden_layers
    return number is not None and layers <= int(number[1]) < layers + max(one or 0 for one in heads)


def has_mtp(place: Path) -> bool:
    """Whether a model's folder, or `.gguf` file, holds a head of a known layout.

    What can't be read has none: what opens the model says why.
    """
    try:
        if place.suffix == ".gguf":
            with open(place, "rb") as file:
                start = file.read(GGUF_HEADER)
            known = any(f"{one}.nextn_predict_layers".encode() in start for one in GGUF_HEADS)
            return known and b".nextn.eh_proj.weight" in start
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        part = SimpleNamespace(**(config.get("text_config") or config))
        names = [name for name in _names(place) if is_mtp(name, part)]
        return mtp_layout(names, part.num_hidden_layers) is not None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def index_of(folder: Path, single: str = SINGLE, index: str = INDEX) -> dict[str, str] | None:
    """Return the file of each tensor by a folder's `index`; None where `single` alone counts.

    It does where there is no index, or one that doesn't list it, which is of earlier files.
    """
    has_single = (folder / single).is_file()
    if has_single and not (folder / index).is_file():
        return None
    files = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
    return None if has_single and single not in files.values() else files


def _names(folder: Path) -> Collection[str]:
    if (index := index_of(folder)) is not None:
        return index.keys()
    with open(folder / SINGLE, "rb") as file:  # its header is JSON behind its size
        size = int.from_bytes(file.read(8), "little")  # any number where it is another file
        header = json.loads(file.read(min(size, (folder / SINGLE).stat().st_size)))
    return header.keys()  # type: ignore[no-any-return]
