"""Our own method: one tree of free candidates (`methods/free.py`) and of a drafter's.

All compete in one best-first search. Merging n-grams and last logits with a drafter's candidates by
calibrated value is ours. They cost nodes but no call. Where the text repeats itself for long, the
drafter is not asked at all.
"""

from __future__ import annotations

from quickbeam.drafters.answers import Answers
from quickbeam.drafters.base import Context, Drafter, SuccessorSource
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram
from quickbeam.drafters.own_text import OwnText
from quickbeam.drafters.prediction import Prediction, Skeletons
from quickbeam.drafters.recycling import Recycling
from quickbeam.methods.acceptance import AcceptanceModel
from quickbeam.methods.base import Method, ProposalSteps
from quickbeam.methods.free import FreeCandidates, free_tree
from quickbeam.methods.search import Search, best_first


class Auto(Method):
    """The search over a drafter's candidates and free ones.

    Without a drafter, what followed the same tokens elsewhere is among the free ones. Beside a
    drafter, which knows more, it gains less than the time that it takes.
    """

    uses_cost_model = True

    def __init__(self, drafter: Drafter | None = None) -> None:
        self.drafter = drafter
        self.last_logits = LastLogits()
        self.answers = Answers()
        self.predictions = [Prediction(), Skeletons()]
        self.successors = list[SuccessorSource]()
        if drafter is None:
            self.successors = [OwnText(), Recycling()]
        sources = (Ngram(), self.last_logits, self.answers, *self.successors, *self.predictions)
        self.sources = list(sources) if drafter is None else [drafter, *sources]
        self.model = AcceptanceModel()

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        free = FreeCandidates(
            context, self.last_logits, self.answers, self.successors, self.predictions
        )
        if self.drafter is None:
            return free_tree(context, budget, max_depth, self.model, free)
        search = Search(self.drafter, context, budget - 1, max_depth, self.model)
        return best_first(search, free.enter)
