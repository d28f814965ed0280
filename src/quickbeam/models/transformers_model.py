"""The back end that runs any causal LM of transformers, on any device, by its own modelling code.

It runs the architectures that no family describes. A token's bits may depend on what else is in
the pass, so answers with drafts and without are the same only as far as rounding lets them: that is
counted, not guaranteed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from quickbeam.models.base import CHUNK, Batch, Model, Passed, check_layers, inference, split
from quickbeam.models.hf_attention import Features, forward, install
from quickbeam.models.loading import refuse_unfit
from quickbeam.models.same_logits import expect, refuse_other_logits
from quickbeam.models.torch.model import likeliest
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import list_pass, uncommitted


class TransformersModel(Model):
    """Runs `model` through transformers' modelling code, over quickbeam's pages.

    `reason`: why no other back end runs it, in words.

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
            self._context.pool = self._pool
            vocab_size = int(model.get_output_embeddings().weight.shape[0])
            super().__init__(config, model.dtype, model.device, vocab_size, self._pool)
            self.chunk, self._reason = chunk, reason
            self._features: Features | None = None
            refuse_other_logits(self, *expected, model)
        table, head = (getattr(one, "weight", None) for one in (self.embedding, self.head))
        read = [one for one in model.parameters() if one is not table or one is head]
        self.weight_bytes = sum(one.nbytes for one in read)

    @inference
    def forward(self, batch: Batch) -> list[Passed]:
        parts = [*map(uncommitted, batch.parts)]
        listed = list_pass(parts, self._pool, batch.tokens, batch.wanted)
        rows = listed.to(self.device)
        logits = forward(self._model, self._context, rows.tokens, rows)
        best = None if self.device.type == "cpu" else likeliest(logits).tolist()
        if self.device.type == "mps":  # it has no float64, in which tokens are chosen
            logits = logits.cpu()
        hidden = self._features.take()[0] if self._features is not None else None
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
