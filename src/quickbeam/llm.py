"""The Python interface: a model, a method, answers."""

from __future__ import annotations

import logging
import reprlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from os import fspath
from pathlib import Path
from typing import Any, overload

import torch
from tqdm.auto import tqdm
from typing_extensions import Self, Unpack

from quickbeam import __version__, hub
from quickbeam.config import (
    CallArgs,
    CallOptions,
    ChatArgs,
    LLMOptions,
    ReportProgress,
    check_call,
    optional_bytes,
    takes,
)
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.candidates import Candidate, list_candidates
from quickbeam.drafters.eagle import EagleDrafter
from quickbeam.drafters.eagle_files import load_eagle
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.learning import LearnedNetwork
from quickbeam.drafters.loading import load_drafter
from quickbeam.drafters.mtp import runs_mtp
from quickbeam.drafters.ngram_table import NgramTable
from quickbeam.drafters.predicted_text import GAP
from quickbeam.drafters.texts import AnswerMemory
from quickbeam.engine.engine import Engine
from quickbeam.engine.gain import GREEDY, Trial, best_trial, measure_gain, timed
from quickbeam.engine.kept_prefixes import KeptPrefixes
from quickbeam.engine.learned_file import SUFFIX, LearnedFile
from quickbeam.engine.learning import Learner, LearningFigures
from quickbeam.engine.loop import Client, EngineThread, refuse_copy
from quickbeam.engine.method_store import LoadDrafter, MethodStore
from quickbeam.engine.output import Output
from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import Request
from quickbeam.engine.stream import Stream
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput, QuickbeamError, first_line
from quickbeam.grammar.compiler import GrammarCompiler
from quickbeam.grammar.spec import Grammar
from quickbeam.hub.mtp import MTP
from quickbeam.machine import in_own_thread
from quickbeam.methods import check_options, preset, stand_in, tree_budget
from quickbeam.models import builtin
from quickbeam.models.base import Model
from quickbeam.models.compile.native_model import kernels_on
from quickbeam.models.memory import free_memory
from quickbeam.models.native import choice as kernel_choice
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.opening import LoadedModel, open_model
from quickbeam.models.text.prompts import (
    Conversation,
    Message,
    Prompt,
    chat_ids,
    is_single_conversation,
    is_single_prompt,
    prompt_ids,
)
from quickbeam.models.vision.reader import PromptIds
from quickbeam.models.weights.digest import digest_of
from quickbeam.models.weights.formats import pick_device, refuse_memory, refuse_place, wanted_dtype
from quickbeam.params import SamplingParams, check_values, integer, optional
from quickbeam.sampling import Sampler, bad_word_ids

Observer = Callable[[StepRecord], None]
ParamsForAll = SamplingParams | Sequence[SamplingParams] | None
TEMPLATE_RULES = {
    "template": (
        lambda value: isinstance(value, Mapping | None),
        "a dict of arguments for the chat template, as {'tools': […]}",
    )
}
STREAM_RULES = {
    "choice": (optional(integer(0)), "an integer of at least 0, or None"),
    "observer": (optional(callable), "a function that is called with each step's StepRecord"),
}
KV_SHARE = 0.5  # the share of the memory free after loading that keys and values may take

CACHED_SKELETONS = 16  # lists of tools: agents send the same with each turn

# of a predicted text, about the longest tokens: what is beyond the context is not read
MAX_TOKEN_CHARACTERS = 16


logger = logging.getLogger(__name__)


class LLM:
    """A causal language model that drafts ahead and gives the answers of plain decoding.

    It takes the options that `quickbeam.config.LLMOptions` explains, by name; `model` and `method`
    may also be given in this order. A method that can't do without a drafter needs one. Raises
    `InvalidInput` for options that can't be used, before any work. With `drafter="auto"`,
    `drafter_trials` are the drafters that were measured.

    Any number of answers may be under way at once, from any threads. They share each pass, and none
    depends on the others. `close` ends them all; leaving a `with` block does the same.

    Acceptance rates and costs that are learned in one answer are used in the next. They never
    change a token of an answer. The exception is `SamplingParams(coupling="residual")`: there the
    answer depends on the draft, though its distribution does not. So that a seed repeats those
    answers too, each seeded one begins with a method that has learned nothing. With a measured
    budget they may still differ.
    """

    @takes(LLMOptions)
    def __init__(self, options: LLMOptions) -> None:
        check_options(options)
        name, progress = options.source or hub.DEFAULT, options.progress
        answers = _answer_memory(options, name)

        # the model
        dtype, device = wanted_dtype(options.dtype), pick_device(options.device)
        refuse_place(options.weights, device, dtype)
        if options.draft_weights is not None:
            refuse_place(options.draft_weights, device, dtype)
        kernels = prepare_kernels(device, dtype, progress)
        if options.memory is not None:
            refuse_memory(device, dtype, kernels)
        folder = str(builtin.resolve(options.source, progress))
        if progress is not None:
            progress(f"loading {name}", None)
        loaded = in_own_thread(
            lambda: open_model(
                folder,
                dtype,
                device,
                weights=options.weights,
                memory=optional_bytes(options.memory, "memory"),
                progress=progress,
                revision=options.revision,
                max_pixels=options.max_pixels,
            )
        )

        # its drafter
        self.drafter_trials: list[Trial] = []
        named = None if options.drafter is None else fspath(options.drafter)
        drafter = hub.drafter_for(options.source, named)
        table = None
        if table_folder := hub.table_of(options.source, named):
            table = NgramTable.load(table_folder, loaded.model.vocab_size)
        if drafter == MTP and options.drafter is None and not runs_mtp(loaded.model):
            drafter = None
        if drafter == hub.AUTO:
            candidates = list_candidates(options.source, folder, loaded.model, loaded.tokenizer)
            for candidate in candidates:
                if progress is not None:
                    progress(f"measuring the drafter {candidate.name}", None)
                trial = try_drafter(candidate, loaded, name, folder, options, table)
                self.drafter_trials.append(trial)
            drafter = _choose_drafter(self.drafter_trials, options.method)

        self.folder = folder
        load = drafter_loader(str(drafter), folder, options, progress) if drafter else None
        self._start(loaded, name, options, load, answers, table)
        if options.keep is not None and options.prefix_bytes and options.share_prefixes:
            files = Path(f"{options.keep}.prefixes")
            identity = self._identity(str(drafter))
            self.engine.prefixes.kept = KeptPrefixes(files, identity, options.prefix_bytes)
        self.prepare(self.method_store.resolve(self.method))
        if options.learn:
            self.engine.learner = self._make_learner(options)
        if tree_budget(self.budget, self.method) == "auto":
            # measured now, not in the first answer
            self.thread.call(lambda: self.engine.budget)

    @classmethod
    def of_loaded(
        cls,
        loaded: LoadedModel,
        name: str,
        options: LLMOptions | None = None,
        load_drafter: LoadDrafter | None = None,
        table: NgramTable | None = None,
    ) -> Self:
        """Return an `LLM` of a model that is loaded.

        `name`: what completions and errors call it. `options`: those that don't say how to load it.
        `table`: n-grams of the model's own text, to draft from without a drafter.
        """
        options = options or LLMOptions()
        llm = cls.__new__(cls)
        llm.folder = ""
        llm.drafter_trials = []
        llm._start(loaded, name, options, load_drafter, _answer_memory(options, name), table)
        return llm

    def _start(
        self,
        loaded: LoadedModel,
        name: str,
        options: LLMOptions,
        load_drafter: LoadDrafter | None,
        answers: AnswerMemory | None,
        table: NgramTable | None = None,
    ) -> None:
        self.model, self.tokenizer, self.eos_ids = loaded.model, loaded.tokenizer, loaded.eos_ids
        self.images = loaded.images
        # what the model's generation config names; servers take it where a request gives none
        self.sampling_defaults: Mapping[str, float] = loaded.sampling
        self.name, self.budget = name, options.budget
        self.method = stand_in(options.method, load_drafter is not None)
        if answers is not None:
            answers.check(self.model.vocab_size)
        kernels = library.kernels()
        self.method_store = MethodStore(
            self.model,
            self.tokenizer,
            load_drafter,
            vocab=options.vocab,
            shortlist=options.shortlist,
            kernels=kernels,
        )
        self.engine = Engine(
            self.model,
            max_running=options.max_running,
            share=options.share_prefixes,
            memory=answers,
            table=table,
            kernels=kernels,
        )
        self.thread = EngineThread(self.engine)
        self._grammars = GrammarCompiler(self.tokenizer, self.model.vocab_size, self.eos_ids)
        tokenizer = self.tokenizer
        self._skeleton_ids = lru_cache(CACHED_SKELETONS)(lambda texts: gapped_ids(tokenizer, texts))
        self._kv_bytes = optional_bytes(options.kv_memory, "kv_memory")
        self._bound_memory()

    def _identity(self, drafter: str) -> str:
        """Return what the keys and values of this model and of its drafter depend on."""
        files = [digest_of(self.folder), digest_of(drafter)]
        pixels = None if self.images is None else self.images.max_pixels
        return " ".join([__version__, *files, str(self.model.dtype), self.kernels, str(pixels)])

    def _make_learner(self, options: LLMOptions) -> Learner:
        """Return what lets the drafter learn. Raises `InvalidInput` for one that can't learn."""
        drafter = self.method_store.drafter
        if not isinstance(drafter, EagleDrafter) or drafter.folder is None:
            raise InvalidInput(
                f"learn=True: the method {self.method} drafts for {self.name} without a feature "
                "drafter, and no other drafter learns: name one that `quickbeam train` made, or "
                "leave it out"
            )
        if self.model.device.type != "cpu":
            raise InvalidInput(
                f"learn=True on {self.model.device.type}: drafters learn on the CPU alone"
            )
        network = load_eagle(drafter.folder, TargetParts.of(self.model))
        learned = LearnedNetwork(drafter, network, self.model, library.kernels())
        if options.keep is None:
            return Learner(learned)
        identity = f"{digest_of(self.folder)} {digest_of(str(drafter.folder))}"
        return Learner(learned, LearnedFile(Path(f"{options.keep}{SUFFIX}"), identity))

    __reduce__ = refuse_copy

    def _bound_memory(self) -> None:
        """Set how many pages of keys and values there may be, of target and drafter together."""
        pool, drafter = self.model.pool, self.method_store.drafter
        if self._kv_bytes is None:
            free = free_memory(self.model.device) - self.model.mapped_bytes
            self._kv_bytes = max(0, int(KV_SHARE * free))
        page_bytes = pool.page_bytes
        if drafter is not None and drafter.pool is not None:
            page_bytes += drafter.pool.page_bytes
        pages = self._kv_bytes // page_bytes
        if pages < 2:
            raise InvalidInput(
                f"kv_memory={self._kv_bytes} bytes: keys and values of {pool.page} tokens take "
                f"{pool.page_bytes}; give more"
            )
        pool.limit = pages

    # what it is

    @property
    def kernels(self) -> str:
        """What computes the passes, as `native (avx2, int8)`, or `PyTorch's` with the reason."""
        return self.model.describe()

    def describe(self) -> str:
        """Return `kernels`, and what a model that drafts takes.

        Where weights are read from disk, it also says how much of them and how fast.
        """
        parts = [self.kernels]
        if self.model.streamed is not None:
            parts.append(self.model.streamed.in_words)
        drafter = self.method_store.drafter
        if drafter is not None and drafter.weight_bytes:
            parts.append(f"the drafter's weights {drafter.weight_bytes / 1e6:.0f} MB")
        if self.engine.table is not None:
            parts.append(f"n-grams of {self.engine.table.text:,} tokens of its own text")
        return ", ".join(parts)

    @property
    def learning(self) -> LearningFigures | None:
        """What the drafter has learned so far; None where it doesn't learn."""
        learner = self.engine.learner
        return None if learner is None else learner.figures

    @property
    def methods(self) -> list[str]:
        """The names of the methods that can be used, with this model's `vocab` and `shortlist`.

        Every other method is refused. Loads the drafter if needed, and raises as that does.
        """
        if not self.method_store.loaded:
            self.thread.call(self._load_drafter)
        return self.method_store.usable

    def room(self, prompt: int, method: str | None = None) -> int:
        """Return the most tokens that an answer to a prompt of `prompt` tokens may have.

        Context lengths and the memory for keys and values limit it. Loads the drafter if needed.
        """
        drafter = self.prepare(self.method_store.resolve(method or self.method))
        return min(limit for limit, *_ in self.engine.limits(drafter)) - prompt

    def prepare(
        self, method: str, vocab: str | None = None, shortlist: int | None = None
    ) -> Drafter | None:
        """Load and return the drafter of `method`; None where there is none or none is needed."""
        if not self.method_store.uses_drafter(method):
            return None
        if not self.method_store.loaded:
            self.thread.call(self._load_drafter)
        setting = self.method_store.setting(method, vocab, shortlist)
        if not self.method_store.has_shortlist(setting):
            self.thread.call(lambda: self.method_store.shortlist(setting))
        return self.method_store.drafter

    def _load_drafter(self) -> None:
        self.method_store.load()
        self._bound_memory()

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar, so that answers with it begin at once. Raises `InvalidInput`."""
        if not isinstance(grammar, Grammar):
            raise InvalidInput(
                f"grammar={reprlib.repr(grammar)}: must be a Grammar, as Grammar.regex(…) makes one"
            )
        self._grammars.compile(grammar)

    # answers

    @overload
    def generate(
        self,
        prompts: str | list[int],
        params: SamplingParams | None = ...,
        **options: Unpack[CallArgs],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: ParamsForAll = ...,
        **options: Unpack[CallArgs],
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Any, params: Any = None, *, progress: bool | None = None, **options: Any
    ) -> Any:
        """Continue a prompt, or a list of prompts side by side.

        A prompt is text or a list of token ids; text is taken as it is. For several prompts,
        `params` may be a list with an entry for each. With `params.n` above 1 each prompt has `n`
        answers, which stand one after the other in the list. `progress`: whether to show a bar for
        several answers; None shows it on a terminal. `options` are those of `CallOptions`.

        Raises `InvalidInput` for what can't be used, and what ended an answer; the `completions` of
        that error are the answers so far.
        """
        if not is_single_prompt(prompts):
            return self._answer_all(prompts, params, progress, options)
        answers = self._answer_all([prompts], params, progress or False, options)
        return answers[0] if len(answers) == 1 else answers

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = ...,
        **options: Unpack[ChatArgs],
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: list[str] | Sequence[Sequence[Message]],
        params: ParamsForAll = ...,
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
        if not is_single_conversation(messages):
            prompts = [self._encode(conversation, template) for conversation in messages]
            return self._answer_all(prompts, params, progress, options)
        prompt = self._encode(messages, template)
        answers = self._answer_all([prompt], params, progress or False, options)
        return answers[0] if len(answers) == 1 else answers

    def _answer_all(
        self, prompts: Sequence[Prompt], params: Any, progress: bool | None, options: Any
    ) -> list[Completion]:
        """Return the answers to all prompts, computed side by side."""
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
            for prompt, prompt_params in zip(prompts, every, strict=True):
                for choice in range(_checked(prompt_params).n):
                    streams.append(self.stream(prompt, prompt_params, choice=choice, **options))
            shown = progress
            if progress is None:
                shown = len(streams) > 1 and sys.stderr.isatty()
            bar = tqdm(streams, disable=not shown, unit="answer", leave=False)
            return [stream.result() for stream in bar]
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            for stream in streams:
                stream.close()
            if isinstance(error, QuickbeamError):
                error.completions = [stream.completion for stream in streams]
            raise

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
        skeletons: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> Stream:
        """Continue one prompt piece by piece; see `generate`.

        `observer` is called with every step, and `client` is notified of it, both on the engine's
        thread. `choice`: which of the `n` answers to give, counted from 0. `tenant`: whose request
        it is; tenants take turns where requests wait. `skeletons`: texts that may stand in the
        answer in this order, with anything between two of them, as the fixed parts of tool calls
        do. They are drafted, by `auto`, and change no token.
        """
        check_call(options)
        check_values({"choice": choice, "observer": observer}, STREAM_RULES)
        params = _checked(params)
        if choice is None and params.n > 1:
            raise InvalidInput(
                f"n={params.n}: this gives one answer; ask for each with choice=0 to {params.n - 1}"
            )
        ids = prompt_ids(self.tokenizer, prompt)
        self.model.check_prompt(ids)

        # what drafts
        method = self.method_store.resolve(options.get("method") or self.method)
        vocab, shortlist = options.get("vocab"), options.get("shortlist")
        self.prepare(method, vocab, shortlist)
        setting = self.method_store.setting(method, vocab, shortlist).of_answer(params)
        budget = options.get("budget")

        # what samples
        output = Output(self.tokenizer, params, self.eos_ids)
        masks = None
        if params.grammar is not None:
            masks = self._grammars.begin(params.grammar, output.stop_ids)
        sampler = Sampler(
            params,
            ids,
            self.model.vocab_size,
            stop_ids=output.stop_ids,
            bad=bad_word_ids(self.tokenizer, params.bad_words),
            grammar=masks,
        )
        request = Request(
            ids,
            params,
            method=self.method_store.method(setting, params),
            output=output,
            sampler=sampler,
            budget=tree_budget(self.budget if budget is None else budget, method),
            setting=setting,
            shortlist=self.method_store.shortlist(setting),
            prediction=self._prediction_ids(params.prediction),
            skeletons=self._skeleton_ids(tuple(skeletons)),
            images=prompt.images if isinstance(prompt, PromptIds) else (),
            positions=prompt.positions if isinstance(prompt, PromptIds) else None,
            observer=observer,
            choice=choice or 0,
            tenant=_hashable(tenant),
        )
        return Stream(self.thread, self.engine.new_sequence(request), self.name, method, client)

    def _prediction_ids(self, prediction: str) -> list[int]:
        """Return the token ids of a predicted text, of as much as may be in an answer."""
        prediction = prediction[: MAX_TOKEN_CHARACTERS * self.room(0)]
        if not prediction:
            return []
        ids: list[int] = self.tokenizer(prediction, add_special_tokens=False)["input_ids"]
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
        `enable_thinking` of some models) go to the chat template, as in transformers.

        A content may be a list of parts, `{"type": "text", "text": "…"}` and, for models that read
        images, `{"type": "image", "image": …}` with an image of Pillow's, a path or a file's bytes.
        The result then has `images`, and belongs to `stream` or `generate` as it is.

        Raises `InvalidInput` for a model without a chat template, for messages that lack a role or
        content, for what the model doesn't read, and for messages that the template refuses.
        """
        return chat_ids(
            self.tokenizer,
            self.name,
            messages,
            tools=tools,
            continue_final_message=continue_final_message,
            images=self.images,
            most=self.room(0) if self.images else 0,
            **arguments,
        )

    def _encode(self, messages: Conversation, template: Any) -> list[int]:
        check_values({"template": template}, TEMPLATE_RULES)
        return self.encode_chat(messages, **(template or {}))

    def reset(self) -> None:
        """Forget all texts: the next prompt is computed from its first token.

        Finished answers and recycled tokens are no longer drafted from. What was learned of costs
        and acceptance stays. Prefixes in files (`keep`) stay, and are no longer read or written.
        """
        self.thread.call(self._forget)

    def _forget(self) -> None:
        self.engine.prefixes.kept = None
        self.engine.forget()
        self.method_store.forget()

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


def prepare_kernels(
    device: torch.device, dtype: torch.dtype | None, progress: ReportProgress | None = None
) -> Kernels | None:
    """Return the native kernels, compiled, where a model of this number format (None: its own) may
    need them."""
    kernel_choice.requested()  # raises for unknown words, even where no kernels are used
    return kernels_on(device, dtype, lambda stage: progress and progress(stage, None))


def drafter_loader(
    drafter: str, folder: str, options: LLMOptions, progress: ReportProgress | None = None
) -> LoadDrafter:
    """Return what loads `drafter` for the model in `folder`."""

    def load(model: Model, tokenizer: Any) -> Drafter:
        return load_drafter(
            drafter,
            model,
            tokenizer,
            model=folder,
            progress=progress,
            weights=options.draft_weights,
            kernels=library.kernels(),
        )

    return load


def drafter_gain(llm: LLM) -> float:
    """Return what the drafter of a model gains (see `measure_gain`)."""

    def answer(prompt: str, method: str) -> tuple[int, float]:
        is_chat = getattr(llm.tokenizer, "chat_template", None) is not None
        ids = llm.encode_chat(prompt) if is_chat else llm.tokenizer(prompt)["input_ids"]
        return timed(lambda: llm.stream(ids, GREEDY, method=method))

    return measure_gain(llm.method, answer)


def try_drafter(
    candidate: Candidate,
    loaded: LoadedModel,
    name: str,
    folder: str,
    options: LLMOptions,
    table: NgramTable | None = None,
    measure: Callable[[LLM], float] = drafter_gain,
) -> Trial:
    """Load a candidate for a loaded model, measure what it gains, and let go of it.

    `name`, `folder`: the model's. `options`: of the `LLM` that would draft with the candidate.
    `table`: what it would draft from without one.
    """

    method = options.method if preset(options.method).uses_drafter else "auto"
    # nothing of the measured answers stays
    trial_options = replace(
        options,
        method=method,
        memory_of_answers=0,
        keep=None,
        learn=False,
        share_prefixes=False,
    )
    try:
        load = drafter_loader(candidate.name, folder, options)
        with LLM.of_loaded(loaded, name, trial_options, load, table) as llm:
            llm.prepare(method)
            return Trial(candidate, measure(llm))
    except Exception as error:  # of files that nobody named, which may hold anything
        logger.debug("the drafter %s can't be measured", candidate.name, exc_info=True)
        return Trial(candidate, 0.0, first_line(error))


def _choose_drafter(trials: Sequence[Trial], method: str) -> str | None:
    """Return the drafter of the best trial, None where none pays, and log the reasons."""
    for trial in trials:
        logger.info("%s", trial)
    best = best_trial(trials, method)
    if best is None:
        logger.warning("no drafter on this machine pays for this model: it drafts without one")
        return None
    logger.info("the drafter is %s", best.candidate.name)
    return best.candidate.name


def _answer_memory(options: LLMOptions, model: str) -> AnswerMemory | None:
    """Return what finished answers are kept in; None for nothing."""
    if not options.answer_bytes:
        return None
    file = None if options.keep is None else Path(options.keep)
    return AnswerMemory(options.answer_bytes, file, model)


def gapped_ids(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Return the token ids of texts, with a gap after each."""
    if not texts:
        return []
    all_ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [token for ids in all_ids for token in (*ids, GAP)]


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
