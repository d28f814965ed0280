"""Stands in for `quickbeam.llm` where the command line is tested: answers are scripted, nothing is
loaded.

`SCRIPT` decides an answer by its prompt; what the command line asked for is in `CALLS`. Run as a
program, this file is the `quickbeam` command with the stand-in behind it.
"""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

from quickbeam.engine.result import Completion, Logprob, SourceCount, Statistics
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

CALLS = []
Observer = Callable[[StepRecord], None]


def step():
    """A root, an accepted token, a rejected one beside it."""
    tree = TokenTree(1)
    tree.add(0, 2, "ngram", 0.5)
    tree.add(0, 3, "drafter", 0.25)
    return StepRecord(tree, [0, 1], 4, [2, 4], 0.001, 0.002, 0.004)


class Stream:
    def __init__(self, pieces, method, observer=None):
        self.pieces = pieces
        self.text = ""
        self.reason = ""
        self.method = method
        self.observer = observer

    def __iter__(self):
        return self

    def __next__(self):
        try:
            piece = next(self.pieces)
        except StopIteration:
            self.reason = "stop"
            raise
        except KeyboardInterrupt:
            # a real stream holds back what may become a stop string
            self.text += "(held)" if self.text else ""
            raise
        self.text += piece
        if self.observer:
            self.observer(step())
        return piece

    def result(self):
        for _ in self:
            pass
        return self.completion

    def close(self):
        self.reason = self.reason or "interrupted"

    @property
    def completion(self):
        n = len(self.text.split())
        statistics = Statistics(
            n, max(n - 1, 1) // 2 + 1, 0.5, 0.25, sources={"ngram": SourceCount(8, 3)}
        )
        return Completion(
            self.text,
            list(range(n)),
            self.reason,
            statistics,
            "fake",
            self.method,
            [Logprob(0, -0.5, {})],
        )


def script(prompt):
    if prompt == "fail":
        raise QuickbeamError("the logits\nare not finite")
    if prompt == "crash":
        raise ZeroDivisionError("division by zero")
    if prompt == "disk":
        raise OSError(28, "No space left on device", "/somewhere")
    if prompt == "too long":
        raise InvalidInput("the prompt is longer than the context")
    if prompt == "interrupt at once":
        raise KeyboardInterrupt
    yield "one "
    yield "two"
    if prompt == "interrupt":
        raise KeyboardInterrupt
    while prompt == "endless":
        time.sleep(0.01)
        yield " more"


class LLM:
    def __init__(self, model, method, **options):
        CALLS.append(("load", (model, method, options), SamplingParams()))
        self.name, self.method, self.kernels = model or "the default", method, "scripted"
        self.model = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.tokenizer = SimpleNamespace(
            decode=lambda ids, **options: "".join(f"<{i}>" for i in ids)
        )

    def describe(self):
        return self.kernels

    def stream(self, prompt, params, *, observer=None):
        CALLS.append(("raw", prompt, params))
        return Stream(script(prompt), self.method, observer)

    def chat_stream(self, messages, params, *, method=None, observer=None):
        CALLS.append(("chat", [(m["role"], m["content"]) for m in messages], params))
        return Stream(script(messages[-1]["content"]), method or self.method, observer)


if __name__ == "__main__":
    sys.modules["quickbeam.llm"] = sys.modules["__main__"]
    from quickbeam.cli import main

    main()
