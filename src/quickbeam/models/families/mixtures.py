"""Mixtures of experts that are no relatives of a dense family: Mixtral, OLMoE, Phi-MoE, ERNIE 4.5
and GPT-OSS."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
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
    Rotary,
    Routing,
    Stack,
    Tensor,
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


def olmoe(c: Config) -> Stack:
    """Queries and keys are normed over all heads."""
    c.must("clip_qkv")

    def layer(i: int) -> Layer:
        logits, renormalised = tensors(f"model.layers.{i}.mlp.gate"), bool(c.norm_topk_prob)
        routing = Routing(logits, c.num_experts_per_tok, renormalised=renormalised)
        how = {"norms": head_norms(c, i), "norm_all": True, "window": None}
        mixer = attention(c, i, c.attention_bias, **how)
        return layer_of(c, i, mixer, experts(c, i, routing, c.num_experts))

    return decoder(c, layer)


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
        def pair(name: str) -> tuple[Tensor, ...]:
            inner = c.intermediate_size
            return tuple(Tensor(name, k, 2, inner, transposed=True, expert=n) for k in (0, 1))

        down = Tensor(f"{at}.down_proj", transposed=True, expert=n)
        return FeedForward(
            Linear(pair(f"{at}.gate_up_proj"), pair(f"{at}.gate_up_proj_bias")),
            Linear((down,), (Tensor(f"{at}.down_proj_bias", expert=n),)),
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
