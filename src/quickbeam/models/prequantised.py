"""Weights that a checkpoint holds in few bits: AWQ, GPTQ, compressed-tensors, FP8.

Whatever their layout, they become blocks of one kind (`BlockRows`), with their own values: a weight
is `(q - zero) * scale`, q a whole number of 4 or 8 bits, or `q * scale`, q a float8 number.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native.formats import FORMATS
from quickbeam.models.native.quantised import GROUP, BlockRows, dense_rows
from quickbeam.models.tensor_files import TensorFiles

AWQ, GPTQ, COMPRESSED, FP8 = "awq", "gptq", "compressed-tensors", "fp8"
READ = "AWQ (gemm), GPTQ, compressed-tensors (int4, int8, float8), FP8 and gpt-oss's MXFP4"
# of compressed-tensors: what its tensors' names and types tell
FORMATS_READ = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense")
MIXED = "mixed-precision"
# the tensors that stand for one weight, by what follows its module's name
PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight_scale_inv", "weight_packed")
OTHERS = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
# scales of activations and of keys and values, whose numbers are quantised here as they come
UNREAD = ("input_scale", "k_scale", "v_scale", "q_scale", "output_scale", "activation_scale")
# types of numbers, by what they are of
WORDS, SCALES, INDICES = ("I32",), ("BF16", "F16", "F32", "F8_E8M0"), ("I32", "I64")
KINDS = {
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), WORDS),
    **dict.fromkeys(("scales", "weight_scale"), SCALES),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), INDICES),
}
INTERLEAVED = [0, 4, 1, 5, 2, 6, 3, 7]  # of AWQ: where the eight columns of a word are
SHARED = 128  # inputs that share a scale, where they can
BLOCK = 128, 128  # outputs and inputs of FP8 that share a scale, where no configuration says


class Method(NamedTuple):
    """How a checkpoint's weights are quantised.

    `kind`: its `quant_method`. `groups`: sizes of groups of inputs, besides all inputs. `lowered`:
    stored zero points are less by 1. `block`: outputs and inputs that share a scale where scales
    stand for both.
    """

    kind: str
    groups: frozenset[int] = frozenset()
    lowered: bool = False
    block: tuple[int, int] = BLOCK


def method_of(model: Any) -> Method | None:
    """Return the method that a model's configuration names; None for no other than MXFP4.

    Raises `NotDescribed`, with what is read and what to do, for others, and `InvalidInput` for
    fields that hold something else than they are for.
    """
    config = model.__dict__.get("quantization_config")
    try:
        mine = bool(config) and config.get("quant_method") != "mxfp4"
        return _method(config) if mine else None
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"its quantization_config can't be read ({error}): download config.json again"
        ) from error


def _method(config: Mapping[str, Any]) -> Method:
    kind, odd = str(config.get("quant_method") or "a method that it doesn't name"), list[str]()
    told = [config.get(one) for one in ("checkpoint_format", "version", "fmt")]
    layout = str(next(filter(None, told), "")).lower()
    if kind == AWQ and layout in ("", "gemm"):
        return Method(AWQ, _sizes([config], "group_size", "q_group_size"))
    if kind == GPTQ and layout in ("", "gptq", "gptq_v2"):
        others = [one for one in (config.get("dynamic") or {}).values() if one]
        return Method(GPTQ, _sizes([config, *others], "group_size"), layout != "gptq_v2")
    if kind == FP8 and layout in ("", "e4m3", "float8_e4m3fn"):
        return Method(FP8, block=_block(config.get("weight_block_size")))
    if kind == COMPRESSED:
        odd = _odd(config)
        if not odd:
            weights = [one.get("weights") or {} for one in _groups(config)]
            blocks = {_block(one.get("block_structure")) for one in weights}
            only = blocks.pop() if len(blocks) == 1 else BLOCK
            return Method(COMPRESSED, _sizes(weights, "group_size"), block=only)
    what = " ".join([kind, *(f"({one})" for one in odd or [layout] if one)])
    raise NotDescribed(
        f"its weights are quantised by {what}; read are {READ}: take a checkpoint of one of these, "
        "a .gguf file, or the unquantised weights"
    )


def _sizes(fields: Iterable[Mapping[str, Any]], *names: str) -> frozenset[int]:
    found = [one.get(name) for one in fields for name in names]
    return frozenset(one for one in found if isinstance(one, int) and one > 0)


def _block(stored: Any) -> tuple[int, int]:
    if isinstance(stored, list | tuple) and len(stored) == 2:
        if not all(type(one) is int and one > 0 for one in stored):
            raise ValueError(f"blocks of {list(stored)}")
        return stored[0], stored[1]
    return BLOCK


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in (config.get("config_groups") or {}).values() if one]


def _odd(config: Mapping[str, Any]) -> list[str]:
    """Return what a configuration of compressed-tensors has that is not read."""
    formats = {one["format"] for one in (config, *_groups(config)) if one.get("format")}
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    odd = sorted(formats - {*FORMATS_READ, MIXED}) + ([sparse] if sparse != "dense" else [])
    return odd + (["transform_config"] if config.get("transform_config") else [])


class Numbers(NamedTuple):
    """A weight's numbers.

    `values`: as stored, in a layout of `library`; `flip`: bits of them that are turned. `scales`:
    `[outputs, groups]` float32. `zeros`: `[outputs, groups]` uint8; None for float8 values.
    """

    values: torch.Tensor
    layout: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    flip: int = 0


@dataclass(frozen=True)
class FewBits:
    """A weight `[outputs, inputs]` in few bits.

    `parts`: the stored names of its tensors by what they are. `group`: inputs that share a scale.
    `order`: as of `BlockRows`. `numbers(files, self)` reads it.
    """

    parts: Mapping[str, str]
    method: Method
    outputs: int
    inputs: int
    bits: int
    group: int
    numbers: Callable[[TensorFiles, FewBits], Numbers]
    float8: bool = False
    order: torch.Tensor | None = None

    @property
    def names(self) -> Sequence[str]:
        return list(self.parts.values())

    @property
    def format(self) -> str:
        shared = SHARED if self.group % SHARED == 0 and self.inputs % SHARED == 0 else GROUP
        return f"{'fp8' if self.float8 else f'w{self.bits}'}g{shared}"

    def shape(self, files: TensorFiles) -> list[int]:
        return [self.outputs, self.inputs]

    def like(self, files: TensorFiles) -> BlockRows:
        """Return what `in_blocks` does of all rows, without the numbers."""
        of = FORMATS[self.format]
        size = self.inputs // of.inputs * of.bytes
        data = torch.empty(self.outputs, size, dtype=torch.uint8, device="meta")
        return BlockRows(data, self.format, self.order)

    def in_blocks(self, files: TensorFiles, first: int, last: int) -> BlockRows:
        """Return rows. Raises `InvalidInput` for numbers that are not finite, and `QuickbeamError`
        naming a file that can't be read."""
        found, of, kernels = self.numbers(files, self), FORMATS[self.format], library.kernels()
        assert kernels is not None  # or there would be no such back end
        at = torch.arange(0, self.inputs, of.inputs) // self.group
        scales = found.scales[:, at].contiguous()
        zeros = None if found.zeros is None else found.zeros[:, at].contiguous()
        stored = library.StoredWeight(
            library.FORMATS.index(self.format),
            found.layout,
            found.flip,
            found.values.data_ptr(),
            self.outputs,
            self.inputs,
            None if self.order is None else self.order.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
        )
        rows = torch.empty(self.outputs, len(at) * of.bytes, dtype=torch.uint8)
        finite = kernels.to_blocks(ctypes.byref(stored), rows.data_ptr())
        if not finite or not bool(scales.isfinite().all()):
            module = self.names[0].rpartition(".")[0]
            raise InvalidInput(f"{module} has numbers that are not finite: download it again")
        return BlockRows(rows[first:last], self.format, self.order)

    def rows(self, files: TensorFiles, first: int, last: int) -> torch.Tensor:
        """Return the numbers of rows in float32. Raises as `in_blocks` does."""
        kernels = library.kernels()
        assert kernels is not None
        return dense_rows(kernels, self.in_blocks(files, first, last))


def few_bits(
    name: str, stored: Mapping[str, str], files: TensorFiles, method: Method
) -> FewBits | None:
    """Return where a weight in few bits is; None for a weight that is stored as it is.

    `stored`: the stored name of each parameter. Raises `NotDescribed` for what is not read, and
    `InvalidInput` for tensors that don't fit together.
    """
    module = name.removesuffix(".weight")
    found = {part: f"{module}.{part}" for part in PARTS + OTHERS}
    parts = {p.removesuffix("_inv"): stored[one] for p, one in found.items() if one in stored}
    for part in parts.keys() & KINDS:
        _refuse_kind(files, parts[part], KINDS[part])
    try:
        if method.kind in (AWQ, GPTQ) and {"qweight", "qzeros", "scales"} <= parts.keys():
            made = (_awq if method.kind == AWQ else _gptq)(parts, files, method)
        elif "weight_packed" in parts:
            made = _packed(parts, files, method)
        elif {"weight", "weight_scale"} <= parts.keys():
            made = _whole(parts, files, method)
        else:
            return None
    except (IndexError, ValueError, KeyError, ZeroDivisionError) as error:
        raise InvalidInput(f"the tensors of {module} don't fit together: {error}") from error
    if made.bits not in (4, 8):
        raise NotDescribed(f"{module} has {made.bits} bits a weight; read are 4 and 8")
    if method.groups and made.group not in (*method.groups, made.inputs) and "weight" not in parts:
        raise InvalidInput(
            f"{module} has groups of {made.group} inputs, and its configuration names "
            f"{', '.join(map(str, sorted(method.groups)))}"
        )
    if made.inputs % GROUP or made.group % GROUP:
        raise NotDescribed(
            f"{module} has {made.inputs} inputs in groups of {made.group}; read are groups of "
            f"{GROUP} and multiples of it"
        )
    return made


def _in_nibbles(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return whole numbers of `bits` bits, `[n, m]` uint8, of int32 words, low bits first."""
    stored = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return stored
    return torch.stack([stored & 15, stored >> 4], -1).flatten(1)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous()


def _read(files: TensorFiles, of: FewBits, part: str) -> torch.Tensor:
    return files.whole(of.parts[part])


def _awq(parts: Mapping[str, str], files: TensorFiles, method: Method) -> FewBits:
    """`qweight` `[inputs, outputs / 8]`, `qzeros` `[groups, outputs / 8]`, eight columns a word in
    an order of their own; `scales` `[groups, outputs]`."""
    (inputs, words), (groups, outputs) = (files.shape(parts[one]) for one in ("qweight", "scales"))
    _fit(files, parts, "qzeros", [groups, words])
    if 8 * words != outputs:
        raise NotDescribed(f"{parts['qweight']} has other than 4 bits a weight")
    return FewBits(parts, method, outputs, inputs, 4, _shared(inputs, groups), _awq_numbers)


def _awq_numbers(files: TensorFiles, of: FewBits) -> Numbers:
    zeros = _in_nibbles(_read(files, of, "qzeros"), 4)
    zeros = zeros.view(len(zeros), -1, 8)[..., INTERLEAVED].flatten(1)
    scales, values = _read(files, of, "scales").float(), _read(files, of, "qweight")
    return Numbers(values, library.WORDS_OF_OUTPUTS, _turned(scales), _turned(zeros))


def _gptq(parts: Mapping[str, str], files: TensorFiles, method: Method) -> FewBits:
    """`qweight` `[inputs / 8, outputs]`, `qzeros` `[groups, outputs / 8]` (of the first version of
    the layout less 1), low bits first; `scales` `[groups, outputs]`; `g_idx` `[inputs]`, each
    input's group."""
    (words, outputs), (groups, wide) = (files.shape(parts[one]) for one in ("qweight", "qzeros"))
    _fit(files, parts, "scales", [groups, outputs])
    bits = 32 * wide // outputs
    inputs = 32 * words // bits
    sizes = outputs, inputs, bits, _shared(inputs, groups)
    order = _order(parts, "g_idx", files, inputs, sizes[-1])
    return FewBits(parts, method, *sizes, _gptq_numbers, order=order)


def _gptq_numbers(files: TensorFiles, of: FewBits) -> Numbers:
    values, stored = _read(files, of, "qweight"), _read(files, of, "qzeros")
    if of.method.lowered:  # word by word, as it was taken away
        stored = stored + (0x11111111 if of.bits == 4 else 0x01010101)
    scales = _turned(_read(files, of, "scales").float())
    zeros = _turned(_in_nibbles(stored, of.bits))
    return Numbers(values, library.WORDS_OF_INPUTS, scales, zeros)


def _packed(parts: Mapping[str, str], files: TensorFiles, method: Method) -> FewBits:
    """`weight_packed` `[outputs, inputs / 8]`, `weight_scale` `[outputs, groups]`, and asymmetric
    `weight_zero_point` `[outputs / 8, groups]`, low bits first, all plus half of what bits hold;
    `weight_shape` names both sizes."""
    outputs, inputs = files.whole(parts["weight_shape"]).flatten().tolist()
    rows, words = files.shape(parts["weight_packed"])
    *_, groups = scale = files.shape(parts["weight_scale"])
    if scale != [1]:
        _fit(files, parts, "weight_scale", [rows, groups])
    bits = 32 * words // inputs
    _fit(files, parts, "weight_packed", [outputs, -(-inputs // (32 // bits))])
    if "weight_zero_point" in parts:
        _refuse_kind(files, parts["weight_zero_point"], WORDS)
        _fit(files, parts, "weight_zero_point", [-(-outputs * bits // 32), groups])
    sizes = outputs, inputs, bits, _shared(inputs, groups)
    order = _order(parts, "weight_g_idx", files, inputs, sizes[-1])
    return FewBits(parts, method, *sizes, _packed_numbers, order=order)


def _packed_numbers(files: TensorFiles, of: FewBits) -> Numbers:
    values = _read(files, of, "weight_packed")
    scales = _by_output(_read(files, of, "weight_scale").float(), of)
    zeros = torch.full(scales.shape, 1 << of.bits - 1, dtype=torch.uint8)
    if "weight_zero_point" in of.parts:
        stored = _in_nibbles(_turned(_read(files, of, "weight_zero_point")), of.bits)
        zeros = _turned(stored[:, : of.outputs])
    return Numbers(values, library.BY_OUTPUT, scales, zeros)


def _whole(parts: Mapping[str, str], files: TensorFiles, method: Method) -> FewBits:
    """`weight` `[outputs, inputs]` int8 or float8, and `weight_scale` or `weight_scale_inv`: one,
    by output, by output and group, or by blocks of outputs and inputs."""
    outputs, inputs = files.shape(parts["weight"])
    scale = files.shape(parts["weight_scale"])
    kind, (tall, group) = files.kind(parts["weight"]), method.block
    _refuse_kind(files, parts["weight"], ("F8_E4M3", *["I8"] * (method.kind == COMPRESSED)))
    if len(scale) == 2 and scale[0] == outputs:
        group = _shared(inputs, scale[1])
    elif math.prod(scale) == 1 or scale == [outputs]:
        group = inputs
    elif scale != [-(-outputs // tall), -(-inputs // group)]:
        raise ValueError(f"scales {scale}, and blocks of {[tall, group]}")
    return FewBits(parts, method, outputs, inputs, 8, group, _whole_numbers, float8=kind != "I8")


def _whole_numbers(files: TensorFiles, of: FewBits) -> Numbers:
    scales = _by_output(_read(files, of, "weight_scale").float(), of)
    values = _read(files, of, "weight")
    if of.float8:
        return Numbers(values, library.BY_OUTPUT, scales, None)
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    if "weight_zero_point" in of.parts:
        stored = _read(files, of, "weight_zero_point").to(torch.int16) + 128
        zeros = _by_output(stored.to(torch.uint8), of)
    return Numbers(values, library.BY_OUTPUT, scales, zeros, 128)


def _by_output(stored: torch.Tensor, of: FewBits) -> torch.Tensor:
    """Return scales or zero points by output, `[outputs, groups]`."""
    groups = -(-of.inputs // of.group)
    stored = stored.reshape(-1, groups)
    if len(stored) not in (1, of.outputs):
        return stored.repeat_interleave(of.method.block[0], 0)[: of.outputs]
    return stored.expand(of.outputs, groups)


def _order(
    parts: Mapping[str, str], part: str, files: TensorFiles, inputs: int, group: int
) -> torch.Tensor | None:
    """Return inputs in the order of their groups; None where they are in it already."""
    if part not in parts:
        return None
    groups = files.whole(parts[part]).flatten().int()
    wanted = torch.arange(inputs, dtype=torch.int32) // group
    if bool((groups < 0).all()) or torch.equal(groups, wanted):
        return None
    found, order = groups.sort(stable=True)
    if not torch.equal(found, wanted):
        raise ValueError(f"{parts[part]} is no order of {inputs} inputs in groups of {group}")
    return order.int()


def _shared(inputs: int, groups: int) -> int:
    """Return how many inputs share a scale."""
    if groups < 1 or inputs % groups:
        raise ValueError(f"{inputs} inputs in {groups} groups")
    return inputs // groups


def _refuse_kind(files: TensorFiles, name: str, known: Sequence[str]) -> None:
    if (kind := files.kind(name)) not in known:
        raise NotDescribed(f"{name} has numbers of type {kind}")


def _fit(files: TensorFiles, parts: Mapping[str, str], part: str, shape: list[int]) -> None:
    if (found := files.shape(parts[part])) != shape:
        raise ValueError(f"{parts[part]} has shape {found}, expected {shape}")
