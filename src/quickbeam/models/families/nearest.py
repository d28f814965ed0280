"""What a model is that no family describes, in the words of an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from quickbeam.models.families.reading import PAGE, NotDescribed

COMPARED = 6  # families of similar names, whose fields are compared
USUAL = "llama"  # compared as well
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how classes of causal language models are named


def undescribed(fields: Mapping[str, Any], described: Collection[str]) -> NotDescribed:
    """Return the error that refuses a model with these `fields` of config.json.

    `described`: the `model_type`s of all families.
    """
    kind = str(fields.get("model_type"))
    name = str(next(iter(fields.get("architectures") or ()), kind))
    every = _with_defaults(kind, fields)
    if every.get("is_encoder_decoder"):
        return NotDescribed(
            f"{name} is an encoder-decoder; quickbeam runs decoder-only causal language models"
        )
    if isinstance(every.get("text_config"), dict):
        parts = sorted(part for part, own in every.items() if _is_part(part, own))
        inner = every["text_config"].get("model_type")
        return NotDescribed(
            f"{name} reads more than text ({', '.join(parts)}): take a checkpoint of its language "
            f"model alone ({inner}), or another model for text"
        )
    if not name.endswith(CAUSAL) and _is_no_causal_model(kind):
        return NotDescribed(
            f"{name} doesn't continue a text from left to right: take a causal language model"
        )
    code = ", and Python code that comes with a model is not run" if "auto_map" in fields else ""
    return NotDescribed(
        f"no family describes {name} (model_type {kind!r}){code}; the nearest by name and fields "
        f"is {nearest(kind, every, described)!r}, and {PAGE} says how to describe one"
    )


def nearest(kind: str, fields: Collection[str], described: Collection[str]) -> str:
    """Return which family's `model_type` and names of fields are most alike."""
    from transformers import CONFIG_MAPPING

    compared = {USUAL, *get_close_matches(kind, described, n=COMPARED, cutoff=0.0)}
    known = {one: {*CONFIG_MAPPING[one]().to_dict()} for one in compared}
    usual = set.intersection(*known.values())  # names that tell nothing

    def likeness(one: str) -> float:
        own, theirs = known[one] - usual, {*fields} - usual
        shared = len(own & theirs) / max(1, len(own | theirs))
        return shared + SequenceMatcher(None, kind, one).ratio()

    return max(sorted(compared), key=likeness)


def _with_defaults(kind: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields, and those that transformers fills in where it knows the model."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return fields
    defaults: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    return {**defaults, **fields}


def _is_part(name: str, value: Any) -> bool:
    """Whether a field is the configuration of a part, as of a language model."""
    return name.endswith("_config") and isinstance(value, dict) and "model_type" in value


def _is_no_causal_model(kind: str) -> bool:
    """Whether transformers knows this kind of model, and no causal language model of it."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind in CONFIG_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
