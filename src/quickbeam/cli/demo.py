"""`quickbeam demo`: plain and speculative decoding of the same prompts, side by side."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from quickbeam.cli.common import SOURCES, LoadOptions, check_output, harmless, save, stderr
from quickbeam.hub import DEFAULT
from quickbeam.machine import cpu_name
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.engine.result import Completion
    from quickbeam.engine.trace import StepRecord
    from quickbeam.llm import LLM

# columns of the picture: at this width a README shows its text no smaller than code
WIDTH = 104
# of accepted tokens, by the source that drafted them
COLOURS = {
    "ngram": "bright_cyan",
    "drafter": "bright_green",
    "last_logits": "bright_magenta",
    "recycling": "bright_yellow",
    "table": "bright_blue",
}
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # a picture would fetch these

EDIT = """Rename the class Stack to Pile.

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def size(self):
        return len(self.items)

    def is_empty(self):
        return len(self.items) == 0

    def peek(self):
        return self.items[-1]
```"""
EXAMPLES = {
    "an edit, whose answer repeats the question": EDIT,
    "an open question": "Why is the sky blue? Explain it in a few sentences.",
}
WORDS = "ar: plain decoding, one token a step · MAT: mean accepted tokens a step"


class SourcedAnswer(NamedTuple):
    """A completion, and the source that drafted each of its tokens; None for the target itself."""

    completion: Completion
    sources: list[str | None]


@dataclass(frozen=True)
class DemoOptions:
    """What is shown."""

    max_tokens: int = field(default=160, metadata={"min": 1, "common": True})
    """Longest answer, in tokens."""
    svg: Path | None = field(default=None, metadata={"metavar": "OUT.svg", "common": True})
    """File that also gets what is shown, as a picture."""


def demo(loading: LoadOptions, options: DemoOptions) -> None:
    """Answer two prompts without and with drafts, side by side.

    Both answers are shown with their speed.
    """
    if options.svg is not None:
        check_output("--svg", options.svg)
    without_memory = replace(
        loading, memory_of_answers="0", keep=None
    )  # both answer the same prompts
    params = SamplingParams(max_tokens=options.max_tokens)
    llm = without_memory.load()
    methods = list(dict.fromkeys(("ar", loading.method)))
    has_picture = options.svg is not None
    out = Console(record=has_picture, width=WIDTH if has_picture else None, highlight=False)
    for name in methods:  # measures costs and fills caches: not counted
        answer(llm, name, EDIT, params, "warming up")
    used = set[str | None]()
    for title, prompt in EXAMPLES.items():
        # The faster of two rounds counts, because other programs may slow one of them down.
        rounds = [[answer(llm, method, prompt, params) for method in methods] for _ in range(2)]
        best = [min(answers, key=seconds_of) for answers in zip(*rounds, strict=True)]
        plain = best[0]
        fast = best[-1]
        used |= set(fast.sources)
        columns = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
        columns.add_row(panel(plain, llm.tokenizer), panel(fast, llm.tokenizer))
        out.print(Rule(title, style="dim"), Text(prompt.splitlines()[0], style="dim"), columns)
        out.print(Text(verdict(plain.completion, fast.completion), style="bold"), "")
    out.print(legend(used), Text(WORDS, style="dim"), sep="\n")
    name = Path(loading.source or DEFAULT).name
    out.print(Text(f"{name} on {cpu_name()}, kernels: {llm.kernels}", style="dim"))
    if options.svg is not None:
        svg = out.export_svg(title="quickbeam demo", unique_id="quickbeam-demo")
        save("--svg", options.svg, FONTS.sub("", svg))


def answer(
    llm: LLM, method: str, prompt: str, params: SamplingParams, doing: str = "answering"
) -> SourcedAnswer:
    steps: list[StepRecord] = []
    messages = [{"role": "user", "content": prompt}]
    with stderr().status(f"{doing} with {method}"):
        stream = llm.chat_stream(messages, params, method=method, observer=steps.append)
        completion = stream.result()
    return SourcedAnswer(completion, sources(len(completion.token_ids), steps))


def seconds_of(answer: SourcedAnswer) -> float:
    return answer.completion.statistics.seconds


def sources(tokens: int, steps: list[StepRecord]) -> list[str | None]:
    """Return the source that drafted each of an answer's `tokens` tokens."""
    drafters: list[str | None] = []
    for step in steps:
        drafted = [step.tree.source[node] for node in step.path[1:]]
        drafters += [*drafted, None][: len(step.emitted)]
    return [None] * (tokens - len(drafters)) + drafters


def panel(answer: SourcedAnswer, tokenizer: Any) -> Panel:
    """Return an answer's text, its tokens in the colours of what drafted them, and its speed."""
    completion = answer.completion
    s = completion.statistics
    speed = f"{s.seconds:.2f} s · {s.tokens_per_second:.1f} tokens/s"
    speed += f" · MAT {s.mean_accepted_tokens:.2f}"
    text = Text(overflow="fold")
    start = 0
    for i, source in enumerate(answer.sources, 1):
        end = len(tokenizer.decode(completion.token_ids[:i], skip_special_tokens=True))
        end = max(start, end if i < len(answer.sources) else len(completion.text))
        text.append(harmless(completion.text[start:end]), style=COLOURS.get(source or "", ""))
        start = end
    return Panel(text, title=completion.method, subtitle=speed, border_style="dim")


def legend(used: Collection[str | None]) -> Text:
    """Return which source each colour stands for, of those `used`, in a line."""
    text = Text("drafted and accepted: ", style="dim")
    for source, colour in COLOURS.items():
        if source in used:
            text.append(f"{SOURCES[source]} ", style=f"not dim {colour}").append("· ")
    return text.append("the rest is the model's own")


def verdict(plain: Completion, fast: Completion) -> str:
    """Return the speed-up of decoding, and whether both answers have the same tokens, in words."""
    before, after = plain.statistics, fast.statistics
    same = "the same tokens" if plain.token_ids == fast.token_ids else "the tokens differ"
    if not before.seconds or not after.seconds:
        return f"{same}; too short to time"
    return f"{same}, {before.seconds / after.seconds:.2f} times as fast"
