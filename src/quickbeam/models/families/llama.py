"""Llama and what is close to it: Seed-OSS, SmolLM3, Granite (dense and of experts), Mistral and
Ministral, Phi-3 and Phi-4, Hunyuan (dense and of experts), EXAONE 4, OLMo 1 to 3, ERNIE 4.5, Arcee,
Helium, CWM, HyperCLOVA X and nanochat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quickbeam.models.families.reading import (
    AFTER,
    BEFORE,
    Config,
    activation,
    attention,
    decoder,
    experts,
    gated,
    halves,
    head_dim,
    head_norms,
    layer_of,
    plain,
    tensors,
)
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Norm,
    QueryScale,
    Rotary,
    Routing,
    Stack,
)


def llama(c: Config, out_bias: bool | None = None) -> Stack:
    """`out_bias`: what follows the attention has another bias than what is before it."""
    c.ignore("perceiver_config pixel_shuffle_factor")

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, out_bias)
        return layer_of(c, i, mixer, gated(c, i, c.mlp_bias))

    return decoder(c, layer)


def helium(c: Config) -> Stack:
    """Llama whose neighbouring dimensions turn together, without a bias after the attention."""

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, False, rotary=Rotary(interleaved=True))
        return layer_of(c, i, mixer, gated(c, i, c.mlp_bias))

    return decoder(c, layer)


def ernie4_5(c: Config) -> Stack:
    """Llama whose neighbouring dimensions turn together, with one choice of biases."""
    bias = bool(c.use_bias)

    def layer(i: int) -> Layer:
        mixer = attention(c, i, bias, rotary=Rotary(interleaved=True))
        return layer_of(c, i, mixer, gated(c, i, bias))

    return decoder(c, layer)


def arcee(c: Config) -> Stack:
    """Llama with squared ReLU without a gate."""

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}.mlp"
        fed = plain(c, f"{at}.up_proj", f"{at}.down_proj", c.mlp_bias)
        return layer_of(c, i, attention(c, i, c.attention_bias), fed)

    return decoder(c, layer)


def windowed(c: Config) -> Stack:
    """Llama with a window in some layers: CWM and Ministral."""
    bias = bool(c.get("mlp_bias"))
    return decoder(c, lambda i: layer_of(c, i, attention(c, i), gated(c, i, bias)))


def nanochat(c: Config) -> Stack:
    """Norms without weights, also of embeddings, and of queries and keys after they are turned.

    Angles are turned backwards. Squared ReLU without a gate.
    """
    unweighted = Norm((), float(c.rms_norm_eps))

    def layer(i: int) -> Layer:
        mixer = attention(
            c,
            i,
            c.attention_bias,
            norms=(unweighted, unweighted),
            norm_last=True,
            rotary=Rotary(backwards=True),
        )
        fed = plain(c, f"model.layers.{i}.mlp.fc1", f"model.layers.{i}.mlp.fc2", False)
        return layer_of(c, i, mixer, fed, norm=lambda name: unweighted)

    softcap = c.get("final_logit_softcapping")
    return decoder(c, layer, norm=unweighted, embedding_norm=unweighted, softcap=softcap)


def seed_oss(c: Config) -> Stack:
    """Llama with a bias of its own after the attention."""
    return llama(c, c.attention_out_bias)


def smollm3(c: Config) -> Stack:
    """Llama with layers without rotary angles, and with windows."""
    c.ignore("no_rope_layer_interval")  # `no_rope_layers` follows from it
    windows: dict[str, Any] = {} if c.get("use_sliding_window") else {"window": None}

    def layer(i: int) -> Layer:
        still: dict[str, Any] = {} if c.no_rope_layers[i] else {"rotary": None}
        mixer = attention(c, i, c.attention_bias, **windows, **still)
        return layer_of(c, i, mixer, gated(c, i, c.mlp_bias))

    return decoder(c, layer)


def granite(c: Config) -> Stack:
    """Llama with four factors."""
    return _granite(c, lambda i: gated(c, i, c.mlp_bias))


def granite_swa(c: Config) -> Stack:
    """A sink for each head, windows, and angles of its own for each layer, or none."""
    return _granite(c, lambda i: gated(c, i, c.mlp_bias), _own_angles(c))


def hyperclovax(c: Config) -> Stack:
    """Granite whose logits are taken times their factor, with norms after as well or not."""
    after = ("post_norm1", "post_norm2") if c.use_post_norm else ()

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, scaling=c.attention_multiplier)
        fed = gated(c, i, c.mlp_bias)
        return layer_of(c, i, mixer, fed, (*BEFORE, *after), residual=c.residual_multiplier)

    return decoder(c, layer, scale=c.embedding_multiplier, head_scale=c.logits_scaling)


def granitemoe(c: Config) -> Stack:
    """Experts whose weights are a softmax of the chosen ones' logits."""
    return _granite(c, lambda i: granite_experts(c, i))


def granitemoeshared(c: Config) -> Stack:
    """Experts beside a shared one."""
    return _granite(c, lambda i: _granite_mixture(c, i))


def granitemoe_swa(c: Config) -> Stack:
    """Experts beside a shared one; sinks, windows and angles as of `granite_swa`."""
    return _granite(c, lambda i: _granite_mixture(c, i), _own_angles(c))


def granite_experts(c: Config, i: int, shared: FeedForward | None = None) -> Experts:
    logits = tensors(f"model.layers.{i}.block_sparse_moe.router")
    routing = Routing(logits, c.num_experts_per_tok, "softmax_of_chosen")
    return experts(c, i, routing, c.num_local_experts, "block_sparse_moe", shared=shared)


def granite_shared(c: Config, i: int) -> FeedForward:
    at = f"model.layers.{i}.shared_mlp"
    up = halves(f"{at}.input_linear")
    if c.get("gates_apart"):  # in .gguf files
        up = tensors(f"{at}.gate_proj", f"{at}.up_proj")
    return FeedForward(up, tensors(f"{at}.output_linear"), activation(c.hidden_act), True)


def _granite_mixture(c: Config, i: int) -> Experts:
    """Return experts, beside a shared one if that has a size."""
    shared = granite_shared(c, i) if c.shared_intermediate_size else None
    return granite_experts(c, i, shared)


def _own_angles(c: Config) -> Callable[[int], dict[str, Any]]:
    """Return what the attention of each layer has beside Granite's: a sink, and its angles."""

    def changes(i: int) -> dict[str, Any]:
        theta = c.layer_rope_theta[i]
        rotary = Rotary(base=float(theta)) if theta else None
        return {"rotary": rotary, "sinks": f"model.layers.{i}.self_attn.sinks"}

    return changes


def _granite(
    c: Config,
    feed_forward: Callable[[int], FeedForward | Experts],
    changes: Callable[[int], dict[str, Any]] = lambda i: {},
) -> Stack:
    """`changes`: other fields of a layer's attention."""

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, scaling=c.attention_multiplier, **changes(i))
        return layer_of(c, i, mixer, feed_forward(i), residual=c.residual_multiplier)

    return decoder(c, layer, scale=c.embedding_multiplier, head_scale=1 / c.logits_scaling)


def mistral(c: Config, **changes: Any) -> Stack:
    """Every layer has the window, if there is one."""
    changes["window"] = c.get("sliding_window")
    return decoder(c, lambda i: layer_of(c, i, attention(c, i, **changes), gated(c, i)))


def ministral3(c: Config) -> Stack:
    """Queries grow with the logarithm of their position."""
    rope = c.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return mistral(c, query_scale=QueryScale(beta, length) if beta else None)


def phi3(c: Config) -> Stack:
    """Queries, keys and values in one weight; gate and rest in one; a window in every layer."""
    c.ignore("full_attn_mod interpolate_factor")

    def layer(i: int) -> Layer:
        qkv = tensors(f"model.layers.{i}.self_attn.qkv_proj")
        mixer = attention(c, i, qkv=qkv, window=c.get("sliding_window"))
        return layer_of(c, i, mixer, gated(c, i, fused=True))

    return decoder(c, layer)


def hunyuan(c: Config) -> Stack:
    """Queries and keys are normed after they are turned, by angles that `alpha` spreads."""
    c.ignore("", num_experts=1)
    return _hunyuan(c, lambda i: gated(c, i))


def hunyuan_v1_moe(c: Config) -> Stack:
    """Experts whose weights add up to 1, beside a shared one."""
    c.ignore("num_shared_expert")  # a size that the weights have
    c.ignore("", norm_topk_prob=True, routed_scaling_factor=1.0, use_mixed_mlp_moe=True)

    def mixture(i: int) -> Experts:
        top = c.moe_topk
        top = top[i] if isinstance(top, list) else top
        routing = Routing(tensors(f"model.layers.{i}.mlp.gate.wg"), top, renormalised=True)
        shared = gated(c, i, name="mlp.shared_mlp")
        return experts(c, i, routing, c.num_experts, shared=shared)

    return _hunyuan(c, mixture)


def _hunyuan(c: Config, feed_forward: Callable[[int], FeedForward | Experts]) -> Stack:
    dim, rope = head_dim(c), c.rope_parameters
    base = None
    if rope.get("rope_type") == "dynamic" and (alpha := rope.get("alpha")):
        base = float(rope["rope_theta"] * alpha ** (dim / (dim - 2)))
    c.ignore(
        "anyres_pooling_size attention_head_dim cla_share_factor class_num dense_list pad_id "
        "mask_init_id org_vocab_size pool_type text_end_id text_start_id",
        norm_type="rms",
        use_qk_norm=True,
        use_rotary_pos_emb=True,
    )

    def layer(i: int) -> Layer:
        norms = head_norms(c, i, ("query_layernorm", "key_layernorm"))
        turned = Rotary(base=base)
        mixer = attention(c, i, c.attention_bias, norms=norms, norm_last=True, rotary=turned)
        return layer_of(c, i, mixer, feed_forward(i))

    return decoder(c, layer)


def exaone4(c: Config) -> Stack:
    """Norms after, queries and keys normed by head; with windows, the layers without one have no
    angles."""
    c.ignore("sliding_window_pattern")  # `layer_types` follows from it
    windows = c.get("sliding_window") is not None

    def layer(i: int) -> Layer:
        still = windows and c.layer_types[i] != "sliding_attention"
        changes: dict[str, Any] = {"rotary": None} if still else {}
        mixer = attention(c, i, norms=head_norms(c, i), **changes)
        return layer_of(c, i, mixer, gated(c, i), AFTER)

    return decoder(c, layer)


def olmo(c: Config) -> Stack:
    """OLMo 1: layer norms without weights."""
    c.must("clip_qkv")
    unweighted = Norm((), 1e-5, centred=True)

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias)
        return layer_of(c, i, mixer, gated(c, i), norm=lambda name: unweighted)

    return decoder(c, layer, norm=unweighted)


def olmo2(c: Config) -> Stack:
    """Norms after, queries and keys normed over all heads. OLMo 3 has windows, and angles by the
    kind of layer."""
    kinds = c.get("layer_types")

    def layer(i: int) -> Layer:
        kind = kinds[i] if kinds else None
        how = {"norms": head_norms(c, i), "norm_all": True, "rotary": Rotary(kind), "kind": kind}
        return layer_of(c, i, attention(c, i, c.attention_bias, **how), gated(c, i), AFTER)

    return decoder(c, layer)
