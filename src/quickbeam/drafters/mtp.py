"""MTP heads as drafters: one more decoder layer of a model, from the model's own checkpoint.

As in an EAGLE drafter, row j holds the hidden state after token j and the embedding of token j + 1,
and predicts token j + 2 through the model's head. The layer's output stands in for the next hidden
state. So one head drafts trees of any depth. A checkpoint may hold further heads, each for one
depth: these are not read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quickbeam.drafters.base import Drafter
from quickbeam.drafters.eagle import EagleDrafter
from quickbeam.drafters.folder import named_errors
from quickbeam.drafters.network import DrafterParameters
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.errors import InvalidInput, refuse_incomplete
from quickbeam.hub.mtp import QWEN, MtpLayout, is_mtp, mtp_layout
from quickbeam.models.base import Model
from quickbeam.models.compile.compiled_stack import kv_shapes
from quickbeam.models.families import FAMILIES
from quickbeam.models.families.reading import Config, linear
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.pages import PagePool
from quickbeam.models.stack import NO_HEAD, HiddenInput, Norm, Stack
from quickbeam.models.torch.network import LayerStack
from quickbeam.models.weights.checkpoint import ModelConfig
from quickbeam.models.weights.gguf.architecture import architecture_of
from quickbeam.models.weights.gguf.checkpoint import GgufParameters
from quickbeam.models.weights.gguf.file import GgufFile
from quickbeam.models.weights.gguf.names import mtp_names
from quickbeam.models.weights.parameters import Parameters, names
from quickbeam.models.weights.prequantised import method_of
from quickbeam.models.weights.shapes import expected
from quickbeam.models.weights.sources import ParameterSource, source_of, tensor_names
from quickbeam.models.weights.tensor_files import TensorFiles

NO_KNOWN_HEAD = (
    "its files hold no MTP head of a known layout (Qwen3-Next's and Qwen3.5's, DeepSeek-V3's and "
    "GLM-4-MoE's, MiMo's); name another drafter"
)
# what a family reads of its first layer, as the head is one: full attention, experts if there are
FIRST_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def mtp_stack(config: Any, dtype: torch.dtype) -> tuple[Stack, ModelConfig]:
    """Return a head's architecture but for what joins its input, and its configuration.

    `config`: the model's, whose first layer's names the head's parameters have.
    """
    fields = config.to_dict()
    first = ModelConfig(fields | {k: v for k, v in FIRST_LAYER.items() if k in fields})
    # its family knows all that the configuration sets: the model is described by it
    return FAMILIES[config.model_type](Config(first, dtype)), first


def norm_of(stack: Stack, module: str) -> Norm:
    """Return a norm of the model's kind whose weight is a module's."""
    return replace(stack.norm, weights=(f"{module}.weight",))


def joined(stack: Stack, layout: MtpLayout, width: int) -> Stack:
    """Return the stack with its own last norm and what joins its input, without a head.

    `width`: of the model's hidden states.
    """
    hidden_input = HiddenInput(
        width,
        token_norm=norm_of(stack, layout.token_norm),
        state_norm=norm_of(stack, layout.hidden_norm),
        state_first=layout.hidden_first,
        join=linear(layout.fc),
    )
    return replace(stack, norm=norm_of(stack, layout.norm), head=NO_HEAD, hidden_input=hidden_input)


def joining(layout: MtpLayout, width: int) -> dict[str, list[int]]:
    """Return the shapes of what joins a head's input."""
    return {
        f"{layout.token_norm}.weight": [width],
        f"{layout.hidden_norm}.weight": [width],
        f"{layout.fc}.weight": [width, 2 * width],
    }


def mtp_parameters(
    files: TensorFiles,
    named: dict[str, str],
    layout: MtpLayout,
    stack: Stack,
    config: Any,
    embedding: torch.Tensor,
) -> DrafterParameters:
    """Return a head's parameters by the names of its stack.

    `named`: the stored name of each of its parameters. `embedding`: the model's. Raises
    `InvalidInput` for a parameter that is missing, or has another shape.
    """
    layer = f"{layout.layer}."
    for name, stored_name in list(named.items()):
        if name.startswith(layer):
            named[f"{stack.inside}.0.{name.removeprefix(layer)}"] = stored_name
    shapes = expected(stack, config) | joining(layout, embedding.shape[1])
    wanted = names(stack) - {stack.embedding}
    stored = dict[str, ParameterSource]()
    mismatched = list[tuple[str, list[int], list[int]]]()
    method = method_of(config)
    for name in wanted:
        location = source_of(name, named, files, method)
        if location is None:
            continue
        stored[name] = location
        shape = location.shape(files)
        if shape != shapes.get(name, shape):
            mismatched.append((name, shape, shapes[name]))
    refuse_incomplete(wanted - stored.keys(), mismatched)
    return DrafterParameters(config, embedding.dtype, {stack.embedding: embedding}, stored, files)


def runs_mtp(model: Model) -> bool:
    """Whether a head can run beside `model`, without memory that its pages were given."""
    return model.streamed is None


def load_mtp(
    path: Path, model: Model, *, normed: bool = True, weights: str | None = None
) -> Drafter:
    """Load the MTP head in the folder of `model`, or its `.gguf` file.

    - `normed`: whether the head reads the model's hidden states after the last norm, and its own
      output stands in for them after its norm. Otherwise both are taken before these norms. vLLM,
      SGLang and transformers take them after the norms for all families. For Qwen3.5 that accepts
      half as many tokens again (llama.cpp's pull request 24025, LightLLM's 1402).
    - `weights`: as of `NativePasses`, where the native kernels run the model.

    Raises `InvalidInput` where there is none of a known layout, and for an incomplete head.
    """
    config = model.config
    kernels = model.pool.kernels if isinstance(model.pool, PagePool) else None
    with named_errors(path):
        if path.suffix == ".gguf":
            parameters, stack = _of_file(path, model, kernels)
        else:
            parameters, stack = _of_folder(path, model)
        passes: NativePasses | TorchPasses
        if kernels is None:
            layers = LayerStack(parameters, stack, model.device, model.dtype)
            passes = TorchPasses(layers, model.embedding, model.head, model)
        else:
            pool = PagePool(kv_shapes(stack), kernels, None, model.dtype)
            passes = NativePasses(parameters, stack, pool, model.head, weights)
    return EagleDrafter(
        passes,
        model,
        [config.num_hidden_layers + normed],
        norm_output=normed,
        norm_feature=True,
        head_size=config.hidden_size,
        routes=False,
    )


def _of_folder(folder: Path, model: Model) -> tuple[Parameters, Stack]:
    config = model.config
    files = TensorFiles(folder)
    stack, first = mtp_stack(config, model.dtype)
    (head,) = {weight.name for weight in stack.head.weights}
    named = {name: name for name in files.names}
    named |= tensor_names(files.names, config.model_type, stack.embedding, head, True)
    named = {name: stored for name, stored in named.items() if is_mtp(name, config)}
    if (layout := mtp_layout(named, config.num_hidden_layers)) is None:
        raise InvalidInput(NO_KNOWN_HEAD)
    embedding = model.embedding.weight
    assert isinstance(embedding, torch.Tensor)
    stack = joined(stack, layout, embedding.shape[1])
    return mtp_parameters(files, named, layout, stack, first, embedding.detach()), stack


def _of_file(path: Path, model: Model, kernels: Kernels | None) -> tuple[Parameters, Stack]:
    """Return what `_of_folder` returns, from a `.gguf` file. With `kernels` blocks stay blocks."""
    file = GgufFile(path)
    layout = QWEN
    name, _ = architecture_of(file)
    stored_name = mtp_names(name, model.config.num_hidden_layers, file.tensors, layout)
    if stored_name(f"{layout.fc}.weight") is None:
        raise InvalidInput(NO_KNOWN_HEAD)
    stack, config = mtp_stack(model.config, model.dtype)
    width = int(config.hidden_size)
    stack = joined(stack, layout, width)
    joins = joining(layout, width)
    params = GgufParameters(file, name, config, stack, model.dtype, kernels, stored_name, joins)
    return params, stack
