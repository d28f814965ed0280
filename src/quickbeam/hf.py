"""Speculative decoding in transformers' `generate`.

Use it as `model.generate(…, custom_generate=quickbeam.hf.generate)`. transformers prepares a call
as it always does; `generate` here takes over where the first token would be computed. A setting
that has no counterpart here is refused by name, never ignored.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation import logits_process as processing

from quickbeam.config import BFLOAT16, Budget, LLMOptions
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.loading import load_drafter
from quickbeam.engine.output import NullTokenizer
from quickbeam.engine.stream import Stream
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.llm import LLM, prepare_kernels
from quickbeam.models.base import Model
from quickbeam.models.native import library
from quickbeam.models.opening import LoadedModel, make_model
from quickbeam.params import SamplingParams

# names of the argument with keys and values: since transformers 5.24, and before
CACHES = ("cache", "past_key_values")
# arguments of a forward pass that are accepted; `_prompts` checks the first ones
HARMLESS = {"attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep"}
EXTRAS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: Sequence[Any],
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    synced_gpus: bool = False,  # found in the call, by all versions
    drafter: str | None = None,
    tokenizer: Any = None,
    method: str = "auto",
    budget: Budget | None = None,
    vocab: str | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Return what `model.generate` returns, computed by speculative decoding.

    Don't call this by hand: `generate` of transformers calls it as `custom_generate`.

    `method`, `budget`, `drafter` and `vocab` are options of `LLM`. They can be passed to
    `model.generate` or to `generator`. `tokenizer` can be passed to `generator` alone. It is
    compared with the tokenizer of a drafter that is a smaller model. None loads the tokenizer from
    where the model came from.

    The engine is made at the first call, and is cached as long as the model exists. The model is
    not changed. The engine shares the model's weights, except for matrix products on packed
    weights, which are copies. If the weights change or move, the engine is made anew.

    Above temperature 0, the seed of each row is drawn from torch's generator on the CPU. So
    `torch.manual_seed` makes the call repeatable, with the same tokens by every method.

    Returns ids `[rows, prompt + answer]`, or with `return_dict_in_generate` an output with these
    `sequences`. Raises `InvalidInput` for what can't be done exactly.
    """
    config = generation_config
    if not streamer:
        streamer = _argument_of_call("streamer")
    _refuse_call(model, config, model_kwargs)
    prompts = _prompts(input_ids, model_kwargs)
    params = params_of(logits_processor, stopping_criteria, config, input_ids.shape[1], prompts)
    llm = engine_of(model, drafter, tokenizer)
    # as in transformers, an end-of-sequence id outside the vocabulary ends nothing
    eos_ids = [token for token in params.stop_token_ids if token < llm.model.vocab_size]
    streams = list[Stream]()
    try:
        for ids in prompts:
            seed = None if params.greedy else int(torch.randint(2**62, ()))
            params_of_row = replace(params, stop_token_ids=eos_ids, seed=seed)
            stream = llm.stream(ids, params_of_row, method=method, budget=budget, vocab=vocab)
            streams.append(stream)
        pad = config._pad_token_tensor
        sequences = _columns(streams, input_ids, stopping_criteria, pad, streamer)
    finally:
        for stream in streams:
            stream.close()
    if streamer is not None:
        streamer.end()
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def generator(
    *,
    method: str = "auto",
    budget: Budget | None = None,
    drafter: str | None = None,
    vocab: str | None = None,
    tokenizer: Any = None,
) -> Callable[..., Any]:
    """Return `generate` with these settings, for `custom_generate`. See `generate`."""
    return partial(
        generate,
        method=method,
        budget=budget,
        drafter=drafter,
        vocab=vocab,
        tokenizer=tokenizer,
    )


def _argument_of_call(name: str) -> Any:
    """Return an argument of the running `model.generate` from its stack frame.

    transformers (5.17 to 5.23) passes some arguments to its own loops, but not to a callable.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame.f_code is not code:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get(name)


def _refuse(*reasons: tuple[Any, str]) -> None:
    """Raise `InvalidInput` for the first reason that holds."""
    for holds, why in reasons:
        if holds:
            raise InvalidInput(why)


def _refuse_call(model: PreTrainedModel, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Raise `InvalidInput` for a call or a model that this loop can't do exactly."""
    mode = config.get_generation_mode(_argument_of_call("assistant_model"))
    extras = [name for name in EXTRAS if getattr(config, name)]
    unread = [name for name, value in kwargs.items() if value is not None and name not in HARMLESS]
    cached = [name for name in CACHES if getattr(kwargs.get(name), "_is_user_defined", False)]
    _refuse(
        (mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE), f"{mode.value}: "
            "quickbeam decodes greedily or samples; leave out what asks for it (num_beams, "
            "assistant_model, …)"),
        (_argument_of_call("synced_gpus"),
            "synced_gpus: quickbeam runs a model that is whole on one device"),
        (config.cache_implementation == "quantized", "cache_implementation='quantized': quickbeam "
            "keeps keys and values as the model computes them; leave it out"),
        (config.return_dict_in_generate and extras, f"{', '.join(extras)}: quickbeam gives "
            "sequences alone; leave it out, or use model.generate without custom_generate"),
        (model.training, "the model is in training mode, where dropout changes its answers: call "
            "model.eval() first"),
        (any(hasattr(module, "get_base_layer") for module in model.modules()), "the model has "
            "adapters that are not merged: call merge_and_unload() of the peft model first"),
        (unread, f"{', '.join(unread)}: quickbeam gives the model token ids and nothing else; "
            "leave it out"),
        (cached, f"{', '.join(cached)}: quickbeam keeps its own keys and values, those of earlier "
            "prompts too; leave it out"),
    )  # fmt: skip


def _prompts(ids: torch.Tensor, kwargs: dict[str, Any]) -> list[list[int]]:
    """Return the rows' token ids without the padding on their left.

    Raises `InvalidInput` if other tokens are masked.
    """
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise InvalidInput(f"input_ids of shape {list(ids.shape)}: give token ids, not embeddings")
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.device).long()
    if mask.shape != ids.shape or (mask.diff(dim=1) < 0).any() or not mask[:, -1].all():
        raise InvalidInput(
            "attention_mask: must be zeros (padding), then ones, in each row; make the tokenizer "
            "with padding_side='left'"
        )
    position_ids = kwargs.get("position_ids")
    if position_ids is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        is_expected = (position_ids.to(mask.device) == positions) | (mask == 0)
        if not is_expected.all():
            raise InvalidInput(
                "position_ids: quickbeam counts positions from the first token of a prompt; leave "
                "them out"
            )
    return [row[row_mask.bool()].tolist() for row, row_mask in zip(ids, mask, strict=True)]


def _columns(
    streams: Sequence[Stream],
    ids: torch.Tensor,
    criteria: StoppingCriteriaList,
    pad: torch.Tensor | None,
    streamer: Any,
) -> torch.Tensor:
    """Return all rows, decoded token by token: ids `[rows, prompt + answer]`.

    As in `_sample` of transformers, criteria and streamer are called after each token. Where an
    end-of-sequence token may end rows, finished rows get padding. Raises the error that ended a
    stream, or `QuickbeamError` if the engine was closed.
    """
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad_id = 0 if pad is None else int(pad)
    unfinished = torch.ones(len(streams), dtype=torch.bool, device=ids.device)
    column = 0
    while bool(unfinished.any()):
        tokens = torch.full((len(streams),), pad_id, dtype=ids.dtype)
        rows: Sequence[int] = range(len(streams))
        if has_eos:
            rows = unfinished.nonzero().flatten().tolist()
        for row in rows:
            streams[row].wait(column + 1)
            if len(streams[row].token_ids) <= column:
                raise QuickbeamError("the answer was interrupted: the engine was closed")
            tokens[row] = streams[row].token_ids[column]
        ids = torch.cat([ids, tokens.to(ids.device)[:, None]], dim=1)
        unfinished &= ~criteria(ids, None)
        if streamer is not None:
            streamer.put(tokens)
        for row in rows:
            if has_eos and not unfinished[row]:
                streams[row].close()
        column += 1
    return ids


# the state of a model that an engine was made from, and the engine
_engines = WeakKeyDictionary[PreTrainedModel, tuple[Hashable, LLM]]()
_making = threading.Lock()


def engine_of(model: PreTrainedModel, drafter: str | None, tokenizer: Any) -> LLM:
    """Return the engine of a model, made anew if the drafter or the weights have changed."""
    weights = [*model.parameters(), *model.buffers()]
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) > 1 or "meta" in devices:
        raise InvalidInput(
            f"the model lies on {', '.join(devices)}: quickbeam needs all of it on one device"
        )
    state = (drafter, *map(_weight_state, weights), *map(_module_state, model.modules()))
    with _making:
        if model not in _engines or _engines[model][0] != state:
            _engines.pop(model, None)  # frees its copies before new ones are made
            if not drafter:
                tokenizer = NullTokenizer()
            elif tokenizer is None:
                tokenizer = _tokenizer_of(model)
            prepare_kernels(model.device, model.dtype)
            shared_weights = {id(weight): weight for weight in weights}
            target = make_model(copy.deepcopy(model, shared_weights))
            # end-of-sequence ids come with each call
            loaded = LoadedModel(target, tokenizer, set(), {})
            name = model.name_or_path or type(model).__name__

            def load(target: Model, target_tokenizer: Any) -> Drafter:
                assert drafter is not None
                return load_drafter(
                    drafter,
                    target,
                    target_tokenizer,
                    model=name,
                    weights=BFLOAT16,
                    kernels=library.kernels(),
                )

            llm = LLM.of_loaded(
                loaded,
                name,
                LLMOptions(memory_of_answers=0),
                load_drafter=load if drafter else None,
            )
            _engines[model] = (state, llm)
        return _engines[model][1]


def _weight_state(weight: torch.Tensor) -> Hashable:
    # an in-place change raises a tensor's version, unless it is made through `.data`
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version


def _module_state(module: torch.nn.Module) -> Hashable:
    has_own_forward = "forward" in vars(module)
    return (type(module), *module._forward_hooks, *module._forward_pre_hooks, has_own_forward)


def _tokenizer_of(model: PreTrainedModel) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"no tokenizer in {model.name_or_path!r}: give quickbeam.hf.generator(drafter=…, "
            "tokenizer=…)"
        ) from error


# For each supported logits processor: its rank in the order in which `SamplingParams` are applied,
# the parameter, and the processor's attribute with the value.
PARAMETERS = {
    processing.SequenceBiasLogitsProcessor: (0, "logit_bias", "sequence_bias"),
    processing.RepetitionPenaltyLogitsProcessor: (1, "repetition_penalty", "penalty"),
    processing.NoBadWordsLogitsProcessor: (2, "logit_bias", "sequence_bias"),
    processing.SuppressTokensLogitsProcessor: (2, "logit_bias", "suppress_tokens"),
    processing.MinLengthLogitsProcessor: (2, "min_length", "min_length"),
    processing.MinNewTokensLengthLogitsProcessor: (2, "min_tokens", "min_new_tokens"),
    processing.TemperatureLogitsWarper: (3, "temperature", "temperature"),
    processing.TopKLogitsWarper: (4, "top_k", "top_k"),
    processing.TopPLogitsWarper: (5, "top_p", "top_p"),
    processing.MinPLogitsWarper: (6, "min_p", "min_p"),
    processing.LogitNormalization: (7, "", ""),
}


def params_of(
    processors: Sequence[Any],
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    width: int,
    prompts: Sequence[Sequence[int]],
) -> SamplingParams:
    """Return the parameters of all rows, which are `width` tokens long with padding.

    Raises `InvalidInput` for a processor without a counterpart, and names its class.
    """
    eos_ids = set[int]()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ids = criterion.eos_token_id.tolist()
            eos_ids.update(int(token) for token in ids if token >= 0)  # -1: never
    padding = [width - len(prompt) for prompt in prompts]
    options = dict[str, Any]()
    biases = dict[int, float]()
    last_rank = 0
    for processor in processors:
        kind = f"logits processor {type(processor).__name__}"
        if type(processor) not in PARAMETERS:
            supported = ", ".join(cls.__name__ for cls in PARAMETERS)
            raise InvalidInput(f"{kind}: not supported; known: {supported}")
        rank, name, attribute = PARAMETERS[type(processor)]
        value: Any = getattr(processor, attribute, None)
        _refuse(
            (rank < last_rank, f"{kind}: quickbeam applies it before those that stand in front of "
                "it; put it first"),
            (name in options, f"{kind}: it is there twice; leave one out"),
        )  # fmt: skip
        last_rank = rank
        skipped = getattr(processor, "prompt_length_to_skip", width)
        _refuse((skipped != width, f"{kind}: prompt_length_to_skip must be {width}, the prompt's"))
        _check(processor, kind, name, padding, eos_ids)
        if name != "logit_bias":
            if name:
                options[name] = value
            continue
        if not isinstance(value, dict):
            value = {(token,): -torch.inf for token in value.tolist()}
        longer = [list(sequence) for sequence in value if len(sequence) > 1]
        _refuse((longer, f"{kind} of the sequences {longer}: quickbeam takes single tokens alone"))
        for (token,), bias in value.items():
            biases[token] = biases.get(token, 0.0) + float(bias)
    options.setdefault("temperature", 1.0)
    if not config.do_sample:  # greedy: these don't change which token is the most probable
        options.update(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    longest = (criteria.max_length or config.max_length) - width
    least = max(options.pop("min_tokens", 0), options.pop("min_length", 0) - width)
    return SamplingParams(
        max_tokens=longest,
        min_tokens=min(least, longest),
        logit_bias=biases,
        stop_token_ids=sorted(eos_ids),
        ignore_eos=True,
        **options,
    )


def _check(processor: Any, kind: str, name: str, padding: list[int], eos_ids: set[int]) -> None:
    """Raise `InvalidInput` for a setting of a processor that its parameter `name` can't have."""
    least = getattr(processor, "min_tokens_to_keep", 1)
    filtered = least > 1 or getattr(processor, "filter_value", -torch.inf) != -torch.inf
    # the first tokens of each row that are ignored must be exactly the row's padding
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        ignored = torch.tensor([ignored or 0] * len(padding))
    counted = name == "repetition_penalty" and ignored.tolist() != padding
    more = ", or give rows of one length, as this version of transformers counts padding"
    ending = name in ("min_length", "min_tokens")
    _refuse(
        (filtered, f"{kind}: min_tokens_to_keep and filter_value can't be chosen; leave them out"),
        (counted, f"{kind}: quickbeam counts all of a prompt, and no padding; leave "
            f"prompt_ignore_length out{more if any(padding) else ''}"),
        (ending and set(processor.eos_token_id.tolist()) != eos_ids, f"{kind}: its eos_token_id is "
            f"not the one that ends the answer ({sorted(eos_ids)}); give both the same"),
    )  # fmt: skip
