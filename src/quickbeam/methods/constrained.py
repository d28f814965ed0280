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
    asked = set[int]()  # nodes of the tree that the drafter was asked about
    distributions: DraftProbs | None = None
    while True:
        try:
            request = steps.send(distributions)
        except StopIteration as end:
            proposal: Proposal = end.value
            break
        distributions = yield from _answer(masks, request, asked)
    add_forced_runs(proposal.tree, context, budget, max_depth)
    return proposal


def add_forced_runs(tree: TokenTree, context: Context, budget: int, max_depth: int) -> None:
    """Add the tokens that are forced below the tree's leaves, as far as the budget allows.

    Where nodes have costs, only below leaves that are reached often enough.
    """
    node = 0
    while node < len(tree) < budget:
        value = tree.value[node]
        is_leaf = not tree.children[node] and tree.depth[node] < max_depth
        if is_leaf and (context.node_costs is None or value > context.node_cost(len(tree))):
            token = context.forced(tree.tokens(node))
            if token is not None:
                tree.add(node, token, GRAMMAR, value, probability=1.0)
        node += 1


def _answer(
    masks: Masks, request: DraftRequest, asked: set[int]
) -> Generator[DraftRequest, DraftProbs | None, DraftProbs | None]:
    """Answer one request: the drafter's distributions within the grammar, or the forced tokens.

    The drafter must be asked about a parent before its children. A node whose next token is forced
    was not asked about. If such nodes are on the way to the requested ones, they are asked about
    first. The request's expected gain is then divided among all these calls.
    """
    tree = request.tree
    count = len(request.nodes)
    forced = dict[int, int]()  # by row of the request: the only token
    free = dict[int, AllowedTokens]()  # by row: the tokens of which one may follow
    for row, node in enumerate(request.nodes):
        allowed = masks.find(tree.tokens(node))
        if allowed is None:
            continue
        if masks.forces(allowed):
            forced[row] = allowed.first
        if allowed.left > 1:
            free[row] = allowed
    next_nodes = [request.nodes[row] for row in free]
    calls = [*_not_asked(tree, next_nodes, asked), next_nodes] if next_nodes else []
    distributions: DraftProbs | None = None
    for nodes in calls:
        distributions = yield request._replace(nodes=nodes, gain=request.gain / len(calls))
        if distributions is None:
            break
        asked.update(nodes)
    if distributions is None:
        if next_nodes and not forced:
            return None
        nothing = torch.zeros(count, 1)
        return DraftProbs(nothing, torch.zeros(1, dtype=torch.long), vocab=1, forced=forced)
    masked = _masked(distributions, list(free.values()))
    rows = torch.tensor(list(free), device=masked.device)
    values = masked.new_zeros(count, masked.shape[1]).index_copy_(0, rows, masked)
    confidence = list[float]()
    if distributions.confidence:
        by_row = dict(zip(free, distributions.confidence, strict=True))
        confidence = [by_row.get(row, 1.0) for row in range(count)]
    return distributions._replace(values=values, forced=forced, confidence=confidence, likeliest=())


def _not_asked(tree: TokenTree, nodes: Sequence[int], asked: Collection[int]) -> list[list[int]]:
    """Return the nodes above `nodes` that the drafter was not asked about, in calls.

    Parents are in earlier calls than their children. None of `nodes` may be above another one.
    """
    paths = []  # for each node, those above it, from the top
    for node in nodes:
        path = list[int]()
        parent = tree.parent[node]
        while parent >= 0 and parent not in asked:
            path.append(parent)
            parent = tree.parent[parent]
        paths.append(path[::-1])
    # a call for the nodes of each depth; a shorter path has None there
    by_depth = zip_longest(*paths)
    return [sorted({node for node in nodes if node is not None}) for nodes in by_depth]


def _masked(distributions: DraftProbs, rows: Sequence[AllowedTokens]) -> torch.Tensor:
    """Return distributions `[m, s]` without the tokens that are banned in each row, renormalised.

    A row is zero where all its tokens are banned.
    """
    banned = torch.stack([allowed.banned for allowed in rows])
    if distributions.tokens is not None:
        banned = banned[:, distributions.tokens.cpu()]
    values = distributions.values.masked_fill(banned.to(distributions.values.device), 0.0)
    sums = values.sum(-1, keepdim=True)
    return values / sums.clamp_(min=torch.finfo(values.dtype).tiny)
