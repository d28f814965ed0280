"""What drafts for an `LLM`: its drafter with its shortlists, and methods with what they learned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

from quickbeam.drafters.base import Drafter
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.drafters.vocabulary import is_listed, make_shortlist, shortlist_parts
from quickbeam.errors import InvalidInput
from quickbeam.methods import DRAFTER, METHODS, make_method, preset, stand_in
from quickbeam.methods.base import Method
from quickbeam.models.base import Model
from quickbeam.options import BESIDE, FREQUENCY, FULL, SHORTENED, Setting, plain_vocab
from quickbeam.params import COUPLED, SamplingParams

Load = Callable[[Model, Any], Drafter]
DraftOptions = tuple[str, str | None, int | None]  # a method, a vocabulary, the size of a shortlist
KEPT = 2  # how many shortlists are kept: each holds a copy of the head's rows


class Drafting:
    """The drafter of a model and the methods that draft for it.

    - `load`: loads the drafter for a model and its tokenizer; None where there is none. It is
      called when a method first needs the drafter.
    - `vocab`, `shortlist`: what the drafter scores where a call says nothing; see `LLM`.
    """

    def __init__(self, load: Load | None, vocab: str | None, shortlist: int | None) -> None:
        self._load, self._vocab, self._shortlist = load, vocab, shortlist
        self.drafter: Drafter | None = None
        self.listed = False  # whether the drafter comes with a list of frequent tokens
        self._shortlists: Callable[[str, int | None], Shortlist | None] | None = None
        # raises `InvalidInput` for what the drafter can't score
        self._check_vocab: Callable[[str, int | None], object] | None = None
        # methods keep what they learned in earlier answers
        self.policies: dict[Setting, Method] = {}
        self._prepared = set[DraftOptions]()

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods that can be used. If there is a drafter, it must be loaded.

        The others raise `InvalidInput` in `method` or in `prepare`.
        """
        return tuple(name for name in METHODS if self._can_use(name))

    def _can_use(self, name: str) -> bool:
        try:
            method = self.method(name)
            if self.drafts(method):
                assert self._check_vocab is not None
                setting = self.setting(method, None, None)
                self._check_vocab(setting.vocab, setting.shortlist)
        except InvalidInput:
            return False
        return True

    def method(self, asked: str) -> str:
        """Return the method that answers where `asked` is asked for. Raises `InvalidInput`."""
        return stand_in(asked, self._load is not None)

    def drafts(self, method: str) -> bool:
        """Whether a drafter drafts for this method."""
        return self._load is not None and DRAFTER in preset(method).sources

    def lacks(self, asked: DraftOptions) -> bool:
        """Whether `prepare` has something to do."""
        return self.drafts(asked[0]) and asked not in self._prepared

    @property
    def loaded(self) -> bool:
        """Whether `load` has nothing to do."""
        return self._load is None or self.drafter is not None

    def load(self, model: Model, tokenizer: Any) -> None:
        """Load the drafter, if there is one, unless it is loaded."""
        if self.loaded:
            return
        assert self._load is not None
        self.drafter = self._load(model, tokenizer)
        self.listed = is_listed(self.drafter)
        self._shortlists = lru_cache(KEPT)(partial(make_shortlist, self.drafter, model))
        self._check_vocab = partial(shortlist_parts, self.drafter, model)

    def prepare(self, asked: DraftOptions) -> None:
        """Make the shortlist that is asked for. The drafter must be loaded."""
        self.shortlist(self.setting(*asked))
        self._prepared.add(asked)

    def setting(self, method: str, vocab: str | None, shortlist: int | None) -> Setting:
        """Return the setting of a method. If the method has a drafter, it must be loaded."""
        vocab = vocab or self._vocab or preset(method).vocab
        if vocab == SHORTENED:
            vocab = FREQUENCY + BESIDE if self.listed else FULL
        return Setting(method, vocab, self._shortlist if shortlist is None else shortlist)

    def shortlist(self, setting: Setting) -> Shortlist | None:
        """Return what the drafter scores; None without a drafter, and for its full vocabulary."""
        if self._shortlists is None or not self.drafts(setting.method):
            return None
        return self._shortlists(plain_vocab(setting.vocab), setting.shortlist)

    def policy(self, setting: Setting, params: SamplingParams) -> Method:
        """Return the method that drafts an answer.

        It is that of earlier answers of this setting, unless what it learned could change a token.
        """
        new = make_method(setting.method, self.drafter if self.drafts(setting.method) else None)
        if params.seed is None or params.greedy or params.coupling == COUPLED:
            return self.policies.setdefault(setting, new)
        return new
