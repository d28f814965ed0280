"""The order in which a tree's tokens lie in memory.

An attention kernel pays for those blocks of the mask that are not empty (DySpec, App. C). Their
number depends on the order.

An order is a permutation: `order[position]` is the node stored there, and parents come before
children.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quickbeam.tree import TokenTree


def depth_first(tree: TokenTree) -> list[int]:
    """Return the order in which each node stands directly before its first child.

    Children keep the order of proposal. Earlier siblings usually have the larger subtrees. So for
    trees drafted in order of worth this is nearly as good as heavy paths.
    """
    return _walk([list(children.values()) for children in tree.children])


def heavy_path(tree: TokenTree) -> list[int]:
    """Return the depth-first order in which children with larger subtrees come first.

    This is a heavy-path decomposition: each path is contiguous.
    """
    size = [1] * len(tree)
    for node in range(len(tree) - 1, 0, -1):
        size[tree.parent[node]] += size[node]
    return _walk(
        [sorted(children.values(), key=lambda child: -size[child]) for children in tree.children]
    )


def _walk(children: list[list[int]]) -> list[int]:
    order, ahead = list[int](), [0]
    while ahead:
        order.append(ahead.pop())
        ahead += reversed(children[order[-1]])
    return order


def mask_blocks(tree: TokenTree, order: Sequence[int] | None = None, size: int = 32) -> int:
    """Return how many blocks of `size` by `size` entries of the tree's attention mask are not
    empty.

    The mask is `[n, n]`, with the tokens stored in `order`. `None` keeps the order in which they
    were drafted.
    """
    visible = tree.visible()
    if order is not None:
        index = torch.tensor(order)
        visible = visible[index][:, index]
    rows, columns = visible.nonzero(as_tuple=True)
    return len(torch.unique(rows // size * len(tree) + columns // size))
