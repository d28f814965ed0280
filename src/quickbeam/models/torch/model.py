"""Runs passes of a `Stack` in PyTorch."""

from __future__ import annotations

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
    Chain,
    ImageRows,
    Model,
    Passed,
    check_layers,
    images_between,
    inference,
    split,
)
from quickbeam.models.compile.compiled_stack import kv_shapes
from quickbeam.models.stack import Stack
from quickbeam.models.torch.attention import runs_triton
from quickbeam.models.torch.cuda_settings import fix_sums
from quickbeam.models.torch.graphs import Graphs
from quickbeam.models.torch.likeliest import rank_tokens, ranked_rows
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
from quickbeam.models.torch.states import state_shapes
from quickbeam.models.weights.parameters import Parameters

logger = logging.getLogger(__name__)


class PassResults(NamedTuple):
    """The results of a pass, on the device.

    `logits`: `[wanted, vocab]` float32. `tokens`: the token after each wanted row, `[wanted]`
    int64. It is drawn where `PassRows.draws` says so, and the likeliest elsewhere. It is -1 where
    the host has to draw, or the logits are not finite. `hidden`: `[n, layers * d]`, where layers
    are watched. `probs`, `likeliest`: see `rank_tokens`, where the pass ranks tokens. Such a pass
    chooses none: `tokens` is empty.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    probs: torch.Tensor
    likeliest: torch.Tensor


class TorchModel(Model):
    """Runs a model that is described by `stack`, with its `parameters`, on `device`.

    `memory`: bytes that the weights may take on the device; None for no bound. The weights beyond
    it are copied from host memory in every pass (`pinned.py`), by `copies`. `reason`: why the
    native kernels don't run the model, in words. Weights of 4 bits stay packed where Triton's
    kernels run and all weights fit; elsewhere they are widened.

    `sizes`: sizes of passes that are compared at load, to find those that give a row the same bits
    wherever it stands (`same_bits.py`). The default is `SIZES` on CUDA, and none elsewhere. Where
    the largest size is in such a class, all passes are padded to sizes of the class, wider passes
    are divided, and `exact` is true. Otherwise a token's bits may depend on what else is in the
    pass. Then answers with drafts and without are the same only as far as rounding allows. Sizes
    are not compared for models with `memory`.
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
            weights_device = device if memory is None else torch.device("cpu")
            packed = memory is None and runs_triton(device)
            self._network = Network(parameters, stack, weights_device, dtype, packed)
            if memory is not None:
                self.streamed = pin_layers(self._network, memory, device, copies)
            states = state_shapes(stack)
            self._pool = RowPool(kv_shapes(stack), dtype, device, states)
        super().__init__(parameters.config, dtype, device, vocab_size, self._pool)
        self.chunk = chunk
        self._reason = reason
        self._watched = tuple[int, ...]()
        self._ranked = 0  # how many tokens passes rank; 0 for none
        if self.streamed is not None:
            self.chunk = STREAMED_CHUNK
            self.mixed_chunk = STREAMED_CHUNK // 4
        self.weight_bytes = self._network.product_bytes
        # streamed layers wait for copies that began in the pass before, which fits in no graph
        is_fixed = self.streamed is None
        # without Triton's kernels, each row of a recurrent layer takes operations of its own: too
        # many for graphs of all sizes
        is_short = not states or runs_triton(device)
        has_graphs = device.type == "cuda" and is_fixed and is_short
        self._graphs = Graphs(self._run, device) if has_graphs else None
        self._padding = Padding() if has_graphs else None
        self._draws_tokens = device.type == "cuda"  # whether passes draw tokens
        self.exact = False
        self._compared_sizes = bool(sizes) and is_fixed
        if sizes and is_fixed:
            self._compare_sizes(sizes)

    @inference
    def _compare_sizes(self, sizes: Sequence[int]) -> None:
        """From now on, pad passes to sizes that give a row the same bits, where there are some."""
        padding = find_padding(
            lambda listed: self._results(listed).logits,
            self._pool,
            self.vocab_size,
            self.context_length,
            sizes,
        )
        if self._graphs is not None:
            self._graphs.clear()  # most of these sizes don't come again
        if padding is not None:
            self._padding = padding
            self.exact = True
            logger.info("a row has the same bits in passes of %s rows", in_words(padding.rows))

    @inference
    def forward(self, batch: Batch) -> list[Passed]:
        parts = [uncommitted(part) for part in batch.parts]
        passes = [parts]
        if self._padding is not None and self._padding.rows:
            passes = [*passes_of(parts, max(self._padding.rows))]
        draws = list_draws(batch) if self._draws_tokens else None
        images = list_images(batch)
        results = list[PassResults]()
        first = 0  # the first row of a pass
        for parts_of_pass in passes:
            end = first + sum(part.rows for part in parts_of_pass)
            indices = [i for i, row in enumerate(batch.wanted) if first <= row < end]
            wanted = [batch.wanted[i] - first for i in indices]
            draws_of_pass = None if draws is None else draws[indices]
            tokens = batch.tokens[first:end]
            images_of_pass = images_between(images, first, end)
            results.append(
                self._run_pass(parts_of_pass, tokens, wanted, draws_of_pass, images_of_pass)
            )
            first = end

        logits = concatenated([result.logits for result in results])
        hidden: torch.Tensor | None = None
        if self._watched:
            hidden = concatenated([result.hidden for result in results])
        if self._ranked:
            probs = concatenated([result.probs for result in results])
            likeliest = concatenated([result.likeliest for result in results])
            ranked = ranked_rows(probs, likeliest)
            return split(batch.parts, logits, hidden, best=None, ranked=ranked)
        if self.device.type == "cpu" and not self._draws_tokens:
            return split(batch.parts, logits, hidden, best=None)
        # one transfer for the pass: row by row, each token would wait for the device
        next_tokens = concatenated([result.tokens for result in results]).tolist()
        if self.device.type == "mps":  # it has no float64, in which tokens are drawn
            return split(batch.parts, logits.cpu(), hidden, best=next_tokens)
        return split(batch.parts, logits, hidden, best=next_tokens, drawn=next_tokens)

    def _run_pass(
        self,
        parts: Sequence[UncommittedTokens],
        tokens: Sequence[int],
        wanted: Sequence[int],
        draws: np.ndarray | None,
        images: Sequence[ImageRows],
    ) -> PassResults:
        """Run a pass, and return its results without those of padding."""
        listed = list_pass(parts, self._pool, tokens, wanted, self._padding, draws)
        results = self._results(listed, images)
        return PassResults(
            logits=results.logits[: len(wanted)],
            tokens=results.tokens[: len(wanted)],
            hidden=results.hidden[: len(tokens)],
            probs=results.probs[: len(wanted)],
            likeliest=results.likeliest[: len(wanted)],
        )

    def _results(self, listed: ListedRows, images: Sequence[ImageRows] = ()) -> PassResults:
        """Run a pass: as a graph, where the model has graphs. No graph reads images."""
        if self._graphs is None or images:
            return self._run(listed.to(self.device), images)
        return PassResults(*self._graphs.run(listed, self._pool.generation))

    def _run(self, rows: PassRows, images: Sequence[ImageRows] = ()) -> PassResults:
        """Compute a pass. Nothing here reads values back from the device."""
        x, streams = self._network(rows, self._pool, self._watched, images)
        logits = self._network.logits(x[rows.wanted])
        streams = streams or [x.new_empty(0)]
        hidden = torch.cat(streams, -1).to(self.dtype)
        tokens = rows.wanted[:0]
        probs = logits.new_empty(0)
        likeliest = logits.new_empty(0, dtype=torch.int32)
        if self._ranked:
            probs, likeliest = rank_tokens(logits[:, : self._ranked])
        else:
            tokens = select_tokens(logits, rows)
        return PassResults(logits, tokens, hidden, probs, likeliest)

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

    def rank(self, tokens: int) -> None:
        """Make passes rank the first `tokens` tokens of the vocabulary (`Passed.ranked`).

        Passes choose no tokens then: the model is a drafter's.
        """
        self._ranked = tokens
        if self._graphs is not None:
            self._graphs.clear()

    def describe(self) -> str:
        kernels = f"PyTorch's ({self._reason})"
        if not self._compared_sizes:
            return kernels
        if not self.exact or self._padding is None:
            return f"{kernels}, a row's bits depend on the pass"
        return f"{kernels}, the same bits in passes of {in_words(self._padding.rows)} rows"


def list_images(batch: Batch) -> list[ImageRows]:
    """Return the rows of images in a batch; their indices are those of the batch's rows."""
    images = list[ImageRows]()
    first = 0  # the first row of a part
    for part in batch.parts:
        if isinstance(part, Chain):
            images += [image._replace(first=first + image.first) for image in part.images]
        first += part.rows
    return images


def in_words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def concatenated(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of several passes in one tensor."""
    return results[0] if len(results) == 1 else torch.cat([*results])


def select_tokens(logits: torch.Tensor, rows: PassRows) -> torch.Tensor:
    """Return the token of each row of logits `[w, vocab]`, `[w]` int64; see `PassResults`."""
    best = likeliest(logits)
    if not len(rows.draws):
        return best
    drawn_rows = DrawnRows.of(rows.draws, rows.positions[rows.wanted])
    drawn = draw(logits, drawn_rows, philox_on(logits.device))
    return torch.where(drawn_rows.scale[:, 0] > 0, drawn, best)


def philox_on(device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the `philox` of a device: a Triton kernel where these run, else the reference."""
    if not runs_triton(device):
        return philox
    from quickbeam.models.torch import fused_noise

    return fused_noise.philox


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row of logits, int64; -1 where they are not finite."""
    top = logits.max(-1)
    return torch.where(top.values.isfinite(), top.indices, -1)
