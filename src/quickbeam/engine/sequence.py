"""One request that is being answered: all of its state, and nothing of any other request's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from quickbeam.config import Budget
from quickbeam.drafters.base import GRAMMAR, Context, Drafter, DrafterState
from quickbeam.drafters.predicted_text import PredictedText
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.engine.learning import Learned
from quickbeam.engine.output import Output
from quickbeam.engine.result import Logprob, SourceCount, Statistics
from quickbeam.engine.trace import StepRecord
from quickbeam.methods.base import Method
from quickbeam.models.base import Draws, ImageRows
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.noise import NativeNoise
from quickbeam.models.vision.positions import ImagePositions
from quickbeam.noise import Noise
from quickbeam.params import COUPLED, SamplingParams
from quickbeam.sampling import Sampler, logprobs

# makes the seed of drawn drafts differ from the seed of the answer
DRAFT_SEED = 0x9E3779B97F4A7C15
# makes the seeds of further answers to a prompt differ from the first one's
CHOICE_SEED = 0xD1B54A32D192ED03
_arrivals = count()


@dataclass
class Times:
    """When a request arrived, was taken up, and had its first token.

    In seconds of `time.perf_counter`; None means not yet.
    """

    arrived: float
    began: float | None = None  # when it became active and its text was first read
    first: float | None = None  # when its first token was known


@dataclass(eq=False)
class Request:
    """A request: a prompt in token ids, how it is answered, and by which method.

    - `budget`: the most nodes of a tree, the root included; `auto`: by measured cost.
    - `setting`: the method and all that its drafts depend on; rates and costs are learned for each.
    - `observer`: called with every step.
    - `choice`: which of several answers to the prompt this is.
    - `tenant`: whose request it is. Tenants are served alike; None for a program's own requests.
    - `prediction`: token ids of a text that the answer is expected to be much like; or none.
    - `skeletons`: token ids of texts that may be parts of the answer, with gaps; or none.
    - `images`: in place of some of the prompt's tokens, in order.
    - `positions`: of tokens, where those of images have three numbers.
    """

    prompt: Sequence[int]
    params: SamplingParams
    method: Method
    output: Output
    sampler: Sampler
    budget: Budget = 1
    setting: Hashable = None
    shortlist: Shortlist | None = None
    observer: Callable[[StepRecord], None] | None = None
    choice: int = 0
    tenant: Hashable = None
    prediction: Sequence[int] = ()
    skeletons: Sequence[int] = ()
    images: Sequence[ImageRows] = ()
    positions: ImagePositions | None = None

    def __post_init__(self) -> None:
        self.prompt = list(self.prompt)  # the caller may change its list later


class SequenceState:
    """A request and its state so far.

    A sequence waits, then its prompt is read, then it runs, and then it is over.
    `output.finish_reason` then says why, or `error` holds what went wrong. `context` has sources'
    states only while it is active. If it is preempted, `ids`, `output` and the generators survive.

    The request's seed, or one that is drawn, makes the noise of its positions. For the residual
    rule it makes two generators: for what is emitted, and for what is drawn while drafting.
    `kernels` compute the noise, and what drafts need; None: NumPy and PyTorch do.
    """

    def __init__(self, request: Request, kernels: Kernels | None = None) -> None:
        self.request = request
        self.params = request.params
        self.method = request.method
        self.output = request.output
        # the drafter of its method, or None
        drafters = [source for source in self.method.sources if isinstance(source, Drafter)]
        self.drafter = drafters[0] if drafters else None
        self.arrival = next(_arrivals)
        sources = [source.name for source in self.method.sources]
        if sources and request.sampler.grammar is not None:
            sources.append(GRAMMAR)
        self.statistics = Statistics(sources={name: SourceCount() for name in sources})
        self.logprobs: list[Logprob] | None = None if request.params.logprobs is None else []
        # of the prompt's first tokens so far; nothing predicts the first one
        self.prompt_logprobs: list[Logprob | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )
        self.error: BaseException | None = None
        self.nodes = 1  # of its last tree
        # what drafts and is learned for its tenant, where drafters learn
        self.learned: Learned | None = None
        self.ids = list(request.prompt)
        self.cache: SequenceCache | None = None
        self.chunks: list[Any] = []  # chunks of the prefix cache that hold the beginning of the ids
        self.last_hidden: dict[int, torch.Tensor] = {}  # by chunk: hidden states of its last token
        self.times = Times(time.perf_counter())
        if self.params.seed is None:
            # this seed belongs to one answer, which the seed alone repeats: its choice is 0
            self.seed = secrets.randbits(63)
            choice = 0
        else:
            self.seed = int(self.params.seed)
            choice = request.choice
        choice_seed = self.seed + choice * CHOICE_SEED
        self.generator = torch.Generator()
        self.generator.manual_seed(choice_seed % 2**64)
        draft_generator = torch.Generator()
        draft_generator.manual_seed((choice_seed ^ DRAFT_SEED) % 2**64)
        coupled = not self.params.greedy and self.params.coupling == COUPLED
        vocab_size = request.sampler.vocab_size
        self.noise: Noise | None = None
        if coupled and kernels is not None:
            self.noise = NativeNoise(kernels, self.seed, choice, vocab_size)
        elif coupled:
            self.noise = Noise(self.seed, choice, vocab_size)
        # how its tokens are drawn, where that takes their logits alone
        self.draws: Draws | None = None
        if coupled and not self.params.filters and not self.params.adjusts_logits:
            self.draws = Draws(self.seed, choice, 1 / max(self.params.temperature, 1e-30))
        self.context = Context(
            self.ids,
            torch.empty(0),
            self.params.temperature,
            draft_generator,
            noise=self.noise,
            filters=self.params if self.params.filters else None,
            grammar=request.sampler.grammar,
            prediction=PredictedText(request.prediction) if request.prediction else None,
            skeletons=PredictedText(request.skeletons) if request.skeletons else None,
            tenant=request.tenant,
            kernels=kernels,
        )

    @property
    def cost(self) -> int:
        """How many tokens it may take of its tenant's share; nothing after a preemption."""
        if self.statistics.preemptions:
            return 0
        return len(self.request.prompt) + self.params.max_tokens

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.output.finish_reason is not None

    @property
    def started(self) -> bool:
        """Whether its first token is known."""
        return len(self.ids) > len(self.request.prompt)

    @property
    def read(self) -> int:
        """How many of the ids have keys and values."""
        return self.cache.length if self.cache is not None else 0

    @property
    def unread(self) -> int:
        """How many tokens have to be read before the sequence can run.

        That is all of the prompt at first. Once there is an answer, it is all but the last token.
        """
        return len(self.ids) - self.started - self.read

    @property
    def prefix_key(self) -> Sequence[int]:
        """A number for each of the ids, by which the prefix cache knows what was computed of it.

        That is the id. A row of an image has a negative number, which no other image's rows have.
        Where a tenant's texts are learned from, the first number is negative, too, and its own: the
        drafter's rows are no other tenant's.
        """
        if not self.request.images and self.learned is None:
            return self.ids
        key = list(self.ids)
        if self.learned is not None:
            key[0] -= self.learned.owner
        for image in self.request.images:
            key[image.first : image.end] = [-image.key - row for row in range(len(image.rows))]
        return key

    @property
    def remaining(self) -> int:
        """How many tokens its answer may still have."""
        return self.params.max_tokens - len(self.output.token_ids)

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are still to be computed."""
        scored = self.prompt_logprobs
        return scored is not None and len(scored) < len(self.request.prompt)

    @property
    def running(self) -> bool:
        """Whether its next step is a tree."""
        return self.started and self.cache is not None and not self.unread

    @property
    def draft_state(self) -> DrafterState | None:
        """What its drafter keeps of it, or None."""
        return None if self.drafter is None else self.context.states.get(self.drafter.name)

    def begin(self, cache: SequenceCache) -> None:
        """Let the sources read the text so far. Keys and values go to `cache`."""
        self.cache = self.context.cache = cache
        cache.positions = self.request.positions
        self.times.began = self.times.began or time.perf_counter()
        self.context.begin(self.method.sources, self.request.shortlist)
        if self.learned is not None:
            self.learned.begin(self.draft_state)
        if (state := self.draft_state) is not None and state.used is not None:
            state.used = self.statistics.head = self.statistics.head or state.used

    def release(self) -> None:
        """Free keys and values and what sources keep. The text stays."""
        if (state := self.draft_state) is not None:
            state.release()
        if self.cache is not None:
            self.cache.release()
        self.cache = self.context.cache = None
        self.context.states.clear()
        self.chunks = []
        self.last_hidden = {}
        self.nodes = 1
        if self.noise is not None:
            self.noise.forget()
        # a copy, since a slice would keep all logits of its pass in memory
        self.context.logits = torch.empty(0) if self.over else self.context.logits.clone()

    def end(self, reason: str, error: BaseException | None = None) -> None:
        """End the sequence. Does nothing if it is over."""
        if self.over:
            return
        self.error = error
        try:
            self.output.close(reason)
        except Exception as broken:  # of the tokenizer
            self.error = error or broken

    def score(self, logits: torch.Tensor) -> None:
        """Record log-probabilities of the prompt's tokens.

        `logits` `[n, vocab]` are the raw ones after the last `n` tokens that were read. Records of
        tokens that were read before a preemption stay.
        """
        prompt = self.request.prompt
        scored = self.prompt_logprobs
        assert scored is not None
        first = self.read - len(logits) + 1  # position of the token that the first row predicts
        for position in range(len(scored), min(self.read + 1, len(prompt))):
            row = logits[position - first]
            token = prompt[position]
            top = self.params.prompt_logprobs or 0
            scored.append(Logprob(token, *logprobs(row, token, top)))

    def emit(self, tokens: Sequence[int], row: Callable[[int], torch.Tensor]) -> list[int]:
        """Feed tokens to the output until it ends, and return those that it took.

        `row(i)` returns the raw logits `[vocab]` that the i-th token was chosen from.
        """
        self.times.first = self.times.first or time.perf_counter()
        taken = []
        top = self.params.logprobs or 0
        for i, token in enumerate(tokens):
            taken.append(token)
            if self.logprobs is not None:
                self.logprobs.append(Logprob(token, *logprobs(row(i), token, top)))
            if self.output.append(token):
                break
        self.request.sampler.extend(taken)
        self.statistics.new_tokens += len(taken)
        return taken

    def extend(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """Record committed tokens, the last of which was chosen from `logits` `[vocab]`."""
        self.context.logits = logits
        self.context.extend(tokens)  # the context's ids are this sequence's own list
