"""The methods of one model with what they learned, and the drafter and shortlists they use."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from quickbeam.config import CONTEXT, FREQUENCY, FULL, SHORTENED, plain_vocab
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.drafters.vocabulary import is_listed, make_shortlist, shortlist_parts
from quickbeam.errors import InvalidInput
from quickbeam.methods import METHODS, make_method, preset, stand_in
from quickbeam.methods.base import Method
from quickbeam.models.base import Model
from quickbeam.models.native.library import Kernels
from quickbeam.params import COUPLED, SamplingParams

LoadDrafter = Callable[[Model, Any], Drafter]  # from a model and its tokenizer
MAX_SHORTLISTS = 2  # that are kept: each holds a copy of the head's rows
TEMPERATURE_STEP = 0.4  # temperatures of one class lie in such a step
MAX_TEMPERATURE_CLASS = 4


class Setting(NamedTuple):
    """All that an answer's drafts depend on, apart from the budget.

    Acceptance rates and costs are learned separately for each setting.

    - `method`, `vocab`, `shortlist`: as in `LLMOptions`.
    - `temperature_class`: a class of temperatures, from 0 to 4. It is negative where children are
      drawn (`coupling="residual"`).
    - `constrained`: whether a grammar constrains the answer.
    """

    method: str
    vocab: str
    shortlist: int | None
    temperature_class: int = 0
    constrained: bool = False

    def of_answer(self, params: SamplingParams) -> Setting:
        """Return this setting with what an answer's parameters add to it."""
        level = min(math.ceil(params.temperature / TEMPERATURE_STEP), MAX_TEMPERATURE_CLASS)
        return self._replace(
            temperature_class=level if params.coupling == COUPLED else -level,
            constrained=params.grammar is not None,
        )


class MethodStore:
    """Makes the methods of one model and keeps them, since they learn from each answer.

    It also loads and keeps the drafter of the model, and the shortlists that the drafter scores.

    - `load_drafter`: called when a method first needs the drafter; None where there is none.
    - `vocab`, `shortlist`: what the drafter scores where a call says nothing; see `LLMOptions`.
    - `kernels`: score shortlists if they can; None: PyTorch does.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        load_drafter: LoadDrafter | None = None,
        vocab: str | None = None,
        shortlist: int | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._load_drafter = load_drafter
        self._vocab = vocab
        self._shortlist = shortlist
        self._kernels = kernels
        self.drafter: Drafter | None = None
        self._is_listed = False  # whether the drafter comes with a list of frequent tokens
        self._making_shortlists = threading.Lock()
        self._shortlists = OrderedDict[tuple[str, int | None], Shortlist]()
        self.methods: dict[Setting, Method] = {}

    @property
    def usable(self) -> list[str]:
        """The names of the methods that can be used. If there is a drafter, it must be loaded.

        The others raise `InvalidInput` in `resolve` or in `shortlist`.
        """
        return [name for name in METHODS if self._can_use(name)]

    def _can_use(self, name: str) -> bool:
        try:
            method = self.resolve(name)
            if self.uses_drafter(method):
                assert self.drafter is not None
                setting = self.setting(method, None, None)
                shortlist_parts(self.drafter, self._model, setting.vocab, setting.shortlist)
        except InvalidInput:
            return False
        return True

    def resolve(self, name: str) -> str:
        """Return the method that answers where `name` is asked for. Raises `InvalidInput`."""
        return stand_in(name, self._load_drafter is not None)

    def uses_drafter(self, method: str) -> bool:
        """Whether this method drafts with the drafter, and there is one."""
        return self._load_drafter is not None and preset(method).uses_drafter

    @property
    def loaded(self) -> bool:
        """Whether `load` has nothing to load."""
        return self._load_drafter is None or self.drafter is not None

    def load(self) -> None:
        """Load the drafter, if there is one, unless it is loaded."""
        if not self.loaded:
            assert self._load_drafter is not None
            drafter = self._load_drafter(self._model, self._tokenizer)
            self._is_listed = is_listed(drafter)
            self.drafter = drafter

    def setting(self, method: str, vocab: str | None, shortlist: int | None) -> Setting:
        """Return the setting of a method. If the method has a drafter, it must be loaded."""
        vocab = vocab or self._vocab or preset(method).vocab
        if vocab == SHORTENED:
            vocab = FREQUENCY + CONTEXT if self._is_listed else FULL
        return Setting(method, vocab, self._shortlist if shortlist is None else shortlist)

    def has_shortlist(self, setting: Setting) -> bool:
        """Whether `shortlist` has nothing to make."""
        key = self._key(setting)
        vocab, _ = key
        return vocab == FULL or not self.uses_drafter(setting.method) or key in self._shortlists

    def shortlist(self, setting: Setting) -> Shortlist | None:
        """Return what the drafter scores; None without a drafter, and for its full vocabulary.

        The drafter must be loaded. Raises `InvalidInput` for what it can't score.
        """
        if self.drafter is None or not self.uses_drafter(setting.method):
            return None
        key = self._key(setting)
        vocab, size = key
        if vocab == FULL:
            return None
        with self._making_shortlists:
            if key not in self._shortlists:
                shortlist = make_shortlist(self.drafter, self._model, vocab, size, self._kernels)
                assert shortlist is not None
                self._shortlists[key] = shortlist
            self._shortlists.move_to_end(key)
            if len(self._shortlists) > MAX_SHORTLISTS:
                self._shortlists.popitem(last=False)
            return self._shortlists[key]

    def forget(self) -> None:
        """Forget all texts. What was learned of acceptance stays."""
        for method in self.methods.values():
            for source in method.sources:
                source.forget()

    def _key(self, setting: Setting) -> tuple[str, int | None]:
        return plain_vocab(setting.vocab), setting.shortlist

    def method(self, setting: Setting, params: SamplingParams) -> Method:
        """Return the method that drafts an answer.

        It is that of earlier answers of this setting, unless what it learned could change a token.
        """
        drafter = self.drafter if self.uses_drafter(setting.method) else None
        new = make_method(setting.method, drafter)
        return new if params.repeats_drafts else self.methods.setdefault(setting, new)
