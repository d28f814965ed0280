"""From transformers' names of parameters to those of a `.gguf` file's tensors, by the table of
llama.cpp's package (`gguf/tensor_mapping.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from quickbeam.hub.mtp import MtpLayout

ANGLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
OTHER_INPUTS = ("v.", "mm.", "a.")  # how the names of what reads images and sound begin
# what the table calls otherwise than transformers
RENAMED = {
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".block_sparse_moe.": ".mlp.",
    ".shared_mlp.output_linear.": ".mlp.shared_expert.down_proj.",
    ".shared_mlp.": ".mlp.shared_expert.",
    ".dt_bias": ".dt_proj.bias",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
}
SUFFIXES = (".weight", ".bias", ".scale")
StoredName = Callable[[str], str | None]


def is_behind(tensor: str, layers: int) -> bool:
    """Whether a tensor is of a block behind the model's `layers`, which predicts later tokens."""
    block = re.match(r"blk\.(\d{1,6})\.", tensor)
    return block is not None and int(block[1]) >= layers


def stored_names(architecture: str, layers: int, tensors: Collection[str]) -> StoredName:
    """Return a function from a parameter's name to the file's, None where the file lacks it.

    `tensors`: the file's names.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(kinds[architecture], layers)

    def stored_name(name: str) -> str | None:
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        in_nemotron_h = name.replace("model.", "backbone.", 1)
        base = table.get_name(name, SUFFIXES) or table.get_name(in_nemotron_h, SUFFIXES) or ""
        # transformers' names of parameters outside of modules have no suffix; and a shared expert
        # may have the name of a feed-forward without experts
        with_suffix = (f"{base}{suffix}" for suffix in SUFFIXES)
        candidates = (base, *with_suffix, base.replace("_shexp", ""))
        return next((candidate for candidate in candidates if candidate in tensors), None)

    return stored_name


def mtp_names(
    architecture: str, block: int, tensors: Collection[str], layout: MtpLayout
) -> StoredName:
    """Return the function of `stored_names` for an MTP head: a `block` behind the model's.

    The head's layer has the names of the model's first, its other modules those of the `layout`.
    """
    prefix = f"blk.{block}.nextn"
    norm = f"{prefix}.shared_head_norm.weight"
    modules = {
        layout.fc: f"{prefix}.eh_proj.weight",
        layout.token_norm: f"{prefix}.enorm.weight",
        layout.hidden_norm: f"{prefix}.hnorm.weight",
        layout.norm: norm if norm in tensors else "output_norm.weight",
    }
    name_in_layer = stored_names(architecture, block + 1, tensors)

    def stored_name(name: str) -> str | None:
        stored = modules.get(name.removesuffix(".weight"))
        if stored is not None:
            return stored if stored in tensors else None
        return name_in_layer(name.replace("model.layers.0.", f"model.layers.{block}."))

    return stored_name
