"""GPT-OSS: a sink for each head, and experts with biases and a clamped gate."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, attention, before, decoder, tensors
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Linear,
    Rotary,
    Routing,
    Stack,
    Tensor,
)


def gpt_oss(c: Config) -> Stack:
    """Weights of experts are stored transposed, a gate and what it lets through in turn."""
    for name in ("hidden_act", "experts_per_token", "initial_context_length"):
        c.get(name)  # not used, or said by others

    def expert(at: str, n: int) -> FeedForward:
        def pair(name: str) -> tuple[Tensor, ...]:
            inner = c.intermediate_size
            return tuple(Tensor(name, k, 2, inner, transposed=True, expert=n) for k in (0, 1))

        return FeedForward(
            Linear(pair(f"{at}.gate_up_proj"), pair(f"{at}.gate_up_proj_bias")),
            Linear(
                (Tensor(f"{at}.down_proj", transposed=True, expert=n),),
                (Tensor(f"{at}.down_proj_bias", expert=n),),
            ),
            "clamped",
            True,
            limit=float(c.swiglu_limit),
            slope=float(c.swiglu_alpha),
        )

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        routing = Routing(
            tensors(f"{at}.mlp.router", bias=True), c.num_experts_per_tok, "softmax_of_chosen"
        )
        chosen = (expert(f"{at}.mlp.experts", n) for n in range(c.num_local_experts))
        mixer = attention(c, i, c.attention_bias, rotary=Rotary(), sinks=f"{at}.self_attn.sinks")
        return before(c, i, mixer, Experts(routing, tuple(chosen)))

    return decoder(c, layer)
