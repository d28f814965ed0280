"""Linear layers with weights of 8 or 4 bits, in plain PyTorch: what the native kernels compute, bit
for bit.

A row of inputs is quantised by itself, in groups of 32: whole numbers of -127 to 127 and a scale
each. Weights of `int8` are such whole numbers with a scale for each output; those of `int4` are 0
to 15, with a scale and a lowest value for each output and group. Sums within a group are whole
numbers below 2^24, so every way to add them is exact; the groups' sums are scaled and added in
float32, one after the other. So a row's bits depend on nothing but the row and the weights.

`native/quantised.h` is the fast path; models that it can't run take `QuantisedLinear`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quickbeam.errors import InvalidInput
from quickbeam.target.native.library import FORMATS
from quickbeam.target.native.quantised import BFLOAT16, GROUP, INT4, INT8, NOT_FINITE

LEAST = 2.0**-100  # groups whose largest number is smaller count as zeros
LARGEST_HALF = 65504.0
# tried from the smallest weight of a group to the largest
LEVELS = (8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 15.5, 16.0, 17.0)
# as a tensor: a number over a tensor is rounded twice, as its reciprocal and the product
TOP = torch.tensor(127.0)


def check_weights(name: str) -> str:
    """A kind of weights, as it came. Raises `InvalidInput` naming the known ones."""
    if name not in FORMATS:
        raise InvalidInput(f"unknown weights {name!r}; known: {', '.join(FORMATS)}")
    return name


def refuse_unfit_for(
    name: str, model: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `InvalidInput` for a model that can't have `name` weights: on another device, of
    another number format, with weights that are quantised already, or with most of them in other
    layers than linear ones."""
    if name == BFLOAT16:
        return
    asked = f"weights={name!r}"
    refuse_place(name, device, dtype)
    for module in model.modules():
        kind, tensors = type(module), own_tensors(module)
        if (isinstance(module, nn.Linear) and kind is not nn.Linear) or any(
            is_whole(tensor) for tensor in tensors
        ):
            raise InvalidInput(
                f"{asked}: the checkpoint's own weights are quantised or adapted "
                f"({kind.__name__}); leave weights out, "
                "or take the model's unquantised weights"
            )
        if any(isinstance(tensor, nn.Parameter) and tensor.dim() > 2 for tensor in tensors):
            raise InvalidInput(
                f"{asked}: {kind.__name__} holds weights that are no linear layer's "
                "(several experts); leave weights out"
            )


def refuse_place(name: str, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise `InvalidInput` where quantised weights can't be had on a device or in a number
    format."""
    if name == BFLOAT16:
        return
    if device.type != "cpu":
        raise InvalidInput(
            f"weights={name!r} are for the CPU, the model is on {device.type}: "
            "leave weights out, or take device='cpu'"
        )
    if dtype not in (torch.bfloat16, None):
        kind = str(dtype).removeprefix("torch.")
        raise InvalidInput(
            f"weights={name!r} go with rows of bfloat16, not {kind}: leave dtype out, or weights"
        )


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a module without those below it."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers in rows, as quantised weights do."""
    return not tensor.is_floating_point() and tensor.dtype is not torch.bool and tensor.dim() > 1


def head_format(name: str) -> str:
    """What a model's head is kept in where its other weights are `name`: its errors are those of
    the logits, so it has 8 bits at least."""
    return INT8 if name == INT4 else name


class Quantised(NamedTuple):
    """A weight `[outputs, inputs]`. `values`: `[outputs, groups, 32]` int8. `scales`: `[outputs]`
    float32 of `int8`, `[outputs, groups]` float16 of `int4`. `lows`: of `int4`, what is added to
    the scaled values, `[outputs, groups]` float16."""

    values: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor | None = None

    @property
    def dense(self) -> torch.Tensor:
        """`[outputs, groups * 32]` float32: the weights that they stand for."""
        found = self.values * self.scales.float().view(len(self.values), -1, 1)
        return (found if self.lows is None else found + self.lows.float()[..., None]).flatten(1)


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """`[n, inputs]` to `[n, groups, 32]` float32."""
    return F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)


def quantise(weight: torch.Tensor, name: str) -> Quantised:
    """`[outputs, inputs]` to `int8` or `int4`. Raises `InvalidInput` for weights that are not
    finite."""
    if not bool(weight.isfinite().all()):
        raise InvalidInput(NOT_FINITE)
    groups = in_groups(weight.to(torch.bfloat16))
    if name == INT8:
        top = groups.abs().amax((1, 2)).clamp_min(LEAST)
        return Quantised((groups * (TOP / top)[:, None, None]).round().to(torch.int8), top / 127)
    return _int4(groups)


def _int4(groups: torch.Tensor) -> Quantised:
    """Of several distances between levels, the one whose least-squares fit leaves the smallest
    error. Weights that lie on 16 levels or fewer already, as those of many 4-bit checkpoints, stay
    on them."""
    low, high = groups.aminmax(dim=2)
    groups, span = groups - low[..., None], high - low
    above = _in_turn(groups)
    best, by, slope, base = (
        torch.full_like(low, torch.inf),
        torch.zeros_like(low),
        torch.zeros_like(low),
        torch.zeros_like(low),
    )
    for levels in LEVELS:
        tried = torch.where(span < LEAST, 0, torch.tensor(levels) / span)
        values = (groups * tried[..., None]).round().clamp_max(15)
        level, across, square = (
            _in_turn(values),
            _in_turn(groups * values),
            _in_turn(values * values),
        )
        spread = GROUP * square - level * level
        fit = torch.where(spread > 0, (GROUP * across - above * level) / spread, 0)
        rest = (above - fit * level) / GROUP
        off = groups - (fit[..., None] * values + rest[..., None])
        error = _in_turn(off * off)
        better = error < best
        best, by = torch.where(better, error, best), torch.where(better, tried, by)
        slope, base = torch.where(better, fit, slope), torch.where(better, rest, base)
    values = (groups * by[..., None]).round().clamp_max(15).to(torch.int8)
    return Quantised(values, _half(slope), _half(base + low))


def _in_turn(groups: torch.Tensor) -> torch.Tensor:
    """The sums of `[..., 32]`, one number after the other as the kernels add them."""
    total = torch.zeros_like(groups[..., 0])
    for i in range(GROUP):
        total = total + groups[..., i]
    return total


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half()


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[n, inputs]` to whole numbers `[n, groups, 32]` (float32) and scales `[n, groups]`. A
    group that holds what is not finite has the scale NaN, and so has its row of results."""
    groups = in_groups(x.to(torch.bfloat16))
    top = groups.abs().amax(2)
    finite = top.isfinite()
    used = finite & (top >= LEAST)
    top = torch.where(used, top, 1)
    values = torch.where(used[..., None], groups * (TOP / top)[..., None], 0).round()
    return values, torch.where(used, top / 127, torch.where(finite, 0, torch.nan))


def product(x: torch.Tensor, weight: Quantised) -> torch.Tensor:
    """`[n, inputs]` by a weight to `[n, outputs]` float32, group by group."""
    values, scales = quantise_rows(x)
    y = x.new_zeros(len(x), len(weight.values), dtype=torch.float32)
    for group in range(values.shape[1]):
        sums = values[:, group] @ weight.values[:, group].float().T
        if weight.lows is not None:
            total = values[:, group].sum(1, keepdim=True)
            sums = sums * weight.scales[:, group].float() + weight.lows[:, group].float() * total
        y += sums * scales[:, group, None]
    return y if weight.lows is not None else y * weight.scales


class QuantisedLinear(nn.Module):
    """`product` and a bias as a layer, `[..., in]` to `[..., out]` of the same type: what runs
    where there are no native kernels. Slow."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, name: str) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        quantised = quantise(weight.detach(), name)
        self.register_buffer("values", quantised.values)
        self.register_buffer("scales", quantised.scales)
        self.register_buffer("lows", quantised.lows)
        self.bias = None if bias is None else bias.detach().float()

    @property
    def quantised(self) -> Quantised:
        return Quantised(
            self.get_buffer("values"), self.get_buffer("scales"), self._buffers["lows"]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = product(x.reshape(-1, self.in_features), self.quantised)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def quantise_linears(model: nn.Module, name: str, head: nn.Module | None = None) -> int:
    """Replace every linear layer below `model` by a `QuantisedLinear`; give how many. The `head`
    has weights of `head_format`."""
    replaced = 0
    for parent in list(model.modules()):
        for attribute, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D):
                linear: Any = child
                weight = linear.weight.t() if isinstance(child, Conv1D) else linear.weight
                kind = head_format(name) if child is head else name
                setattr(parent, attribute, QuantisedLinear(weight, linear.bias, kind))
                replaced += 1
    return replaced
