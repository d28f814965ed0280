"""Reads the entries of `--methods` and loads what answers them; reads `--questions`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from quickbeam.config import Budget, check_vocab, plain_vocab
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT, drafter_for
from quickbeam.methods import METHODS, check_method, stand_in
from quickbeam.models.builtin import resolve
from quickbeam.params import COUPLED, SamplingParams

if TYPE_CHECKING:  # `quickbeam --help` imports this file, and torch takes seconds to import
    import torch

    from quickbeam.bench.peers import Peer
    from quickbeam.engine.result import Completion
    from quickbeam.llm import LLM

MethodRunner = Union["LLMRunner", "Peer"]  # a loaded method
Messages = Sequence[dict[str, str]]
PEERS = ("hf", "hf-pld")  # transformers' generate as it comes, and its prompt lookup
NAMES = (*METHODS, *PEERS)
BUILT_IN = "questions.jsonl"  # our own set, inside the package
SYNTAX = "NAME[:BUDGET][@SHORTLIST][+VOCABULARY]"
ENTRY = re.compile(r"([^:@+]*)(?::(auto|[1-9]\d*))?(?:@([1-9]\d*))?(?:\+(.*))?", re.ASCII)


@dataclass(frozen=True)
class MethodItem:
    """One entry of `--methods`, typed as `name`. An option that is None is left to the preset."""

    name: str
    method: str
    budget: Budget | None = None
    vocab: str | None = None
    shortlist: int | None = None

    @property
    def is_peer(self) -> bool:
        return self.method in PEERS

    def options(self) -> dict[str, Any]:
        """Return what `LLM.generate` and `LLM.stream` take for this entry."""
        return {
            "method": self.method,
            "budget": self.budget,
            "vocab": self.vocab,
            "shortlist": self.shortlist,
        }

    def comparable(self, params: SamplingParams) -> bool:
        """Whether the model, the prompt and `params` alone decide the tokens of this entry."""
        seeded = params.seed is not None and params.coupling == COUPLED and not self.is_peer
        return params.greedy or seeded


def parse_methods(
    text: str,
    budget: Budget | None = None,
    drafter: str | None = None,
    model: str | None = None,
    vocab: str | None = None,
    shortlist: int | None = None,
) -> list[MethodItem]:
    """Read a comma-separated list of entries in `SYNTAX`.

    The other arguments stand in for what an entry leaves out. Raises `InvalidInput`, also for a
    method without the drafter that it needs.
    """
    default = MethodItem("", "", budget, vocab, shortlist)
    items = list[MethodItem]()
    for entry in filter(None, map(str.strip, text.split(","))):
        item = _item(entry, default)
        if item in items:
            raise InvalidInput(f"--methods: {entry!r} is given twice")
        items.append(item)
    if not items:
        raise InvalidInput(f"--methods {text!r}: names no method; known: {', '.join(NAMES)}")
    has_drafter = drafter_for(model, drafter) is not None
    for item in items:
        if not item.is_peer:
            stand_in(item.method, has_drafter)
    return items


def _item(entry: str, default: MethodItem) -> MethodItem:
    """Read an entry. What it leaves out is `default`'s, where its method takes that."""
    parts = ENTRY.fullmatch(entry)
    if parts is None:
        raise InvalidInput(f"{entry!r}: must be {SYNTAX}, sizes of at least 1 or a budget of auto")
    method, nodes, size, switches = parts.groups()
    check_method(method, NAMES)
    named = METHODS.get(method)  # None for a peer
    drafts = named is not None and named.drafts
    has_vocab = named is not None and named.uses_drafter
    vocab = plain_vocab(switches or "") or None
    shortlist = int(size) if size else None
    if nodes and not drafts:
        raise InvalidInput(f"{entry!r}: {method} grows no draft tree and takes no budget")
    if (shortlist or vocab) and not has_vocab:
        raise InvalidInput(f"{entry!r}: {method} has no drafter that scores a vocabulary")
    budget: Budget | None = None
    if nodes:
        budget = 0 if nodes == "auto" else int(nodes)
    elif drafts:
        budget = default.budget
    if not has_vocab:
        return MethodItem(entry, method, budget)
    vocab = vocab or default.vocab
    check_vocab(vocab or METHODS[method].vocab, shortlist)
    return MethodItem(entry, method, budget, vocab, shortlist or default.shortlist)


class LLMRunner:
    """One of our methods on a loaded `LLM`, which the methods share."""

    def __init__(self, llm: LLM, item: MethodItem, raw: bool = False) -> None:
        self.llm = llm
        self.item = item
        self.raw = raw
        self.device = str(llm.model.device)

    def encode(self, messages: Messages) -> list[int]:
        if not self.raw:
            return list(self.llm.encode_chat(list(messages)))
        text = "\n\n".join(message["content"] for message in messages)
        return list(self.llm.tokenizer(text)["input_ids"])

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Completion:
        self.llm.reset()  # drop what other methods computed
        return self.llm.generate(list(ids), params, **self.item.options())

    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the target's logits after the last token, `[vocab]`."""
        from quickbeam.models.base import Batch, Chain

        model = self.llm.model
        cache = model.pool.new()
        for begin in range(0, len(ids), model.chunk):
            part = ids[begin : begin + model.chunk]
            (passed,) = model.forward(Batch([Chain(cache, part)]))
            cache.commit(range(len(part)))
        cache.release()
        return passed.logits[-1]


def load_runners(
    items: Sequence[MethodItem],
    loading: dict[str, Any],
    progress: Callable[[str, float | None], None] | None = None,
    raw: bool = False,
) -> tuple[dict[str, MethodRunner], str, Any]:
    """Load what the methods need with these arguments of `LLM`.

    Returns the methods in the order of `items`, the model's name, and what is read from disk.
    """
    own_items = [item for item in items if not item.is_peer]
    peers = [item for item in items if item.is_peer]
    runners = dict[str, MethodRunner]()
    folder, device, disk = loading["model"], loading["device"], None
    name = folder or DEFAULT
    if own_items:
        from quickbeam.llm import LLM

        # each method has its own of these
        per_method = ("budget", "vocab", "shortlist")
        shared = {key: value for key, value in loading.items() if key not in per_method}
        # methods are asked the same questions, and must not find each other's answers
        llm = LLM(**shared, method=own_items[0].method, memory_of_answers=0, progress=progress)
        for item in own_items:
            llm.prepare(item.method, item.vocab, item.shortlist)
            runners[item.name] = LLMRunner(llm, item, raw)
        folder = llm.folder
        device = str(llm.model.device)
        name = llm.name
        disk = llm.model.streamed
    if peers:
        from quickbeam.bench.peers import Peer, load

        loaded = load(folder if own_items else resolve(folder, progress), loading["dtype"], device)
        for item in peers:
            runners[item.name] = Peer(loaded, item.method == "hf-pld", raw)
    return {item.name: runners[item.name] for item in items}, name, disk


@dataclass(frozen=True)
class Question:
    """A question. `turns` is what the user says, one after the other."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def load_questions(path: Path | None = None) -> list[Question]:
    """Read a file of Spec-Bench lines, or our own set. Raises `InvalidInput`, naming the line."""
    file = resources.files(__package__).joinpath(BUILT_IN) if path is None else path
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or f"not UTF-8 text: {error}"
        raise InvalidInput(f"--questions {path}: can't be read ({why})") from None
    # Not splitlines(): JSON strings may hold U+2028 and its like, which are no line ends here.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InvalidInput(f"--questions {path}: holds no questions")
    return [_question(line, f"{path or BUILT_IN}:{number}") for number, line in lines]


def spread(questions: Sequence[Question], limit: int | None = None) -> list[Question]:
    """Take `limit` questions (None: all), one of each category in turn: any prefix is even."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    longest = max(map(len, by_category.values()), default=0)
    ordered = list[Question]()
    for i in range(longest):
        ordered += [group[i] for group in by_category.values() if i < len(group)]
    return ordered[:limit]


def _question(line: str, where: str) -> Question:
    """Return the question of a line. Raises `InvalidInput`, which says `where` the line is."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    question_id: Any = fields.get("question_id")
    category: Any = fields.get("category")
    turns: Any = fields.get("turns")
    valid = (
        isinstance(question_id, int | str)
        and not isinstance(question_id, bool)
        and isinstance(turns, list)
        and len(turns) > 0
        and all(map(_is_text, [category, *turns]))
    )
    if not valid:
        raise InvalidInput(
            f"{where}: {line.strip()[:80]!r} must be a JSON object with question_id (a number or "
            "string), category (a string) and turns (a list of strings), none of them empty"
        )
    return Question(question_id, category, tuple(turns))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
