"""The network that chooses clusters for a row of the drafter (DynaSpec, 2510.13847).

It runs before the drafter's layer has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.errors import InvalidInput
from quickbeam.models.linear import pack_weight

EPS = 1e-6


@dataclass(frozen=True)
class RouterConfig:
    """The shape of a router.

    Raises `InvalidInput` for sizes that are not integers of at least 1.
    """

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
    """A two-layer MLP that gives each cluster a score.

    It reads what goes into the drafter's layer: the hidden state of the row before, and the
    embedding of the token. Each of these is RMS-normed, without weights.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.hidden_size + config.embed_size, config.width)
        self.down = nn.Linear(config.width, config.clusters)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the scores `[..., clusters]` as float32 logits.

        `hidden`: `[..., hidden_size]`. `embedded`: `[..., embed_size]`.
        """
        x = normed(hidden, embedded).to(self.up.weight.dtype)
        return self.down(F.silu(self.up(x))).float()  # type: ignore[no-any-return]


def normed(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Return both inputs concatenated, each divided by its root mean square, in float32."""
    parts = [F.rms_norm(part.float(), (part.shape[-1],), eps=EPS) for part in (hidden, embedded)]
    return torch.cat(parts, -1)


class FastRouter:
    """What a `Router` computes, for inference alone.

    Its weights are copied, as `dtype` on `device`, and packed where the CPU can do that
    (`target.linear`). It runs once a call of the drafter, each time on cold caches, so its speed
    depends on the number of operations.
    """

    def __init__(self, router: Router, dtype: torch.dtype, device: torch.device) -> None:
        self.config = router.config
        self._up = _product(router.up, dtype, device, "swish", F.silu)
        self._down = _product(router.down, dtype, device, "none", None)
        self._dtype = dtype

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the scores `[n, clusters]` as float32 logits.

        `hidden`: `[n, hidden_size]`. `embedded`: `[n, embed_size]`.
        """
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
    """Return a function that applies a linear layer and an activation.

    `after` is oneDNN's name of the activation, `plain` the same as a function, or None for none.
    """
    weight, bias = (
        tensor.detach().to(device, dtype, copy=True) for tensor in (linear.weight, linear.bias)
    )
    packed = pack_weight(weight)
    if packed is not None:
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, after, [], "")
    return lambda x: (
        F.linear(x, weight, bias) if plain is None else plain(F.linear(x, weight, bias))
    )
