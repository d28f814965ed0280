"""Block drafters in published folders, and in `.gguf` files as llama.cpp has them.

Names and metadata of the latter (architecture `dflash`) are those of llama.cpp's converter
(`conversion/qwen.py`). It turns queries and keys of drafters whose dimensions turn in pairs, and
counts a hidden state's layers from 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.folder import (
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
    block_layout,
)
from quickbeam.drafters.shortlist.layout import require_distinct
from quickbeam.errors import InvalidInput
from quickbeam.models.base import check_layers
from quickbeam.models.checkpoint import read_json
from quickbeam.models.gguf.file import GgufFile, widened
from quickbeam.models.gguf.metadata import Metadata, rope_of
from quickbeam.models.native import library

TURNED = tuple(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm"))
MASK = "mask_embedding.pt"  # beside the weights, where the target's row is not the trained one
UNREAD = ("token_embd.weight", "output.weight")  # taken for copies of the target's


def _renamed(
    tensors: dict[str, torch.Tensor], record: dict[str, Any], config: BlockConfig
) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors as the network has them.

    Codebooks may be parameters without a module, and a confidence may be by the row alone. Where
    dimensions 2i and 2i + 1 of a head turn together (LiquidAI's), they are put in the places i and
    i + half of queries and keys, which changes no product of the two.
    """
    stored = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        for old, new in block_layout(record).renamed.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        stored[f"{name}.weight" if name.endswith("_codebook") else name] = tensor
    name = "confidence_head.proj.weight"
    if name in stored and stored[name].shape[-1] == config.hidden_size:
        stored[name] = F.pad(stored[name], (0, config.markov_rank))
    given = record | (record.get("dflash_config") or {})
    if any(given.get(name) is False for name in ("rope_is_neox_style", "is_neox_style")):
        for name in [one for one in stored if one.endswith(TURNED)]:
            tensor, half = stored[name], config.head_dim // 2
            pairs = tensor.reshape(-1, half, 2, *tensor.shape[1:]).transpose(1, 2)
            stored[name] = pairs.reshape(tensor.shape)
    return stored


def _mask_of(path: Path) -> torch.Tensor:
    """Return the embedding of the mask token in a file beside the weights."""
    given = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(given, dict):
        given = next((one for one in given.values() if isinstance(one, torch.Tensor)), None)
    if not isinstance(given, torch.Tensor):
        raise InvalidInput(f"{path.name} holds no tensor: download it again")
    return given.flatten()


def load_block(path: Path, target: TargetParts) -> BlockNetwork:
    """Load the block drafter in a folder or `.gguf` file for a target.

    A folder's layout is that of DFlash, DFlash2, DSpark, `speculators` or Muse Glimmer's assistant;
    a file's is llama.cpp's. Raises `InvalidInput` for another target's drafter, and for tensors
    that don't fit the network.
    """
    with named_errors(path):
        if path.suffix == ".gguf":
            record, stored = _read_gguf(path)
        else:
            record, stored = read_json(path / "config.json"), read_tensors(path)
            if (path / MASK).is_file():
                record["own_mask_embedding"] = True
                stored["mask_embedding"] = _mask_of(path / MASK)
        config = BlockConfig.of(record, target.size, target.vocab)
        check_layers(config.taps, target.layers)
        refuse_other_target(config.hidden_size, target=target.size)
        if config.mask_token >= target.vocab:
            raise InvalidInput(
                f"its mask_token_id is {config.mask_token}, the target has {target.vocab} tokens: "
                "it was made for another model"
            )
        if config.drafted < 1:
            raise InvalidInput("it drafts nothing: block_size is too small")
        with torch.device("meta"):
            network = BlockNetwork(config, target.embedding, target.head)
        stored, own_head = _renamed(stored, record, config), config.draft_vocab_size is not None
        ignored = {*COPIES, *DERIVED} - ({"lm_head.", "d2t"} if own_head else set())
        state = assemble(network, stored, ignored=ignored)
        if own_head:
            tokens = torch.arange(len(state["d2t"])) + state["d2t"]
            require_distinct(
                tokens, target.vocab, "its head (d2t), which was made for another model,"
            )
        network.load_state_dict(state, assign=True)
    return network.requires_grad_(False)


def _read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a configuration's fields, and tensors by the network's names.

    Raises `InvalidInput`, and `NotDescribed` for metadata that is not known.
    """
    file = GgufFile(path)
    m = Metadata(file, DFLASH)
    fields: dict[str, Any] = {name: m[key] for name, key in GGUF_KEYS.items()}
    fields |= {name: m.get(key) for name, key in GGUF_OPTIONAL_KEYS.items()}
    dim = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    fields |= {"head_dim": dim, "rope_parameters": rope_of(m, dim)}
    taps = file.metadata.get(f"{DFLASH}.target_layers")
    mask = file.metadata.get("tokenizer.ggml.mask_token_id")
    if taps is None or mask is None:
        raise InvalidInput("its metadata lacks dflash.target_layers or the mask token")
    fields |= {"target_layer_ids": [int(one) - 1 for one in taps], "mask_token_id": mask}
    if fields["sliding_window"]:
        near = file.metadata.get(f"{DFLASH}.attention.sliding_window_pattern")
        if not isinstance(near, np.ndarray) or near.dtype != np.bool_:
            raise InvalidInput("its metadata has a window, but does not say of which layers")
        kinds = "full_attention", "sliding_attention"
        fields["layer_types"] = [kinds[bool(one)] for one in near]
    rank = file.tensors["markov_w1.weight"].shape[1] if m.has("markov_w1.weight") else 0
    fields |= {"markov_rank": rank, "enable_confidence_head": m.has("conf_proj.weight")}
    if fields["sample_from_anchor"] is None:  # of files from before there was that key
        fields["sample_from_anchor"] = rank > 0
    if type(fields["is_causal"]) not in (bool, type(None)):
        raise InvalidInput(f"its metadata says attention.causal: {fields['is_causal']!r}")
    fields["is_causal"] = bool(fields["is_causal"])
    m.note(
        "target_hidden_size",
        "target_layers",
        "has_confidence_head",
        "attention.sliding_window_pattern",
    )
    if m.has("d2t"):
        raise InvalidInput("its head is of a part of the vocabulary (d2t): take the folder instead")
    m.refuse_unknown()
    return fields, _tensors_of(file)


def _tensors_of(file: GgufFile) -> dict[str, torch.Tensor]:
    """Return a file's tensors in bfloat16, by the network's names."""
    kernels, tensors = library.kernels(), dict[str, torch.Tensor]()
    for name in file.tensors.keys() - {*UNREAD}:
        weight = widened(file[name], kernels)
        if (own := _own_name(name)) in tensors:
            raise InvalidInput(f"it holds {own} under two names")
        tensors[own] = weight.to(torch.bfloat16)
    if "confidence_head.proj.weight" in tensors:
        tensors.setdefault("confidence_head.proj.bias", torch.zeros(1))
    return tensors


def _own_name(name: str) -> str:
    """Return the network's name of a tensor; the file's where it is not known."""
    module, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d{1,6})\.(\w+)(\.(?:weight|bias))?", name):
        own = GGUF_IN_LAYER.get(layer[2], layer[2])
        kind = "" if own.endswith("base_kernel") else layer[3] or ""
        return f"layers.{layer[1]}.{own}{kind}"
    return f"{GGUF_MODULES[module]}.{kind}" if module in GGUF_MODULES else name
