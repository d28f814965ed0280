"""The shadow of a draft tree: those of its nodes that a drafter was asked for, as it runs them."""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.models.base import Draft
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.tree import TokenTree


class ShadowTree:
    """The rows of a drafter whose keys and values lie behind its committed tokens.

    They begin with a chain of committed tokens that have no keys and values yet. It ends in the
    root of the draft `tree`. Below it are the requested nodes, in the order of the requests.
    `rows`: the tree of all of them. `run`: how many of them were run.
    """

    def __init__(self, tree: TokenTree, chain: Sequence[int], source: str, run: int = 0) -> None:
        self.tree = tree
        self.run = run
        self._source = source
        self.rows = TokenTree(chain[0])
        for token in chain[1:]:
            self.rows.add(len(self.rows) - 1, token, source)
        self._row_of_node = {0: len(self.rows) - 1}

    def add(self, nodes: Sequence[int], largest: int | None = None) -> None:
        """Add requested nodes. Those that it has already are of a call that failed.

        `largest`: the token that stands for larger ones. Raises `ValueError` for a node whose
        parent was not requested.
        """
        for node in nodes:
            if node in self._row_of_node:
                continue
            parent = self.tree.parent[node]
            token = self.tree.token[node]
            if parent not in self._row_of_node:
                raise ValueError(f"nodes {list(nodes)}: ask for their parents first")
            if largest is not None:
                token = min(token, largest)
            row = self.rows.add(self._row_of_node[parent], token, self._source)
            self._row_of_node[node] = row

    def parent_rows(self, nodes: Sequence[int]) -> list[int]:
        """Return the rows of the nodes' parents. Raises `ValueError` for rows that were not run."""
        rows = [self._row_of_node.get(self.tree.parent[node], self.run) for node in nodes]
        if max(rows) >= self.run:
            raise ValueError(f"nodes {list(nodes)}: ask for their parents first")
        return rows

    def part(self, cache: SequenceCache) -> Draft:
        """Return the rows that were not run yet as a part of a pass."""
        return Draft(cache, self.rows, self.run)

    def accepted(self, tokens: Sequence[int]) -> list[int]:
        """Return the rows that were run and begin the committed `tokens`, its first row first."""
        path = list[int]()
        for token in tokens:
            row = self.rows.child(path[-1], token) if path else 0
            if row is None or row >= self.run or self.rows.token[row] != token:
                break
            path.append(row)
        return path
