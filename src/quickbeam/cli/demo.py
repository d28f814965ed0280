"""`quickbeam demo`: the same prompts with plain and speculative decoding, side by side."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from quickbeam.cli import options
from quickbeam.cli.common import load, stderr
from quickbeam.engine.result import Completion
from quickbeam.params import SamplingParams


@dataclass(frozen=True)
class Example:
    """A question."""

    title: str
    prompt: str


EDIT = """Rename the function area to rectangle_area in this code. Print the whole code.

```python
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height

def total_area(rectangles):
    total = 0
    for width, height in rectangles:
        total = total + area(width, height)
    return total

print(area(3, 4))
print(total_area([(3, 4), (5, 6)]))
```"""
EXAMPLES = (
    Example("an edit, whose answer repeats the question", EDIT),
    Example("an open question", "Why is the sky blue? Explain it in a few sentences."),
)


def demo(
    model: options.Model = None,
    method: options.Method = "auto",
    drafter: options.Drafter = None,
    max_tokens: options.MaxTokens = 160,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    device: options.DeviceOption = None,
) -> None:
    """Answer two prompts plainly and speculatively, and show both answers with their speed."""
    params = SamplingParams(max_tokens=max_tokens)
    llm = load(model, method, dtype, device, drafter=drafter)
    out, progress = Console(highlight=False), stderr()

    def answer(name: str, prompt: str, params: SamplingParams) -> Completion:
        with progress.status(f"answering with {name}") if progress.is_terminal else ExitStack():
            return llm.chat([{"role": "user", "content": prompt}], params, method=name)

    for name in ("ar", method):
        answer(name, "Say hello.", SamplingParams(max_tokens=min(16, max_tokens)))  # warm-up
    for example in EXAMPLES:
        rounds = [[answer(one, example.prompt, params) for one in ("ar", method)] for _ in range(2)]
        # Of the two rounds the faster one counts: a machine has other things to do as well.
        plain, fast = (min(answers, key=lambda completion: completion.statistics.seconds) for answers in zip(*rounds, strict=True))
        out.rule(example.title)
        out.print(Text(example.prompt, style="dim"))
        side_by_side = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
        side_by_side.add_row(panel(plain), panel(fast))
        out.print(side_by_side)
        out.print(verdict(plain, fast))


def panel(completion: Completion) -> Panel:
    s = completion.statistics
    speed = f"{s.seconds:.2f} s · {s.tokens_per_second:.1f} tokens/s · MAT {s.mean_accepted_tokens:.2f}"
    return Panel(Text(completion.text), title=completion.method, subtitle=speed)


def verdict(plain: Completion, fast: Completion) -> str:
    """Speed-up (decoding only) and whether the two answers are the same, token for token."""
    before, after = plain.statistics, fast.statistics
    same = "the same tokens" if plain.token_ids == fast.token_ids else "the tokens differ"
    if not before.seconds or not after.seconds:
        return f"{same}; too short to time"
    return f"{same}, {before.seconds / after.seconds:.2f} times as fast"
