"""What weights of fewer bits cost and save.

One model is measured with each kind of weights, on a text and on questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch

from quickbeam.bench.passes import Figures, Pass, comb_pass
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.target.batch import Batch, Draft
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree

TEXT = "text.txt"  # our own text, inside the package
ROWS = 64  # tokens of the text in one pass
METHODS = ("ar", "auto")


@dataclass
class Row:
    """The figures of one kind of weights.

    - `pass_ms`: milliseconds of a pass, by width.
    - `stays`: the share of the text's places where the likeliest next token is that of the first
      kind.
    - `tokens_per_second`: by method.
    - `identical`: how many drafted answers equal the plain ones.
    - `bytes`: what the products of a pass read.
    """

    pass_ms: dict[int, float] = field(default_factory=dict)
    perplexity: float = 0.0
    stays: float = 1.0
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    identical: int = 0
    prompts: int = 0
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON record of the row."""
        return vars(self)


def own_text() -> str:
    return resources.files(__package__).joinpath(TEXT).read_text(encoding="utf-8")


@torch.inference_mode()
def read_text(llm: LLM, text: str) -> tuple[float, torch.Tensor]:
    """Return the perplexity of a text, and the likeliest token after each of its tokens.

    The likeliest tokens are `[n]` int64. The text is cut at the model's context length.
    """
    ids = list(llm.tokenizer(text)["input_ids"])[: llm.model.context_length]
    target, rows = Target(llm.model), list[torch.Tensor]()
    for begin in range(0, len(ids), ROWS):
        tree, part = TokenTree(ids[begin]), ids[begin : begin + ROWS]
        for token in part[1:]:
            tree.add(len(tree) - 1, token, "text")
        (passed,) = llm.model.forward(Batch([Draft(target.store, tree)]))
        rows.append(passed.logits.float().clone())
        target.store.commit(range(len(part)))
    target.store.release()
    logits = torch.cat(rows)
    loss = torch.nn.functional.cross_entropy(
        logits[:-1], torch.tensor(ids[1:], device=logits.device)
    )
    return float(loss.exp()), logits.argmax(-1)


def answer(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, row: Row) -> None:
    """Answer the prompts one at a time with each of `METHODS`, plain and drafted, and fill `row`.

    Fills in each method's tokens a second, and how many answers are the same with both methods. The
    first token of an answer counts; prefill's time does not.
    """
    expected, row.prompts = list[list[int]](), len(prompts)
    for method in METHODS:
        tokens, seconds = 0, 0.0
        llm.reset()
        # what is measured at first use is not counted
        llm.generate(list(prompts[0]), params, method=method)
        for number, ids in enumerate(prompts):
            llm.reset()
            found = llm.generate(list(ids), params, method=method)
            tokens, seconds = (
                tokens + found.statistics.new_tokens,
                seconds + found.statistics.seconds,
            )
            if method == METHODS[0]:
                expected.append(found.token_ids)
            else:
                row.identical += found.token_ids == expected[number]
        row.tokens_per_second[method] = tokens / seconds if seconds else 0.0


def pass_of(llm: LLM, context: int) -> Pass:
    """Return a pass of the model after `context` random tokens."""
    target = Target(llm.model)
    ids = torch.randint(
        llm.model.vocab_size, (context,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    target.prefill(ids)
    return comb_pass(target)


def take_passes(rows: Mapping[str, Row], figures: Figures, context: int) -> None:
    for name, row in rows.items():
        row.pass_ms = figures[name][context]


def compare(rows: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    """Return each kind's figures over the first kind's: perplexity, passes, tokens a second.

    `pass` holds by width how many times faster than the first kind's a pass is.
    """
    first = next(iter(rows.values()))
    return {
        name: {
            "perplexity": row.perplexity / first.perplexity,
            "pass": {width: first.pass_ms[width] / ms for width, ms in row.pass_ms.items()},
            "tokens_per_second": {
                method: rate / first.tokens_per_second[method]
                for method, rate in row.tokens_per_second.items()
            },
        }
        for name, row in rows.items()
    }
