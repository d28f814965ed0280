"""From transformers' names of parameters to those of a `.gguf` file's tensors, by the table of
llama.cpp's package (`gguf/tensor_mapping.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from quickbeam.hub.mtp import MtpLayout

ANGLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
BESIDE_TEXT = ("v.", "mm.", "a.")  # how the names of what reads images and sound begin
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
    """Return whether a tensor is of a block behind so many layers: one that predicts what comes
    after the next token."""
    block = re.match(r"blk\.(\d{1,6})\.", tensor)
    return block is not None and int(block[1]) >= layers


def stored_names(architecture: str, layers: int, tensors: Collection[str]) -> StoredName:
    """Return what gives the file's name of a parameter, or None where it is not in the file.

    `tensors`: the file's names.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(kinds[architecture], layers)

    def stored_name(name: str) -> str | None:
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        of_nemotron_h = name.replace("model.", "backbone.", 1)
        own = table.get_name(name, SUFFIXES) or table.get_name(of_nemotron_h, SUFFIXES) or ""
        # transformers' names of parameters outside of modules have no suffix; and what all rows
        # read may have the name of a feed-forward without experts
        known = (own, *(f"{own}{suffix}" for suffix in SUFFIXES), own.replace("_shexp", ""))
        return next((one for one in known if one in tensors), None)

    return stored_name


def mtp_names(
    architecture: str, block: int, tensors: Collection[str], layout: MtpLayout
) -> StoredName:
    """Return the same of an MTP head, which is a `block` behind the model's.

    Its layer has the names of the model's first, its other modules those of the `layout`.
    """
    at, last = f"blk.{block}.nextn", f"blk.{block}.nextn.shared_head_norm"
    modules = {layout.fc: "eh_proj", layout.token_norm: "enorm", layout.hidden_norm: "hnorm"}
    stored = {own: f"{at}.{name}.weight" for own, name in modules.items()}
    stored[layout.norm] = f"{last if f'{last}.weight' in tensors else 'output_norm'}.weight"
    of_layer = stored_names(architecture, block + 1, tensors)

    def stored_name(name: str) -> str | None:
        known = stored.get(name.removesuffix(".weight"))
        if known is not None:
            return known if known in tensors else None
        return of_layer(name.replace("model.layers.0.", f"model.layers.{block}."))

    return stored_name
