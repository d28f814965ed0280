"""Answers that follow JSON schemas, compared with free text.

Measures how many are valid, whether drafts change them, and how fast they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from quickbeam.bench.methods import MethodItem
from quickbeam.engine.result import Completion
from quickbeam.errors import InvalidInput
from quickbeam.grammar import Grammar
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams

Told = Callable[[str, float], None]  # is told of a stage, and of the share (0 to 1) that is done
FREE, BOUND = "free text", "JSON schema"


@dataclass(frozen=True)
class Task:
    """A prompt, and the JSON schema that its answer should fit."""

    name: str
    prompt: str
    schema: Mapping[str, Any]


@dataclass
class Row:
    """The figures of one method, with or without schemas.

    `valid` counts the answers that fit their schema. `identical` counts those with the same tokens
    as the first method's. `tokens` leaves out the first token of each answer, and `seconds` the
    prompts.
    """

    answers: int = 0
    valid: int = 0
    identical: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, prompts not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, completion: Completion, valid: bool, same: bool) -> None:
        statistics = completion.statistics
        self.answers += 1
        self.valid += valid
        self.identical += same
        self.tokens += max(0, statistics.new_tokens - 1)  # the first comes with the prompt
        self.steps += statistics.steps
        self.seconds += statistics.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the JSON record of the row."""
        mat = self.tokens / self.steps if self.steps else None
        return {
            **vars(self),
            "tokens_per_second": self.tokens_per_second,
            "mean_accepted_tokens": mat,
        }


def tasks() -> list[Task]:
    """Return our own ten tasks."""
    lines = (
        files("quickbeam.bench").joinpath("schemas.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return [Task(**json.loads(line)) for line in lines]


def measure(
    llm: LLM,
    asked: Sequence[Task],
    methods: Sequence[MethodItem],
    answers: int,
    params: SamplingParams,
    told: Told = lambda stage, done: None,
) -> dict[tuple[str, str], Row]:
    """Answer each task `answers` times with each method, with and without its schema.

    Returns the rows by kind of text (`FREE`, `BOUND`) and name of the method. Every answer to a
    task has a seed of its own, which all methods share. The methods take turns at each answer, so
    that changes in the machine's speed affect all of them alike. Raises `InvalidInput` where
    jsonschema is not installed.
    """
    validate = _validator()
    rows = {(kind, item.name): Row() for kind in (FREE, BOUND) for item in methods}
    for task in asked:  # what is compiled or measured at first use is not counted
        for item in methods:
            _answer(
                llm,
                task,
                item,
                replace(
                    params, grammar=Grammar.json_schema(task.schema), max_tokens=4, min_tokens=0
                ),
            )
    for done, (task, seed) in enumerate(_turns(asked, answers)):
        told(task.name, done / (len(asked) * answers))
        for kind in (FREE, BOUND):
            grammar = Grammar.json_schema(task.schema) if kind == BOUND else None
            first: list[int] | None = None
            for item in methods:
                completion = _answer(llm, task, item, replace(params, seed=seed, grammar=grammar))
                first = completion.token_ids if first is None else first
                rows[kind, item.name].add(
                    completion,
                    validate(completion.text, task.schema),
                    completion.token_ids == first,
                )
    told("done", 1.0)
    return rows


def _turns(asked: Sequence[Task], answers: int) -> Iterator[tuple[Task, int]]:
    for seed in range(answers):
        for task in asked:
            yield task, seed


def _answer(llm: LLM, task: Task, item: MethodItem, params: SamplingParams) -> Completion:
    llm.reset()
    options: Any = {
        "method": item.method,
        "budget": item.budget,
        "vocab": item.vocab,
        "shortlist": item.shortlist,
    }
    return llm.chat([{"role": "user", "content": task.prompt}], item.told(params), **options)


def _validator() -> Callable[[str, Mapping[str, Any]], bool]:
    """A function that says whether a text is JSON that fits a schema.

    Raises `InvalidInput` where jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise InvalidInput(
            "bench structured checks answers with jsonschema: pip install 'quickbeam[bench]'"
        ) from error

    def valid(text: str, schema: Mapping[str, Any]) -> bool:
        try:
            return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
        except ValueError:
            return False

    return valid
