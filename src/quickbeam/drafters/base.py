"""The contracts of sources and drafters: what they are given and what they return."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quickbeam.noise import Noise, Row
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

if TYPE_CHECKING:
    from quickbeam.drafters.ngram_table import NgramTable
    from quickbeam.drafters.predicted_text import PredictedText
    from quickbeam.drafters.shortlist.shortlist import Shortlist, ShortlistState
    from quickbeam.drafters.successors import Successors
    from quickbeam.drafters.texts import Texts
    from quickbeam.grammar.masks import Masks
    from quickbeam.models.base import Model
    from quickbeam.models.cache.kv import Page, Pool, SequenceCache
    from quickbeam.models.native.library import Kernels

logger = logging.getLogger(__name__)
FINISHED_TOKENS = 4096  # of finished texts, which a shortlist begins with
GRAMMAR = "grammar"  # the name of the source of forced tokens: the only ones a grammar allows


@dataclass
class Context:
    """What is known of one sequence before a step: the committed tokens and the request's settings.

    - `ids`: prompt and output so far. The last one becomes the root of the next tree.
    - `logits`: raw `[vocab]`, that the last id was chosen from, on the target's device.
    - `temperature`: the request's; 0 is greedy.
    - `generator`: draws children, on the CPU, where drafts may not look at the noise.
    - `states`: what each source keeps of this sequence, by the source's name.
    - `node_costs`: where the budget is measured (see `Method.uses_cost_model`), entry n is the cost
      in tokens of one more node in a tree of n nodes. Entries never fall.
    - `explore`: whether to make the drafter's first call in any case, to see what it brings.
    - `noise`: the noise that the answer is drawn with, where drafts may look at it (`noise.py`).
    - `filters`: the request's sampling parameters, where they rule out unlikely tokens.
    - `grammar`: the grammar that the answer has to follow, if there is one.
    - `texts`: the finished texts that may be drafted from, if any are kept.
    - `table`: n-grams of text that the model wrote before, if there are any.
    - `prediction`: the text that the request predicts, if it predicts one.
    - `skeletons`: the fixed parts of the tool calls that the answer may hold, if any are known.
    - `cache`: the target's keys and values of all ids but the last, where a target reads them.
    - `tenant`: whose request it is; None for a program's own.
    - `kernels`: the native kernels, where this machine has them.
    """

    ids: list[int]
    logits: torch.Tensor
    temperature: float = 0.0
    generator: torch.Generator = field(default_factory=torch.Generator)
    states: dict[str, Any] = field(default_factory=dict)
    node_costs: Sequence[float] | None = None
    explore: bool = False
    noise: Noise | None = None
    filters: SamplingParams | None = None
    grammar: Masks | None = None
    texts: Texts | None = None
    table: NgramTable | None = None
    prediction: PredictedText | None = None
    skeletons: PredictedText | None = None
    cache: SequenceCache | None = None
    tenant: Hashable = None
    kernels: Kernels | None = None

    @property
    def samples_children(self) -> bool:
        """Whether children may be drawn from a drafter's distribution, under the residual rule."""
        return self.temperature > 0 and self.noise is None

    @property
    def draft_temperature(self) -> float:
        """The temperature of the drafters' distributions: the request's where children are drawn.

        Otherwise 1: the noise, if there is any, applies the request's (`methods/children.py`).
        """
        return self.temperature if self.samples_children else 1.0

    @property
    def draft_state(self) -> DrafterState | None:
        """What the drafter keeps of this sequence; None if no drafter has begun."""
        for state in self.states.values():
            if isinstance(state, DrafterState):
                return state
        return None

    def node_cost(self, nodes: int) -> float:
        """Return the cost in tokens of one more node in a tree of `nodes` nodes; 0 if unmeasured.

        Beyond the last entry of `node_costs` a node costs infinitely much.
        """
        if self.node_costs is None:
            return 0.0
        return self.node_costs[nodes] if nodes < len(self.node_costs) else float("inf")

    def within(self, path: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """Return as many of `tokens` as a grammar allows after `path`, of tokens below the root."""
        return tokens if self.grammar is None else tokens[: self.grammar.follows(path, tokens)]

    def forced(self, path: Sequence[int]) -> int | None:
        """Return the only token that the grammar allows after `path`; None if there isn't one."""
        return None if self.grammar is None else self.grammar.forced(path)

    def begin(self, sources: Sequence[Source], shortlist: Shortlist | None = None) -> Context:
        """Let the sources read the text so far, keep their states, and return this context."""
        for source in sources:
            if isinstance(source, Drafter):
                listed = None if shortlist is None else shortlist.begin(self._known_tokens())
                self.states[source.name] = source.begin(self.ids, listed)
            else:
                self.states[source.name] = source.begin(self.ids)
        return self

    def _known_tokens(self) -> list[int]:
        """Return tokens that may come again, the likeliest last: of finished texts and this one."""
        if self.texts is None:
            return self.ids
        return [*self.texts.latest(FINISHED_TOKENS), *self.ids]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append newly committed tokens and pass them on to the sources' states."""
        self.ids.extend(tokens)
        for state in self.states.values():
            state.extend(tokens)


class DraftRequest(NamedTuple):
    """One sequence's request for the distributions after `nodes` of the `tree` that it proposes.

    `gain`: how many tokens the sequence expects to gain from the answer. It is infinite where the
    budget may not refuse the request.
    """

    context: Context
    tree: TokenTree
    nodes: Sequence[int]
    gain: float = float("inf")

    @property
    def state(self) -> Any:
        """What the drafter keeps of the sequence."""
        return self.context.draft_state


class Source:
    """Proposes candidate tokens. It holds no state of a sequence: `begin` returns that state."""

    name: str  # the name in statistics and in `TokenTree.source`

    def begin(self, ids: Sequence[int]) -> SourceState:
        """Return the state of a sequence that begins with the prompt `ids`."""
        return SourceState()

    def learn(self, context: Context, tree: TokenTree, logits: torch.Tensor) -> None:
        """Learn from a verified tree, before its tokens are committed.

        `logits`: `[n, vocab]`, the target's raw logits after each of its n nodes.
        """

    def forget(self) -> None:
        """Forget all that was learned of texts."""


class SuccessorSource(Source, ABC):
    """A source that proposes what followed the last tokens of a text elsewhere."""

    def knows_of(self, context: Context) -> bool:
        """Whether there may be something to find for this sequence."""
        return True

    @abstractmethod
    def after(self, context: Context, path: Sequence[int]) -> Successors | None:
        """Return what may follow the text that `path` continues; None if nothing is known."""


class SourceState:
    """What a source keeps of one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Read newly committed tokens. Called once after the first token and then once a step."""


class DraftProbs(NamedTuple):
    """Distributions over the next token, one row each, all over the same s tokens.

    - `values`: `[m, s]` float32. Each row sums to 1, or is zero where nothing is to be proposed.
    - `tokens`: `[s]` int64, the token of each column. `None`: column i is token i. A token without
      a column has probability 0. If a token has several columns, one of them holds its probability.
    - `vocab`: how many tokens the vocabulary has.
    - `forced`: by row, the only token that a grammar allows; such a row's values mean nothing.
    - `confidence`: by row, how likely its next token is accepted, as the drafter expects; or empty.
    - `likeliest`: by row, its likeliest tokens and their probabilities, the likeliest first, where
      the drafter's call has copied them to the host; or empty.
    """

    values: torch.Tensor
    tokens: torch.Tensor | None = None
    vocab: int = 0
    forced: Mapping[int, int] = MappingProxyType({})
    confidence: Sequence[float] = ()
    likeliest: Sequence[Row] = ()

    def dense(self, row: int | slice = slice(None)) -> torch.Tensor:
        """Return them over the whole vocabulary: `[m, vocab]`, or `[vocab]` for a row."""
        values = self.values[row]
        if self.tokens is None:
            return values
        dense = values.new_zeros(*values.shape[:-1], self.vocab)
        return dense.index_add_(-1, self.tokens, values)

    def at(self, temperature: float) -> DraftProbs:
        """Return the distributions at a temperature, where these are at 1.

        Their logarithms stand for the logits, so numbers differ from those of the logits in the
        last bits.
        """
        if temperature == 1:
            return self
        return self._replace(values=probs_of(self.values.log(), temperature), likeliest=())

    def emptied(self, rows: Sequence[int]) -> DraftProbs:
        """Return them with zeros in `rows`."""
        values = self.values.clone()
        likeliest = list(self.likeliest)
        for row in rows:
            values[row] = 0
            if likeliest:
                tokens, _ = likeliest[row]
                likeliest[row] = tokens, [0.0] * len(tokens)
        return self._replace(values=values, likeliest=likeliest)


@dataclass
class HeadUse:
    """Counters of how a drafter's head was used, over all calls.

    - `calls`: how many calls were counted.
    - `tokens`: how many tokens were scored, summed over `calls`.
    - `seconds`: the time of choosing what is scored, and of the head, but for what PyTorch does as
      a part of passes.
    """

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0


class DrafterState(SourceState):
    """What a drafter keeps of one sequence."""

    @property
    def waiting(self) -> int:
        """How many committed tokens the drafter can read ahead of the next tree.

        Where it takes hidden states, a token can be read once its hidden state was given
        (`append_hidden`).
        """
        return 0

    used: HeadUse | None = None  # the counters of its head, where they are kept

    def append_hidden(self, hidden: torch.Tensor) -> None:
        """Take the hidden states `[k, layers * d]` of the next k committed tokens.

        Called only where the target provides them (`Drafter.needs_hidden`).
        """

    def skip(self, tail: int) -> None:
        """Leave out all unread tokens but the last `tail`, if this drafter can draft without them.

        A draft may be wrong, so a drafter may know the end of a text alone.
        """

    def chunk_pages(self, chunk: int, tokens: int) -> list[Page] | None:
        """Return the pages of a chunk of tokens, which another sequence may `attach`.

        The chunk is tokens `chunk * tokens` to `(chunk + 1) * tokens - 1`. None if the state does
        not have all of them.
        """
        return None

    def attach(
        self, chunks: Sequence[list[Page]], tokens: int, hidden: Sequence[torch.Tensor]
    ) -> None:
        """Begin with shared chunks of `tokens` tokens each.

        `hidden`: hidden states, `[k, layers * d]` each. The first are those of the last attached
        token. The rest belong to whole chunks behind it that no drafter has read.
        """

    def unread_hidden(self, chunk: int, tokens: int) -> torch.Tensor | None:
        """Return the hidden states of a chunk's tokens, if it has all of them and read none."""
        return None

    def release(self) -> None:
        """Give all memory back."""


class Drafter(Source, ABC):
    """A source that gives a distribution over the next token after any node of the tree."""

    name = "drafter"
    needs_hidden = False  # whether its states take the target's hidden states
    pool: Pool | None = None  # where its states keep what they read; None: they keep nothing
    context_length: int | None = None  # how many tokens it can read; None: no limit
    skips = False  # whether its states can leave tokens out (`skip`)
    folder: Path | None = None  # where it was read from
    # the width of its output that a head reads of which parts can be scored; None: there is none
    head_size: int | None = None
    head_model: Model | None = None  # the model whose head that is; None: the target
    weight_bytes = 0  # of a model that drafts; 0 where that is not known
    ranks_ids = False  # whether a token's id is about its rank by frequency
    one_call = False  # whether only a tree's first request takes time
    routes = False  # whether a router can choose what its head scores

    @property
    def scores_in_passes(self) -> bool:
        """Whether PyTorch scores a shortlist for it, as a part of its passes."""
        return False

    def begin(self, ids: Sequence[int], shortlist: ShortlistState | None = None) -> DrafterState:
        """Return the state of a sequence that begins with `ids`.

        `shortlist`: the part of the vocabulary that the head scores for it; None: all of it.
        """
        return DrafterState()

    def read(self, states: Sequence[DrafterState], least: int = 1, end: int | None = None) -> None:
        """Let states read committed tokens ahead of the next tree.

        Only states with at least `least` unread tokens read. A state reads the tokens whose
        following tokens are known, of the first `end` tokens of the text. So a drafter reads a long
        prompt step by step with the target, and no other answer waits for it.
        """

    @abstractmethod
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return, for each request, the distributions over the token after each of its nodes.

        The distributions are at the request's `draft_temperature`, over the tokens that were
        scored. One batched call serves all requests. Each node is requested at most once a tree,
        after its parent, and the root comes first. A distribution that is not finite is returned as
        zeros, so that nothing is proposed there.
        """


def probs_of(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """Return the distributions `[n, vocab]` float32 that a drafter's logits give at `temperature`.

    `temperature` may be a tensor `[n, 1]`, with one entry for each row. A row that is not finite
    becomes zeros.
    """
    scores = logits.float()
    # The largest logit is subtracted first, so that the division can't overflow upwards. The floor
    # keeps 1/temperature finite in float32, as in `Sampler.probs`.
    if isinstance(temperature, torch.Tensor) or temperature != 1:
        divisor = torch.as_tensor(temperature, dtype=torch.float32, device=scores.device)
        scores = scores - scores.amax(-1, keepdim=True)
        scores = scores.div_(divisor.clamp(min=1e-30))
    probs = scores.softmax(-1)
    if probs.device.type != "cpu":
        return probs.nan_to_num_(0.0)
    first = probs[:, 0].tolist()
    # One bad logit makes the softmax's sum NaN, and so the whole row: the first column shows it.
    if any(value != value for value in first):
        logger.warning("the drafter's logits are not finite (NaN): it proposes nothing there")
        probs.nan_to_num_(0.0)
    return probs
