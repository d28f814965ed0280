"""A smaller causal language model with the target's vocabulary as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from quickbeam.draft.base import Context, Drafter, law_of
from quickbeam.errors import InvalidInput
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree

GAP = 64  # certain tokens not run yet beyond which they are read as a prompt is: without the logits of each


class LMDrafter(Drafter):
    """Laws of the next token from any causal LM of transformers whose token ids mean what the target's do (`check_vocabulary`).

    The model keeps the keys and values of what it has read, as the target does. Of a growing tree it runs only the nodes that it is asked
    for: they form its shadow, a tree of its own, which grows by one pass a call. What was accepted of the last shadow stays computed; the
    certain tokens that are not (accepted leaves, which nobody asked for) lead the next shadow as a chain that ends in the root, so catching
    up takes no pass of its own.

    `vocab_size`: width of the target's logits, and of the laws given. Tokens beyond this model's own have probability 0. Top-k, top-p and
    penalties of a request don't shape the laws, only its temperature does: no need of exactness, and the model's own law is what it knows.
    Takes the model over, as `Target` does; raises `InvalidInput` for models that `Target` can't run.
    """

    name = "drafter"

    def __init__(self, model: PreTrainedModel, vocab_size: int, *, fast: bool = True) -> None:
        own = int(model.get_output_embeddings().weight.shape[0])
        if own < vocab_size:  # so that any token that the target can emit can be read
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        self.model = Target(model, fast=fast, exact=False)
        self.calls = 0  # passes over trees since `reset`
        self._vocab_size, self._shared = vocab_size, min(own, vocab_size)
        self._tree: TokenTree | None = None  # being grown
        self._shadow: TokenTree | None = None
        self._place: dict[int, int] = {}  # node of the tree: node of the shadow

    def reset(self, ids: Sequence[int]) -> None:
        """Begin a sequence. The longest common prefix with what was read before is not computed again."""
        self.calls, self._shadow, self._tree = 0, None, None
        held = self.model.ids
        same = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        same = min(same, len(ids) - 1, self.model.store.length)  # the store's, as an interrupt may have come between
        self.model.truncate(same)
        if same < len(ids) - 1:
            self.model.prefill(ids[:-1], keep=same)

    def extend(self, tokens: Sequence[int]) -> None:
        """Nothing to do: the next step's context holds them, and what of them is computed already shows when a root is asked for."""

    def forget(self) -> None:
        """Drop all that was read, so that the next laws depend on the next sequence alone."""
        self._shadow = self._tree = None
        self.model.reset()

    def laws(self, context: Context, tree: TokenTree, nodes: Sequence[int]) -> torch.Tensor:
        """`[len(nodes), vocab]` float32 laws after `nodes`, on the drafter's device, by one pass (see `Drafter`).

        Raises `ValueError` where a tree's first call doesn't begin with the root or a node's parent was never asked for, `QuickbeamError`
        for logits that are not finite.
        """
        done = len(self._shadow) if self._shadow is not None else 0
        if nodes[0] == 0:
            self._tree, self._shadow, self._place, done = tree, *self._catch_up(context.ids), 0
        if self._shadow is None or tree is not self._tree:
            raise ValueError("a new tree: ask for its root first")
        for node in nodes:
            if node == 0:
                continue
            if (parent := self._place.get(tree.parent[node])) is None:
                raise ValueError(f"node {node}: ask for its parent {tree.parent[node]} first")
            self._place[node] = self._shadow.add(parent, tree.token[node], self.name)
        self.calls += 1
        return self._law(self.model.verify(self._shadow, done)[-len(nodes) :], context.temperature)

    def _catch_up(self, ids: list[int]) -> tuple[TokenTree, dict[int, int]]:
        """Keep what `ids` took of the last shadow; a new one whose nodes are the certain tokens not run yet, and the root's place in it."""
        if self._shadow is not None and (path := beginning(self._shadow, ids[len(self.model.ids) : -1])):
            self.model.commit(self._shadow, path)
        held = len(self.model.ids)
        if len(ids) - held > GAP:
            self.model.prefill(ids[:-1], keep=held)
            held = len(ids) - 1
        shadow = TokenTree(ids[held])
        for token in ids[held + 1 :]:
            shadow.add(len(shadow) - 1, token, self.name)
        return shadow, {0: len(shadow) - 1}

    def _law(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        law = law_of(logits[:, : self._shared], temperature)
        missing = self._vocab_size - self._shared
        return F.pad(law, (0, missing)) if missing else law

    def check_length(self, prompt: int, max_tokens: int) -> None:
        """Raise `InvalidInput` where `prompt` tokens and an answer of `max_tokens` might not fit the drafter's context."""
        limit = self.model.context_length
        if limit is not None and prompt + max_tokens > limit:
            raise InvalidInput(
                f"a prompt of {prompt} tokens and max_tokens={max_tokens} exceed the drafter's context of {limit}: "
                f"shorten the prompt, ask for at most {max(0, limit - prompt)} tokens, or take a method without a drafter"
            )


def beginning(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The nodes, root first, of the longest path from the root that begins `tokens`."""
    path: list[int] = []
    for token in tokens:
        node = tree.child(path[-1], token) if path else 0 if tree.token[0] == token else None
        if node is None:
            break
        path.append(node)
    return path


def check_vocabulary(target_tokenizer: Any, drafter_tokenizer: Any, sizes: tuple[int, int]) -> None:
    """Raise `InvalidInput`, naming the first token id that differs, where a drafter's ids don't mean what the target's do.

    `sizes`: widths of the target's and the drafter's logits. They may differ, and a token that only one tokenizer knows may lie in the
    other's padded tail: after its last token, yet within its logits.
    """
    target, drafter = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (target_tokenizer, drafter_tokenizer))
    tail = max(target, default=-1), max(drafter, default=-1)
    for i in sorted(target.keys() | drafter.keys()):
        ours, theirs = target.get(i), drafter.get(i)
        padding = (theirs is None and tail[1] < i < sizes[1]) or (ours is None and tail[0] < i < sizes[0])
        if ours != theirs and not padding:
            spelt = [f"{token!r}" if token is not None else "no token" for token in (ours, theirs)]
            raise InvalidInput(
                f"the drafter's vocabulary is not the target's: token {i} is {spelt[0]} to the target and {spelt[1]} to the drafter; "
                "use a smaller model of the target's family, with the same tokenizer"
            )
