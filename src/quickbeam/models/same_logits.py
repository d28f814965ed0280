"""Checks at load that a model gives the logits that transformers' own forward gives.

Modelling code may count positions itself, hide tokens by a mask that it gives to nobody, or keep
more than one key and value of a token. Nothing of this shows in a configuration. So a short text is
run both ways before anyone relies on the model: through transformers alone, and in two chunks and
trees of drafts.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.models.base import Batch, Chain, Draft, Passed
from quickbeam.models.hf_attention import INSTEAD
from quickbeam.models.kv import Pool
from quickbeam.tree import TokenTree

PATH = 8  # tokens whose logits are compared
SHORT, LONG = 12, 300  # tokens before them: SHORT, or a window and SHORT more, but at most LONG
# The largest relative error that counts as rounding (`relative_error`). Models of 24 to 30 layers
# measured up to 0.028, 0.004 and 0.000003.
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.01}
TOLERANCE_FLOAT32 = 1e-4
# a larger error is rounding, too, up to so many times that of another kernel of transformers
KERNELS = 3.0
# what code of models raises where it doesn't run on a text alone
FAILURES = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
)


class Runs(Protocol):
    """What the check needs of quickbeam's model."""

    pool: Pool

    def forward(self, batch: Batch) -> list[Passed]: ...


class Expected(NamedTuple):
    """A text, and the logits after its last `PATH` tokens by transformers, `[PATH, vocab]`."""

    ids: list[int]
    logits: torch.Tensor
    attention: str  # the attention of transformers that was used


def expect(model: PreTrainedModel, config: PreTrainedConfig) -> Expected:
    """Run the text through transformers' own forward, before quickbeam takes `model` over."""
    window = getattr(config, "sliding_window", None)
    length = SHORT + window if isinstance(window, int) and window <= LONG - SHORT else SHORT
    room = getattr(config, "max_position_embeddings", None) or LONG
    length = max(2, min(length, int(room) - PATH - 8)) + PATH
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = [(7919 * i + 13) % min(vocab, config.vocab_size) for i in range(length)]
    try:
        logits = _plain(model, ids)
        if bool(logits.isfinite().all()):  # answers end with an error otherwise
            _check_positions(model, ids[:4])
    except (InvalidInput, torch.OutOfMemoryError):
        raise
    except FAILURES as error:
        raise _refusal(model, f"transformers' own forward fails on a text ({error})") from error
    return Expected(ids, logits, model.config._attn_implementation)


def _check_positions(model: PreTrainedModel, ids: list[int]) -> None:
    """Raise `InvalidInput` for a model that can't be told where a token stands.

    Results are compared exactly, since they are of the same operations on the same shapes.
    """
    positions = torch.arange(len(ids))
    given = _plain(model, ids, positions)
    # few models take them without naming them
    named = "position_ids" in inspect.signature(model.forward).parameters
    if not named and torch.equal(given, _plain(model, ids, 2 * positions)):
        raise _refusal(
            model, "it counts positions itself, and in a draft tree several tokens share one"
        )
    if not torch.equal(given, _plain(model, ids)):
        raise _refusal(model, "it doesn't count positions from 0")


def refuse_other_logits(model: Runs, expected: Expected, plain: PreTrainedModel) -> None:
    """Raise `InvalidInput` where `model` gives other logits than transformers did.

    `plain`: the model of transformers that `model` runs.
    """
    if not bool(expected.logits.isfinite().all()):
        return
    try:
        got = _run(model, expected.ids)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise _refusal(plain, f"it runs in transformers alone ({error})") from error
    off = relative_error(got, expected.logits)
    if off > TOLERANCE.get(plain.dtype, TOLERANCE_FLOAT32) and off > KERNELS * _rounding(
        plain, expected
    ):
        raise _refusal(
            plain,
            f"on a text of {len(expected.ids)} tokens, its logits are {off:.1%} off those of "
            "transformers: it does more with earlier tokens than attend to them through "
            "transformers' attention interface",
        )


def _refusal(plain: PreTrainedModel, reason: str) -> InvalidInput:
    return InvalidInput(f"{type(plain).__name__} can't be used: {reason}. {INSTEAD}")


def _rounding(plain: PreTrainedModel, expected: Expected) -> float:
    """Return the error of transformers' own logits with another of its attention kernels."""
    installed, other = (
        plain.config._attn_implementation,
        "sdpa" if expected.attention == "eager" else "eager",
    )
    try:
        plain.set_attn_implementation(other)
        return relative_error(_plain(plain, expected.ids), expected.logits)
    except FAILURES:
        return 0.0  # it has one kind
    finally:
        plain.set_attn_implementation(installed)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median over rows of the error of logits `[n, vocab]`, by their spread.

    1 is an error as large as the logits' own differences. It is the median, since the rounding of a
    few tokens may choose other experts.
    """
    got, expected = got.float(), expected.float().to(got.device)
    got, expected = got - got.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).median())


def _plain(model: PreTrainedModel, ids: list[int], positions: Any = None) -> torch.Tensor:
    """Return the logits after the last `PATH` of `ids` by transformers."""
    keep = torch.arange(max(0, len(ids) - PATH), len(ids), device=model.device)
    more = {} if positions is None else {"position_ids": positions[None].to(model.device)}
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([ids], device=model.device),
            use_cache=False,
            logits_to_keep=keep,
            **more,
        )
    logits: torch.Tensor = out.logits[0]
    return logits[-PATH:].clone()


def _run(model: Runs, ids: list[int]) -> torch.Tensor:
    """Return the same by quickbeam: two chunks, then two trees with a wrong branch at each node."""
    cache, prefix = model.pool.new(), len(ids) - PATH
    half, rows = prefix // 2, []
    for chunk in (ids[:half], ids[half:prefix]):
        model.forward(Batch([Chain(cache, chunk)]))
        cache.commit(range(len(chunk)))
    for tokens in (ids[prefix : prefix + PATH // 2], ids[prefix + PATH // 2 :]):
        tree, path = TokenTree(tokens[0]), [0]
        for token, wrong in zip(tokens[1:], tokens[:-1], strict=True):
            if wrong != token:
                tree.add(path[-1], wrong, "probe")
            path.append(tree.add(path[-1], token, "probe"))
        (passed,) = model.forward(Batch([Draft(cache, tree)]))
        rows.append(passed.logits[path].clone())
        cache.commit(path)
    cache.release()
    return torch.cat(rows)
