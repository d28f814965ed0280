"""DynaSpec's router (2510.13847): it scores the clusters before the drafter's layer has run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import Packer

EPS = 1e-6


@dataclass(frozen=True)
class RouterConfig:
    """The shape of a router."""

    hidden_size: int
    embed_size: int
    width: int
    clusters: int


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
    normed_hidden = F.rms_norm(hidden.float(), hidden.shape[-1:], eps=EPS)
    normed_embedded = F.rms_norm(embedded.float(), embedded.shape[-1:], eps=EPS)
    return torch.cat([normed_hidden, normed_embedded], -1)


class NativeRouter:
    """A router in the native kernels: the packed weights of a `Router`. It is called as that.

    `name`: the format in which weights are kept, of `library.FORMATS`; None: that of `rows_format`.
    """

    def __init__(self, router: Router, kernels: Kernels, name: str | None = None) -> None:
        config = router.config
        odd = config.width % 2  # an odd width is padded with one unit that stays 0
        up_weight = F.pad(router.up.weight.detach(), (0, 0, 0, odd))
        up_bias = F.pad(router.up.bias.detach(), (0, odd))
        down_weight = F.pad(router.down.weight.detach(), (0, odd))
        up_packer = Packer(kernels, name or rows_format(up_weight))
        up = up_packer.pack([up_weight], up_bias)
        down_packer = Packer(kernels, name or rows_format(down_weight))
        down = down_packer.pack([down_weight], router.down.bias)

        program = Program(kernels)
        hidden = program.external("hidden", config.hidden_size, True)
        embedded = program.external("embedded", config.embed_size, True)
        scores = program.external("scores", config.clusters, True)
        inputs = program.buffer(config.hidden_size + config.embed_size)
        middle = program.buffer(up.outputs)
        program.norm(hidden, inputs, None, EPS)
        program.norm(embedded, inputs, None, EPS, column=config.hidden_size)
        program.linear(up, inputs, middle, library.ACTIVATE)
        program.linear(down, middle, scores)
        self._program = program
        self._clusters = config.clusters

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the scores `[n, clusters]` float32. See `Router.forward`."""
        scores = torch.empty(len(hidden), self._clusters)
        tensors = {
            "hidden": hidden.float().contiguous(),
            "embedded": embedded.float().contiguous(),
            "scores": scores,
        }
        self._program.run(plain_rows(len(hidden)), tensors)
        return scores
