"""Mixtures of experts that are no relatives of a dense family: Mixtral, OLMoE, FlexOlmo,
MiniMax-M2, Trinity, Phi-MoE, ERNIE 4.5 and GPT-OSS."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    AFTER,
    BEFORE,
    Config,
    NormNames,
    attention,
    decoder,
    experts,
    gated,
    head_norms,
    layer_norms,
    layer_of,
    linear,
    stacked,
)
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Linear,
    ParameterRows,
    Rotary,
    Routing,
    Stack,
)


def mixtral(config: Config) -> Stack:
    """The weights of the active experts add up to 1."""
    config.ignore("router_jitter_noise")  # of training
    window = config.get("sliding_window")

    def layer(i: int) -> Layer:
        logits = linear(f"model.layers.{i}.mlp.gate")
        routing = Routing(logits, config.num_experts_per_tok, renormalised=True)
        mixture = experts(config, i, routing, config.num_local_experts)
        return layer_of(config, i, attention(config, i, window=window), mixture)

    return decoder(config, layer)


def olmoe(config: Config, names: NormNames = BEFORE) -> Stack:
    """Queries and keys are normed over all heads. `names`: of the norms."""
    config.must("clip_qkv")

    def layer(i: int) -> Layer:
        norms = head_norms(config, i)
        bias = config.attention_bias
        mixer = attention(config, i, bias, norms=norms, norm_all=True, window=None)
        routing = Routing(
            logits=linear(f"model.layers.{i}.mlp.gate"),
            top=config.num_experts_per_tok,
            renormalised=bool(config.norm_topk_prob),
        )
        return layer_of(config, i, mixer, experts(config, i, routing, config.num_experts), names)

    return decoder(config, layer)


def flex_olmo(config: Config) -> Stack:
    """OLMoE with norms after."""
    return olmoe(config, AFTER)


def minimax_m2(config: Config) -> Stack:
    """Queries and keys are normed over all heads.

    Experts are selected by their sigmoids plus a correction, and weighted without it.
    """
    config.must("attn_type_list", [1] * config.num_hidden_layers)  # full attention
    # `partial_rotary_factor` says it; of training, and of layers that other models have
    config.ignore("rotary_dim router_jitter_noise mtp_transformer_layers num_mtp_modules use_mtp")
    config.ignore("mlp_intermediate_size shared_moe_mode")
    config.ignore(
        layernorm_full_attention_beta=1.0,
        layernorm_linear_attention_beta=1.0,
        layernorm_mlp_beta=1.0,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        use_qk_norm=True,
        use_routing_bias=True,
    )

    def layer(i: int) -> Layer:
        prefix = f"model.layers.{i}.mlp"
        mixer = attention(config, i, norms=head_norms(config, i), norm_all=True, window=None)
        routing = Routing(
            logits=linear(f"{prefix}.gate"),
            top=config.num_experts_per_tok,
            scores="sigmoid",
            correction=f"{prefix}.e_score_correction_bias",
            renormalised=True,
        )
        return layer_of(config, i, mixer, experts(config, i, routing, config.num_local_experts))

    return decoder(config, layer)


def afmoe(config: Config) -> Stack:
    """Arcee's Trinity: gates of what attention gives, no angles in layers without a window.

    Dense layers come first. Then experts selected by their sigmoids plus a correction, and shared
    ones.
    """
    config.must("attention_bias", False)
    config.must("score_func", "sigmoid")
    config.must("route_norm", True)
    for groups in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.must(groups, 1)
    config.ignore("global_attn_every_n_layers")  # `layer_types` follows from it
    config.ignore("load_balance_coeff use_grouped_mm")  # of training, and of another program
    names = NormNames(
        attention_before="input_layernorm",
        feed_forward_before="pre_mlp_layernorm",
        attention_after="post_attention_layernorm",
        feed_forward_after="post_mlp_layernorm",
    )

    def feed_forward(i: int) -> FeedForward | Experts:
        prefix = f"model.layers.{i}.mlp"
        if i < config.num_dense_layers:
            return gated(config, i)
        routing = Routing(
            logits=linear(f"{prefix}.router.gate"),
            top=config.num_experts_per_tok,
            scores="sigmoid",
            correction=f"{prefix}.expert_bias",
            renormalised=True,
            plus=1e-20,
            factor=float(config.route_scale),
        )
        config.ignore("num_shared_experts")  # side by side, as one
        shared = gated(config, i, name="mlp.shared_experts")
        return experts(config, i, routing, config.num_experts, shared=shared)

    def layer(i: int) -> Layer:
        prefix = f"model.layers.{i}.self_attn"
        mixer = attention(
            config,
            i,
            rotary=Rotary() if config.layer_types[i] == "sliding_attention" else None,
            qkv=stacked(prefix, "q_proj", "k_proj", "v_proj", "gate_proj"),
            norms=head_norms(config, i),
            gated=True,
        )
        return layer_of(config, i, mixer, feed_forward(i), names)

    scale = float(config.hidden_size**0.5) if config.mup_enabled else 1.0
    return decoder(config, layer, scale=scale)


def phimoe(config: Config) -> Stack:
    """Layer norms, and two experts whose weights don't add up to 1."""
    config.must("num_experts_per_tok", 2)
    norm, window = layer_norms(config.rms_norm_eps), config.get("sliding_window")

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias, window=window)
        logits = linear(f"model.layers.{i}.mlp.router")
        routing = Routing(logits, 2, "mixer", jitter=float(config.router_jitter_noise))
        mixture = experts(config, i, routing, config.num_local_experts)
        return layer_of(config, i, mixer, mixture, norm=norm)

    head = linear("lm_head", bias=config.lm_head_bias)
    return decoder(config, layer, norm("model.norm"), head=head)


def ernie4_5_moe(config: Config) -> Stack:
    """Experts are selected by their softmax plus a correction, and weighted without it.

    Rotary dimensions are interleaved.
    """
    config.must("use_rmsnorm", True)
    config.must("moe_gate", "topk")
    config.ignore("moe_capacity moe_use_aux_free")  # of training
    bias = bool(config.use_bias)

    def feed_forward(i: int) -> FeedForward | Experts:
        gate = f"model.layers.{i}.mlp.gate"
        first, last = config.moe_layer_start_index, config.moe_layer_end_index
        if not first <= i <= last or (i + 1) % config.moe_layer_interval:
            return gated(config, i, bias)
        routing = Routing(
            logits=linear(gate),
            top=config.moe_k,
            correction=f"{gate}.moe_statics.e_score_correction_bias",
            renormalised=True,
            least=float(config.moe_norm_min),
        )
        shared = None
        if config.moe_num_shared_experts:
            shared = gated(config, i, bias, name="mlp.shared_experts")
        return experts(config, i, routing, config.moe_num_experts, shared=shared)

    def layer(i: int) -> Layer:
        mixer = attention(config, i, bias, rotary=Rotary(interleaved=True))
        return layer_of(config, i, mixer, feed_forward(i))

    return decoder(config, layer)


def gpt_oss(config: Config) -> Stack:
    """A sink for each head, and experts with biases and a clamped gate.

    Weights of experts are stored as `[inputs, outputs]`. Of their outputs, gates alternate with
    what these multiply.
    """
    # not used, or follow from others
    config.ignore("hidden_act experts_per_token initial_context_length")
    inner = config.intermediate_size

    def gate_and_up(name: str, number: int) -> tuple[ParameterRows, ...]:
        return tuple(
            ParameterRows(name, k, 2, inner, transposed=True, expert=number) for k in (0, 1)
        )

    def expert(prefix: str, number: int) -> FeedForward:
        weights = gate_and_up(f"{prefix}.gate_up_proj", number)
        biases = gate_and_up(f"{prefix}.gate_up_proj_bias", number)
        down = ParameterRows(f"{prefix}.down_proj", transposed=True, expert=number)
        down_bias = ParameterRows(f"{prefix}.down_proj_bias", expert=number)
        return FeedForward(
            up=Linear(weights, biases),
            down=Linear((down,), (down_bias,)),
            activation="clamped",
            gated=True,
            limit=float(config.swiglu_limit),
            slope=float(config.swiglu_alpha),
        )

    def layer(i: int) -> Layer:
        prefix = f"model.layers.{i}"
        mixer = attention(config, i, config.attention_bias, sinks=f"{prefix}.self_attn.sinks")
        logits = linear(f"{prefix}.mlp.router", bias=True)
        routing = Routing(logits, config.num_experts_per_tok, "softmax_of_chosen")
        count = config.num_local_experts
        mixture = tuple(expert(f"{prefix}.mlp.experts", number) for number in range(count))
        return layer_of(config, i, mixer, Experts(routing, mixture))

    return decoder(config, layer)
