"""The draft tree: flat lists in which parents come before children."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class TokenTree:
    """A draft tree: tokens drafted after the last committed token, which is the root.

    Node 0 is the root. Its token is already emitted, but the target has not yet computed its keys
    and values. Each node has an entry in these parallel lists:

    - `token`: the token id.
    - `parent`: the parent's index, always an earlier node; -1 for the root.
    - `depth`: 0 for the root.
    - `source`: the name of the source that proposed it.
    - `value`: the estimated probability that verification reaches and accepts it.
    - `probability`: the probability that its source gave the token.
    - `probs`: for a drawn node, the distribution `q` `[vocab]` that it was drawn from, before the
      tokens of earlier siblings are removed. For a deterministic proposal (n-grams, last logits) it
      is `None`: all probability is on its token.
    - `children`: for each node, its children by token, in the order of proposal. No two siblings
      share a token.
    """

    def __init__(self, root: int) -> None:
        self.token = [root]
        self.parent = [-1]
        self.depth = [0]
        self.source = ["root"]
        self.value = [1.0]
        self.probability = [1.0]
        self.probs: list[torch.Tensor | None] = [None]
        self.children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.token)

    def add(
        self,
        parent: int,
        token: int,
        source: str,
        value: float = 0.0,
        probs: torch.Tensor | None = None,
        probability: float | None = None,
    ) -> int:
        """Append a node and return its index.

        If `probability` is not given, it is `value` divided by the parent's value. Raises
        `ValueError` for a parent that does not exist and for a token that a sibling already holds.
        """
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
        self.probs.append(probs)
        self.children.append({})
        self.children[parent][token] = node
        return node

    def add_path(
        self, node: int, tokens: Iterable[int], source: str, budget: int, max_depth: int
    ) -> int:
        """Add tokens below `node`, one below the other, and return the last one's node.

        Nodes that already hold the same tokens are shared, whoever proposed them. The path ends
        early where the tree has `budget` nodes or the next one would be deeper than `max_depth`.
        """
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                if len(self) >= budget or self.depth[node] >= max_depth:
                    break
                child = self.add(node, token, source)
            node = child
        return node

    def first(self, count: int) -> TokenTree:
        """Return a tree of the first `count` nodes."""
        tree = TokenTree(self.token[0])
        for node in range(1, min(count, len(self))):
            tree.add(
                self.parent[node],
                self.token[node],
                self.source[node],
                self.value[node],
                self.probs[node],
                self.probability[node],
            )
        return tree

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that holds `token`, or None."""
        return self.children[node].get(token)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root down to `node`, both included."""
        nodes = [node]
        while (node := self.parent[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def tokens(self, node: int) -> list[int]:
        """Return the tokens on the path to `node`. The root's is left out."""
        return [self.token[i] for i in self.path(node)[1:]]

    def visible(self) -> torch.Tensor:
        """Return the tree's attention mask, `[n, n]` bool.

        Row i marks the nodes that node i attends to: its ancestors and itself.
        """
        mask = torch.eye(len(self), dtype=torch.bool)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parent[node]]
        return mask
