"""One sequence on a model."""

import torch

from quickbeam.models.base import CHUNK, Batch, Chain, Draft, Model
from quickbeam.models.opening import make_model


class Target:
    """Committed `ids`, and logits of trees behind them. `model`: ours, or one of transformers."""

    def __init__(self, model, *, chunk=CHUNK):
        self.model = model if isinstance(model, Model) else make_model(model, chunk=chunk)
        self.store = self.model.pool.new()
        self.ids = []
        # the likeliest token after each node verified last, where the kernels tell; -1 where logits
        # are not finite
        self.best = None
        self._held = []  # hidden states of committed tokens that were not taken
        self._drafted = None  # hidden states of the tree verified last

    @property
    def taken(self):
        """How many committed tokens, from the first on, `take_hidden` gives no hidden states of."""
        return len(self.ids) - sum(len(hidden) for hidden in self._held)

    def take_hidden(self):
        """`[k, len(layers) * d]` of the last k committed tokens, computed since the last call."""
        hidden, self._held = self._held, []
        return torch.cat(hidden) if hidden else torch.empty(0)

    def reset(self):
        self.truncate(0)

    def truncate(self, length):
        """Forget the tokens from `length` on, and all hidden states that were not taken."""
        self.store.truncate(length)
        del self.ids[length:]
        self._held = []

    def prefill(self, ids, keep=0):
        """Commit `ids` chunk by chunk; the logits `[vocab]` after the last one. The first `keep`,
        which are committed already, are not computed again, the last one of `ids` always is."""
        self.model.check_prompt(ids)
        assert self.ids[:keep] == list(ids[:keep])
        self.truncate(min(keep, len(ids) - 1))
        logits, chunk = torch.empty(0), self.model.chunk
        for begin in range(self.store.length, len(ids), chunk):
            part = list(ids[begin : begin + chunk])
            (passed,) = self.model.forward(Batch([Chain(self.store, part)]))
            self.store.commit(range(len(part)))
            self.ids.extend(part)
            logits = passed.logits
            if passed.hidden is not None:
                self._held.append(passed.hidden)
        return logits[-1].clone()

    def verify(self, tree, base=0):
        """The logits `[n - base, vocab]` after the nodes of a tree from `base` on, of which earlier
        calls have run the others since the last commit."""
        (passed,) = self.model.forward(Batch([Draft(self.store, tree, base)]))
        self.best = passed.best
        if passed.hidden is not None:
            known = [self._drafted[:base]] if base and self._drafted is not None else []
            self._drafted = torch.cat([*known, passed.hidden])
        return passed.logits

    def commit(self, tree, path):
        with torch.inference_mode():
            self.store.commit(path)
            if self._drafted is not None:
                self._held.append(self._drafted[list(path)])
        self.ids.extend(tree.token[node] for node in path)


def logits_of(model, ids):
    """`[n, vocab]`, after each token of a text that is read at once."""
    return model.forward(Batch([Chain(model.pool.new(), ids, len(ids))]))[0].logits
