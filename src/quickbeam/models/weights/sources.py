"""The sources of a model's parameters: which tensors of a checkpoint's files hold them.

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
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.quantised import BlockRows, Weight, concatenated, dense_rows, with_data
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
# prefixes of the names of a language model, the longest first
PREFIXES = (
    *("model.language_model.model.", "language_model.model.model.", "model.language_model."),
    *("language_model.model.", "model.text_model.", "language_model.", "text_model."),
)
# prefixes of the head's name
HEADS = ("", "language_model.", "model.")
# parts of parameters' names by trainers, for modules that are compiled, sharded, recomputed or
# adapted
WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)
# prefixes of whole names by trainers, for copies on several devices and for adapted models
WRAPPED = re.compile(r"^(?:module\.)?(?:base_model\.model\.)?")
# parts of the names of LoRA's matrices that are not merged into a weight
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
# model types whose experts may be stored `[experts, inputs, outputs]`
TRANSPOSED = ("qwen3_vl_moe_text",)
# what each four bits of MXFP4 stand for
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])
# names of one expert's gate, up and down projections
EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def language_part(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language part, or `fields` where there are no parts.

    `_whole` is the `model_type` of the whole, `_deepstack` is `Stack.deepstack`.
    """
    part = fields.get("text_config")
    if fields.get("model_type") not in COMPOSITES or not isinstance(part, dict):
        return fields
    language = dict(part)
    for name in SHARED:
        if language.get(name) is None and fields.get(name) is not None:
            language[name] = fields[name]
    tied = fields.get("tie_word_embeddings", part.get("tie_word_embeddings", False))
    language["tie_word_embeddings"] = tied
    language["_whole"] = fields["model_type"]
    vision = fields.get("vision_config")
    indexes = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    if isinstance(indexes, list):
        language["_deepstack"] = len(indexes)
    return language


def tensor_names(
    stored: Iterable[str], kind: str, embedding: str, head: str, parts: bool
) -> dict[str, str]:
    """Return the tensor's name of each parameter, by the causal language model's name.

    `stored`: the names of all tensors. `kind`: the language model's `model_type`. `embedding`,
    `head`: the names of two parameters. `parts`: the files may hold more than a language model,
    which is left out. Raises `InvalidInput` for two tensors of one parameter, and for matrices of
    LoRA.
    """
    renamed = dict[str, str]()  # the tensors' names by names of one convention
    for tensor in stored:
        name = _renamed(kind, tensor)
        if name in renamed:
            raise InvalidInput(
                f"its files hold {renamed[name]} and {tensor}, which are one parameter's: remove "
                "one"
            )
        if any(part in name for part in UNMERGED):
            raise InvalidInput(
                f"its files hold {tensor}, which is not merged into the weights: save the model "
                "again after peft's merge_and_unload"
            )
        renamed[name] = tensor

    base, _, tail = embedding.partition(".")
    base = f"{base}."
    head_module, _, _ = head.rpartition(".")
    head = f"{head_module}."
    prefixes = (*PREFIXES, base, "") if parts else (base, *PREFIXES, "")
    prefix = next((prefix for prefix in prefixes if f"{prefix}{tail}" in renamed), base)
    heads = tuple(f"{head_prefix}{head}" for head_prefix in HEADS)
    tensors = dict[str, str]()
    for name, tensor in renamed.items():
        if name.endswith(BUFFERS):
            continue
        if name.startswith(heads):
            _, _, last = name.rpartition(head)
            tensors[f"{head}{last}"] = tensor
        elif name.startswith(prefix):
            tensors[f"{base}{name.removeprefix(prefix)}"] = tensor
        elif not parts:
            tensors[name] = tensor
    return tensors


def causal_names(name: str) -> Iterator[str]:
    """Yield what a causal language model may call a parameter of a larger model."""
    yield name
    for prefix in HEADS:
        if prefix and name.startswith(prefix):
            yield name.removeprefix(prefix)
    for prefix in PREFIXES:
        if name.startswith(prefix):
            yield f"model.{name.removeprefix(prefix)}"


def _renamed(kind: str, name: str) -> str:
    """Return a tensor's name without what trainers added, and with the usual names of modules."""
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

    def rows(
        self, files: TensorFiles, first: int, last: int, kernels: Kernels | None = None
    ) -> torch.Tensor:
        tensor = files.rows(self.name, first, last)
        return tensor.transpose(1, 2) if self.transposed else tensor


@dataclass(frozen=True)
class SeparateExperts:
    """Matrices `[experts, rows, columns]` of one format, each expert's in tensors of its own.

    `experts`: the sources of each expert's rows, one below the other.
    """

    experts: tuple[tuple[PlainTensor | QuantisedTensor, ...], ...]

    @property
    def names(self) -> Sequence[str]:
        return [name for parts in self.experts for part in parts for name in part.names]

    def shape(self, files: TensorFiles) -> list[int]:
        shapes = [part.shape(files) for part in self.experts[0]]
        return [len(self.experts), sum(rows for rows, _ in shapes), shapes[0][1]]

    def like(self, files: TensorFiles) -> Weight:
        expert = concatenated([part.like(files) for part in self.experts[0]])
        return with_data(expert, expert.data.expand(len(self.experts), *expert.data.shape))

    def rows(
        self, files: TensorFiles, first: int, last: int, kernels: Kernels | None = None
    ) -> Weight:
        experts = list[Weight]()
        for parts in self.experts[first:last]:
            rows = [part.rows(files, 0, part.shape(files)[0], kernels) for part in parts]
            experts.append(concatenated(rows))
        return with_data(experts[0], torch.stack([expert.data for expert in experts]))


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

    def rows(
        self, files: TensorFiles, first: int, last: int, kernels: Kernels | None = None
    ) -> BlockRows:
        """Return experts' matrices, `[experts, outputs, inputs]`, in blocks as of `.gguf` files.

        There, a byte holds two numbers of which the second comes 16 behind the first.
        """
        pairs = files.rows(self.blocks, first, last)
        scales = files.rows(self.scales, first, last)
        values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
        values = values[..., :16] | values[..., 16:] << 4
        return BlockRows(torch.cat([scales[..., None], values], -1).flatten(-2), "mxfp4")


def widened_mxfp4(blocks: BlockRows) -> torch.Tensor:
    """Return what blocks in MXFP4 stand for, `[..., inputs]` float32."""
    groups = torch.unflatten(blocks.data, -1, (-1, 17))
    pairs = groups[..., 1:]
    values = FP4[torch.cat([pairs & 15, pairs >> 4], -1).long()]
    exponents = groups[..., :1].int() - 127
    return torch.ldexp(values, exponents).flatten(-2)


# The source of a parameter. `names`: of its tensors. `shape`: the parameter's. `rows` reads rows of
# the parameter, those in few bits as blocks where there are kernels; `like` gives their shape and
# format alone.
ParameterSource = PlainTensor | SeparateExperts | Mxfp4 | QuantisedTensor


def dense(weight: Weight, source: ParameterSource, kernels: Kernels | None = None) -> torch.Tensor:
    """Return rows of a parameter without blocks, which are widened to float32."""
    if isinstance(weight, torch.Tensor):
        return weight
    rows = widened_mxfp4(weight) if kernels is None else dense_rows(kernels, weight)
    return rows.transpose(1, 2) if isinstance(source, Mxfp4) else rows


def source_of(
    name: str,
    stored: Mapping[str, str],
    files: TensorFiles,
    method: QuantMethod | None,
    width: int | None = None,
) -> ParameterSource | None:
    """Return the source of a parameter; None where the files don't have it.

    `stored`: the tensor's name of each parameter. `width`: how many elements an expert reads and
    returns, of a kind in `TRANSPOSED`. Raises as `quantised_tensor` does, `NotDescribed` for
    experts that are not stored alike, and `InvalidInput` for scales of float8 experts of another
    shape.
    """

    def one_tensor(name: str) -> PlainTensor | QuantisedTensor | None:
        """Return a source that is no tensors of several experts."""
        if method is not None and name.endswith(".weight"):
            quantised = quantised_tensor(name, stored, files, method)
            if quantised is not None:
                return quantised
        return PlainTensor(stored[name]) if name in stored else None

    source = one_tensor(name)
    if source is None:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if blocks in stored and scales in stored:
            return Mxfp4(stored[blocks], stored[scales])
        return _separate_experts(name, one_tensor, files)
    if isinstance(source, QuantisedTensor) or name.endswith(".weight"):
        return source
    if width is not None:
        return _stacked_experts(name, source.name, files, width)
    if method is not None and f"{name}_scale_inv" in stored:
        return _float8_experts(name, stored, files, method)
    return source


def _float8_experts(
    name: str, stored: Mapping[str, str], files: TensorFiles, method: QuantMethod
) -> SeparateExperts:
    """Return the source of a parameter `[experts, outputs, inputs]` in float8.

    Its scales, by blocks of outputs and inputs, are in a tensor beside it, as transformers saves
    them.
    """
    parts = {"weight": stored[name], "weight_scale": stored[f"{name}_scale_inv"]}
    shapes = [files.shape(tensor) for tensor in parts.values()]
    count = shapes[0][0] if shapes[0] else 0
    if any(len(shape) != 3 or shape[0] != count for shape in shapes):
        names = " and ".join(parts.values())
        raise InvalidInput(f"{names} have shapes {shapes}: they don't fit together")
    first = QuantisedTensor.of(parts, partial(eight_bits, block=method.block), files, expert=0)
    return SeparateExperts(tuple((replace(first, expert=i),) for i in range(count)))


def _stacked_experts(name: str, tensor: str, files: TensorFiles, width: int) -> PlainTensor:
    """Return the source of stacked experts of a model in `TRANSPOSED`."""
    shape = files.shape(tensor)
    _, _, last = name.rpartition(".")
    width_at = {"gate_up_proj": 2, "down_proj": 1}.get(last)
    if width_at is None or len(shape) != 3:
        return PlainTensor(tensor)
    transposed = shape[width_at] != width and shape[3 - width_at] == width
    return PlainTensor(tensor, transposed)


OneTensor = Callable[[str], PlainTensor | QuantisedTensor | None]


def _separate_experts(
    name: str, one_tensor: OneTensor, files: TensorFiles
) -> SeparateExperts | None:
    """Return the source of a parameter whose experts are stored one by one, or None.

    `one_tensor`: returns the source of one expert's matrix by its name, or None.
    """
    module, _, projection = name.rpartition(".")
    if not module.endswith(".experts") or projection not in ("gate_up_proj", "down_proj"):
        return None
    for gate, up, down in EXPERT:
        parts = (gate, up) if projection == "gate_up_proj" else (down,)
        experts = list[tuple[PlainTensor | QuantisedTensor, ...]]()
        while True:
            sources = [one_tensor(f"{module}.{len(experts)}.{part}.weight") for part in parts]
            present = tuple(source for source in sources if source is not None)
            if len(present) < len(parts):
                break
            experts.append(present)
        if experts:
            _refuse_unlike(projection, experts, files)
            return SeparateExperts(tuple(experts))
    return None


def _refuse_unlike(
    projection: str,
    experts: Sequence[tuple[PlainTensor | QuantisedTensor, ...]],
    files: TensorFiles,
) -> None:
    """Raise `NotDescribed` for experts that are not stored alike, or in activation order."""
    kinds = set[tuple[Any, ...]]()
    for source in (source for parts in experts for source in parts):
        if isinstance(source, QuantisedTensor) and source.order is not None:
            raise NotDescribed(
                "its experts are quantised with activation order, which is not read: take a "
                "checkpoint without it, or the unquantised weights"
            )
        kinds.add((*source.shape(files), getattr(source, "format", "dense")))
    if len(kinds) > 1:
        two = " and ".join(str(kind) for kind in sorted(kinds)[:2])
        raise NotDescribed(
            f"its experts' {projection} are of several kinds ({two}), and one is read: take "
            "another checkpoint, or the unquantised weights"
        )
