"""An engine of a model that is loaded already, kept with it for the next call. The model itself is
left as it is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import AutoTokenizer, PreTrainedModel

from quickbeam.engine.engine import Engine
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.target.model import Model
from quickbeam.target.native import library
from quickbeam.target.native.quantised import BFLOAT16


class Options(NamedTuple):
    """What an engine is made with; see `generate`."""

    drafter: str | None
    exact: bool | None
    fast: bool


class Loaded(LLM):
    """An `LLM` around a model that is loaded already, which stays as it is: `model` is a copy of it
    that shares its weights."""

    def __init__(self, model: PreTrainedModel, options: Options, tokenizer: Any) -> None:
        if options.fast and model.device.type == "cpu" and model.dtype is torch.bfloat16:
            library.prepare(lambda stage: None)
        self.folder = self.name = model.name_or_path or type(model).__name__
        self.method, self.budget, self.vocab, self.shortlist = "auto", None, None, None
        self._progress, self._trusted, self._kv_memory, self._draft_weights = (
            None,
            False,
            None,
            BFLOAT16,
        )
        engine = Engine(Model(model, fast=options.fast, exact=options.exact))
        # the call says what ends an answer
        self._take(engine, tokenizer, set(), options.drafter, options.fast)


class Wordless:
    """A tokenizer for those who read ids alone."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


class Kept(NamedTuple):
    """An engine, and what it was made of."""

    state: Hashable
    llm: Loaded


_kept: WeakKeyDictionary[PreTrainedModel, Kept] = WeakKeyDictionary()
_making = threading.Lock()


def engine_of(model: PreTrainedModel, options: Options, tokenizer: Any) -> LLM:
    """The engine of a model, made where there is none for these options and for its weights as they
    are now."""
    weights = [*model.parameters(), *model.buffers()]
    if len(places := {weight.device for weight in weights}) > 1 or any(
        place.type == "meta" for place in places
    ):
        raise InvalidInput(
            f"the model lies on {', '.join(sorted(map(str, places)))}: quickbeam "
            "needs all of it on one device"
        )
    # In-place changes raise a tensor's version, but for those through `.data`.
    state = (
        options,
        tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights),
    )
    with _making:
        kept = _kept.get(model)
        if kept is None or kept.state != state:
            _kept.pop(model, None)  # frees its copies before the next are made
            reader = _tokenizer(model, tokenizer) if options.drafter else Wordless()
            twin = copy.deepcopy(model, {id(weight): weight for weight in weights})
            kept = _kept[model] = Kept(state, Loaded(twin, options, reader))
    return kept.llm


def _tokenizer(model: PreTrainedModel, given: Any) -> Any:
    """The model's own."""
    if given is not None:
        return given
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"no tokenizer in {model.name_or_path!r}: give "
            "quickbeam.transformers.generator(drafter=…, tokenizer=…)"
        ) from error
