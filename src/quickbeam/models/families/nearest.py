"""What a model is that no family describes, in the words of an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from quickbeam.models.families.reading import PAGE, NotDescribed

COMPARED = 6  # families of similar names, whose fields are compared
COMMON = "llama"  # compared as well
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how classes of causal language models are named


def undescribed(fields: Mapping[str, Any], described: Collection[str]) -> NotDescribed:
    """Return the error that refuses a model with these `fields` of config.json.

    `described`: the `model_type`s of all families.
    """
    kind = str(fields.get("model_type"))
    architectures = fields.get("architectures") or [kind]
    name = str(architectures[0])
    fields_set = _with_defaults(kind, fields)
    if fields_set.get("is_encoder_decoder"):
        return NotDescribed(
            f"{name} is an encoder-decoder; quickbeam runs decoder-only causal language models"
        )
    if isinstance(fields_set.get("text_config"), dict):
        parts = sorted(part for part, value in fields_set.items() if _is_part(part, value))
        inner = fields_set["text_config"].get("model_type")
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
        f"is {nearest(kind, fields_set, described)!r}, and {PAGE} says how to describe one"
    )


def nearest(kind: str, fields: Collection[str], described: Collection[str]) -> str:
    """Return the family whose `model_type` and names of fields are most alike."""
    from transformers import CONFIG_MAPPING

    candidates = {COMMON, *get_close_matches(kind, described, n=COMPARED, cutoff=0.0)}
    fields_of = {family: {*CONFIG_MAPPING[family]().to_dict()} for family in candidates}
    uninformative = set.intersection(*fields_of.values())

    def likeness(family: str) -> float:
        these, theirs = {*fields} - uninformative, fields_of[family] - uninformative
        shared = len(these & theirs) / max(1, len(these | theirs))
        return shared + SequenceMatcher(None, kind, family).ratio()

    return max(sorted(candidates), key=likeness)


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
