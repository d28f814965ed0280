"""Weights that a checkpoint holds in few bits: AWQ, GPTQ, compressed-tensors, FP8.

Whatever their layout, they become blocks of one kind (`BlockRows`), with their own values: a weight
is `(q - zero) * scale`, q a whole number of 4 or 8 bits, or `q * scale`, q a float8 number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native.library import FORMATS, Kernels
from quickbeam.models.native.quantised import GROUP, BlockRows, Weight
from quickbeam.models.weights.tensor_files import TensorFiles

AWQ, GPTQ, COMPRESSED, FP8 = "awq", "gptq", "compressed-tensors", "fp8"
READ = "AWQ (gemm), GPTQ, compressed-tensors (int4, int8, float8), FP8 and gpt-oss's MXFP4"
# of compressed-tensors: what its tensors' names and types tell
FORMATS_READ = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense")
MIXED = "mixed-precision"
# scales of activations and of keys and values, whose numbers are quantised here as they come
UNREAD = ("input_scale", "k_scale", "v_scale", "q_scale", "output_scale", "activation_scale")
# the tensors that stand for one weight, by what follows its module's name, and types of numbers
LARGE = ("qweight", "weight_packed", "weight")
READ_NOW = ("g_idx", "weight_g_idx", "weight_shape")  # few
KINDS = {
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), ("I32",)),
    **dict.fromkeys(
        ("scales", "weight_scale", "weight_scale_inv"), ("BF16", "F16", "F32", "F8_E8M0")
    ),
    **dict.fromkeys(READ_NOW, ("I32", "I64")),
    "weight": ("F8_E4M3", "I8"),
    "weight_zero_point": ("I32", "I8"),
}
SHARED = 128  # inputs that share a scale, where they can
BLOCK = 128, 128  # outputs and inputs of FP8 that share a scale, where no configuration says


# how the names end of what stands beside weights in few bits
COMPANIONS = (
    *(f".{part}" for part in KINDS if part != "weight"),
    *(".biases", ".absmax", ".quant_map"),
)


class QuantMethod(NamedTuple):
    """How a checkpoint's weights are quantised.

    `kind`: its `quant_method`. `lowered`: stored zero points are less by 1. `block`: outputs and
    inputs that share a scale where scales stand for both.
    """

    kind: str
    lowered: bool = False
    block: tuple[int, int] = BLOCK


def method_of(model: Any) -> QuantMethod | None:
    """Return the method that a model's configuration names; None for no other than MXFP4.

    Raises `NotDescribed`, with what is read and what to do, for others, and `InvalidInput` for
    fields that hold something else than they are for.
    """
    config = model.__dict__.get("quantization_config")
    try:
        mine = bool(config) and config.get("quant_method") != "mxfp4"
        return _method(config) if mine else None
    except NotDescribed:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"its quantization_config can't be read ({error}): download config.json again"
        ) from error


def refuse_mlx(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for weights that MLX quantised; `fields`: of config.json."""
    config = fields.get("quantization")
    if isinstance(config, dict) and "bits" in config:
        raise InvalidInput(
            f"its weights are quantised by MLX ({config['bits']} bits, groups of "
            f"{config.get('group_size')}); read are {READ}: take a checkpoint of one of these, a "
            ".gguf file, or the unquantised weights"
        )


def refuse_unnamed(name: str) -> None:
    """Raise `InvalidInput` for a tensor beside weights in few bits, where no method is named."""
    if name.endswith(COMPANIONS):
        raise InvalidInput(
            f"its files hold {name}, as quantised weights have it, and its config.json has no "
            "quantization_config: download config.json again, or take the unquantised weights"
        )


def _method(config: Mapping[str, Any]) -> QuantMethod:
    kind = str(config.get("quant_method") or "a method that it doesn't name")
    version = config.get("checkpoint_format") or config.get("version") or config.get("fmt")
    layout = str(version or "").lower()
    if kind == AWQ and layout in ("", "gemm"):
        return QuantMethod(AWQ)
    if kind == GPTQ and layout in ("", "gptq", "gptq_v2"):
        return QuantMethod(GPTQ, layout != "gptq_v2")
    if kind == FP8 and layout in ("", "e4m3", "float8_e4m3fn"):
        return QuantMethod(FP8, block=_block(config.get("weight_block_size")))
    details = [layout] if layout else []
    if kind == COMPRESSED:
        details = _odd(config)
        if not details:
            return QuantMethod(COMPRESSED, block=_block_of_groups(config))
    method = " ".join([kind, *(f"({detail})" for detail in details)])
    raise NotDescribed(
        f"its weights are quantised by {method}; read are {READ}: take a checkpoint of one of "
        "these, a .gguf file, or the unquantised weights"
    )


def _block_of_groups(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the block that all groups of compressed-tensors name, or the usual one."""
    blocks = set[tuple[int, int]]()
    for group in _groups(config):
        scheme = group.get("weights") or {}
        blocks.add(_block(scheme.get("block_structure")))
    return blocks.pop() if len(blocks) == 1 else BLOCK


def _block(stored: Any) -> tuple[int, int]:
    if isinstance(stored, list | tuple) and len(stored) == 2:
        if not all(type(size) is int and size > 0 for size in stored):
            raise ValueError(f"blocks of {list(stored)}")
        return stored[0], stored[1]
    return BLOCK


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [group for group in (config.get("config_groups") or {}).values() if group]


def _odd(config: Mapping[str, Any]) -> list[str]:
    """Return what a configuration of compressed-tensors has that is not read."""
    formats = {group["format"] for group in (config, *_groups(config)) if group.get("format")}
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    odd = sorted(formats - {*FORMATS_READ, MIXED})
    if sparse != "dense":
        odd.append(sparse)
    if config.get("transform_config"):
        odd.append("transform_config")
    return odd


class QuantisedValues(NamedTuple):
    """A weight's numbers, of `bits` bits each.

    `values`: as stored, in a layout of `library`; `flip`: bits of them that are turned. `scales`:
    `[outputs, groups]` float32, each of `group` of the `inputs`. `zeros`: `[outputs, groups]`
    uint8; None for float8 values.
    """

    values: torch.Tensor
    layout: int
    inputs: int
    bits: int
    group: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    flip: int = 0


Tensors = Mapping[str, torch.Tensor]  # those of one weight, by what they are
# Makes a weight's numbers of its tensors. It tells sizes too, of tensors that are not read yet: the
# `LARGE` ones without memory, the others with any numbers.
Layout = Callable[[Tensors], QuantisedValues]


@dataclass(frozen=True)
class QuantisedTensor:
    """A weight `[outputs, inputs]` in few bits.

    `parts`: the stored names of its tensors by what they are; `layout`: makes numbers of them.
    `format`: that of its blocks. `order`: as of `BlockRows`. `expert`: which of several weights
    that are stored in one.
    """

    parts: Mapping[str, str]
    layout: Layout
    outputs: int
    inputs: int
    format: str
    order: torch.Tensor | None = None
    expert: int | None = None

    @classmethod
    def of(
        cls, parts: Mapping[str, str], layout: Layout, files: TensorFiles, expert: int | None = None
    ) -> QuantisedTensor:
        """Return where the weight is that has these `parts` in `files`.

        Raises `NotDescribed` for what is not read, and `InvalidInput` for tensors that don't fit
        together.
        """
        for part, name in parts.items():
            if (kind := files.kind(name)) not in KINDS[part]:
                raise NotDescribed(
                    f"{name} has numbers of type {kind}, and {' or '.join(KINDS[part])} is read: "
                    "take another checkpoint, or the unquantised weights"
                )
        name, *_ = parts.values()
        try:
            tensors = {
                part: files.tensor(name)
                if part in READ_NOW
                else files.like(name, part not in LARGE)
                for part, name in parts.items()
            }
            if expert is not None:
                tensors = {part: tensor[expert] for part, tensor in tensors.items()}
            read = layout(tensors)
            outputs, inputs, group = len(read.scales), read.inputs, read.group
            order = _order(tensors, inputs, group)
            if read.zeros is not None and read.zeros.shape != read.scales.shape:
                raise ValueError(
                    f"{list(read.zeros.shape)} zeros, {list(read.scales.shape)} scales"
                )
        except NotDescribed:
            raise
        except (IndexError, ValueError, KeyError, ArithmeticError, RuntimeError) as error:
            names = ", ".join(parts.values())
            raise InvalidInput(f"{names} don't fit together: {error}") from error
        if read.bits not in (4, 8):
            raise NotDescribed(f"{name} has {read.bits} bits a weight; read are 4 and 8")
        if inputs % GROUP or group % GROUP:
            raise NotDescribed(
                f"{name} has {inputs} inputs in groups of {group}; read are groups of {GROUP} and "
                "multiples of it"
            )
        if read.values.nbytes * 8 != outputs * inputs * read.bits:
            raise InvalidInput(
                f"{name} has shape {files.shape(name)}, and should hold {outputs} times {inputs} "
                f"numbers of {read.bits} bits: download it again"
            )
        shared = SHARED if group % SHARED == 0 and inputs % SHARED == 0 else GROUP
        kind = "fp8" if read.zeros is None else f"w{read.bits}"
        return cls(parts, layout, outputs, inputs, f"{kind}g{shared}", order, expert)

    @property
    def names(self) -> Sequence[str]:
        return list(self.parts.values())

    def shape(self, files: TensorFiles) -> list[int]:
        return [self.outputs, self.inputs]

    def like(self, files: TensorFiles) -> BlockRows:
        block = FORMATS[self.format]
        size = self.inputs // block.inputs * block.bytes
        data = torch.empty(self.outputs, size, dtype=torch.uint8, device="meta")
        return BlockRows(data, self.format, self.order)

    def rows(
        self, files: TensorFiles, first: int, last: int, kernels: Kernels | None = None
    ) -> Weight:
        """Return rows: in blocks, or without `kernels` their numbers in float32.

        Raises `InvalidInput` for numbers that are not finite, and `QuickbeamError` naming a file
        that can't be read.
        """
        read = self.layout({part: self._read(files, name) for part, name in self.parts.items()})
        if kernels is None:
            values = widened(read, self.order)
            if not bool(values.isfinite().all()):
                raise self._not_finite()
            return values[first:last]
        blocks = self._in_blocks(read, kernels)
        if blocks is None:
            raise self._not_finite()
        return BlockRows(blocks[first:last], self.format, self.order)

    def _in_blocks(self, read: QuantisedValues, kernels: Kernels) -> torch.Tensor | None:
        """Return all rows in blocks, `[outputs, bytes]`; None where numbers are not finite."""
        block = FORMATS[self.format]
        at = torch.arange(0, self.inputs, block.inputs) // read.group
        scales = read.scales[:, at].contiguous()
        zeros = None if read.zeros is None else read.zeros[:, at].contiguous()
        stored = library.StoredWeight(
            block.number,
            read.layout,
            read.flip,
            read.values.data_ptr(),
            self.outputs,
            self.inputs,
            None if self.order is None else self.order.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
        )
        rows = torch.empty(self.outputs, len(at) * block.bytes, dtype=torch.uint8)
        finite = kernels.to_blocks(ctypes.byref(stored), rows.data_ptr())
        return rows if finite and bool(scales.isfinite().all()) else None

    def _not_finite(self) -> InvalidInput:
        return InvalidInput(f"{self.names[0]} has numbers that are not finite: download it again")

    def _read(self, files: TensorFiles, name: str) -> torch.Tensor:
        if self.expert is None:
            return files.tensor(name)
        return files.rows(name, self.expert, self.expert + 1)[0]


def quantised_tensor(
    name: str, stored: Mapping[str, str], files: TensorFiles, method: QuantMethod
) -> QuantisedTensor | None:
    """Return where a weight in few bits is; None for a weight that is stored as it is.

    `stored`: the stored name of each parameter. Raises as `QuantisedTensor.of` does.
    """
    module = name.removesuffix(".weight")
    names = {part: f"{module}.{part}" for part in KINDS}
    parts = dict[str, str]()
    for part, part_name in names.items():
        if part_name in stored:
            parts[part.removesuffix("_inv")] = stored[part_name]
    layout: Layout
    if method.kind in (AWQ, GPTQ) and {"qweight", "qzeros", "scales"} <= parts.keys():
        layout = _awq if method.kind == AWQ else partial(_gptq, lowered=method.lowered)
    elif "weight_packed" in parts:
        layout = _packed
    elif {"weight", "weight_scale"} <= parts.keys():
        layout = partial(eight_bits, block=method.block)
    else:
        return None
    return QuantisedTensor.of(parts, layout, files)


def widened(read: QuantisedValues, order: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers of a weight, `[outputs, inputs]` float32.

    `order`: as of `BlockRows`.
    """
    groups = torch.arange(read.inputs) // read.group
    if order is not None:
        groups = torch.empty_like(groups).index_copy_(0, order.long(), groups)
    scales = read.scales[:, groups]
    if read.zeros is None:
        return read.values.float() * scales
    zeros = read.zeros[:, groups].float()
    return (_whole_numbers(read).float() - zeros) * scales


def _whole_numbers(read: QuantisedValues) -> torch.Tensor:
    """Return a weight's whole numbers, `[outputs, inputs]` uint8."""
    if read.layout == library.WORDS_OF_OUTPUTS:
        return _outputs_in_order(_in_nibbles(read.values, read.bits))
    if read.layout == library.WORDS_OF_INPUTS:
        return _in_nibbles(read.values.t(), read.bits)
    if read.values.dtype is torch.int8:
        return read.values.view(torch.uint8) ^ read.flip
    return _in_nibbles(read.values, read.bits)


def _outputs_in_order(nibbles: torch.Tensor) -> torch.Tensor:
    """Return `[outputs, n]` of AWQ's numbers `[n, outputs]`, of which each 8 are outputs 0, 2, 4,
    6, 1, 3, 5 and 7."""
    return nibbles.view(len(nibbles), -1, 2, 4).transpose(2, 3).flatten(1).t()


def _in_nibbles(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return whole numbers of `bits` bits, `[n, m]` uint8, of int32 words, low bits first."""
    stored = packed.contiguous().view(torch.uint8)
    return stored if bits == 8 else torch.stack([stored & 15, stored >> 4], -1).flatten(1)


def _awq(tensors: Tensors) -> QuantisedValues:
    """`qweight` `[inputs, outputs / 8]`, `qzeros` `[groups, outputs / 8]`, of which a word holds
    columns 0, 2, 4, 6, 1, 3, 5 and 7; `scales` `[groups, outputs]`."""
    values = tensors["qweight"]
    scales = tensors["scales"].float().t()
    zeros = _outputs_in_order(_in_nibbles(tensors["qzeros"], 4))
    inputs = len(values)
    group = _shared(inputs, scales.shape[1])
    return QuantisedValues(values, library.WORDS_OF_OUTPUTS, inputs, 4, group, scales, zeros)


def _gptq(tensors: Tensors, lowered: bool) -> QuantisedValues:
    """`qweight` `[inputs / 8, outputs]`, `qzeros` `[groups, outputs / 8]` (of the first version of
    the layout less 1), low bits first; `scales` `[groups, outputs]`; `g_idx` `[inputs]`, each
    input's group."""
    values = tensors["qweight"]
    scales = tensors["scales"].float().t()
    stored_zeros = tensors["qzeros"]
    bits = 32 * stored_zeros.shape[1] // len(scales)
    if bits not in (4, 8):
        raise NotDescribed(f"{bits} bits a weight; read are 4 and 8")
    if lowered:  # word by word, as it was taken away
        stored_zeros = stored_zeros + (0x11111111 if bits == 4 else 0x01010101)
    zeros = _in_nibbles(stored_zeros, bits).t()
    inputs = 32 * len(values) // bits
    group = _shared(inputs, scales.shape[1])
    return QuantisedValues(values, library.WORDS_OF_INPUTS, inputs, bits, group, scales, zeros)


def _packed(tensors: Tensors) -> QuantisedValues:
    """`weight_packed` `[outputs, inputs / 8]`, `weight_scale` `[outputs, groups]`, and asymmetric
    `weight_zero_point` `[outputs / 8, groups]`, low bits first, all plus half of what bits hold;
    `weight_shape` names both sizes."""
    values, (outputs, inputs) = tensors["weight_packed"], tensors["weight_shape"].flatten().tolist()
    bits = 32 * values.shape[1] // inputs
    scales = tensors["weight_scale"].float()
    scales = scales.view(len(scales), -1).expand(outputs, -1)
    group = _shared(inputs, scales.shape[1])
    zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.uint8)
    if "weight_zero_point" in tensors:
        zeros = tensors["weight_zero_point"]
        if zeros.dtype is torch.int8:  # as earlier versions stored them, `[outputs, groups]`
            zeros = (zeros.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
            zeros = zeros.view(len(zeros), -1).expand_as(scales)
        else:
            zeros = _in_nibbles(zeros.t(), bits)[:, :outputs].t()
    return QuantisedValues(values, library.BY_OUTPUT, inputs, bits, group, scales, zeros)


def eight_bits(tensors: Tensors, block: tuple[int, int]) -> QuantisedValues:
    """`weight` `[outputs, inputs]` int8 or float8, and `weight_scale` or `weight_scale_inv`: one,
    by output, by output and group, or by blocks of outputs and inputs."""
    values = tensors["weight"]
    scale = tensors["weight_scale"]
    tall, group = block
    outputs, inputs = values.shape
    shape = list(scale.shape)
    if len(shape) == 2 and shape[0] == outputs:
        group = _shared(inputs, shape[1])
    elif scale.numel() == 1 or shape == [outputs]:
        group = inputs
    elif shape != [-(-outputs // tall), -(-inputs // group)]:
        raise ValueError(f"scales {shape}, and blocks of {[tall, group]}")

    def by_output(stored: torch.Tensor) -> torch.Tensor:
        stored = stored.reshape(-1, -(-inputs // group))
        if len(stored) not in (1, outputs):
            stored = stored.repeat_interleave(tall, 0)[:outputs]
        return stored.expand(outputs, -1)

    scales = by_output(scale.float())
    zeros: torch.Tensor | None = None
    flip = 0
    if values.dtype is torch.int8:
        flip = 128
        zeros = torch.full_like(scales, 128, dtype=torch.uint8)
        if "weight_zero_point" in tensors:
            stored_zeros = tensors["weight_zero_point"].to(torch.int16) + 128
            zeros = by_output(stored_zeros.to(torch.uint8))
    return QuantisedValues(values, library.BY_OUTPUT, inputs, 8, group, scales, zeros, flip)


def _order(tensors: Tensors, inputs: int, group: int) -> torch.Tensor | None:
    """Return inputs in the order of their groups; None where they are in it already."""
    stored = tensors.get("g_idx", tensors.get("weight_g_idx"))
    if stored is None:
        return None
    groups = stored.flatten().int()
    wanted = torch.arange(inputs, dtype=torch.int32) // group
    if bool((groups < 0).all()) or torch.equal(groups, wanted):
        return None
    in_order, order = groups.sort(stable=True)
    if not torch.equal(in_order, wanted):
        raise ValueError(f"they are in no order of {inputs} inputs in groups of {group}")
    return order.int()


def _shared(inputs: int, groups: int) -> int:
    """Return how many inputs share a scale."""
    if groups < 1 or inputs % groups:
        raise ValueError(f"{inputs} inputs in {groups} groups")
    return inputs // groups
