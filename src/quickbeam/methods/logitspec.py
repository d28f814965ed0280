"""LogitSpec's tree: a chain from the text so far, and short branches from the last logits.

Each branch begins with a guess of the token after the root.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from quickbeam.drafters.answers import Answers
from quickbeam.drafters.base import Context
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram, NgramIndex
from quickbeam.drafters.texts import AGREED
from quickbeam.methods.acceptance import AcceptanceModel
from quickbeam.methods.base import Method, ProposalSteps, without_calls
from quickbeam.methods.free import FreeCandidates, free_tree
from quickbeam.tree import TokenTree

CHAIN = 20  # the most tokens of the chain
GUESSES = 64  # how many of the best last logits are guesses
LEAD = 3  # tokens of the chain that go before any guess, per matched token


def branch_length(rank: int) -> int:
    """Return how many tokens the branch of the guess of this rank has, the guess included."""
    if rank <= 8:
        return 4
    return 3 if rank <= 32 else 1


class LogitSpec(Method):
    """The rule of LogitSpec (2507.01449, as in its code), with its drafts merged into a trie.

    - The chain: up to 20 tokens that followed the longest match ending in the root.
    - A branch for each of the 64 best last logits except the root, in order of rank. It begins with
      that token, as a guess of the one after the root. Then comes what followed the longest match
      ending in (root, guess), or in the guess alone. A branch has 4, 3 or 1 tokens in all, by rank.

    The paper spends 64 nodes, and the chain goes first. With fewer nodes that would leave little to
    the guesses. So here the chain at first gets only 3 tokens for each matched token, and after
    each branch as many further tokens as the branch added. A smaller tree is the beginning of a
    larger one. Nodes that two drafts share are added once.

    If a finished text agrees with more of this text's end than this text's own match does, the
    chain is the continuation of the finished text.

    This rule is for a fixed budget, and its nodes carry no value. Where nodes have costs, the same
    sources compete by their acceptance rates, as in `auto` (`methods/free.py`).
    """

    uses_cost_model = True

    def __init__(self) -> None:
        self.last_logits = LastLogits()
        self.answers = Answers()
        self.sources = (Ngram(), self.last_logits, self.answers)
        self.model = AcceptanceModel()

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        if context.node_costs is not None:
            free = FreeCandidates(context, self.last_logits, self.answers)
            return free_tree(context, budget, max_depth, self.model, free)
        return without_calls(self._tree(context, budget, max_depth))

    def _tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        tree = TokenTree(context.ids[-1])
        if budget < 2 or max_depth < 1:
            return tree
        index: NgramIndex = context.states[Ngram.name]
        tail = context.ids[-AGREED:]

        def add(node: int, tokens: Iterable[int], source: str) -> int:
            return tree.add_path(node, tokens, source, budget, max_depth)

        # the beginning of the chain
        tokens = list[int]()
        chain_source = Ngram.name
        match = index.match(tail)
        remembered = self.answers.match(context)
        if remembered and (match is None or match.length < remembered.length):
            assert context.texts is not None
            tokens = context.texts.continuation(remembered, CHAIN)
            chain_source = Answers.name
            match = remembered
        elif match:
            tokens = index.continuation(match, CHAIN)
        chain = iter(context.within((), tokens))
        lead = LEAD * match.length if match else 0
        tip = add(0, islice(chain, lead), chain_source)

        # a branch for each guess. Each adds a node, unless it is the root or the chain begins with
        # it. So two guesses more than there are free nodes are enough.
        for rank, guess in self.last_logits.ranked(context, min(GUESSES, budget + 1)):
            if len(tree) >= budget:
                break
            size = len(tree)
            node = add(0, [guess], LastLogits.name)
            if guess_match := index.match([*tail, guess]):
                branch = index.continuation(guess_match, branch_length(rank) - 1, [guess])
                add(node, context.within((guess,), branch), Ngram.name)
            tip = add(tip, islice(chain, len(tree) - size), chain_source)
        add(tip, chain, chain_source)
        return tree
