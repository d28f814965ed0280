"""Checks whether this machine keeps the promise of bit-identical verification.

The checks run before anyone relies on the promise. Most of them are small random products. Large
numbers among the terms cancel, so that what is left of a sum is mostly rounding. So nearly every
change of the order of a sum shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quickbeam.models.attention import Layer, Step, attend_grouped, cuts
from quickbeam.models.batch import Batch, Chain, Draft, Passed
from quickbeam.models.kv_cache import LayerShape, Pool
from quickbeam.models.kv_store import KVPool, KVStore
from quickbeam.models.linear import WIDEST, FastLinear, NativeLinear
from quickbeam.models.quantised import QuantisedLinear, is_several, is_whole, own_tensors
from quickbeam.tree import TokenTree

WIDTHS = (2, 4, 8, 16, 32, 64)
FEW = 16  # the fewest rows of a part: with smaller parts, weights would be read too often
# up to so many outputs, every row of a product is checked; of wider products only a few rows are,
# since each product reads all weights
NARROW = 4096
LOOKED_AT = (0, 62)  # the few rows: these, and the one after each
# most weights of a product that is made for a check (1 GiB): a wider one is taken to behave as the
# widest of that size
MOST_WEIGHTS = 1 << 29


class Promise(NamedTuple):
    """Whether verification is bit-identical here."""

    rows: int  # the fewest rows that a forward needs to keep it, 1 or 2
    broken: tuple[str, ...]  # what breaks it, in words; empty where it is kept
    wide: bool = False  # whether attention must add the tree's values in float64 to keep it


class Runs(Protocol):
    """What `same_bits` needs of a model."""

    vocab_size: int
    pool: Pool

    @property
    def context_length(self) -> int | None: ...
    def forward(self, batch: Batch) -> list[Passed]: ...


def same_bits(model: Runs, prefix: int = 70, path: int = 3, nodes: int = 20) -> bool:
    """Whether a path of a tree gets the same bits beside another sequence as alone, token by token.

    The check runs the whole model with its real shapes, in a few passes. The native kernels promise
    the same bits by construction. The check finds a compiler or a machine that doesn't keep that
    promise.

    `prefix`: tokens before the tree, at most what the context has room for; `path`: tokens of the
    path below the root; `nodes`: the most nodes of the tree.
    """
    prefix = max(2, min(prefix, (model.context_length or prefix + nodes) - nodes))
    ids = [(7919 * i + 13) % model.vocab_size for i in range(prefix + path + 1)]
    text, tokens = ids[:prefix], ids[prefix:]
    alone, beside, other = (model.pool.new() for _ in range(3))
    model.forward(Batch([Chain(alone, text)]))
    alone.commit(range(prefix))
    expected = []
    for token in tokens:
        (passed,) = model.forward(Batch([Draft(alone, TokenTree(token))]))
        expected.append(passed.logits[0].clone())
        alone.commit([0])
    half = prefix // 2
    model.forward(Batch([Chain(other, text[half:]), Chain(beside, text[:half])]))
    beside.commit(range(half))
    model.forward(Batch([Chain(beside, text[half:])]))
    beside.commit(range(prefix - half))
    tree, tips = TokenTree(tokens[0]), [0]
    for i, token in enumerate(tokens[1:], 1):
        for _ in range((nodes - path - 1) // (2 * path)):
            noise = (token + len(tree)) % model.vocab_size
            if noise != token and tree.child(tips[-1], noise) is None:
                tree.add(tree.add(tips[-1], noise, "probe"), tokens[i - 1], "probe")
        tips.append(tree.add(tips[-1], token, "probe"))
    passed, _ = model.forward(Batch([Draft(beside, tree), Chain(other, text[:half])]))
    for cache in (alone, beside, other):
        cache.release()
    return torch.equal(passed.logits[tips], torch.stack(expected))


class Rows(NamedTuple):
    """The numbers of rows between which a product gives each row the same bits."""

    least: int
    most: int  # 0 where there are none


def examine(shapes: Iterable[LayerShape], modules: Iterable[nn.Module]) -> Promise:
    """Check every kind of product that a model makes in bfloat16 on this CPU.

    `shapes`: those of the model's attention layers; empty where the native kernels attend.
    `modules`: all of its modules. Sets `min_rows` and `max_rows` of each `FastLinear`: between
    these numbers of rows, it keeps the promise.
    """
    dims = sorted({dim for shape in shapes for dim in (shape.key_dim, shape.value_dim)})
    wide = not all(attention_is_order_free(dim) for dim in dims)
    broken = [
        f"attention of {dim} dimensions a head"
        for dim in dims
        if not attention_is_order_free(dim, wide=wide)
    ]
    rows = 1 if all(attention_is_order_free(dim, alone=1, wide=wide) for dim in dims) else 2
    for module in modules:
        if isinstance(module, NativeLinear | QuantisedLinear):
            continue  # these keep the promise by construction
        if isinstance(module, FastLinear | nn.Linear | Conv1D) and type(module) in (
            FastLinear,
            nn.Linear,
            Conv1D,
        ):
            conv = isinstance(module, Conv1D)
            inputs, outputs = (
                module.weight.shape if conv else (module.in_features, module.out_features)
            )
            packed = isinstance(module, FastLinear) and module.packed
            found = rows_alike(
                "conv" if conv else "packed" if packed else "plain", int(inputs), int(outputs)
            )
            if found.most < (FEW if isinstance(module, FastLinear) else WIDTHS[-1]):
                broken.append(f"products of {inputs} inputs and {outputs} outputs")
            elif isinstance(module, FastLinear):
                module.min_rows, module.max_rows = (
                    found.least,
                    found.most if found.most < WIDTHS[-1] else WIDEST,
                )
            else:
                rows = max(rows, found.least)
        elif any(is_several(module, tensor) for tensor in own_tensors(module)):
            broken.append(
                f"the experts of {type(module).__name__} (a row's bits depend on how many rows an "
                "expert gets)"
            )
        elif isinstance(module, nn.Linear | Conv1D) or any(
            _is_product(tensor) for tensor in own_tensors(module)
        ):
            broken.append(f"the products of {type(module).__name__} are not known")
    return Promise(rows, tuple(dict.fromkeys(broken)), wide)


def _is_product(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a module that is no linear layer is nevertheless a weight of products.

    These are the weights of convolutions, and quantised ones.
    """
    return (isinstance(tensor, nn.Parameter) and tensor.dim() > 2) or is_whole(tensor)


@functools.cache
def rows_alike(kind: str, inputs: int, outputs: int) -> Rows:
    """Return the numbers of rows at which each row of such a product has the same bits.

    The first of them is one or two. `kind`: `plain` (`nn.Linear`), `packed` (`FastLinear`) or
    `conv` (`Conv1D`). Kernels may be chosen by the number of outputs. So a wide product is checked
    at its own width, and at `NARROW` outputs as well.
    """
    found = _rows_alike(kind, inputs, min(outputs, NARROW), range(0, WIDTHS[-1], WIDTHS[0]))
    if outputs > NARROW:
        wide = _rows_alike(
            kind, inputs, max(NARROW, min(outputs, MOST_WEIGHTS // max(1, inputs))), LOOKED_AT
        )
        found = Rows(max(found.least, wide.least), min(found.most, wide.most))
    return found


def _rows_alike(kind: str, inputs: int, outputs: int, looked_at: Sequence[int]) -> Rows:
    """Return what `rows_alike` does, checked at this number of outputs alone.

    `looked_at`: numbers of rows, even ones; these rows and the one after each are checked. Weights
    come in pairs of opposites and inputs in pairs of equals, so that nothing but rounding is left
    of any sum.
    """
    generator = torch.Generator().manual_seed(0)
    half, block = inputs // 2, min(outputs, NARROW)
    places = torch.randperm(inputs, generator=generator)[: 2 * half]
    weight, x = torch.zeros(block, inputs), torch.zeros(WIDTHS[-1], inputs)
    weight[:, places] = torch.randn(block, half, generator=generator).repeat(1, 2)
    weight[:, places[half:]] *= -1
    magnitude = 2.0 ** torch.randint(8, (len(x), half), generator=generator)
    x[:, places] = (torch.randn(len(x), half, generator=generator) * magnitude).repeat(1, 2)
    product, x = _product(kind, weight.bfloat16(), outputs), x.bfloat16()
    seen = [row for at in looked_at for row in (at, at + 1)]

    def by(rows: int) -> torch.Tensor:
        """Return the checked rows, computed in parts of `rows`."""
        parts = {
            start: product(x[start : start + rows].contiguous())
            for start in {row // rows * rows for row in seen}
        }
        return torch.stack([parts[row // rows * rows][row % rows] for row in seen])

    pairs = by(WIDTHS[0])
    alike = list(takewhile(lambda rows: torch.equal(by(rows), pairs), WIDTHS))
    return Rows(1 if torch.equal(by(1), pairs) else 2, alike[-1] if alike else 0)


def _product(
    kind: str, block: torch.Tensor, outputs: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a product of `outputs` outputs, whose weights repeat the rows of `block`.

    Random numbers for all weights would take longer than the products.
    """
    linear = nn.Linear(block.shape[1], outputs, bias=False, dtype=torch.bfloat16, device="meta")
    weight = block.repeat(-(-outputs // len(block)), 1)[:outputs]
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if kind == "packed":
        return FastLinear(linear)
    if kind == "conv":
        transposed, none = weight.t().contiguous(), torch.zeros(outputs, dtype=torch.bfloat16)
        return functools.partial(torch.addmm, none, mat2=transposed)
    return linear


def cancelling(rows: int, terms: int, generator: torch.Generator) -> torch.Tensor:
    """Return `[rows, terms]` bfloat16: small numbers, and large ones that cancel.

    Six large numbers and their opposites are among the last 16 of each row, in random order.
    """
    small = torch.randn(rows, terms, generator=generator)
    large = torch.randn(rows, 6, generator=generator) * 2.0 ** torch.randint(
        8, 20, (rows, 6), generator=generator
    )
    end = min(16, terms)
    order = torch.rand(rows, end, generator=generator).argsort(-1)
    mixed = torch.cat([large, -large, small[:, : max(0, end - 12)]], 1)[:, :end].gather(1, order)
    return torch.cat([small[:, :-end], mixed], 1).bfloat16()


@functools.cache
def attention_is_order_free(dim: int, alone: int = 2, wide: bool = False, rounds: int = 24) -> bool:
    """Whether attention gives a path in a tree the same bits as one token at a time.

    The path is scattered over a random tree, behind prefixes of several lengths, in `rounds`
    rounds. `dim`: numbers of a head. `alone`: rows of a pass of one token. `wide`: add values in
    float64 (`attend_grouped`).
    """
    generator = torch.Generator().manual_seed(0)
    layer, every = Layer(0, dim**-0.5), cuts(wide)
    for i in range(rounds):
        # kernels cut sums at 512: a third of the prefixes end just before a multiple of it
        prefix = (
            int(torch.randint(8, 1536, (1,), generator=generator)) if i % 3 else 508 + 512 * (i % 2)
        )
        prefix -= max(0, prefix % every + 8 - every)  # the path may not cross a cut
        n, depth = (48, 16, 13, 24, 9)[i % 5], 8  # kernels are chosen by the number of rows
        path = [
            0,
            *(torch.randperm(n - 1, generator=generator)[: depth - 1] + 1).sort().values.tolist(),
        ]
        # keys are zero in every other round, so that all weights are 1
        keys = torch.randn(2, prefix + depth, dim, generator=generator).bfloat16() * (i % 2)
        values = cancelling(2 * dim, prefix + depth, generator).view(2, dim, -1).transpose(1, 2)
        query = torch.randn(depth, 2 * (1 + i % 3), dim, generator=generator).bfloat16()
        certain = _store(keys, values, prefix)
        single = []
        for d in range(depth):
            step = Step(
                certain,
                torch.tensor([prefix + d] * alone),
                torch.eye(alone, dtype=torch.bool),
                exact=True,
                wide=wide,
            )
            certain.write(
                0,
                step.rows,
                *(row[:, prefix + d, None].expand(-1, alone, -1) for row in (keys, values)),
            )
            single.append(
                attend_grouped(query[d].expand(alone, -1, -1).contiguous(), step, layer)[0]
            )
            certain.commit([0])
        shared = _store(keys, values, prefix)
        at = torch.zeros(n, dtype=torch.int64)
        at[path] = torch.arange(depth)
        visible = torch.eye(n, dtype=torch.bool)
        for d, node in enumerate(path):
            visible[node, path[: d + 1]] = True
        step = Step(shared, prefix + at, visible, exact=True, wide=wide)
        shared.write(
            0,
            step.rows,
            *(torch.randn(2, n, dim, generator=generator).bfloat16() for _ in range(2)),
        )
        shared.write(0, step.rows[path], keys[:, prefix:], values[:, prefix:])
        queries = torch.randn(n, query.shape[1], dim, generator=generator).bfloat16()
        queries[path] = query
        if not torch.equal(attend_grouped(queries, step, layer)[path], torch.stack(single)):
            return False
    return True


def _store(keys: torch.Tensor, values: torch.Tensor, prefix: int) -> KVStore:
    shape = LayerShape(keys.shape[0], keys.shape[2], values.shape[2])
    store = KVPool([shape], torch.bfloat16, torch.device("cpu"), pairwise=True).new()
    store.reserve(prefix + 64)
    store.write(0, store.rows(range(prefix)), keys[:, :prefix], values[:, :prefix])
    store.length = prefix
    return store
