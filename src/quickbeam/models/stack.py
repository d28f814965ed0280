"""An architecture as data: what a model computes, and of which parameters.

`families` make a `Stack` from a configuration, `compile` makes a program of kernels from it,
and `torch/network.py` runs it in plain PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Name = str  # of a parameter of transformers' causal language model


@dataclass(frozen=True)
class ParameterRows:
    """Some rows of a parameter: of a weight `[outputs, inputs]`, or of its bias.

    The parameter consists of `parts` equal pieces, of which this is number `part`. With `heads`,
    each head holds its parts one after the other, and the pieces of all heads are taken.
    `transposed`: the parameter is `[inputs, outputs]`. `expert`: which of several weights in one
    parameter. `cut`: of each head's rows the first, and the one after the last.
    """

    name: Name
    part: int = 0
    parts: int = 1
    heads: int = 1
    transposed: bool = False
    expert: int | None = None
    cut: tuple[int, int] | None = None

    @property
    def plain(self) -> bool:
        """Whether its rows follow one another in the parameter as they do here."""
        return self.heads == 1 and not self.transposed and self.expert is None and self.cut is None


@dataclass(frozen=True)
class Linear:
    """A product with `weights` that are stacked one below the other, plus `biases` or none."""

    weights: tuple[ParameterRows, ...]
    biases: tuple[ParameterRows, ...] = ()


@dataclass(frozen=True)
class Norm:
    """An RMS norm, or with `centred` a layer norm.

    `weights`: several are put side by side, as of heads; none stands for ones. `plus_one`: the
    weight is 1 + the parameter. `factor`: of the weight.
    """

    weights: tuple[Name, ...]
    epsilon: float
    bias: Name | None = None
    centred: bool = False
    plus_one: bool = False
    factor: float = 1.0


@dataclass(frozen=True)
class Rotary:
    """Rotary angles of some layers.

    `kind`: the kind of layers, where the configuration has different `rope_parameters` for
    different ones. `interleaved`: dimensions 2i and 2i + 1 of a head are rotated together, not i
    and i + half. `base`: in place of the configuration's `rope_theta`. `backwards`: by the negative
    of the angles.
    """

    kind: str | None = None
    interleaved: bool = False
    base: float | None = None
    backwards: bool = False


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries by position: `1 + beta * log(1 + floor(position / length))`."""

    beta: float
    length: int


@dataclass(frozen=True)
class Latent:
    """Queries, keys and values by way of small latent vectors.

    The results of `qkv` are the latent vector of the queries (without `query` the queries), then
    that of keys and values, of `rank` elements, then the rotated part of all heads' keys. `norm`
    and `up` make of the second the part of each head's key that is not rotated, and the head's
    value of `value_dim` elements. The last dimensions of a head are rotated.
    """

    rank: int
    value_dim: int
    norm: Norm
    up: Linear
    query: tuple[Norm, Linear] | None = None

    @property
    def parts(self) -> list[tuple[Norm, Linear]]:
        return [*([self.query] if self.query else []), (self.norm, self.up)]


@dataclass(frozen=True)
class Attention:
    """Attention of `heads` queries over `kv_heads` keys and values of `head_dim` elements.

    `qkv`: queries, keys and values one below the other. `window`: how many of the last tokens a
    token sees, itself among them. `softcap`: scores are soft-capped by it. `rotary`: None for none;
    `rotary_dim`: how many of a head's first dimensions are rotated. `norms`: of queries and of
    keys, of each head (with a weight for one head, or for all) or with `norm_all` of all heads
    together; with `norm_last` after the angles. `gated`: behind the values, `qkv` has gates (with
    `one_gate` one a head), whose sigmoids scale the result. `factor`: of the result, which is added
    to the stream. `value_norm`: each head's value is normed, without a weight. `values_are_keys`:
    `qkv` has no values; values are the keys before norm and angles. `source`: the index of the
    layer whose keys and values are read; `qkv` has queries alone then. `bidirectional`: the rows
    that a pass has of a sequence see one another. `causal_images`: an image's rows see none behind
    themselves here, though they do in other layers (`ImageRows.whole`).
    """

    qkv: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    rotary: Rotary | None = None
    rotary_dim: int = 0
    norms: tuple[Norm, Norm] | None = None
    norm_all: bool = False
    norm_last: bool = False
    query_scale: QueryScale | None = None
    sinks: Name | None = None
    gated: bool = False
    one_gate: bool = False
    factor: float = 1.0
    latent: Latent | None = None
    value_norm: bool = False
    values_are_keys: bool = False
    source: int | None = None
    bidirectional: bool = False
    causal_images: bool = False

    @property
    def value_dim(self) -> int:
        """How many elements a head's value has."""
        return self.head_dim if self.latent is None else self.latent.value_dim


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution, of `channels`: `out(c * conv(b * x))`.

    `into`: b, c and x one below the other. `weight`: `[channels, 1, taps]`, of the last `taps`
    tokens of each channel, the oldest first; `bias`: `[channels]`.
    """

    into: Linear
    out: Linear
    weight: Name
    bias: Name | None
    channels: int
    taps: int
    factor: float = 1.0


@dataclass(frozen=True)
class LinearAttention:
    """A layer whose `heads` keep a matrix each, `[key_dim, value_dim]`: S ← e^(a Δ) S + k uᵀ, Sᵀq.

    `into`: the inputs of the convolution, one below the other; gates z, `[heads * value_dim]`; with
    the delta rule rates b, `[heads]`; and d, `[heads]`, of the decays. `weight`, `bias`, `taps`: of
    the convolution (`ShortConv`), behind which comes SiLU. Δ is softplus(d + `shift`), clamped
    between `least` and `most`; a is -exp(`log_slope`). Each key head serves heads / `key_heads`
    heads in a row, or with `tiled` each `key_heads`-th. `norm`: of each of `groups` groups of the
    result, before it is taken times SiLU(z), or with `norm_last` after that; None for none.

    With `delta`, the gated delta rule: q, k and v are convolved, q and k of each head get length 1,
    q is divided by √key_dim, and u is σ(b) (v - Sᵀk). Otherwise Mamba-2: x, B and C are convolved,
    and v, k and q are these; u is Δ v, and `skip` times v is added to the result.

    Before anything else, z is taken times `gate_scale`, d times `step_scale`, and v, k and q of
    Mamba-2 times `scales`. `factor`: of the result, which is added to the residual stream.
    """

    into: Linear
    out: Linear
    weight: Name
    bias: Name | None
    taps: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    log_slope: Name
    shift: Name
    delta: bool
    norm: Norm | None = None
    groups: int = 1
    tiled: bool = False
    norm_last: bool = False
    skip: Name | None = None
    least: float = 0.0
    most: float = math.inf
    gate_scale: float = 1.0
    step_scale: float = 1.0
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    factor: float = 1.0

    @property
    def channels(self) -> int:
        """How many elements of a token are convolved."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


Recurrent = ShortConv | LinearAttention


@dataclass(frozen=True)
class Xielu:
    """The parameters of the activation xIELU, `[1]` each (2411.13010).

    x > 0:  a x² + b x                a = softplus(`positive`)
    else:   c (e^x - 1 - x) + b x     c = b + softplus(`negative`), b = 1/2
    """

    positive: Name
    negative: Name


@dataclass(frozen=True)
class FeedForward:
    """`down(activation(up(x)))`, or with `gated` `down(activation(gate(x)) * up(x))`.

    With `gated`, the field `up` has two weights: the gate projection's, and the up projection's.
    `activation`: one of the kernels' (`native/library.py`); `clamped` is `(u + 1) * g *
    sigmoid(slope * g)` with g, of the gate, at most `limit`, and u clamped to ±`limit`; `xielu` is
    that of the field `xielu`, without a gate. The gate is taken times `gate_scale`, and the result,
    which is added to the residual stream, times `factor`.
    """

    up: Linear
    down: Linear
    activation: str
    gated: bool
    limit: float = 0.0
    slope: float = 1.0
    gate_scale: float = 1.0
    factor: float = 1.0
    xielu: Xielu | None = None


@dataclass(frozen=True)
class Routing:
    """How a row's active experts are selected, and with which weights their results are added.

    `scores`: `softmax` is over all experts, `sigmoid` of each, `softmax_of_chosen` over the active
    ones. `mixer` is Phi-MoE's rule for two: a softmax that leaves out logits further below the
    largest than `2 * jitter` of them, and the same again without the largest. The `top` experts
    with the largest scores plus `correction` `[experts]` are active; with several `groups` only
    those of the `top_groups` groups whose `best_of_group` largest scores have the largest sum.
    `renormalised`: weights are divided by the larger of their sum + `plus` and `least`. All weights
    are then taken times `factor`, and each times its expert's `scale` `[experts]`.
    """

    logits: Linear
    top: int
    scores: str = "softmax"
    correction: Name | None = None
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    renormalised: bool = False
    plus: float = 0.0
    least: float = 0.0
    factor: float = 1.0
    jitter: float = 0.0
    scale: Name | None = None


@dataclass(frozen=True)
class Experts:
    """The sum over a row's active experts of their results times their weights.

    `candidates`: the experts that rows select among, gated feed-forwards of one shape. `shared`: an
    expert of all rows, with weight 1, or the sigmoid of `shared_gate`. In native passes,
    `routing.logits` and `shared_gate` keep every bit.
    """

    routing: Routing
    candidates: tuple[FeedForward, ...]
    shared: FeedForward | None = None
    shared_gate: Linear | None = None

    @property
    def all(self) -> tuple[FeedForward, ...]:
        """All experts, the shared one last if there is one."""
        return self.candidates if self.shared is None else (*self.candidates, self.shared)


@dataclass(frozen=True)
class ParallelExperts:
    """Experts that read the residual stream beside a layer's dense feed-forward.

    `dense_after` norms the dense feed-forward's result, `before` norms what `experts` read,
    `router` what their router reads, and `after` their result. The sum of both results, normed by
    the layer's `feed_forward_after`, is added to the stream.
    """

    experts: Experts
    before: Norm
    router: Norm
    after: Norm
    dense_after: Norm


@dataclass(frozen=True)
class PerLayerInput:
    """A layer's use of its per-layer input p: `after(out(activation(gate(x)) * p))` is added."""

    gate: Linear
    activation: str
    out: Linear
    after: Norm


@dataclass(frozen=True)
class PerLayerInputs:
    """For each layer, `width` elements of a token beside the residual stream (Gemma 3n and 4).

    A first part is the token's row of `table` `[vocab, layers * width]` times `scale`. A second one
    is `projection` of the token's embedding times `factor`, normed by `norm` layer by layer. Their
    sum is taken times `mixed`.
    """

    table: Name
    scale: float
    projection: Linear
    factor: float
    norm: Norm
    width: int
    mixed: float


@dataclass(frozen=True)
class BlockConv:
    """Causal convolutions of what a sublayer reads, and of its result (DFlash2).

    A convolution is over a row and the `taps` - 1 rows before it, in blocks of `block` rows. Its
    coefficients are `base` `[2, taps, d]` plus results of `shared`, one for each `group` columns.
    """

    shared: Linear
    base: Name
    taps: int
    group: int
    block: int


@dataclass(frozen=True)
class Fusion:
    """One vector of the hidden states of several of a target's layers, `[layers * width]`.

    Each state is normed (`norms`), then all together (`norm`); `linear` makes the vector, which is
    normed too (`after`). Any of these norms may be missing.
    """

    linear: Linear
    width: int
    norms: tuple[Norm, ...] = ()
    norm: Norm | None = None
    after: Norm | None = None


@dataclass(frozen=True)
class HiddenInput:
    """What a drafter's rows read: a hidden state of `width` numbers, and a token.

    Token and state stand side by side, each behind its norm; with `state_first` the state comes
    first. The residual stream is what `join` makes of both. Without `join`, the first layer's
    attention reads both, and the stream is the state, behind its norm with `norm_residual`. Without
    `reads_tokens`, the stream is the state alone.
    """

    width: int
    reads_tokens: bool = True
    token_norm: Norm | None = None
    state_norm: Norm | None = None
    state_first: bool = False
    join: Linear | None = None
    norm_residual: bool = False


@dataclass(frozen=True)
class Layer:
    """Attention and feed-forward, each added to the residual stream times `residual`.

    `recurrent`: a recurrent layer in the attention's place, or beside it with the same input. A
    layer may have neither, or no feed-forward. Norms `before` are of the inputs of attention and
    feed-forward, norms `after` of their results. `parallel`: the feed-forward reads the stream
    before the attention is added, with the attention's norm if it has none. `parallel_experts`:
    experts beside the feed-forward. `convs`: convolutions around attention and feed-forward,
    without norms `after`. At the end come `per_layer`, and a factor of the stream, `scalar`.
    """

    attention: Attention | None
    feed_forward: FeedForward | Experts | None
    attention_before: Norm | None
    feed_forward_before: Norm | None
    attention_after: Norm | None = None
    feed_forward_after: Norm | None = None
    parallel: bool = False
    residual: float = 1.0
    recurrent: Recurrent | None = None
    parallel_experts: ParallelExperts | None = None
    per_layer: PerLayerInput | None = None
    scalar: Name | None = None
    convs: tuple[BlockConv, BlockConv] | None = None


NO_HEAD = Linear(())  # of drafters that score tokens by another model's head, or outside of passes


@dataclass(frozen=True)
class Stack:
    """A causal language model.

    `embedding`: `[vocab, d]`, times `scale`, behind which comes `embedding_norm`. `positions`:
    `[positions, d]`, learned, added; None for none. `first_position`: its row that is the first
    token's. `inside`: the name of the list of layers.
    `head`: `[vocab, d]`, or `NO_HEAD`; logits are its results times `head_scale`, soft-capped by
    `softcap`. `unread`: tensors that checkpoints may hold and no pass reads. `deepstack`: after how
    many of the first layers an image's rows are added to (DeepStack, 2406.04334).

    Of a drafter, `hidden_input` is what rows read besides tokens, and `fusion` makes it of a
    target's hidden states.
    """

    embedding: Name
    inside: str
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    scale: float = 1.0
    embedding_norm: Norm | None = None
    positions: Name | None = None
    first_position: int = 0
    head_scale: float = 1.0
    softcap: float | None = None
    per_layer: PerLayerInputs | None = None
    unread: tuple[str, ...] = ()
    deepstack: int = 0
    hidden_input: HiddenInput | None = None
    fusion: Fusion | None = None

    @property
    def attentions(self) -> list[Attention]:
        """The attentions of all layers that have one."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def recurrents(self) -> list[Recurrent]:
        """The recurrent parts of all layers that have one."""
        return [layer.recurrent for layer in self.layers if layer.recurrent is not None]
