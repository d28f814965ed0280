"""Families with layer norms: GPT-2, GPT-Neo, GPT-J, GPT-NeoX, StarCoder 1 and 2, CodeGen, OPT,
Falcon, Persimmon, Phi-1 and Phi-2, Cohere 1 and 2, Nemotron, Jais 2 and StableLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from quickbeam.models.families.reading import (
    BEFORE,
    Config,
    Names,
    NotDescribed,
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
    ParameterRows,
    Rotary,
    Stack,
)

# sizes that the weights have, defaults of pipelines, and settings of another head
_UNREAD = """
    n_ctx n_inner summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params
"""


def _gpt2(c: Config, mixer: Callable[[int], Attention], transposed: bool = False) -> Stack:
    """Learned positions, and biases.

    `mixer`: the attention of a layer. `transposed`: weights of the feed-forward are stored so.
    """
    c.must("add_cross_attention", False)
    c.ignore(_UNREAD)
    norm = partial(layer_norm, epsilon=c.layer_norm_epsilon)
    act = activation(c.activation_function)

    def layer(i: int) -> Layer:
        at = f"transformer.h.{i}.mlp"
        up = tensors(f"{at}.c_fc", bias=True, transposed=transposed)
        down = tensors(f"{at}.c_proj", bias=True, transposed=transposed)
        fed = FeedForward(up, down, act, False)
        return layer_of(c, i, mixer(i), fed, ("ln_1", "ln_2"), norm, "transformer.h")

    return decoder(
        c,
        layer,
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        inside="transformer.h",
        norm=norm("transformer.ln_f"),
    )


def gpt2(c: Config) -> Stack:
    """Weights are stored transposed."""
    c.ignore("reorder_and_upcast_attn")  # rounding alone
    heads, dim = _equal_heads(c)

    def mixer(i: int) -> Attention:
        at = f"transformer.h.{i}.attn"
        scaling = dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scaling /= i + 1
        qkv = tensors(f"{at}.c_attn", bias=True, transposed=True)
        out = tensors(f"{at}.c_proj", bias=True, transposed=True)
        return Attention(qkv, out, heads, heads, dim, scaling)

    return _gpt2(c, mixer, transposed=True)


def gpt_bigcode(c: Config) -> Stack:
    """SantaCoder and StarCoder: most often one head of keys and values.

    Otherwise each head's query, key and value stand one after the other.
    """
    c.ignore("attention_softmax_in_fp32 scale_attention_softmax_in_fp32")  # rounding alone
    c.ignore("num_key_value_heads")  # `multi_query` says it
    # of a program that ran the model
    c.ignore("inference_runner max_batch_size max_sequence_length pad_key_length")
    c.ignore("pre_allocate_kv_cache runner_max_sequence_length validate_runner_input")
    heads, dim = _equal_heads(c)
    scaling = dim**-0.5 if c.scale_attn_weights else 1.0

    def mixer(i: int) -> Attention:
        at = f"transformer.h.{i}.attn"
        out = tensors(f"{at}.c_proj", bias=True)
        if c.multi_query:
            return Attention(tensors(f"{at}.c_attn", bias=True), out, heads, 1, dim, scaling)
        return Attention(_by_head(f"{at}.c_attn", heads), out, heads, heads, dim, scaling)

    return _gpt2(c, mixer)


def gpt_neo(c: Config) -> Stack:
    """Scores that are not scaled, and a window in some layers."""
    # `attention_layers` says it; defaults of pipelines
    c.ignore("attention_types resid_dropout embed_dropout layer_norm_epsilon")
    heads, dim = _equal_heads(c)

    def mixer(i: int) -> Attention:
        if (kind := c.attention_layers[i]) not in ("global", "local"):
            raise NotDescribed(f"a layer of kind {kind}")
        at = f"transformer.h.{i}.attn.attention"
        qkv = tensors(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
        out = tensors(f"{at}.out_proj", bias=True)
        window = c.window_size if kind == "local" else None
        return Attention(qkv, out, heads, heads, dim, 1.0, window)

    return _gpt2(c, mixer)


def _equal_heads(c: Config) -> tuple[int, int]:
    """Return how many heads there are, and the dimensions of each."""
    return c.num_attention_heads, c.hidden_size // c.num_attention_heads


def _by_head(module: str, heads: int, bias: bool = True) -> Linear:
    """Return a module's queries, keys and values, of which each head's stand one after the
    other."""
    weights, biases = (
        tuple(ParameterRows(f"{module}.{kind}", part, 3, heads) for part in range(3))
        for kind in ("weight", "bias")
    )
    return Linear(weights, biases if bias else ())


def _gptj(c: Config, qkv: Callable[[str], Linear]) -> Stack:
    """Attention and feed-forward side by side; neighbouring dimensions turn together.

    `qkv`: queries, keys and values by the name of the attention.
    """
    c.ignore(_UNREAD)
    c.ignore("", rotary=True, scale_attn_weights=True)
    norm = partial(layer_norm, epsilon=c.layer_norm_epsilon)
    heads, dim = _equal_heads(c)
    act, rotary = activation(c.activation_function), Rotary(interleaved=True, base=10000.0)

    def layer(i: int) -> Layer:
        at = f"transformer.h.{i}"
        mixer = Attention(
            qkv(f"{at}.attn"),
            tensors(f"{at}.attn.out_proj"),
            heads,
            heads,
            dim,
            dim**-0.5,
            rotary=rotary,
            rotary_dim=c.rotary_dim,
        )
        up, down = tensors(f"{at}.mlp.fc_in", bias=True), tensors(f"{at}.mlp.fc_out", bias=True)
        fed = FeedForward(up, down, act, False)
        return layer_of(c, i, mixer, fed, ("ln_1", None), norm, "transformer.h", parallel=True)

    return decoder(
        c,
        layer,
        embedding="transformer.wte.weight",
        inside="transformer.h",
        norm=norm("transformer.ln_f"),
        head=tensors("lm_head", bias=True),
    )


def gptj(c: Config) -> Stack:
    return _gptj(c, lambda at: tensors(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"))


def codegen(c: Config) -> Stack:
    """GPT-J whose queries, values and keys stand one after the other in each of four shards."""

    def qkv(at: str) -> Linear:
        name = f"{at}.qkv_proj.weight"
        query, value, key = (ParameterRows(name, part, 3, heads=4) for part in range(3))
        return Linear((query, key, value))

    return _gptj(c, qkv)


def opt(c: Config) -> Stack:
    """Learned positions, of which the first two are no token's. Norms before."""
    c.must("do_layer_norm_before", True)
    c.must("_remove_final_layer_norm", False)
    c.must("layer_norm_elementwise_affine", True)
    c.must("word_embed_proj_dim", c.hidden_size)
    c.ignore("activation_dropout dropout init_std layerdrop")  # of training
    c.ignore("ffn_dim prefix")  # a size that the weights have, and what a pipeline begins with
    norm, bias = partial(layer_norm, epsilon=1e-5), bool(c.enable_bias)
    (heads, dim), act = _equal_heads(c), activation(c.activation_function)
    inside, names = "model.decoder.layers", ("self_attn_layer_norm", "final_layer_norm")

    def layer(i: int) -> Layer:
        at = f"{inside}.{i}"
        qkv = tensors(*(f"{at}.self_attn.{name}_proj" for name in ("q", "k", "v")), bias=bias)
        out = tensors(f"{at}.self_attn.out_proj", bias=bias)
        mixer = Attention(qkv, out, heads, heads, dim, dim**-0.5)
        up, down = tensors(f"{at}.fc1", bias=bias), tensors(f"{at}.fc2", bias=bias)
        fed = FeedForward(up, down, act, False)
        return layer_of(c, i, mixer, fed, names, norm, inside)

    return decoder(
        c,
        layer,
        embedding="model.decoder.embed_tokens.weight",
        positions="model.decoder.embed_positions.weight",
        first_position=2,
        inside=inside,
        norm=norm("model.decoder.final_layer_norm"),
    )


def falcon(c: Config) -> Stack:
    """Rotary angles; queries that share a key and a value stand before these.

    `new_decoder_architecture`: groups of several, of Falcon 40B and later. Attention and
    feed-forward are side by side, or one after the other.
    """
    c.must("alibi", False)
    c.must("parallel_attn", True, *([] if c.new_decoder_architecture else [False]))
    c.ignore("ff_factor ffn_hidden_size")  # sizes that the weights have
    inside, bias, act = "transformer.h", bool(c.bias), activation(c.activation)
    norm = partial(layer_norm, epsilon=c.layer_norm_epsilon)
    heads, dim = _equal_heads(c)
    names: Names = BEFORE if not c.parallel_attn else (BEFORE[0], None)
    kv_heads = 1 if c.multi_query else heads
    if c.new_decoder_architecture:
        kv_heads = c.num_kv_heads
        if c.get("num_ln_in_parallel_attn", 2) == 2:
            names = ("ln_attn", "ln_mlp")
    c.ignore("num_kv_heads multi_query num_ln_in_parallel_attn")  # where others say it
    queries = heads // kv_heads * dim  # rows that share a key

    def rows(name: str) -> tuple[ParameterRows, ...]:
        ends = (0, queries, queries + dim, queries + 2 * dim)
        return tuple(ParameterRows(name, heads=kv_heads, cut=cut) for cut in pairwise(ends))

    def layer(i: int) -> Layer:
        at = f"{inside}.{i}"
        qkv = f"{at}.self_attention.query_key_value"
        mixer = attention(
            c,
            i,
            qkv=Linear(rows(f"{qkv}.weight"), rows(f"{qkv}.bias") if bias else ()),
            out=tensors(f"{at}.self_attention.dense", bias=bias),
            kv_heads=kv_heads,
            head_dim=dim,
        )
        up = tensors(f"{at}.mlp.dense_h_to_4h", bias=bias)
        fed = FeedForward(up, tensors(f"{at}.mlp.dense_4h_to_h", bias=bias), act, False)
        return layer_of(c, i, mixer, fed, names, norm, inside, parallel=bool(c.parallel_attn))

    embedding, last = "transformer.word_embeddings.weight", norm("transformer.ln_f")
    return decoder(c, layer, embedding=embedding, inside=inside, norm=last)


def persimmon(c: Config) -> Stack:
    """Layer norms of queries and keys, and squared ReLU without a gate."""
    norm = partial(layer_norm, epsilon=c.layer_norm_eps)
    heads, dim = _equal_heads(c)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        norms = None
        if c.qk_layernorm:
            norms = norm(f"{at}.self_attn.q_layernorm"), norm(f"{at}.self_attn.k_layernorm")
        mixer = attention(
            c,
            i,
            qkv=_by_head(f"{at}.self_attn.query_key_value", heads),
            out=tensors(f"{at}.self_attn.dense", bias=True),
            head_dim=dim,
            norms=norms,
        )
        fed = plain(c, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h", True)
        return layer_of(c, i, mixer, fed, norm=norm)

    return decoder(c, layer, norm=norm("model.final_layernorm"))


def gpt_neox(c: Config) -> Stack:
    """GPT-NeoX and Pythia: each head's query, key and value stand one after the other."""
    heads, bias, inside = c.num_attention_heads, c.attention_bias, "gpt_neox.layers"
    norm = partial(layer_norm, epsilon=c.layer_norm_eps)

    def layer(i: int) -> Layer:
        at = f"{inside}.{i}"
        mixer = attention(
            c,
            i,
            qkv=_by_head(f"{at}.attention.query_key_value", heads, bias),
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


def jais2(c: Config) -> Stack:
    """Jais 2: squared ReLU without a gate."""
    norm = partial(layer_norm, epsilon=c.layer_norm_eps)

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
