"""Every option of a model, its drafter and the engine, declared once.

`LLM` and the command line are made from these dataclasses, and so is the page on Python's options.
A field has its type, its default, its help, and the check of its value. The metadata of a field is
for the command line (`cli/fields.py`). Importing this module takes no PyTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import wraps
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar

from quickbeam.errors import InvalidInput, did_you_mean
from quickbeam.params import FLAG, Rules, SamplingParams, check_values, is_text, optional, whole

DTYPES = ("bfloat16", "float16", "float32", "auto")
BFLOAT16, INT8, INT4 = WEIGHTS = ("bfloat16", "int8", "int4")
# the name that stands for the model that quickbeam comes with
DEFAULT_MODEL = "smollm2-135m"

FULL, FREQUENCY, CLUSTERS, ROUTER, CONTEXT = "full", "frequency", "clusters", "router", "+context"
# the parts of the vocabulary that a drafter may score (`drafters/vocabulary.py`)
VOCABS = (FULL, FREQUENCY, FREQUENCY + CONTEXT, "context", CLUSTERS, ROUTER)
# `frequency+context` where the drafter comes with a list of frequent tokens, else `full`
SHORTENED = "shortened"

ReportProgress = Callable[[str, "float | None"], None]
"""Called with the stage in a few words, and the share of it that is done, 0 to 1 (or None)."""

# nodes of a draft tree, the root included; auto: as many as pay, by measured cost
Budget: TypeAlias = int | Literal["auto"]
MAX_BUDGET = 512

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


def _is_source(value: Any) -> bool:
    return isinstance(value, str | PathLike) and str(value) != ""


SOURCE = (
    optional(_is_source),
    "a folder, a .gguf file or a Hugging Face id, as a text or a Path; leave it out for the "
    "default",
)
VOCAB = (optional(is_text), f"one of {', '.join(VOCABS)}, or None")
SHORTLIST = (optional(whole(1)), "an integer of at least 1, or None")


class Options:
    """A group of options. `__post_init__` checks them, and those of the next group."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class ModelOptions(Options):
    """How a model is loaded."""

    model: str | PathLike[str] | None = field(
        default=None,
        metadata={
            "help": "Folder, .gguf file, Hugging Face id or built-in model. "
            f"Default: {DEFAULT_MODEL}.",
            "common": True,
        },
    )
    """Folder, `.gguf` file, Hugging Face id or built-in model. None takes the built-in model, which
    is fetched on first use."""
    _: KW_ONLY
    dtype: str = field(default="bfloat16", metadata={"choices": DTYPES})
    """Number format of the weights; auto: the one in the model's configuration."""
    weights: str = field(default=BFLOAT16, metadata={"choices": WEIGHTS, "common": True})
    """Quantise the weights (on a CPU): int8 reads half the bytes of bfloat16, int4 a third. Answers
    are then those of the quantised model."""
    memory: int | str | None = field(default=None, metadata={"metavar": "SIZE"})
    """Memory for the weights, as in 2GB. What exceeds it is read from disk in every pass (CUDA:
    from host memory). Default: all weights stay in memory."""
    device: str | None = field(default=None, metadata={"choices": ("cpu", "cuda", "mps")})
    """Where the model runs. Default: cuda where there is one, else the CPU."""
    revision: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Branch, tag or commit of a Hugging Face id."""
    kv_memory: int | str | None = field(default=None, metadata={"metavar": "SIZE"})
    """Memory for keys and values, as in 2GB or 512MiB. Default: half of what is free."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_values(vars(self), {"model": SOURCE})
        refuse_unknown("dtype", self.dtype, DTYPES)
        refuse_unknown("weights", self.weights, WEIGHTS)
        optional_bytes(self.memory, "memory")
        optional_bytes(self.kv_memory, "kv_memory")
        super().__post_init__()

    @property
    def source(self) -> str | None:
        """The model's name as text; None for the built-in default."""
        return None if self.model is None else fspath(self.model)


@dataclass(frozen=True)
class DrafterOptions(Options):
    """What drafts."""

    _: KW_ONLY
    drafter: str | PathLike[str] | None = field(
        default=None, metadata={"metavar": "MODEL", "common": True}
    )
    """What drafts, for the methods that draft with a model: a smaller model, a feature or block
    drafter, or mtp, a head in the files of the model itself. Default: the one that comes with the
    model, if there is one."""
    draft_weights: str | None = field(default=None, metadata={"choices": WEIGHTS})
    """Quantise the weights of a smaller model that drafts. Default: as the model's."""
    vocab: str | None = field(
        default=None,
        metadata={
            "metavar": "NAME",
            "help": "Which part of the vocabulary a feature or block drafter scores: "
            f"{', '.join(VOCABS)}. Default: the method's own.",
        },
    )
    """Which part of the vocabulary a feature or block drafter scores: one of `VOCABS`. Default: the
    method's own."""
    shortlist: int | None = field(default=None, metadata={"metavar": "N"})
    """About how many tokens of the vocabulary a feature or block drafter scores. Default: with
    vocab frequency a quarter of them, clusters an eighth, router a sixteenth."""
    budget: Budget | None = field(default=None, metadata={"metavar": "N|auto"})
    """Most nodes of a draft tree, the root included; auto: as many as pay, by measured cost.
    Default: the method's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", parse_budget(self.budget))
        check_values(vars(self), {"drafter": SOURCE, "vocab": VOCAB, "shortlist": SHORTLIST})
        if self.draft_weights is not None:
            refuse_unknown("draft_weights", self.draft_weights, WEIGHTS)
        super().__post_init__()


@dataclass(frozen=True)
class EngineOptions(Options):
    """How many answers run side by side, and what they share."""

    _: KW_ONLY
    max_running: int = field(default=32, metadata={"min": 1})
    """Most answers that are computed at the same time; further ones wait."""
    memory_of_answers: int | str = field(default="64MB", metadata={"metavar": "SIZE"})
    """Memory for prompts and answers that are over, which later answers draft from; 0 for none."""
    keep: str | Path | None = field(default=None, metadata={"metavar": "FILE"})
    """File that keeps the prompts and answers of memory_of_answers from one run to the next."""
    share_prefixes: bool = True
    """Share the computed beginning of texts that begin alike."""

    def __post_init__(self) -> None:
        rules: Rules = {
            "max_running": (whole(1), "at least 1 answer at a time"),
            "keep": (
                optional(lambda value: isinstance(value, str | PathLike)),
                "a file's path, or None",
            ),
            "share_prefixes": FLAG,
        }
        check_values(vars(self), rules)
        if self.answer_bytes == 0 and self.keep is not None:
            raise InvalidInput(f"keep={str(self.keep)!r}: a memory of answers of 0 keeps none")
        super().__post_init__()

    @property
    def answer_bytes(self) -> int:
        """The bytes of `memory_of_answers`."""
        if str(self.memory_of_answers) == "0":
            return 0
        return parse_bytes(self.memory_of_answers, "memory_of_answers")


@dataclass(frozen=True)
class LLMOptions(EngineOptions, DrafterOptions, ModelOptions):
    """All options of `LLM`. Raises `InvalidInput` for values that can't be used."""

    method: str = field(default="auto", kw_only=False, metadata={"metavar": "NAME", "common": True})
    """How tokens are drafted: a name of the table of methods."""
    progress: ReportProgress | None = field(default=None, kw_only=True, metadata={"option": False})
    """Called as `progress(stage, fraction)` while a built-in model is fetched and while the native
    kernels are compiled."""

    def __post_init__(self) -> None:
        rules: Rules = {
            "method": (is_text, "the name of a method, as 'auto' or 'ar'"),
            "progress": (optional(callable), "a function of a text and a number, or None"),
        }
        check_values(vars(self), rules)
        super().__post_init__()


class CallOptions(TypedDict, total=False):
    """The options of `LLM` that a single call may set for itself."""

    method: str | None
    budget: Budget | None
    vocab: str | None
    shortlist: int | None


class CallArgs(CallOptions, total=False):
    """What a call of `generate` may set."""

    progress: bool | None


class ChatArgs(CallArgs, total=False):
    """What a call of `chat` may set. `template`: arguments of the chat template."""

    template: dict[str, Any] | None


# arguments of chat templates that callers know from elsewhere
TEMPLATE_ARGUMENTS = ("tools", "enable_thinking", "continue_final_message", "chat_template")


def check_call(options: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for an unknown option of a call, and for a value of the wrong type."""
    for option in options.keys() - CallOptions.__annotations__.keys():
        known = CallOptions.__annotations__
        advice = f"known: {', '.join(known)}{did_you_mean(option, known)}"
        if option in SamplingParams.__dataclass_fields__:
            advice = f"give it in SamplingParams({option}=…)"
        elif option in TEMPLATE_ARGUMENTS:
            advice = f"give it to `chat` as template={{'{option}': …}}"
        raise InvalidInput(f"unknown option '{option}'; {advice}")
    rules: Rules = {
        "method": (optional(is_text), "the name of a method, as 'auto' or 'ar', or None"),
        "vocab": VOCAB,
        "shortlist": SHORTLIST,
    }
    check_values(options, {name: rule for name, rule in rules.items() if name in options})


def refuse_unknown(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `InvalidInput` for a value of the option `name` that is none of the `known` ones."""
    if value not in known:
        raise InvalidInput(f"unknown {name} {value!r}; known: {', '.join(known)}")


def parse_budget(budget: int | str | None) -> Budget | None:
    """Return the most nodes of a draft tree: `auto`, a number, or None for the method's own.

    0 means `auto`. Numbers may be text. Raises `InvalidInput` for anything else.
    """
    if budget is None or budget == "auto":
        return budget  # type: ignore[return-value]
    if isinstance(budget, str) and budget.isascii() and budget.isdecimal():
        budget = int(budget)
    if not whole(0, MAX_BUDGET)(budget):
        raise InvalidInput(
            f"budget={budget!r}: must be auto (or 0) for the measured budget, or a number of "
            f"nodes, at most {MAX_BUDGET}"
        )
    return int(budget) or "auto"


def plain_vocab(vocab: str) -> str:
    """Return the one of `VOCABS` that `vocab` means; an unknown word comes back as it is."""
    base = vocab.removesuffix(CONTEXT)
    if base in (vocab, FREQUENCY) or base not in VOCABS:
        return vocab
    return ROUTER if base == CLUSTERS else base  # the others score the context anyway


def check_vocab(vocab: str, size: int | None = None) -> None:
    """Raise `InvalidInput` for an unknown name, or a `size` where the full vocabulary is scored."""
    if plain_vocab(vocab) not in (*VOCABS, SHORTENED):
        raise InvalidInput(
            f"unknown vocabulary {vocab!r} of the drafter; known: {', '.join(VOCABS)}"
            f"{did_you_mean(vocab, VOCABS)}"
        )
    if plain_vocab(vocab) == FULL and size is not None:
        raise InvalidInput(
            f"a shortlist of {size} tokens, where the drafter scores its full "
            "vocabulary: take --vocab router or another"
        )


def parse_bytes(size: int | str, name: str) -> int:
    """Return the bytes that a number or a text such as `2GB` or `512 MiB` means.

    Raises `InvalidInput`, which calls the size `name`, for other texts and for less than one byte.
    """
    text = str(size).strip().upper()
    number = text.rstrip("KMGTIB ")
    unit = text[len(number) :].strip()
    try:
        value = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise InvalidInput(f"{name}={size!r}: must be a size of memory, as 2GB, 512MiB or bytes")
    return value


def optional_bytes(size: int | str | None, name: str) -> int | None:
    """Return what `parse_bytes` returns; None for None."""
    return None if size is None else parse_bytes(size, name)


Fields = ParamSpec("Fields")
OptionsT = TypeVar("OptionsT")
SelfT = TypeVar("SelfT")


def takes(
    kind: Callable[Fields, OptionsT],
) -> Callable[[Callable[[SelfT, OptionsT], None]], Callable[Concatenate[SelfT, Fields], None]]:
    """Let a method be called with the fields of a dataclass, as if it named each of them.

    The method itself gets the dataclass. Type checkers, editors and `help` see the fields.
    """

    def decorate(
        method: Callable[[SelfT, OptionsT], None],
    ) -> Callable[Concatenate[SelfT, Fields], None]:
        @wraps(method)
        def call(self: SelfT, /, *args: Fields.args, **fields: Fields.kwargs) -> None:
            method(self, kind(*args, **fields))

        parameters = inspect.signature(kind).parameters.values()
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = inspect.Signature([this, *parameters])  # type: ignore[attr-defined]
        return call

    return decorate
