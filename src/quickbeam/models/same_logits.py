"""Checks at load that a model gives the logits that transformers' own forward gives.

Modelling code may count positions itself, hide tokens by a mask that it gives to nobody, or keep
more than one key and value of a token. Nothing of this shows in a configuration. So a short text is
run both ways before anyone relies on the model: through transformers alone, and in two chunks and
trees of drafts.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.models.base import Batch, Chain, Draft, Model
from quickbeam.models.hf_attention import INSTEAD
from quickbeam.tree import TokenTree

PATH = 8  # tokens whose logits are compared
SHORT, LONG = 12, 300  # tokens before them: SHORT, or a window and SHORT more, but at most LONG
# The largest relative error that counts as rounding (`relative_error`). Models of 24 to 30 layers
# measured up to 0.028, 0.004 and 0.000003.
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.01}
TOLERANCE_FLOAT32 = 1e-4
# what code of models raises where it doesn't run on a text alone
FAILURES = (ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError)


def expect(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[list[int], torch.Tensor]:
    """Return a text, and the logits after its last `PATH` tokens by transformers' own forward.

    It runs before quickbeam takes `model` over. Raises `InvalidInput` where it fails.
    """
    window = getattr(config, "sliding_window", None)
    length = SHORT + window if isinstance(window, int) and window <= LONG - SHORT else SHORT
    room = getattr(config, "max_position_embeddings", None) or LONG
    length = max(2, min(length, int(room) - PATH - 8)) + PATH
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = [(7919 * i + 13) % min(vocab, config.vocab_size) for i in range(length)]
    wanted = torch.arange(length - PATH, length, device=model.device)
    text = torch.tensor([ids], device=model.device)
    try:
        with torch.inference_mode():
            out = model(input_ids=text, use_cache=False, logits_to_keep=wanted)
        return ids, out.logits[0, -PATH:].clone()
    except torch.OutOfMemoryError:
        raise
    except (*FAILURES, RuntimeError) as error:
        raise _refusal(model, f"transformers' own forward fails on a text ({error})") from error


def refuse_other_logits(
    model: Model, ids: list[int], expected: torch.Tensor, plain: PreTrainedModel
) -> None:
    """Raise `InvalidInput` where `model` gives other logits after `ids` than are `expected`.

    `plain`: the model of transformers that `model` runs.
    """
    if not bool(expected.isfinite().all()):  # answers end with an error
        return
    try:
        off = relative_error(_run(model, ids), expected)
    except torch.OutOfMemoryError:
        raise
    except (*FAILURES, RuntimeError) as error:
        raise _refusal(plain, f"it runs in transformers alone ({error})") from error
    if off > TOLERANCE.get(plain.dtype, TOLERANCE_FLOAT32):
        raise _refusal(
            plain,
            f"on a text of {len(ids)} tokens, its logits are {off:.1%} off those of transformers: "
            "it counts positions itself, or does more with earlier tokens than attend to them "
            "through transformers' attention interface",
        )


def _refusal(plain: PreTrainedModel, reason: str) -> InvalidInput:
    return InvalidInput(f"{type(plain).__name__} can't be used: {reason}. {INSTEAD}")


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median over rows of the error of logits `[n, vocab]`, by their spread.

    1 is an error as large as the logits' own differences. It is the median, since the rounding of a
    few tokens may choose other experts.
    """
    got, expected = got.float(), expected.float().to(got.device)
    got, expected = got - got.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).median())


def _run(model: Model, ids: list[int]) -> torch.Tensor:
    """Return the logits by quickbeam: two chunks, then two trees with a wrong branch at each
    node."""
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
