"""An architecture as data.

A `Stack` says what a causal language model computes: where its tensors are, and in which order they
are used. `families` make it from a model's configuration, `native/compiled.py` makes a program of
kernels from it, and `tests/interpreter.py` runs it in plain PyTorch.

Names are those of the parameters of transformers' causal language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tensor:
    """Some rows of a weight `[outputs, inputs]`, or of its bias.

    `part` of `parts`: which of so many equal pieces. With `heads`, each of so many heads holds its
    parts one after the other, and the pieces of all heads are taken. `transposed`: the weight is
    stored as `[inputs, outputs]`.
    """

    name: str
    part: int = 0
    parts: int = 1
    heads: int = 1
    transposed: bool = False

    @property
    def plain(self) -> bool:
        """Whether its rows follow one another in the checkpoint as they do here."""
        return self.heads == 1 and not self.transposed


@dataclass(frozen=True)
class Linear:
    """A product with `weights` that are stacked one below the other, plus `biases` or none."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Norm:
    """An RMS norm, or with `centred` a layer norm.

    `weights`: several are put side by side, as of heads; none stands for ones. `plus_one`: the
    weight is 1 + what is stored.
    """

    weights: tuple[str, ...]
    epsilon: float
    bias: str | None = None
    centred: bool = False
    plus_one: bool = False


@dataclass(frozen=True)
class Rotary:
    """Rotary angles of some layers.

    `module`: what computes them. `kind`: its argument, where it has different angles for different
    layers. `interleaved`: dimensions 2i and 2i + 1 of a head turn together, not i and i + half.
    `repeated`: the module gives each angle twice in a row, and not all angles twice.
    """

    module: str
    kind: str | None = None
    interleaved: bool = False
    repeated: bool = False


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries by position: `1 + beta * log(1 + floor(position / length))`."""

    beta: float
    length: int


@dataclass(frozen=True)
class Attention:
    """Attention of `heads` queries over `kv_heads` keys and values of `head_dim` numbers.

    `qkv`: queries, keys and values one below the other. `window`: how many of the last tokens
    count, itself among them. `softcap`: scores are bent to stay below it. `rotary`: None for none;
    `turned`: how many of a head's first dimensions turn. `norms`: of queries and of keys, of each
    head (its weight is one head's, or all heads') or with `norm_all` of all heads together; with
    `norm_last` after the angles.
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
    turned: int = 0
    norms: tuple[Norm, Norm] | None = None
    norm_all: bool = False
    norm_last: bool = False
    query_scale: QueryScale | None = None
    sinks: str | None = None


@dataclass(frozen=True)
class FeedForward:
    """`down(activation(up(x)))`, or with `gated` `down(activation(gate(x)) * rest(x))`.

    Of a gated one, `up` has two weights: the gate's, and the rest's. `activation`: one of the
    kernels' (`native/library.py`).
    """

    up: Linear
    down: Linear
    activation: str
    gated: bool


@dataclass(frozen=True)
class Layer:
    """Attention and feed-forward, each added to the residual stream times `residual`.

    Norms `before` stand before them, norms `after` before they are added; None for none.
    `parallel`: the feed-forward reads what the attention read, and without a norm of its own the
    attention's.
    """

    attention: Attention
    feed_forward: FeedForward
    attention_before: Norm | None
    feed_forward_before: Norm | None
    attention_after: Norm | None = None
    feed_forward_after: Norm | None = None
    parallel: bool = False
    residual: float = 1.0


@dataclass(frozen=True)
class Stack:
    """A causal language model.

    `embedding`: `[vocab, d]`, times `scale`. `positions`: `[positions, d]`, learned, added; None
    for none. `inside`: the name of the list of layers. `head`: `[vocab, d]`; logits are its results
    times `head_scale`, bent to stay below `softcap`.
    """

    embedding: str
    inside: str
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    scale: float = 1.0
    positions: str | None = None
    head_scale: float = 1.0
    softcap: float | None = None

    @property
    def rotaries(self) -> list[Rotary]:
        """Return the different angles of all layers, in the order of their first use."""
        found = [layer.attention.rotary for layer in self.layers]
        return list(dict.fromkeys(rotary for rotary in found if rotary is not None))

    @property
    def query_scale(self) -> QueryScale | None:
        """Return the queries' factor by position; all layers that have one have the same."""
        return next((layer.attention.query_scale for layer in self.layers), None)


def linears(stack: Stack) -> Iterator[tuple[Linear, bool]]:
    """Yield all weights in the order of a pass, the head last, and whether each is gated."""
    for layer in stack.layers:
        yield layer.attention.qkv, False
        yield layer.attention.out, False
        yield layer.feed_forward.up, layer.feed_forward.gated
        yield layer.feed_forward.down, False
    yield stack.head, False


def norms(stack: Stack) -> Iterator[Norm]:
    """Yield all norms."""
    for layer in stack.layers:
        of_layer = (
            layer.attention_before,
            layer.attention_after,
            layer.feed_forward_before,
            layer.feed_forward_after,
            *(layer.attention.norms or ()),
        )
        yield from (norm for norm in of_layer if norm is not None)
    yield stack.norm


def names(stack: Stack) -> set[str]:
    """Return the names of all parameters that a stack uses."""
    found = {stack.embedding, *([stack.positions] if stack.positions else [])}
    found |= {layer.attention.sinks for layer in stack.layers if layer.attention.sinks}
    for linear, _ in linears(stack):
        found |= {tensor.name for tensor in (*linear.weights, *linear.biases)}
    for norm in norms(stack):
        found |= {*norm.weights, *([norm.bias] if norm.bias else [])}
    return found


def rows_of(rows: Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a weight, `[outputs, inputs]`, or of a bias, `[outputs]`.

    `tensor`: the whole of it, as it is stored.
    """
    tensor = tensor.detach()
    if rows.transposed and tensor.dim() == 2:
        tensor = tensor.t()
    if rows.parts == 1:
        return tensor
    size = len(tensor) // rows.heads // rows.parts
    apart = tensor.reshape(rows.heads, rows.parts, size, *tensor.shape[1:])
    return apart[:, rows.part].reshape(rows.heads * size, *tensor.shape[1:])


def norm_weight(norm: Norm, parameter: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """Return a norm's weight in float32, flat; None for ones. `parameter`: gives one by name."""
    if not norm.weights:
        return None
    found = torch.cat([parameter(name).detach().float().flatten() for name in norm.weights])
    return found + 1 if norm.plus_one else found


def query_factors(scale: QueryScale, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors of queries at `positions`, in float32."""
    return 1 + scale.beta * torch.log(1 + torch.floor(positions.float() / scale.length))
