"""The network that says which clusters a row of the drafter calls for (DynaSpec, 2510.13847),
before its layer has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.errors import InvalidInput
from quickbeam.target.linear import pack_weight

EPS = 1e-6


@dataclass(frozen=True)
class RouterConfig:
    """The shape of a router. Raises `InvalidInput` for sizes that are not integers of at least
    1."""

    hidden_size: int
    embed_size: int
    width: int
    clusters: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInput(
                    f"router: {field.name}={value!r} must be an integer of at least 1"
                )


class Router(nn.Module):
    """Two-layer MLP from what goes into the drafter's layer (hidden state of the row before,
    embedding of the token) to a score of every cluster. Each input is RMS-normed, without
    weights."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.hidden_size + config.embed_size, config.width)
        self.down = nn.Linear(config.width, config.clusters)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_size]` and `[..., embed_size]` to `[..., clusters]` float32 logits."""
        x = normed(hidden, embedded).to(self.up.weight.dtype)
        return self.down(F.silu(self.up(x))).float()  # type: ignore[no-any-return]


def normed(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Both inputs side by side, each divided by its root mean square, in float32."""
    parts = [F.rms_norm(part.float(), (part.shape[-1],), eps=EPS) for part in (hidden, embedded)]
    return torch.cat(parts, -1)


class FastRouter:
    """What a `Router` computes, for inference alone: weights of `dtype` on `device`, copied, packed
    where the CPU can (`target.linear`).

    It runs once a call of the drafter, each time on cold caches, so what counts is the number of
    operations.
    """

    def __init__(self, router: Router, dtype: torch.dtype, device: torch.device) -> None:
        self.config = router.config
        self._up = _product(router.up, dtype, device, "swish", F.silu)
        self._down = _product(router.down, dtype, device, "none", None)
        self._dtype = dtype

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """`[n, hidden_size]` and `[n, embed_size]` to `[n, clusters]` float32 logits."""
        if self.config.hidden_size == self.config.embed_size:
            both = torch.stack([hidden, embedded], -2)
            x = F.rms_norm(both, both.shape[-1:], eps=EPS).flatten(-2)
        else:
            x = normed(hidden, embedded)
        return self._down(self._up(x.to(self._dtype))).float()


def _product(
    linear: nn.Linear,
    dtype: torch.dtype,
    device: torch.device,
    after: str,
    plain: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear layer and what comes after it: oneDNN's name of that, and the plain function."""
    weight, bias = (
        tensor.detach().to(device, dtype, copy=True) for tensor in (linear.weight, linear.bias)
    )
    packed = pack_weight(weight)
    if packed is not None:
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, after, [], "")
    return lambda x: (
        F.linear(x, weight, bias) if plain is None else plain(F.linear(x, weight, bias))
    )
