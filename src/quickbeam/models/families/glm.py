"""GLM-4 (0414, and the 9B before it): neighbouring dimensions turn together, half of each head.
GLM-4.5 and later: experts."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    activation,
    attention,
    before,
    decoder,
    experts,
    gated,
    halves,
    head_norms,
    rms,
    tensors,
)
from quickbeam.models.stack import Experts, FeedForward, Layer, Rotary, Routing, Stack


def glm(c: Config, after: bool = False) -> Stack:
    def layer(i: int) -> Layer:
        at, rotary = f"model.layers.{i}", Rotary(interleaved=True)
        fed = FeedForward(
            halves(f"{at}.mlp.gate_up_proj"),
            tensors(f"{at}.mlp.down_proj"),
            activation(c.hidden_act),
            True,
        )
        biased = c.get("attention_bias", c.model_type == "glm4v_text")
        mixer = attention(c, i, biased, out_bias=False, rotary=rotary)
        more = {
            "attention_after": rms(c, f"{at}.post_self_attn_layernorm"),
            "feed_forward_after": rms(c, f"{at}.post_mlp_layernorm"),
        }
        return before(c, i, mixer, fed, **(more if after else {}))

    return decoder(c, layer)


def glm4(c: Config) -> Stack:
    """Norms before and after."""
    return glm(c, after=True)


def glm4_moe(c: Config) -> Stack:
    """Dense layers first. Then experts chosen by their sigmoids, and a shared one."""

    def layer(i: int) -> Layer:
        norms = head_norms(c, i, ("q_norm", "k_norm")) if c.use_qk_norm else None
        mixer = attention(c, i, c.attention_bias, out_bias=False, norms=norms)
        if i < c.first_k_dense_replace:
            return before(c, i, mixer, gated(c, i))
        return before(c, i, mixer, by_sigmoids(c, i))

    return decoder(c, layer)


def by_sigmoids(c: Config, i: int) -> Experts:
    """Return experts chosen by their sigmoids, in groups, as of DeepSeek-V3."""
    at = f"model.layers.{i}"
    routing = Routing(
        tensors(f"{at}.mlp.gate"),
        c.num_experts_per_tok,
        "sigmoid",
        f"{at}.mlp.gate.e_score_correction_bias",
        c.n_group,
        c.topk_group,
        2,
        renormalised=bool(c.norm_topk_prob),
        plus=1e-20,
        factor=float(c.routed_scaling_factor),
    )
    c.get("n_shared_experts")  # side by side, as one
    shared = gated(c, i, name="mlp.shared_experts")
    return experts(c, i, routing, c.n_routed_experts, shared=shared)
