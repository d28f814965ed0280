"""A Hugging Face causal LM as a tree verifier."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.target.attention import SPLIT, Attend, Step, attend_grouped, attend_plain, attend_sdpa, cuts
from quickbeam.target.bit_exact import Promise, examine, same_bits
from quickbeam.target.eager_llama import LeanModel
from quickbeam.target.fused_llama import FusedLlama
from quickbeam.target.hf_attention import Features, check_layers, forward, install
from quickbeam.target.kv_cache import KVStore, LayerShape
from quickbeam.target.linear import pack_linears
from quickbeam.target.loading import refuse_unfit
from quickbeam.target.native.library import kernels
from quickbeam.target.native.operands import KVShape, Rows
from quickbeam.target.native_attention import NativeAttention, NativeStep
from quickbeam.target.pages import PagedStore
from quickbeam.tree import TokenTree

logger = logging.getLogger(__name__)

EXACT_NODES = 512 - SPLIT  # the widest tree whose keys stay within one uncut sum (`attend_grouped`)


class Target:
    """One sequence's certain tokens, and the logits after any tree of tokens behind them.

    `fast` takes the native kernels where they can be had (bfloat16 on a CPU, see `native/library.py`): for the whole forward where the
    model's layout allows, else for its products and its attention. Without them it packs and fuses the linears (CPU) and takes the leaner
    forward. With `fast=False` the model runs as transformers wrote it, with plain attention: the reference.

    `exact` makes a tree give the same bits as one token at a time, in bfloat16 on a CPU; None takes it wherever this machine's kernels keep
    that promise, True raises `InvalidInput` where they don't. The native kernels keep it by construction, whatever `exact` says.
    Takes the model over: its weights may be packed in place.

    Raises `InvalidInput` for models that can't verify a tree: encoder-decoders, recurrent and hybrid ones.
    """

    def __init__(self, model: PreTrainedModel, *, fast: bool = True, exact: bool | None = None, chunk: int = 512) -> None:
        refuse_unfit(type(model), model.config)
        model.eval()
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.chunk = chunk
        self.best: list[int] | None = None  # the likeliest tokens after the nodes verified last, where the kernels tell; -1: not finite
        self._fused: FusedLlama | None = None
        self._lean: LeanModel | None = None
        self._model = model
        with torch.inference_mode():
            self._tap = install(model)
            shapes = [self._tap.shapes[layer] for layer in range(len(self._tap.shapes))]
            self.store: KVStore | PagedStore
            self._native: NativeAttention | None = None
            if fast and (pages := self._pages(shapes)) is not None:
                self.store, self._native = pages, NativeAttention(pages)
                promise = self._take_kernels(model, pages)
            else:
                promise = self._take_operators(model, shapes, fast, exact)
            if exact and promise.broken:
                raise InvalidInput(f"bit-identical verification can't be promised here: {'; '.join(promise.broken)}; leave exact out")
            logger.info("bit-identical verification: %s", "; ".join(promise.broken) or "yes")
            self.exact = not promise.broken
            self._rows = promise.rows if self.exact else 1  # the fewest of a forward
            self._wide = promise.wide and self.exact
            if self._native is None:
                self.store = KVStore(shapes, self.dtype, self.device, pairwise=self.exact)
        self.ids: list[int] = []
        self._features: Features | None = None
        self._held: list[torch.Tensor] = []  # hidden states of certain tokens
        self._drafted = torch.empty(0)  # hidden states of the tree verified last
        self._windows = {layer.window for layer in self._tap.layers.values() if layer.window is not None}
        self._prefill: Attend = attend_sdpa if fast else attend_plain
        self._verify: Attend = attend_plain if not fast else attend_grouped if self.device.type == "cpu" else attend_sdpa
        if not fast and self.exact:
            self._verify = attend_grouped
        if self._native is not None and self.exact and not same_bits(self):
            logger.warning("the native kernels don't give the same bits alone and in a tree on this machine; QUICKBEAM_KERNELS=eager may")
            if exact:
                raise InvalidInput("bit-identical verification can't be promised here: the native kernels don't keep it; leave exact out")
            self.exact = False

    def _pages(self, shapes: list[LayerShape]) -> PagedStore | None:
        """Keys and values for the native kernels; None where they can't be used."""
        if self.device.type != "cpu" or self.dtype is not torch.bfloat16 or any(shape.key_dim % 2 for shape in shapes):
            return None
        found = kernels()
        return None if found is None else PagedStore([KVShape(*shape) for shape in shapes], found)

    def _take_kernels(self, model: PreTrainedModel, pages: PagedStore) -> Promise:
        """Hand the model over to the native kernels."""
        if FusedLlama.fits(model):
            self._fused = FusedLlama(model, self._tap.layers, pages)
            return Promise(1, ())
        pack_linears(model)
        return examine([], model.modules())

    def _take_operators(self, model: PreTrainedModel, shapes: list[LayerShape], fast: bool, exact: bool | None) -> Promise:
        """Prepare the model for PyTorch's operators."""
        if fast and LeanModel.fits(model):
            self._lean = LeanModel(model, self._tap.layers, shapes[0].key_dim)
        elif fast:
            pack_linears(model)
        return self._examine(shapes, wanted=fast if exact is None else exact)

    def _examine(self, shapes: list[LayerShape], wanted: bool) -> Promise:
        if not wanted:
            return Promise(1, ("not wanted",))
        if self.device.type != "cpu" or self.dtype is not torch.bfloat16:
            return Promise(1, (f"it holds for bfloat16 on a CPU, not for {str(self.dtype).removeprefix('torch.')} on {self.device.type}",))
        if any(layer.sinks is not None for layer in self._tap.layers.values()):
            return Promise(1, ("not with attention sinks",))
        return examine(shapes, self._lean.linears() if self._lean else self._model.modules())

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for, or None where its configuration doesn't say."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def most_nodes(self) -> int | None:
        """The widest tree that `verify` takes; None: any."""
        return EXACT_NODES if self.exact and self._native is None else None

    def depth_limit(self) -> int:
        """How deep the next tree may grow. With `exact`, sums are cut at fixed positions that a tree must not reach across."""
        if not self.exact or self._native is not None:
            return 1 << 30
        root = self.store.length
        places = [root, *(root - window + 1 for window in self._windows if root >= window)]
        every = cuts(self._wide)
        return min(every - 1 - place % every for place in places)

    def _run(self, ids: Sequence[int], rows: Rows, positions: Sequence[int], last: bool) -> torch.Tensor:
        """Logits by the native kernels, of the last row or of all."""
        if self._fused is not None:
            logits = self._fused(rows, max(positions))
            self.best = self._fused.best
            return logits
        assert self._native is not None
        step = NativeStep(rows, torch.tensor(positions), self._native)
        return forward(self._model, self._tap, torch.tensor(ids), step, last)

    def _forward(self, ids: Sequence[int], step: Step, attend: Attend, last: bool) -> torch.Tensor:
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.device)
        if self._lean is not None:
            return self._lean(tokens, step, attend, last)
        self._tap.attend = attend
        return forward(self._model, self._tap, tokens, step, last)

    @property
    def embedding(self) -> nn.Module:
        """Token ids to what the first layer reads."""
        fused = self._fused or self._lean
        return fused.embedding if fused is not None else self._model.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        """Hidden states after the final norm to logits."""
        fused = self._fused or self._lean
        return fused.head if fused is not None else self._model.get_output_embeddings()

    def watch(self, layers: Sequence[int]) -> None:
        """Keep hidden states after `layers` (`hf_attention.Features`) from now on, for `take_hidden`. Raises `InvalidInput` for layers that
        the model doesn't have."""
        check_layers(layers, self.config.num_hidden_layers)
        if self._fused is not None:
            self._fused.watch(layers)
        elif self._lean is not None:
            self._lean.watched = tuple(layers)
        else:
            self._features = Features(self._model, layers)

    def _hidden(self) -> torch.Tensor | None:
        """Of the last forward, `[n, len(layers) * d]`."""
        fused = self._fused or self._lean
        if fused is not None:
            return fused.hidden if fused.watched else None
        return self._features.take()[0] if self._features is not None else None

    @property
    def taken(self) -> int:
        """How many of the first certain tokens `take_hidden` gives no hidden states of."""
        return len(self.ids) - sum(len(hidden) for hidden in self._held)

    def take_hidden(self) -> torch.Tensor:
        """`[k, len(layers) * d]`: hidden states of the last k certain tokens, those computed since the last call. Needs `watch`."""
        hidden, self._held = self._held, []
        return torch.cat(hidden) if hidden else torch.empty(0)

    def reset(self) -> None:
        """Forget every token."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, and the hidden states that were not taken."""
        self.store.truncate(length)
        del self.ids[length:]
        self._held = []

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
        """Make `ids` the certain tokens, in chunks; give the `[vocab]` logits after the last. The first `keep` of them, which must be there
        already, are not computed again."""
        if not ids:
            raise InvalidInput("an empty prompt: give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidInput(f"token id {low if low < 0 else high} is outside the model's vocabulary of {self.vocab_size}")
        if keep and self.ids[:keep] != list(ids[:keep]):
            raise ValueError(f"the first {keep} tokens are not the certain ones")
        self.truncate(min(keep, len(ids) - 1))
        self.store.reserve(len(ids) + 1)
        logits = torch.empty(0)
        for begin in range(self.store.length, len(ids), self.chunk):
            part = ids[begin : begin + self.chunk]
            if isinstance(self.store, PagedStore):
                rows = self.store.chain(part, range(len(part) - 1, len(part)))
                logits = self._run(part, rows, range(begin, begin + len(part)), last=True)
            else:
                step = Step(self.store, torch.arange(begin, begin + len(part), device=self.device))
                logits = self._forward(part, step, self._prefill, last=True)
            self.store.commit(range(len(part)))
            self.ids.extend(part)
            if (hidden := self._hidden()) is not None:
                self._held.append(hidden)
        return logits[-1].clone()

    @torch.inference_mode()
    def verify(self, tree: TokenTree, base: int = 0) -> torch.Tensor:
        """Logits `[n, vocab]` after every node of a tree whose root follows the certain tokens. `commit` keeps a path of it.

        `base`: the tree's first nodes that an earlier call has run since the last commit; logits `[n - base, vocab]` are of the rest.
        """
        start, n = self.store.length, len(tree)
        if self.most_nodes is not None and n > self.most_nodes:
            raise InvalidInput(f"a tree of {n} nodes: bit-identical verification takes at most {self.most_nodes}; lower the budget")
        if isinstance(self.store, PagedStore):
            rows = self.store.tree(tree.token, tree.parent, tree.depth, base)
            logits = self._run(tree.token[base:], rows, [start + depth for depth in tree.depth[base:]], last=False)
            self._keep_hidden(base, n)
            return logits
        tokens, depth, visible = tree.token, tree.depth, None if tree.is_chain else tree.visible()
        if base:
            visible = tree.visible()[base:]
        if n < self._rows:  # kernels that treat a single row differently: a lone token takes a mirror image along
            tokens, depth, visible = tokens * 2, [0, 0], torch.eye(2, dtype=torch.bool)
        positions = torch.tensor(depth, dtype=torch.int64, device=self.device) + start
        step = Step(self.store, positions, visible, self.exact, base, self._wide)
        logits = self._forward(tokens[base:], step, self._verify, last=False)[: n - base]
        self._keep_hidden(base, n)
        return logits

    def _keep_hidden(self, base: int, n: int) -> None:
        if (hidden := self._hidden()) is not None:
            self._drafted = torch.cat([self._drafted[:base], hidden[: n - base]]) if base else hidden

    def rehearse(self, tree: TokenTree, context: int) -> torch.Tensor:
        """`verify` behind at least `context` tokens, whatever they are, for its time alone: nothing that is certain changes."""
        certain = self.store.length
        self.store.reserve(context + len(tree) + 2)
        self.store.length = max(context, certain)
        try:
            return self.verify(tree)
        finally:
            self.store.length = certain

    def commit(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Make the nodes of `path` (root first, parents before children) certain."""
        if not path or path[0] != 0 or any(tree.parent[child] != parent for parent, child in pairwise(path)):
            raise QuickbeamError(f"not a path from the root: {list(path)}")
        with torch.inference_mode():
            self.store.commit(path)
            if len(self._drafted):
                straight = path[-1] == len(path) - 1  # the usual case, without an index to make
                self._held.append(self._drafted[: len(path)] if straight else self._drafted[list(path)])
        self.ids.extend(tree.token[node] for node in path)
