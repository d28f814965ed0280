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
from quickbeam.models.opening import LoadedModel, make_model
from quickbeam.params import SamplingParams

CACHES = ("cache", "past_key_values")  # the argument's name since transformers 5.24, and before
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

    `method`, `budget`, `drafter` and `vocab` are those of `LLM`. They may be given in the call of
    `model.generate` or in `generator`. `tokenizer` can only be given in `generator`. It is compared
    with that of a drafter that is a smaller model; None loads it from where the model came from.

    The engine is made from the model's own weights at the first call, and kept with the model. The
    model itself is not changed. The engine shares the model's weights, except for matrix products
    on packed weights, which are copies. If the weights change or move, the engine is made anew.

    Above temperature 0, the seed of each row is drawn from torch's generator on the CPU. So
    `torch.manual_seed` makes the call repeatable, with the same tokens by every method.

    Returns ids `[rows, prompt + answer]`, or with `return_dict_in_generate` an output that holds
    them as `sequences`. Raises `InvalidInput` for what can't be done exactly.
    """
    streamer, config = streamer or _of_the_call("streamer"), generation_config
    _refuse_call(model, config, model_kwargs)
    prompts = _prompts(input_ids, model_kwargs)
    params = params_of(logits_processor, stopping_criteria, config, input_ids.shape[1], prompts)
    llm = engine_of(model, drafter, tokenizer)
    # as in transformers, an end that is not in the vocabulary is one that never comes
    ends = [token for token in params.stop_token_ids if token < llm.model.vocab_size]
    begin = partial(llm.stream, method=method, budget=budget, vocab=vocab)
    streams = list[Stream]()
    try:
        for ids in prompts:
            seed = None if params.greedy else int(torch.randint(2**62, ()))
            streams.append(begin(ids, replace(params, stop_token_ids=ends, seed=seed)))
        pad = config._pad_token_tensor
        sequences = _columns(streams, input_ids, stopping_criteria, pad, streamer)
    finally:
        for stream in streams:
            stream.close()
    if streamer is not None:
        streamer.end()
    asked = config.return_dict_in_generate
    return GenerateDecoderOnlyOutput(sequences=sequences) if asked else sequences


def generator(
    *,
    method: str = "auto",
    budget: Budget | None = None,
    drafter: str | None = None,
    vocab: str | None = None,
    tokenizer: Any = None,
) -> Callable[..., Any]:
    """Return `generate` with these settings, for `custom_generate`. They are explained there."""
    return partial(generate, **locals())


def _of_the_call(name: str) -> Any:
    """Return an argument of the running `model.generate` from its stack frame.

    transformers (5.17 to 5.23) passes these to its own loops, but not to a callable.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, sys._getframe(1)
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
    mode = config.get_generation_mode(_of_the_call("assistant_model"))
    extras = [name for name in EXTRAS if getattr(config, name)]
    unread = [name for name, value in kwargs.items() if value is not None and name not in HARMLESS]
    cached = [one for one in CACHES if getattr(kwargs.get(one), "_is_user_defined", False)]
    _refuse(
        (mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE), f"{mode.value}: "
            "quickbeam decodes greedily or samples; leave out what asks for it (num_beams, "
            "assistant_model, …)"),
        (_of_the_call("synced_gpus"),
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
    """Return the rows' token ids without the padding on their left, which alone may be masked."""
    whole = ids.dim() == 2 and ids.shape[1] > 0
    _refuse((not whole, f"input_ids of shape {list(ids.shape)}: give token ids, not embeddings"))
    mask, given = kwargs.get("attention_mask"), kwargs.get("position_ids")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.device).long()
    holes = mask.shape != ids.shape or (mask.diff(dim=1) < 0).any() or not mask[:, -1].all()
    _refuse((holes, "attention_mask: must be zeros (padding), then ones, in each row; make the "
        "tokenizer with padding_side='left'"))  # fmt: skip
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if given is not None and not ((given.to(mask.device) == positions) | (mask == 0)).all():
        raise InvalidInput(
            "position_ids: quickbeam counts positions from the first token of a prompt; leave them "
            "out"
        )
    return [row[on.bool()].tolist() for row, on in zip(ids, mask, strict=True)]


def _columns(
    streams: Sequence[Stream],
    ids: torch.Tensor,
    criteria: StoppingCriteriaList,
    pad: torch.Tensor | None,
    streamer: Any,
) -> torch.Tensor:
    """Return all rows, decoded token by token: ids `[rows, prompt + answer]`.

    As in `_sample` of transformers, criteria and streamer are called after each token; where an
    end-of-sequence token may end rows, finished ones get padding. Raises what ended a stream, or
    `QuickbeamError` if the engine was closed.
    """
    ends = any(hasattr(one, "eos_token_id") for one in criteria)
    going, column = torch.ones(len(streams), dtype=torch.bool, device=ids.device), 0
    filler = 0 if pad is None else int(pad)
    while bool(going.any()):
        tokens = torch.full((len(streams),), filler, dtype=ids.dtype)
        needed = [row for row, on in enumerate(going.tolist()) if on or not ends]
        for row in needed:
            streams[row].wait(column + 1)
            if len(streams[row].token_ids) <= column:
                raise QuickbeamError("the answer was interrupted: the engine was closed")
            tokens[row] = streams[row].token_ids[column]
        ids = torch.cat([ids, tokens.to(ids.device)[:, None]], dim=1)
        going &= ~criteria(ids, None)
        if streamer is not None:
            streamer.put(tokens)
        for row in needed:
            if ends and not going[row]:
                streams[row].close()
        column += 1
    return ids


# the state of a model that an engine was made from, and the engine
_engines = WeakKeyDictionary[PreTrainedModel, tuple[Hashable, LLM]]()
_making = threading.Lock()


def engine_of(model: PreTrainedModel, drafter: str | None, tokenizer: Any) -> LLM:
    """Return the engine of a model, made anew where the drafter or the weights are others."""
    weights = [*model.parameters(), *model.buffers()]
    places = sorted({str(weight.device) for weight in weights})
    _refuse((len(places) > 1 or "meta" in places, f"the model lies on {', '.join(places)}: "
        "quickbeam needs all of it on one device"))  # fmt: skip
    # An in-place change raises a tensor's version, unless it is made through `.data`.
    versions = [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights]
    hooks = [
        (type(one), *one._forward_hooks, *one._forward_pre_hooks, "forward" in vars(one))
        for one in model.modules()
    ]
    state = drafter, *versions, *hooks
    with _making:
        if model not in _engines or _engines[model][0] != state:
            _engines.pop(model, None)  # frees its copies before new ones are made
            if not drafter:
                tokenizer = NullTokenizer()
            elif tokenizer is None:
                tokenizer = _tokenizer_of(model)
            prepare_kernels(model.device, model.dtype)
            twin = make_model(copy.deepcopy(model, {id(weight): weight for weight in weights}))
            opened = LoadedModel(twin, tokenizer, set(), {})  # the call names the ids that end it
            name = model.name_or_path or type(model).__name__

            def load(target: Model, target_tokenizer: Any) -> Drafter:
                assert drafter is not None
                return load_drafter(drafter, target, target_tokenizer, model=name, weights=BFLOAT16)

            _engines[model] = (
                state,
                LLM.of_loaded(
                    opened,
                    name,
                    LLMOptions(memory_of_answers=0),
                    load_drafter=load if drafter else None,
                ),
            )
        return _engines[model][1]


def _tokenizer_of(model: PreTrainedModel) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        how = "give quickbeam.hf.generator(drafter=…, tokenizer=…)"
        raise InvalidInput(f"no tokenizer in {model.name_or_path!r}: {how}") from error


# The logits processors that parameters stand for: the place of each in the order in which
# `SamplingParams` are applied, the parameter, and the processor's attribute that has its value.
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
    eos = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    ends = {int(end) for ids in eos for end in ids.tolist() if end >= 0}  # -1: never
    padding = [width - len(prompt) for prompt in prompts]
    options, biases, rank = dict[str, Any](), dict[int, float](), 0
    for processor in processors:
        kind = f"logits processor {type(processor).__name__}"
        known = ", ".join(one.__name__ for one in PARAMETERS)
        _refuse((type(processor) not in PARAMETERS, f"{kind}: not supported; known: {known}"))
        place, name, attribute = PARAMETERS[type(processor)]
        value: Any = getattr(processor, attribute, None)
        _refuse(
            (place < rank, f"{kind}: quickbeam applies it before those that stand in front of it; "
                "put it first"),
            (name in options, f"{kind}: it is there twice; leave one out"),
        )  # fmt: skip
        rank = place
        skipped = getattr(processor, "prompt_length_to_skip", width)
        _refuse((skipped != width, f"{kind}: prompt_length_to_skip must be {width}, the prompt's"))
        _check(processor, kind, name, padding, ends)
        if name != "logit_bias":
            options |= {name: value} if name else {}
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
    options |= {"min_tokens": min(least, longest), "stop_token_ids": sorted(ends)}
    return SamplingParams(max_tokens=longest, logit_bias=biases, ignore_eos=True, **options)


def _check(processor: Any, kind: str, name: str, padding: list[int], ends: set[int]) -> None:
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
        (ending and set(processor.eos_token_id.tolist()) != ends, f"{kind}: its eos_token_id is "
            f"not the one that ends the answer ({sorted(ends)}); give both the same"),
    )  # fmt: skip
