"""The Python face: a model, a method, answers."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, overload

import psutil
import torch
from tqdm.auto import tqdm
from typing_extensions import Self, Unpack

from quickbeam import hub
from quickbeam.draft.base import Drafter
from quickbeam.draft.loading import load_drafter
from quickbeam.draft.vocabulary import is_routed, make_shortlist
from quickbeam.engine.engine import MOST_ACTIVE, Engine
from quickbeam.engine.output import Output
from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import Request, SequenceState
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput
from quickbeam.presets import ROUTED, check_vocab, preset, stand_in
from quickbeam.sampling import Sampler, SamplingParams, bad_word_ids
from quickbeam.shortlist.shortlist import Shortlist
from quickbeam.target.loading import eos_ids, load_model, pick_device, wanted_dtype
from quickbeam.target.model import Model
from quickbeam.target.native import choice, library
from quickbeam.trees import DRAFTER, make_policy
from quickbeam.trees.base import TreePolicy

Prompt = str | Sequence[int]
Message = dict[str, Any]
Observer = Callable[[StepRecord], None]
SHARE = 0.5  # of the memory that is free after loading, for keys and values
SHORTLISTS = 2  # that are kept: each holds a copy of the head's rows
CHOICE = 0x9E3779B97F4A7C15  # what sets the seeds of a request's further answers apart


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
    """Pieces of an answer's text as they come; `completion` then, or at any time for what there is.

    Any number may be open at once, in any threads: a step that one of them takes moves all on. One that is dropped gives back what it held.
    """

    def __init__(self, engine: Engine, sequence: SequenceState, model: str, method: str) -> None:
        self._engine, self._sequence = engine, sequence
        self._model, self._method = model, method
        weakref.finalize(self, engine.drop, sequence)

    def __next__(self) -> str:
        sequence = self._sequence
        while True:
            with self._engine.lock:
                if piece := sequence.output.take():
                    return piece
                if sequence.error is not None:
                    raise sequence.error
                if sequence.over:
                    raise StopIteration
                self._engine.step()

    def close(self) -> None:
        """Stop here; the answer ends as `interrupted` unless it had ended."""
        self._engine.cancel(self._sequence)

    def taken(self) -> str:
        """The text that is new since it was last taken, without a step."""
        return self._sequence.output.take()

    @property
    def token_ids(self) -> Sequence[int]:
        """The answer's so far."""
        return self._sequence.output.token_ids

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._sequence.over

    @property
    def error(self) -> BaseException | None:
        """What ended it, where something went wrong."""
        return self._sequence.error

    @property
    def completion(self) -> Completion:
        """The answer so far; its `finish_reason` is `interrupted` where it didn't come to its end."""
        sequence = self._sequence
        output = sequence.output
        return Completion(
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason or "interrupted",
            statistics=sequence.statistics,
            model=self._model,
            method=self._method,
            logprobs=sequence.logprobs,
        )


class LLM:
    """A causal language model that drafts ahead and answers what it would have answered anyway.

    `model`: a Hugging Face id, a folder or a `.gguf` file; None takes the embedded default, fetched on first use. `method`: a preset of
    `presets.py`. `budget`: nodes a draft tree, the root included; None takes the preset's, 0 lets measured cost decide. Each call may
    name others. `drafter`: a smaller model with the same vocabulary or a feature drafter of this model, named as `model` is, for the
    methods that draft with one; None takes the one that comes with an embedded model. It is loaded when the first of them is asked for.
    `vocab`: what of the vocabulary that drafter scores, one of `presets.VOCABS`; None takes the preset's. `shortlist`: how many tokens
    that is, about; None takes what `draft/vocabulary.py` says. `exact`: the same bits as one token at a time (bfloat16 on a CPU; None:
    where this machine's kernels allow it). `fast=False` is the plain reference path. `dtype`: `bfloat16`, `float16`, `float32`, or `auto`
    for the checkpoint's own. `revision`, `device_map` (all on one device) and `trust_remote_code`: as in
    transformers. `progress(stage, fraction)` hears of fetching an
    embedded model, and of compiling the native kernels where that was not done before.

    Any number of answers may be under way at once, from any threads; they share each pass, and none of them depends on the others.
    `max_running`: so many side by side, the others wait their turn. `kv_memory`: bytes for keys and values, or as in `"2GB"`; None: half of
    what is free. `share_prefixes`: what texts begin with in common is computed once. `close` ends all, as leaving a `with` block does.

    What is learned in an answer, of budgets and by tree policies, holds in the next. It never changes the law of an answer, and no token
    where drafts are deterministic (at temperature 0, and with the methods that need no drafter). So that a seed repeats the other answers
    too, they begin with a policy that has learned nothing when seeded; with a measured budget they may still differ.

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
        max_running: int = MOST_ACTIVE,
        kv_memory: int | str | None = None,
        share_prefixes: bool = True,
        revision: str | None = None,
        device_map: str | dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        progress: Any = None,
    ) -> None:
        drafter = drafter or hub.shipped_drafter(model)
        method = stand_in(method, drafter is not None)
        chosen = preset(method)
        if drafter is None:
            make_policy(chosen.sources, chosen.tree)  # raises for a method that needs one, before anything is loaded
        check_vocab(vocab or chosen.vocab)
        self._kv_memory = None if kv_memory is None else parse_bytes(kv_memory)
        if not isinstance(max_running, int) or max_running < 1:
            raise InvalidInput(f"max_running={max_running!r}: must be at least 1 sequence side by side")
        torch_dtype, place = wanted_dtype(dtype), pick_device(device)
        choice.wish()  # raises for words that are not known, whether kernels are used or not
        if fast and place.type == "cpu" and torch_dtype in (torch.bfloat16, None):
            library.prepare(lambda stage: progress and progress(stage, None))
        self.folder = str(hub.resolve(model, progress))
        self.name = model or hub.DEFAULT
        if progress:
            progress(f"loading {self.name}", None)
        self.method, self.budget, self.vocab, self.shortlist = method, budget, vocab, shortlist
        loaded, self.tokenizer = load_model(
            self.folder, torch_dtype, place, trust_remote_code=trust_remote_code, revision=revision, device_map=device_map
        )
        self.eos_ids = eos_ids(loaded, self.tokenizer)
        self.model = Model(loaded, fast=fast, exact=exact)
        self.engine = Engine(self.model, most=max_running, share=share_prefixes)
        self._policies: dict[Setting, TreePolicy] = {}  # what was learned in earlier answers holds in the next
        self._shortlists: OrderedDict[tuple[str, int | None], Shortlist] = OrderedDict()  # by vocabulary and size, the last used last
        self._drafter_name, self._fast, self._progress, self._trusted = drafter, fast, progress, trust_remote_code
        self._drafter: Drafter | None = None
        self._routed = False  # it comes with a router
        self._bound_memory()
        self.prepare(method)

    def _bound_memory(self) -> None:
        """Say how many pages of keys and values there may be."""
        pool, drafter = self.model.pool, None if self._drafter is None else self._drafter.pool
        if self._kv_memory is None:
            self._kv_memory = int(SHARE * free_memory(self.model.device))
        pages = self._kv_memory // (pool.page_bytes + (drafter.page_bytes if drafter is not None else 0))
        if pages < 2:
            raise InvalidInput(
                f"kv_memory={self._kv_memory} bytes: keys and values of {pool.page} tokens take {pool.page_bytes}; give more"
            )
        pool.limit = pages

    @property
    def kernels(self) -> str:
        """What computes the passes, in words: `native (avx2)`, or `PyTorch's` and why."""
        if not self._fast:
            return "PyTorch's (the plain path)"
        return library.describe(self.model.device.type, str(self.model.dtype).removeprefix("torch."))

    def prepare(self, method: str, vocab: str | None = None, shortlist: int | None = None) -> Drafter | None:
        """Load the drafter and what it needs for its vocabulary, unless they are there or `method` needs none; give it where it is needed
        and there is one."""
        if self._drafter_name is None or DRAFTER not in preset(method).sources:
            return None
        with self.engine.lock:
            if self._drafter is None:
                self._drafter = load_drafter(
                    self._drafter_name,
                    self.model,
                    self.tokenizer,
                    fast=self._fast,
                    progress=self._progress,
                    trust_remote_code=self._trusted,
                )
                self._routed = is_routed(self._drafter)
                self._bound_memory()
            self._shortlist(self._drafter, self._setting(method, vocab, shortlist))
        return self._drafter

    def shortlist_of(self, method: str, vocab: str | None = None, shortlist: int | None = None) -> Shortlist | None:
        """What the drafter scores with a method, prepared; None: its whole vocabulary."""
        drafter = self.prepare(method, vocab, shortlist)
        return None if drafter is None else self._shortlist(drafter, self._setting(method, vocab, shortlist))

    def _setting(self, method: str, vocab: str | None, shortlist: int | None) -> Setting:
        """Of a method whose drafter, if it has one, is loaded."""
        vocab = vocab or self.vocab or preset(method).vocab
        if vocab == ROUTED:
            vocab = "router" if self._routed else "full"
        return Setting(method, vocab, self.shortlist if shortlist is None else shortlist)

    def _shortlist(self, drafter: Drafter, setting: Setting) -> Shortlist | None:
        key = setting.vocab, setting.shortlist
        if key not in self._shortlists and (made := make_shortlist(drafter, self.model, *key)) is not None:
            self._shortlists[key] = made
            while len(self._shortlists) > SHORTLISTS:
                self._shortlists.popitem(last=False)
        if key in self._shortlists:
            self._shortlists.move_to_end(key)
        return self._shortlists.get(key)

    @overload
    def generate(
        self, prompts: str | list[int], params: SamplingParams | None = ..., *, method: str | None = ..., **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        method: str | None = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, params: Any = None, *, method: str | None = None, progress: bool | None = None, **options: Any) -> Any:
        """Continue a prompt (text as it is, or token ids), or several side by side, each with its own parameters where `params` is a list.

        With `params.n` above 1 each prompt has so many answers, one after the other in the list. `progress`: a bar for several answers;
        None: on a terminal.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            found = self._all([self._ids(prompts)], params, method, options, False)
            return found if len(found) > 1 else found[0]
        return self._all([self._ids(prompt) for prompt in prompts], params, method, options, progress)

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = ..., *, method: str | None = ..., **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        method: str | None = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Any,
        params: Any = None,
        *,
        method: str | None = None,
        progress: bool | None = None,
        template: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Answer a conversation, `[{"role": "user", "content": "…"}, …]`, or several side by side; the rest as in `generate`. `template`:
        see `encode_chat`."""
        if len(messages) > 0 and not isinstance(messages[0], dict):
            return self._all([self.encode_chat(one, **(template or {})) for one in messages], params, method, options, progress)
        found = self._all([self.encode_chat(messages, **(template or {}))], params, method, options, False)
        return found if len(found) > 1 else found[0]

    def _all(self, prompts: Sequence[list[int]], params: Any, method: str | None, options: Any, progress: bool | None) -> list[Completion]:
        """Answers to all prompts, side by side."""
        every = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(every) != len(prompts):
            raise InvalidInput(f"{len(every)} parameters for {len(prompts)} prompts: give one for all, or one for each")
        streams = list[Stream]()
        try:
            for ids, one in zip(prompts, every, strict=True):
                for choice_params in choices(one or SamplingParams()):
                    streams.append(self._begin(ids, choice_params, method, options, None))
            shown = progress if progress is not None else len(streams) > 1 and sys.stderr.isatty()
            finish_all(self.engine, streams, shown)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return [stream.completion for stream in streams]

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        observer: Observer | None = None,
        template: dict[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """`chat`, piece by piece. `observer` is told of every step."""
        return self._begin(self.encode_chat(messages, **(template or {})), params, method, options, observer)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        observer: Observer | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """`generate` for one prompt, piece by piece. `observer` is told of every step."""
        return self._begin(self._ids(prompt), params, method, options, observer)

    def _ids(self, prompt: Prompt) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)

    def _begin(
        self, ids: list[int], params: SamplingParams | None, method: str | None, options: Options, observer: Observer | None
    ) -> Stream:
        for option in options.keys() - Options.__annotations__.keys():
            sampling = option in SamplingParams.__dataclass_fields__
            what = f"give it in SamplingParams({option}=…)" if sampling else f"known: {', '.join(Options.__annotations__)}"
            raise InvalidInput(f"unknown option '{option}'; {what}")
        params, name = params or SamplingParams(), stand_in(method or self.method, self._drafter_name is not None)
        chosen = preset(name)
        if not ids:
            raise InvalidInput("an empty prompt: give some text")
        drafter = self.prepare(name, options.get("vocab"), options.get("shortlist"))
        setting = self._setting(name, options.get("vocab"), options.get("shortlist"))
        policy = make_policy(chosen.sources, chosen.tree, drafter)
        if params.seed is None or params.greedy:
            policy = self._policies.setdefault(setting, policy)
        output = Output(self.tokenizer, params, self.eos_ids)
        bad = bad_word_ids(self.tokenizer, params.bad_words)
        sequence = self.engine.add(
            Request(
                ids,
                params,
                policy,
                output,
                Sampler(params, ids, self.model.vocab_size, ends=output.ends, bad=bad),
                self._choose_budget(name, options.get("budget")),
                setting,
                self._shortlist(drafter, setting) if drafter is not None else None,
                observer,
            )
        )
        return Stream(self.engine, sequence, self.name, name)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> list[int]:
        """Token ids of a conversation up to where the model's answer begins, or with `continue_final_message` to the end of the last
        message, which the answer goes on from. `tools` and further `arguments` (`enable_thinking` of some models) go to the chat template
        as transformers gives them. Raises `InvalidInput` for a model without a chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidInput(f"{self.name} has no chat template: give it raw text (--raw on the command line, `generate` in Python)")
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                **arguments,
            )
        except Exception as error:  # a template raises what it likes, often a jinja2 error
            raise InvalidInput(f"the model's chat template refuses these messages: {error}") from error
        return [int(token) for token in ids]

    def reset(self) -> None:
        """Forget the texts that were computed, so that the next prompt is computed from its first token."""
        self.engine.forget()

    def close(self) -> None:
        """End all answers that are under way, and give back their memory."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose_budget(self, method: str, asked: int | None) -> int | None:
        """Nodes a tree; None: the measured budget."""
        asked = self.budget if asked is None else asked
        if asked is not None and asked < 0:
            raise InvalidInput(f"budget={asked}: must be a number of nodes, or 0 for the measured one")
        if asked and (most := self.model.most_nodes) is not None and asked > most:
            raise InvalidInput(f"budget={asked}: bit-identical verification takes at most {most} nodes; turn exact off for more")
        chosen = preset(method)
        return (chosen.budget if asked is None or not chosen.sources else asked) or None


def choices(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of `params.n` answers: seeds of their own, the first one's as given."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else (params.seed + i * CHOICE) % 2**64 for i in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


def finish(stream: Stream) -> Completion:
    """Run an answer to its end."""
    for _ in stream:
        pass
    return stream.completion


def finish_all(engine: Engine, streams: Sequence[Stream], shown: bool) -> None:
    """Run answers side by side, in order of arrival, to their ends, with a bar where it is to be `shown`. Raises what ended one of them."""
    running, later = list[Stream](), deque(streams)
    with tqdm(total=len(streams), disable=not shown, unit="answer", leave=False) as bar:
        while running or later:
            while later and len(running) < engine.scheduler.most:  # no other can be over: whoever came first runs first
                running.append(later.popleft())
            with engine.lock:
                if not any(one.over for one in running):
                    engine.step()
            before, running = running, []
            for one in before:
                if one.over:
                    finish(one)
                    bar.update(1)
                else:
                    running.append(one)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: int | str) -> int:
    """A number of bytes, or a text such as `2GB` or `512 MiB`. Raises `InvalidInput` for others."""
    text = str(size).strip().upper()
    number = text.rstrip("KMGTIB ")
    unit = text[len(number) :].strip()
    try:
        value = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise InvalidInput(f"{size!r} is not a size of memory: give bytes, or as in 2GB or 512MiB")
    return value
