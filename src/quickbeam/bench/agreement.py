"""How often the drafter's likeliest token is the target's, at every token of an answer.

The first nodes of draft trees don't show that. A step begins where the last draft was rejected or
ended, so the root stands before hard tokens more often than not. The easy tokens are drafted deeper
in the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quickbeam.bench.questions import Question
from quickbeam.draft.base import Context, DraftRequest
from quickbeam.engine.output import Output
from quickbeam.engine.sequence import Request
from quickbeam.engine.trace import StepRecord
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.trees.base import Grown, Growth
from quickbeam.trees.drafted import DraftedPolicy

if TYPE_CHECKING:
    from quickbeam.llm import LLM


@dataclass
class Agreement:
    """Counts over plain greedy answers, by category.

    `tokens` counts all tokens but the first of each answer. `agreed` counts those of them that were
    the drafter's likeliest token.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    agreed: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.tokens.values())

    @property
    def share(self) -> float | None:
        return sum(self.agreed.values()) / self.count if self.count else None

    @property
    def by_category(self) -> dict[str, float]:
        return {
            category: self.agreed[category] / count
            for category, count in self.tokens.items()
            if count
        }

    def to_json(self) -> dict[str, object]:
        return {"share": self.share, "tokens": self.tokens, "agreed": self.agreed}


class _Watched(DraftedPolicy):
    """Plain decoding that asks the drafter at every token.

    `guess` is the token that the drafter holds likeliest to come next.
    """

    guess = -1

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        tree = TokenTree(context.ids[-1])
        laws = yield DraftRequest(context, tree, [0])
        assert laws is not None
        best = int(laws.values[0].argmax())
        self.guess = best if laws.tokens is None else int(laws.tokens[best])
        return Grown(tree)


def watch(llm: LLM, question: Question, params: SamplingParams, found: Agreement) -> None:
    """Answer the first turn of `question` by plain decoding, and add the counts to `found`.

    Raises `ValueError` where `params` are not greedy or the method of `llm` has no drafter, and
    whatever the answer raises.
    """
    drafter = llm.prepare(llm.method)
    if drafter is None or not params.greedy:
        raise ValueError("agreement needs a drafter and greedy answers")
    ids = llm.encode_chat([{"role": "user", "content": question.turns[0]}])
    llm.reset()
    policy, category = _Watched(drafter), question.category

    def told(record: StepRecord) -> None:
        found.tokens[category] = found.tokens.get(category, 0) + 1
        found.agreed[category] = found.agreed.get(category, 0) + (policy.guess == record.token)

    output, sampler = (
        Output(llm.tokenizer, params, llm.eos_ids),
        Sampler(params, ids, llm.model.vocab_size),
    )
    sequence = llm.engine.add(Request(ids, params, policy, output, sampler, observer=told))
    while not sequence.over:
        llm.engine.step()
    if sequence.error is not None:
        raise sequence.error
    llm.reset()


def lines(found: Agreement) -> Sequence[str]:
    """Return the agreement as lines of text, none where nothing was counted."""
    if found.share is None:
        return []
    places = ", ".join(f"{category} {share:.3f}" for category, share in found.by_category.items())
    return [
        "at every token of plain greedy answers the drafter's likeliest is the model's: "
        f"{found.share:.3f} of {found.count}; {places}"
    ]
