"""Router and blocked head in the native kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quickbeam.shortlist.layout import Layout
from quickbeam.shortlist.router import EPS, Router
from quickbeam.target.native import library
from quickbeam.target.native.library import Kernels
from quickbeam.target.native.program import BLOCK, Buffer, Packed, Program, Rows


class NativeRouter:
    """A `Router`'s packed weights. `clusters`: how many it scores."""

    def __init__(self, router: Router, kernels: Kernels) -> None:
        self.config, self.clusters = router.config, router.config.clusters
        odd = self.config.width % 2  # then one more, which stays 0
        up, bias, down = router.up.weight.detach(), router.up.bias.detach(), router.down.weight.detach()
        self._up = Packed(kernels, [F.pad(up, (0, 0, 0, odd))], F.pad(bias, (0, odd)))
        self._down = Packed(kernels, [F.pad(down, (0, odd))], router.down.bias)

    def add(self, program: Program, hidden: Buffer, embedded: Buffer, target: Buffer) -> None:
        """Its operations over the rows that are wanted; scores to `target`."""
        config = self.config
        both, middle = program.buffer(config.hidden_size + config.embed_size), program.buffer(self._up.outputs)
        program.norm(hidden, both, None, EPS, gather=True)
        program.norm(embedded, both, None, EPS, column=config.hidden_size, gather=True)
        program.linear(self._up, both, middle, library.ACTIVATE, gathered=True)
        program.linear(self._down, middle, target, gathered=True)


class NativeBlocks:
    """Rows of a head in a layout's order, packed: the frequent block, then the clusters, each filled up to whole blocks of 16 outputs. What
    fills up has -inf for a logit."""

    def __init__(self, weight: torch.Tensor, layout: Layout, kernels: Kernels) -> None:
        self._kernels = kernels
        self._first = -(-layout.frequent // BLOCK)  # blocks of the frequent tokens
        self._each = -(-layout.size // BLOCK)  # and of a cluster
        parts = [layout.order[: layout.frequent], *(layout.tokens(cluster) for cluster in range(layout.clusters))]
        sizes = [self._first * BLOCK] + [self._each * BLOCK] * layout.clusters
        tokens = torch.full((sum(sizes),), -1, dtype=torch.int64)
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            tokens[at : at + len(part)] = part
            at += size
        rows = weight.detach()[tokens.clamp(min=0)]
        bias = torch.zeros(len(tokens)).masked_fill_(tokens < 0, -torch.inf)
        self._packed = Packed(kernels, [rows], bias)
        self._tokens = tokens.clamp_(min=0).view(-1, BLOCK).numpy()
        self._blocks = np.arange(self._first)
        self._program: Program | None = None

    def __call__(self, h: torch.Tensor, clusters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[n, s]` float32 and tokens `[s]`, as `head.Scores` has them."""
        chosen = clusters.numpy()[clusters.numpy() >= 0]
        blocks = self._blocks
        if len(chosen):
            spans = (self._first + chosen[:, None] * self._each + np.arange(self._each)).ravel()
            blocks = np.concatenate([blocks, spans])
        n, width = len(h), len(blocks) * BLOCK
        logits, tokens = torch.empty(n, width), torch.from_numpy(self._tokens[blocks].ravel())
        if width:
            if self._program is None:
                self._program = Program(self._kernels)
                self._program.chosen(self._packed, self._program.given("h", self._packed.inputs), self._program.given("logits", 0, True))
            self._program.set(0, target_stride=width)
            given: dict[str, Any] = {"h": h.contiguous(), "logits": logits}
            self._program.run(Rows([0] * n, [0] * n), given, blocks=np.ascontiguousarray(blocks))
        return logits, tokens


class NativeRows:
    """Rows of a head that come one by one, packed: what `ContextTokens` keeps. `write` puts tokens' rows into places."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels) -> None:
        self._weight, self._inputs, self._kernels = weight.contiguous(), weight.shape[1], kernels
        self._data = torch.empty(0, self._inputs // 2, BLOCK, 2, dtype=torch.bfloat16)
        self._program = Program(kernels)
        self._program.linear(Packed(kernels, [weight[:1]]), self._program.given("h", self._inputs), self._program.given("logits", 0, True))

    def reserve(self, size: int) -> None:
        """Make room for `size` rows, keeping what is there."""
        if size > len(self._data) * BLOCK:
            data = torch.zeros(-(-size // BLOCK), *self._data.shape[1:], dtype=torch.bfloat16)
            data[: len(self._data)] = self._data
            self._data = data

    def write(self, first: int, tokens: torch.Tensor) -> None:
        """Rows of `tokens` from place `first` on."""
        self._kernels.put(self._weight.data_ptr(), self._inputs, tokens.data_ptr(), len(tokens), first, self._data.data_ptr())

    def logits(self, h: torch.Tensor, count: int) -> torch.Tensor:
        """`[n, d]` to `[n, count]` float32, of the first rows."""
        logits = torch.empty(len(h), count)
        if count:
            self._program.set(0, weight=self._data.data_ptr(), outputs=count, target_stride=count)
            self._program.run(Rows([0] * len(h), [0] * len(h)), {"h": h.contiguous(), "logits": logits})
        return logits
