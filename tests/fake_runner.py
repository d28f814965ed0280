"""Runners with set answers and timings, for whoever tests the benchmark without a model."""

import torch

from quickbeam.bench.methods import PEERS, MethodItem, Question
from quickbeam.bench.run import begin, run
from quickbeam.engine.result import Completion, Statistics
from quickbeam.params import SamplingParams

PARAMS = SamplingParams(max_tokens=8)


class FakeRunner:
    """Answers every prompt alike, and writes down what it was asked.

    Ids are the characters of the last message. `figures`: further fields of the statistics.
    """

    device = "cpu"

    def __init__(
        self, name, calls, tokens=(1, 2, 3, 4, 5), steps=4, seconds=2.0, split=(0.5, 1.0), **figures
    ):
        self.name, self.calls, self.fails = name, calls, {}
        self.item = MethodItem(name, name if name in (*PEERS, "ar") else "pld")
        told = dict(zip(("draft_seconds", "verify_seconds"), split, strict=True)) | figures
        statistics = Statistics(len(tokens), steps, seconds, **told)
        self.reply = Completion(f"said by {name}", list(tokens), "length", statistics)
        self.conversations: list[list[dict[str, str]]] = []
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.lengths: list[int] = []

    def encode(self, messages):
        self.conversations.append([dict(message) for message in messages])
        return [ord(character) for character in messages[-1]["content"]]

    def answer(self, ids, params):
        text = "".join(map(chr, ids))
        self.calls.append((self.name, text))
        self.prompts.append(list(ids))
        self.seeds.append(params.seed)
        self.lengths.append(params.max_tokens)
        if text in self.fails:
            raise self.fails[text]
        return self.reply

    def last_logits(self, ids):
        self.prompts.append(list(ids))
        logits = torch.zeros(10)
        logits[3], logits[7] = 2.0, 2.0 + len(ids) / 8
        return logits


def questions_of(*categories):
    return [Question(i, category, (f"q{i}",)) for i, category in enumerate(categories)]


def started(runners, params=PARAMS):
    return begin([runner.item for runner in runners.values()], params)


def measured(runners, questions, params=PARAMS, **options):
    results = started(runners, params)
    for _ in run(questions, runners, results, **options):
        pass
    return results


def two_methods():
    """ar at 2 tokens/s; a method with the same tokens in half the steps and a quarter of the
    time."""
    calls: list = []
    fast = FakeRunner("fast", calls, steps=2, seconds=0.5, split=(0.1, 0.3))
    return {"ar": FakeRunner("ar", calls), "fast": fast}
