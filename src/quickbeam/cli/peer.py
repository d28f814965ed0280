"""`quickbeam generate` with a peer as its method, such as `hf-assisted`.

The answer of transformers' own `generate` is shown in the same form as ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING

from quickbeam.bench.methods import PEERS, load_runners, parse_methods
from quickbeam.cli.common import progress_bar
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.engine.result import Completion

# the parameters that a peer takes
LAW = ("max_tokens", "temperature", "top_k", "top_p", "seed")
KERNELS = "PyTorch's (transformers as it comes)"


def answer(
    method: str,
    prompt: str | list[dict[str, str]],
    params: SamplingParams,
    model: str | None,
    drafter: str | None,
    dtype: str,
    device: str | None,
    ours: Mapping[str, object],
) -> Completion:
    """Return a peer's answer to raw text or to a conversation.

    `ours` holds options that only quickbeam's own methods have. Raises `InvalidInput` if any of
    them is given, or a parameter that a peer doesn't take. Also raises what `load_runners` raises.
    """
    plain = SamplingParams()
    told = {
        f"--{name.replace('_', '-')}": value for name, value in ours.items() if value is not None
    }
    told |= {
        f"--{name.replace('_', '-')}": value
        for name, value in vars(params).items()
        if name not in LAW and value != getattr(plain, name)
    }
    if told:
        raise InvalidInput(
            f"{next(iter(told))}: {method} is {PEERS[method]}, which takes no such "
            "option here; leave it out"
        )
    items = parse_methods(method, drafter=drafter, model=model)
    with progress_bar(f"loading {model or DEFAULT}") as report, redirect_stderr(StringIO()):
        runners, name = load_runners(items, model, dtype, device, drafter, report)
    from quickbeam.bench.peers import Peer
    from quickbeam.engine.result import Completion, Statistics

    runner = runners[method]
    assert isinstance(runner, Peer)
    ids = (
        list(runner.loaded.tokenizer(prompt)["input_ids"])
        if isinstance(prompt, str)
        else runner.encode(prompt)
    )
    found = runner.answer(ids, params)
    statistics = Statistics(len(found.token_ids), found.steps, found.seconds)
    ended = bool(found.token_ids) and found.token_ids[-1] in runner.stops
    return Completion(
        found.text,
        found.token_ids,
        "stop" if ended else "length",
        statistics,
        name,
        method,
        seed=None if params.greedy else params.seed,
    )
