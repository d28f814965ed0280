"""Prompt lookup: one chain, the continuation of the longest suffix match.

Under the measured budget another continuation may stand beside it (`methods/free.py`).
"""

from __future__ import annotations

from quickbeam.drafters.base import Context
from quickbeam.drafters.ngram import Ngram
from quickbeam.drafters.texts import AGREED
from quickbeam.methods.acceptance import AcceptanceModel
from quickbeam.methods.base import Method, ProposalSteps, without_calls
from quickbeam.methods.free import FreeCandidates, free_tree
from quickbeam.tree import TokenTree

LENGTH = 10  # tokens of the chain, as in transformers (`num_output_tokens`)


class PromptLookup(Method):
    """Drafts what followed the longest match that ends in the root (`NgramIndex.match`).

    It drafts at most `LENGTH` tokens. Where nodes have costs, it drafts the tokens that are worth
    theirs.
    """

    uses_cost_model = True

    def __init__(self) -> None:
        self.sources = (Ngram(),)
        self.model = AcceptanceModel()

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        if context.node_costs is not None:
            return free_tree(context, budget, max_depth, self.model, FreeCandidates(context))
        tree = TokenTree(context.ids[-1])
        index = context.states[Ngram.name]
        match = index.match(context.ids[-AGREED:])
        wanted = min(LENGTH, budget - 1, max_depth)
        if match and wanted > 0:
            tokens = context.within((), index.continuation(match, wanted))
            tree.add_path(0, tokens, Ngram.name, budget, max_depth)
        return without_calls(tree)
