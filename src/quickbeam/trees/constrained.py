"""Trees within a grammar: banned tokens are not proposed, and forced tokens are added without a
call of the drafter.

A token is forced where it is the only one that the grammar allows; only such tokens count as sure.
What llguidance would write next where the text is known and its tokens are not shows in its masks
already: they allow the canonical tokens of such a text and no others.

Policies need to know little of it. They are sent `Laws` with banned tokens struck out, and with
forced tokens in place of the drafter's; those become children of probability 1, whose source is the
grammar. No policy learns from them how often its own children are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from itertools import zip_longest

import torch

from quickbeam.draft.base import GRAMMAR, Context, DraftRequest, Laws
from quickbeam.grammar.masks import Masks, Place
from quickbeam.tree import TokenTree
from quickbeam.trees.base import Grown, Growth, TreePolicy

# situations that policies tell apart (`TreePolicy.situation`); further ones are of forced runs
USUAL = 5


def constrained(growth: Growth, masks: Masks, budget: int, max_depth: int) -> Growth:
    """A growth whose drafter keeps to a grammar. Where values don't rank its nodes, what is left of
    the budget goes to forced runs."""
    read = set[int]()  # nodes of its tree that the drafter has been asked for
    laws: Laws | None = None
    while True:
        try:
            request = growth.send(laws)
        except StopIteration as end:
            grown: Grown = end.value
            break
        laws = yield from _answer(masks, request, read)
    if grown.truth is None:
        lay_runs(grown.tree, masks, budget, max_depth)
    return grown


def situation(policy: TreePolicy, context: Context) -> int:
    """The policy's own, or a further one by the length of the forced run after the root: 1, 2 or 3,
    4 to 7, 8 tokens and more."""
    length, path = 0, list[int]()
    while length < 8 and (token := context.forced(path)) is not None:
        path.append(token)
        length += 1
    return USUAL - 1 + length.bit_length() if length else policy.situation(context)


def lay_runs(tree: TokenTree, masks: Masks, budget: int, max_depth: int) -> None:
    """Below the tree's leaves, the tokens that are forced there, as far as they go and there is
    room."""
    node = 0
    while node < len(tree) < budget:
        if (
            not tree.children[node]
            and tree.depth[node] < max_depth
            and (token := masks.forced(tree.tokens(node))) is not None
        ):
            tree.add(node, token, GRAMMAR, tree.value[node], probability=1.0)
        node += 1


def _answer(
    masks: Masks, request: DraftRequest, read: set[int]
) -> Generator[DraftRequest, Laws | None, Laws | None]:
    """Answer one request: of the drafter's laws what the grammar leaves, of forced tokens
    themselves.

    The drafter goes from parent to child. Nodes on the way that it was not asked for, as what
    follows them is forced, are asked for first; what is hoped of the request then counts for all of
    these calls.
    """
    tree = request.tree
    places = [masks.find(tree.tokens(node)) for node in request.nodes]
    forced = {
        row: place.first
        for row, place in enumerate(places)
        if place is not None and masks.forces(place)
    }
    rows = [row for row, place in enumerate(places) if place is not None and place.left > 1]
    due = [request.nodes[row] for row in rows]
    calls = [*_unread(tree, due, read), due] if due else []
    laws: Laws | None = None
    for nodes in calls:
        laws = yield request._replace(nodes=nodes, gain=request.gain / len(calls))
        if laws is None:
            break
        read.update(nodes)
    if laws is None:
        return (
            None
            if due and not forced
            else Laws(torch.zeros(len(places), 1), torch.zeros(1, dtype=torch.long), 1, forced)
        )
    masked = _masked(laws, [place for place in places if place is not None and place.left > 1])
    values = masked.new_zeros(len(places), masked.shape[1]).index_copy_(
        0, torch.tensor(rows, device=masked.device), masked
    )
    return laws._replace(values=values, forced=forced)


def _unread(tree: TokenTree, nodes: Sequence[int], read: Collection[int]) -> list[list[int]]:
    """The nodes above `nodes` that the drafter was not asked for, parents in earlier calls than
    children. None of `nodes` is above another one."""
    ways = []
    for node in nodes:
        way = list[int]()
        while (node := tree.parent[node]) >= 0 and node not in read:
            way.append(node)
        ways.append(way[::-1])
    return [sorted({node for node in call if node is not None}) for call in zip_longest(*ways)]


def _masked(laws: Laws, places: Sequence[Place]) -> torch.Tensor:
    """Laws `[m, s]` with the tokens struck out that are banned at these places, renormalised; zero
    where all are."""
    banned = torch.stack([place.banned for place in places])
    if laws.tokens is not None:
        banned = banned[:, laws.tokens.cpu()]
    values = laws.values.masked_fill(banned.to(laws.values.device), 0.0)
    return values / values.sum(-1, keepdim=True).clamp_(min=torch.finfo(values.dtype).tiny)
