"""Qwen2, Qwen2.5, Qwen3, Qwen3-Next and Qwen3.5, dense and of experts; and Mellum."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from quickbeam.models.families.reading import (
    Config,
    NotDescribed,
    attention,
    decoder,
    experts,
    gated,
    head_norms,
    layer_of,
    rms,
    tensors,
)
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    Linear,
    LinearAttention,
    Norm,
    ParameterRows,
    Rotary,
    Routing,
    Stack,
)


def qwen2(c: Config) -> Stack:
    c.ignore("use_sliding_window")  # `layer_types` follows from it
    return decoder(c, lambda i: layer_of(c, i, attention(c, i, True, out_bias=False), gated(c, i)))


def qwen3(c: Config) -> Stack:
    """Queries and keys are normed by head."""
    c.ignore("use_sliding_window")

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, norms=head_norms(c, i))
        return layer_of(c, i, mixer, gated(c, i))

    return decoder(c, layer)


def _sparse(c: Config, i: int, shared: bool, renormalised: bool) -> FeedForward | Experts:
    """Return the feed-forward of layer `i`: of experts in every so many layers."""
    if i in c.mlp_only_layers or not c.num_experts or (i + 1) % c.decoder_sparse_step:
        return gated(c, i)
    return _experts(c, i, shared, renormalised)


def _experts(c: Config, i: int, shared: bool, renormalised: bool) -> Experts:
    at = f"model.layers.{i}.mlp"
    routing = Routing(tensors(f"{at}.gate"), c.num_experts_per_tok, renormalised=renormalised)
    if not shared:
        return experts(c, i, routing, c.num_experts)
    gate = tensors(f"{at}.shared_expert_gate")
    beside = gated(c, i, name="mlp.shared_expert")
    return experts(c, i, routing, c.num_experts, shared=beside, shared_gate=gate)


def qwen2_moe(c: Config) -> Stack:
    """A shared expert, times the sigmoid of a gate."""
    c.ignore("use_sliding_window")

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.qkv_bias, out_bias=False)
        return layer_of(c, i, mixer, _sparse(c, i, True, bool(c.norm_topk_prob)))

    return decoder(c, layer)


def _hybrid(c: Config, fed: Callable[[int], FeedForward | Experts], apart: bool) -> Stack:
    """Gated delta rule in most layers, gated attention in the others.

    `apart`: the delta rule's projections are tensors of their own.
    """
    c.ignore("full_attention_interval")  # `layer_types` follows from it
    c.ignore("mtp_num_hidden_layers mtp_use_dedicated_embeddings")
    c.ignore("", attn_output_gate=True, mamba_ssm_dtype="float32")

    def norm(module: str) -> Norm:
        return rms(c, module, plus_one=True)

    def mixer(i: int) -> Attention | LinearAttention:
        if (kind := c.layer_types[i]) == "linear_attention":
            return _delta(c, f"model.layers.{i}.linear_attn", apart)
        if kind != "full_attention":
            raise NotDescribed(f"a layer of kind {kind}")
        return _gated_attention(c, i)

    def layer(i: int) -> Layer:
        return layer_of(c, i, mixer(i), fed(i), norm=norm)

    return decoder(c, layer, norm=norm("model.norm"))


def _gated_attention(c: Config, i: int) -> Attention:
    """Each head's rows of `q_proj` are its query and its gate."""
    at, heads = f"model.layers.{i}.self_attn", c.num_attention_heads

    def rows(kind: str) -> tuple[ParameterRows, ...]:
        query, gate = (ParameterRows(f"{at}.q_proj.{kind}", part, 2, heads) for part in (0, 1))
        return (
            query,
            ParameterRows(f"{at}.k_proj.{kind}"),
            ParameterRows(f"{at}.v_proj.{kind}"),
            gate,
        )

    qkv = Linear(rows("weight"), rows("bias") if c.attention_bias else ())
    norms = head_norms(c, i, plus_one=True)
    return attention(c, i, c.attention_bias, qkv=qkv, norms=norms, gated=True)


def _delta(c: Config, at: str, apart: bool) -> LinearAttention:
    keys, heads = c.linear_num_key_heads, c.linear_num_value_heads
    key, value = c.linear_key_head_dim, c.linear_value_head_dim
    if c.hidden_act != "silu" or key % 4:
        raise NotDescribed(f"a gated delta rule with {c.hidden_act} and keys of {key} numbers")
    both = tuple(ParameterRows(f"{at}.in_proj_ba.weight", part, 2, keys) for part in (0, 1))
    if apart:
        into = tensors(*(f"{at}.in_proj_{name}" for name in ("qkv", "z", "b", "a")))
    elif c.get("gates_apart"):  # in .gguf files
        into = Linear((*tensors(f"{at}.in_proj_qkv", f"{at}.in_proj_z").weights, *both))
    else:  # of each key head: its query, its key, its heads' values, and their gates; rates, decays
        each = heads // keys
        edges = (0, key, 2 * key, 2 * key + each * value, 2 * key + 2 * each * value)
        cuts = (
            ParameterRows(f"{at}.in_proj_qkvz.weight", heads=keys, cut=cut)
            for cut in pairwise(edges)
        )
        into = Linear((*cuts, *both))
    return LinearAttention(
        into,
        tensors(f"{at}.out_proj"),
        f"{at}.conv1d.weight",
        None,
        c.linear_conv_kernel_dim,
        heads,
        keys,
        key,
        value,
        f"{at}.A_log",
        f"{at}.dt_bias",
        True,
        rms(c, f"{at}.norm"),
        heads,
        tiled=bool(c.get("value_heads_tiled")),  # in .gguf files
    )


def qwen3_5(c: Config) -> Stack:
    return _hybrid(c, lambda i: gated(c, i), apart=True)


def qwen3_5_moe(c: Config) -> Stack:
    return _hybrid(c, lambda i: _experts(c, i, shared=True, renormalised=True), apart=True)


def qwen3_next(c: Config) -> Stack:
    return _hybrid(c, lambda i: _sparse(c, i, True, bool(c.norm_topk_prob)), apart=False)


def qwen3_vl_moe(c: Config) -> Stack:
    """The weights of the chosen experts add up to 1."""
    c.ignore("", norm_topk_prob=True)
    return qwen3_moe(c, renormalised=True)


def qwen3_moe(c: Config, renormalised: bool | None = None) -> Stack:
    """`renormalised`: None where the configuration says it."""
    c.ignore("use_sliding_window")  # `sliding_window` follows from it
    renormalised = bool(c.norm_topk_prob) if renormalised is None else renormalised

    def layer(i: int) -> Layer:
        norms, window = head_norms(c, i), c.get("sliding_window")
        mixer = attention(c, i, c.attention_bias, norms=norms, window=window)
        return layer_of(c, i, mixer, _sparse(c, i, False, renormalised))

    return decoder(c, layer)


def mellum(c: Config) -> Stack:
    """Windows, and angles by the kind of layer. `mlp_layer_types` names the dense layers."""
    c.ignore("mtp_layer_types mtp_mlp_layer_types")

    def layer(i: int) -> Layer:
        kind, norms = c.layer_types[i], head_norms(c, i)
        mixer = attention(c, i, c.attention_bias, norms=norms, rotary=Rotary(kind), kind=kind)
        if c.mlp_layer_types[i] == "dense":
            return layer_of(c, i, mixer, gated(c, i))
        return layer_of(c, i, mixer, _experts(c, i, False, bool(c.norm_topk_prob)))

    return decoder(c, layer)
