"""Block drafters in published folders, and in `.gguf` files as llama.cpp has them.

Names and metadata of the latter (architecture `dflash`) are those of llama.cpp's converter
(`conversion/qwen.py`). It reorders queries and keys of drafters whose dimensions are rotated in
pairs, and counts a hidden state's layers from 1.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.folder import (
    WINDOWED,
    TargetParts,
    assemble,
    named_errors,
    read_tensors,
    refuse_other_target,
)
from quickbeam.drafters.layouts import (
    COPIES,
    DERIVED,
    DFLASH,
    GGUF_IN_LAYER,
    GGUF_KEYS,
    GGUF_MODULES,
    GGUF_OPTIONAL_KEYS,
    Fields,
    block_layout,
)
from quickbeam.drafters.shortlist.layout import require_distinct
from quickbeam.errors import InvalidInput
from quickbeam.models.base import check_layers
from quickbeam.models.native.library import Kernels
from quickbeam.models.weights.checkpoint import read_json
from quickbeam.models.weights.gguf.file import GgufFile, widened
from quickbeam.models.weights.gguf.metadata import Metadata, rope_of

# whose rows are dimensions that are rotated in pairs
ROTATED = tuple(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm"))
MASK = "mask_embedding.pt"  # beside the weights, where the target's row is not the trained one
UNREAD = ("token_embd.weight", "output.weight")  # taken for copies of the target's


def load_block(path: Path, target: TargetParts, kernels: Kernels | None = None) -> BlockNetwork:
    """Load the block drafter in a folder or `.gguf` file for a target.

    A folder's layout is one of `layouts.py`. A file's layout is llama.cpp's; `kernels` widen its
    blocks if there are any. Raises `InvalidInput` for another target's drafter, and for tensors
    that don't fit the network.
    """
    with named_errors(path):
        if path.suffix == ".gguf":
            record, stored = _read_gguf(path, kernels)
        else:
            record = read_json(path / "config.json")
            stored = read_tensors(path)
            if (path / MASK).is_file():
                record["own_mask_embedding"] = True
                stored["mask_embedding"] = _mask_embedding(path / MASK)
        config = BlockConfig.of(record, target.size, target.vocab)
        _check_target(config, target)
        with torch.device("meta"):
            network = BlockNetwork(config, target.embedding, target.head)
        ignored = {*COPIES, *DERIVED}
        if config.draft_vocab_size is not None:
            ignored -= {"lm_head.", "d2t"}
        state = assemble(network, _renamed(stored, record, config), ignored=ignored)
        network.load_state_dict(state, assign=True)
        if network.tokens is not None:
            require_distinct(
                network.tokens, target.vocab, "its head (d2t), which was made for another model,"
            )
    return network.requires_grad_(False)


def _check_target(config: BlockConfig, target: TargetParts) -> None:
    """Raise `InvalidInput` for another target's drafter, and one that drafts nothing."""
    check_layers(config.aux_layers, target.layers)
    refuse_other_target(config.hidden_size, target=target.size)
    if config.mask_token >= target.vocab:
        raise InvalidInput(
            f"its mask_token_id is {config.mask_token}, the target has {target.vocab} tokens: "
            "it was made for another model"
        )
    if config.drafted < 1:
        raise InvalidInput("it drafts nothing: block_size is too small")


def _mask_embedding(path: Path) -> torch.Tensor:
    """Return the embedding of the mask token in a file beside the weights."""
    stored = torch.load(path, map_location="cpu", weights_only=True)
    values = stored.values() if isinstance(stored, dict) else [stored]
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.flatten()
    raise InvalidInput(f"{path.name} holds no tensor: download it again")


def _renamed(
    tensors: dict[str, torch.Tensor], record: Fields, config: BlockConfig
) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors as the network has them.

    Codebooks may be parameters without a module, and a confidence may depend on the row alone.
    Where dimensions 2i and 2i + 1 of a head are rotated as a pair (LiquidAI's), they are put in the
    rows i and i + half of queries and keys. This changes no product of a query and a key.
    """
    renamed = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        for stored, published in block_layout(record).renamed.items():
            if name.startswith(stored):
                name = published + name.removeprefix(stored)
        if name.endswith("_codebook"):
            name = f"{name}.weight"
        renamed[name] = tensor
    proj = "confidence_head.proj.weight"
    if proj in renamed and renamed[proj].shape[-1] == config.hidden_size:
        renamed[proj] = F.pad(renamed[proj], (0, config.markov_rank))
    fields = record | (record.get("dflash_config") or {})
    if any(fields.get(name) is False for name in ("rope_is_neox_style", "is_neox_style")):
        for name, tensor in renamed.items():
            if name.endswith(ROTATED):
                pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
                renamed[name] = pairs.transpose(1, 2).reshape(tensor.shape)
    return renamed


# --- llama.cpp's files ---


def _read_gguf(path: Path, kernels: Kernels | None) -> tuple[Fields, dict[str, torch.Tensor]]:
    """Return a configuration's fields, and tensors by the network's names.

    Raises `InvalidInput`, and `NotDescribed` for metadata that is not known.
    """
    file = GgufFile(path)
    metadata = Metadata(file, DFLASH)
    fields: Fields = {name: metadata[key] for name, key in GGUF_KEYS.items()}
    for name, key in GGUF_OPTIONAL_KEYS.items():
        fields[name] = metadata.get(key)
    if not fields["head_dim"]:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    fields["rope_parameters"] = rope_of(metadata, fields["head_dim"])
    layers = file.metadata.get(f"{DFLASH}.target_layers")
    mask = file.metadata.get("tokenizer.ggml.mask_token_id")
    if layers is None or mask is None:
        raise InvalidInput("its metadata lacks dflash.target_layers or the mask token")
    fields["target_layer_ids"] = [int(layer) - 1 for layer in layers]
    fields["mask_token_id"] = mask
    if fields["sliding_window"]:
        pattern = file.metadata.get(f"{DFLASH}.attention.sliding_window_pattern")
        if not isinstance(pattern, np.ndarray) or pattern.dtype != np.bool_:
            raise InvalidInput("its metadata has a window, but does not say of which layers")
        fields["layer_types"] = [WINDOWED if near else "full_attention" for near in pattern]
    rank = 0
    if metadata.has("markov_w1.weight"):
        rank = file.tensors["markov_w1.weight"].shape[1]
    fields["markov_rank"] = rank
    fields["enable_confidence_head"] = metadata.has("conf_proj.weight")
    if fields["sample_from_anchor"] is None:  # of files from before there was that key
        fields["sample_from_anchor"] = rank > 0
    if type(fields["is_causal"]) not in (bool, type(None)):
        raise InvalidInput(f"its metadata says attention.causal: {fields['is_causal']!r}")
    fields["is_causal"] = bool(fields["is_causal"])
    metadata.note(
        "target_hidden_size",
        "target_layers",
        "has_confidence_head",
        "attention.sliding_window_pattern",
    )
    if metadata.has("d2t"):
        raise InvalidInput("its head is of a part of the vocabulary (d2t): take the folder instead")
    metadata.refuse_unknown()
    return fields, _tensors_of(file, kernels)


def _tensors_of(file: GgufFile, kernels: Kernels | None) -> dict[str, torch.Tensor]:
    """Return a file's tensors in bfloat16, by the network's names."""
    tensors = dict[str, torch.Tensor]()
    for stored in file.tensors.keys() - {*UNREAD}:
        name = _network_name(stored)
        if name in tensors:
            raise InvalidInput(f"it holds {name} under two names")
        tensors[name] = widened(file[stored], kernels).to(torch.bfloat16)
    if "confidence_head.proj.weight" in tensors:
        tensors.setdefault("confidence_head.proj.bias", torch.zeros(1))
    return tensors


def _network_name(stored: str) -> str:
    """Return the network's name of a file's tensor; the file's where it is not known."""
    layer = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)(\.(?:weight|bias))?", stored)
    if layer is not None:
        module = GGUF_IN_LAYER.get(layer[2], layer[2])
        kind = "" if module.endswith("base_kernel") else layer[3] or ""
        return f"layers.{layer[1]}.{module}{kind}"
    module, _, kind = stored.rpartition(".")
    return f"{GGUF_MODULES[module]}.{kind}" if module in GGUF_MODULES else stored
