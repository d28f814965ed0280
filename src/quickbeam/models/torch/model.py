"""Runs passes of a `Stack` in PyTorch."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
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
from quickbeam.models.torch.attention import runs_triton
from quickbeam.models.torch.cuda_settings import fix_sums
from quickbeam.models.torch.graphs import Graphs
from quickbeam.models.torch.network import Network
from quickbeam.models.torch.noise import DrawnRows, draw, philox
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.pinned import Copies, pin_layers
from quickbeam.models.torch.rows import (
    ListedRows,
    Padding,
    PassRows,
    UncommittedTokens,
    list_draws,
    list_pass,
    passes_of,
    uncommitted,
)
from quickbeam.models.torch.same_bits import find_padding
from quickbeam.models.torch.size_classes import SIZES
from quickbeam.models.weights.parameters import Parameters

logger = logging.getLogger(__name__)


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
    kernels don't run it, in words. Weights of 4 bits stay packed where Triton's kernels run, and
    all fit there; elsewhere they are widened.

    `sizes`: of passes among which those are looked for at load that give a row the same bits
    wherever it stands (`same_bits.py`); none to look for none, and by default those of `SIZES` on
    CUDA. Where the largest of them is in such a class, all passes are padded to sizes of it, wider
    ones are cut, and `exact` is true. Otherwise a token's bits may depend on what else is in the
    pass. So answers with drafts and without are the same only as far as rounding lets them: that is
    counted, not guaranteed. Recurrent models, whose passes are not padded, and models with `memory`
    are not looked at.
    """

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        device: torch.device,
        *,
        memory: int | None = None,
        copies: Copies | None = None,
        chunk: int = CHUNK,
        sizes: Sequence[int] | None = None,
        reason: str = "the torch back end is asked for",
    ) -> None:
        dtype = parameters.dtype
        if device.type == "cuda":
            fix_sums()
            sizes = SIZES if sizes is None else sizes
        vocab_size = parameters.shape(stack.head.weights[0].name)[0]
        with torch.inference_mode():
            first = device if memory is None else torch.device("cpu")
            packed = memory is None and runs_triton(device)
            self._network = Network(parameters, stack, first, dtype, packed)
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
        is_fixed = not zeros and self.streamed is None
        has_graphs = device.type == "cuda" and is_fixed
        self._graphs = Graphs(self._run, device) if has_graphs else None
        self._padding = Padding() if has_graphs else None
        self._chooses = device.type == "cuda"  # whether passes choose tokens, drawn ones too
        self.exact, self._checked = False, bool(sizes) and is_fixed
        if sizes and is_fixed:
            self._check(sizes)

    @inference
    def _check(self, sizes: Sequence[int]) -> None:
        """Pad passes to sizes that give a row the same bits, where there are such."""
        padding = find_padding(
            lambda listed: self._results(listed).logits,
            self._pool,
            self.vocab_size,
            self.context_length,
            sizes,
        )
        if self._graphs is not None:
            self._graphs.clear()  # most were of sizes that don't come again
        if padding is not None:
            self._padding, self.exact = padding, True
            logger.info("a row has the same bits in passes of %s rows", in_words(padding.rows))

    @inference
    def forward(self, batch: Batch) -> list[Passed]:
        parts, wanted = [*map(uncommitted, batch.parts)], batch.wanted
        draws = list_draws(batch) if self._chooses else None
        passes = [parts]
        if self._padding is not None and self._padding.rows:
            passes = [*passes_of(parts, max(self._padding.rows))]
        results = list[PassResults]()
        first = 0  # of the rows of a pass
        for parts_of_pass in passes:
            end = first + sum(part.rows for part in parts_of_pass)
            here = [i for i, row in enumerate(wanted) if first <= row < end]
            wanted_here = [wanted[i] - first for i in here]
            draws_here = None if draws is None else draws[here]
            tokens = batch.tokens[first:end]
            results.append(self._pass(parts_of_pass, tokens, wanted_here, draws_here))
            first = end
        logits = joined([result.logits for result in results])
        hidden = joined([result.hidden for result in results]) if self._watched else None
        if self.device.type == "cpu" and not self._chooses:
            return split(batch.parts, logits, hidden, None)
        # one transfer for the whole pass: asked row by row, each token would wait for the device
        chosen = joined([result.tokens for result in results]).tolist()
        if self.device.type == "mps":  # it has no float64, in which tokens are drawn
            return split(batch.parts, logits.cpu(), hidden, chosen)
        return split(batch.parts, logits, hidden, best=chosen, drawn=chosen)

    def _pass(
        self,
        parts: Sequence[UncommittedTokens],
        tokens: Sequence[int],
        wanted: Sequence[int],
        draws: np.ndarray | None,
    ) -> PassResults:
        """Run a pass, and return its results without those of padding."""
        listed = list_pass(parts, self._pool, tokens, wanted, self._padding, draws)
        logits, chosen, hidden = self._results(listed)
        return PassResults(logits[: len(wanted)], chosen[: len(wanted)], hidden[: len(tokens)])

    def _results(self, listed: ListedRows) -> PassResults:
        """Run a pass: as a graph, where the model has graphs."""
        if self._graphs is None:
            return self._run(listed.to(self.device))
        return PassResults(*self._graphs.run(listed, self._pool.generation))

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

    def set_aux_layers(self, layers: Sequence[int]) -> None:
        check_layers(layers, self.config.num_hidden_layers)
        self._watched = tuple(layers)
        if self._graphs is not None:
            self._graphs.clear()

    def describe(self) -> str:
        kernels = f"PyTorch's ({self._reason})"
        if not self._checked:
            return kernels
        if not self.exact or self._padding is None:
            return f"{kernels}, a row's bits depend on the pass"
        return f"{kernels}, the same bits in passes of {in_words(self._padding.rows)} rows"


def in_words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def joined(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return results of several passes one below the other."""
    return results[0] if len(results) == 1 else torch.cat([*results])


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
