"""The back end that runs any causal LM of transformers, on any device, by its own modelling code.

It is the reference for the native back end, and runs the architectures that the kernels don't. A
token's bits may depend on what else is in the pass, so answers with drafts and without are the same
only as far as rounding lets them: that is counted, not guaranteed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

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
from quickbeam.models.gathered import GatheredStep, RowPool, uncommitted
from quickbeam.models.hf_attention import Features, forward, install
from quickbeam.models.loading import refuse_unfit
from quickbeam.models.pinned import PinnedLayers
from quickbeam.models.same_logits import expect, refuse_other_logits


class TorchModel(Model):
    """Runs `model` through transformers' modelling code, over quickbeam's pages.

    `reason`: why the native kernels don't run it, in words. `pinned`: the layers whose weights are
    in host memory (`pin_layers`).

    The constructor compares the logits with those of transformers alone (`same_logits.py`). Raises
    `InvalidInput` for models that can't verify a tree: encoder-decoders, recurrent and hybrid ones
    of families that quickbeam doesn't know, and those that give other logits.
    """

    exact = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int = CHUNK,
        pinned: PinnedLayers | None = None,
        reason: str = "the torch back end is asked for",
    ) -> None:
        refuse_unfit(type(model), model.config)
        model.eval()
        config = model.config.get_text_config()
        expected = expect(model, config)
        with torch.inference_mode():
            self._model, self._context = model, install(model)
            shapes = [self._context.shapes[layer] for layer in range(len(self._context.shapes))]
            self._pool = RowPool(shapes, model.dtype, model.device, zeros=self._context.states)
            vocab_size = int(model.get_output_embeddings().weight.shape[0])
            super().__init__(config, model.dtype, model.device, vocab_size, self._pool)
            self.chunk, self.streamed, self._reason = chunk, pinned, reason
            self._features: Features | None = None
            refuse_other_logits(self, *expected, model)
        table, head = (getattr(one, "weight", None) for one in (self.embedding, self.head))
        read = [one for one in model.parameters() if one is not table or one is head]
        self.weight_bytes = sum(one.nbytes for one in read)
        if pinned is not None:
            self.chunk, self.mixed_chunk = STREAMED_CHUNK, STREAMED_CHUNK // 4

    @inference
    def forward(self, batch: Batch) -> list[Passed]:
        step, wanted = GatheredStep([*map(uncommitted, batch.parts)], self._pool), batch.wanted
        tokens = torch.tensor(batch.tokens, dtype=torch.int64).to(self.device, non_blocking=True)
        rows: torch.Tensor | None = None
        if len(wanted) < batch.rows:
            rows = torch.tensor(wanted, dtype=torch.int64).to(self.device, non_blocking=True)
        logits = forward(self._model, self._context, tokens, step, rows)
        if self.device.type == "mps":  # it has no float64, in which tokens are chosen
            logits = logits.cpu()
        hidden = self._features.take()[0] if self._features is not None else None
        best = None if logits.device.type == "cpu" else likeliest(logits)
        return split(batch.parts, logits, hidden, best)

    @property
    def embedding(self) -> nn.Module:
        return self._model.get_input_embeddings()  # type: ignore[no-any-return]

    @property
    def head(self) -> nn.Module:
        return self._model.get_output_embeddings()  # type: ignore[no-any-return]

    def watch(self, layers: Sequence[int]) -> None:
        check_layers(layers, self.config.num_hidden_layers)
        if self._features is not None:
            self._features.close()
        self._features = Features(self._model, layers)

    def describe(self) -> str:
        return f"PyTorch's ({self._reason})"


def likeliest(logits: torch.Tensor) -> list[int]:
    """Return what `Passed.best` holds, for rows on an accelerator: one transfer for the whole pass.

    Asked row by row, each accepted token would wait for the device twice.
    """
    top = logits.max(-1)
    return torch.where(top.values.isfinite(), top.indices, -1).tolist()
