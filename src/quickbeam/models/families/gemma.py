"""Gemma 1 to 4, text, and VaultGemma: embeddings times the root of their width; and Muse Glimmer.

Gemma 4 has shared keys and values, angles of part of a head, per-layer inputs, and experts beside a
dense feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch

from quickbeam.models.families.reading import (
    AROUND,
    Config,
    Names,
    NotDescribed,
    activation,
    attention,
    decoder,
    experts,
    gated,
    head_dim,
    head_norms,
    layer_of,
    rms,
    rotary_dim,
    tensors,
)
from quickbeam.models.stack import (
    Attention,
    Layer,
    Norm,
    ParallelExperts,
    PerLayerInput,
    PerLayerInputs,
    Rotary,
    Routing,
    Stack,
)


def _scale(c: Config, width: int) -> float:
    """Return the root of a width, which transformers rounds to the model's number format."""
    return float(torch.tensor(width**0.5).to(c.number_format))


def _stack(c: Config, layer: Any, **more: Any) -> Stack:
    """Norms of 1 + weight."""
    c.must("use_bidirectional_attention", False)
    norm = rms(c, "model.norm", plus_one=True)
    return decoder(c, layer, scale=_scale(c, c.hidden_size), norm=norm, **more)


def gemma(c: Config) -> Stack:
    c.ignore("hidden_activation")

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias)
        return layer_of(c, i, mixer, gated(c, i), norm=lambda name: rms(c, name, plus_one=True))

    return _stack(c, layer)


def _normed(c: Config, i: int, names: Names = AROUND, **changes: Any) -> Layer:
    """Return layer `i` of Gemma 2 or 3, whose norms are `names`."""
    scaling, softcap = c.query_pre_attn_scalar**-0.5, c.attn_logit_softcapping
    mixer = attention(c, i, c.attention_bias, scaling=scaling, softcap=softcap, **changes)
    fed = gated(c, i, act=c.hidden_activation)
    return layer_of(c, i, mixer, fed, names, lambda name: rms(c, name, plus_one=True))


def gemma2(c: Config) -> Stack:
    """Norms before and after, softcaps, a window in every other layer."""
    c.ignore("hidden_act")
    return _stack(c, lambda i: _normed(c, i), softcap=c.final_logit_softcapping)


def vaultgemma(c: Config) -> Stack:
    """Gemma 2 without norms after."""
    before = AROUND[:2]
    return _stack(c, lambda i: _normed(c, i, before), softcap=c.final_logit_softcapping)


def gemma3(c: Config) -> Stack:
    """Norms of queries and keys, and angles of their own for the layers with a window."""
    # `layer_types` follows from them
    c.ignore("_sliding_window_pattern sliding_window_pattern")

    def layer(i: int) -> Layer:
        kind, norms = c.layer_types[i], head_norms(c, i, plus_one=True)
        return _normed(c, i, norms=norms, rotary=Rotary(kind), kind=kind)

    return _stack(c, layer, softcap=c.final_logit_softcapping)


def muse_glimmer(c: Config) -> Stack:
    """Normed embeddings, gates of what attention gives, and no angles in layers without a window.

    Queries are taken times `qk_scale_factor` behind their norm, as the scores are here.
    """
    c.must("attention_bias", False)
    unweighted, dim = Norm((), float(c.rms_norm_eps)), head_dim(c)

    def norm(name: str) -> Norm:
        epsilon = c.post_norm_eps if ".post_" in name else c.rms_norm_eps
        return Norm((f"{name}.weight",), float(epsilon), plus_one=True)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}.self_attn"
        mixer = attention(
            c,
            i,
            qkv=tensors(*(f"{at}.{name}_proj" for name in ("q", "k", "v", "gate"))),
            norms=(unweighted, unweighted),
            gated=True,
            scaling=dim**-0.5 * float(c.qk_scale_factor),
            rotary=Rotary() if float(c.layer_rope_theta[i]) else None,
        )
        return layer_of(c, i, mixer, gated(c, i, act=c.hidden_activation), AROUND, norm)

    of_logits = float(c.output_multiplier), float(c.final_logit_softcapping)
    how = {"head_scale": of_logits[0], "softcap": of_logits[1]}
    return decoder(c, layer, embedding_norm=unweighted, **how)


def gemma4(c: Config) -> Stack:
    c.must("use_bidirectional_attention", "vision")  # then images alone are seen from both sides
    c.ignore("expert_intermediate_size use_double_wide_mlp")  # the weights say it
    shared = [i for i in range(c.num_hidden_layers) if _source(c, i) is not None]
    return decoder(
        c,
        lambda i: _layer(c, i),
        scale=_scale(c, c.hidden_size),
        softcap=c.get("final_logit_softcapping"),
        per_layer=_per_layer(c),
        unread=tuple(
            f"model.layers.{i}.self_attn.{name}.weight"
            for i in shared
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        ),
    )


def _per_layer(c: Config) -> PerLayerInputs | None:
    if not (width := c.hidden_size_per_layer_input):
        c.ignore("vocab_size_per_layer_input")
        return None
    if c.vocab_size_per_layer_input < c.vocab_size:
        raise NotDescribed(f"vocab_size_per_layer_input={c.vocab_size_per_layer_input}")
    return PerLayerInputs(
        "model.embed_tokens_per_layer.weight",
        _scale(c, width),
        tensors("model.per_layer_model_projection"),
        c.hidden_size**-0.5,
        rms(c, "model.per_layer_projection_norm"),
        width,
        2**-0.5,
    )


def _source(c: Config, i: int) -> int | None:
    """Return the layer whose keys and values layer `i` reads: the last of its kind with its own.

    An assistant's are layers of its target, `_kv_layers` by kind (`drafters/assistant.py`).
    """
    if (of_target := c.get("_kv_layers")) is not None:
        return int(of_target[c.layer_types[i]])
    first = c.num_hidden_layers - c.num_kv_shared_layers
    if i < first:
        return None
    own = [j for j in range(first) if c.layer_types[j] == c.layer_types[i]]
    if not own:
        raise NotDescribed("layers whose keys and values are those of no layer")
    return own[-1]


def _attention(c: Config, i: int) -> Attention:
    at, kind, source = f"model.layers.{i}.self_attn", c.layer_types[i], _source(c, i)
    if kind not in ("full_attention", "sliding_attention"):
        raise NotDescribed(f"a layer of kind {kind}")
    of, full = c.layer(i), kind == "full_attention"
    dim, kv_heads = of.head_dim, of.num_key_value_heads
    both = bool(full and c.get("attention_k_eq_v"))
    if full and not of.get("per_layer_config"):  # as published
        dim = of.get("global_head_dim", 512)
        kv_heads = (both and of.get("num_global_key_value_heads")) or kv_heads
    names = ["q_proj"]
    if source is None:
        names += ["k_proj"] if both else ["k_proj", "v_proj"]
    return Attention(
        tensors(*(f"{at}.{name}" for name in names), bias=c.attention_bias),
        tensors(f"{at}.o_proj", bias=c.attention_bias),
        heads=c.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scaling=1.0,
        window=None if full else c.sliding_window,
        rotary=Rotary(kind),
        rotary_dim=rotary_dim(c, dim, kind),
        norms=(rms(c, f"{at}.q_norm"), rms(c, f"{at}.{'k_norm' if source is None else 'q_norm'}")),
        value_norm=True,
        values_are_keys=both and source is None,
        source=source,
    )


def _layer(c: Config, i: int) -> Layer:
    at, act = f"model.layers.{i}", c.hidden_activation
    more: dict[str, Any] = {"scalar": f"{at}.layer_scalar"}
    if c.enable_moe_block:
        more["parallel_experts"] = _parallel_experts(c, at, i)
    else:
        c.ignore("num_experts top_k_experts moe_intermediate_size")
    if c.hidden_size_per_layer_input:
        gate, out = (tensors(f"{at}.per_layer_{one}") for one in ("input_gate", "projection"))
        norm = rms(c, f"{at}.post_per_layer_input_norm")
        more["per_layer"] = PerLayerInput(gate, activation(act), out, norm)
    return layer_of(c, i, _attention(c, i), gated(c, i, act=act), AROUND, **more)


def _parallel_experts(c: Config, at: str, i: int) -> ParallelExperts:
    routing = Routing(
        tensors(f"{at}.router.proj"),
        c.top_k_experts,
        renormalised=True,
        scale=f"{at}.router.per_expert_scale",
    )
    chosen = experts(c, i, routing, c.num_experts, name="", act=c.hidden_activation)
    router = Norm((f"{at}.router.scale",), c.rms_norm_eps, factor=c.hidden_size**-0.5)

    def norm(where: str, number: int) -> Norm:
        return rms(c, f"{at}.{where}_feedforward_layernorm_{number}")

    return ParallelExperts(chosen, norm("pre", 2), router, norm("post", 2), norm("post", 1))
