"""A model's parameters by name, wherever they are: in a model of transformers, or in files.

`checkpoint.py` reads them from files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from quickbeam.models.native.quantised import Weight
from quickbeam.models.stack_tensors import tensor_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Parameters(Protocol):
    """Parameters by the names of transformers' causal language models.

    `config`: the model's configuration, of its text part. `dtype`: what all are given in.
    """

    config: Any
    dtype: torch.dtype

    def __call__(self, name: str) -> torch.Tensor:
        """Return the whole of one."""

    def mapped(self, name: str) -> torch.Tensor:
        """Return the whole of one, whose rows are read from its file as they are needed, where that
        can be."""

    def shape(self, name: str) -> list[int]:
        """Return the shape of one."""

    def like(self, name: str) -> Weight:
        """Return something of the shape and format of one, without its numbers."""

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return rows `first` to `last` (excluded) of one; to its end where `last` is None."""

    def release(self, layers: str, layer: int | None) -> None:
        """Say that a layer of the list `layers` is not needed any more; None: that no head is."""


class ModelParameters:
    """Those of a model of transformers, which is taken over: what is released is emptied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.dtype = model.config.get_text_config(), model.dtype
        self._model = model

    def __call__(self, name: str) -> torch.Tensor:
        return tensor_of(self._model, name).detach()

    def mapped(self, name: str) -> torch.Tensor:
        return self(name)

    def shape(self, name: str) -> list[int]:
        return list(self(name).shape)

    def like(self, name: str) -> torch.Tensor:
        return self(name)

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        return self(name)[first:last]

    def release(self, layers: str, layer: int | None) -> None:
        if layer is None:
            self._model.set_output_embeddings(nn.Identity())
        else:
            modules: Any = self._model.get_submodule(layers)
            modules[layer] = nn.Identity()
