"""Families with layer norms: GPT-2, GPT-Neo, GPT-J, GPT-NeoX, StarCoder 1 and 2, CodeGen, OPT,
Falcon, Persimmon, Phi-1 and Phi-2, Cohere 1 and 2, Nemotron, Jais 2 and StableLM."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from quickbeam.models.families.reading import (
    BEFORE,
    PARALLEL,
    Config,
    NormMaker,
    NormNames,
    NotDescribed,
    attention,
    decoder,
    gated,
    head_norms,
    layer_norms,
    layer_of,
    linear,
    plain,
    stacked,
)
from quickbeam.models.stack import Attention, Layer, Linear, Norm, ParameterRows, Rotary, Stack

# sizes that the weights have, defaults of pipelines, and settings of another head
_UNREAD = """
    n_ctx n_inner summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params
"""


def _gpt2(config: Config, mixer: Callable[[int], Attention], transposed: bool = False) -> Stack:
    """Learned positions, and biases.

    `mixer`: makes the attention of a layer. `transposed`: weights of the feed-forward are stored as
    `[inputs, outputs]`.
    """
    config.must("add_cross_attention", False)
    config.ignore(_UNREAD)
    norm, inside = layer_norms(config.layer_norm_epsilon), "transformer.h"
    act, names = config.activation_function, NormNames("ln_1", "ln_2")

    def layer(i: int) -> Layer:
        modules = ("c_fc", "c_proj")
        feed_forward = plain(config, f"{inside}.{i}.mlp", True, modules, act, transposed)
        return layer_of(config, i, mixer(i), feed_forward, names, norm, inside)

    return decoder(
        config,
        layer,
        norm("transformer.ln_f"),
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        inside=inside,
    )


def gpt2(config: Config) -> Stack:
    """Weights are stored as `[inputs, outputs]`."""
    config.ignore("reorder_and_upcast_attn")  # rounding alone

    def mixer(i: int) -> Attention:
        prefix = f"transformer.h.{i}.attn"
        qkv = linear(f"{prefix}.c_attn", bias=True, transposed=True)
        out = linear(f"{prefix}.c_proj", bias=True, transposed=True)
        scaling = _scaling(config)
        if config.scale_attn_by_inverse_layer_idx:
            scaling /= i + 1
        return _multi_head(config, qkv, out, scaling)

    return _gpt2(config, mixer, transposed=True)


def gpt_bigcode(config: Config) -> Stack:
    """SantaCoder and StarCoder: most often one head of keys and values.

    Otherwise each head's query, key and value stand one after the other.
    """
    config.ignore("attention_softmax_in_fp32 scale_attention_softmax_in_fp32")  # rounding alone
    config.ignore("num_key_value_heads")  # `multi_query` says it
    # of a program that ran the model
    config.ignore("inference_runner max_batch_size max_sequence_length pad_key_length")
    config.ignore("pre_allocate_kv_cache runner_max_sequence_length validate_runner_input")
    scaling = _scaling(config)

    def mixer(i: int) -> Attention:
        prefix = f"transformer.h.{i}.attn"
        out = linear(f"{prefix}.c_proj", bias=True)
        if config.multi_query:
            qkv = linear(f"{prefix}.c_attn", bias=True)
            return _multi_head(config, qkv, out, scaling, kv_heads=1)
        qkv = _by_head(f"{prefix}.c_attn", config.num_attention_heads)
        return _multi_head(config, qkv, out, scaling)

    return _gpt2(config, mixer)


def gpt_neo(config: Config) -> Stack:
    """Scores that are not scaled, and a window in some layers."""
    # `attention_layers` says it; defaults of pipelines
    config.ignore("attention_types resid_dropout embed_dropout layer_norm_epsilon")

    def mixer(i: int) -> Attention:
        kind = config.attention_layers[i]
        if kind not in ("global", "local"):
            raise NotDescribed(f"a layer of kind {kind}")
        prefix = f"transformer.h.{i}.attn.attention"
        qkv = stacked(prefix, "q_proj", "k_proj", "v_proj")
        out = linear(f"{prefix}.out_proj", bias=True)
        window = config.window_size if kind == "local" else None
        return _multi_head(config, qkv, out, scaling=1.0, window=window)

    return _gpt2(config, mixer)


def _multi_head(
    config: Config,
    qkv: Linear,
    out: Linear,
    scaling: float | None = None,
    kv_heads: int | None = None,
    window: int | None = None,
    rotary: Rotary | None = None,
    rotary_dim: int = 0,
) -> Attention:
    """Return attention by parts that are given, with `kv_heads` None for one of each query."""
    heads, dim = config.num_attention_heads, _equal_dim(config)
    return Attention(
        qkv=qkv,
        out=out,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=dim,
        scaling=dim**-0.5 if scaling is None else scaling,
        window=window,
        rotary=rotary,
        rotary_dim=rotary_dim,
    )


def _equal_dim(config: Config) -> int:
    """Return the dimensions of a head that together are the width."""
    return int(config.hidden_size // config.num_attention_heads)


def _scaling(config: Config) -> float:
    return float(_equal_dim(config) ** -0.5) if config.scale_attn_weights else 1.0


def _by_head(module: str, heads: int, bias: bool = True) -> Linear:
    """Return a module's queries, keys and values, of which each head's stand one after the
    other."""

    def rows(kind: str) -> tuple[ParameterRows, ...]:
        return tuple(ParameterRows(f"{module}.{kind}", part, 3, heads) for part in range(3))

    return Linear(rows("weight"), rows("bias") if bias else ())


def _gptj(config: Config, qkv: Callable[[str], Linear]) -> Stack:
    """Attention and feed-forward in parallel; rotary dimensions are interleaved.

    `qkv`: makes queries, keys and values of the attention's name.
    """
    config.ignore(_UNREAD)
    config.ignore(rotary=True, scale_attn_weights=True)
    norm, inside = layer_norms(config.layer_norm_epsilon), "transformer.h"
    act, rotary = config.activation_function, Rotary(interleaved=True, base=10000.0)

    def layer(i: int) -> Layer:
        prefix = f"{inside}.{i}"
        mixer = _multi_head(
            config,
            qkv(f"{prefix}.attn"),
            linear(f"{prefix}.attn.out_proj"),
            rotary=rotary,
            rotary_dim=config.rotary_dim,
        )
        feed_forward = plain(config, f"{prefix}.mlp", True, ("fc_in", "fc_out"), act)
        names = NormNames("ln_1", None)
        return layer_of(config, i, mixer, feed_forward, names, norm, inside, parallel=True)

    return decoder(
        config,
        layer,
        norm("transformer.ln_f"),
        embedding="transformer.wte.weight",
        inside=inside,
        head=linear("lm_head", bias=True),
    )


def gptj(config: Config) -> Stack:
    return _gptj(config, lambda prefix: stacked(prefix, "q_proj", "k_proj", "v_proj"))


def codegen(config: Config) -> Stack:
    """GPT-J whose queries, values and keys stand one after the other in each of four shards."""

    def qkv(prefix: str) -> Linear:
        name = f"{prefix}.qkv_proj.weight"
        query, value, key = (ParameterRows(name, part, 3, heads=4) for part in range(3))
        return Linear((query, key, value))

    return _gptj(config, qkv)


def opt(config: Config) -> Stack:
    """Learned positions, of which the first two are no token's. Norms before."""
    config.must("do_layer_norm_before", True)
    config.must("_remove_final_layer_norm", False)
    config.must("layer_norm_elementwise_affine", True)
    config.must("word_embed_proj_dim", config.hidden_size)
    config.ignore("activation_dropout dropout init_std layerdrop")  # of training
    config.ignore("ffn_dim prefix")  # a size that the weights have, and what a pipeline begins with
    norm, bias = layer_norms(1e-5), bool(config.enable_bias)
    inside, names = "model.decoder.layers", NormNames("self_attn_layer_norm", "final_layer_norm")

    def layer(i: int) -> Layer:
        prefix = f"{inside}.{i}"
        qkv = stacked(f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj", bias=bias)
        mixer = _multi_head(config, qkv, linear(f"{prefix}.self_attn.out_proj", bias=bias))
        feed_forward = plain(config, prefix, bias, ("fc1", "fc2"), config.activation_function)
        return layer_of(config, i, mixer, feed_forward, names, norm, inside)

    return decoder(
        config,
        layer,
        norm("model.decoder.final_layer_norm"),
        embedding="model.decoder.embed_tokens.weight",
        positions="model.decoder.embed_positions.weight",
        first_position=2,
        inside=inside,
    )


def falcon(config: Config) -> Stack:
    """Rotary angles; queries that share a key and a value stand before these.

    `new_decoder_architecture`: groups of several, of Falcon 40B and later. Attention and
    feed-forward are in parallel, or one after the other.
    """
    grouped = config.new_decoder_architecture
    config.must("alibi", False)
    config.must("parallel_attn", True, *([] if grouped else [False]))
    config.ignore("ff_factor ffn_hidden_size")  # sizes that the weights have
    heads, dim = config.num_attention_heads, _equal_dim(config)
    bias, parallel = bool(config.bias), bool(config.parallel_attn)
    names = PARALLEL if parallel else BEFORE
    kv_heads = 1 if config.multi_query else heads
    if grouped:
        kv_heads = config.num_kv_heads
        if config.get("num_ln_in_parallel_attn", 2) == 2:
            names = NormNames("ln_attn", "ln_mlp")
    config.ignore("num_kv_heads multi_query num_ln_in_parallel_attn")  # where others say it
    norm, inside = layer_norms(config.layer_norm_epsilon), "transformer.h"

    def rows(name: str) -> tuple[ParameterRows, ...]:
        queries = heads // kv_heads * dim  # rows that share a key
        bounds = (0, queries, queries + dim, queries + 2 * dim)
        return tuple(ParameterRows(name, heads=kv_heads, cut=cut) for cut in pairwise(bounds))

    def layer(i: int) -> Layer:
        prefix = f"{inside}.{i}"
        qkv = f"{prefix}.self_attention.query_key_value"
        mixer = attention(
            config,
            i,
            head_dim=dim,
            qkv=Linear(rows(f"{qkv}.weight"), rows(f"{qkv}.bias") if bias else ()),
            out=linear(f"{prefix}.self_attention.dense", bias=bias),
            kv_heads=kv_heads,
        )
        modules = ("dense_h_to_4h", "dense_4h_to_h")
        feed_forward = plain(config, f"{prefix}.mlp", bias, modules, config.activation)
        return layer_of(config, i, mixer, feed_forward, names, norm, inside, parallel=parallel)

    embedding, last = "transformer.word_embeddings.weight", norm("transformer.ln_f")
    return decoder(config, layer, last, embedding=embedding, inside=inside)


def persimmon(config: Config) -> Stack:
    """Layer norms of queries and keys, and squared ReLU without a gate."""
    norm = layer_norms(config.layer_norm_eps)

    def layer(i: int) -> Layer:
        prefix = f"model.layers.{i}"
        norms = None
        if config.qk_layernorm:
            norms = head_norms(config, i, ("q_layernorm", "k_layernorm"), norm)
        qkv = f"{prefix}.self_attn.query_key_value"
        mixer = attention(
            config,
            i,
            head_dim=_equal_dim(config),
            qkv=_by_head(qkv, config.num_attention_heads),
            out=linear(f"{prefix}.self_attn.dense", bias=True),
            norms=norms,
        )
        modules = ("dense_h_to_4h", "dense_4h_to_h")
        feed_forward = plain(config, f"{prefix}.mlp", True, modules)
        return layer_of(config, i, mixer, feed_forward, norm=norm)

    return decoder(config, layer, norm("model.final_layernorm"))


def gpt_neox(config: Config) -> Stack:
    """GPT-NeoX and Pythia: each head's query, key and value stand one after the other."""
    heads, bias = config.num_attention_heads, config.attention_bias
    norm, inside = layer_norms(config.layer_norm_eps), "gpt_neox.layers"
    parallel = bool(config.use_parallel_residual)

    def layer(i: int) -> Layer:
        prefix = f"{inside}.{i}"
        mixer = attention(
            config,
            i,
            head_dim=_equal_dim(config),
            qkv=_by_head(f"{prefix}.attention.query_key_value", heads, bias),
            out=linear(f"{prefix}.attention.dense", bias=bias),
            kv_heads=heads,
        )
        modules = ("dense_h_to_4h", "dense_4h_to_h")
        feed_forward = plain(config, f"{prefix}.mlp", True, modules)
        return layer_of(config, i, mixer, feed_forward, BEFORE, norm, inside, parallel=parallel)

    embedding, last = "gpt_neox.embed_in.weight", norm("gpt_neox.final_layer_norm")
    return decoder(config, layer, last, embedding=embedding, inside=inside)


def phi(config: Config) -> Stack:
    """Attention and feed-forward in parallel."""
    config.must("qk_layernorm", False)
    norm = layer_norms(config.layer_norm_eps)

    def layer(i: int) -> Layer:
        prefix = f"model.layers.{i}"
        out = linear(f"{prefix}.self_attn.dense", bias=True)
        mixer = attention(config, i, bias=True, out=out)
        feed_forward = plain(config, f"{prefix}.mlp", True, ("fc1", "fc2"))
        return layer_of(config, i, mixer, feed_forward, PARALLEL, norm, parallel=True)

    head = linear("lm_head", bias=True)
    return decoder(config, layer, norm("model.final_layernorm"), head=head)


def _cohere(config: Config, mixer: Callable[[int], Attention]) -> Stack:
    """Attention and feed-forward in parallel behind one layer norm without bias.

    `mixer`: makes the attention of a layer.
    """
    config.ignore(
        "layer_switch order_of_interleaved_layers position_embedding_type use_embedding_sharing "
        "use_parallel_embedding",
        rotary_pct=1.0,
        use_gated_activation=True,
        use_parallel_block=True,
    )
    norm = layer_norms(config.layer_norm_eps, bias=False)

    def layer(i: int) -> Layer:
        feed_forward = gated(config, i)
        return layer_of(config, i, mixer(i), feed_forward, PARALLEL, norm, parallel=True)

    return decoder(config, layer, norm("model.norm"), head_scale=config.logit_scale)


def cohere(config: Config) -> Stack:
    """Interleaved rotary dimensions, and norms of queries and keys in some models."""
    norm = layer_norms(config.layer_norm_eps, bias=False)

    def mixer(i: int) -> Attention:
        norms = head_norms(config, i, norm=norm) if config.use_qk_norm else None
        rotary = Rotary(interleaved=True)
        return attention(config, i, config.attention_bias, rotary=rotary, norms=norms)

    return _cohere(config, mixer)


def cohere2(config: Config) -> Stack:
    """Interleaved rotary dimensions; layers without a window have no angles."""
    config.ignore("sliding_window_pattern")  # `layer_types` follows from it

    def mixer(i: int) -> Attention:
        rotated = config.layer_types[i] == "sliding_attention"
        rotary = Rotary(interleaved=True) if rotated else None
        return attention(config, i, config.attention_bias, rotary=rotary)

    return _cohere(config, mixer)


def nemotron(config: Config) -> Stack:
    """Nemotron (Minitron): norms of 1 + weight."""
    return _ungated(config, layer_norms(config.norm_eps, plus_one=True))


def jais2(config: Config) -> Stack:
    return _ungated(config, layer_norms(config.layer_norm_eps))


def _ungated(config: Config, norm: NormMaker) -> Stack:
    """Llama with layer norms, and a feed-forward without a gate (squared ReLU as published)."""

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias)
        feed_forward = plain(config, f"model.layers.{i}.mlp", config.mlp_bias)
        return layer_of(config, i, mixer, feed_forward, norm=norm)

    return decoder(config, layer, norm("model.norm"))


def stablelm(config: Config) -> Stack:
    """StableLM 2: a quarter of each head is rotated."""
    norm, parallel = layer_norms(config.layer_norm_eps), bool(config.use_parallel_residual)

    def norm_by_head(module: str, heads: int) -> Norm:
        weights = tuple(f"{module}.norms.{head}.weight" for head in range(heads))
        if config.get("head_norms_stacked"):  # in .gguf files
            weights = (f"{module}.weight",)
        return Norm(weights, config.layer_norm_eps, centred=True)

    def layer(i: int) -> Layer:
        prefix, heads = f"model.layers.{i}.self_attn", config.num_attention_heads
        norms = None
        if config.qk_layernorm:  # each head has its own
            query_norm = norm_by_head(f"{prefix}.q_layernorm", heads)
            norms = query_norm, norm_by_head(f"{prefix}.k_layernorm", config.num_key_value_heads)
        mixer = attention(
            config,
            i,
            config.use_qkv_bias,
            out_bias=False,
            head_dim=_equal_dim(config),
            norms=norms,
        )
        names = PARALLEL if parallel else BEFORE
        return layer_of(config, i, mixer, gated(config, i), names, norm, parallel=parallel)

    return decoder(config, layer, norm("model.norm"))


def starcoder2(config: Config) -> Stack:
    """Biases everywhere, a feed-forward without a gate."""
    config.ignore(
        "attention_softmax_in_fp32 layer_norm_epsilon scale_attention_softmax_in_fp32",
        mlp_type="default",
        norm_type="layer_norm",
    )
    norm, bias = layer_norms(config.norm_epsilon), config.use_bias

    def layer(i: int) -> Layer:
        mixer = attention(config, i, bias, window=config.get("sliding_window"))
        feed_forward = plain(config, f"model.layers.{i}.mlp", bias, ("c_fc", "c_proj"))
        return layer_of(config, i, mixer, feed_forward, norm=norm)

    return decoder(config, layer, norm("model.norm"))
