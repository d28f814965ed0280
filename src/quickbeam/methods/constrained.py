"""Trees within a grammar: no banned token is proposed, and forced tokens need no drafter's call.

A token is forced if it is the only one that the grammar allows. Where the grammar fixes the text
that comes next, llguidance's masks allow the canonical tokens of the text and no others.

The `DraftProbs` that methods are sent have banned tokens removed, and forced tokens in place of the
drafter's. Forced tokens become children of probability 1 whose source is the grammar. No method
counts them when it learns how often its own children are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from itertools import zip_longest

import torch

from quickbeam.drafters.base import GRAMMAR, Context, DraftProbs, DraftRequest
from quickbeam.grammar.masks import AllowedTokens, Masks
from quickbeam.methods.base import Proposal, ProposalSteps
from quickbeam.tree import TokenTree


def constrained(
    steps: ProposalSteps, context: Context, budget: int, max_depth: int
) -> ProposalSteps:
    """Wrap a method's steps so that the drafter keeps to the context's grammar.

    What is left of the budget goes to forced runs.
    """
    masks = context.grammar
    assert masks is not None
    read = set[int]()  # nodes of its tree that the drafter was asked about
    distributions: DraftProbs | None = None
    while True:
        try:
            request = steps.send(distributions)
        except StopIteration as end:
            proposal: Proposal = end.value
            break
        distributions = yield from _answer(masks, request, read)
    add_forced_runs(proposal.tree, context, budget, max_depth)
    return proposal


def add_forced_runs(tree: TokenTree, context: Context, budget: int, max_depth: int) -> None:
    """Add the tokens that are forced below the tree's leaves, as long as there is room.

    Where nodes have costs, only below leaves that are reached often enough.
    """
    node = 0
    while node < len(tree) < budget:
        if (
            not tree.children[node]
            and tree.depth[node] < max_depth
            and (context.node_costs is None or tree.value[node] > context.node_cost(len(tree)))
            and (token := context.forced(tree.tokens(node))) is not None
        ):
            tree.add(node, token, GRAMMAR, tree.value[node], probability=1.0)
        node += 1


def _answer(
    masks: Masks, request: DraftRequest, read: set[int]
) -> Generator[DraftRequest, DraftProbs | None, DraftProbs | None]:
    """Answer one request: the drafter's distributions within the grammar, or the forced tokens.

    The drafter must be asked about a parent before its children. A node whose next token is forced
    was not asked about. If such nodes are on the way to the requested ones, they are asked about
    first. The request's expected gain is then divided among all these calls.
    """
    tree = request.tree
    places = [masks.find(tree.tokens(node)) for node in request.nodes]
    known = [(row, place) for row, place in enumerate(places) if place is not None]
    forced = {row: place.first for row, place in known if masks.forces(place)}
    free = {row: place for row, place in known if place.left > 1}
    next_nodes = [request.nodes[row] for row in free]
    calls = [*_unread(tree, next_nodes, read), next_nodes] if next_nodes else []
    distributions: DraftProbs | None = None
    for nodes in calls:
        distributions = yield request._replace(nodes=nodes, gain=request.gain / len(calls))
        if distributions is None:
            break
        read.update(nodes)
    if distributions is None:
        if next_nodes and not forced:
            return None
        return DraftProbs(torch.zeros(len(places), 1), torch.zeros(1, dtype=torch.long), 1, forced)
    masked = _masked(distributions, list(free.values()))
    values = masked.new_zeros(len(places), masked.shape[1]).index_copy_(
        0, torch.tensor(list(free), device=masked.device), masked
    )
    confidence = dict(zip(free, distributions.confidence, strict=False))
    every = [confidence.get(row, 1.0) for row in range(len(places))] if confidence else ()
    return distributions._replace(values=values, forced=forced, confidence=every)


def _unread(tree: TokenTree, nodes: Sequence[int], read: Collection[int]) -> list[list[int]]:
    """Return the nodes above `nodes` that the drafter was not asked about, in calls.

    Parents are in earlier calls than their children. None of `nodes` may be above another one.
    """
    ways = []
    for node in nodes:
        way = list[int]()
        while (node := tree.parent[node]) >= 0 and node not in read:
            way.append(node)
        ways.append(way[::-1])
    return [sorted({node for node in call if node is not None}) for call in zip_longest(*ways)]


def _masked(distributions: DraftProbs, places: Sequence[AllowedTokens]) -> torch.Tensor:
    """Return distributions `[m, s]` without the tokens banned at these places, renormalised.

    A row is zero where all its tokens are banned.
    """
    banned = torch.stack([place.banned for place in places])
    if distributions.tokens is not None:
        banned = banned[:, distributions.tokens.cpu()]
    values = distributions.values.masked_fill(banned.to(distributions.values.device), 0.0)
    return values / values.sum(-1, keepdim=True).clamp_(min=torch.finfo(values.dtype).tiny)
