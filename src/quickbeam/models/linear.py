"""Linear layers packed once for the CPU: for the native kernels, or for oneDNN.

oneDNN is for machines without native kernels. It keeps a packed weight in the blocks that its
kernels read. PyTorch's inductor uses that for frozen weights. Called eagerly, it is about twice as
fast as `F.linear` for a few rows. The operators are private to PyTorch. Where they are missing, or
refuse a weight, `F.linear` is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quickbeam.models.native.library import Kernels, kernels
from quickbeam.models.native.operands import plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BFLOAT16, AnyPacked, Packer
from quickbeam.models.quantised import head_format

logger = logging.getLogger(__name__)

ROWS = 16  # how many rows at a time the packing is made for; it serves any number of rows
# the most rows of a verification; more rows are a part of a prompt, which is cut in the same way
# however the answer is decoded
WIDEST = 128


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the `[out, in]` weight in oneDNN's blocks (an opaque tensor).

    None where it can't be packed.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    try:
        if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), ROWS
        )
        torch.ops.mkldnn._linear_pointwise(
            weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], ""
        )
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info("weights stay unpacked: %s", error)
        return None
    return packed


def bias_of(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """Return the bias `[out]` of linears fused by rows.

    A linear without one has zeros. None where no linear has a bias.
    """
    if all(linear.bias is None for linear in linears):
        return None
    given = next(linear.bias for linear in linears if linear.bias is not None)
    return torch.cat(
        [
            given.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


class NativeLinear(nn.Module):
    """A packed product as a module: `[..., in]` bfloat16 to `[..., out]` bfloat16.

    A row's bits don't depend on the other rows. `forward` raises `ValueError` for another dtype or
    width.
    """

    def __init__(self, found: Kernels, packed: AnyPacked) -> None:
        super().__init__()
        self.packed, self.in_features, self.out_features = packed, packed.inputs, packed.outputs
        self._program = Program(found)
        source, target = (
            self._program.given("x", packed.inputs),
            self._program.given("y", packed.outputs),
        )
        self._program.linear(packed, source, target)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a product of {x.dtype} {list(x.shape)}: must be bfloat16 [..., "
                f"{self.in_features}]"
            )
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        if rows := x.numel() // self.in_features:
            self._program.run(plain_rows(rows), {"x": x, "y": out})
        return out


def native_linear(
    linears: Sequence[nn.Linear | Conv1D], name: str = BFLOAT16
) -> NativeLinear | None:
    """Return linears fused by rows for the native kernels, with `name` weights.

    None where the native kernels can't be used for them.
    """
    weights = [linear.weight.detach() for linear in linears]
    found = (
        kernels()
        if weights[0].device.type == "cpu" and weights[0].dtype is torch.bfloat16
        else None
    )
    if isinstance(linears[0], Conv1D):
        weights, bias = [weight.t() for weight in weights], linears[0].bias
    else:
        bias = bias_of(linears)
    if found is None or weights[0].shape[1] % 2:
        return None
    return NativeLinear(found, Packer(found, name).pack(weights, bias))


class FastLinear(nn.Module):
    """`x @ weight.T + bias` for `[..., in]`, packed for oneDNN where that is possible.

    Takes over the weights. Several linears are fused by rows. This class serves what
    `native_linear` can't: other number formats, odd numbers of inputs, and machines without native
    kernels.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.out_features, self.in_features = self.weight.shape
        self.bias = bias_of(linears)
        # Between these numbers of rows, each row has the same bits (`bit_exact.py`). Where that
        # needs two rows, a lone row is run with a copy of itself. More rows, up to `WIDEST`, are
        # run in parts.
        self.min_rows, self.max_rows = 1, WIDEST
        packed = pack_weight(self.weight)
        self.packed = packed is not None
        if packed is not None:
            self.weight = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if not rows:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if rows < self.min_rows:
            return self._product(x.expand(*x.shape[:-2], 2, self.in_features).contiguous())[
                ..., :1, :
            ]
        if self.max_rows < rows <= WIDEST:
            parts = x.reshape(rows, self.in_features).tensor_split(-(-rows // self.max_rows))
            return torch.cat([self._product(part) for part in parts]).view(
                *x.shape[:-1], self.out_features
            )
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return out
        return F.linear(x, self.weight, self.bias)


def pack_linears(model: nn.Module, name: str = BFLOAT16, head: nn.Module | None = None) -> int:
    """Replace every linear layer below `model` by a packed one, where packing works.

    Returns how many were replaced. A shared weight (a head tied to the embedding) is copied, not
    taken away. `name`: the format of native products' weights; the `head` has that of
    `head_format`.
    """
    replaced = 0
    for parent in list(model.modules()):
        for attribute, child in list(parent.named_children()):
            fast: nn.Module | None = None
            if type(child) in (nn.Linear, Conv1D):
                fast = native_linear([child], head_format(name) if child is head else name)
            if (
                fast is None
                and name == BFLOAT16
                and type(child) is nn.Linear
                and (packed := FastLinear(child)).packed
            ):
                fast = packed
            if fast is not None:
                setattr(parent, attribute, fast)
                replaced += 1
    return replaced
