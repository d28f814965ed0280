"""The decoding loop.

transformers prepares a call as it always does. This loop takes over where the first token would be
computed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from quickbeam.engine.stream import Stream
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.models.loading import refuse_unfit
from quickbeam.transformers.engines import Options, engine_of
from quickbeam.transformers.params import params_of

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
    synced_gpus: bool = False,
    method: str = "auto",
    budget: int | None = None,
    drafter: str | None = None,
    vocab: str | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Return what `model.generate` returns, computed by speculative decoding.

    Don't call this by hand: `generate` of transformers calls it as `custom_generate`.

    `method`, `budget`, `drafter` and `vocab` are those of `LLM`. They may be given
    in the call of `model.generate` or in `generator`. `tokenizer` can only be given in `generator`.
    It is compared with the tokenizer of a drafter that is a smaller model; None loads it from where
    the model came from.

    The engine is made from the model's own weights at the first call, and kept with the model. The
    model itself is not changed. The engine shares the model's weights, except for matrix products
    on packed weights, which are copies. If the weights change or move to another device,
    the engine is made anew.

    Above temperature 0, the seed of each row is drawn from torch's generator on the CPU. So
    `torch.manual_seed` makes the call repeatable, with the same tokens by every method.

    Returns ids `[rows, prompt + answer]`, or with `return_dict_in_generate` an output that holds
    them as `sequences`. Raises `InvalidInput` for what can't be done exactly.
    """
    streamer = streamer or _of_the_call("streamer")
    _refuse(
        model,
        generation_config,
        synced_gpus or _of_the_call("synced_gpus"),
        _of_the_call("assistant_model"),
        model_kwargs,
    )
    prompts = _prompts(input_ids, model_kwargs)
    wanted = params_of(
        logits_processor, stopping_criteria, generation_config, input_ids.shape[1], prompts
    )
    llm = engine_of(model, Options(drafter), tokenizer)
    seeds = (
        [None] * len(prompts) if wanted.greedy else torch.randint(2**62, (len(prompts),)).tolist()
    )
    # as in transformers, an end that is not in the vocabulary is one that never comes
    ends = [token for token in wanted.stop_token_ids if token < llm.model.vocab_size]
    wanted = replace(wanted, stop_token_ids=ends)
    streams = list[Stream]()
    try:
        for ids, seed in zip(prompts, seeds, strict=True):
            streams.append(
                llm.stream(
                    ids, replace(wanted, seed=seed), method=method, budget=budget, vocab=vocab
                )
            )
        sequences = _columns(
            streams,
            input_ids,
            stopping_criteria,
            generation_config._pad_token_tensor,
            streamer,
        )
    finally:
        for stream in streams:
            stream.close()
    if streamer is not None:
        streamer.end()
    return (
        GenerateDecoderOnlyOutput(sequences=sequences)
        if generation_config.return_dict_in_generate
        else sequences
    )


def generator(
    *,
    method: str = "auto",
    budget: int | None = None,
    drafter: str | None = None,
    vocab: str | None = None,
    tokenizer: Any = None,
) -> Callable[..., Any]:
    """Return `generate` with these settings, for `custom_generate`. They are explained there."""
    return partial(
        generate,
        method=method,
        budget=budget,
        drafter=drafter,
        vocab=vocab,
        tokenizer=tokenizer,
    )


def _of_the_call(name: str) -> Any:
    """Return an argument of the running `model.generate`; None if there is none.

    It is found in the call's stack frame. transformers (5.17 to 5.23) passes these arguments to its
    own loops, but not to a callable; a streamer would get the prompt and nothing else.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, sys._getframe(1)
    while frame.f_code is not code:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get(name)


def _refuse(
    model: PreTrainedModel,
    config: GenerationConfig,
    synced: bool,
    assistant: Any,
    kwargs: dict[str, Any],
) -> None:
    """Raise `InvalidInput` if the call asks for something that this loop can't do."""
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidInput(
            f"{mode.value}: quickbeam decodes greedily or samples; leave out what asks for it "
            "(num_beams, assistant_model, …)"
        )
    if synced:
        raise InvalidInput("synced_gpus: quickbeam runs a model that is whole on one device")
    if config.cache_implementation == "quantized":
        raise InvalidInput(
            "cache_implementation='quantized': quickbeam keeps keys and values as "
            "the model computes them; leave it out"
        )
    if config.return_dict_in_generate and (
        asked := [name for name in EXTRAS if getattr(config, name)]
    ):
        raise InvalidInput(
            f"{asked[0]}=True: quickbeam gives sequences alone; leave it out, or "
            "use model.generate without custom_generate"
        )
    if model.training:
        raise InvalidInput(
            "the model is in training mode, where dropout changes its answers: call "
            "model.eval() first"
        )
    if any(hasattr(module, "get_base_layer") for module in model.modules()):
        raise InvalidInput(
            "the model has adapters that are not merged: call merge_and_unload() of "
            "the peft model first"
        )
    refuse_unfit(type(model), model.config)
    for name, value in kwargs.items():
        if value is not None and name not in HARMLESS:
            raise InvalidInput(
                f"{name}: quickbeam gives the model token ids and nothing else; leave it out"
            )


def _prompts(input_ids: torch.Tensor, kwargs: dict[str, Any]) -> list[list[int]]:
    """Return the rows' token ids without the padding on their left.

    Raises `InvalidInput` for other masks, for other positions, and for a KV cache of the caller's.
    """
    if input_ids.dim() != 2 or not input_ids.shape[1]:
        raise InvalidInput(
            f"input_ids of shape {list(input_ids.shape)}: give token ids, not embeddings"
        )
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if (
        mask.shape != input_ids.shape
        or bool((mask.diff(dim=1) < 0).any())
        or not bool(mask[:, -1].all())
    ):
        raise InvalidInput(
            "attention_mask: must be zeros (padding), then ones, in each row; make "
            "the tokenizer with padding_side='left'"
        )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = kwargs.get("position_ids")
    if given is not None and not bool(
        ((given.to(positions.device) == positions) | (mask == 0)).all()
    ):
        raise InvalidInput(
            "position_ids: quickbeam counts positions from the first token of a "
            "prompt; leave them out"
        )
    for name in CACHES:
        cache = kwargs.get(name)
        if cache is not None and getattr(cache, "_is_user_defined", False):
            raise InvalidInput(
                f"{name}: quickbeam keeps its own keys and values, those of "
                "earlier prompts too; leave it out"
            )
    return [row[on.bool()].tolist() for row, on in zip(input_ids, mask, strict=True)]


def _columns(
    streams: Sequence[Stream],
    ids: torch.Tensor,
    criteria: StoppingCriteriaList,
    pad: torch.Tensor | None,
    streamer: Any,
) -> torch.Tensor:
    """Return all rows, decoded token by token: ids `[rows, prompt + answer]`.

    As in `_sample` of transformers, the stopping criteria and the streamer are called after each
    token. If an end-of-sequence token may end rows, finished rows get padding. Otherwise they go on
    until all rows are finished.
    """
    ends = any(hasattr(one, "eos_token_id") for one in criteria)
    going, column = torch.ones(len(streams), dtype=torch.bool, device=ids.device), 0
    while bool(going.any()):
        needed = [i for i, on in enumerate(going.tolist()) if on or not ends]
        _wait([streams[i] for i in needed], column)
        tokens = (
            torch.zeros(len(streams), dtype=ids.dtype)
            if pad is None
            else pad.to("cpu", ids.dtype).expand(len(streams)).clone()
        )
        for i in needed:
            tokens[i] = streams[i].token_ids[column]
        ids = torch.cat([ids, tokens.to(ids.device)[:, None]], dim=1)
        going &= ~criteria(ids, None)
        if streamer is not None:
            streamer.put(tokens)
        if ends:
            for i in needed:
                if not going[i]:
                    streams[i].close()
        column += 1
    return ids


def _wait(streams: Sequence[Stream], column: int) -> None:
    """Wait until each stream has a token in this column.

    Raises the error that ended a stream, or `QuickbeamError` if the engine was closed.
    """
    for stream in streams:
        stream.wait(column + 1)
        if len(stream.token_ids) <= column:
            raise QuickbeamError("the answer was interrupted: the engine was closed")
