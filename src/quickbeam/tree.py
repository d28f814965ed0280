"""The draft tree: flat arrays, parents before children. Knows nothing of models."""

from __future__ import annotations

import torch


class TokenTree:
    """Tokens drafted after a committed one, the root.

    Node 0 is the root: a token that is already emitted but whose KV row the target has not
    computed. Parallel lists hold a node's `token`, `parent` (always an earlier node; -1 for the
    root), `depth` (0 for the root), `source` (who proposed it), `value` (the estimated probability
    that it is reached), `probability` (what its source gave its token) and `law`: for a drawn node
    the `[vocab]` distribution `q` that it was drawn from, before its earlier siblings are struck
    out; `None` for a deterministic proposal (n-grams, last logits), whose distribution is the point
    mass on its token. Children keep the order of proposal, and siblings never share a token.
    """

    def __init__(self, root: int) -> None:
        self.token = [root]
        self.parent = [-1]
        self.depth = [0]
        self.source = ["root"]
        self.value = [1.0]
        self.probability = [1.0]
        self.law: list[torch.Tensor | None] = [None]
        self.children: list[dict[int, int]] = [{}]  # by token, in the order of proposal

    def __len__(self) -> int:
        return len(self.token)

    def add(
        self,
        parent: int,
        token: int,
        source: str,
        value: float = 0.0,
        law: torch.Tensor | None = None,
        probability: float | None = None,
    ) -> int:
        """Append a node and return its index. Without a `probability` it is `value` over the
        parent's. Raises `ValueError` for a parent that is not there or a duplicate sibling."""
        if not 0 <= parent < len(self.token):
            raise ValueError(f"parent {parent} is not a node of this tree of {len(self.token)}")
        if token in self.children[parent]:
            raise ValueError(f"node {parent} already has a child with token {token}")
        node = len(self.token)
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.source.append(source)
        self.value.append(value)
        if probability is None:
            probability = value / self.value[parent] if self.value[parent] else 0.0
        self.probability.append(probability)
        self.law.append(law)
        self.children.append({})
        self.children[parent][token] = node
        return node

    def first(self, count: int) -> TokenTree:
        """The tree of the first `count` nodes."""
        tree = TokenTree(self.token[0])
        for node in range(1, min(count, len(self))):
            tree.add(
                self.parent[node],
                self.token[node],
                self.source[node],
                self.value[node],
                self.law[node],
                self.probability[node],
            )
        return tree

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if there is one."""
        return self.children[node].get(token)

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, both included."""
        nodes = [node]
        while (node := self.parent[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def tokens(self, node: int) -> list[int]:
        """Tokens below the root, down to `node`."""
        return [self.token[i] for i in self.path(node)[1:]]

    @property
    def is_chain(self) -> bool:
        """Whether every node but the last has one child."""
        return self.parent == list(range(-1, len(self.token) - 1))

    def visible(self) -> torch.Tensor:
        """`[n, n]` bool: row i marks the nodes that node i attends to, its ancestors and itself."""
        n = len(self.token)
        if self.is_chain:
            return torch.ones(n, n, dtype=torch.bool).tril_()
        sees = torch.eye(n, dtype=torch.bool)
        for node in range(1, n):
            sees[node] |= sees[self.parent[node]]
        return sees
