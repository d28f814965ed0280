"""MTP heads as drafters: one more decoder layer of a model, from the model's own checkpoint.

As in an EAGLE drafter, row j holds the hidden state after token j and the embedding of token j + 1,
and predicts token j + 2 through the model's head. What comes out stands in for the next hidden
state. So one head drafts as deep as asked; further heads are left alone: each is for one depth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quickbeam.drafters.base import Drafter
from quickbeam.drafters.eagle import EagleDrafter
from quickbeam.drafters.eagle_passes import EagleOutput
from quickbeam.drafters.folder import named_errors
from quickbeam.drafters.native import CompiledDrafter, DrafterParameters, NativePacker
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.errors import InvalidInput, refuse_incomplete
from quickbeam.hub.mtp import MTP, QWEN, MtpLayout, is_mtp, mtp_layout
from quickbeam.models.base import Batch, Model
from quickbeam.models.compile.compiled_stack import NativeLinear, kv_shapes
from quickbeam.models.compile.native_model import NativeModel, list_rows
from quickbeam.models.families import FAMILIES
from quickbeam.models.families.reading import Config
from quickbeam.models.native import library
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16, FLOAT32, INT8, BlockRows
from quickbeam.models.stack import Linear, Norm, ParameterRows, Stack
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

NO_HEAD = (
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
    one = ModelConfig(fields | {k: v for k, v in FIRST_LAYER.items() if k in fields})
    # its family knows all that the configuration sets: the model is described by it
    return FAMILIES[config.model_type](Config(one, dtype)), one


def norm_of(stack: Stack, module: str) -> Norm:
    """Return a norm of the model's kind whose weight is a module's."""
    return replace(stack.norm, weights=(f"{module}.weight",))


def joined(stack: Stack, layout: MtpLayout) -> Stack:
    """Return the stack with its own last norm.

    What joins its input has the place of the head, which is the model's.
    """
    fc = Linear((ParameterRows(f"{layout.fc}.weight"),))
    return replace(stack, norm=norm_of(stack, layout.norm), head=fc)


def joining(layout: MtpLayout, width: int) -> dict[str, list[int]]:
    """Return the shapes of what joins a head's input."""
    norms = {f"{one}.weight": [width] for one in (layout.token_norm, layout.hidden_norm)}
    return norms | {f"{layout.fc}.weight": [width, 2 * width]}


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
    layer, width, stored = f"{layout.layer}.", embedding.shape[1], dict[str, ParameterSource]()
    named = named | {
        f"{stack.inside}.0.{name.removeprefix(layer)}": one
        for name, one in named.items()
        if name.startswith(layer)
    }
    beside, method = joining(layout, width), method_of(config)
    shapes = expected(stack, config) | beside
    wanted = names(stack) - {stack.embedding} | beside.keys()
    for name in wanted:
        if (one := source_of(name, named, files, method)) is not None:
            stored[name] = one
    known = [(name, one.shape(files), shapes.get(name)) for name, one in stored.items()]
    mismatched = [one for one in known if one[2] not in (None, one[1])]
    refuse_incomplete(wanted - stored.keys(), mismatched)
    return DrafterParameters(config, embedding.dtype, {stack.embedding: embedding}, stored, files)


class CompiledMtp(CompiledDrafter):
    """A head's layer, which reads `states` `[rows, d]` and the tokens after them.

    Each behind its norm, they stand side by side as `layout` has them, and are joined by `fc`.
    """

    def __init__(
        self, parameters: Parameters, stack: Stack, layout: MtpLayout, pages: PagePool, name: str
    ) -> None:
        self._layout = layout
        super().__init__(parameters, stack, pages, name)

    def _embed(self, program: Program, target: Buffer) -> None:
        width, wide = target.width, self._float32
        states, token = program.external("states", width, wide), program.buffer(width, True)
        both = program.buffer(2 * width, wide)
        super()._embed(program, token)
        layout, norm = self._layout, self._compiler.norm
        first = layout.hidden_first
        norm(norm_of(self.stack, layout.token_norm), token, both, column=width if first else 0)
        norm(norm_of(self.stack, layout.hidden_norm), states, both, column=0 if first else width)
        program.linear(self._head, both, target)


class MtpPasses:
    """The passes of an MTP head in the native kernels, with the pages of its keys and values.

    `normed`: whether it reads what the model's head reads, and its own row stands in for that
    behind its norm; else both are taken before their norms. vLLM, SGLang and transformers take them
    behind for all families; for Qwen3.5 that accepts half as many tokens again (llama.cpp's pull
    request 24025, LightLLM's 1402). `weights`: the format of its weights; None: 8 bits, as a wrong
    draft costs only its time, and float32 beside a model in float32.
    """

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        layout: MtpLayout,
        model: Model,
        normed: bool,
        weights: str | None,
    ) -> None:
        kernels, head = library.kernels(), model.head
        assert kernels is not None and isinstance(head, NativeLinear)
        self.pool = PagePool(kv_shapes(stack), kernels, None, model.dtype)
        if model.dtype is torch.float32:
            weights = FLOAT32
        if weights is None:
            beside = joining(layout, model.config.hidden_size).keys()
            own = map(parameters, names(stack) - {stack.embedding} | beside)
            finite = all(isinstance(one, BlockRows) or one.isfinite().all() for one in own)
            weights = INT8 if finite else BFLOAT16
        self._compiled = CompiledMtp(parameters, stack, layout, self.pool, weights)
        self._compiled.set_aux_layers([2] if normed else [1, 2])
        self._width = int(model.config.hidden_size)
        self.logits = NativePacker(kernels, weights).head(head)

    def run(self, batch: Batch, hidden: torch.Tensor, shortlist: Shortlist | None) -> EagleOutput:
        listed = list_rows(batch)
        self._compiled.states = hidden.contiguous()
        self._compiled(listed)
        hidden, d = self._compiled.hidden, self._width
        return EagleOutput(hidden[:, :d], hidden[:, -d:])


def runs_mtp(model: Model) -> bool:
    """Whether a head can run beside `model`, without memory that its pages were given."""
    return isinstance(model, NativeModel) and model.streamed is None


def load_mtp(
    place: Path, model: Model, *, normed: bool = True, weights: str | None = None
) -> Drafter:
    """Load the MTP head in the folder of `model`, or its `.gguf` file.

    `normed`, `weights`: as of `MtpPasses`. Raises `InvalidInput` where there is none of a known
    layout, where the native kernels don't run the model, and for a head that is not whole.
    """
    config, layers = model.config, model.config.num_hidden_layers
    if not isinstance(model, NativeModel):
        raise InvalidInput(
            f"--drafter {MTP} needs the native kernels, and this model runs on "
            f"{model.describe()}; name another drafter"
        )
    with named_errors(place):
        read = _of_file if place.suffix == ".gguf" else _of_folder
        parameters, stack, layout = read(place, model)
    passes = MtpPasses(parameters, stack, layout, model, normed, weights)
    return EagleDrafter(passes, model, [layers + normed], config.hidden_size, routes=False)


def _of_folder(folder: Path, model: Model) -> tuple[Parameters, Stack, MtpLayout]:
    config, files = model.config, TensorFiles(folder)
    stack, one = mtp_stack(config, model.dtype)
    (head,) = {one.name for one in stack.head.weights}
    named = {name: name for name in files.names}
    named |= tensor_names(files.names, config.model_type, stack.embedding, head, True)
    named = {name: one for name, one in named.items() if is_mtp(name, config)}
    if (layout := mtp_layout(named, config.num_hidden_layers)) is None:
        raise InvalidInput(NO_HEAD)
    stack, embedding = joined(stack, layout), model.embedding.weight
    assert isinstance(embedding, torch.Tensor)
    return mtp_parameters(files, named, layout, stack, one, embedding.detach()), stack, layout


def _of_file(path: Path, model: Model) -> tuple[Parameters, Stack, MtpLayout]:
    """Return the same of a `.gguf` file, whose blocks stay as they are."""
    file, layout, kernels = GgufFile(path), QWEN, library.kernels()
    assert kernels is not None
    (name, _), block = architecture_of(file), model.config.num_hidden_layers
    stored_name = mtp_names(name, block, file.tensors, layout)
    if stored_name(f"{layout.fc}.weight") is None:
        raise InvalidInput(NO_HEAD)
    stack, config = mtp_stack(model.config, model.dtype)
    stack, beside = joined(stack, layout), joining(layout, int(config.hidden_size))
    params = GgufParameters(file, name, config, stack, model.dtype, kernels, stored_name, beside)
    return params, stack, layout
