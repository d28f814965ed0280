"""Stands in for `quickbeam.llm` where the command line is tested: answers are scripted, nothing is
loaded.

`script` decides an answer by its prompt; what the command line asked for is in `CALLS`. Run as a
program, this file is the `quickbeam` command with the stand-in behind it.
"""

import sys
import time
from types import SimpleNamespace

from quickbeam.engine.result import Completion, Logprob, SourceCount, Statistics
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

CALLS: list[tuple[str, object, SamplingParams]] = []
FAILURES = {
    "fail": QuickbeamError("the logits\nare not finite"),
    "crash": ZeroDivisionError("division by zero"),
    "disk": OSError(28, "No space left on device", "/somewhere"),
    "too long": InvalidInput("the prompt is longer than the context, with max_tokens=9"),
    "interrupt at once": KeyboardInterrupt(),
}
DEAD_END = InvalidInput("no token can come after these")


def step():
    tree = TokenTree(1)
    tree.add(0, 2, "ngram", 0.5)
    tree.add(0, 3, "drafter", 0.25)
    return StepRecord(tree, [0, 1], 4, [2, 4], 0.001, 0.002, 0.004)


def script(prompt):
    if prompt in FAILURES:
        raise FAILURES[prompt]
    yield "one "
    yield "two"
    if prompt == "interrupt":
        raise KeyboardInterrupt
    if prompt == "dead end":
        raise DEAD_END
    while prompt == "endless":
        time.sleep(0.01)
        yield " more"


class Stream:
    def __init__(self, pieces, method, observer):
        self.pieces, self.method, self.observer = pieces, method, observer
        self.text = self.reason = ""

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
        except QuickbeamError:
            self.reason = "error"
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
        n, counts = len(self.text.split()), {"ngram": SourceCount(8, 3)}
        statistics = Statistics(n, max(n - 1, 1) // 2 + 1, 0.5, 0.25, sources=counts)
        answer = (self.text, list(range(n)), self.reason, statistics)
        return Completion(*answer, "fake", self.method, [Logprob(0, -0.5, {})])


class LLM:
    def __init__(self, model, method, **options):
        CALLS.append(("load", (model, method, options), SamplingParams()))
        self.name, self.method, self.kernels = model or "the default", method, "scripted"
        self.learning = None
        self.model = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        spell = lambda ids, **_: "".join(f"<{i}>" for i in ids)  # noqa: E731
        self.tokenizer = SimpleNamespace(decode=spell)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def describe(self):
        return self.kernels

    def stream(self, prompt, params, *, observer=None):
        CALLS.append(("raw", prompt, params))
        return Stream(script(prompt), self.method, observer)

    def chat_stream(self, messages, params, *, method=None, observer=None):
        CALLS.append(("chat", [(one["role"], one["content"]) for one in messages], params))
        return Stream(script(messages[-1]["content"]), method or self.method, observer)


if __name__ == "__main__":
    sys.modules["quickbeam.llm"] = sys.modules["__main__"]
    from quickbeam.cli import main

    main()
