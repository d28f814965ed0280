"""Mixtures of experts that are no relatives of a dense family: Mixtral, OLMoE, FlexOlmo,
MiniMax-M2, Trinity, Phi-MoE, ERNIE 4.5 and GPT-OSS."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    AFTER,
    BEFORE,
    Config,
    Names,
    attention,
    decoder,
    experts,
    gated,
    head_norms,
    layer_norm,
    layer_of,
    tensors,
)
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Linear,
    Norm,
    ParameterRows,
    Rotary,
    Routing,
    Stack,
)


def mixtral(c: Config) -> Stack:
    """The weights of the chosen experts add up to 1."""
    c.ignore("router_jitter_noise")  # of training

    def layer(i: int) -> Layer:
        logits = tensors(f"model.layers.{i}.mlp.gate")
        routing = Routing(logits, c.num_experts_per_tok, renormalised=True)
        mixer = attention(c, i, window=c.get("sliding_window"))
        return layer_of(c, i, mixer, experts(c, i, routing, c.num_local_experts))

    return decoder(c, layer)


def olmoe(c: Config, names: Names = BEFORE) -> Stack:
    """Queries and keys are normed over all heads. `names`: of the norms."""
    c.must("clip_qkv")

    def layer(i: int) -> Layer:
        logits, renormalised = tensors(f"model.layers.{i}.mlp.gate"), bool(c.norm_topk_prob)
        routing = Routing(logits, c.num_experts_per_tok, renormalised=renormalised)
        how = {"norms": head_norms(c, i), "norm_all": True, "window": None}
        mixer = attention(c, i, c.attention_bias, **how)
        return layer_of(c, i, mixer, experts(c, i, routing, c.num_experts), names)

    return decoder(c, layer)


def flex_olmo(c: Config) -> Stack:
    """OLMoE with norms after."""
    return olmoe(c, AFTER)


def minimax_m2(c: Config) -> Stack:
    """Queries and keys are normed over all heads. Experts are chosen by their sigmoids plus a
    correction, and weighted without it."""
    c.must("attn_type_list", [1] * c.num_hidden_layers)  # full attention
    # `partial_rotary_factor` says it; of training, and of layers that other models have
    c.ignore("rotary_dim router_jitter_noise mtp_transformer_layers num_mtp_modules use_mtp")
    c.ignore("mlp_intermediate_size shared_moe_mode")
    c.ignore(
        "",
        layernorm_full_attention_beta=1.0,
        layernorm_linear_attention_beta=1.0,
        layernorm_mlp_beta=1.0,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        use_qk_norm=True,
        use_routing_bias=True,
    )

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}.mlp"
        routing = Routing(
            tensors(f"{at}.gate"),
            c.num_experts_per_tok,
            "sigmoid",
            f"{at}.e_score_correction_bias",
            renormalised=True,
        )
        mixer = attention(c, i, norms=head_norms(c, i), norm_all=True, window=None)
        return layer_of(c, i, mixer, experts(c, i, routing, c.num_local_experts))

    return decoder(c, layer)


def afmoe(c: Config) -> Stack:
    """Arcee's Trinity: gates of what attention gives, no angles in layers without a window.

    Dense layers come first. Then experts chosen by their sigmoids plus a correction, and shared
    ones.
    """
    c.must("attention_bias", False)
    c.must("score_func", "sigmoid")
    c.must("route_norm", True)
    for groups in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        c.must(groups, 1)
    c.ignore("global_attn_every_n_layers")  # `layer_types` follows from it
    c.ignore("load_balance_coeff use_grouped_mm")  # of training, and of another program
    names = (BEFORE[0], "pre_mlp_layernorm", BEFORE[1], "post_mlp_layernorm")

    def fed(i: int) -> FeedForward | Experts:
        at = f"model.layers.{i}.mlp"
        if i < c.num_dense_layers:
            return gated(c, i)
        routing = Routing(
            tensors(f"{at}.router.gate"),
            c.num_experts_per_tok,
            "sigmoid",
            f"{at}.expert_bias",
            renormalised=True,
            plus=1e-20,
            factor=float(c.route_scale),
        )
        c.ignore("num_shared_experts")  # side by side, as one
        shared = gated(c, i, name="mlp.shared_experts")
        return experts(c, i, routing, c.num_experts, shared=shared)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}.self_attn"
        mixer = attention(
            c,
            i,
            qkv=tensors(*(f"{at}.{name}_proj" for name in ("q", "k", "v", "gate"))),
            norms=head_norms(c, i),
            gated=True,
            rotary=Rotary() if c.layer_types[i] == "sliding_attention" else None,
        )
        return layer_of(c, i, mixer, fed(i), names)

    return decoder(c, layer, scale=float(c.hidden_size**0.5) if c.mup_enabled else 1.0)


def phimoe(c: Config) -> Stack:
    """Layer norms, and two experts whose weights don't add up to 1."""
    c.must("num_experts_per_tok", 2)

    def norm(module: str) -> Norm:
        return layer_norm(module, c.rms_norm_eps)

    def layer(i: int) -> Layer:
        logits = tensors(f"model.layers.{i}.mlp.router")
        routing = Routing(logits, 2, "mixer", jitter=float(c.router_jitter_noise))
        mixer = attention(c, i, c.attention_bias, window=c.get("sliding_window"))
        return layer_of(c, i, mixer, experts(c, i, routing, c.num_local_experts), norm=norm)

    head = tensors("lm_head", bias=c.lm_head_bias)
    return decoder(c, layer, norm=norm("model.norm"), head=head)


def ernie4_5_moe(c: Config) -> Stack:
    """Experts are chosen by their softmax plus a correction, and weighted without it. Neighbouring
    dimensions turn together."""
    c.must("use_rmsnorm", True)
    c.must("moe_gate", "topk")
    c.ignore("moe_capacity moe_use_aux_free")  # of training

    def layer(i: int) -> Layer:
        at, bias = f"model.layers.{i}", bool(c.use_bias)
        mixer = attention(c, i, bias, rotary=Rotary(interleaved=True))
        first, last, each = (c.moe_layer_start_index, c.moe_layer_end_index, c.moe_layer_interval)
        if not first <= i <= last or (i + 1) % each:
            return layer_of(c, i, mixer, gated(c, i, bias))
        routing = Routing(
            tensors(f"{at}.mlp.gate"),
            c.moe_k,
            correction=f"{at}.mlp.gate.moe_statics.e_score_correction_bias",
            renormalised=True,
            least=float(c.moe_norm_min),
        )
        shared = None
        if c.moe_num_shared_experts:
            shared = gated(c, i, bias, name="mlp.shared_experts")
        return layer_of(c, i, mixer, experts(c, i, routing, c.moe_num_experts, shared=shared))

    return decoder(c, layer)


def gpt_oss(c: Config) -> Stack:
    """A sink for each head, and experts with biases and a clamped gate, whose weights are stored
    transposed, a gate and what it lets through in turn."""
    # not used, or given by others
    c.ignore("hidden_act experts_per_token initial_context_length")

    def expert(at: str, n: int) -> FeedForward:
        def pair(name: str) -> tuple[ParameterRows, ...]:
            inner = c.intermediate_size
            return tuple(
                ParameterRows(name, k, 2, inner, transposed=True, expert=n) for k in (0, 1)
            )

        down = ParameterRows(f"{at}.down_proj", transposed=True, expert=n)
        return FeedForward(
            Linear(pair(f"{at}.gate_up_proj"), pair(f"{at}.gate_up_proj_bias")),
            Linear((down,), (ParameterRows(f"{at}.down_proj_bias", expert=n),)),
            "clamped",
            True,
            limit=float(c.swiglu_limit),
            slope=float(c.swiglu_alpha),
        )

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        logits = tensors(f"{at}.mlp.router", bias=True)
        routing = Routing(logits, c.num_experts_per_tok, "softmax_of_chosen")
        chosen = (expert(f"{at}.mlp.experts", n) for n in range(c.num_local_experts))
        mixer = attention(c, i, c.attention_bias, rotary=Rotary(), sinks=f"{at}.self_attn.sinks")
        return layer_of(c, i, mixer, Experts(routing, tuple(chosen)))

    return decoder(c, layer)
