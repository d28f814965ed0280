"""The Python face: a model, a method, answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict, overload

import torch
from typing_extensions import Unpack

from quickbeam import hub
from quickbeam.draft.base import Drafter
from quickbeam.draft.loading import load_drafter
from quickbeam.draft.vocabulary import is_routed, make_shortlist
from quickbeam.engine.budget import AutoBudget, CostModel
from quickbeam.engine.loop import Generation
from quickbeam.engine.market import Market
from quickbeam.engine.output import Output
from quickbeam.engine.result import Completion
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput
from quickbeam.presets import ROUTED, check_vocab, preset, stand_in
from quickbeam.sampling import SamplingParams
from quickbeam.shortlist.shortlist import Shortlist
from quickbeam.target.loading import eos_ids, load_model, parse_dtype, pick_device
from quickbeam.target.native import choice, library
from quickbeam.target.target import Target
from quickbeam.trees import DRAFTER, make_policy
from quickbeam.trees.base import TreePolicy

Prompt = str | Sequence[int]
Message = dict[str, str]
Observer = Callable[[StepRecord], None]
MAX_BUDGET = 64  # nodes; what `budget=0` leaves the cost model to choose from


class Options(TypedDict, total=False):
    """What a call may name for itself; see `LLM`."""

    budget: int | None
    vocab: str | None
    shortlist: int | None


class Setting(NamedTuple):
    """What an answer is made with, but for its budget."""

    method: str
    vocab: str
    shortlist: int | None


class Stream(Iterator[str]):
    """Pieces of an answer's text as they come; `completion` then, or at any time for what there is."""

    def __init__(self, generation: Generation, model: str, method: str) -> None:
        self._generation = generation
        self._steps = iter(generation)
        self._model, self._method = model, method

    def __next__(self) -> str:
        while True:
            try:
                next(self._steps)
            except StopIteration:
                if piece := self._generation.output.take():
                    return piece
                raise
            if piece := self._generation.output.take():
                return piece

    def close(self) -> None:
        """Stop here; the answer ends as `interrupted` unless it had ended."""
        self._steps.close()  # type: ignore[attr-defined]
        self._generation.output.close("interrupted")

    @property
    def completion(self) -> Completion:
        """The answer so far; its `finish_reason` is `interrupted` where it didn't come to its end."""
        generation = self._generation
        output = generation.output
        return Completion(
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason or "interrupted",
            statistics=generation.statistics,
            model=self._model,
            method=self._method,
            logprobs=generation.logprobs,
        )


class LLM:
    """A causal language model that drafts ahead and answers what it would have answered anyway.

    `model`: a Hugging Face id, a folder or a `.gguf` file; None takes the embedded default, fetched on first use. `method`: a preset of
    `presets.py`. `budget`: nodes a draft tree, the root included; None takes the preset's, 0 lets measured cost decide. Each call may
    name others. `drafter`: a smaller model with the same vocabulary or a feature drafter of this model, named as `model` is, for the
    methods that draft with one; None takes the one that comes with an embedded model. It is loaded when the first of them is asked for.
    `vocab`: what of the vocabulary that drafter scores, one of `presets.VOCABS`; None takes the preset's. `shortlist`: how many tokens
    that is, about; None takes what `draft/vocabulary.py` says. `exact`: the same bits as one token at a time (bfloat16 on a CPU; None:
    where this machine's kernels allow it). `fast=False` is the plain reference path. `progress(stage, fraction)` hears of fetching an
    embedded model, and of compiling the native kernels where that was not done before.

    What is learned in an answer, of budgets and by tree policies, holds in the next. It never changes the law of an answer, and no token
    where drafts are certain (at temperature 0, and with the methods that need no drafter). So that a seed repeats the other answers too,
    they begin with a policy that has learned nothing when seeded; with a measured budget they may still differ.

    Raises `InvalidInput` for what can't be used, before any work.
    """

    def __init__(
        self,
        model: str | None = None,
        method: str = "auto",
        *,
        dtype: str = "bfloat16",
        device: str | None = None,
        budget: int | None = None,
        drafter: str | None = None,
        vocab: str | None = None,
        shortlist: int | None = None,
        exact: bool | None = None,
        fast: bool = True,
        progress: Any = None,
    ) -> None:
        drafter = drafter or hub.shipped_drafter(model)
        method = stand_in(method, drafter is not None)
        chosen = preset(method)
        if drafter is None:
            make_policy(chosen.sources, chosen.tree)  # raises for a method that needs one, before anything is loaded
        check_vocab(vocab or chosen.vocab)
        torch_dtype, place = parse_dtype(dtype), pick_device(device)
        choice.wish()  # raises for words that are not known, whether kernels are used or not
        if fast and place.type == "cpu" and torch_dtype is torch.bfloat16:
            library.prepare(lambda stage: progress and progress(stage, None))
        self.folder = str(hub.resolve(model, progress))
        self.name = model or hub.DEFAULT
        if progress:
            progress(f"loading {self.name}", None)
        self.method, self.budget, self.vocab, self.shortlist = method, budget, vocab, shortlist
        loaded, self.tokenizer = load_model(self.folder, torch_dtype, place)
        self.eos_ids = eos_ids(loaded, self.tokenizer)
        self.target = Target(loaded, fast=fast, exact=exact)
        self._cost: CostModel | None = None
        self._budgets: dict[Setting, AutoBudget] = {}  # what was learned in earlier answers holds in the next
        self._markets: dict[Setting, Market] = {}  # likewise
        self._policies: dict[Setting, TreePolicy] = {}  # for the same reason
        self._shortlists: dict[tuple[str, int | None], Shortlist] = {}  # by vocabulary and size
        self._conversation: list[Message] = []  # whose tokens the target holds
        self._drafter_name, self._fast, self._progress = drafter, fast, progress
        self._drafter: Drafter | None = None
        self._routed = False  # it comes with a router
        self.prepare(method)

    @property
    def kernels(self) -> str:
        """What computes the passes, in words: `native (avx2)`, or `PyTorch's` and why."""
        if not self._fast:
            return "PyTorch's (the plain path)"
        return library.describe(self.target.device.type, str(self.target.dtype).removeprefix("torch."))

    def prepare(self, method: str, vocab: str | None = None, shortlist: int | None = None) -> Drafter | None:
        """Load the drafter and what it needs for its vocabulary, unless they are there or `method` needs none; give it where it is needed
        and there is one."""
        if self._drafter_name is None or DRAFTER not in preset(method).sources:
            return None
        if self._drafter is None:
            self._drafter = load_drafter(self._drafter_name, self.target, self.tokenizer, fast=self._fast, progress=self._progress)
            self._routed = is_routed(self._drafter)
        self._shortlist(self._drafter, self._setting(method, vocab, shortlist))
        return self._drafter

    def _setting(self, method: str, vocab: str | None, shortlist: int | None) -> Setting:
        """Of a method whose drafter, if it has one, is loaded."""
        vocab = vocab or self.vocab or preset(method).vocab
        if vocab == ROUTED:
            vocab = "router" if self._routed else "full"
        return Setting(method, vocab, self.shortlist if shortlist is None else shortlist)

    def _shortlist(self, drafter: Drafter, setting: Setting) -> Shortlist | None:
        key = setting.vocab, setting.shortlist
        if key not in self._shortlists and (made := make_shortlist(drafter, self.target, *key)) is not None:
            self._shortlists[key] = made
        return self._shortlists.get(key)

    @overload
    def generate(
        self, prompts: str | list[int], params: SamplingParams | None = ..., *, method: str | None = ..., **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | None = ...,
        *,
        method: str | None = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Any, params: SamplingParams | None = None, *, method: str | None = None, **options: Unpack[Options]
    ) -> Completion | list[Completion]:
        """Continue a prompt (text as it is, or token ids), or several one after the other."""
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            return finish(self.stream(prompts, params, method=method, **options))
        return [finish(self.stream(prompt, params, method=method, **options)) for prompt in prompts]

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, method: str | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Answer a conversation: `[{"role": "user", "content": "…"}, …]`."""
        return finish(self.chat_stream(messages, params, method=method, **options))

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        observer: Observer | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """`chat`, piece by piece. Where the messages go on from the last ones, what the two have in common is not computed again.
        `observer` is told of every step."""
        ids, messages = self.encode_chat(messages), list(messages)
        last, keep = self._conversation, 0
        if last and len(messages) > len(last) and messages[: len(last)] == last:
            held = self.target.ids
            keep = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        stream = self._begin(ids, params, method, options, keep, observer)
        self._conversation = messages
        return stream

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        observer: Observer | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """`generate` for one prompt, piece by piece. A model holds one sequence: begin the next answer when this one is over.
        `observer` is told of every step."""
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        return self._begin(ids, params, method, options, 0, observer)

    def _begin(
        self,
        ids: list[int],
        params: SamplingParams | None,
        method: str | None,
        options: Options,
        keep: int,
        observer: Observer | None,
    ) -> Stream:
        for option in options.keys() - Options.__annotations__.keys():
            sampling = option in SamplingParams.__dataclass_fields__
            what = f"give it in SamplingParams({option}=…)" if sampling else f"known: {', '.join(Options.__annotations__)}"
            raise InvalidInput(f"unknown option '{option}'; {what}")
        params, name = params or SamplingParams(), stand_in(method or self.method, self._drafter_name is not None)
        chosen = preset(name)
        if not ids:
            raise InvalidInput("an empty prompt: give some text")
        self._conversation = []
        drafter = self.prepare(name, options.get("vocab"), options.get("shortlist"))
        setting = self._setting(name, options.get("vocab"), options.get("shortlist"))
        policy = make_policy(chosen.sources, chosen.tree, drafter)
        if params.seed is None or params.greedy:
            policy = self._policies.setdefault(setting, policy)
        if drafter is not None:
            drafter.use(self._shortlist(drafter, setting))
            drafter.check_length(len(ids), params.max_tokens)
            keep = drafter.reusable(ids, keep)
            if not keep:
                drafter.forget()
        generation = Generation(
            self.target,
            policy,
            Output(self.tokenizer, params, self.eos_ids),
            ids,
            params,
            self._choose_budget(setting, options.get("budget"), priced=policy.priced and params.greedy),
            keep=keep,
            observer=observer,
        )
        return Stream(generation, self.name, name)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the model's answer begins. Raises `InvalidInput` for a model without a chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidInput(f"{self.name} has no chat template: give it raw text (--raw on the command line, `generate` in Python)")
        try:
            ids = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # a template raises what it likes, often a jinja2 error
            raise InvalidInput(f"the model's chat template refuses these messages: {error}") from error
        return [int(token) for token in ids]

    def reset(self) -> None:
        """Forget the last conversation, so that the next prompt is computed from its first token."""
        self.target.reset()
        if self._drafter is not None:
            self._drafter.forget()
        self._conversation = []

    def _choose_budget(self, setting: Setting, asked: int | None, priced: bool) -> int | AutoBudget | Market:
        asked = self.budget if asked is None else asked
        if asked is not None and asked < 0:
            raise InvalidInput(f"budget={asked}: must be a number of nodes, or 0 for the measured one")
        if asked and (most := self.target.most_nodes) is not None and asked > most:
            raise InvalidInput(f"budget={asked}: bit-identical verification takes at most {most} nodes; turn exact off for more")
        chosen = preset(setting.method)
        if budget := chosen.budget if asked is None or not chosen.sources else asked:
            return budget
        if self._cost is None:
            self._cost = CostModel.measure(self.target, MAX_BUDGET)
        if priced:
            return self._markets.setdefault(setting, Market(self._cost, MAX_BUDGET))
        return self._budgets.setdefault(setting, AutoBudget(self._cost, MAX_BUDGET))


def finish(stream: Stream) -> Completion:
    """Run an answer to its end."""
    for _ in stream:
        pass
    return stream.completion
