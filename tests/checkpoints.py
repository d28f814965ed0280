"""Tiny checkpoints in the layouts of published feature drafters, for tests."""

import json
import math
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quickbeam.drafters.eagle_files import load_eagle
from quickbeam.drafters.folder import TargetParts

D, VOCAB, DRAFT, LAYERS = 32, 97, 20, 12
LLAMA: dict[str, Any] = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=D)
LLAMA |= dict(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB)
LLAMA |= dict(num_hidden_layers=1, rms_norm_eps=1e-5, hidden_act="silu", rope_theta=5000.0)
LLAMA |= dict(max_position_embeddings=2048)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)


def layer(prefix, wide, bias=False, d=D):
    """Random tensors of the decoder layer. `wide`: EAGLE-3's."""
    read = {"q": 32, "k": 16, "v": 16}
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{part}_proj": (rows, d * (1 + wide)) for part, rows in read.items()},
        **{"self_attn.o_proj": (d, 32), "post_attention_layernorm": (d,)},
        **{"mlp.gate_proj": (48, d), "mlp.up_proj": (48, d), "mlp.down_proj": (d, 48)},
        **({"input_layernorm": (d,), "hidden_norm": (d,)} if wide else {}),
    }
    state = {f"{prefix}.{name}.weight": noise(*shape) for name, shape in shapes.items()}
    for part, rows in read.items() if bias else ():
        state[f"{prefix}.self_attn.{part}_proj.bias"] = torch.randn(rows)
    return state


def noise(*shape):
    return torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) / math.sqrt(shape[-1])


def eagle1(bias=False, fc_bias=False):
    state = {"fc.weight": noise(D, 2 * D), **layer("layers.0", False, bias)}
    return state | ({"fc.bias": torch.randn(D)} if fc_bias else {})


def eagle3(prefix="midlayer", rows=DRAFT, d=D):
    tokens = torch.randperm(VOCAB)[:rows].sort().values
    maps = {"d2t": tokens - torch.arange(rows), "t2d": torch.isin(torch.arange(VOCAB), tokens)}
    own = {"fc": noise(d, 3 * D), "norm": noise(d), "lm_head": noise(rows, d)}
    return {f"{name}.weight": one for name, one in own.items()} | maps | layer(prefix, True, d=d)


def write(folder, config, state, how="safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if how == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif how == "sharded":
        names = sorted(state)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in shards.items():
            save_file({name: state[name] for name in part}, folder / file)
        index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return folder


def shared(size=D):
    return nn.Embedding(VOCAB, size), nn.Linear(size, VOCAB, bias=False)


def read(folder, embedding=None, head=None, **target):
    sizes = {"layers": LAYERS, "size": D, "vocab": VOCAB, **target}
    first, second = shared(sizes["size"])
    parts = TargetParts(**sizes, embedding=embedding or first, head=head or second)
    return load_eagle(folder, parts)


def configure(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rewrite(folder, tensors):
    """Put tensors into the weights in a folder; None takes one away."""
    path = folder / "model.safetensors"
    kept = {name: one for name, one in (load_file(path) | tensors).items() if one is not None}
    save_file(kept, path, {"format": "pt"})
