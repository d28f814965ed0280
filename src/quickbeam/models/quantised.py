"""Linear layers with weights of 8 or 4 bits, in plain PyTorch.

They compute what the native kernels compute, bit for bit. The fast path is `native/quantised.h`.
Models that it can't run take `QuantisedLinear`.

Each row of inputs is quantised by itself, in groups of 32. A group becomes whole numbers from -127
to 127 and one scale. `int8` weights are whole numbers in the same range, with one scale per output.
`int4` weights are whole numbers from 0 to 15, with one scale and one lowest value per output and
group.

The sum within a group is a whole number below 2^24, which float32 holds exactly, so the order of
its additions does not matter. The sums of the groups are scaled and added in float32, one after the
other. So the bits of a row's result depend on nothing but the row and the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quickbeam.errors import InvalidInput
from quickbeam.models.native.library import FORMATS
from quickbeam.models.native.quantised import BFLOAT16, GROUP, INT4, INT8, NOT_FINITE

LEAST = 2.0**-100  # a group whose largest number is smaller counts as zeros
LARGEST_HALF = 65504.0
# steps between a group's smallest and largest weight, which `_int4` tries one after the other
LEVELS = (8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 15.5, 16.0, 17.0)
# A tensor: PyTorch computes a number divided by a tensor as the number times the reciprocal, which
# rounds twice.
TOP = torch.tensor(127.0)


def check_weights(name: str) -> str:
    """Return `name` if it is a known kind of weights.

    Raises `InvalidInput`, which names the known kinds, if it is not.
    """
    if name not in FORMATS:
        raise InvalidInput(f"unknown weights {name!r}; known: {', '.join(FORMATS)}")
    return name


def refuse_unfit_for(
    name: str, model: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `InvalidInput` for a model that can't have `name` weights.

    That is a model on another device than the CPU, a model in another number format than bfloat16,
    a model whose linear layers are quantised or adapted already, or a model with parameters of more
    than two dimensions (several experts in one tensor).
    """
    if name == BFLOAT16:
        return
    asked = f"weights={name!r}"
    refuse_place(name, device, dtype)
    for module in model.modules():
        kind, tensors = type(module), own_tensors(module)
        # linears of the architecture's own stay as they are
        own = kind.__module__.startswith(("transformers.models.", "torch.nn.modules."))
        if (isinstance(module, nn.Linear) and kind is not nn.Linear and not own) or any(
            is_whole(tensor) for tensor in tensors
        ):
            raise InvalidInput(
                f"{asked}: the checkpoint's own weights are quantised or adapted "
                f"({kind.__name__}); leave weights out, "
                "or take the model's unquantised weights"
            )
        if any(is_several(module, tensor) for tensor in tensors):
            raise InvalidInput(
                f"{asked}: {kind.__name__} holds weights that are no linear layer's "
                "(several experts); leave weights out"
            )


def refuse_place(name: str, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise `InvalidInput` if a device or a number format can't have quantised weights.

    They need the CPU and bfloat16. `dtype` None stands for the default.
    """
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
    """Return the parameters of a module and the buffers that a checkpoint holds.

    Those of its submodules are not among them. Other buffers are no weights but tables, such as
    the numbers of the positions.
    """
    tables = module._non_persistent_buffers_set
    buffers = module.named_buffers(recurse=False)
    return [
        *module.parameters(recurse=False),
        *(buffer for name, buffer in buffers if name not in tables),
    ]


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers in rows, as quantised weights do.

    That is any dtype but floating point and bool, and at least two dimensions.
    """
    return not tensor.is_floating_point() and tensor.dtype is not torch.bool and tensor.dim() > 1


def is_several(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor of `module` holds the weights of several experts."""
    convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    matrices = sum(size > 1 for size in tensor.shape) > 2
    return isinstance(tensor, nn.Parameter) and matrices and not convolution


def head_format(name: str) -> str:
    """Return the format of a model's head if its other weights are `name`.

    Errors of the head are errors of the logits, so the head has at least 8 bits.
    """
    return INT8 if name == INT4 else name


class Quantised(NamedTuple):
    """A quantised weight `[outputs, inputs]`.

    `values`: `[outputs, groups, 32]` int8. `scales`: `[outputs]` float32 for `int8`,
    `[outputs, groups]` float16 for `int4`. `lows`: for `int4` what is added to the scaled values,
    `[outputs, groups]` float16; for `int8` None.
    """

    values: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor | None = None

    @property
    def dense(self) -> torch.Tensor:
        """The weights that the numbers stand for, `[outputs, groups * 32]` float32."""
        found = self.values * self.scales.float().view(len(self.values), -1, 1)
        return (found if self.lows is None else found + self.lows.float()[..., None]).flatten(1)


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """Return `[n, inputs]` in groups, `[n, groups, 32]` float32, padded with zeros."""
    return F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)


def quantise(weight: torch.Tensor, name: str) -> Quantised:
    """Quantise a weight `[outputs, inputs]` to `int8` or `int4`.

    The weight is rounded to bfloat16 first. Raises `InvalidInput` for weights that are not finite.
    """
    if not bool(weight.isfinite().all()):
        raise InvalidInput(NOT_FINITE)
    groups = in_groups(weight.to(torch.bfloat16))
    if name == INT8:
        top = groups.abs().amax((1, 2)).clamp_min(LEAST)
        return Quantised((groups * (TOP / top)[:, None, None]).round().to(torch.int8), top / 127)
    return _int4(groups)


def _int4(groups: torch.Tensor) -> Quantised:
    """Quantise groups `[outputs, groups, 32]` to whole numbers from 0 to 15.

    It tries each number of steps in `LEVELS`, fits scale and lowest value by least squares, and
    keeps the fit with the smallest squared error. Weights that lie on 16 levels or fewer already,
    as those of many 4-bit checkpoints, stay on them.
    """
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
    """Return the sums of `[..., 32]`, one number added after the other as in the kernels."""
    total = torch.zeros_like(groups[..., 0])
    for i in range(GROUP):
        total = total + groups[..., i]
    return total


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half()


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows `[n, inputs]`, each group by itself.

    Returns whole numbers `[n, groups, 32]` (float32) and scales `[n, groups]`. A group with a
    number that is not finite has the scale NaN, so the row's results are all NaN.
    """
    groups = in_groups(x.to(torch.bfloat16))
    top = groups.abs().amax(2)
    finite = top.isfinite()
    used = finite & (top >= LEAST)
    top = torch.where(used, top, 1)
    values = torch.where(used[..., None], groups * (TOP / top)[..., None], 0).round()
    return values, torch.where(used, top / 127, torch.where(finite, 0, torch.nan))


def product(x: torch.Tensor, weight: Quantised) -> torch.Tensor:
    """Multiply rows `[n, inputs]` by a weight, group by group. Returns `[n, outputs]` float32."""
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
    """A linear layer of `product` and a bias. It runs where there are no native kernels, and is
    slow.

    Inputs `[..., in]` give results `[..., out]` of the same dtype.
    """

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
    """Replace every linear layer below `model` by a `QuantisedLinear`.

    Returns how many were replaced. Linear layers are `nn.Linear` and transformers' `Conv1D`. The
    weights of `head` have the format `head_format(name)`.
    """
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
