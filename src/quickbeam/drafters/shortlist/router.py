"""The network that chooses clusters for a row of the drafter (DynaSpec, 2510.13847).

It runs before the drafter's layer has run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.errors import InvalidInput

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
    embedding of the token. Each of these is RMS-normed, without weights. `forward` is the plain
    product; `NativeRouter` is the same in the native kernels.
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
