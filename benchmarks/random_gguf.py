"""Writes a `.gguf` file of random weights, for llama.cpp's `llama-bench`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}
TYPES = {
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}


def tensors(config: Any, shapes: dict[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yield names and shapes as llama.cpp has them."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, shape in shapes.items():
        at = ".".join(["blk", *name.split(".")[2:3]])
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("dt_bias"):
            yield f"{at}.ssm_dt.bias", shape
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part in ("gate", "up"):
                yield f"{at}.ffn_{part}.weight", [shape[0] // 2, shape[1]]
        elif name.endswith("experts.gate_up_proj"):
            for part in ("gate", "up"):
                yield f"{at}.ffn_{part}_exps.weight", [shape[0], shape[1] // 2, shape[2]]
        else:
            renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert renamed is not None, name
            renamed += "" if renamed.endswith((".weight", ".bias", "ssm_a", "ssm_d")) else ".weight"
            renamed = renamed.replace("_shexp", "")
            shape = [size for size in shape if size != 1]
            if config.model_type == "granitemoehybrid" and renamed.endswith(("ssm_a", "ssm_d")):
                shape = [*shape, 1]
            if config.model_type == "granitemoehybrid" and renamed.endswith("ssm_norm.weight"):
                shape = [1, *shape]
            yield renamed, shape


def fields(config: Any) -> dict[str, Any]:
    """Return what llama.cpp reads of a configuration, without the architecture's name."""
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    kv = [
        config.num_key_value_heads * ("attention" in kind and "linear" not in kind)
        for kind in kinds
    ]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    items: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv if 0 in kv else kv[0],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": dim,
        "rope.freq_base": 1e6,
    }
    kind = config.model_type
    if kind == "gemma3_text":
        items["attention.sliding_window"] = config.sliding_window
    if kind == "lfm2":
        items["shortconv.l_cache"] = config.conv_L_cache
        inner = 2 * config.intermediate_size // 3
        step = config.block_multiple_of
        items["feed_forward_length"] = -(-inner // step) * step
    if kind == "olmoe":
        items |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
        }
    if kind == "granitemoehybrid":
        items |= ssm(config.mamba_d_conv, config.mamba_n_heads * config.mamba_d_head)
        items |= {"ssm.state_size": config.mamba_d_state, "ssm.group_count": config.mamba_n_groups}
        items |= {"ssm.time_step_rank": config.mamba_n_heads, "rope.scaling.finetuned": False}
    if kind == "qwen3_5_text":
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        items |= ssm(config.linear_conv_kernel_dim, heads * width)
        items |= {"ssm.state_size": width, "ssm.group_count": config.linear_num_key_heads}
        items |= {"ssm.time_step_rank": heads, "rope.dimension_sections": [11, 11, 10, 0]}
        items |= {"attention.head_count_kv": config.num_key_value_heads, "rope.dimension_count": 64}
    return items


def ssm(taps: int, inner: int) -> dict[str, Any]:
    return {"ssm.conv_kernel": taps, "ssm.inner_size": inner}


def write(path: Path, config: Any, shapes: dict[str, list[int]], weights: str) -> None:
    """Write random weights of these shapes, matrices in the format `weights`."""
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    writer, kind = gguf.GGUFWriter(path, arch, use_temp_file=False), TYPES[weights]
    writer.add_tokenizer_model("no_vocab")
    for name, value in fields(config).items():
        key = f"{arch}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(key, value)
    some = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)
    packed = gguf.quants.quantize(some, kind)
    for name, shape in tensors(config, shapes):
        small = len(shape) == 1 or any(part in name for part in ("ssm_a", "ssm_d", "conv", "norm"))
        if small and "proj" not in name:
            fill = -1.0 if "ssm_a" in name and "alpha" not in name else 1.0
            writer.add_tensor(name, np.full(shape, fill, np.float32))
            continue
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.resize(packed.view(np.uint8), int(np.prod(shape)) // block * size)
        data = data.reshape(*shape[:-1], shape[-1] // block * size)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
