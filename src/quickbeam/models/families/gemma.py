"""Gemma 1 to 4, text, and VaultGemma: embeddings times the root of their width; and Muse Glimmer.

Gemma 4 has shared keys and values, angles of part of a head, per-layer inputs, and experts that run
in parallel with a dense feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quickbeam.models.families.reading import (
    AROUND,
    Config,
    NormNames,
    NotDescribed,
    activation,
    attention,
    decoder,
    experts,
    gated,
    head_dim_of,
    head_norms,
    layer_of,
    linear,
    rms_norms,
    rotary_dim_of,
    stacked,
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


def gemma(config: Config) -> Stack:
    config.ignore("hidden_activation")
    norm = rms_norms(config.rms_norm_eps, plus_one=True)

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias)
        return layer_of(config, i, mixer, gated(config, i), norm=norm)

    return _scaled(config, layer)


def gemma2(config: Config) -> Stack:
    """Norms before and after, softcaps, a window in every other layer."""
    config.ignore("hidden_act")
    return _scaled(config, lambda i: _capped(config, i), config.final_logit_softcapping)


def vaultgemma(config: Config) -> Stack:
    """Gemma 2 without norms after."""
    names = NormNames(*AROUND[:2])
    return _scaled(config, lambda i: _capped(config, i, names), config.final_logit_softcapping)


def gemma3(config: Config) -> Stack:
    """Norms of queries and keys, and layers with a window have other angles."""
    # `layer_types` follows from them
    config.ignore("_sliding_window_pattern sliding_window_pattern")
    norm = rms_norms(config.rms_norm_eps, plus_one=True)

    def layer(i: int) -> Layer:
        rotary = Rotary(config.layer_types[i])
        return _capped(config, i, rotary=rotary, norms=head_norms(config, i, norm=norm))

    return _scaled(config, layer, config.final_logit_softcapping)


def _capped(config: Config, i: int, names: NormNames = AROUND, **changes: Any) -> Layer:
    """Return layer `i` of Gemma 2 or 3.

    `names`: of its norms. `changes`: other fields of its attention.
    """
    mixer = attention(
        config,
        i,
        config.attention_bias,
        scaling=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping,
        **changes,
    )
    feed_forward = gated(config, i, act=config.hidden_activation)
    norm = rms_norms(config.rms_norm_eps, plus_one=True)
    return layer_of(config, i, mixer, feed_forward, names, norm)


def _scaled(config: Config, layer: Callable[[int], Layer], softcap: float | None = None) -> Stack:
    """Return a stack of scaled embeddings and a last norm of 1 + weight."""
    config.must("use_bidirectional_attention", False)
    norm = rms_norms(config.rms_norm_eps, plus_one=True)("model.norm")
    return decoder(config, layer, norm, scale=_root(config, config.hidden_size), softcap=softcap)


def _root(config: Config, width: int) -> float:
    """Return the root of a width, which transformers rounds to the model's number format."""
    return float(torch.tensor(width**0.5).to(config.number_format))


def muse_glimmer(config: Config) -> Stack:
    """Normed embeddings, gates of what attention gives, and no angles in layers without a window.

    Queries are taken times `qk_scale_factor` behind their norm, as the scores are here.
    """
    config.must("attention_bias", False)
    unweighted = Norm((), float(config.rms_norm_eps))
    scaling = head_dim_of(config) ** -0.5 * float(config.qk_scale_factor)

    def norm(module: str) -> Norm:
        epsilon = config.post_norm_eps if ".post_" in module else config.rms_norm_eps
        return rms_norms(epsilon, plus_one=True)(module)

    def layer(i: int) -> Layer:
        prefix = f"model.layers.{i}.self_attn"
        mixer = attention(
            config,
            i,
            rotary=Rotary() if float(config.layer_rope_theta[i]) else None,
            qkv=stacked(prefix, "q_proj", "k_proj", "v_proj", "gate_proj"),
            norms=(unweighted, unweighted),
            gated=True,
            scaling=scaling,
        )
        feed_forward = gated(config, i, act=config.hidden_activation)
        return layer_of(config, i, mixer, feed_forward, AROUND, norm)

    return decoder(
        config,
        layer,
        embedding_norm=unweighted,
        head_scale=float(config.output_multiplier),
        softcap=float(config.final_logit_softcapping),
    )


def gemma4(config: Config) -> Stack:
    config.must("use_bidirectional_attention", "vision")  # then an image's rows see one another
    config.ignore("expert_intermediate_size use_double_wide_mlp")  # the weights say it
    sharing = [i for i in range(config.num_hidden_layers) if _source(config, i) is not None]
    return decoder(
        config,
        lambda i: _gemma4_layer(config, i),
        scale=_root(config, config.hidden_size),
        softcap=config.get("final_logit_softcapping"),
        per_layer=_per_layer_inputs(config),
        unread=tuple(
            f"model.layers.{i}.self_attn.{name}.weight"
            for i in sharing
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        ),
    )


def _gemma4_layer(config: Config, i: int) -> Layer:
    prefix, act = f"model.layers.{i}", config.hidden_activation
    parallel_experts, per_layer = None, None
    if config.enable_moe_block:
        parallel_experts = _parallel_experts(config, i)
    else:
        config.ignore("num_experts top_k_experts moe_intermediate_size")
    if config.hidden_size_per_layer_input:
        per_layer = PerLayerInput(
            gate=linear(f"{prefix}.per_layer_input_gate"),
            activation=activation(act),
            out=linear(f"{prefix}.per_layer_projection"),
            after=rms_norms(config.rms_norm_eps)(f"{prefix}.post_per_layer_input_norm"),
        )
    return layer_of(
        config,
        i,
        _gemma4_attention(config, i),
        gated(config, i, act=act),
        AROUND,
        parallel_experts=parallel_experts,
        per_layer=per_layer,
        scalar=f"{prefix}.layer_scalar",
    )


def _gemma4_attention(config: Config, i: int) -> Attention:
    prefix, kind = f"model.layers.{i}.self_attn", config.layer_types[i]
    source = _source(config, i)
    if kind not in ("full_attention", "sliding_attention"):
        raise NotDescribed(f"a layer of kind {kind}")
    layer, full = config.layer(i), kind == "full_attention"
    head_dim, kv_heads = layer.head_dim, layer.num_key_value_heads
    values_are_keys = bool(full and config.get("attention_k_eq_v"))
    if full and not layer.get("per_layer_config"):  # as published
        head_dim = layer.get("global_head_dim", 512)
        if values_are_keys:
            kv_heads = layer.get("num_global_key_value_heads") or kv_heads
    names = ["q_proj", "k_proj", "v_proj"]
    if source is not None:
        names = ["q_proj"]
    elif values_are_keys:
        names = ["q_proj", "k_proj"]
    key_norm = "k_norm" if source is None else "q_norm"
    return Attention(
        qkv=stacked(prefix, *names, bias=config.attention_bias),
        out=linear(f"{prefix}.o_proj", bias=config.attention_bias),
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scaling=1.0,
        window=None if full else config.sliding_window,
        rotary=Rotary(kind),
        rotary_dim=rotary_dim_of(config, head_dim, kind),
        norms=head_norms(config, i, ("q_norm", key_norm)),
        value_norm=True,
        values_are_keys=values_are_keys and source is None,
        source=source,
        causal_images=full,
    )


def _source(config: Config, i: int) -> int | None:
    """Return the layer whose keys and values layer `i` reads; None for its own.

    It is the last layer of the same kind that has keys and values. An assistant's are layers of its
    target, `_kv_layers` by kind (`drafters/assistant.py`).
    """
    target_layers = config.get("_kv_layers")
    if target_layers is not None:
        return int(target_layers[config.layer_types[i]])
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if i < first:
        return None
    sources = [j for j in range(first) if config.layer_types[j] == config.layer_types[i]]
    if not sources:
        raise NotDescribed("layers whose keys and values are those of no layer")
    return sources[-1]


def _parallel_experts(config: Config, i: int) -> ParallelExperts:
    prefix = f"model.layers.{i}"
    routing = Routing(
        logits=linear(f"{prefix}.router.proj"),
        top=config.top_k_experts,
        renormalised=True,
        scale=f"{prefix}.router.per_expert_scale",
    )
    norm = rms_norms(config.rms_norm_eps)
    router_factor = config.hidden_size**-0.5
    act = config.hidden_activation
    return ParallelExperts(
        experts=experts(config, i, routing, config.num_experts, name="", act=act),
        before=norm(f"{prefix}.pre_feedforward_layernorm_2"),
        router=Norm((f"{prefix}.router.scale",), config.rms_norm_eps, factor=router_factor),
        after=norm(f"{prefix}.post_feedforward_layernorm_2"),
        dense_after=norm(f"{prefix}.post_feedforward_layernorm_1"),
    )


def _per_layer_inputs(config: Config) -> PerLayerInputs | None:
    width = config.hidden_size_per_layer_input
    if not width:
        config.ignore("vocab_size_per_layer_input")
        return None
    if config.vocab_size_per_layer_input < config.vocab_size:
        raise NotDescribed(f"vocab_size_per_layer_input={config.vocab_size_per_layer_input}")
    return PerLayerInputs(
        table="model.embed_tokens_per_layer.weight",
        scale=_root(config, width),
        projection=linear("model.per_layer_model_projection"),
        factor=config.hidden_size**-0.5,
        norm=rms_norms(config.rms_norm_eps)("model.per_layer_projection_norm"),
        width=width,
        mixed=2**-0.5,
    )
