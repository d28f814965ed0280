"""From raw logits to the distribution over the next token, by a request's parameters.

This module knows nothing of trees. A node of a tree is given by its logits and its path.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.noise import Noise
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.grammar.masks import Masks

MAX_BAD_TOKENS = 256  # tokens of a bad word; the work grows with the square of it


class Bans:
    """The tokens that may not come next.

    Banned are the ids that would end the answer among its first `min_tokens` tokens, and the last
    tokens of bad words whose other tokens stand at the end of the output. A bad word that begins in
    the prompt is not noticed.
    """

    def __init__(
        self, min_tokens: int, stop_ids: Collection[int], bad: Collection[Sequence[int]]
    ) -> None:
        self._min_tokens = min_tokens
        self._stop_ids = list(stop_ids)
        self._last: dict[tuple[int, ...], list[int]] = {}  # last tokens by those before them
        for *before, last in bad:
            self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})
        self._output: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Record tokens that became output."""
        self._output += tokens

    def after(self, path: Sequence[int]) -> list[int]:
        """Return the ids that are banned after output and `path`, in no particular order."""
        length = len(self._output) + len(path)
        banned = [*self._stop_ids] if length < self._min_tokens else []
        text = (*self._output[-MAX_BAD_TOKENS:], *path)
        for before in self._lengths:
            if before <= len(text):
                banned += self._last.get(text[len(text) - before :], ())
        return banned


class TokenCounts:
    """Count which tokens a sequence holds, and how often its output holds each.

    The work in Python grows with the number of new tokens, not with the length of the context.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._slot = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = torch.tensor(list(self._slot), dtype=torch.long)
        self._counts = torch.zeros(len(self._slot))

    def extend(self, tokens: Sequence[int]) -> None:
        """Count tokens that became output."""
        self._tokens, self._counts = self.along(tokens)
        for token in tokens:
            self._slot.setdefault(token, len(self._slot))

    def along(self, path: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct tokens of prompt, output and `path`, and their counts.

        The first tensor `[m]` holds the token ids. The second `[m]` (float) says how often output
        and `path` hold each; 0 means that only the prompt holds it.
        """
        new = [token for token in dict.fromkeys(path) if token not in self._slot]
        new_slot = {token: slot for slot, token in enumerate(new, len(self._slot))}
        tokens = torch.cat([self._tokens, torch.tensor(new, dtype=torch.long)])
        counts = torch.cat([self._counts, torch.zeros(len(new))])
        slots = torch.tensor(
            [new_slot[token] if token in new_slot else self._slot[token] for token in path],
            dtype=torch.long,
        )
        return tokens, counts.index_add_(0, slots, torch.ones(len(path)))


class Sampler:
    """Turns raw logits into one request's distribution over the next token, at any node of a tree.

    Call `extend` with every emitted token, the next root included. The `path` of a node is the
    tokens below the root, down to the node itself. It is empty for the root.

    - `vocab_size`: the width of the logits.
    - `stop_ids`: the ids that end the answer; they are banned before `min_tokens`.
    - `bad`: the token sequences of `bad_words`, as `bad_word_ids` gives them.
    - `grammar`: the masks of the parameters' grammar.

    Ids outside the vocabulary are never generated and need no ban.

    Raises `InvalidInput` for a `logit_bias` or `stop_token_ids` outside the vocabulary and for bans
    that leave no token.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Iterable[int],
        vocab_size: int,
        *,
        stop_ids: Collection[int] = (),
        bad: Sequence[Sequence[int]] = (),
        grammar: Masks | None = None,
    ) -> None:
        for name in ("logit_bias", "stop_token_ids"):
            outside = [token for token in getattr(params, name) if not 0 <= token < vocab_size]
            if outside:
                raise InvalidInput(
                    f"{name}={outside[0]}: must be ids from 0 to "
                    f"{vocab_size - 1}, this model's vocabulary"
                )
        self.params = params
        self.vocab_size = vocab_size
        self.grammar = grammar
        self._bans = Bans(
            params.min_tokens,
            {token for token in stop_ids if 0 <= token < vocab_size},
            {tuple(word) for word in bad if all(0 <= token < vocab_size for token in word)},
        )
        banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
        if len(banned.union(self._bans.after(()))) >= vocab_size:
            raise InvalidInput(
                f"min_tokens, bad_words and logit_bias ban all {vocab_size} tokens of this model: "
                "must leave one"
            )
        self._counts = TokenCounts(prompt if params.penalises else ())
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def extend(self, tokens: Sequence[int]) -> None:
        """Record emitted tokens."""
        if self.params.penalises:
            self._counts.extend(tokens)
        self._bans.extend(tokens)
        if self.grammar is not None:
            self.grammar.extend(tokens)

    def process(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """Return float32 logits `[vocab]` of a node with bias, penalties and bans applied.

        `logits`: raw `[vocab]`, unchanged. Raises `DeadEnd` where grammar and bans leave no token.
        """
        params = self.params
        if not params.adjusts_logits:
            return logits.float()
        scores = logits.to(torch.float32, copy=True)
        if params.logit_bias:
            self._biased = self._biased.to(scores.device)
            self._bias = self._bias.to(scores.device)
            scores[self._biased] += self._bias
        if params.penalises:
            self._penalise(scores, path)
        if banned := self._bans.after(path):
            scores[torch.tensor(banned, device=scores.device)] = -math.inf
        return scores if self.grammar is None else self.grammar.ban(scores, path)

    def _penalise(self, scores: torch.Tensor, path: Sequence[int]) -> None:
        """Apply the penalties to the scores `[vocab]` of tokens that the text and `path` hold."""
        params = self.params
        tokens, counts = self._counts.along(path)
        tokens = tokens.to(scores.device)
        counts = counts.to(scores.device)
        penalised = scores[tokens]
        repetition = params.repetition_penalty
        if repetition != 1:
            rarer = penalised / repetition
            penalised = torch.where(penalised > 0, rarer, penalised * repetition)
        penalised = penalised - params.presence_penalty * (counts > 0)
        scores[tokens] = penalised - params.frequency_penalty * counts

    def best(self, logits: torch.Tensor, path: Sequence[int] = ()) -> int:
        """Return the most probable token for raw logits `[vocab]`: what temperature 0 emits.

        Raises `QuickbeamError` for NaN logits.
        """
        return most_probable(self.process(logits, path))

    def emitted(
        self, logits: torch.Tensor, noise: Noise, position: int, path: Sequence[int] = ()
    ) -> int:
        """Return the token at `position`, which follows a node with raw logits `[vocab]`.

        The noise of the position chooses the token, which is a draw from the distribution that
        `probs` returns. Raises `QuickbeamError` for NaN logits.
        """
        if self.params.filters:
            scores = self.probs(logits, path).log_()
            scale = 1.0
        else:
            scores = self.process(logits, path)
            scale = 1 / max(self.params.temperature, 1e-30)
        token = noise.largest(scores.detach().cpu(), position, scale)
        _require_finite(token >= 0)
        return token

    def probs(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """Return the distribution `[vocab]` (float32) over the next token for raw logits `[vocab]`.

        At temperature 0 the best token has probability 1. Raises `QuickbeamError` for NaN logits.
        """
        params = self.params
        scores = self.process(logits, path)
        if params.greedy:
            best = torch.tensor([most_probable(scores)], device=scores.device)
            return torch.zeros_like(scores).index_fill_(0, best, 1.0)
        peak = scores.max()
        _require_finite(bool(peak.isfinite()))
        if 0 < params.top_k < len(scores):
            lowest = scores.topk(params.top_k).values[-1]
            scores = scores.masked_fill(scores < lowest, -math.inf)
        # the largest score is 0, so nothing overflows; the floor keeps 1/temperature finite
        probs = ((scores - peak) / max(params.temperature, 1e-30)).softmax(0)
        if params.top_p < 1:
            probs = nucleus(probs, params.top_p, params.top_k)
        if params.min_p > 0:
            probs = probs.masked_fill(probs < params.min_p * probs.max(), 0.0)
        if params.top_p < 1 or params.min_p > 0:
            probs = probs / probs.sum()
        return probs


def bad_word_ids(tokenizer: Any, words: Iterable[str]) -> list[list[int]]:
    """Return the token sequences of bad words for a `Sampler`.

    Each word is split by `tokenizer` without and with a leading space. A sequence that ends with
    another one is left out, since the shorter one bans as much. The same letters split into other
    tokens are not noticed. Raises `InvalidInput` for a word that has no tokens, or more than
    `MAX_BAD_TOKENS`.
    """
    unique: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            ids = tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise InvalidInput(
                    f"bad_words: {word!r} has no tokens in this model's vocabulary: leave it out"
                )
            if len(ids) > MAX_BAD_TOKENS:
                raise InvalidInput(
                    f"bad_words: {word[:20]!r}… has {len(ids)} tokens: a word may have at most "
                    f"{MAX_BAD_TOKENS}"
                )
            unique[ids] = None
    banned = list[list[int]]()
    for ids in unique:
        ends_with_another = any(ids[i:] in unique for i in range(1, len(ids)))
        if not ends_with_another:
            banned.append(list(ids))
    return banned


def nucleus(probs: torch.Tensor, top_p: float, support: int = 0) -> torch.Tensor:
    """Zero all of `probs` `[vocab]` but the fewest most probable tokens whose mass reaches `top_p`.

    At least one token stays. The result is not renormalised. Only as many tokens are sorted as
    needed; `support` says how many tokens have probability, or 0 where that is not known.
    """
    size = min(support or 1024, len(probs))
    while True:
        top = probs.topk(size)
        mass = top.values.cumsum(0, dtype=torch.float64)
        if size == len(probs) or mass[-1] >= top_p:
            break
        size = min(8 * size, len(probs))
    kept = top.indices[mass - top.values < top_p]
    return torch.zeros_like(probs).index_copy_(0, kept, probs[kept])


def most_probable(scores: torch.Tensor) -> int:
    """Return the argmax of `[vocab]` scores, the lowest id in a tie.

    Raises `QuickbeamError` for a NaN or infinite maximum.
    """
    if scores.device.type == "cpu":  # NumPy's is vectorised, ten times faster than torch's
        best = int(scores.detach().numpy().argmax())
    else:
        best = int(scores.max(0).indices)
    _require_finite(bool(scores[best].isfinite()))
    return best


def draw(probs: torch.Tensor, generator: torch.Generator) -> int:
    """Return a token drawn from `probs` `[vocab]`, which need not be normalised.

    One uniform number is taken from `generator`, which may be on another device than `probs`.
    """
    mass = probs.cumsum(0, dtype=torch.float64)
    drawn_mass = mass[-1:] * uniform(generator)
    return int(torch.searchsorted(mass, drawn_mass, right=True))


def uniform(generator: torch.Generator) -> float:
    """Return a uniform random number in [0, 1)."""
    return torch.rand((), dtype=torch.float64, generator=generator, device=generator.device).item()


def logprobs(logits: torch.Tensor, token: int, k: int) -> tuple[float, dict[int, float]]:
    """Return the log-probability of `token` and those of the `k` most probable tokens, best first.

    Log-probabilities are of the model's own distribution: the softmax of the raw `logits`
    `[vocab]`. Raises `QuickbeamError` for NaN or infinite logits.
    """
    log_probs = logits.float().log_softmax(0)
    top = log_probs.topk(min(k, len(log_probs)))
    log_prob = float(log_probs[token])
    _require_finite(not math.isnan(log_prob))
    most_probable_tokens = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return log_prob, dict(most_probable_tokens)


def _require_finite(finite: bool) -> None:
    if not finite:
        raise QuickbeamError(
            "the model returned NaN or infinite logits: try another dtype (--dtype float32), and "
            "check that its weights are whole"
        )
