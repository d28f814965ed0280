"""From `--methods` to loaded runners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quickbeam.bench.base import Answer, Message, Runner
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT, resolve, shipped_drafter
from quickbeam.params import COUPLED, RESIDUAL, SamplingParams
from quickbeam.presets import BESIDE, PRESETS, VOCABS, check_vocab, plain_vocab

if TYPE_CHECKING:
    import torch

    from quickbeam.llm import LLM

PEERS = {
    "hf": "transformers' generate as it comes",
    "hf-pld": "transformers' prompt lookup",
    "hf-assisted": "transformers' assistant model",
}
SWITCHES: dict[str, tuple[str, bool | str]] = {
    "exact": ("exact", True),
    "no-exact": ("exact", False),
    "fast": ("fast", True),
    "plain": ("fast", False),
    **{word: ("coupling", word) for word in (COUPLED, RESIDUAL)},
}


@dataclass(frozen=True)
class MethodItem:
    """One entry of `--methods`.

    - `name`: the entry as typed.
    - `budget`: None leaves it to the preset, 0 to the measured cost.
    - `vocab`, `shortlist`: None leaves them to the preset.
    - `exact`, `fast`: as `LLM` takes them.
    - `coupling`: None leaves it to the parameters of the answer.
    """

    name: str
    method: str
    budget: int | None = None
    vocab: str | None = None
    shortlist: int | None = None
    exact: bool | None = None
    fast: bool = True
    coupling: str | None = None

    def told(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the coupling of this entry, where it names one."""
        return params if self.coupling is None else replace(params, coupling=self.coupling)

    def comparable(self, params: SamplingParams) -> bool:
        """Whether this entry's tokens ought to equal those of others (see `Runner.comparable`).

        They ought to at temperature 0. Above it they ought to where there is a seed and tokens are
        coupled. A peer's tokens are not coupled.
        """
        asked = self.told(params)
        return asked.greedy or (
            asked.seed is not None and asked.coupling == COUPLED and not self.is_peer
        )

    @property
    def is_peer(self) -> bool:
        return self.method in PEERS

    @property
    def drafts_with_a_model(self) -> bool:
        return self.method == "hf-assisted" or (
            not self.is_peer and "drafter" in PRESETS[self.method].sources
        )

    @property
    def needs_a_drafter(self) -> bool:
        return self.drafts_with_a_model and (self.is_peer or PRESETS[self.method].without is None)


def parse_budget(text: str) -> int:
    """Read a budget: `auto` (0), or a number of nodes per step, the root included.

    Raises `InvalidInput` for anything else.
    """
    if text == "auto":
        return 0
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidInput(f"budget {text!r}: must be a number of nodes of at least 1, or auto")
    return int(text)


def parse_methods(
    text: str,
    budget: int | None = None,
    exact: bool | None = None,
    fast: bool = True,
    drafter: str | None = None,
    model: str | None = None,
    vocab: str | None = None,
    shortlist: int | None = None,
) -> list[MethodItem]:
    """Read a comma-separated list of `NAME[:BUDGET][@SIZE][+SWITCH…]`.

    SIZE is the number of tokens of a shortlist. The other arguments hold where an entry says
    nothing itself.

    Raises `InvalidInput` for unknown names and switches, for wrong budgets and sizes, for entries
    given twice, and for methods that lack the drafter they need. `model` may come with a drafter,
    but transformers' assisted generation can't use that one.
    """
    defaults = MethodItem("", "", budget, vocab, shortlist, exact, fast)
    items = [_item(entry.strip(), defaults) for entry in text.split(",") if entry.strip()]
    if not items:
        raise InvalidInput(
            f"--methods {text!r}: names no method; known: {', '.join([*PRESETS, *PEERS])}"
        )
    names = [item.name for item in items]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(f"--methods: {twice!r} is given twice")
    drafted = [
        item
        for item in items
        if item.needs_a_drafter and (item.is_peer or shipped_drafter(model) is None)
    ]
    if drafter is None and drafted:
        what = (
            "smaller model with the same vocabulary"
            if drafted[0].is_peer
            else "smaller model with the same vocabulary or a feature drafter"
        )
        raise InvalidInput(
            f"{drafted[0].method} needs a drafter: name a {what} with --drafter ID_OR_PATH"
        )
    return items


def _item(entry: str, defaults: MethodItem) -> MethodItem:
    head, *switches = entry.split("+")
    head, at, own_size = head.partition("@")
    method, colon, own_budget = head.partition(":")
    if method not in PRESETS and method not in PEERS:
        raise InvalidInput(f"unknown method {method!r}; known: {', '.join([*PRESETS, *PEERS])}")
    sources = PRESETS[method].sources if method in PRESETS else ()
    if colon and not sources:
        raise InvalidInput(f"{entry!r}: {method} grows no draft tree and takes no budget")
    if switches and method in PEERS:
        raise InvalidInput(f"{entry!r}: {method} has no switches")
    drafter = "drafter" in sources
    vocabs = [switch for switch in switches if switch in VOCABS]
    if len(vocabs) == 2 and f"+{vocabs[1]}" == BESIDE:
        vocabs = [plain_vocab(vocabs[0] + BESIDE)]
    if (at or vocabs) and not drafter:
        raise InvalidInput(
            f"{entry!r}: {method} has no drafter whose vocabulary could be shortened"
        )
    if len(vocabs) > 1:
        raise InvalidInput(f"{entry!r}: a drafter scores one of {', '.join(vocabs)}")
    chosen: dict[str, Any] = {"exact": defaults.exact, "fast": defaults.fast, "coupling": None}
    for switch in switches:
        if switch not in SWITCHES and switch not in VOCABS:
            raise InvalidInput(
                f"{entry!r}: unknown switch {switch!r}; known: {', '.join([*SWITCHES, *VOCABS])}"
            )
        if switch in SWITCHES:
            key, value = SWITCHES[switch]
            chosen[key] = value
    vocab = vocabs[0] if vocabs else defaults.vocab if drafter else None
    size = _parse_size(entry, own_size) if at else None
    if drafter:
        check_vocab(vocab or PRESETS[method].vocab, size)
    return MethodItem(
        name=entry,
        method=method,
        budget=parse_budget(own_budget) if colon else defaults.budget if sources else None,
        vocab=vocab,
        shortlist=size or defaults.shortlist if drafter else None,
        **chosen,
    )


def _parse_size(entry: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidInput(f"{entry!r}: @{text} must be a number of tokens of at least 1")
    return int(text)


class LLMRunner(Runner):
    """One of our methods on a loaded `LLM`, which several methods may share."""

    def __init__(self, llm: LLM, item: MethodItem) -> None:
        self.llm, self.item = llm, item
        self.device = str(llm.model.device)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = self.llm.encode_chat(list(messages))
        return ids

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        self.llm.reset()  # drop what other methods computed
        item = self.item
        completion = self.llm.generate(
            list(ids),
            item.told(params),
            method=item.method,
            budget=item.budget,
            vocab=item.vocab,
            shortlist=item.shortlist,
        )
        if completion.finish_reason == "interrupted":
            raise KeyboardInterrupt
        s = completion.statistics
        return Answer(
            token_ids=completion.token_ids,
            text=completion.text,
            decoded=max(s.new_tokens - 1, 0),
            steps=s.steps,
            seconds=s.seconds,
            draft_seconds=s.draft_seconds,
            verify_seconds=s.verify_seconds,
            drafter_calls=s.drafter_calls,
            drafter_seconds=s.drafter_seconds,
            head=s.head,
            prefill_seconds=s.prefill_seconds,
            nodes=s.nodes,
            accepted={name: count.accepted for name, count in s.sources.items()},
        )

    def comparable(self, params: SamplingParams) -> bool:
        return self.item.comparable(params)

    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        # importing transformers takes seconds, and `quickbeam --help` imports this file
        from quickbeam.target.target import Target

        target = Target(self.llm.model)
        logits = target.prefill(list(ids))
        target.store.release()
        return logits


def load_runners(
    items: Sequence[MethodItem],
    model: str | None,
    dtype: str,
    device: str | None,
    drafter: str | None = None,
    progress: Callable[[str, float | None], None] | None = None,
    weights: str = "bfloat16",
    draft_weights: str = "bfloat16",
    memory: str | None = None,
) -> tuple[dict[str, Runner], str]:
    """Load what the methods need, each model once per setting.

    Returns the runners by name, in the order of `items`, and the model's name.

    Peers load the same folder as our own methods, with the same dtype and on the same device.
    `drafter` is for the methods that draft with a model: ours and `hf-assisted`. `weights`,
    `draft_weights` and `memory` are for our own methods, as `LLM` takes them.
    """
    from quickbeam.bench.peers import Loaded, Peer
    from quickbeam.llm import LLM

    llms: dict[tuple[bool | None, bool], LLM] = {}
    runners: dict[str, Runner] = {}
    for item in items:
        if not item.is_peer:
            key = (item.exact, item.fast)
            if key not in llms:
                llms[key] = LLM(
                    model,
                    item.method,
                    dtype=dtype,
                    device=device,
                    drafter=drafter,
                    exact=item.exact,
                    fast=item.fast,
                    weights=weights,
                    draft_weights=draft_weights,
                    memory=memory,
                    progress=progress,
                )
            llms[key].prepare(item.method, item.vocab, item.shortlist)
            runners[item.name] = LLMRunner(llms[key], item)
    peers = [item for item in items if item.is_peer]
    if peers:
        llm = next(iter(llms.values()), None)
        folder, place = (
            (llm.folder, str(llm.model.device)) if llm else (resolve(model, progress), device)
        )
        loaded = Loaded(folder, dtype, place)
        assistant = (
            Loaded(resolve(drafter, progress), dtype, place)
            if any(item.method == "hf-assisted" for item in peers)
            else None
        )
        runners |= {item.name: Peer(item.method, loaded, assistant) for item in peers}
    name = next((llm.name for llm in llms.values()), model or DEFAULT)
    return {item.name: runners[item.name] for item in items}, name
