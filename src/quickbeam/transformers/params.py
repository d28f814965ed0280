"""Map the settings of a call of transformers' `generate` to `SamplingParams`.

A setting without a counterpart is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import EosTokenCriteria
from transformers.generation import logits_process as processing

from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams


class Reader(NamedTuple):
    """How a logits processor becomes parameters.

    `rank` is its place in the order in which `SamplingParams` are applied.
    """

    rank: int
    read: Callable[[Any], dict[str, Any]]


def _biases(processor: Any) -> dict[str, Any]:
    if longer := [sequence for sequence in processor.sequence_bias if len(sequence) > 1]:
        raise InvalidInput(
            f"{type(processor).__name__} of the sequence {list(longer[0])}: "
            "quickbeam takes single tokens alone"
        )
    return {
        "logit_bias": {
            sequence[0]: float(bias) for sequence, bias in processor.sequence_bias.items()
        }
    }


READERS = {
    processing.SequenceBiasLogitsProcessor: Reader(0, _biases),
    processing.RepetitionPenaltyLogitsProcessor: Reader(
        1, lambda one: {"repetition_penalty": one.penalty}
    ),
    processing.NoBadWordsLogitsProcessor: Reader(2, _biases),
    processing.SuppressTokensLogitsProcessor: Reader(
        2, lambda one: {"logit_bias": dict.fromkeys(one.suppress_tokens.tolist(), -torch.inf)}
    ),
    processing.MinLengthLogitsProcessor: Reader(2, lambda one: {"min_length": one.min_length}),
    processing.MinNewTokensLengthLogitsProcessor: Reader(
        2, lambda one: {"min_tokens": one.min_new_tokens}
    ),
    processing.TemperatureLogitsWarper: Reader(3, lambda one: {"temperature": one.temperature}),
    processing.TopKLogitsWarper: Reader(4, lambda one: {"top_k": one.top_k}),
    processing.TopPLogitsWarper: Reader(5, lambda one: {"top_p": one.top_p}),
    processing.MinPLogitsWarper: Reader(6, lambda one: {"min_p": one.min_p}),
    processing.LogitNormalization: Reader(7, lambda one: {}),
}


def params_of(
    processors: Sequence[Any],
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    width: int,
    prompts: Sequence[Sequence[int]],
) -> SamplingParams:
    """Return the parameters of all rows.

    `width` is the length of the rows with padding, in tokens. Raises `InvalidInput` for a processor
    without a counterpart, and names its class.
    """
    ends = {
        int(end)
        for one in criteria
        if type(one) is EosTokenCriteria
        for end in one.eos_token_id.tolist()
    }
    padding = [width - len(prompt) for prompt in prompts]
    options, biases, rank = dict[str, Any](), dict[int, float](), 0
    for processor in processors:
        name, reader = type(processor).__name__, READERS.get(type(processor))
        if reader is None:
            known = ", ".join(kind.__name__ for kind in READERS)
            raise InvalidInput(f"logits processor {name}: not supported; known: {known}")
        if reader.rank < rank:
            raise InvalidInput(
                f"logits processor {name}: quickbeam applies it before those that "
                "stand in front of it; put it first"
            )
        rank, own = reader.rank, reader.read(processor)
        _check(processor, own, padding, ends)
        if own.keys() & options.keys() - {"min_tokens"}:
            raise InvalidInput(f"logits processor {name}: it is there twice; leave one out")
        for token, bias in own.pop("logit_bias", {}).items():
            biases[token] = biases.get(token, 0.0) + bias
        least = own.get("min_tokens", 0), own.pop("min_length", 0) - width
        own["min_tokens"] = max(options.get("min_tokens", 0), *least)
        options.update(own)
    options.setdefault("temperature", 1.0)
    if not config.do_sample:  # greedy: these don't change which token is the most probable
        options.update(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    longest = (criteria.max_length or config.max_length) - width
    options["min_tokens"] = min(options.get("min_tokens", 0), longest)
    fixed: dict[str, Any] = {"stop_token_ids": sorted(ends), "ignore_eos": True}
    return SamplingParams(max_tokens=longest, logit_bias=biases, **fixed, **options)


def _check(processor: Any, own: dict[str, Any], padding: list[int], ends: set[int]) -> None:
    """Raise `InvalidInput` for a setting of a processor that its parameters `own` can't have."""
    name = type(processor).__name__
    if (
        getattr(processor, "min_tokens_to_keep", 1) > 1
        or getattr(processor, "filter_value", -torch.inf) != -torch.inf
    ):
        raise InvalidInput(
            f"{name}: min_tokens_to_keep and filter_value can't be chosen; leave them out"
        )
    if "repetition_penalty" in own and not _ignores(processor.prompt_ignore_length, padding):
        more = ", or give rows of one length, as this version of transformers counts padding"
        raise InvalidInput(
            f"{name}: quickbeam counts all of a prompt, and no padding; leave "
            f"prompt_ignore_length out{more if any(padding) else ''}"
        )
    if own.keys() & {"min_length", "min_tokens"} and set(processor.eos_token_id.tolist()) != ends:
        raise InvalidInput(
            f"{name}: its eos_token_id is not the one that ends the answer "
            f"({sorted(ends)}); give both the same"
        )


def _ignores(length: Any, padding: Sequence[int]) -> bool:
    """Whether the first tokens that are ignored in each row are exactly the row's padding."""
    lengths = length.tolist() if isinstance(length, torch.Tensor) else [length or 0] * len(padding)
    return bool(lengths == list(padding))
