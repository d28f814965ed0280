"""The Python interface: a model, a method, answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch
from typing_extensions import Self, Unpack

from quickbeam import hub
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.loading import load_drafter
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.drafters.vocabulary import Shortlists, is_listed
from quickbeam.engine.budget import MAX_NODES_SLOW
from quickbeam.engine.engine import MOST_ACTIVE, Engine
from quickbeam.engine.loop import Client, EngineThread
from quickbeam.engine.output import Output
from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import Request
from quickbeam.engine.stream import Ends, Stream, results
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput
from quickbeam.grammar.compiler import Compiler
from quickbeam.grammar.spec import Grammar
from quickbeam.machine import in_own_thread
from quickbeam.methods import DRAFTER, METHODS, make_method, preset, stand_in
from quickbeam.methods.base import Method
from quickbeam.models.formats import check_weights, refuse_place
from quickbeam.models.loading import pick_device, wanted_dtype
from quickbeam.models.memory import free_memory
from quickbeam.models.native import choice, library
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.opening import open_model
from quickbeam.models.streamed_loading import refuse_memory
from quickbeam.options import (
    BESIDE,
    FREQUENCY,
    FULL,
    SHORTENED,
    Options,
    Setting,
    check_options,
    check_vocab,
    temperature_class,
)
from quickbeam.params import COUPLED, SamplingParams
from quickbeam.sampling import Sampler, bad_word_ids
from quickbeam.sizes import parse_bytes

Prompt = str | Sequence[int]
Message = dict[str, Any]
Observer = Callable[[StepRecord], None]
SHARE = 0.5  # the share of the memory free after loading that keys and values may take


class LLM:
    """A causal language model that drafts ahead and gives the answers of plain decoding.

    - `model`: a Hugging Face id, a folder or a `.gguf` file. None takes the embedded default, which
      is fetched on first use.
    - `method`: a name of `methods/__init__.py`. A call may name another one.
    - `dtype`: `bfloat16`, `float16`, `float32`, or `auto` for the checkpoint's own.
    - `device`: the device to run on. None takes CUDA where there is one, else the CPU.
    - `budget`: nodes of a draft tree, the root included, at most 512. None takes the preset's, 0
      the measured budget. A call may give its own.
    - `drafter`: a smaller model with the same vocabulary, or a feature drafter of this model, named
      as `model` is. None takes the one that comes with an embedded model. The drafter is loaded
      when a method first needs it.
    - `vocab`: which part of the vocabulary the drafter scores, one of `options.VOCABS`. None takes
      the preset's. A call may give its own.
    - `shortlist`: about how many tokens that part has. None takes the default of
      `drafters/vocabulary.py`. A call may give its own.
    - `max_running`: how many answers run side by side; the others wait their turn.
    - `kv_memory`: memory for keys and values, in bytes or as in `"2GB"`. None takes half of what is
      free.
    - `share_prefixes`: whether texts that begin alike share what was computed of their beginning.
    - `revision`, `device_map`, `trust_remote_code`: as in transformers. A `device_map` must put
      everything on one device.
    - `weights`: `bfloat16`, or `int8` or `int4` (on a CPU). The model is quantised at the first
      load, and the result is kept in the cache folder. The promise about answers then holds for the
      quantised model.
    - `draft_weights`: the same for a smaller model that drafts. None takes the model's own format,
      which changes no answer.
    - `memory`: how much the model's weights may take, in bytes or as in `"2GB"`. The weights beyond
      that are brought in every pass (`docs/memory.md`): on a CPU from disk, on CUDA from the host's
      memory.
    - `progress`: called as `progress(stage, fraction)` while an embedded model is fetched and while
      the native kernels are compiled.

    Any number of answers may be under way at once, from any threads. They share each pass, and none
    depends on the others. `close` ends them all; leaving a `with` block does the same.

    Acceptance rates and costs that are learned in one answer are used in the next. They never
    change a token of an answer. The exception is `SamplingParams(coupling="residual")`: there the
    answer depends on the draft, though its distribution does not. So that a seed repeats those
    answers too, each seeded one begins with a policy that has learned nothing. With a measured
    budget they may still differ.

    Raises `InvalidInput` for arguments that can't be used, before any work.
    """

    # Parameters that the model's generation config names. Servers take them where a request gives
    # none.
    sampling_defaults: Mapping[str, float] = {}

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
        max_running: int = MOST_ACTIVE,
        kv_memory: int | str | None = None,
        share_prefixes: bool = True,
        revision: str | None = None,
        device_map: str | dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        weights: str = BFLOAT16,
        draft_weights: str | None = None,
        memory: int | str | None = None,
        progress: Any = None,
    ) -> None:
        _check_budget(budget)
        drafter = drafter or hub.shipped_drafter(model)
        method = stand_in(method, drafter is not None)
        chosen = preset(method)
        check_vocab(vocab or chosen.vocab)
        self._kv_memory = None if kv_memory is None else parse_bytes(kv_memory)
        if not isinstance(max_running, int) or max_running < 1:
            raise InvalidInput(
                f"max_running={max_running!r}: must be at least 1 sequence side by side"
            )
        torch_dtype, place = wanted_dtype(dtype), pick_device(device)
        refuse_place(check_weights(weights), place, torch_dtype)
        if draft_weights is not None:
            refuse_place(check_weights(draft_weights), place, torch_dtype)
        self._draft_weights, limit = draft_weights, None if memory is None else parse_bytes(memory)
        if limit is not None:
            refuse_memory(place, torch_dtype, device_map)
        for name in (model, drafter):
            if name is not None:
                hub.check_source(name)
        choice.requested()  # raises for unknown words, even where no kernels are used
        if place.type == "cpu" and torch_dtype in (torch.bfloat16, None):
            library.prepare(lambda stage: progress and progress(stage, None))
        self.folder = str(hub.resolve(model, progress))
        self.name = model or hub.DEFAULT
        if progress:
            progress(f"loading {self.name}", None)
        self.method, self.budget, self.vocab, self.shortlist = method, budget, vocab, shortlist
        opening = partial(
            open_model,
            self.folder,
            torch_dtype,
            place,
            weights=weights,
            memory=limit,
            device_map=device_map,
            progress=progress,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        opened = in_own_thread(opening)
        self.sampling_defaults = opened.sampling
        engine = Engine(opened.model, most=max_running, share=share_prefixes)
        self._progress, self._trusted = progress, trust_remote_code
        self._take(engine, opened.tokenizer, opened.ends, drafter)
        self.prepare(method)
        if self._choose_budget(method, None) is None:
            # measured now, and not in the first answer
            self.thread.call(lambda: engine.budget)

    def _take(self, engine: Engine, tokenizer: Any, ends: set[int], drafter: str | None) -> None:
        """Set up answering with a model that is loaded."""
        self.engine, self.model, self.tokenizer, self.eos_ids = (
            engine,
            engine.model,
            tokenizer,
            ends,
        )
        self.thread = EngineThread(engine)
        self._grammars = Compiler(tokenizer, self.model.vocab_size, ends)
        # policies keep what they learned in earlier answers
        self._policies: dict[Setting, Method] = {}
        self._shortlists: Shortlists | None = None
        self._drafter_name = drafter
        self._drafter: Drafter | None = None
        self._listed = False  # whether the drafter comes with a list of frequent tokens
        # calls of `prepare` that are done
        self._prepared = set[tuple[str, str | None, int | None]]()
        self._bound_memory()

    def _bound_memory(self) -> None:
        """Set how many pages of keys and values there may be.

        A page counts the target's bytes and the drafter's. Raises `InvalidInput` where fewer than 2
        pages fit.
        """
        pool, drafter = self.model.pool, None if self._drafter is None else self._drafter.pool
        if self._kv_memory is None:
            self._kv_memory = int(SHARE * free_memory(self.model.device))
        pages = self._kv_memory // (
            pool.page_bytes + (drafter.page_bytes if drafter is not None else 0)
        )
        if pages < 2:
            raise InvalidInput(
                f"kv_memory={self._kv_memory} bytes: keys and values of {pool.page} tokens take "
                f"{pool.page_bytes}; give more"
            )
        pool.limit = pages

    @property
    def kernels(self) -> str:
        """What computes the passes: `native (avx2)`, `native (avx2, int8)`, or `PyTorch's` with the
        reason."""
        return self.model.describe()

    def describe(self) -> str:
        """Return `kernels`, and where weights are read from disk, how much of them and how fast."""
        streamed = self.model.streamed
        return self.kernels if streamed is None else f"{self.kernels}, {streamed.in_words}"

    @property
    def methods(self) -> list[str]:
        """The names of the methods that can be used. Without a drafter, those that need none."""
        return [
            name
            for name, one in METHODS.items()
            if self._drafter_name or one.without or DRAFTER not in one.sources
        ]

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar, so that answers with it begin at once. Raises `InvalidInput`."""
        self._grammars.compile(grammar)

    def room(self, prompt: int, method: str | None = None) -> int:
        """Return the most tokens that an answer to a prompt of `prompt` tokens may have.

        The context lengths of the model and its drafter and the memory for keys and values limit
        it. 0 or less means that there is no room. Loads the drafter if `method` needs it.
        """
        name, limit = (
            stand_in(method or self.method, self._drafter_name is not None),
            self.model.pool.limit,
        )
        drafter = (self._drafter or self.prepare(name)) if DRAFTER in preset(name).sources else None
        read = None if drafter is None else drafter.context_length
        limits = [
            self.model.context_length,
            read,
            None if limit is None else limit * self.model.pool.page - 1,
        ]
        return min(most for most in limits if most is not None) - prompt

    def prepare(
        self, method: str, vocab: str | None = None, shortlist: int | None = None
    ) -> Drafter | None:
        """Load the drafter and its shortlist for `method`, unless they are loaded or not needed.

        Returns the drafter, or None where there is none or none is needed.
        """
        if self._drafter_name is None or DRAFTER not in preset(method).sources:
            return None
        asked = method, vocab, shortlist
        if asked not in self._prepared:
            self.thread.call(partial(self._load_drafter, method, vocab, shortlist))
            self._prepared.add(asked)
        return self._drafter

    def _load_drafter(self, method: str, vocab: str | None, shortlist: int | None) -> None:
        """Load the drafter and its shortlist for `method`, on the engine's thread."""
        if self._drafter is None:
            assert self._drafter_name is not None
            self._drafter = load_drafter(
                self._drafter_name,
                self.model,
                self.tokenizer,
                progress=self._progress,
                trust_remote_code=self._trusted,
                weights=self._draft_weights,
            )
            self._listed, self._shortlists = (
                is_listed(self._drafter),
                Shortlists(self._drafter, self.model),
            )
            self._bound_memory()
        self._shortlist(self._setting(method, vocab, shortlist))

    def _setting(self, method: str, vocab: str | None, shortlist: int | None) -> Setting:
        """Return the setting of a method. If the method has a drafter, it must be loaded."""
        vocab = vocab or self.vocab or preset(method).vocab
        if vocab == SHORTENED:
            vocab = FREQUENCY + BESIDE if self._listed else FULL
        return Setting(method, vocab, self.shortlist if shortlist is None else shortlist)

    def _shortlist(self, setting: Setting) -> Shortlist | None:
        return (
            None
            if self._shortlists is None
            else self._shortlists.get(setting.vocab, setting.shortlist)
        )

    @overload
    def generate(
        self,
        prompts: str | list[int],
        params: SamplingParams | None = ...,
        *,
        method: str | None = ...,
        **options: Unpack[Options],
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
    def generate(
        self,
        prompts: Any,
        params: Any = None,
        *,
        method: str | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """Continue a prompt, or a list of prompts side by side.

        A prompt is text or a list of token ids; text is taken as it is. For several prompts,
        `params` may be a list with an entry for each. With `params.n` above 1 each prompt has `n`
        answers, which stand one after the other in the list. `progress`: whether to show a bar for
        several answers; None shows it on a terminal. `options` are those of `Options`.

        Raises `InvalidInput` for what can't be used.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            found = self._all([self._ids(prompts)], params, method, options, False)
            return found if len(found) > 1 else found[0]
        return self._all(
            [self._ids(prompt) for prompt in prompts], params, method, options, progress
        )

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = ...,
        *,
        method: str | None = ...,
        **options: Unpack[Options],
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
        """Answer a conversation, `[{"role": "user", "content": "…"}, …]`, or several side by side.

        `template` holds further arguments for `encode_chat`. The rest is as in `generate`.
        """
        if len(messages) > 0 and not isinstance(messages[0], dict):
            return self._all(
                [self.encode_chat(one, **(template or {})) for one in messages],
                params,
                method,
                options,
                progress,
            )
        found = self._all(
            [self.encode_chat(messages, **(template or {}))], params, method, options, False
        )
        return found if len(found) > 1 else found[0]

    def _all(
        self,
        prompts: Sequence[list[int]],
        params: Any,
        method: str | None,
        options: Any,
        progress: bool | None,
    ) -> list[Completion]:
        """Return the answers to all prompts, computed side by side."""
        every = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(every) != len(prompts):
            raise InvalidInput(
                f"{len(every)} parameters for {len(prompts)} prompts: give one for "
                "all, or one for each"
            )
        streams, ends = list[Stream](), Ends()
        try:
            for ids, one in zip(prompts, every, strict=True):
                for choice in range((one or SamplingParams()).n):
                    streams.append(self._begin(ids, one, method, options, None, choice, ends))
            shown = progress if progress is not None else len(streams) > 1 and sys.stderr.isatty()
            return results(streams, ends, shown)
        except BaseException:
            for stream in streams:
                stream.cancel()
            for stream in streams:
                stream.close()
            raise

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        observer: Observer | None = None,
        template: dict[str, Any] | None = None,
        client: Client | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Answer a conversation piece by piece; see `chat`, and `stream` for the arguments."""
        ids = self.encode_chat(messages, **(template or {}))
        return self._begin(ids, params, method, options, observer, 0, client)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        observer: Observer | None = None,
        choice: int = 0,
        client: Client | None = None,
        tenant: Hashable = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Continue one prompt piece by piece; see `generate`.

        `observer` is called with every step, and `client` is notified of it, both on the engine's
        thread. `choice`: which of the `n` answers to give, counted from 0. `tenant`: whose request
        it is; tenants take turns where requests wait.
        """
        ids = self._ids(prompt)
        return self._begin(ids, params, method, options, observer, choice, client, tenant)

    def _ids(self, prompt: Prompt) -> list[int]:
        return (
            list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        )

    def _begin(
        self,
        ids: list[int],
        params: SamplingParams | None,
        method: str | None,
        options: Options,
        observer: Observer | None,
        choice: int = 0,
        client: Client | None = None,
        tenant: Hashable = None,
    ) -> Stream:
        check_options(options)
        params, name = (
            params or SamplingParams(),
            stand_in(method or self.method, self._drafter_name is not None),
        )
        if not ids:
            raise InvalidInput("an empty prompt: give some text")
        self.model.check_prompt(ids)
        drafter = self.prepare(name, options.get("vocab"), options.get("shortlist"))
        setting = self._setting(name, options.get("vocab"), options.get("shortlist"))
        setting = setting._replace(
            temperature_class=temperature_class(params), constrained=params.grammar is not None
        )
        policy = make_method(name, drafter)
        if params.seed is None or params.greedy or params.coupling == COUPLED:
            policy = self._policies.setdefault(setting, policy)
        output = Output(self.tokenizer, params, self.eos_ids)
        bad = bad_word_ids(self.tokenizer, params.bad_words)
        masks = (
            None if params.grammar is None else self._grammars.begin(params.grammar, output.ends)
        )
        sequence = self.engine.new_sequence(
            Request(
                ids,
                params,
                policy,
                output,
                Sampler(
                    params, ids, self.model.vocab_size, ends=output.ends, bad=bad, grammar=masks
                ),
                self._choose_budget(name, options.get("budget")),
                setting,
                self._shortlist(setting) if drafter is not None else None,
                observer,
                choice,
                tenant,
            )
        )
        return Stream(self.thread, sequence, self.name, name, client)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the model's answer begins.

        With `continue_final_message` the ids end with the last message, and the answer continues
        it. `tools` and further `arguments` (such as `enable_thinking` of some models) go to the
        chat template, as in transformers. Raises `InvalidInput` for a model without a chat template
        and for messages that the template refuses.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidInput(
                f"{self.name} has no chat template: give it raw text (--raw on the "
                "command line, `generate` in Python)"
            )
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
        except Exception as error:  # a template may raise anything, often a jinja2 error
            raise InvalidInput(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return [int(token) for token in ids]

    def reset(self) -> None:
        """Empty the prefix cache, so that the next prompt is computed from its first token."""
        self.thread.call(self.engine.forget)

    def close(self) -> None:
        """End all answers that are under way and free their memory."""
        self.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose_budget(self, method: str, asked: int | None) -> int | None:
        """Return the nodes of a tree; None stands for the measured budget.

        Raises `InvalidInput` for a budget that is not a number of nodes, and for one that is too
        large for a tree.
        """
        asked = self.budget if asked is None else asked
        _check_budget(asked)
        chosen = preset(method)
        return (chosen.budget if asked is None or not chosen.sources else asked) or None


def _check_budget(budget: int | None) -> None:
    if budget is not None and (not isinstance(budget, int) or budget < 0):
        raise InvalidInput(
            f"budget={budget!r}: must be a number of nodes, or 0 for the measured one"
        )
    if budget is not None and budget > MAX_NODES_SLOW:
        raise InvalidInput(
            f"budget={budget}: a tree has at most {MAX_NODES_SLOW} nodes; give fewer"
        )
