"""Does this machine keep the promise of bit-identical verification? Asked with small random
products, before anyone relies on it.

Large numbers among them cancel, so that what is left is mostly rounding, and nearly every change of
the order of a sum shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quickbeam.target.attention import Layer, Step, attend_grouped, cuts
from quickbeam.target.batch import Batch, Chain, Draft, Passed
from quickbeam.target.kv_cache import LayerShape, Pool
from quickbeam.target.kv_store import KVPool, KVStore
from quickbeam.target.linear import WIDEST, FastLinear, NativeLinear
from quickbeam.target.quantised import QuantisedLinear, is_whole, own_tensors
from quickbeam.tree import TokenTree

WIDTHS = (2, 4, 8, 16, 32, 64)
FEW = 16  # rows a part: with fewer, weights would be read too often
# outputs of which every row is looked at; of wider products a few rows are, since each reads all
# weights
NARROW = 4096
LOOKED_AT = (0, 62)  # these and the rows after them
# of a product that is made to look at (1 GiB): a wider one is taken to behave as the widest of that
# size
MOST_WEIGHTS = 1 << 29


class Promise(NamedTuple):
    """Whether verification is bit-identical here."""

    rows: int  # the fewest rows that a forward needs for it, 1 or 2
    broken: tuple[str, ...]  # what breaks it, in words; empty where it is kept
    wide: bool = False  # whether attention has to add the tree's values in float64 for it


class Runs(Protocol):
    """What `same_bits` asks of a model."""

    vocab_size: int
    pool: Pool

    @property
    def context_length(self) -> int | None: ...
    def forward(self, batch: Batch) -> list[Passed]: ...


def same_bits(model: Runs, prefix: int = 70, path: int = 3, nodes: int = 20) -> bool:
    """Whether a tree, beside another sequence, gives a path of its the bits that it has alone, one
    token at a time, asked of the whole model with its real shapes.

    The native kernels promise it by construction; this finds a compiler or a machine that does not
    keep it. A few prompts and passes.
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
    """Between these numbers of rows, a product gives each row the same bits."""

    least: int
    most: int  # 0: at no number of use


def examine(shapes: Iterable[LayerShape], modules: Iterable[nn.Module]) -> Promise:
    """Look at every kind of product that a model of these modules makes in bfloat16 on this CPU.

    Packed layers are told between which numbers of rows they keep the promise
    (`FastLinear.min_rows`, `max_rows`).
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
            continue  # by construction
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
        elif isinstance(module, nn.Linear | Conv1D) or any(
            _is_product(tensor) for tensor in own_tensors(module)
        ):
            broken.append(f"the products of {type(module).__name__} are not known")
    return Promise(rows, tuple(dict.fromkeys(broken)), wide)


def _is_product(tensor: torch.Tensor) -> bool:
    """Whether a module that is no linear has such weights for one: those of several experts, or
    quantised ones."""
    return (isinstance(tensor, nn.Parameter) and tensor.dim() > 2) or is_whole(tensor)


@functools.cache
def rows_alike(kind: str, inputs: int, outputs: int) -> Rows:
    """The numbers of rows, from one or two up, at which each row of such a product has the same
    bits.

    Kernels may choose their way by the number of outputs, so a wide product is looked at as it is,
    beside one of `NARROW` outputs.
    """
    found = _rows_alike(kind, inputs, min(outputs, NARROW), range(0, WIDTHS[-1], WIDTHS[0]))
    if outputs > NARROW:
        wide = _rows_alike(
            kind, inputs, max(NARROW, min(outputs, MOST_WEIGHTS // max(1, inputs))), LOOKED_AT
        )
        found = Rows(max(found.least, wide.least), min(found.most, wide.most))
    return found


def _rows_alike(kind: str, inputs: int, outputs: int, looked_at: Sequence[int]) -> Rows:
    """`rows_alike` of this number of outputs, from the rows at `looked_at` (even places) and those
    after them.

    Weights come in pairs of opposites and inputs in pairs of equals, so that nothing but rounding
    is left of any sum.
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
        """What the rows looked at give in parts of `rows`."""
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
    """A product of `outputs` outputs, whose weights repeat the rows of `block`: random numbers
    would take longer than the products."""
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
    """`[rows, terms]` bfloat16: small numbers, and among the last 16 of each row, in any order, six
    large ones and their opposites."""
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
    """Whether a path scattered over a random tree attends with the same bits as one token at a time
    (in `alone` rows), at several lengths of prefix. `wide`: with values added in float64."""
    generator = torch.Generator().manual_seed(0)
    layer, every = Layer(0, dim**-0.5), cuts(wide)
    for i in range(rounds):
        # kernels cut at 512
        prefix = (
            int(torch.randint(8, 1536, (1,), generator=generator)) if i % 3 else 508 + 512 * (i % 2)
        )
        prefix -= max(0, prefix % every + 8 - every)  # the path may not cross a cut
        n, depth = (48, 16, 13, 24, 9)[i % 5], 8  # kernels are chosen by the number of rows
        path = [
            0,
            *(torch.randperm(n - 1, generator=generator)[: depth - 1] + 1).sort().values.tolist(),
        ]
        # without keys all weights are 1
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
