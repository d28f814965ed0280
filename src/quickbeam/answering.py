"""Answers of a model that is loaded: whole or piece by piece, to one prompt or to many at once."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import partial
from operator import index
from typing import Any, overload

from tqdm.auto import tqdm
from typing_extensions import Self, Unpack

from quickbeam.drafters.base import Drafter
from quickbeam.drafting import Drafting, DraftOptions
from quickbeam.engine.budget import MAX_NODES_SLOW
from quickbeam.engine.engine import Engine
from quickbeam.engine.loop import Client, EngineThread, refuse_copy
from quickbeam.engine.output import Output
from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import Request
from quickbeam.engine.stream import Stream
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.grammar.compiler import GrammarCompiler
from quickbeam.grammar.spec import Grammar
from quickbeam.methods import preset
from quickbeam.models.chat_template import as_messages, for_template
from quickbeam.models.memory import free_memory
from quickbeam.models.opening import LoadedModel
from quickbeam.options import Budget, CallArgs, ChatArgs, Options, check_options, temperature_class
from quickbeam.params import SamplingParams, check_values, optional, whole
from quickbeam.sampling import Sampler, bad_word_ids

Prompt = str | Sequence[int]
Message = dict[str, Any]
Conversation = str | Sequence[Message]  # a text is one message of the user's
Observer = Callable[[StepRecord], None]
One = SamplingParams | None
Many = SamplingParams | Sequence[SamplingParams] | None
TEMPLATE_RULES = {
    "template": (
        lambda given: isinstance(given, Mapping | None),
        "a dict of arguments for the chat template, as {'tools': […]}",
    )
}
STREAM_RULES = {
    "choice": (optional(whole(0)), "an integer of at least 0, or None"),
    "observer": (optional(callable), "a function that is called with each step's StepRecord"),
}
SHARE = 0.5  # the share of the memory free after loading that keys and values may take


class Answering:
    """Answers of a model that is loaded.

    - `name`: what completions and errors call the model.
    - `drafting`: what drafts for it.
    - `method`, `budget`: those of calls that name none; see `LLM`.
    - `kv_memory`: bytes for keys and values; None takes half of what is free.
    - `engine`: further arguments of `Engine`.

    Any number of answers may be under way at once, from any threads. They share each pass, and none
    depends on the others. `close` ends them all; leaving a `with` block does the same.

    Acceptance rates and costs that are learned in one answer are used in the next. They never
    change a token of an answer. The exception is `SamplingParams(coupling="residual")`: there the
    answer depends on the draft, though its distribution does not. So that a seed repeats those
    answers too, each seeded one begins with a policy that has learned nothing. With a measured
    budget they may still differ.
    """

    def __init__(
        self,
        opened: LoadedModel,
        name: str,
        drafting: Drafting,
        method: str = "auto",
        budget: Budget | None = None,
        kv_memory: int | None = None,
        **engine: Any,
    ) -> None:
        self.model, self.tokenizer, self.eos_ids = opened.model, opened.tokenizer, opened.ends
        # what the model's generation config names; servers take it where a request gives none
        self.sampling_defaults: Mapping[str, float] = opened.sampling
        self.name, self.method, self.budget, self.drafting = name, method, budget, drafting
        self.engine = Engine(opened.model, **engine)
        self.thread = EngineThread(self.engine)
        self._grammars = GrammarCompiler(self.tokenizer, self.model.vocab_size, self.eos_ids)
        self._kv_memory = kv_memory
        self._bound_memory()

    __reduce__ = refuse_copy

    def _bound_memory(self) -> None:
        """Set how many pages of keys and values there may be, of target and drafter together."""
        pool, drafter = self.model.pool, self.drafting.drafter
        if self._kv_memory is None:
            free = free_memory(self.model.device) - self.model.mapped_bytes
            self._kv_memory = max(0, int(SHARE * free))
        beside = drafter.pool if drafter is not None else None
        pages = self._kv_memory // (pool.page_bytes + (beside.page_bytes if beside else 0))
        if pages < 2:
            raise InvalidInput(
                f"kv_memory={self._kv_memory} bytes: keys and values of {pool.page} tokens take "
                f"{pool.page_bytes}; give more"
            )
        pool.limit = pages

    @property
    def kernels(self) -> str:
        """What computes the passes, as `native (avx2, int8)`, or `PyTorch's` with the reason."""
        return self.model.describe()

    def describe(self) -> str:
        """Return `kernels`, and where weights are read from disk, how much of them and how fast."""
        streamed = self.model.streamed
        return self.kernels if streamed is None else f"{self.kernels}, {streamed.in_words}"

    @property
    def methods(self) -> list[str]:
        """The names of the methods that can be used, with this model's `vocab` and `shortlist`.

        Every other method is refused. Loads the drafter if needed, and raises as that does.
        """
        if not self.drafting.loaded:
            self.thread.call(self._load_drafter)
        return list(self.drafting.methods)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar, so that answers with it begin at once. Raises `InvalidInput`."""
        if not isinstance(grammar, Grammar):
            raise InvalidInput(
                f"grammar={reprlib.repr(grammar)}: must be a Grammar, as Grammar.regex(…) makes one"
            )
        self._grammars.compile(grammar)

    def room(self, prompt: int, method: str | None = None) -> int:
        """Return the most tokens that an answer to a prompt of `prompt` tokens may have.

        Context lengths and the memory for keys and values limit it. Loads the drafter if needed.
        """
        drafter = self.prepare(self.drafting.method(method or self.method))
        return min(most for most, *_ in self.engine.limits(drafter)) - prompt

    def prepare(
        self, method: str, vocab: str | None = None, shortlist: int | None = None
    ) -> Drafter | None:
        """Load and return the drafter of `method`; None where there is none or none is needed."""
        if self.drafting.lacks(asked := (method, vocab, shortlist)):
            self.thread.call(partial(self._prepare, asked))
        return self.drafting.drafter if self.drafting.drafts(method) else None

    def _prepare(self, asked: DraftOptions) -> None:
        self._load_drafter()
        self.drafting.prepare(asked)

    def _load_drafter(self) -> None:
        self.drafting.load(self.model, self.tokenizer)
        self._bound_memory()

    @overload
    def generate(
        self,
        prompts: str | list[int],
        params: SamplingParams | None = ...,
        **options: Unpack[CallArgs],
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: Many = ..., **options: Unpack[CallArgs]
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Any, params: Any = None, *, progress: bool | None = None, **options: Any
    ) -> Any:
        """Continue a prompt, or a list of prompts side by side.

        A prompt is text or a list of token ids; text is taken as it is. For several prompts,
        `params` may be a list with an entry for each. With `params.n` above 1 each prompt has `n`
        answers, which stand one after the other in the list. `progress`: whether to show a bar for
        several answers; None shows it on a terminal. `options` are those of `Options`.

        Raises `InvalidInput` for what can't be used, and what ended an answer; the `completions` of
        that error are the answers so far.
        """
        one = not _is_list(prompts)
        if not one and len(prompts):
            first = prompts[0]  # a text, a list or an array where there are several
            one = not isinstance(first, str | Sequence) and not getattr(first, "ndim", 0)
        return self._all([prompts] if one else prompts, one, params, progress, options)

    @overload
    def chat(
        self, messages: Conversation, params: One = ..., **options: Unpack[ChatArgs]
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: list[str] | Sequence[Sequence[Message]],
        params: Many = ...,
        **options: Unpack[ChatArgs],
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Any,
        params: Any = None,
        *,
        progress: bool | None = None,
        template: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Answer a conversation, or a list of conversations side by side.

        A conversation is a list of messages, `[{"role": "user", "content": "…"}, …]`. A text is a
        conversation with one message of the user's. `template` holds further arguments for
        `encode_chat`. The rest is as in `generate`.
        """
        one = not _is_list(messages) or not len(messages)
        one = one or not isinstance(messages[0], str | Sequence)
        every = [messages] if one else messages
        prompts = [self._encode(conversation, template) for conversation in every]
        return self._all(prompts, one, params, progress, options)

    def _all(
        self, prompts: Sequence[Prompt], one: bool, params: Any, progress: bool | None, options: Any
    ) -> Any:
        """Return the answers to all prompts, computed side by side. To `one`, the answer alone."""
        if "choice" in options:
            raise InvalidInput("choice: this gives all n answers; `stream` gives a single one")
        every = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(every) != len(prompts):
            raise InvalidInput(
                f"{len(every)} parameters for {len(prompts)} prompts: give one for "
                "all, or one for each"
            )
        streams = list[Stream]()
        try:
            for prompt, own in zip(prompts, every, strict=True):
                for number in range(_checked(own).n):
                    streams.append(self.stream(prompt, own, choice=number, **options))
            several = len(streams) > 1 and not one and sys.stderr.isatty()
            shown = several if progress is None else progress
            bar = tqdm(streams, disable=not shown, unit="answer", leave=False)
            answers = [stream.result() for stream in bar]
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            for stream in streams:
                stream.close()
            if isinstance(error, QuickbeamError):
                error.completions = [stream.completion for stream in streams]
            raise
        return answers[0] if one and len(answers) == 1 else answers

    def chat_stream(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        template: dict[str, Any] | None = None,
        **options: Any,
    ) -> Stream:
        """Answer a conversation piece by piece; see `chat`, and `stream` for the options."""
        return self.stream(self._encode(messages, template), params, **options)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        observer: Observer | None = None,
        choice: int | None = None,
        client: Client | None = None,
        tenant: Hashable = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Continue one prompt piece by piece; see `generate`.

        `observer` is called with every step, and `client` is notified of it, both on the engine's
        thread. `choice`: which of the `n` answers to give, counted from 0. `tenant`: whose request
        it is; tenants take turns where requests wait.
        """
        check_options(options)
        check_values({"choice": choice, "observer": observer}, STREAM_RULES)
        params = _checked(params)
        if choice is None and params.n > 1:
            raise InvalidInput(
                f"n={params.n}: this gives one answer; ask for each with choice=0 to {params.n - 1}"
            )
        choice = choice or 0
        name = self.drafting.method(options.get("method") or self.method)
        ids = self._ids(prompt)
        self.model.check_prompt(ids)
        asked = name, options.get("vocab"), options.get("shortlist")
        self.prepare(*asked)
        setting = self.drafting.setting(*asked)._replace(
            temperature_class=temperature_class(params), constrained=params.grammar is not None
        )
        output = Output(self.tokenizer, params, self.eos_ids)
        bad = bad_word_ids(self.tokenizer, params.bad_words)
        size, ends, grammar = self.model.vocab_size, output.ends, params.grammar
        masks = None if grammar is None else self._grammars.begin(grammar, ends)
        budget = options.get("budget")
        request = Request(
            ids,
            params,
            self.drafting.policy(setting, params),
            output,
            Sampler(params, ids, size, ends=ends, bad=bad, grammar=masks),
            choose_budget(self.budget if budget is None else budget, name),
            setting,
            self.drafting.shortlist(setting),
            observer,
            choice,
            _hashable(tenant),
        )
        return Stream(self.thread, self.engine.new_sequence(request), self.name, name, client)

    def _ids(self, prompt: Any) -> list[int]:
        """Return a prompt's token ids. Raises `InvalidInput` for what is neither text nor ids."""
        try:
            if isinstance(prompt, bytes | Mapping | Set):
                raise TypeError("what could be iterated over holds no token ids")
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            ids = [*map(index, ids)]
        except TypeError as error:
            raise InvalidInput(
                "a prompt is a text of whole characters, or a list of token ids, not "
                f"{reprlib.repr(prompt)} (messages go to `chat`)"
            ) from error
        if not ids:
            raise InvalidInput("an empty prompt: give some text")
        return ids

    def encode_chat(
        self,
        messages: Conversation,
        *,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the model's answer begins.

        A text stands for one message of the user's. With `continue_final_message` the ids end with
        the last message, and the answer continues it. `tools` and further `arguments` (such as
        `enable_thinking` of some models) go to the chat template, as in transformers. Raises
        `InvalidInput` for a model without a chat template, for messages that lack a role or
        content or hold more than text, and for those that the template refuses.
        """
        messages = as_messages(messages)
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidInput(
                f"{self.name} has no chat template: give it raw text (--raw on the "
                "command line, `generate` in Python)"
            )
        try:
            template = self.tokenizer.get_chat_template(arguments.get("chat_template"), tools=tools)
            ids = self.tokenizer.apply_chat_template(
                for_template(template, messages),
                tools=None if tools is None else list(tools),
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                **arguments,
            )
        except InvalidInput:
            raise
        except Exception as error:  # a template may raise anything, often a jinja2 error
            raise InvalidInput(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return [int(token) for token in ids]

    def _encode(self, messages: Conversation, template: Any) -> list[int]:
        check_values({"template": template}, TEMPLATE_RULES)
        return self.encode_chat(messages, **(template or {}))

    def reset(self) -> None:
        """Empty the prefix cache, so that the next prompt is computed from its first token."""
        self.thread.call(self.engine.forget)

    def close(self) -> None:
        """End all answers that are under way and free their memory. No more can be asked for."""
        self.thread.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.thread.closed else ""
        return f"{type(self).__name__}({self.name!r}, method={self.method!r}{closed})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_list(value: Any) -> bool:
    """Whether a value is a list or an array of prompts or messages, and not one of them."""
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return listed and not isinstance(value, str | bytes | Mapping)


def _checked(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams | None):
        raise InvalidInput(
            f"params={reprlib.repr(params)}: must be a SamplingParams, as "
            "SamplingParams(max_tokens=100)"
        )
    return params or SamplingParams()


def _hashable(tenant: Hashable) -> Hashable:
    try:
        hash(tenant)
    except TypeError as error:
        raise InvalidInput(f"tenant={tenant!r}: give what can be hashed, as a text") from error
    return tenant


def choose_budget(asked: Budget | None, method: str) -> int | None:
    """Return the nodes of a tree of `method`; None: the measured budget. Raises `InvalidInput`."""
    asked = 0 if asked == "auto" else asked
    if asked is not None and not whole(0, MAX_NODES_SLOW)(asked):
        raise InvalidInput(
            f"budget={asked!r}: must be auto (or 0) for the measured budget, or a number of "
            f"nodes, at most {MAX_NODES_SLOW}"
        )
    chosen = preset(method)
    return (chosen.budget if asked is None or not chosen.sources else int(asked)) or None
