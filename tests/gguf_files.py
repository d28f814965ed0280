"""Tiny `.gguf` files, as llama.cpp's converter makes them of transformers' models."""

import copy
import re

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from models import table, tiny
from quantised import random_blocks
from quickbeam.drafters.layouts import DFLASH, GGUF_ASSISTANT, GGUF_IN_LAYER, GGUF_MODULES
from quickbeam.models.weights.gguf.architecture import INTERLEAVED, INTERLEAVED_EXPERTS

WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 288}
# what blocks of 256 inputs need
WHOLE_BLOCKS = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, head_dim=64)
TINY = table("gguf")
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]


def model_of(architecture: str, **sizes: int) -> PreTrainedModel:
    config = copy.deepcopy(TINY[architecture])
    for name, value in (WIDE | sizes).items():
        setattr(config, name, value)
    if getattr(config, "query_pre_attn_scalar", None):
        config.query_pre_attn_scalar = config.head_dim = 16
    if architecture == "granite":
        config.tie_word_embeddings = True
    model = tiny("", config=config, seed=3)
    with torch.no_grad():
        for name, bias in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("_bias", ".bias", "sinks")):
                bias.copy_(torch.randn_like(bias) * 0.3)
            elif "norm" in name or name.endswith((".scale", "expert_scale", "scalar")):
                bias.add_(torch.randn_like(bias) * 0.1)
    return model


def say(writer: gguf.GGUFWriter, **fields) -> None:
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def states(writer: gguf.GGUFWriter, taps, size, groups, heads, dim) -> None:
    sizes = dict(ssm_conv_kernel=taps, ssm_state_size=size, ssm_group_count=groups)
    say(writer, **sizes, ssm_inner_size=heads * dim, ssm_time_step_rank=heads)


def metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    c, name = model.config, writer.arch
    c.allow_global_per_layer_attribute_access = True  # Gemma 4's of the layers with windows
    heads, layers = c.num_attention_heads, c.num_hidden_layers
    dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    sizes = dict(context_length=c.max_position_embeddings, embedding_length=c.hidden_size)
    say(writer, **sizes, block_count=layers, head_count=heads, vocab_size=c.vocab_size)
    if name == "gpt2":
        inner = c.n_inner or 4 * c.hidden_size
        say(writer, feed_forward_length=inner, layer_norm_eps=c.layer_norm_epsilon)
        return
    writer.add_key_length(dim)
    if hasattr(c, "intermediate_size"):
        writer.add_feed_forward_length(c.intermediate_size)
    kinds = getattr(c, "layer_types", None) or []
    some = [c.num_key_value_heads * (kind == "full_attention") for kind in kinds]
    by_layer = name in ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h")
    writer.add_head_count_kv(some if by_layer else c.num_key_value_heads)
    epsilons = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps")
    epsilon = next(getattr(c, one) for one in epsilons if hasattr(c, one))
    if name in ("nemotron", "stablelm", "starcoder2"):
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_layer_norm_rms_eps(epsilon)
    if name == "nemotron":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    rope = getattr(c, "rope_parameters", None) or {"rope_theta": 10000.0}
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if rope.get("rope_type") == "yarn":
        say(writer, rope_scaling_type=gguf.RopeScalingType.YARN, rope_scaling_factor=rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name in ("gemma2", "gemma3", "gemma4", "gpt-oss"):
        writer.add_sliding_window(c.sliding_window)
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(c, cap, None):
                writer.add_float32(f"{name}.{cap}", getattr(c, cap))
    count = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    if count and name != "nemotron_h":
        used = getattr(c, "num_experts_per_tok", None) or c.top_k_experts
        inner = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
        sizes = dict(expert_used_count=used, expert_feed_forward_length=inner)
        say(writer, expert_count=count, **sizes)
    if name == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if name.startswith("lfm2"):
        writer.add_shortconv_l_cache(c.conv_L_cache)
    if name == "lfm2moe":
        writer.add_leading_dense_block_count(c.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name.startswith("granite"):
        say(writer, embedding_scale=c.embedding_multiplier, residual_scale=c.residual_multiplier)
        say(writer, attention_scale=c.attention_multiplier, logit_scale=c.logits_scaling)
    if name == "nemotron_h":
        writer.add_feed_forward_length([c.intermediate_size * (one == "mlp") for one in kinds])
        own = (c.conv_kernel, c.ssm_state_size, c.n_groups, c.mamba_num_heads, c.mamba_head_dim)
        states(writer, *own)
    if name in ("granitehybrid", "falcon-h1"):
        own = (c.mamba_d_conv, c.mamba_d_state, c.mamba_n_groups, c.mamba_n_heads, c.mamba_d_head)
        states(writer, *own)
    if name == "granitehybrid":
        writer.add_rope_scaling_finetuned(c.position_embedding_type == "rope")
    if name == "gemma4":
        of_gemma4(writer, c)
    if name.startswith(("qwen35", "qwen3next")):
        delta_rule(writer, c)


def of_gemma4(writer: gguf.GGUFWriter, c) -> None:
    """What differs by kind of layers, and whose keys and values are read."""
    near = [kind == "sliding_attention" for kind in c.layer_types]
    full, ropes = c.per_layer_config[2], c.rope_parameters
    say(writer, key_length=full.head_dim, rope_dimension_count=full.head_dim)
    say(writer, key_length_swa=c.head_dim, value_length_swa=c.head_dim)
    say(writer, rope_dimension_count_swa=c.head_dim, sliding_window_pattern=near)
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(c.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input)
    if c.use_double_wide_mlp:
        first = c.num_hidden_layers - c.num_kv_shared_layers
        widths = [c.intermediate_size * (1 + (i >= first)) for i in range(c.num_hidden_layers)]
        writer.add_feed_forward_length(widths)
    if full.num_key_value_heads != c.num_key_value_heads:
        heads = full.num_key_value_heads, c.num_key_value_heads
        writer.add_head_count_kv([heads[one] for one in near])
    angles = np.full(full.head_dim // 2, 1e30, np.float32)
    angles[: int(ropes["full_attention"]["partial_rotary_factor"] * len(angles))] = 1
    writer.add_tensor("rope_freqs.weight", angles)


def delta_rule(writer: gguf.GGUFWriter, c) -> None:
    own = (c.linear_conv_kernel_dim, c.linear_key_head_dim, c.linear_num_key_heads)
    states(writer, *own, c.linear_num_value_heads, c.linear_value_head_dim)
    writer.add_full_attention_interval(c.layer_types.index("full_attention") + 1)
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if hasattr(c, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)


def tokenizer(writer: gguf.GGUFWriter, pre: str, control: tuple[str, ...]) -> None:
    tokens = [*TOKENS, "ĊĊ", "ĊĊĊ", *control]  # runs of line ends
    kinds = [3] * 3 + [1] * (len(TOKENS) - 1) + [3] * len(control)
    rest = range(288 - len(tokens))
    tokens, kinds = tokens + [f"<{i}>" for i in rest], kinds + [5] * len(rest)
    say(writer, tokenizer_model="gpt2", tokenizer_pre=pre, token_list=tokens, token_types=kinds)
    say(writer, eos_token_id=2, bos_token_id=0, add_bos_token=False)
    writer.add_token_merges(["Ċ Ċ", "ĊĊ Ċ"])
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to queries and keys of Llama's layout."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


# names that llama.cpp's package doesn't know, as transformers has them since its version 5
NAMES = {
    "layer_scalar": "layer_scalar.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "block_sparse_moe.": "mlp.",
    "feed_forward.experts": "mlp.experts",
    "mlp.router": "mlp.gate",
    "expert_bias": "expert_bias.bias",
    "sinks": "sinks.weight",
    "_proj_bias": "_proj.bias",
}


def apart(state, woven: bool):
    """All tensors as the converter has them. `woven`: as of `INTERLEAVED_EXPERTS`."""
    for name, tensor in state.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "conv.conv" in name or "conv1d.weight" in name:
            tensor = tensor.squeeze(1)
        if ".experts." not in name or name.endswith(".scale"):
            yield name, tensor
            continue
        whole = name if name.endswith(".bias") else f"{name}.weight"
        if woven and tensor.dim() == 3:
            tensor = tensor.transpose(1, 2)
        if "gate_up_proj" not in name or not (".mlp." in name or "feed_forward" in name):
            yield whole, tensor
            continue
        halves = (tensor[:, ::2], tensor[:, 1::2]) if woven else tensor.chunk(2, 1)
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield whole.replace("gate_up", part), half


def plus_one(model: PreTrainedModel, name: str) -> bool:
    """Whether the converter adds 1 to a tensor: to norms' weights that are stored less it."""
    kind = model.config.model_type
    if kind == "nemotron":
        return name.endswith("norm.weight")
    of_kind = kind.startswith(("gemma", "qwen3_5", "qwen3_next")) and kind != "gemma4_text"
    return of_kind and "norm" in name.split(".")[-2] and "linear_attn" not in name


def tiled(rows, c, dim: int, axis: int = 0):
    """What the converter does to heads of values: a key's first ones first, then the seconds."""
    shape = (*rows.shape[:axis], c.linear_num_key_heads, -1, dim, *rows.shape[axis + 1 :])
    return rows.reshape(shape).swapaxes(axis, axis + 1).reshape(rows.shape)


def in_delta_rule(architecture: str, c, state):
    dim, keys = c.linear_value_head_dim, 2 * c.linear_num_key_heads * c.linear_key_head_dim
    for name, tensor in state:
        module = name.rpartition("linear_attn.")[2].partition(".")[0]
        if "linear_attn" not in name:
            yield name, tensor
            continue
        if module == "in_proj_qkvz":
            heads = tensor.view(c.linear_num_key_heads, -1, tensor.shape[-1])
            sizes = [c.linear_key_head_dim] * 2
            sizes += [(heads.shape[1] - sum(sizes)) // 2] * 2
            *mixed, gates = (one.flatten(0, 1) for one in heads.split(sizes, 1))
            yield name.replace("qkvz", "qkv"), torch.cat(mixed)
            yield name.replace("qkvz", "z"), gates
            continue
        if architecture != "qwen3next":
            if module in ("in_proj_qkv", "conv1d"):
                tensor = torch.cat([tensor[:keys], tiled(tensor[keys:], c, dim)])
            elif module == "out_proj":
                tensor = tiled(tensor, c, dim, 1)
            elif module != "norm":
                tensor = tiled(tensor, c, dim if module == "in_proj_z" else 1)
        if module == "A_log":
            tensor = -tensor.exp()
        yield name.replace("dt_bias", "dt_proj.bias"), tensor


def head_norms_stacked(state):
    """StableLM's norms of heads are one tensor."""
    stacked = {}
    for name, tensor in state:
        module, found, _ = name.partition(".norms.")
        if found:
            stacked.setdefault(f"{module}.weight", []).append(tensor)
        else:
            yield name, tensor
    for name, tensors in stacked.items():
        yield name, torch.stack(tensors)


def with_factors(c, state):
    groups = c.mamba_n_groups * c.mamba_d_state
    sizes = torch.tensor([c.mamba_d_ssm, c.mamba_d_ssm, groups, groups, c.mamba_n_heads])
    into = torch.tensor(c.ssm_multipliers).repeat_interleave(sizes) * c.ssm_in_multiplier
    factors = {
        "gate_proj": c.mlp_multipliers[0],
        "down_proj": c.mlp_multipliers[1],
        "q_proj": c.attention_in_multiplier,
        "k_proj": c.attention_in_multiplier * c.key_multiplier,
        "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier,
        "out_proj": c.ssm_out_multiplier,
        "in_proj": into[:, None],
        "lm_head": c.lm_head_multiplier,
        "embed_tokens": c.embedding_multiplier,
    }
    for name, tensor in state:
        yield name, tensor * factors.get(name.split(".")[-2], 1.0)


def in_mamba(c, state):
    beside = "mlp.shared_expert" if getattr(c, "num_local_experts", 0) else "mlp"
    for name, tensor in state:
        kind = name.split(".", 4)[-1]
        if "input_linear" in name:
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"{beside}.{part}_proj"), half
            continue
        if kind == "A_log":
            tensor = -tensor.exp()
        if kind in ("A_log", "D"):
            tensor = tensor[:, None]
        elif kind == "norm.weight":
            tensor = tensor.view(getattr(c, "mamba_n_groups", None) or c.n_groups, -1)
        if "output_linear" in name:
            name = name.replace("shared_mlp.output_linear", f"{beside}.down_proj")
        if not hasattr(c, "mamba_n_heads"):
            name = name.replace("model.", "backbone.")
        yield name.replace("dt_bias", "dt_proj.bias"), tensor


def mtp_block(architecture: str, layers: int, layer, plus: float = 1.0) -> dict[str, np.ndarray]:
    """The tensors of an MTP head, a block behind the model's `layers`. `layer`: of transformers'
    class. `plus`: what the converter adds to norms' weights."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, block = gguf.get_tensor_name_map(kind, layers + 1), f"model.layers.{layers}"
    tensors = dict[str, np.ndarray]()
    for name, tensor in apart(layer.state_dict(), False):
        module, _, rest = name.partition(".")
        inside = names.get_name(f"{block}.{rest}", (".weight", ".bias"))
        module = module.replace("post_norm", "shared_head_norm")
        own = inside if module == "mtp_block" else f"blk.{layers}.nextn.{module}.{rest}"
        data = tensor.float().numpy()
        tensors[own] = data + plus if "norm" in name.split(".")[-2] else data
    return tensors


def assistant(path, network, kind=None, **keys):
    """A file of an assistant of Gemma 4. `kind`: the format of its matrices, F32 without. `keys`:
    of `set_keys`."""
    config = network.config
    c, layers = config.text_config, config.text_config.num_hidden_layers
    c.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(str(path), GGUF_ASSISTANT)
    near = [one == "sliding_attention" for one in c.layer_types]
    by_layer = [c.per_layer_config[i] for i in range(layers)]
    full = by_layer[near.index(False)].head_dim
    ropes = c.rope_parameters
    say(writer, context_length=512, embedding_length=c.hidden_size, block_count=layers)
    say(writer, feed_forward_length=c.intermediate_size, head_count=c.num_attention_heads)
    say(writer, head_count_kv=[layer.num_key_value_heads for layer in by_layer])
    say(writer, layer_norm_rms_eps=c.rms_norm_eps, vocab_size=c.vocab_size)
    say(writer, key_length=full, value_length=full, rope_dimension_count=full)
    say(writer, key_length_swa=c.head_dim, value_length_swa=c.head_dim)
    say(writer, rope_dimension_count_swa=c.head_dim, sliding_window=c.sliding_window)
    say(writer, sliding_window_pattern=near, shared_kv_layers=layers)
    say(writer, rope_freq_base=ropes["full_attention"]["rope_theta"])
    say(writer, rope_freq_base_swa=ropes["sliding_attention"]["rope_theta"])
    say(writer, nextn_predict_layers=layers)
    writer.add_uint32(f"{GGUF_ASSISTANT}.embedding_length_out", config.backbone_hidden_size)
    set_keys(writer, keys)
    angles = np.full(full // 2, 1e30, np.float32)
    angles[: int(ropes["full_attention"]["partial_rotary_factor"] * len(angles))] = 1
    writer.add_tensor("rope_freqs.weight", angles)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    for name, tensor in network.state_dict().items():
        module = name.removesuffix(".weight")
        if module.endswith("_projection"):
            module = f"nextn.{module}"
        elif module.startswith("model."):
            module = names.get_name(module)
        else:  # clusters, and a head that is the embedding
            continue
        data = tensor.float().numpy()
        if kind is None or data.ndim != 2 or data.shape[1] % 32:
            writer.add_tensor(f"{module}.weight", data)
        else:
            writer.add_tensor(f"{module}.weight", gguf.quantize(data, kind), raw_dtype=kind)
    finish(writer)
    return path


def block_drafter(path, network, kind=None):
    """A block drafter's file. `kind`: the format of its matrices, F32 without."""
    writer, c = gguf.GGUFWriter(str(path), DFLASH), network.config
    say(writer, context_length=512, embedding_length=c.hidden_size, block_count=c.depth)
    say(writer, feed_forward_length=c.intermediate_size, head_count=c.heads, key_length=c.head_dim)
    say(writer, head_count_kv=c.kv_heads, layer_norm_rms_eps=c.eps, rope_freq_base=10000.0)
    say(writer, rope_dimension_count=c.head_dim, causal_attention=bool(c.causal))
    own = {"block_size": c.block_size, "target_hidden_size": c.target_size}
    if c.top_k:
        own |= {"conv_kernel_size": c.conv_taps, "conv_group_size": c.conv_group}
        own |= {"selector_rank": c.markov_rank, "selector_top_k": c.top_k}
    for name, value in own.items():
        writer.add_uint32(f"{DFLASH}.{name}", value)
    writer.add_array(f"{DFLASH}.target_layers", list(c.aux_layers))
    writer.add_bool(f"{DFLASH}.sample_from_anchor", c.from_anchor)
    scales = {"embedding_scale": c.embedding_scale, "logit_scale": c.output_multiplier}
    for name, value in (scales | {"final_logit_softcapping": c.softcap}).items():
        writer.add_float32(f"{DFLASH}.{name}", value)
    if c.windows:
        writer.add_sliding_window(max(one or 0 for one in c.windows))
        writer.add_sliding_window_pattern([one is not None for one in c.windows])
    writer.add_uint32("tokenizer.ggml.mask_token_id", c.mask_token)
    names = {own: one for one, own in [*GGUF_MODULES.items(), *reversed(GGUF_IN_LAYER.items())]}
    for name, tensor in network.state_dict().items():
        of = re.sub(r"^layers\.\d+\.", "", name)
        module, _, last = of.rpartition(".")
        own = names[of] if of in names else f"{names[module]}.{last}"
        own = own if of == name else f"blk.{name.split('.')[1]}.{own}"
        data = tensor.float().numpy()
        if kind is None or data.ndim != 2 or data.shape[1] % 32:
            writer.add_tensor(own, data)
        else:
            writer.add_tensor(own, gguf.quantize(data, kind), raw_dtype=kind)
    finish(writer)
    return path


def in_blocks(rows: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows in a format; random blocks, as wide as the rows, where the package can't make it."""
    try:
        return gguf.quantize(rows, kind)
    except NotImplementedError:
        *outer, inputs = rows.shape
        seed = int(1000 * np.abs(rows).sum())
        like = kind.name.lower(), rows.size // inputs, inputs, seed
        width = gguf.dequantize(random_blocks(*like).data.numpy(), kind).std()
        blocks = random_blocks(*like, factor=rows.std() / width)
        return blocks.data.numpy().reshape(*outer, -1)


def set_keys(writer: gguf.GGUFWriter, keys: dict) -> None:
    """Set keys, of the architecture where they begin otherwise than `tokenizer`. None: remove."""
    add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in keys.items():
        whole = key if key.startswith(("tokenizer.", "general.")) else f"{writer.arch}.{key}"
        writer.kv_data[0].pop(whole, None)
        if type(value) is int and value < 0:
            writer.add_int32(whole, value)
        elif value is not None:
            getattr(writer, f"add_{add[type(value)]}")(whole, value)


def write(
    path,
    architecture,
    model,
    kinds=None,
    change=None,
    behind=(),
    pre="qwen2",
    keys=None,
    control=(),
    **how,
):
    """A file of the model. `kinds`: formats of weights by a part of their name, F32 without.
    `change(name, data)`: what is written of a tensor. `behind`: tensors of a further block.
    `pre`: how text is split into words. `keys`: of `set_keys`. `control`: further control tokens.
    `how`: of the writer."""
    architecture = architecture.split()[0]
    writer, c = gguf.GGUFWriter(str(path), architecture, **how), model.config
    metadata(writer, model)
    if behind:
        writer.add_nextn_predict_layers(1)
        writer.add_block_count(c.num_hidden_layers + 1)
    tokenizer(writer, pre, control)
    set_keys(writer, keys or {})
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, c.num_hidden_layers)
    state = apart(model.state_dict(), architecture in INTERLEAVED_EXPERTS)
    if hasattr(c, "linear_num_key_heads"):
        state = in_delta_rule(architecture, c, state)
    if architecture == "falcon-h1":
        state = with_factors(c, state)
    if architecture == "stablelm":
        state = head_norms_stacked(state)
    if hasattr(c, "mamba_n_heads") or architecture == "nemotron_h":
        state = in_mamba(c, state)
    for name, tensor in state:
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        own, data = names.get_name(name, (".weight", ".bias", ".scale")), tensor.float().numpy()
        heads = {"q_proj": c.num_attention_heads}
        heads["k_proj"] = getattr(c, "num_key_value_heads", None)
        of = name.split(".")[-2]
        if architecture in INTERLEAVED and of in heads:
            data = turned(data, heads[of])
        if architecture == "gpt2" and of.startswith("c_") and data.ndim == 2:
            data = data.T
        if plus_one(model, name):
            data = data + 1
        for at, rows in (change(own, data) if change else {own: data}).items():
            stored = next((k for part, k in (kinds or {}).items() if part in at), None)
            if stored is None or rows.ndim < 2 or at.endswith(".bias"):
                writer.add_tensor(at, rows)
            else:
                writer.add_tensor(at, in_blocks(rows, stored), raw_dtype=stored)
    for own, data in dict(behind).items():
        writer.add_tensor(own, data)
    finish(writer)
    return path
