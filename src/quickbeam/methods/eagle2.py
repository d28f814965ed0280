"""EAGLE-2's tree (2406.16858, §4).

It expands the likeliest nodes of each layer, then keeps the likeliest nodes of all layers.
"""

from __future__ import annotations

from quickbeam.drafters.base import Context, Drafter
from quickbeam.methods.acceptance import AcceptanceModel, printed_features
from quickbeam.methods.base import Method, Proposal, ProposalSteps
from quickbeam.methods.search import Search


class Eagle2(Method):
    """Expand layer by layer, then rerank.

    Expansion: the candidates after each node of a layer are its likeliest tokens. The `width`
    candidates whose paths are likeliest make the next layer, `depth` layers at most. Reranking: the
    tree is the likeliest candidates of all layers.

    Which candidates are kept depends on the tokens themselves. So they are deterministic proposals,
    never draws. The defaults 10 and 7 are those of EAGLE-2's code. A candidate that reranking would
    drop already is not expanded. Nodes are in order of worth.
    """

    def __init__(self, drafter: Drafter, width: int = 10, depth: int = 7) -> None:
        self.drafter = drafter
        self.sources = (drafter,)
        self.width = width
        self.depth = depth

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        search = Search(
            self.drafter, context, budget - 1, max_depth, AcceptanceModel(), printed_features
        )
        layer = [search.root] if search.size > 0 else []
        for depth in range(1, 1 + min(self.depth, max_depth)):
            if not layer:
                break
            # expansion
            yield from search.ask(layer, self.width)
            search.rank()
            layer = [path for path in search.best if path.depth == depth][: self.width]
        # reranking
        return Proposal(search.tree())
