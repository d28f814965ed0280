"""What a checkpoint says of answers: where they end, and how they are sampled by default."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams

logger = logging.getLogger(__name__)

# parameters that a generation config may give defaults of
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def eos_ids(*owners: Any) -> set[int]:
    """Return every id that ends an answer, from generation config, config and tokenizer.

    Each owner is an object or a mapping, or None.
    """
    found: set[int] = set()
    for owner in owners:
        ids = (
            owner.get("eos_token_id")
            if isinstance(owner, Mapping)
            else getattr(owner, "eos_token_id", None)
        )
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return found


def model_eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the same of a model of transformers."""
    return eos_ids(
        getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer
    )


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that a generation config names."""
    found = {name: generation[name] for name in SAMPLED if generation.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidInput as error:
        logger.warning("the model's generation config can't be used: %s", error)
        return {}
    return found
