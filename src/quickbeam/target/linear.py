"""Linear layers packed once for the CPU.

oneDNN keeps a packed weight in the blocks that its kernels read, which PyTorch's inductor uses for frozen weights; called eagerly it is
about twice as fast as `F.linear` for a few rows. The operators are private to PyTorch, so their absence, or a refusal, leaves `F.linear`.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

ROWS = 16  # how many rows at a time the packing is made for; it serves any number
WIDEST = 128  # rows of a verification; longer parts of prompts are the same however the answer is decoded


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """The `[out, in]` weight in oneDNN's blocks (an opaque tensor), or None where it can't be packed."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    try:
        if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info("weights stay unpacked: %s", error)
        return None
    return packed


class FastLinear(nn.Module):
    """`x @ weight.T + bias` for `[..., in]`, packed where that is possible. Takes over the weights; several may be given, fused by rows."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.out_features, self.in_features = self.weight.shape
        self.bias: torch.Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            self.bias = torch.cat(
                [linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach() for linear in linears]
            )
        # Between these numbers of rows, each row has the same bits (`exactness.py`). A lone row takes a copy along where that needs two;
        # more rows, up to `WIDEST`, go in parts.
        self.min_rows, self.max_rows = 1, WIDEST
        packed = pack_weight(self.weight)
        self.packed = packed is not None
        if packed is not None:
            self.weight = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if rows < self.min_rows:
            return self._product(x.expand(*x.shape[:-2], 2, self.in_features).contiguous())[..., :1, :]
        if self.max_rows < rows <= WIDEST:
            parts = x.reshape(rows, self.in_features).tensor_split(-(-rows // self.max_rows))
            return torch.cat([self._product(part) for part in parts]).view(*x.shape[:-1], self.out_features)
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` below `model` by a packed one, where packing works; give how many. A shared weight (a head tied to the
    embedding) is copied, not taken away."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (fast := FastLinear(child)).packed:
                setattr(parent, name, fast)
                replaced += 1
    return replaced
