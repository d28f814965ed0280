"""Families of models as data: a function for each makes a `Stack` from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quickbeam.errors import InvalidInput, first_line
from quickbeam.models.families import (
    deepseek,
    gemma,
    glm,
    layer_norms,
    lfm2,
    llama,
    mamba,
    mixtures,
    qwen,
)
from quickbeam.models.families.nearest import undescribed
from quickbeam.models.families.reading import PAGE, Config, NotDescribed, check_count
from quickbeam.models.rotary import angles_of
from quickbeam.models.stack import LinearAttention, Stack
from quickbeam.models.weights.parameters import experts, linears, names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMED_ALIKE: tuple[Callable[[Config], Stack], ...] = (
    *(deepseek.deepseek_v2, deepseek.deepseek_v3, deepseek.glm4_moe_lite, deepseek.youtu),
    *(gemma.gemma, gemma.gemma2, gemma.vaultgemma),
    *(glm.dots1, glm.glm, glm.glm4, glm.glm4_moe, glm.solar_open),
    *(lfm2.lfm2, lfm2.lfm2_moe, lfm2.lfm3),
    *(layer_norms.codegen, layer_norms.cohere, layer_norms.cohere2, layer_norms.falcon),
    *(layer_norms.gpt2, layer_norms.gpt_bigcode, layer_norms.gpt_neo, layer_norms.gpt_neox),
    *(layer_norms.gptj, layer_norms.jais2, layer_norms.nemotron, layer_norms.opt),
    *(layer_norms.persimmon, layer_norms.phi, layer_norms.stablelm, layer_norms.starcoder2),
    *(llama.arcee, llama.ernie4_5, llama.exaone4, llama.granite, llama.granite_swa),
    *(llama.granitemoe, llama.granitemoe_swa, llama.granitemoeshared, llama.helium),
    *(llama.hunyuan_v1_moe, llama.hyperclovax, llama.llama, llama.ministral3, llama.mistral),
    *(llama.nanochat, llama.olmo, llama.olmo2, llama.phi3, llama.seed_oss, llama.smollm3),
    *(mamba.bamba, mamba.falcon_h1, mamba.nemotron_h),
    *(mixtures.afmoe, mixtures.ernie4_5_moe, mixtures.flex_olmo, mixtures.gpt_oss),
    *(mixtures.minimax_m2, mixtures.mixtral, mixtures.olmoe, mixtures.phimoe),
    *(qwen.mellum, qwen.qwen2, qwen.qwen2_moe, qwen.qwen3, qwen.qwen3_moe, qwen.qwen3_next),
)
# packages whose layers keep weights in few bits
QUANTISERS = ("bitsandbytes", "gptqmodel", "hqq", "optimum", "torchao")
FAMILIES: dict[str, Callable[[Config], Stack]] = {  # by the configuration's model_type
    **{family.__name__: family for family in _NAMED_ALIKE},
    "cwm": llama.windowed,
    "exaone": llama.llama,
    "gemma3_text": gemma.gemma3,
    "gemma4_text": gemma.gemma4,
    "glm4v_text": glm.glm4,
    "granitemoehybrid": mamba.granite_hybrid,
    "hunyuan_v1_dense": llama.hunyuan,
    "muse_glimmer_text": gemma.muse_glimmer,
    "internlm3": llama.llama,
    "iquestcoder": llama.llama,
    "ministral": llama.windowed,
    "olmo3": llama.olmo2,
    "qwen2_5_vl_text": qwen.qwen2,
    "qwen2_vl_text": qwen.qwen2,
    "qwen3_5_moe_text": qwen.qwen3_5_moe,
    "qwen3_5_text": qwen.qwen3_5,
    "qwen3_vl_moe_text": qwen.qwen3_vl_moe,
    "qwen3_vl_text": qwen.qwen3,
    "sarvam_mla": deepseek.deepseek_v3,
}


def stack_of(config: Any, dtype: torch.dtype) -> Stack:
    """Return the architecture of a model with this configuration and number format.

    Raises `NotDescribed` for one of no family in the table, for one that sets what its family's
    file doesn't know, and for rotary angles of an unknown kind. Raises `InvalidInput` for fields
    that hold something else than they are for.
    """
    kind = getattr(config, "model_type", "")
    if (family := FAMILIES.get(kind)) is None:
        raise undescribed(config.to_dict(), FAMILIES)
    reading = Config(config, dtype)
    check_count(reading.num_hidden_layers, "layers")
    try:
        stack = family(reading)
        reading.refuse_unknown()
        _refuse_odd_sizes(stack)
        _refuse_angles(config, stack)
    except NotDescribed as error:
        raise NotDescribed(
            f"the family {kind!r} doesn't describe this model: {error}; {PAGE} says how to "
            "describe it"
        ) from error
    except InvalidInput:
        raise
    except (TypeError, AttributeError, ArithmeticError, LookupError, ValueError) as error:
        raise InvalidInput(
            f"its configuration can't be read ({first_line(error)}): download the model again, or "
            "correct it"
        ) from error
    return stack


def _refuse_angles(config: Any, stack: Stack) -> None:
    """Raise `NotDescribed` for rotary angles that can't be made."""
    try:
        for rotary, dim in dict.fromkeys((one.rotary, one.rotary_dim) for one in stack.attentions):
            if rotary is not None:
                angles_of(config, rotary, dim)
    except InvalidInput as error:
        raise NotDescribed(str(error)) from error


def _refuse_odd_sizes(stack: Stack) -> None:
    """Raise `InvalidInput` for numbers of a layer that can't be together."""

    def must(holds: bool, what: str) -> None:
        if not holds:
            raise InvalidInput(f"its configuration has {what}, which can't be together")

    for of in stack.attentions:
        must(of.heads % of.kv_heads == 0, f"{of.heads} heads of queries, {of.kv_heads} of keys")
        must(of.window != 0, "a window of no tokens")
        even = 0 <= of.rotary_dim <= of.head_dim and of.rotary_dim % 2 == 0
        must(even, f"heads of {of.head_dim}, of which {of.rotary_dim} turn")
    for one in stack.recurrents:
        if isinstance(one, LinearAttention):
            each = one.heads % one.key_heads == one.heads % one.groups == 0
            must(each, f"{one.heads} heads in {one.key_heads} groups")
    for routing, count in ((of.routing, len(of.chosen)) for of in experts(stack)):
        own, rest = divmod(count, routing.groups)
        fits = not rest and routing.best_of_group <= own and routing.top_groups <= routing.groups
        fits = fits and 0 < routing.top <= routing.top_groups * own and type(routing.top) is int
        groups = f"{routing.top_groups} of {routing.groups} groups"
        must(fits, f"{routing.top} of {count} experts chosen in {groups}")


def describe(model: PreTrainedModel) -> Stack:
    """Return a model's architecture.

    Raises `NotDescribed` as `stack_of` does, and for a model with other parameters, forwards or
    linear layers than its family (adapters, quantised weights, code that came with the model).
    """
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers."):
        raise NotDescribed(
            f"{name} comes with Python code of its own, which is not run: take transformers' class "
            "of the model"
        )
    stack = stack_of(model.config, model.dtype)
    try:
        _refuse_changed(model, stack)
    except NotDescribed as error:
        method = _quantised_by(model)
        if method is None:
            raise
        raise NotDescribed(
            f"the weights of this {name} are quantised ({method}), and a model's own are read as "
            "they are: take the unquantised model, or give quickbeam.LLM a checkpoint in AWQ, "
            "GPTQ, compressed-tensors or FP8, or a .gguf file"
        ) from error
    return stack


def _refuse_changed(model: PreTrainedModel, stack: Stack) -> None:
    """Raise `NotDescribed` for a model with other parts than its class has."""
    from transformers.pytorch_utils import Conv1D

    kind = type(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers()}
    if odd := sorted(parameters ^ (names(stack) - buffers)):
        has = "a parameter" if odd[0] in parameters else "no parameter"
        raise NotDescribed(f"this {kind.__name__} has {has} {odd[0]}")
    for name, module in model.named_modules():
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            raise NotDescribed(f"{name} has a forward of its own")
    for linear, _ in linears(stack):
        for tensor in linear.weights:
            of = type(model.get_submodule(tensor.name.rpartition(".")[0]))
            if of not in (nn.Linear, Conv1D) and of.__module__ != kind.__module__:
                raise NotDescribed(f"{tensor.name} is of a {of.__name__}")
    embedding = type(model.get_input_embeddings())
    if not embedding.__module__.startswith(("torch.nn.", "transformers.")):
        raise NotDescribed(f"its embedding is a {embedding.__name__}")


def _quantised_by(model: PreTrainedModel) -> str | None:
    """Return the method, or the library, that quantised a model's weights; None for none."""
    config: Any = getattr(model.config, "quantization_config", None)
    fields = config if isinstance(config, dict) else vars(config) if config is not None else {}
    method = fields.get("quant_method")
    if method is not None:
        return str(getattr(method, "value", method))
    packages = (type(module).__module__.partition(".")[0] for module in model.modules())
    return next((one for one in packages if one in QUANTISERS), None)
