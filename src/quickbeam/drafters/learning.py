"""A feature drafter's network, and what it learns from texts: small changes of its weights.

What a weight gains is the product of two narrow matrices (LoRA, 2106.09685). So the changes that
were learned from one tenant's texts take a thirtieth of the network, and the network that was
loaded stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle import EagleDrafter
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.loss import LossVocabulary, distribution_loss, fast_bfloat16
from quickbeam.drafters.passes import NativePasses, TorchPasses, passes_of
from quickbeam.drafters.unrolled import unroll
from quickbeam.drafters.vocabulary import head_rows
from quickbeam.models.base import Model
from quickbeam.models.native.library import Kernels
from quickbeam.models.stack import FeedForward
from quickbeam.models.torch.parts import Product

RANK = 16  # of the changes of a weight
DEPTH = 3  # tokens that are drafted behind each anchor, each on the drafts before it
CONTEXT = 256  # tokens before the first one that is learned from, which drafts look back at
LOSS_TOKENS = 2048  # of the vocabulary, over which losses are taken


class Excerpt(NamedTuple):
    """A part of a text that the target has read and written.

    `tokens`: `[n]` int64. `hidden`: `[n, width]`, the target's hidden states after each of them, as
    `LearnedNetwork` has the target give them. `first`: the index of the first token that is learned
    from; those before it are only read.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    first: int

    @property
    def anchors(self) -> int:
        """How many tokens there are behind which `DEPTH` tokens are learned."""
        return len(self.tokens) - DEPTH - max(0, self.first - 2)

    def parts(self, size: int) -> Iterator[Excerpt]:
        """Yield parts in which about `size` tokens each are learned from, behind `CONTEXT`."""
        for first in range(self.first, len(self.tokens) - DEPTH + 2, size):
            begin = max(0, first - CONTEXT)
            end = first + size + DEPTH - 2
            yield Excerpt(self.tokens[begin:end], self.hidden[begin:end], first - begin)


class LowRank(NamedTuple):
    """What a weight gains: `up @ down`, of `[outputs, r]` and `[r, inputs]` in float32."""

    up: torch.Tensor
    down: torch.Tensor


Changes = dict[str, LowRank]  # by the weight's name


class LossRows(NamedTuple):
    """The s tokens that a loss is taken over.

    `head`, `target_head`: their rows of the drafter's and of the target's head, `[s, d]`. `shift`:
    what is added to their logits, `[s]` (`LossVocabulary`).
    """

    head: torch.Tensor
    target_head: torch.Tensor
    shift: torch.Tensor


class LearnedNetwork:
    """The network of a `drafter`, of which changes are learned.

    From now on the target also gives what its head reads, which its distributions are made of; the
    drafter reads of a hidden state as much as before. `network`: as it was loaded; it belongs to
    this object. `kernels`: run changed networks if they can; None: PyTorch does.
    """

    def __init__(
        self, drafter: EagleDrafter, network: EagleHead, model: Model, kernels: Kernels | None
    ) -> None:
        config = network.config
        self._drafter = drafter
        self._model = model
        self._kernels = kernels
        dtype = model.dtype if fast_bfloat16(model.device) else torch.float32
        self._network = network.to(dtype).requires_grad_(False)
        self._layers = network.layers_in_torch()
        last = model.config.num_hidden_layers + 1
        layers = config.layers if last in config.layers else (*config.layers, last)
        drafter.width = len(config.layers) * config.target_size
        model.set_aux_layers(layers)
        begin = layers.index(last) * config.target_size
        self._target_columns = slice(begin, begin + config.target_size)
        self._target_head = head_rows(model)
        self._head: Any = self._target_head
        self._tokens: Any = torch.arange(len(self._head))
        if config.own_head:
            self._head = network.own_head.weight
            self._tokens = network.tokens
        # of the target's tokens, -1 where the drafter's head has none
        self._column = torch.full((model.vocab_size,), -1)
        self._column[self._tokens] = torch.arange(len(self._tokens))
        # by the names of their weights; what fuses hidden states does not change, since a
        # shortlist's router reads it, too
        self._products = dict[str, Product]()
        blocks: Any = self._layers.blocks
        for layer, block in zip(network.stack.layers, blocks, strict=True):
            attention, feed_forward = layer.attention, layer.feed_forward
            assert attention is not None and isinstance(feed_forward, FeedForward)
            for linear, product in (
                (attention.qkv, block.attention.qkv),
                (attention.out, block.attention.out),
                (feed_forward.up, block.feed_forward.up),
                (feed_forward.down, block.feed_forward.down),
            ):
                self._products[linear.weights[0].name] = product

    def no_changes(self, generator: torch.Generator) -> Changes:
        """Return changes that change nothing yet."""
        changes = Changes()
        for name, product in self._products.items():
            outputs, inputs = product.weight.shape
            down = torch.randn(RANK, inputs, generator=generator) * inputs**-0.5
            changes[name] = LowRank(torch.zeros(outputs, RANK), down)
        return changes

    def fits(self, changes: Changes) -> bool:
        """Whether these changes are of this network's weights, and finite."""
        if changes.keys() != self._products.keys():
            return False
        for name, (up, down) in changes.items():
            if [len(up), down.shape[1]] != list(self._products[name].weight.shape):
                return False
            if not (up.isfinite().all() and down.isfinite().all()):
                return False
        return True

    def loss_rows(self, excerpts: Sequence[Excerpt], generator: torch.Generator) -> LossRows:
        """Return tokens to take the losses of these excerpts over: theirs, and random ones."""
        columns = self._column[torch.cat([excerpt.tokens for excerpt in excerpts])]
        columns = columns[columns >= 0]
        counts = torch.bincount(columns, minlength=len(self._tokens)).float()
        chosen, shift = LossVocabulary(counts, LOSS_TOKENS).sample(columns, generator)
        tokens = self._tokens[chosen]
        # with autograd a tensor that was made in inference mode can't be saved: these are copies
        dtype = next(self._network.parameters()).dtype
        head = self._head[chosen].to(dtype, copy=True)
        target_head = self._target_head[tokens].to(dtype, copy=True)
        return LossRows(head, target_head, shift)

    def loss(
        self, changes: Changes, excerpt: Excerpt, rows: LossRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of an excerpt, a scalar, and how likely drafts are accepted.

        The latter is sum min(p, q) of the target's distribution p and the drafter's q, by the
        position behind an anchor, `[DEPTH, anchors]`. Row i of the network drafts the token at
        i + 2 first, so anchors are at i + 1.
        """
        for name, product in self._products.items():
            change = changes.get(name)
            product.multiply = F.linear if change is None else changed_product(change)
        network = self._network
        first = max(0, excerpt.first - 2)
        end = len(excerpt.tokens) - DEPTH
        hidden = excerpt.hidden.to(torch.float32, copy=True)
        drafted, targets = list[torch.Tensor](), list[torch.Tensor]()
        rows_learned = torch.arange(first, end)[None]
        passes = unroll(
            network, excerpt.tokens[None], hidden[None], DEPTH, self._layers, rows_learned
        )
        for depth, (_, out) in enumerate(passes):
            drafted.append(network.feature(out[0] if depth else out[0, first:end]))
            following = slice(first + depth + 1, end + depth + 1)
            targets.append(hidden[following, self._target_columns])
        loss, distance = distribution_loss(
            torch.cat(drafted),
            rows.head.new_zeros(len(rows.head), 0),
            torch.cat(targets),
            torch.arange(DEPTH).repeat_interleave(end - first),
            rows.head,
            rows.shift,
            done=1.0,
            target_head=rows.target_head,
        )
        return loss, 1 - distance.view(DEPTH, -1) / 2

    @torch.no_grad()
    def accepted(self, changes: Changes, excerpt: Excerpt, rows: LossRows) -> float:
        """Return how many tokens of a chain of `DEPTH` are accepted in an excerpt, on average."""
        _, overlap = self.loss(changes, excerpt, rows)
        return float(overlap.cumprod(0).sum(0).mean())

    def passes(self, changes: Changes) -> NativePasses | TorchPasses:
        """Return what runs the network with these changes, over the drafter's keys and values."""
        model = self._model
        weights = self._network.state_dict()
        for name, change in changes.items():
            weights[name] = weights[name].float() + change.up @ change.down
        with torch.device("meta"):
            network = EagleHead(self._network.config, model.embedding, model.head)
        network.load_state_dict(weights, assign=True)
        network = network.to(model.dtype).eval().requires_grad_(False)
        return passes_of(network, model, self._kernels, pool=self._drafter.passes.pool)


def changed_product(change: LowRank) -> Callable[..., torch.Tensor]:
    """Return the product of rows with a weight and what it gains, which `F.linear` does without."""

    def multiply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        gained = F.linear(F.linear(x, change.down.to(x.dtype)), change.up.to(x.dtype))
        return F.linear(x, weight, bias) + gained

    return multiply
