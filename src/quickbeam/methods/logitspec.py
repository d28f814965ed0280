"""LogitSpec's tree: a chain from the text so far, and short branches from the last logits.

Each branch begins with a guess of the token after the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from quickbeam.drafters.base import Context
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram, NgramIndex
from quickbeam.errors import InvalidInput
from quickbeam.methods.base import Undrafted
from quickbeam.methods.prompt_lookup import graft, promise
from quickbeam.tree import TokenTree

CHAIN = 20  # the most tokens of the chain
GUESSES = 64  # how many of the best last logits are guesses
LEAD = 3  # tokens of the chain that go before any guess, per matched token
OTHERS = 3  # other continuations of the text's end that are drafted beside the chain
OTHER = 4  # tokens of such a continuation, per matched token


def branch_length(rank: int) -> int:
    """Return how many tokens the branch of the guess of this rank has, the guess included."""
    return 4 if rank <= 8 else 3 if rank <= 32 else 1


class LogitSpec(Undrafted):
    """The rule of LogitSpec (2507.01449, as in its code), with its drafts merged into a trie.

    - The chain: up to 20 tokens that followed the longest match ending in the root.
    - Beside it up to 3 shorter continuations, from earlier or shorter matches that another token
      followed. (These are ours: the paper keeps only the newest match.)
    - A branch for each of the 64 best last logits except the root, in order of rank. It begins with
      that token, as a guess of the one after the root. Then comes what followed the longest match
      ending in (root, guess), or in the guess alone. A branch has 4, 3 or 1 tokens in all, by rank.

    The paper spends 64 nodes, and the chain goes first. With fewer nodes the chain would leave
    little to the guesses. So here the chain at first gets only 3 tokens for each matched token,
    since a longer match is right more often. Then come its shorter companions. After that each
    branch is followed by as many further tokens of the chain as the branch added. The order does
    not depend on the budget: a smaller tree is the beginning of a larger one. Nodes that two drafts
    share are added once, and the nodes saved go to further guesses.

    Either source may be `None`: without n-grams there are only guesses, without logits only the
    chain and its companions. Nodes carry no value. Raises `InvalidInput` if both are `None`.
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

        # Each guess adds a node, unless it is the root or the chain begins with it. So two guesses
        # more than there are free nodes are enough.
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
