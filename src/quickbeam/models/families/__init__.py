"""Families of models as data: a function for each makes a `Stack` from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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

FAMILIES: dict[str, Callable[[Config], Stack]] = {  # by the configuration's model_type
    "afmoe": mixtures.afmoe,
    "apertus": llama.apertus,
    "arcee": llama.arcee,
    "bamba": mamba.bamba,
    "codegen": layer_norms.codegen,
    "cohere": layer_norms.cohere,
    "cohere2": layer_norms.cohere2,
    "cwm": llama.windowed,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "dots1": glm.dots1,
    "ernie4_5": llama.ernie4_5,
    "ernie4_5_moe": mixtures.ernie4_5_moe,
    "exaone": llama.llama,
    "exaone4": llama.exaone4,
    "falcon": layer_norms.falcon,
    "falcon_h1": mamba.falcon_h1,
    "flex_olmo": mixtures.flex_olmo,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gemma4_text": gemma.gemma4,
    "glm": glm.glm,
    "glm4": glm.glm4,
    "glm4_moe": glm.glm4_moe,
    "glm4_moe_lite": deepseek.glm4_moe_lite,
    "glm4v_text": glm.glm4,
    "gpt2": layer_norms.gpt2,
    "gpt_bigcode": layer_norms.gpt_bigcode,
    "gpt_neo": layer_norms.gpt_neo,
    "gpt_neox": layer_norms.gpt_neox,
    "gpt_oss": mixtures.gpt_oss,
    "gptj": layer_norms.gptj,
    "granite": llama.granite,
    "granite_swa": llama.granite_swa,
    "granitemoe": llama.granitemoe,
    "granitemoe_swa": llama.granitemoe_swa,
    "granitemoehybrid": mamba.granite_hybrid,
    "granitemoeshared": llama.granitemoeshared,
    "helium": llama.helium,
    "hunyuan_v1_dense": llama.hunyuan,
    "hunyuan_v1_moe": llama.hunyuan_v1_moe,
    "hyperclovax": llama.hyperclovax,
    "internlm3": llama.llama,
    "iquestcoder": llama.llama,
    "jais2": layer_norms.jais2,
    "lfm2": lfm2.lfm2,
    "lfm2_moe": lfm2.lfm2_moe,
    "lfm3": lfm2.lfm3,
    "llama": llama.llama,
    "mellum": qwen.mellum,
    "minimax_m2": mixtures.minimax_m2,
    "ministral": llama.windowed,
    "ministral3": llama.ministral3,
    "mistral": llama.mistral,
    "mixtral": mixtures.mixtral,
    "muse_glimmer_text": gemma.muse_glimmer,
    "nanochat": llama.nanochat,
    "nemotron": layer_norms.nemotron,
    "nemotron_h": mamba.nemotron_h,
    "olmo": llama.olmo,
    "olmo2": llama.olmo2,
    "olmo3": llama.olmo2,
    "olmoe": mixtures.olmoe,
    "opt": layer_norms.opt,
    "persimmon": layer_norms.persimmon,
    "phi": layer_norms.phi,
    "phi3": llama.phi3,
    "phimoe": mixtures.phimoe,
    "qwen2": qwen.qwen2,
    "qwen2_5_vl_text": qwen.qwen2,
    "qwen2_moe": qwen.qwen2_moe,
    "qwen2_vl_text": qwen.qwen2,
    "qwen3": qwen.qwen3,
    "qwen3_5_moe_text": qwen.qwen3_5_moe,
    "qwen3_5_text": qwen.qwen3_5,
    "qwen3_moe": qwen.qwen3_moe,
    "qwen3_next": qwen.qwen3_next,
    "qwen3_vl_moe_text": qwen.qwen3_vl_moe,
    "qwen3_vl_text": qwen.qwen3_vl,
    "sarvam_mla": deepseek.deepseek_v3,
    "seed_oss": llama.seed_oss,
    "smollm3": llama.smollm3,
    "solar_open": glm.solar_open,
    "stablelm": layer_norms.stablelm,
    "starcoder2": layer_norms.starcoder2,
    "vaultgemma": gemma.vaultgemma,
    "youtu": deepseek.youtu,
}
# packages whose layers keep weights in few bits
QUANTISERS = ("bitsandbytes", "gptqmodel", "hqq", "optimum", "torchao")


def stack_of(config: Any, dtype: torch.dtype) -> Stack:
    """Return the architecture of a model with this configuration and number format.

    Raises `NotDescribed` for a model of no family in the table, for a configuration that sets what
    its family doesn't read, and for rotary angles of an unknown kind. Raises `InvalidInput` for
    attributes whose values can't be right.
    """
    kind = getattr(config, "model_type", "")
    family = FAMILIES.get(kind)
    if family is None:
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
    kinds = {(attention.rotary, attention.rotary_dim) for attention in stack.attentions}
    try:
        for rotary, dim in kinds:
            if rotary is not None:
                angles_of(config, rotary, dim)
    except InvalidInput as error:
        raise NotDescribed(str(error)) from error


def _refuse_odd_sizes(stack: Stack) -> None:
    """Raise `InvalidInput` for numbers of a layer that can't be together."""
    for attention in stack.attentions:
        heads, kv_heads = attention.heads, attention.kv_heads
        head_dim, rotary_dim = attention.head_dim, attention.rotary_dim
        _must(heads % kv_heads == 0, f"{heads} heads of queries, {kv_heads} of keys")
        _must(attention.window != 0, "a window of no tokens")
        fits = 0 <= rotary_dim <= head_dim and rotary_dim % 2 == 0
        _must(fits, f"heads of {head_dim} dimensions, of which {rotary_dim} are rotated")
    for recurrent in stack.recurrents:
        if isinstance(recurrent, LinearAttention):
            heads, key_heads = recurrent.heads, recurrent.key_heads
            fits = heads % key_heads == heads % recurrent.groups == 0
            _must(fits, f"{heads} heads in {key_heads} groups")
    for mixture in experts(stack):
        routing, count = mixture.routing, len(mixture.candidates)
        size, remainder = divmod(count, routing.groups)
        selectable = routing.top_groups * size
        fits = (
            not remainder
            and routing.best_of_group <= size
            and routing.top_groups <= routing.groups
            and type(routing.top) is int
            and 0 < routing.top <= selectable
        )
        groups = f"{routing.top_groups} of {routing.groups} groups"
        _must(fits, f"{routing.top} of {count} experts selected in {groups}")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise InvalidInput(f"its configuration has {what}, which can't be together")


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

    model_class = type(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers()}
    unequal = sorted(parameters ^ (names(stack) - buffers))
    if unequal:
        has = "a parameter" if unequal[0] in parameters else "no parameter"
        raise NotDescribed(f"this {model_class.__name__} has {has} {unequal[0]}")
    for name, module in model.named_modules():
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            raise NotDescribed(f"{name} has a forward of its own")
    for linear, _ in linears(stack):
        for tensor in linear.weights:
            layer_class = type(model.get_submodule(tensor.name.rpartition(".")[0]))
            is_plain = layer_class in (nn.Linear, Conv1D)
            if not is_plain and layer_class.__module__ != model_class.__module__:
                raise NotDescribed(f"{tensor.name} is of a {layer_class.__name__}")
    embedding = type(model.get_input_embeddings())
    if not embedding.__module__.startswith(("torch.nn.", "transformers.")):
        raise NotDescribed(f"its embedding is a {embedding.__name__}")


def _quantised_by(model: PreTrainedModel) -> str | None:
    """Return the method, or the library, that quantised a model's weights; None for none."""
    config: Any = getattr(model.config, "quantization_config", None)
    fields = config if isinstance(config, dict) else vars(config or SimpleNamespace())
    method = fields.get("quant_method")
    if method is not None:
        return str(getattr(method, "value", method))
    packages = (type(module).__module__.partition(".")[0] for module in model.modules())
    return next((package for package in packages if package in QUANTISERS), None)
