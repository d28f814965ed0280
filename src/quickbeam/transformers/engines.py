"""Engines for models that are loaded already. An engine is kept for the next call.

The model itself is not changed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import AutoTokenizer, PreTrainedModel

from quickbeam.engine.engine import Engine
from quickbeam.engine.output import NullTokenizer
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.opening import make_model


class Options(NamedTuple):
    """The settings that an engine is made with; see `generate`."""

    drafter: str | None


class Loaded(LLM):
    """An `LLM` around a model that is loaded already.

    The given model is not changed: the attribute `model` is a copy that shares its weights.
    """

    def __init__(self, model: PreTrainedModel, options: Options, tokenizer: Any) -> None:
        if model.device.type == "cpu" and model.dtype is torch.bfloat16:
            library.prepare(lambda stage: None)
        self.folder = self.name = model.name_or_path or type(model).__name__
        self.method, self.budget, self.vocab, self.shortlist = "auto", None, None, None
        self._progress, self._trusted, self._kv_memory, self._draft_weights = (
            None,
            False,
            None,
            BFLOAT16,
        )
        engine = Engine(make_model(model))
        # no end-of-sequence ids: the call says what ends an answer
        self._take(engine, tokenizer, set(), options.drafter)


class Kept(NamedTuple):
    """An engine, and the state of model and options that it was made from."""

    state: Hashable
    llm: Loaded


_kept: WeakKeyDictionary[PreTrainedModel, Kept] = WeakKeyDictionary()
_making = threading.Lock()


def engine_of(model: PreTrainedModel, options: Options, tokenizer: Any) -> LLM:
    """Return the engine of a model.

    It is made if there is none for these options and for the model's weights as they are now.
    Raises `InvalidInput` if the weights are not all on one device.
    """
    weights = [*model.parameters(), *model.buffers()]
    if len(places := {weight.device for weight in weights}) > 1 or any(
        place.type == "meta" for place in places
    ):
        raise InvalidInput(
            f"the model lies on {', '.join(sorted(map(str, places)))}: quickbeam "
            "needs all of it on one device"
        )
    # An in-place change raises a tensor's version, unless it is made through `.data`.
    state = (
        options,
        tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights),
    )
    with _making:
        kept = _kept.get(model)
        if kept is None or kept.state != state:
            _kept.pop(model, None)  # frees its copies before new ones are made
            reader = _tokenizer(model, tokenizer) if options.drafter else NullTokenizer()
            twin = copy.deepcopy(model, {id(weight): weight for weight in weights})
            kept = _kept[model] = Kept(state, Loaded(twin, options, reader))
    return kept.llm


def _tokenizer(model: PreTrainedModel, given: Any) -> Any:
    """Return the tokenizer that is given, or else the model's own.

    Raises `InvalidInput` if the model's own can't be loaded.
    """
    if given is not None:
        return given
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"no tokenizer in {model.name_or_path!r}: give "
            "quickbeam.transformers.generator(drafter=…, tokenizer=…)"
        ) from error
