"""Loads published feature drafters as an `EagleHead`.

Reads the folders that EAGLE, EAGLE-2, EAGLE-3 and `speculators` write, and quickbeam's own.

The stored tensors decide what they can show: biases, heads, an embedding of its own. The
configuration decides the rest. What the network can't represent is refused, never ignored: a tensor
that has no place in it is an error.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quickbeam.drafters.eagle_model import ACTIVATIONS, MODEL_TYPE, EagleConfig, EagleHead
from quickbeam.errors import InvalidInput
from quickbeam.models.hf_attention import check_layers

KNOWN = (
    "EAGLE and EAGLE-2 (fc.weight, layers.0.*), EAGLE-3 (fc.weight, midlayer.*), speculators' "
    "eagle and eagle3, quickbeam's own"
)
WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
LAYER = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
)
OTHER = ("vocab_size", "rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
# A drafter whose config has another value for one of these fields is refused.
PLAIN = {
    "layernorms": False,
    "add_para_norm": False,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
    "use_aux_hidden_state": True,
}
ROWS = 64  # how many rows of the embedding are compared with the target's


def is_eagle(folder: Path) -> bool:
    """Whether `folder` holds a feature drafter rather than a causal language model.

    Reads only its configuration and tensor names.
    """
    try:
        record = _record(folder)
        return (
            record.get("model_type") == MODEL_TYPE
            or "speculators_model_type" in record
            or "fc.weight" in _names(folder)
        )
    except InvalidInput:
        return False


def load_eagle(
    folder: Path,
    *,
    target_layers: int,
    target_size: int,
    vocab_size: int,
    embedding: nn.Module,
    head: nn.Module,
) -> EagleHead:
    """Load the drafter in `folder` for a target.

    The target has `target_layers` layers, hidden states `target_size` wide and `vocab_size` tokens.
    `embedding` (`[...]` ids to `[..., target_size]`) and `head` are the target's modules.

    The drafter keeps an embedding of its own only if the stored one differs from the target's
    module: in width, or in the values of a sample of rows by more than bfloat16's rounding. It
    differs if it was trained, or if the target scales its own. A drafter without a stored head uses
    the target's. Published weights keep the dtype they are stored in. They stay memory-mapped until
    they are cast or moved.

    Raises `InvalidInput` where the folder is no drafter of a known layout, belongs to another
    target, or holds a variant that `EagleHead` can't represent.
    """
    record = _record(folder)
    try:
        if record.get("model_type") == MODEL_TYPE:
            network = EagleHead.load(folder, embedding, head)
            _check_target(
                network.config,
                network.state_dict().get("tokens"),
                target_layers,
                target_size,
                vocab_size,
            )
            return network
        state = _read(folder)
        prefix, fc = _layout(record, state)
        fields = {**record, **(record.get("transformer_layer_config") or {})}
        config = _config(fields, state, prefix, target_layers, target_size, vocab_size, embedding)
        sources = _sources(config, prefix, fc, state)
        _check_tensors(config, sources, state, prefix)
        weights = {}
        for name, parts in sources.items():
            weights[name] = (
                state[parts[0]] if len(parts) == 1 else torch.cat([state[part] for part in parts])
            )
        if config.draft_vocab_size is not None:
            weights["tokens"] = _tokens(
                state, config.draft_vocab_size, fields.get("vocab_size"), vocab_size
            )
        _check_target(config, weights.get("tokens"), target_layers, target_size, vocab_size)
    except InvalidInput as error:
        raise InvalidInput(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from error
    with torch.device("meta"):
        network = EagleHead(config, embedding, head)
    network.rotary = config.rotary()
    network.load_state_dict(weights, strict=False, assign=True)
    return network.requires_grad_(False)


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder} is no drafter: its config.json can't be read ({error})"
        ) from error
    if not isinstance(record, dict):
        raise InvalidInput(f"{folder} is no drafter: its config.json holds no object")
    return record


def _index(folder: Path) -> tuple[Path, dict[str, str] | None]:
    """Return the path of the folder's weights and, for an index, the file of each tensor by name.

    A single file of weights comes with None. Raises `InvalidInput` if there are no weights, or if
    the index can't be read or names files outside of its folder.
    """
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise InvalidInput(
            f"{folder} has no weights: none of {', '.join(WEIGHTS)}; download it again"
        )
    if found.suffix != ".json":
        return found, None
    try:
        index = {
            str(name): str(file)
            for name, file in json.loads(found.read_text(encoding="utf-8"))["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{found} is no index of weights ({error!r}); download it again"
        ) from error
    for file in sorted(set(index.values())):
        path = PureWindowsPath(file)  # splits at both kinds of slashes
        if path.anchor or ".." in path.parts:
            raise InvalidInput(
                f"{found} names {file!r}, which is outside its folder: files of "
                "weights must lie in it; download it again"
            )
    return found, index


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors by name, memory-mapped: none is read before it is used.

    Nothing but tensors is unpickled.
    """
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before 2020 can't be mapped
            state = torch.load(file, map_location="cpu", weights_only=True)
        return {
            str(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)
        }
    except (
        OSError,
        SafetensorError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
        AttributeError,
    ) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise InvalidInput(
            f"{file} can't be read as weights ({reason}); download it again"
        ) from error


def _names(folder: Path) -> set[str]:
    found, index = _index(folder)
    try:
        if index is None and found.suffix == ".safetensors":
            with safe_open(found, "pt") as file:
                index = dict.fromkeys(file.keys(), "")
    except (OSError, SafetensorError) as error:
        raise InvalidInput(
            f"{found} can't be read as weights ({error}); download it again"
        ) from error
    return {name.removeprefix("model.") for name in (_tensors(found) if index is None else index)}


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors by name, without a leading `model.`."""
    found, index = _index(folder)
    files = [found] if index is None else [folder / name for name in sorted(set(index.values()))]
    return {
        name.removeprefix("model."): tensor
        for file in files
        for name, tensor in _tensors(file).items()
    }


def _layout(record: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Return the prefix of the layer's tensor names, and the name of the fusing linear layer.

    Raises `InvalidInput` if the names belong to no known layout.
    """
    kind = record.get("speculators_model_type")
    prefix = next(
        (
            p
            for p in ("midlayer", "layers.0", "transformer")
            if f"{p}.self_attn.q_proj.weight" in state
        ),
        None,
    )
    fc = next((name for name in ("fc", "fusion_fc") if f"{name}.weight" in state), None)
    if kind not in (None, "eagle", "eagle3") or prefix is None or fc is None:
        said = (
            f"speculators_model_type {kind!r}"
            if kind
            else (f"tensors {', '.join(sorted(state)[:3])}, ...")
        )
        raise InvalidInput(f"this is no known feature drafter ({said}); known: {KNOWN}")
    return prefix, fc


def _config(
    fields: dict[str, Any],
    state: dict[str, torch.Tensor],
    prefix: str,
    target_layers: int,
    target_size: int,
    vocab_size: int,
    embedding: nn.Module,
) -> EagleConfig:
    flags = {**(fields.get("eagle_config") or {}), **fields}
    for name, plain in PLAIN.items():
        if flags.get(name) not in (None, plain):
            raise InvalidInput(
                f"its config says {name}: {flags[name]!r}, which quickbeam's "
                "drafters can't do; use one without it"
            )
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise InvalidInput(
            "its config says layer_types: sliding_attention, which quickbeam's "
            "drafters can't do; use one without it"
        )
    try:
        layer = LlamaConfig(
            **{name: fields[name] for name in LAYER + OTHER if fields.get(name) is not None}
        )
        LlamaRotaryEmbedding(layer)
    except Exception as error:  # which exceptions are raised differs by release of transformers
        reason = (str(error).strip().splitlines() or [""])[-1].strip()
        raise InvalidInput(
            "its config describes no Llama layer and rotary angles: "
            f"{type(error).__name__}: {reason}"
        ) from error
    if layer.hidden_act not in ACTIVATIONS:
        raise InvalidInput(
            f"its config says hidden_act: {layer.hidden_act!r}; known: {', '.join(ACTIVATIONS)}"
        )
    wide = f"{prefix}.hidden_norm.weight" in state
    if fields.get("speculators_model_type") == "eagle3" and "norm_before_residual" not in fields:
        raise InvalidInput(
            "its config doesn't say norm_before_residual: write true or false into "
            "config.json, as it was trained"
        )
    stored, shared = state.get("embed_tokens.weight"), layer.hidden_size == target_size
    own = stored is not None and (not shared or _differs(stored, embedding, vocab_size))
    if wide and not shared and stored is None:
        raise InvalidInput(
            f"it is {layer.hidden_size} wide, the target {target_size}, and it "
            "lacks its own embedding, embed_tokens.weight"
        )
    if layer.vocab_size > vocab_size:
        raise InvalidInput(
            f"its vocab_size is {layer.vocab_size}, the target has {vocab_size} "
            "tokens: it was made for another model"
        )
    lm_head = state.get("lm_head.weight") if wide else None
    draft_vocab = fields.get("draft_vocab_size") or (
        layer.vocab_size if lm_head is None else len(lm_head)
    )
    if wide and lm_head is None and (draft_vocab != layer.vocab_size or not shared):
        raise InvalidInput(
            "it lacks lm_head.weight, and the target's head can't stand in: the "
            "drafter's vocabulary or width is another"
        )
    return EagleConfig(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        heads=layer.num_attention_heads,
        kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        layers=_layers(fields, target_layers) if wide else (target_layers + 1,),
        target_size=(flags.get("target_hidden_size") or layer.hidden_size)
        if wide
        else layer.hidden_size,
        vocab_size=len(stored) if own and stored is not None else vocab_size,
        draft_vocab_size=None if lm_head is None else draft_vocab,
        join="attention" if wide else "input",
        eps=layer.rms_norm_eps,
        activation=layer.hidden_act,
        rope={
            "rope_parameters": layer.rope_parameters,
            "max_position_embeddings": layer.max_position_embeddings,
        },
        feature_norms=wide and bool(flags.get("fc_norm") or "fc_norm.0.weight" in state),
        fused_norm=wide and bool(flags.get("norm_before_fc") or "input_norm.weight" in state),
        norm_before_residual=wide and bool(flags.get("norm_before_residual")),
        input_norm=not wide and f"{prefix}.input_layernorm.weight" in state,
        final_norm=wide,
        norm_output=wide and bool(flags.get("norm_output")),
        own_embedding=own,
        fc_bias="fc.bias" in state or "fusion_fc.bias" in state,
        attention_bias=f"{prefix}.self_attn.q_proj.bias" in state,
        mlp_bias=f"{prefix}.mlp.gate_proj.bias" in state,
    )


def _layers(fields: dict[str, Any], count: int) -> tuple[int, ...]:
    """Return the layers whose hidden states an EAGLE-3 drafter reads.

    Ids at the top level of the configuration count the layers before a hidden state (vLLM). Ids in
    `eagle_config` are the index of the layer that outputs it (SGLang). Without ids the layers are
    2, `count // 2` and `count - 3`, for a target of `count` layers.
    """
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = (
        fields.get("eagle_aux_hidden_state_layer_ids")
        or (nested and [i + 1 for i in nested])
        or (2, count // 2, count - 3)
    )
    return tuple(sorted(ids))


def _differs(stored: torch.Tensor, embedding: nn.Module, vocab_size: int) -> bool:
    """Whether a drafter's stored embedding differs from the target's.

    Compares the width and a sample of `ROWS` rows, up to bfloat16's rounding.
    """
    ids = torch.linspace(0, min(len(stored), vocab_size) - 1, ROWS).long()
    parameter = next(embedding.parameters(), ids)
    with torch.inference_mode():
        theirs = embedding(ids.to(parameter.device)).float().cpu()
    return theirs.shape[-1] != stored.shape[-1] or not torch.allclose(
        stored[ids].float(), theirs, rtol=2**-7, atol=1e-5
    )


def _sources(
    config: EagleConfig, prefix: str, fc: str, state: dict[str, torch.Tensor]
) -> dict[str, tuple[str, ...]]:
    """Return, for each tensor of `EagleHead`, the stored tensors that form it one below the
    other."""
    modules = {
        "fc": (fc,),
        "fused_norm": ("input_norm",),
        "hidden_norm": (f"{prefix}.hidden_norm",),
        "input_norm": (f"{prefix}.input_layernorm",),
        "qkv": tuple(f"{prefix}.self_attn.{part}_proj" for part in "qkv"),
        "out": (f"{prefix}.self_attn.o_proj",),
        "mlp_norm": (f"{prefix}.post_attention_layernorm",),
        "gate_up": (f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
        "down": (f"{prefix}.mlp.down_proj",),
        "norm": ("norm",),
        "own_embedding": ("embed_tokens",),
        "own_head": ("lm_head",),
        **{f"feature_norms.{i}": (f"fc_norm.{i}",) for i in range(len(config.layers))},
    }
    sources = {}
    for name in _shapes(config):
        module, _, kind = name.rpartition(".")
        if module:
            sources[name] = tuple(f"{part}.{kind}" for part in modules[module])
    return sources


def _shapes(config: EagleConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {
            name: tensor.shape
            for name, tensor in EagleHead(config).state_dict().items()
            if not name.startswith("rotary.")
        }


def _check_tensors(
    config: EagleConfig,
    sources: dict[str, tuple[str, ...]],
    state: dict[str, torch.Tensor],
    prefix: str,
) -> None:
    """Raise `InvalidInput` naming a tensor that is missing, has another shape, or has no place."""
    split = {
        "qkv": [config.heads, config.kv_heads, config.kv_heads],
        "gate_up": [config.intermediate_size] * 2,
    }
    split["qkv"] = [heads * config.head_dim for heads in split["qkv"]]
    shapes = _shapes(config)
    for name, parts in sources.items():
        for part, rows in zip(
            parts, split.get(name.partition(".")[0], [shapes[name][0]]), strict=True
        ):
            expected = (rows, *shapes[name][1:])
            if part not in state:
                raise InvalidInput(
                    f"the drafter lacks {part}, of shape {list(expected)}; download it again"
                )
            if tuple(state[part].shape) != expected:
                raise InvalidInput(
                    f"{part} has shape {list(state[part].shape)}, expected "
                    f"{list(expected)} by config.json and the target"
                )
    ignored = {
        "d2t",
        "t2d",
        "embed_tokens.weight",
        "verifier_norm.weight",
        "verifier_lm_head.weight",
    }
    # EAGLE and EAGLE-2 use the target's head; a stored one is not read.
    ignored |= {f"{prefix}.self_attn.rotary_emb.inv_freq"} | (
        {"lm_head.weight"} if config.join == "input" else set()
    )
    if left := sorted(
        state.keys() - ignored - {part for parts in sources.values() for part in parts}
    ):
        raise InvalidInput(
            f"a drafter of one Llama layer has no place for {', '.join(left[:4])}; "
            "use another drafter"
        )


def _tokens(
    state: dict[str, torch.Tensor], count: int, whole: int | None, vocab_size: int
) -> torch.Tensor:
    """Return `[count]`: the target's token for each row of the drafter's head.

    The stored `d2t` holds the difference between token and row. It is ignored where the head has
    the whole vocabulary (`whole` tokens, or the target's `vocab_size`). Raises `InvalidInput` if
    `d2t` is missing or has another shape, or if `count` exceeds `vocab_size`.
    """
    if count > vocab_size:
        raise InvalidInput(
            f"its draft_vocab_size is {count}, the target has {vocab_size} tokens: "
            "it was made for another model"
        )
    if count in (whole, vocab_size):
        return torch.arange(count)
    offset = state.get("d2t")
    if offset is None:
        raise InvalidInput(
            "the drafter lacks d2t, which says the tokens of its head; download it again"
        )
    if offset.shape != (count,):
        raise InvalidInput(
            f"d2t has shape {list(offset.shape)}, expected {[count]} by draft_vocab_size"
        )
    return torch.arange(count) + offset.long()


def _check_target(
    config: EagleConfig,
    tokens: torch.Tensor | None,
    target_layers: int,
    target_size: int,
    vocab_size: int,
) -> None:
    """Raise `InvalidInput` for a drafter that was made for another target."""
    if config.target_size != target_size or (
        config.hidden_size != target_size and not config.own_embedding
    ):
        size = config.target_size if config.target_size != target_size else config.hidden_size
        raise InvalidInput(
            f"it reads hidden states {size} wide, the target's are {target_size}: "
            "it was made for another model"
        )
    check_layers(config.layers, target_layers)
    if config.own_embedding and config.vocab_size < vocab_size:
        raise InvalidInput(
            f"its embedding has {config.vocab_size} tokens, the target has "
            f"{vocab_size}: it was made for another model"
        )
    if tokens is not None and not (
        int(tokens.min()) >= 0
        and int(tokens.max()) < vocab_size
        and len(set(tokens.tolist())) == len(tokens)
    ):
        raise InvalidInput(
            f"its token map (d2t) leaves the target's {vocab_size} tokens or names "
            "one twice: it was made for another model"
        )
