"""Does this machine keep the promise of bit-identical verification? Asked with small random products, before anyone relies on it.

Large numbers among them cancel, so that what is left is mostly rounding, and nearly every change of the order of a sum shows.
"""

from __future__ import annotations

import functools

import torch

from quickbeam.target.attention import SPLIT, Layer, Step, attend_grouped
from quickbeam.target.linear import FastLinear
from quickbeam.target.store import KVStore, LayerShape


def violations(head_dims: list[int], hidden: int, inner: int) -> list[str]:
    """What is not order-free in bfloat16 on this CPU, in words; empty where verification is bit-identical."""
    return list(_violations(tuple(head_dims), hidden, inner, torch.get_num_threads()))


@functools.cache
def _violations(head_dims: tuple[int, ...], hidden: int, inner: int, threads: int) -> tuple[str, ...]:
    found = [f"attention of {dim} dimensions a head" for dim in head_dims if not attention_is_order_free(dim)]
    shapes = {(hidden, hidden)} | ({(hidden, inner), (inner, hidden)} if inner else set())
    found += [f"products of {width} inputs" for width, out in sorted(shapes) if not linear_is_row_wise(width, out)]
    return tuple(found)


def linear_is_row_wise(inputs: int, outputs: int) -> bool:
    """Whether a row of `x @ weight.T` has the same bits at any number of rows from 2 up."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(inputs, min(outputs, 256), bias=False, dtype=torch.bfloat16)
    linear.weight.data = torch.randn(linear.weight.shape, generator=generator).bfloat16()
    fast = FastLinear(linear)
    x = cancelling(65, inputs, generator)
    whole = fast.forward(x)
    return all(torch.equal(fast.forward(x[:rows].contiguous()), whole[:rows]) for rows in (2, 3, 5, 8, 16, 17, 33, 64))


def cancelling(rows: int, terms: int, generator: torch.Generator) -> torch.Tensor:
    """`[rows, terms]` bfloat16: small numbers, and among the last 16 of each row, in any order, six large ones and their opposites."""
    small = torch.randn(rows, terms, generator=generator)
    large = torch.randn(rows, 6, generator=generator) * 2.0 ** torch.randint(8, 20, (rows, 6), generator=generator)
    end = min(16, terms)
    order = torch.rand(rows, end, generator=generator).argsort(-1)
    mixed = torch.cat([large, -large, small[:, : max(0, end - 12)]], 1)[:, :end].gather(1, order)
    return torch.cat([small[:, :-end], mixed], 1).bfloat16()


def attention_is_order_free(dim: int, rounds: int = 24, seed: int = 0) -> bool:
    """Whether a path scattered over a random tree attends with the same bits as one token at a time, at several lengths of prefix."""
    generator = torch.Generator().manual_seed(seed)
    layer = Layer(0, dim**-0.5)
    for i in range(rounds):
        prefix = int(torch.randint(8, 4 * SPLIT, (1,), generator=generator)) if i % 3 else 508 + 512 * (i % 2)  # kernels cut at 512
        prefix -= max(0, prefix % SPLIT + 8 - SPLIT)  # the path may not cross a cut
        n, depth = 48, 8
        path = [0, *(torch.randperm(n - 1, generator=generator)[: depth - 1] + 1).sort().values.tolist()]
        keys = torch.randn(2, prefix + depth, dim, generator=generator).bfloat16() * (i % 2)  # without keys all weights are 1
        values = cancelling(2 * dim, prefix + depth, generator).view(2, dim, -1).transpose(1, 2)
        query = torch.randn(depth, 2 * (1 + i % 3), dim, generator=generator).bfloat16()
        alone = _store(keys, values, prefix)
        single = []
        for d in range(depth):
            twin = torch.tensor([prefix + d] * 2)
            step = Step(alone, twin, torch.eye(2, dtype=torch.bool), exact=True)
            both = [row[:, prefix + d].unsqueeze(1).expand(-1, 2, -1) for row in (keys, values)]
            alone.write(0, step.rows, both[0], both[1])
            single.append(attend_grouped(query[d].expand(2, -1, -1).contiguous(), step, layer)[0])
            alone.commit([0])
        shared = _store(keys, values, prefix)
        at = torch.zeros(n, dtype=torch.int64)
        at[path] = torch.arange(depth)
        visible = torch.eye(n, dtype=torch.bool)
        for d, node in enumerate(path):
            visible[node, path[: d + 1]] = True
        step = Step(shared, prefix + at, visible, exact=True)
        shared.write(0, step.rows, *(torch.randn(2, n, dim, generator=generator).bfloat16() for _ in range(2)))
        shared.write(0, step.rows[path], keys[:, prefix:], values[:, prefix:])
        queries = torch.randn(n, query.shape[1], dim, generator=generator).bfloat16()
        queries[path] = query
        if not torch.equal(attend_grouped(queries, step, layer)[path], torch.stack(single)):
            return False
    return True


def _store(keys: torch.Tensor, values: torch.Tensor, prefix: int) -> KVStore:
    store = KVStore([LayerShape(keys.shape[0], keys.shape[2], values.shape[2])], torch.bfloat16, torch.device("cpu"), pairwise=True)
    store.reserve(prefix + 64)
    store.write(0, store.rows(range(prefix)), keys[:, :prefix], values[:, :prefix])
    store.length = prefix
    return store
