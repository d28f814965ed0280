"""Mamba-2 beside attention: Granite 4 H, Bamba, Nemotron-H and Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quickbeam.models.families.reading import (
    Config,
    NotDescribed,
    activation,
    attention,
    decoder,
    experts,
    gated,
    halves,
    rms,
    tensors,
)
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Linear,
    Matrices,
    Norm,
    Routing,
    Stack,
    Tensor,
)


def mixer(at: str, sizes: tuple[int, int, int, int], biased: bool, **more: Any) -> Matrices:
    """Return Mamba-2. `sizes`: heads, their dimension, groups of B and C, and B's dimension.

    `in_proj` gives gates, what is convolved, and steps. `more`: other fields of `Matrices`.
    """
    heads, dim, groups, state = sizes
    inner, channels = heads * dim, heads * dim + 2 * groups * state
    if state % 4:
        raise NotDescribed(f"a state of {state} numbers")
    cuts = ((inner, inner + channels), (0, inner), (inner + channels, inner + channels + heads))

    def rows(kind: str) -> tuple[Tensor, ...]:
        return tuple(Tensor(f"{at}.in_proj.{kind}", cut=cut) for cut in cuts)

    told: dict[str, Any] = {
        "into": Linear(rows("weight"), rows("bias") if biased else ()),
        "out": tensors(f"{at}.out_proj", bias=biased),
        "weight": f"{at}.conv1d.weight",
        "heads": heads,
        "key_heads": groups,
        "key_dim": state,
        "value_dim": dim,
        "log_slope": f"{at}.A_log",
        "shift": f"{at}.dt_bias",
        "delta": False,
        "groups": groups,
        "norm_last": True,
        "skip": f"{at}.D",
    }
    return Matrices(**(told | more))


def _mamba(c: Config, at: str, **more: Any) -> Matrices:
    """Return Mamba-2 by the names that most configurations have."""
    for name in ("mamba_expand", "mamba_chunk_size"):  # sizes follow; kernels
        c.get(name)
    c.must("hidden_act", "silu", "swish")
    least, most = c.time_step_limit
    told: dict[str, Any] = {
        "taps": c.mamba_d_conv,
        "bias": f"{at}.conv1d.bias" if c.mamba_conv_bias else None,
        "least": least,
        "most": most,
    }
    sizes = c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups, c.mamba_d_state
    return mixer(at, sizes, bool(c.mamba_proj_bias), **(told | more))


def granite_hybrid(c: Config) -> Stack:
    """Granite with Mamba-2 in most layers, and experts beside a feed-forward of all tokens."""
    rope = c.get("position_embedding_type") == "rope"
    c.get("rope_parameters")
    turns: dict[str, Any] = {} if rope else {"rotary": None}

    def feed_forward(i: int) -> FeedForward | Experts:
        at = f"model.layers.{i}"
        up = halves(f"{at}.shared_mlp.input_linear")
        if c.get("gates_apart"):  # in .gguf files
            up = tensors(f"{at}.shared_mlp.gate_proj", f"{at}.shared_mlp.up_proj")
        down = tensors(f"{at}.shared_mlp.output_linear")
        shared = FeedForward(up, down, activation(c.hidden_act), True)
        for name in ("num_experts_per_tok", "shared_intermediate_size"):
            c.get(name)
        if not c.num_local_experts:
            return shared
        logits = tensors(f"{at}.block_sparse_moe.router")
        routing = Routing(logits, c.num_experts_per_tok, "softmax_of_chosen")
        return experts(c, i, routing, c.num_local_experts, "block_sparse_moe", shared=shared)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        norms = rms(c, f"{at}.input_layernorm"), rms(c, f"{at}.post_attention_layernorm")
        fed, residual = feed_forward(i), c.residual_multiplier
        if c.layer_types[i] == "linear_attention":
            norm = rms(c, f"{at}.mamba.norm")
            mamba = _mamba(c, f"{at}.mamba", norm=norm)
            return Layer(None, fed, *norms, residual=residual, recurrent=mamba)
        of = attention(c, i, c.attention_bias, scaling=c.attention_multiplier, **turns)
        return Layer(of, fed, *norms, residual=residual)

    scales = {"scale": c.embedding_multiplier, "head_scale": 1 / c.logits_scaling}
    return decoder(c, layer, **scales)


def bamba(c: Config) -> Stack:
    for name in ("num_logits_to_keep", "z_loss_coefficient"):
        c.get(name)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        fed = gated(c, i, c.mlp_bias, name="feed_forward")
        norms = rms(c, f"{at}.input_layernorm"), rms(c, f"{at}.pre_ff_layernorm")
        if i not in (c.get("attn_layer_indices") or ()):
            mamba = _mamba(c, f"{at}.mamba", norm=rms(c, f"{at}.mamba.norm"))
            return Layer(None, fed, *norms, recurrent=mamba)
        return Layer(attention(c, i, c.attention_bias), fed, *norms)

    return decoder(c, layer, norm=rms(c, "model.final_layernorm"))


def nemotron_h(c: Config) -> Stack:
    """Each layer is Mamba-2, attention without angles, or a feed-forward."""
    for name in (
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"),
        *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
        *("moe_shared_expert_overlap", "routed_scaling_factor", "norm_topk_prob"),  # of experts
        *("mtp_layers_block_type", "expand", "chunk_size", "mamba_proj_bias", "use_mamba_kernels"),
        *("mamba_ssm_cache_dtype", "residual_in_fp32", "rescale_prenorm_residual"),
        *("time_step_max", "time_step_floor", "time_step_limit", "num_logits_to_keep"),
    ):
        c.get(name)
    c.must("mamba_hidden_act", "silu", "swish")
    c.must("num_nextn_predict_layers", 0)

    def norm(module: str) -> Norm:
        return Norm((f"{module}.weight",), c.layer_norm_epsilon)

    def layer(i: int) -> Layer:
        at, kind = f"model.layers.{i}.mixer", c.layers_block_type[i]
        before = norm(f"model.layers.{i}.norm")
        if kind == "linear_attention":
            mamba = mixer(
                at,
                (c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size),
                bool(c.use_bias),
                taps=c.conv_kernel,
                bias=f"{at}.conv1d.bias" if c.use_conv_bias else None,
                norm=norm(f"{at}.norm"),
                least=c.time_step_min,
            )
            return Layer(None, None, before, None, recurrent=mamba)
        if kind == "full_attention":
            qkv, out = tensors(*(f"{at}.{one}_proj" for one in "qkv")), tensors(f"{at}.o_proj")
            of = attention(c, i, window=None, qkv=qkv, out=out, rotary=None)
            return Layer(of, None, before, None)
        if kind != "mlp":
            raise NotDescribed(f"a layer of kind {kind}")
        act = activation(c.mlp_hidden_act)
        up, down = (tensors(f"{at}.{one}_proj", bias=c.mlp_bias) for one in ("up", "down"))
        return Layer(None, FeedForward(up, down, act, False), None, before)

    for name in ("attention_bias", "sliding_window"):  # its attention heeds neither
        c.get(name)
    changes = {"embedding": "model.embeddings.weight", "norm": norm("model.norm_f")}
    return decoder(c, layer, **changes)


def falcon_h1(c: Config) -> Stack:
    """Attention beside Mamba-2 in each layer, and many factors."""
    for name in ("num_logits_to_keep", "mamba_d_ssm"):
        c.get(name)
    read, said = c.attention_in_multiplier, c.ssm_in_multiplier
    if (c.attention_bias and read != 1) or (c.mamba_proj_bias and said != 1):
        raise NotDescribed("a factor before a product with a bias")
    gates, values, keys, queries, steps = (said * one for one in c.ssm_multipliers)
    up, down = c.mlp_multipliers

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        fed = gated(c, i, c.mlp_bias, name="feed_forward")
        fed = replace(fed, gate_scale=up, factor=down)
        of = attention(
            c, i, c.attention_bias, window=None, factor=c.attention_out_multiplier * read
        )
        norm = rms(c, f"{at}.mamba.norm") if c.mamba_rms_norm else None
        mamba = _mamba(
            c,
            f"{at}.mamba",
            out=tensors(f"{at}.mamba.out_proj", bias=bool(c.projectors_bias)),
            norm=norm,
            norm_last=not c.mamba_norm_before_gate,
            gate_scale=gates,
            scales=(values, keys, queries),
            step_scale=steps,
            factor=c.ssm_out_multiplier,
        )
        norms = rms(c, f"{at}.input_layernorm"), rms(c, f"{at}.pre_ff_layernorm")
        scaled = replace(of, scaling=of.scaling * read**2 * c.key_multiplier)
        return Layer(scaled, fed, *norms, recurrent=mamba)

    return decoder(
        c,
        layer,
        norm=rms(c, "model.final_layernorm"),
        scale=c.embedding_multiplier,
        head_scale=c.lm_head_multiplier,
    )
