"""Families with layer norms: GPT-2, GPT-NeoX, Phi-1 and Phi-2, Cohere 1 and 2, Nemotron, StableLM
and StarCoder2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from quickbeam.models.families.reading import (
    BEFORE,
    Config,
    activation,
    attention,
    decoder,
    gated,
    layer_norm,
    layer_of,
    plain,
    tensors,
)
from quickbeam.models.stack import (
    Attention,
    FeedForward,
    Layer,
    Linear,
    Norm,
    Rotary,
    Stack,
    Tensor,
)


def gpt2(c: Config) -> Stack:
    """Learned positions, weights that are stored transposed."""
    c.must("add_cross_attention", False)
    # sizes that the weights have, defaults of pipelines, and rounding alone; then of another head
    c.ignore("n_inner n_ctx task_specific_params reorder_and_upcast_attn")
    c.ignore("summary_activation summary_first_dropout summary_proj_to_labels")
    c.ignore("summary_type summary_use_proj")
    norm = partial(layer_norm, epsilon=c.layer_norm_epsilon)
    heads = c.num_attention_heads
    dim = c.hidden_size // heads

    def layer(i: int) -> Layer:
        def linear(name: str) -> Linear:
            return tensors(f"transformer.h.{i}.{name}", bias=True, transposed=True)

        scaling = dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scaling /= i + 1
        qkv, out = linear("attn.c_attn"), linear("attn.c_proj")
        act = activation(c.activation_function)
        fed = FeedForward(linear("mlp.c_fc"), linear("mlp.c_proj"), act, False)
        mixer = Attention(qkv, out, heads, heads, dim, scaling)
        return layer_of(c, i, mixer, fed, ("ln_1", "ln_2"), norm, "transformer.h")

    return decoder(
        c,
        layer,
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        inside="transformer.h",
        norm=norm("transformer.ln_f"),
    )


def gpt_neox(c: Config) -> Stack:
    """GPT-NeoX and Pythia: each head's query, key and value stand one after the other."""
    heads, bias, inside = c.num_attention_heads, c.attention_bias, "gpt_neox.layers"
    norm = partial(layer_norm, epsilon=c.layer_norm_eps)

    def layer(i: int) -> Layer:
        at = f"{inside}.{i}"
        weights, biases = (
            tuple(Tensor(f"{at}.attention.query_key_value.{kind}", k, 3, heads) for k in range(3))
            for kind in ("weight", "bias")
        )
        mixer = attention(
            c,
            i,
            qkv=Linear(weights, biases if bias else ()),
            out=tensors(f"{at}.attention.dense", bias=bias),
            kv_heads=heads,
            head_dim=c.hidden_size // heads,
        )
        fed = plain(c, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h", True)
        parallel = bool(c.use_parallel_residual)
        return layer_of(c, i, mixer, fed, BEFORE, norm, inside, parallel=parallel)

    embedding, last = "gpt_neox.embed_in.weight", norm("gpt_neox.final_layer_norm")
    return decoder(c, layer, embedding=embedding, inside=inside, norm=last)


def phi(c: Config) -> Stack:
    """Attention and feed-forward side by side."""
    c.must("qk_layernorm", False)
    norm = partial(layer_norm, epsilon=c.layer_norm_eps)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        mixer = attention(c, i, True, out=tensors(f"{at}.self_attn.dense", bias=True))
        fed = plain(c, f"{at}.mlp.fc1", f"{at}.mlp.fc2", True)
        return layer_of(c, i, mixer, fed, ("input_layernorm", None), norm, parallel=True)

    head = tensors("lm_head", bias=True)
    return decoder(c, layer, norm=norm("model.final_layernorm"), head=head)


def _cohere(c: Config, changes: Callable[[int], dict[str, Any]]) -> Stack:
    """Attention and feed-forward side by side behind one layer norm without bias."""
    c.ignore(
        "layer_switch order_of_interleaved_layers position_embedding_type use_embedding_sharing "
        "use_parallel_embedding",
        rotary_pct=1.0,
        use_gated_activation=True,
        use_parallel_block=True,
    )
    norm = partial(layer_norm, epsilon=c.layer_norm_eps, bias=False)

    def layer(i: int) -> Layer:
        turning: dict[str, Any] = {"rotary": Rotary(interleaved=True)}
        mixer = attention(c, i, c.attention_bias, **turning | changes(i))
        return layer_of(c, i, mixer, gated(c, i), ("input_layernorm", None), norm, parallel=True)

    return decoder(c, layer, norm=norm("model.norm"), head_scale=c.logit_scale)


def cohere(c: Config) -> Stack:
    def changes(i: int) -> dict[str, Any]:
        if not c.use_qk_norm:
            return {}
        names = (f"model.layers.{i}.self_attn.{one}_norm" for one in "qk")
        return {"norms": tuple(layer_norm(name, c.layer_norm_eps, bias=False) for name in names)}

    return _cohere(c, changes)


def cohere2(c: Config) -> Stack:
    """Layers without a window have no angles."""
    c.ignore("sliding_window_pattern")  # `layer_types` follows from it
    return _cohere(c, lambda i: {} if c.layer_types[i] == "sliding_attention" else {"rotary": None})


def nemotron(c: Config) -> Stack:
    """Nemotron (Minitron): norms of 1 + weight, squared ReLU without a gate."""

    def norm(module: str) -> Norm:
        return replace(layer_norm(module, c.norm_eps), plus_one=True)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}.mlp"
        fed = plain(c, f"{at}.up_proj", f"{at}.down_proj", c.mlp_bias)
        return layer_of(c, i, attention(c, i, c.attention_bias), fed, norm=norm)

    return decoder(c, layer, norm=norm("model.norm"))


def stablelm(c: Config) -> Stack:
    """StableLM 2: a quarter of each head turns."""
    norm = partial(layer_norm, epsilon=c.layer_norm_eps)

    def layer(i: int) -> Layer:
        def of_heads(name: str, count: int) -> Norm:
            at = f"model.layers.{i}.self_attn.{name}_layernorm"
            weights = tuple(f"{at}.norms.{head}.weight" for head in range(count))
            if c.get("head_norms_stacked"):  # of a .gguf file
                weights = (f"{at}.weight",)
            return Norm(weights, c.layer_norm_eps, centred=True)

        heads, parallel, norms = c.num_attention_heads, bool(c.use_parallel_residual), None
        if c.qk_layernorm:  # each head has its own
            norms = of_heads("q", heads), of_heads("k", c.num_key_value_heads)
        how = {"out_bias": False, "norms": norms, "head_dim": c.hidden_size // heads}
        names = BEFORE if not parallel else (BEFORE[0], None)
        mixer = attention(c, i, c.use_qkv_bias, **how)
        return layer_of(c, i, mixer, gated(c, i), names, norm, parallel=parallel)

    return decoder(c, layer, norm=norm("model.norm"))


def starcoder2(c: Config) -> Stack:
    """Biases everywhere, a feed-forward without a gate."""
    c.ignore(
        "attention_softmax_in_fp32 layer_norm_epsilon scale_attention_softmax_in_fp32",
        mlp_type="default",
        norm_type="layer_norm",
    )
    norm = partial(layer_norm, epsilon=c.norm_epsilon)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}.mlp"
        mixer = attention(c, i, c.use_bias, window=c.get("sliding_window"))
        fed = plain(c, f"{at}.c_fc", f"{at}.c_proj", c.use_bias)
        return layer_of(c, i, mixer, fed, norm=norm)

    return decoder(c, layer, norm=norm("model.norm"))
