"""A model's parameters by name, wherever they are: in a model of transformers, or in files.

`checkpoint.py` reads them from files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quickbeam.models.native.quantised import Weight
from quickbeam.models.stack_tensors import tensor_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Parameters(ABC):
    """Parameters by the names of transformers' causal language models.

    `config`: the model's configuration, of its text part. `dtype`: what all are given in.
    """

    config: Any
    dtype: torch.dtype

    @abstractmethod
    def shape(self, name: str) -> list[int]:
        """Return the shape of one."""

    @abstractmethod
    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Return rows `first` to `last` (excluded) of one; to its end where `last` is None."""

    def __call__(self, name: str) -> Any:
        """Return the whole of one."""
        return self.rows(name)

    def mapped(self, name: str) -> Any:
        """Return the whole of one, whose rows are read from its file as they are needed, where that
        can be."""
        return self.rows(name)

    def like(self, name: str) -> Weight:
        """Return something of the shape and format of one, without its numbers."""
        return torch.empty(self.shape(name), device="meta")

    def release(self, layers: str, layer: int | None) -> None:  # noqa: B027
        """Let go of a layer of the list `layers`, which is not needed any more; None: of a head."""


class ModelParameters(Parameters):
    """Those of a model of transformers, which is taken over: what is released is emptied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.dtype = model.config.get_text_config(), model.dtype
        self._model = model

    def shape(self, name: str) -> list[int]:
        return list(tensor_of(self._model, name).shape)

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        return tensor_of(self._model, name).detach()[first:last]

    def release(self, layers: str, layer: int | None) -> None:
        if layer is None:
            self._model.set_output_embeddings(nn.Identity())
        else:
            modules: Any = self._model.get_submodule(layers)
            modules[layer] = nn.Identity()
