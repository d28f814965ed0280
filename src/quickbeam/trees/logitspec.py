"""LogitSpec's tree: a chain from the text so far, and short branches from what the last logits
guess comes after the root."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from quickbeam.draft.base import Context
from quickbeam.draft.last_logits import LastLogits
from quickbeam.draft.ngram import Ngram, NgramIndex
from quickbeam.errors import InvalidInput
from quickbeam.tree import TokenTree
from quickbeam.trees.base import Undrafted
from quickbeam.trees.prompt_lookup import graft, promise

CHAIN = 20  # tokens of the chain at most
GUESSES = 64  # how far down the last logits are read
LEAD = 3  # tokens of the chain per matched token that go before any guess
OTHERS = 3  # other continuations of the text's end that are drafted beside the chain
OTHER = 4  # tokens of such a branch per matched token


def branch_length(rank: int) -> int:
    """Tokens of the branch that starts with the guess of this rank, the guess included."""
    return 4 if rank <= 8 else 3 if rank <= 32 else 1


class LogitSpec(Undrafted):
    """The rule of LogitSpec (2507.01449, as its code has it), with its drafts merged into a trie.

    - The chain: up to 20 tokens that followed the longest match ending in the root.
    - Beside it up to 3 shorter ones, from earlier or shorter matches that another token followed.
      (Ours: the paper keeps the newest.)
    - A branch for each of the 64 best last logits but the root, in order of rank: the token as a
      guess of the one after the root, then what followed the longest match ending in (root, guess),
      or in the guess alone; 4, 3 or 1 tokens in all, by rank.

    The paper spends 64 nodes, chain first. With fewer, the chain would leave little to the guesses;
    so it goes first for 3 tokens per matched token only, a longer match being right more often,
    then its shorter companions, and then it gets as many tokens as each branch adds. The order does
    not depend on the budget: a smaller tree is the beginning of a larger one. Merged nodes cost
    nothing, and what they save goes to further guesses.

    Either source may be `None`: without n-grams the guesses stand alone, without logits the chain
    does. Nodes carry no value. Raises `InvalidInput` when both are.
    """

    def __init__(self, ngram: Ngram | None, last_logits: LastLogits | None) -> None:
        self.ngram = ngram
        self.last_logits = last_logits
        self.sources = tuple(source for source in (ngram, last_logits) if source is not None)
        if not self.sources:
            raise InvalidInput("tree 'logitspec' has no source; give it ngram, last_logits or both")

    def situation(self, context: Context) -> int:
        return promise(context)

    def tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        tree = TokenTree(context.ids[-1])
        if budget < 2 or max_depth < 1:
            return tree
        index: NgramIndex | None = context.states[Ngram.name] if self.ngram else None
        tail = context.ids[-index.max_n :] if index else []

        matches = index.matches(tail, 1 + OTHERS) if index else []
        chain: Iterator[int] = iter(())
        tip = 0
        if index and matches:
            chain = iter(context.within((), index.continuation(matches[0], CHAIN)))
            tip = graft(
                tree, 0, islice(chain, LEAD * matches[0].length), Ngram.name, budget, max_depth
            )
            for match in matches[1:]:
                other = context.within((), index.continuation(match, OTHER * match.length))
                graft(tree, 0, other, Ngram.name, budget, max_depth)

        # Each guess adds a node, unless it is the root or the chain begins with it: two more than
        # the budget's free nodes are enough.
        guesses = (
            self.last_logits.ranked(context, min(GUESSES, budget + 1)) if self.last_logits else ()
        )
        for rank, guess in guesses:
            if len(tree) >= budget:
                break
            size = len(tree)
            node = graft(tree, 0, [guess], LastLogits.name, budget, max_depth)
            if index and (known := index.match([*tail, guess])):
                rest = context.within(
                    (guess,), index.continuation(known, branch_length(rank) - 1, [guess])
                )
                graft(tree, node, rest, Ngram.name, budget, max_depth)
            tip = graft(tree, tip, islice(chain, len(tree) - size), Ngram.name, budget, max_depth)
        graft(tree, tip, chain, Ngram.name, budget, max_depth)
        return tree
