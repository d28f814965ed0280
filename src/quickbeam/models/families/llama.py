"""Llama and what is close to it: Seed-OSS, SmolLM3, Granite (dense and of experts), Mistral and
Ministral, Apertus, Phi-3 and Phi-4, Hunyuan (dense and of experts), EXAONE 4, OLMo 1 to 3,
ERNIE 4.5, Arcee, Helium, CWM, HyperCLOVA X and nanochat."""

from __future__ import annotations

from collections.abc import Callable

from quickbeam.models.families.reading import (
    AFTER,
    BEFORE,
    Config,
    NormNames,
    NotDescribed,
    activation,
    attention,
    decoder,
    experts,
    gated,
    halves,
    head_dim_of,
    head_norms,
    layer_of,
    linear,
    plain,
    stacked,
    window_of,
)
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    Norm,
    QueryScale,
    Rotary,
    Routing,
    Stack,
    Xielu,
)


def llama(config: Config, out_bias: bool | None = None) -> Stack:
    """`out_bias`: whether the output projection has a bias; None where it is as before it."""
    config.ignore("perceiver_config pixel_shuffle_factor")

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias, out_bias)
        return layer_of(config, i, mixer, gated(config, i, config.mlp_bias))

    return decoder(config, layer)


def apertus(config: Config) -> Stack:
    """xIELU without a gate, and norms of queries and keys.

    Checkpoints hold xIELU's constants as well.
    """

    def layer(i: int) -> Layer:
        prefix = f"model.layers.{i}.mlp"
        if config.hidden_act != "xielu":
            raise NotDescribed(f"the activation {config.hidden_act}")
        feed_forward = FeedForward(
            up=linear(f"{prefix}.up_proj"),
            down=linear(f"{prefix}.down_proj"),
            activation="xielu",
            gated=False,
            xielu=Xielu(f"{prefix}.act_fn.alpha_p", f"{prefix}.act_fn.alpha_n"),
        )
        mixer = attention(config, i, config.attention_bias, norms=head_norms(config, i))
        names = NormNames("attention_layernorm", "feedforward_layernorm")
        return layer_of(config, i, mixer, feed_forward, names)

    layers = range(config.num_hidden_layers)
    constants = tuple(
        f"model.layers.{i}.mlp.act_fn.{name}" for i in layers for name in ("beta", "eps")
    )
    return decoder(config, layer, unread=constants)


def helium(config: Config) -> Stack:
    """Llama with interleaved rotary dimensions, without a bias of the output projection."""

    def layer(i: int) -> Layer:
        rotary = Rotary(interleaved=True)
        mixer = attention(config, i, config.attention_bias, out_bias=False, rotary=rotary)
        return layer_of(config, i, mixer, gated(config, i, config.mlp_bias))

    return decoder(config, layer)


def ernie4_5(config: Config) -> Stack:
    """Llama with interleaved rotary dimensions. All biases are there, or none."""
    bias = bool(config.use_bias)

    def layer(i: int) -> Layer:
        mixer = attention(config, i, bias, rotary=Rotary(interleaved=True))
        return layer_of(config, i, mixer, gated(config, i, bias))

    return decoder(config, layer)


def arcee(config: Config) -> Stack:
    """Llama with squared ReLU without a gate."""

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias)
        feed_forward = plain(config, f"model.layers.{i}.mlp", config.mlp_bias)
        return layer_of(config, i, mixer, feed_forward)

    return decoder(config, layer)


def windowed(config: Config) -> Stack:
    """Llama with a window in some layers: CWM and Ministral."""
    bias = bool(config.get("mlp_bias"))

    def layer(i: int) -> Layer:
        return layer_of(config, i, attention(config, i), gated(config, i, bias))

    return decoder(config, layer)


def nanochat(config: Config) -> Stack:
    """Norms without weights, also of embeddings, and of queries and keys after they are rotated.

    Rotary angles are negative. Squared ReLU without a gate.
    """
    norm = Norm((), float(config.rms_norm_eps))

    def layer(i: int) -> Layer:
        mixer = attention(
            config,
            i,
            config.attention_bias,
            rotary=Rotary(backwards=True),
            norms=(norm, norm),
            norm_last=True,
        )
        feed_forward = plain(config, f"model.layers.{i}.mlp", bias=False, modules=("fc1", "fc2"))
        return layer_of(config, i, mixer, feed_forward, norm=lambda module: norm)

    softcap = config.get("final_logit_softcapping")
    return decoder(config, layer, norm, embedding_norm=norm, softcap=softcap)


def seed_oss(config: Config) -> Stack:
    """Llama whose configuration says apart whether the output projection has a bias."""
    return llama(config, config.attention_out_bias)


def smollm3(config: Config) -> Stack:
    """Llama with layers without rotary angles, and with windows."""
    config.ignore("no_rope_layer_interval")  # `no_rope_layers` follows from it
    windowed = bool(config.get("use_sliding_window"))

    def layer(i: int) -> Layer:
        mixer = attention(
            config,
            i,
            config.attention_bias,
            rotary=Rotary() if config.no_rope_layers[i] else None,
            window=window_of(config, i) if windowed else None,
        )
        return layer_of(config, i, mixer, gated(config, i, config.mlp_bias))

    return decoder(config, layer)


def granite(config: Config) -> Stack:
    """Llama with four factors."""
    return _granite(config, lambda i: gated(config, i, config.mlp_bias))


def granite_swa(config: Config) -> Stack:
    """A sink for each head, windows, and each layer has its own rotary angles, or none."""
    return _granite(config, lambda i: gated(config, i, config.mlp_bias), sinks=True)


def granitemoe(config: Config) -> Stack:
    """Experts whose weights are a softmax of the active ones' logits."""
    return _granite(config, lambda i: granite_experts(config, i))


def granitemoeshared(config: Config) -> Stack:
    """Experts and a shared one."""
    return _granite(config, lambda i: _granite_mixture(config, i))


def granitemoe_swa(config: Config) -> Stack:
    """Experts and a shared one; sinks, windows and angles as of `granite_swa`."""
    return _granite(config, lambda i: _granite_mixture(config, i), sinks=True)


def granite_experts(config: Config, i: int, shared: FeedForward | None = None) -> Experts:
    logits = linear(f"model.layers.{i}.block_sparse_moe.router")
    routing = Routing(logits, config.num_experts_per_tok, "softmax_of_chosen")
    count = config.num_local_experts
    return experts(config, i, routing, count, "block_sparse_moe", shared=shared)


def granite_shared(config: Config, i: int) -> FeedForward:
    prefix = f"model.layers.{i}.shared_mlp"
    up = halves(f"{prefix}.input_linear")
    if config.get("gates_apart"):  # in .gguf files
        up = stacked(prefix, "gate_proj", "up_proj")
    down = linear(f"{prefix}.output_linear")
    return FeedForward(up, down, activation(config.hidden_act), gated=True)


def _granite_mixture(config: Config, i: int) -> Experts:
    """Return experts, and a shared one if that has a size."""
    shared = granite_shared(config, i) if config.shared_intermediate_size else None
    return granite_experts(config, i, shared)


def _granite(
    config: Config, feed_forward: Callable[[int], FeedForward | Experts], sinks: bool = False
) -> Stack:
    """`feed_forward`: makes that of a layer. `sinks`: attention is that of `granite_swa`."""

    def mixer(i: int) -> Attention:
        bias, scaling = config.attention_bias, config.attention_multiplier
        if not sinks:
            return attention(config, i, bias, scaling=scaling)
        theta = config.layer_rope_theta[i]
        rotary = Rotary(base=float(theta)) if theta else None
        name = f"model.layers.{i}.self_attn.sinks"
        return attention(config, i, bias, rotary=rotary, scaling=scaling, sinks=name)

    def layer(i: int) -> Layer:
        residual = config.residual_multiplier
        return layer_of(config, i, mixer(i), feed_forward(i), residual=residual)

    scale, head_scale = config.embedding_multiplier, 1 / config.logits_scaling
    return decoder(config, layer, scale=scale, head_scale=head_scale)


def hyperclovax(config: Config) -> Stack:
    """Granite whose factor of logits is not divided by, and that may have norms after."""
    names = BEFORE
    if config.use_post_norm:
        names = BEFORE._replace(attention_after="post_norm1", feed_forward_after="post_norm2")

    def layer(i: int) -> Layer:
        scaling, residual = config.attention_multiplier, config.residual_multiplier
        mixer = attention(config, i, config.attention_bias, scaling=scaling)
        feed_forward = gated(config, i, config.mlp_bias)
        return layer_of(config, i, mixer, feed_forward, names, residual=residual)

    scale, head_scale = config.embedding_multiplier, config.logits_scaling
    return decoder(config, layer, scale=scale, head_scale=head_scale)


def mistral(config: Config, query_scale: QueryScale | None = None) -> Stack:
    """Every layer has the window, if there is one."""
    window = config.get("sliding_window")

    def layer(i: int) -> Layer:
        mixer = attention(config, i, window=window, query_scale=query_scale)
        return layer_of(config, i, mixer, gated(config, i))

    return decoder(config, layer)


def ministral3(config: Config) -> Stack:
    """Queries grow with the logarithm of their position."""
    rope = config.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return mistral(config, QueryScale(beta, length) if beta else None)


def phi3(config: Config) -> Stack:
    """Queries, keys and values are one weight, gates and what they multiply another. A window in
    every layer."""
    config.ignore("full_attn_mod interpolate_factor")
    window = config.get("sliding_window")

    def layer(i: int) -> Layer:
        qkv = linear(f"model.layers.{i}.self_attn.qkv_proj")
        mixer = attention(config, i, qkv=qkv, window=window)
        return layer_of(config, i, mixer, gated(config, i, fused=True))

    return decoder(config, layer)


def hunyuan(config: Config) -> Stack:
    """Queries and keys are normed after they are rotated, by angles that `alpha` spreads."""
    config.ignore(num_experts=1)
    return _hunyuan(config, lambda i: gated(config, i))


def hunyuan_v1_moe(config: Config) -> Stack:
    """Experts whose weights add up to 1, and a shared one."""
    config.ignore("num_shared_expert")  # a size that the weights have
    config.ignore(norm_topk_prob=True, routed_scaling_factor=1.0, use_mixed_mlp_moe=True)

    def mixture(i: int) -> Experts:
        top = config.moe_topk
        top = top[i] if isinstance(top, list) else top
        logits = linear(f"model.layers.{i}.mlp.gate.wg")
        routing = Routing(logits, top, renormalised=True)
        shared = gated(config, i, name="mlp.shared_mlp")
        return experts(config, i, routing, config.num_experts, shared=shared)

    return _hunyuan(config, mixture)


def _hunyuan(config: Config, feed_forward: Callable[[int], FeedForward | Experts]) -> Stack:
    config.ignore(
        "anyres_pooling_size attention_head_dim cla_share_factor class_num dense_list pad_id "
        "mask_init_id org_vocab_size pool_type text_end_id text_start_id",
        norm_type="rms",
        use_qk_norm=True,
        use_rotary_pos_emb=True,
    )
    dim, rope = head_dim_of(config), config.rope_parameters
    alpha, base = rope.get("alpha"), None
    if rope.get("rope_type") == "dynamic" and alpha:
        base = float(rope["rope_theta"] * alpha ** (dim / (dim - 2)))

    def layer(i: int) -> Layer:
        mixer = attention(
            config,
            i,
            config.attention_bias,
            rotary=Rotary(base=base),
            norms=head_norms(config, i, ("query_layernorm", "key_layernorm")),
            norm_last=True,
        )
        return layer_of(config, i, mixer, feed_forward(i))

    return decoder(config, layer)


def exaone4(config: Config) -> Stack:
    """Norms after, queries and keys normed by head. Where there are windows, layers without one
    have no angles."""
    config.ignore("sliding_window_pattern")  # `layer_types` follows from it
    windowed = config.get("sliding_window") is not None

    def layer(i: int) -> Layer:
        rotated = not windowed or config.layer_types[i] == "sliding_attention"
        rotary = Rotary() if rotated else None
        mixer = attention(config, i, rotary=rotary, norms=head_norms(config, i))
        return layer_of(config, i, mixer, gated(config, i), AFTER)

    return decoder(config, layer)


def olmo(config: Config) -> Stack:
    """OLMo 1: layer norms without weights."""
    config.must("clip_qkv")
    norm = Norm((), 1e-5, centred=True)

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias)
        return layer_of(config, i, mixer, gated(config, i), norm=lambda module: norm)

    return decoder(config, layer, norm)


def olmo2(config: Config) -> Stack:
    """Norms after, queries and keys normed over all heads. OLMo 3 has windows, and angles by the
    kind of layer."""
    kinds = config.get("layer_types")

    def layer(i: int) -> Layer:
        mixer = attention(
            config,
            i,
            config.attention_bias,
            rotary=Rotary(kinds[i] if kinds else None),
            norms=head_norms(config, i),
            norm_all=True,
        )
        return layer_of(config, i, mixer, gated(config, i), AFTER)

    return decoder(config, layer)
