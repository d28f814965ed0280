"""Where a checkpoint's files hold a model's parameters.

Names and layouts of published checkpoints differ from those of transformers' causal language
models: a language model may be a part of a larger one, or saved without its head; experts may be
stored one by one, or transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BlockRows, Weight, below, dense_rows, with_data
from quickbeam.models.weights.prequantised import (
    QuantisedTensor,
    QuantMethod,
    eight_bits,
    quantised_tensor,
)
from quickbeam.models.weights.tensor_files import TensorFiles

# Checkpoints of several modalities whose language part alone answers a prompt without images and
# sounds, as the whole does.
COMPOSITES = {
    *("exaone4_5", "gemma3", "gemma4", "glm4v", "got_ocr2", "idefics3", "internvl", "lfm2_vl"),
    *("lfm3_vl", "lighton_ocr", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("muse_glimmer", "ovis2", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llava", "vipllava", "voxtral"),
}
# what the whole may say in its language part's place
SHARED = (
    *("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config"),
    "torch_dtype",
)
# what stands before the names of a language model, the longest first
PREFIXES = (
    *("model.language_model.model.", "language_model.model.model.", "model.language_model."),
    *("language_model.model.", "model.text_model.", "language_model.", "text_model."),
)
# what stands before the head's name
HEADS = ("", "language_model.", "model.")
# What trainers put into names of parameters, for modules that are compiled, sharded, recomputed or
# adapted.
WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)
# what they put before a whole name, for copies on several devices and for adapted models
WRAPPED = re.compile(r"^(?:module\.)?(?:base_model\.model\.)?")
# how the names of LoRA's matrices go on that are not merged into a weight
UNMERGED = (".lora_A", ".lora_B", ".lora_embedding_", ".lora_magnitude_vector")
# what no pass reads: buffers of older checkpoints
BUFFERS = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.causal_mask", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias"),
)
# other names of published checkpoints, by `model_type`
MIXTRAL = ((".block_sparse_moe.", ".mlp."),)
GRANITE = (
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    (".router.layer.weight", ".router.weight"),
)
EXAONE = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.h.", "model.layers."),
    ("transformer.ln_f.", "model.norm."),
    (".attn.attention.out_proj.", ".self_attn.o_proj."),
    (".attn.attention.", ".self_attn."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "ernie4_5_moe": ((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
    "exaone": EXAONE,
    "gpt_neox": (("embed_out.", "lm_head."),),
    "granitemoe": GRANITE,
    "granitemoehybrid": GRANITE,
    "granitemoeshared": GRANITE,
    "lfm3": ((".self_attn.gate_proj.", ".self_attn.g_proj."),),
    "minimax_m2": MIXTRAL,
    "mixtral": MIXTRAL,
    "nemotron_h": (("backbone.", "model."),),
    "phimoe": (*MIXTRAL, (".mlp.gate.weight", ".mlp.router.weight")),
}
# whose experts may be stored `[experts, inputs, outputs]`
TRANSPOSED = ("qwen3_vl_moe_text",)
# the numbers of four bits of MXFP4
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])
# names of one expert's gate, what it lets through, and what comes last
EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def language_part(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language part, or `fields` where there are no parts.

    `_whole` is the `model_type` of the whole.
    """
    part = fields.get("text_config")
    if fields.get("model_type") not in COMPOSITES or not isinstance(part, dict):
        return fields
    shared = {name: fields[name] for name in SHARED if fields.get(name) is not None}
    tied = fields.get("tie_word_embeddings", part.get("tie_word_embeddings", False))
    own = {name: value for name, value in part.items() if value is not None}
    return part | shared | own | {"tie_word_embeddings": tied, "_whole": fields["model_type"]}


def own_names(
    stored: Iterable[str], kind: str, embedding: str, head: str, parts: bool
) -> dict[str, str]:
    """Return the stored name of each parameter, by the causal language model's name.

    `kind`: the language model's `model_type`. `embedding`, `head`: the names of two parameters.
    `parts`: the files may hold more than a language model, which is left out. Raises `InvalidInput`
    for two stored tensors of one parameter, and for matrices of LoRA.
    """
    renamed = dict[str, str]()
    for name in stored:
        own = _renamed(kind, name)
        if own in renamed:
            raise InvalidInput(
                f"its files hold {renamed[own]} and {name}, which are one parameter's: remove one"
            )
        if any(one in own for one in UNMERGED):
            raise InvalidInput(
                f"its files hold {name}, which is not merged into the weights: save the model "
                "again after peft's merge_and_unload"
            )
        renamed[own] = name
    base, _, tail = embedding.partition(".")
    base, head = f"{base}.", head.rpartition(".")[0] + "."
    known = (*PREFIXES, base, "") if parts else (base, *PREFIXES, "")
    first = next((one for one in known if f"{one}{tail}" in renamed), base)
    heads = tuple(f"{one}{head}" for one in HEADS)
    named = dict[str, str]()
    for name, as_stored in renamed.items():
        if name.startswith(heads):
            named[f"{head}{name.rpartition(head)[2]}"] = as_stored
        elif name.startswith(first):
            named[f"{base}{name.removeprefix(first)}"] = as_stored
        elif not parts:
            named[name] = as_stored
    return {name: one for name, one in named.items() if not name.endswith(BUFFERS)}


def causal_names(name: str) -> Iterator[str]:
    """Yield what a causal language model may call a parameter of a larger model."""
    yield name
    yield from (name.removeprefix(one) for one in HEADS if one and name.startswith(one))
    yield from (f"model.{name.removeprefix(one)}" for one in PREFIXES if name.startswith(one))


def _renamed(kind: str, name: str) -> str:
    name = WRAPPED.sub("", WRAPPERS.sub("", name))
    for old, new in RENAMED.get(kind, ()):
        name = name.replace(old, new)
    return name


@dataclass(frozen=True)
class PlainTensor:
    """A parameter that is stored as it is.

    `transposed`: matrices `[experts, rows, columns]` are stored as `[experts, columns, rows]`.
    """

    name: str
    transposed: bool = False

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    def shape(self, files: TensorFiles) -> list[int]:
        shape = files.shape(self.name)
        return [shape[0], *shape[:0:-1]] if self.transposed else shape

    def like(self, files: TensorFiles) -> torch.Tensor:
        return torch.empty(self.shape(files), device="meta")

    def rows(self, files: TensorFiles, first: int, last: int) -> torch.Tensor:
        tensor = files.rows(self.name, first, last)
        return tensor.transpose(1, 2) if self.transposed else tensor


@dataclass(frozen=True)
class SeparateExperts:
    """Matrices `[experts, rows, columns]`, of which each is stored by itself.

    `experts`: where each one's are, one below the other; all of one format.
    """

    experts: tuple[tuple[PlainTensor | QuantisedTensor, ...], ...]

    @property
    def names(self) -> Sequence[str]:
        return [name for one in self.experts for part in one for name in part.names]

    def shape(self, files: TensorFiles) -> list[int]:
        shapes = [part.shape(files) for part in self.experts[0]]
        return [len(self.experts), sum(rows for rows, _ in shapes), shapes[0][1]]

    def like(self, files: TensorFiles) -> Weight:
        one = below([part.like(files) for part in self.experts[0]])
        return with_data(one, one.data.expand(len(self.experts), *one.data.shape))

    def rows(self, files: TensorFiles, first: int, last: int) -> Weight:
        made = [
            below([part.rows(files, 0, part.shape(files)[0]) for part in one])
            for one in self.experts[first:last]
        ]
        return with_data(made[0], torch.stack([one.data for one in made]))


@dataclass(frozen=True)
class Mxfp4:
    """Matrices `[experts, inputs, outputs]` in MXFP4 (OCP Microscaling Formats 1.0), as of GPT-OSS.

    `blocks`: `[experts, outputs, groups, 16]` bytes of two numbers each, the first in the low bits.
    `scales`: `[experts, outputs, groups]` exponents of 2, plus 127.
    """

    blocks: str
    scales: str

    @property
    def names(self) -> Sequence[str]:
        return (self.blocks, self.scales)

    def shape(self, files: TensorFiles) -> list[int]:
        count, outputs, groups, half = files.shape(self.blocks)
        return [count, groups * 2 * half, outputs]

    def like(self, files: TensorFiles) -> BlockRows:
        count, outputs, groups, half = files.shape(self.blocks)
        data = torch.empty(count, outputs, groups * (1 + half), dtype=torch.uint8, device="meta")
        return BlockRows(data, "mxfp4")

    def rows(self, files: TensorFiles, first: int, last: int) -> BlockRows:
        """Return experts' matrices, `[experts, outputs, inputs]`, in blocks as of `.gguf` files.

        There, a byte holds two numbers of which the second comes 16 behind the first.
        """
        stored, scales = (files.rows(name, first, last) for name in self.names)
        apart = torch.stack([stored & 15, stored >> 4], -1).flatten(-2)
        bytes_of = apart[..., :16] | apart[..., 16:] << 4
        return BlockRows(torch.cat([scales[..., None], bytes_of], -1).flatten(-2), "mxfp4")


def widened_mxfp4(blocks: BlockRows) -> torch.Tensor:
    """Return the numbers of blocks in MXFP4, `[..., inputs]` float32."""
    groups = torch.unflatten(blocks.data, -1, (-1, 17))
    stored = groups[..., 1:]
    values = FP4[torch.cat([stored & 15, stored >> 4], -1).long()]
    exponents = groups[..., :1].int() - 127
    return torch.ldexp(values, exponents).flatten(-2)


# Where a parameter is. `names`: of the stored tensors. `like` gives what `rows` does of all rows,
# without the numbers.
Stored = PlainTensor | SeparateExperts | Mxfp4 | QuantisedTensor


def dense(weight: Weight, of: Stored) -> torch.Tensor:
    """Return the numbers of rows of a parameter, whose blocks are widened to float32."""
    if isinstance(weight, torch.Tensor):
        return weight
    kernels = library.kernels()
    rows = widened_mxfp4(weight) if kernels is None else dense_rows(kernels, weight)
    return rows.transpose(1, 2) if isinstance(of, Mxfp4) else rows


def located(
    name: str,
    stored: Mapping[str, str],
    files: TensorFiles,
    method: QuantMethod | None,
    width: int | None = None,
) -> Stored | None:
    """Return where a parameter is; None where it is not.

    `stored`: the stored name of each parameter. `width`: how many numbers an expert reads and
    gives, of a kind in `TRANSPOSED`. Raises as `quantised_tensor` does, `NotDescribed` for experts
    that are not stored alike, and `InvalidInput` for scales of float8 experts of another shape.
    """

    def place(name: str) -> PlainTensor | QuantisedTensor | None:
        quantised = None
        if method is not None and name.endswith(".weight"):
            quantised = quantised_tensor(name, stored, files, method)
        return quantised or (PlainTensor(stored[name]) if name in stored else None)

    blocks, scales = f"{name}_blocks", f"{name}_scales"
    if (tensor := place(name)) is None:
        if {blocks, scales} <= stored.keys():
            return Mxfp4(stored[blocks], stored[scales])
        return _one_by_one(name, place, files)
    if isinstance(tensor, QuantisedTensor) or name.endswith(".weight"):
        return tensor
    if width is not None:
        return _stacked(name, tensor.name, files, width)
    if method is not None and f"{name}_scale_inv" in stored:
        return _in_float8(name, stored, files, method)
    return tensor


def _in_float8(
    name: str, stored: Mapping[str, str], files: TensorFiles, method: QuantMethod
) -> SeparateExperts:
    """Return where the matrices `[experts, outputs, inputs]` of a parameter in float8 are.

    They have scales by blocks of outputs and inputs beside them, as transformers saves them.
    """
    parts = {"weight": stored[name], "weight_scale": stored[f"{name}_scale_inv"]}
    shapes = [files.shape(one) for one in parts.values()]
    if any(len(one) != 3 or one[0] != shapes[0][0] for one in shapes):
        names = " and ".join(parts.values())
        raise InvalidInput(f"{names} have shapes {shapes}: they don't fit together")
    one = QuantisedTensor.of(parts, partial(eight_bits, block=method.block), files, expert=0)
    return SeparateExperts(tuple((replace(one, expert=i),) for i in range(shapes[0][0])))


def _stacked(name: str, as_stored: str, files: TensorFiles, width: int) -> PlainTensor:
    """Return where the matrices of stacked experts are, of a kind in `TRANSPOSED`."""
    shape, at = files.shape(as_stored), {"gate_up_proj": 2, "down_proj": 1}
    column = at.get(name.rpartition(".")[2], 0)
    transposed = len(shape) == 3 and column and shape[column] != width == shape[3 - column]
    return PlainTensor(as_stored, bool(transposed))


def _one_by_one(
    name: str, place: Callable[[str], PlainTensor | QuantisedTensor | None], files: TensorFiles
) -> SeparateExperts | None:
    """Return where the matrices of a parameter of stacked experts are, or None."""
    at, _, what = name.rpartition(".")
    if not at.endswith(".experts") or what not in ("gate_up_proj", "down_proj"):
        return None
    for gate, up, down in EXPERT:
        parts, experts = (gate, up) if what == "gate_up_proj" else (down,), list[Any]()
        while all(one := [place(f"{at}.{len(experts)}.{part}.weight") for part in parts]):
            experts.append(tuple(one))
        if experts:
            every = [part for one in experts for part in one]
            if any(isinstance(part, QuantisedTensor) and part.order is not None for part in every):
                raise NotDescribed(
                    "its experts are quantised with activation order, which is not read: take a "
                    "checkpoint without it, or the unquantised weights"
                )
            kinds = {(*part.shape(files), getattr(part, "format", "dense")) for part in every}
            if len(kinds) > 1:
                few_of = " and ".join(str(one) for one in sorted(kinds)[:2])
                raise NotDescribed(
                    f"its experts' {what} are of several kinds ({few_of}), and one is read: take "
                    "another checkpoint, or the unquantised weights"
                )
            return SeparateExperts(tuple(experts))
    return None
