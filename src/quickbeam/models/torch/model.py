"""Runs passes of a `Stack` in PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from quickbeam.models.base import (
    CHUNK,
    STREAMED_CHUNK,
    Batch,
    Model,
    Passed,
    check_layers,
    inference,
    split,
)
from quickbeam.models.compile.compiled_stack import kv_shapes
from quickbeam.models.stack import Stack
from quickbeam.models.torch.graphs import Graphs
from quickbeam.models.torch.network import Network
from quickbeam.models.torch.noise import DrawnRows, draw, philox
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.pinned import Copies, pin_layers
from quickbeam.models.torch.rows import PassRows, list_draws, list_pass, uncommitted
from quickbeam.models.weights.parameters import Parameters


class PassResults(NamedTuple):
    """What a pass gives on the device.

    `logits` `[wanted, vocab]` float32. `tokens` `[wanted]` int64: those drawn as `PassRows.draws`
    says, and elsewhere the likeliest; -1 where the host has to choose, or the logits are not
    finite. `hidden` `[n, layers * d]`, where layers are watched.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor


class TorchModel(Model):
    """Runs a model that is described by `stack`, with its `parameters`, on `device`.

    `memory`: bytes that the weights may take there; those beyond it are copied from host memory in
    every pass (`pinned.py`, which `copies` is for); None for no bound. `reason`: why the native
    kernels don't run it, in words.

    A token's bits may depend on what else is in the pass, so answers with drafts and without are
    the same only as far as rounding lets them: that is counted, not guaranteed.
    """

    exact = False

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        device: torch.device,
        *,
        memory: int | None = None,
        copies: Copies | None = None,
        chunk: int = CHUNK,
        reason: str = "the torch back end is asked for",
    ) -> None:
        dtype = parameters.dtype
        vocab_size = parameters.shape(stack.head.weights[0].name)[0]
        with torch.inference_mode():
            first = device if memory is None else torch.device("cpu")
            self._network = Network(parameters, stack, first, dtype)
            if memory is not None:
                self.streamed = pin_layers(self._network, memory, device, copies)
            zeros = self._network.zero_states()
            self._pool = RowPool(kv_shapes(stack), dtype, device, zeros=zeros)
        super().__init__(parameters.config, dtype, device, vocab_size, self._pool)
        self.chunk, self._reason, self._watched = chunk, reason, tuple[int, ...]()
        if self.streamed is not None:
            self.chunk, self.mixed_chunk = STREAMED_CHUNK, STREAMED_CHUNK // 4
        self.weight_bytes = self._network.product_bytes
        # states of recurrent layers are looked up by the host, and layers that are copied wait for
        # copies that began in the pass before
        has_graphs = device.type == "cuda" and not zeros and self.streamed is None
        self._graphs = Graphs(self._run, device) if has_graphs else None
        self._chooses = device.type == "cuda"  # whether passes choose tokens, drawn ones too

    @inference
    def forward(self, batch: Batch) -> list[Passed]:
        parts, wanted = [*map(uncommitted, batch.parts)], batch.wanted
        graphs = self._graphs
        draws = list_draws(batch) if self._chooses else None
        listed = list_pass(
            parts, self._pool, batch.tokens, wanted, padded=graphs is not None, draws=draws
        )
        if graphs is None:
            results = self._run(listed.to(self.device))
        else:
            results = PassResults(*graphs.run(listed, self._pool.generation))
        logits, hidden = results.logits[: len(wanted)], None
        if self._watched:
            hidden = results.hidden[: batch.rows]
        if self.device.type == "mps":  # it has no float64, in which tokens are drawn
            best = results.tokens[: len(wanted)].tolist()
            return split(batch.parts, logits.cpu(), hidden, best)
        if not self._chooses:
            return split(batch.parts, logits, hidden, None)
        # one transfer for the whole pass: asked row by row, each token would wait for the device
        tokens = results.tokens[: len(wanted)].tolist()
        return split(batch.parts, logits, hidden, best=tokens, drawn=tokens)

    def _run(self, rows: PassRows) -> PassResults:
        """Compute a pass. Nothing here reads from the device or depends on its numbers."""
        x, streams = self._network(rows, self._pool, self._watched)
        logits = self._network.logits(x[rows.wanted])
        streams = streams or [x.new_empty(0)]
        hidden = torch.cat(streams, -1).to(self.dtype)
        return PassResults(logits, chosen_tokens(logits, rows), hidden)

    @property
    def embedding(self) -> nn.Module:
        return self._network.embedding

    @property
    def head(self) -> nn.Module:
        return self._network.head

    def watch(self, layers: Sequence[int]) -> None:
        check_layers(layers, self.config.num_hidden_layers)
        self._watched = tuple(layers)
        if self._graphs is not None:
            self._graphs.clear()

    def describe(self) -> str:
        return f"PyTorch's ({self._reason})"


def chosen_tokens(logits: torch.Tensor, rows: PassRows) -> torch.Tensor:
    """Return the token of each row of logits `[w, vocab]`, int64; see `PassResults`."""
    best = likeliest(logits)
    if not len(rows.draws):
        return best
    drawn = DrawnRows.of(rows.draws, rows.positions[rows.wanted])
    tokens = draw(logits, drawn, philox_on(logits.device))
    return torch.where(drawn.scale[:, 0] > 0, tokens, best)


def philox_on(device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the function that does what `philox` does on a device.

    On CUDA that is a Triton kernel, where Triton is installed.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return philox
    from quickbeam.models.torch import fused_noise

    return fused_noise.philox


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row of logits, int64; -1 where they are not finite."""
    top = logits.max(-1)
    return torch.where(top.values.isfinite(), top.indices, -1)
