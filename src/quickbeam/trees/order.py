"""In which order a tree's tokens lie in memory: what attention kernels pay for is blocks of the
mask that aren't empty (DySpec, App. C).

An order is a permutation: `order[position]` is the node stored there, parents before children.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quickbeam.tree import TokenTree


def depth_first(tree: TokenTree) -> list[int]:
    """Each node directly before its first child, children in the order of proposal. Earlier
    siblings usually have the larger subtrees, which makes this nearly as good as heavy paths for
    trees drafted in order of worth."""
    return _walk([list(children.values()) for children in tree.children])


def heavy_path(tree: TokenTree) -> list[int]:
    """Depth-first, children in the order of their subtrees' sizes, the largest first: a heavy-path
    decomposition, each path contiguous."""
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
    """How many blocks of `size` by `size` entries of the tree's attention mask `[n, n]` aren't
    empty, its tokens stored in `order`.

    `None` leaves them in the order they were drafted in.
    """
    visible = tree.visible()
    if order is not None:
        index = torch.tensor(order)
        visible = visible[index][:, index]
    rows, columns = visible.nonzero(as_tuple=True)
    return len(torch.unique(rows // size * len(tree) + columns // size))
