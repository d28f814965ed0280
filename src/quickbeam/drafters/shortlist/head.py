"""A drafter's head on parts of the vocabulary: the frequent block and chosen clusters.

Only the reference backend, "plain", copies rows of the weight in a call.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quickbeam.drafters.shortlist.layout import Layout, Scores
from quickbeam.drafters.shortlist.native import NativeBlocks
from quickbeam.errors import InvalidInput
from quickbeam.models.native.library import kernels

logger = logging.getLogger(__name__)

BACKENDS = ("plain", "native", "triton")


Run = Callable[[torch.Tensor, torch.Tensor], Scores]


class BlockHead:
    """A head that scores the frequent block and chosen clusters: `logits = h · W[blocks]ᵀ`.

    `weight`: `[vocab, d]`, the head in the order of token ids. It is not changed. All backends but
    "plain" copy it in the layout's order and don't need it afterwards. `most`: the largest number
    of clusters in one call; None: all of them. `backend`:

    - "plain": gathers the rows, then makes one product. This is the reference.
    - "native": one call of the native kernels (bfloat16 on a CPU), with logits in float32.
    - "triton": one kernel for all blocks (`kernels.py`), on CUDA or in Triton's interpreter. The
      number of columns is the same for any choice of clusters, and nothing waits for the device, so
      that a call can be captured in a CUDA graph.

    With None, a CPU takes "native" and CUDA takes "triton" where they are available, else "plain".

    Raises `InvalidInput` for a backend that the device can't run, and for a weight that doesn't fit
    the layout.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        layout: Layout,
        *,
        most: int | None = None,
        backend: str | None = None,
    ) -> None:
        if weight.dim() != 2 or len(weight) != layout.vocab:
            raise InvalidInput(
                f"a head of shape {list(weight.shape)}: must be [{layout.vocab}, d] for this layout"
            )
        self.layout = layout
        self.most = layout.clusters if most is None else min(most, layout.clusters)
        self.backend = _choose(backend, weight.device.type, native_fits(weight))
        self.run = _MAKERS[self.backend](weight.detach(), layout, self.most)

    def __call__(self, h: torch.Tensor, clusters: torch.Tensor) -> Scores:
        """Score the frequent block and `clusters` for `h` `[n, d]`, in the weight's dtype.

        `clusters`: `[k]` int64, ascending, without repeats. They may be padded with -1 at the end,
        which counts for nothing. Raises `ValueError` for more than `most` clusters.
        """
        if len(clusters) > self.most:
            raise ValueError(
                f"{len(clusters)} clusters: this head was made for {self.most} a call at most"
            )
        return self.run(h, clusters)


def native_fits(weight: torch.Tensor) -> bool:
    """Whether the native kernels can multiply with this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and weight.shape[1] % 2 == 0
        and kernels() is not None
    )


def _choose(backend: str | None, device: str, native: bool = False) -> str:
    triton = importlib.util.find_spec("triton") is not None
    if backend is None:
        if device == "cuda" and not triton:
            logger.info("the drafter's head gathers rows: install triton for the fused kernel")
        if native:
            return "native"
        return "triton" if device == "cuda" and triton else "plain"
    if backend not in BACKENDS:
        raise InvalidInput(
            f"unknown backend {backend!r} of the drafter's head; known: {', '.join(BACKENDS)}"
        )
    if backend == "native" and not native:
        raise InvalidInput(
            "backend 'native' needs bfloat16 on a CPU and native kernels (quickbeam "
            "--version names them): use 'plain'"
        )
    if backend == "triton":
        if not triton:
            raise InvalidInput(
                "backend 'triton' needs the package triton: install it, or use 'plain'"
            )
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise InvalidInput(f"backend 'triton' needs CUDA, the head is on {device}: use 'plain'")
    return backend


def _plain(weight: torch.Tensor, layout: Layout, most: int) -> Run:
    def run(h: torch.Tensor, clusters: torch.Tensor) -> Scores:
        chosen = [layout.tokens(cluster) for cluster in clusters.tolist() if cluster >= 0]
        tokens = torch.cat([layout.order[: layout.frequent], *chosen]).to(weight.device)
        return Scores(F.linear(h, weight[tokens]), tokens)

    return run


def _triton(weight: torch.Tensor, layout: Layout, most: int) -> Run:
    from quickbeam.drafters.shortlist.kernels import FusedHead  # Triton is imported only here

    return FusedHead(weight, layout, most)


def _native(weight: torch.Tensor, layout: Layout, most: int) -> Run:
    library = kernels()
    assert library is not None
    return NativeBlocks(weight, layout, library)


_MAKERS: dict[str, Callable[[torch.Tensor, Layout, int], Run]] = {
    "plain": _plain,
    "native": _native,
    "triton": _triton,
}
