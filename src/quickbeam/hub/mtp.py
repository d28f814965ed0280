"""MTP heads: drafters for several tokens ahead that come in a model's own checkpoint.

transformers doesn't load the tensors of these heads. This module knows their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

MTP = "mtp"  # the drafter's name for a model's MTP heads
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF_HEADER = 32 << 20  # the first bytes of a .gguf file, which hold the names of its tensors
GGUF_HEADS = ("qwen35", "qwen35moe", "qwen3next")  # architectures whose heads are read


class MtpLayout(NamedTuple):
    """The names of the modules of a checkpoint's first MTP head.

    `layer`: its decoder layer. `fc`: the linear layer before the decoder layer. `token_norm`,
    `hidden_norm`: the norms of the inputs of `fc`, which are the token's embedding and the hidden
    state. Embedding and state are concatenated in this order unless `hidden_first`. `norm`: the
    norm before the language model's head.
    """

    layer: str
    fc: str
    token_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool = False


# Qwen3-Next and Qwen3.5
QWEN = MtpLayout(
    layer="mtp.layers.0",
    fc="mtp.fc",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
)


def deepseek_layout(layers: int) -> MtpLayout:
    """Return the layout of DeepSeek-V3 and GLM-4-MoE, whose head is layer number `layers`."""
    layer = f"model.layers.{layers}"
    return MtpLayout(
        layer=layer,
        fc=f"{layer}.eh_proj",
        token_norm=f"{layer}.enorm",
        hidden_norm=f"{layer}.hnorm",
        norm=f"{layer}.shared_head.norm",
    )


MIMO = MtpLayout(
    layer="model.mtp_layers.0",
    fc="model.mtp_layers.0.input_proj",
    token_norm="model.mtp_layers.0.token_layernorm",
    hidden_norm="model.mtp_layers.0.hidden_layernorm",
    norm="model.mtp_layers.0.final_layernorm",
    hidden_first=True,
)


def mtp_layout(names: Collection[str], layers: int) -> MtpLayout | None:
    """Return the layout of a checkpoint with tensors of these names, None where it has no head.

    `layers`: how many layers the model has.
    """
    for layout in (QWEN, deepseek_layout(layers), MIMO):
        if _weights(layout) <= {*names}:
            return layout
    return None


def _weights(layout: MtpLayout) -> set[str]:
    """Return the tensors that a checkpoint with this layout has."""
    return {
        f"{layout.layer}.self_attn.o_proj.weight",
        f"{layout.fc}.weight",
        f"{layout.token_norm}.weight",
        f"{layout.hidden_norm}.weight",
        f"{layout.norm}.weight",
    }


def is_mtp(name: str, config: Any) -> bool:
    """Whether a tensor belongs to an MTP head. `config`: the model's configuration."""
    if name.startswith(("mtp.", "model.mtp.", "model.mtp_layers.")):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match is None:
        return False
    heads = max(
        getattr(config, "num_nextn_predict_layers", 0) or 0,
        getattr(config, "num_mtp_layers", 0) or 0,
    )
    layers: int = config.num_hidden_layers
    return layers <= int(match[1]) < layers + heads


def has_mtp(path: Path) -> bool:
    """Whether a model's folder, or `.gguf` file, has a head of a supported layout.

    False for a path that can't be read. Opening the model reports the reason.
    """
    try:
        if path.suffix == ".gguf":
            with open(path, "rb") as file:
                start = file.read(GGUF_HEADER)
            fields = [f"{name}.nextn_predict_layers".encode() for name in GGUF_HEADS]
            is_supported = any(field in start for field in fields)
            return is_supported and b".nextn.eh_proj.weight" in start
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        text_config = SimpleNamespace(**(config.get("text_config") or config))
        names = [name for name in _names(path) if is_mtp(name, text_config)]
        return mtp_layout(names, text_config.num_hidden_layers) is not None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def index_of(folder: Path, single: str = SINGLE, index: str = INDEX) -> dict[str, str] | None:
    """Return the file of each tensor by a folder's `index`; None if all tensors are in `single`.

    All are in `single` where that file exists and the folder has no index, or an index that doesn't
    list the file, as it is left from earlier files.
    """
    has_single = (folder / single).is_file()
    if has_single and not (folder / index).is_file():
        return None
    files = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
    return None if has_single and single not in files.values() else files


def _names(folder: Path) -> Collection[str]:
    index = index_of(folder)
    if index is not None:
        return index.keys()
    path = folder / SINGLE
    with open(path, "rb") as file:  # the header's size, then the header, which is JSON
        size = int.from_bytes(file.read(8), "little")
        # in a file of another format, the size may be any integer
        header: dict[str, Any] = json.loads(file.read(min(size, path.stat().st_size)))
    return header.keys()
