"""The small networks of drafters, beside a target: a `Stack`, and its weights by name.

The kernels run the stack (`passes.NativePasses`), PyTorch runs it (`passes.TorchPasses`), and
training differentiates what PyTorch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from quickbeam.drafters.folder import rope_parameters
from quickbeam.models.families.reading import linear
from quickbeam.models.native.quantised import Weight
from quickbeam.models.stack import Attention, Linear, Norm, Rotary, Stack
from quickbeam.models.torch.network import LayerStack
from quickbeam.models.torch.paged_attention import AttentionParams
from quickbeam.models.weights.parameters import Parameters
from quickbeam.models.weights.sources import ParameterSource, dense
from quickbeam.models.weights.tensor_files import TensorFiles

EMBEDDING = "embedding"  # the name of a stack's embedding, which is not among a network's weights


class StackBuilder:
    """Describes the parts of a stack, and notes the shapes of their weights.

    `shapes`: by name, of weights that are trained.
    """

    def __init__(self, epsilon: float) -> None:
        self.shapes, self._epsilon = dict[str, list[int]](), epsilon

    def weight(self, name: str, *shape: int) -> str:
        """Note a weight, and return its name."""
        self.shapes[name] = list(shape)
        return name

    def linear(self, inputs: int, *modules: tuple[str, int], bias: bool = False) -> Linear:
        """Return the product of modules, each by its name and outputs, one below the other."""
        for name, outputs in modules:
            self.weight(f"{name}.weight", outputs, inputs)
            if bias:
                self.weight(f"{name}.bias", outputs)
        return linear(*(name for name, _ in modules), bias=bias)

    def norm(self, name: str, size: int) -> Norm:
        """Return an RMS norm."""
        return Norm((self.weight(f"{name}.weight", size),), self._epsilon)

    def attention(
        self, config: Any, qkv: Linear, out: str, window: int | None, **changes: Any
    ) -> Attention:
        """Return an attention with rotary angles by the sizes of a drafter's `config`.

        `out`: the name of the module behind it. `changes`: other fields of `Attention`.
        """
        fields: dict[str, Any] = {"scaling": config.head_dim**-0.5, **changes}
        return Attention(
            qkv,
            self.linear(config.heads * config.head_dim, (out, config.hidden_size)),
            config.heads,
            config.kv_heads,
            config.head_dim,
            window=window,
            rotary=Rotary(),
            rotary_dim=config.head_dim,
            **fields,
        )


class DrafterParameters(Parameters):
    """A drafter's parameters by the names of its stack (`Parameters`).

    `given`: those that are in memory. `stored`: where the others are in `files`. `dtype`: of all.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        given: dict[str, Weight],
        stored: Mapping[str, ParameterSource] = MappingProxyType({}),
        files: TensorFiles | None = None,
    ) -> None:
        self.config, self.dtype, self.given = config, dtype, given
        self._stored, self._files = stored, files

    def shape(self, name: str) -> list[int]:
        if name in self.given:
            return list(self.given[name].shape)
        assert self._files is not None
        return self._stored[name].shape(self._files)

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        if name in self.given:
            rows = self.given[name][first:last]
            return rows.to(self.dtype) if isinstance(rows, torch.Tensor) else rows
        assert self._files is not None
        end = self.shape(name)[0] if last is None else last
        stored = self._stored[name]
        return dense(stored.rows(self._files, first, end), stored).to(self.dtype)


class Weights(nn.Module):
    """Weights in a tree of modules, by the parts of their names; `module[part]` is one of these."""

    def __getitem__(self, part: str | int) -> Any:
        return getattr(self, str(part))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def put(self, name: str, tensor: torch.Tensor, trained: bool = True) -> None:
        """Add a weight. `trained`: whether it is a parameter; else it is a buffer."""
        part, _, rest = name.partition(".")
        if rest:
            if not hasattr(self, part):
                self.add_module(part, Weights())
            self[part].put(rest, tensor, trained)
        elif trained:
            self.register_parameter(part, nn.Parameter(tensor))
        else:
            self.register_buffer(part, tensor)


class LayerInputs(NamedTuple):
    """What layers read besides the residual stream where there are no pages (`PassInputs`).

    `attend(layer, query, key, value)`: the attention of a layer, by its number. Each is `[n, heads,
    head_dim]`, queries and keys rotated; it returns `[n, heads * head_dim]`.
    """

    angles: Mapping[Rotary, tuple[torch.Tensor, torch.Tensor]]
    attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rows: None = None

    def attention(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `PassInputs.attention`."""
        attended: torch.Tensor = self.attend(params.index, query, key, value)
        return attended


class DrafterNetwork(Weights):
    """A network beside a target, whose `embedding` and `head` it may use.

    These two are not among its weights and are not saved.
    """

    def __init__(
        self,
        config: Any,
        stack: Stack,
        shapes: Mapping[str, Sequence[int]],
        embedding: nn.Module | None,
        head: nn.Module | None,
    ) -> None:
        super().__init__()
        self.config, self.stack = config, stack
        # in a dictionary, so that they don't become parts of this module
        self._shared = {"embedding": embedding, "head": head}
        for name, shape in shapes.items():
            self.put(name, initial(name, shape))

    @property
    def embedding(self) -> Any:
        return self._shared["embedding"]

    @property
    def head(self) -> Any:
        return self._shared["head"]

    def parameters_of_stack(self, dtype: torch.dtype) -> DrafterParameters:
        """Return the weights as a stack's parameters."""
        config = SimpleNamespace(rope_parameters=rope_parameters(self.config.rope))
        weights: dict[str, Any] = dict(self.named_parameters()) | dict(self.named_buffers())
        return DrafterParameters(config, dtype, weights)

    def layers_in_torch(self) -> LayerStack:
        """Return the stack in PyTorch, whose gradients become those of the weights."""
        weight = next(self.parameters())
        parameters = self.parameters_of_stack(weight.dtype)
        return LayerStack(parameters, self.stack, weight.device, weight.dtype)


def initial(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a new weight: norms are ones, biases and kernels of convolutions zeros."""
    if name.endswith(".bias") or len(shape) == 3:
        return torch.zeros(*shape)
    if len(shape) == 1:
        return torch.ones(*shape)
    bound = shape[-1] ** -0.5  # as `nn.Linear` begins
    return torch.empty(*shape).uniform_(-bound, bound)
