"""Every option of a model, its drafter, the engine and the server, declared once.

`LLM`, the command line and the server are made from these dataclasses, and so is the page on
Python's options. A field has its type, its default, its help, and the rule that its value must
follow (`Options`). The rest of a field's metadata is for the command line (`cli/fields.py`).
Importing this module takes no PyTorch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import wraps
from ipaddress import ip_address
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar

from quickbeam.errors import InvalidInput, did_you_mean
from quickbeam.params import (
    FLAG,
    RULES,
    SamplingParams,
    check_values,
    each,
    integer,
    is_text,
    number,
    optional,
)

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
MAX_SECONDS = 1e9

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


class Options:
    """A group of options, whose values follow the rules of their fields.

    A field's metadata holds its `rule` as `check_values` takes it. A field without one that has
    `choices` takes these, and None where that is its default.

    Raises `InvalidInput` for values that can't be used.
    """

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            value = getattr(self, option.name)
            unset = value is None and option.default is None
            if "rule" in option.metadata:
                check_values({option.name: value}, {option.name: option.metadata["rule"]})
            elif "choices" in option.metadata and not unset:
                refuse_unknown(option.name, value, option.metadata["choices"])


def parse_bytes(size: int | str, name: str) -> int:
    """Return the bytes that a number or a text such as `2GB` or `512 MiB` means.

    Raises `InvalidInput`, which calls the size `name`, for other texts and for less than one byte.
    """
    check_values({name: size}, {name: SIZE})
    return _bytes_of(size)


def optional_bytes(size: int | str | None, name: str) -> int | None:
    """Return what `parse_bytes` returns; None for None."""
    return None if size is None else parse_bytes(size, name)


def _bytes_of(size: Any) -> int:
    """Return the bytes that a size means; 0 for what means none."""
    text = str(size).strip().upper()
    number_part = text.rstrip("KMGTIB ")
    unit = text[len(number_part) :].strip()
    try:
        return max(0, int(float(number_part) * UNITS[unit]))
    except (ValueError, KeyError, OverflowError):
        return 0


def _is_size(value: Any) -> bool:
    return _bytes_of(value) > 0


def _is_path(value: Any) -> bool:
    return isinstance(value, str | PathLike) and str(value) != ""


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.strip() != ""


def _is_origin(origin: Any) -> bool:
    return origin == "*" or str(origin).startswith(("http://", "https://"))


# the rules of several options
SOURCE = (
    optional(_is_path),
    "a folder, a .gguf file or a Hugging Face id, as a text or a Path; leave it out for the "
    "default",
)
# Python takes what PyTorch takes, such as cuda:1
DEVICE = (lambda value: value is None or bool(str(value)), "a device, as 'cpu' or 'cuda', or None")
METHOD = (is_text, "the name of a method, as 'auto' or 'ar'")
VOCAB = (optional(is_text), f"one of {', '.join(VOCABS)}, or None")
SHORTLIST = (optional(integer(1)), "an integer of at least 1, or None")
SIZE = (_is_size, "a size of memory, as 2GB, 512MiB or bytes")
SIZE_OR_0 = (lambda value: str(value) == "0" or _is_size(value), f"{SIZE[1]}; 0: none")
OPTIONAL_SIZE = (optional(_is_size), SIZE[1])
COUNT = (integer(1), "an integer of at least 1")
OPTIONAL_COUNT = (optional(integer(1)), f"{COUNT[1]}, or None")
SECONDS = (number(0, MAX_SECONDS), "a number of seconds of at least 0")
DEFAULT_TEMPERATURE = (optional(RULES["temperature"][0]), f"{RULES['temperature'][1]}, or None")
RESERVED = (number(0, math.inf), "a number of at least 0")
PORT = (integer(0, 65535), "between 0 and 65535 (0: any free one)")
NAMES = (each(_is_name), "names of the model, none of which is empty")
ORIGINS = (each(_is_origin), "origins, each of them * or beginning with http:// or https://")


@dataclass(frozen=True)
class ModelOptions(Options):
    """How a model is loaded."""

    model: str | PathLike[str] | None = field(
        default=None,
        metadata={
            "help": "Folder, .gguf file, Hugging Face id or built-in model. "
            f"Default: {DEFAULT_MODEL}.",
            "common": True,
            "rule": SOURCE,
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
    memory: int | str | None = field(
        default=None, metadata={"metavar": "SIZE", "rule": OPTIONAL_SIZE}
    )
    """Memory for the weights, as in 2GB. What exceeds it is read from disk in every pass (CUDA:
    from host memory). Default: all weights stay in memory."""
    device: str | None = field(
        default=None,
        metadata={"choices": ("cpu", "cuda", "mps"), "rule": DEVICE},
    )
    """Where the model runs. Default: cuda where there is one, else the CPU."""
    revision: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Branch, tag or commit of a Hugging Face id."""
    kv_memory: int | str | None = field(
        default=None, metadata={"metavar": "SIZE", "rule": OPTIONAL_SIZE}
    )
    """Memory for keys and values, as in 2GB or 512MiB. Default: half of what is free."""

    max_pixels: int | None = field(default=None, metadata={"metavar": "N", "rule": OPTIONAL_COUNT})
    """Most pixels of an image that a model reads; larger images are scaled down. Default: what
    512 rows are made from, each of which takes the place of a token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
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
        default=None, metadata={"metavar": "MODEL", "common": True, "rule": SOURCE}
    )
    """What drafts, for the methods that draft with a model: a smaller model, a feature or block
    drafter; mtp, a head in the files of the model itself; self, a copy of the model in 4 bits; or
    auto, what a short measurement at load finds fastest of those on this machine, or none.
    Default: the one that comes with the model, if there is one."""
    draft_weights: str | None = field(default=None, metadata={"choices": WEIGHTS})
    """Quantise the weights of a smaller model that drafts. Default: as the model's."""
    vocab: str | None = field(
        default=None,
        metadata={
            "metavar": "NAME",
            "help": "Which part of the vocabulary a drafter scores: "
            f"{', '.join(VOCABS)}. Default: the method's own.",
            "rule": VOCAB,
        },
    )
    """Which part of the vocabulary a drafter scores: one of `VOCABS`. Default: the method's own."""
    shortlist: int | None = field(default=None, metadata={"metavar": "N", "rule": SHORTLIST})
    """About how many tokens of the vocabulary a drafter scores. Default: with vocab frequency a
    quarter of them, clusters an eighth, router a sixteenth."""
    budget: Budget | None = field(default=None, metadata={"metavar": "N|auto"})
    """Most nodes of a draft tree, the root included; auto: as many as pay, by measured cost.
    Default: the method's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", parse_budget(self.budget))
        super().__post_init__()


@dataclass(frozen=True)
class EngineOptions(Options):
    """How many answers run side by side, and what they share."""

    _: KW_ONLY
    max_running: int = field(default=32, metadata={"rule": COUNT})
    """Most answers that are computed at the same time; further ones wait."""
    memory_of_answers: int | str = field(
        default="64MB",
        metadata={"metavar": "SIZE", "rule": SIZE_OR_0},
    )
    """Memory for prompts and answers that are over, which later answers draft from; 0 for none."""
    keep: str | Path | None = field(
        default=None,
        metadata={"metavar": "FILE", "rule": (optional(_is_path), "a file's path, or None")},
    )
    """File that keeps the prompts and answers of memory_of_answers from one run to the next. The
    folder FILE.prefixes beside it keeps keys and values."""
    kept_prefixes: int | str = field(
        default="1GB",
        metadata={"metavar": "SIZE", "rule": SIZE_OR_0},
    )
    """Bytes of the keys and values that `keep` keeps from one run to the next, so that a
    conversation that goes on is not read again; 0 for none. Those used last stay."""
    learn: bool = field(default=False, metadata={"rule": FLAG})
    """While there is nothing to answer, let a feature drafter learn from the answers so far, those
    of each API key (without keys: of each address) for itself alone. Answers stay the same. With
    `keep`, what was learned is kept in FILE.learned."""
    share_prefixes: bool = field(default=True, metadata={"rule": FLAG})
    """Share the computed beginning of texts that begin alike; with `learn`, of those of one key."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer_bytes == 0 and self.keep is not None:
            raise InvalidInput(f"keep={str(self.keep)!r}: a memory of answers of 0 keeps none")

    @property
    def answer_bytes(self) -> int:
        """The bytes of `memory_of_answers`."""
        return _bytes_of(self.memory_of_answers)

    @property
    def prefix_bytes(self) -> int:
        """The bytes of `kept_prefixes`; 0 without `keep`."""
        return 0 if self.keep is None else _bytes_of(self.kept_prefixes)


@dataclass(frozen=True)
class LLMOptions(EngineOptions, DrafterOptions, ModelOptions):
    """All options of `LLM`. Raises `InvalidInput` for values that can't be used."""

    method: str = field(
        default="auto",
        kw_only=False,
        metadata={"metavar": "NAME", "common": True, "rule": METHOD},
    )
    """How tokens are drafted: a name of the table of methods."""
    progress: ReportProgress | None = field(
        default=None,
        kw_only=True,
        metadata={
            "option": False,
            "rule": (optional(callable), "a function of a text and a number, or None"),
        },
    )
    """Called as `progress(stage, fraction)` while a built-in model is fetched and while the native
    kernels are compiled."""


@dataclass(frozen=True)
class ServerOptions(Options):
    """Where a server listens, who may use it, and its limits."""

    host: str = field(default="127.0.0.1", metadata={"common": True})
    """Address to listen at. Default: only this machine can connect."""
    port: int = field(default=8000, metadata={"common": True, "rule": PORT})
    """Port to listen at; 0: any that is free."""
    served_names: tuple[str, ...] = field(
        default=(), metadata={"metavar": "NAME", "common": True, "rule": NAMES}
    )
    """Name of the model for clients, and other names for it. Default: the name that it is loaded
    by."""
    default_temperature: float | None = field(default=None, metadata={"rule": DEFAULT_TEMPERATURE})
    """Temperature of requests that name none. Default: the model's own (generation_config), else
    1."""
    api_keys: tuple[str, ...] = field(default=(), metadata={"metavar": "KEY", "common": True})
    """Key that clients must send; any of several. QUICKBEAM_API_KEY (comma-separated) keeps keys
    out of `ps`. Without keys, everybody may use the server."""
    protect_metrics: bool = field(default=False, metadata={"rule": FLAG})
    """Ask for a key at /metrics, too."""
    cors_origins: tuple[str, ...] = field(default=(), metadata={"metavar": "URL", "rule": ORIGINS})
    """Let web pages of this origin send requests; *: those of any origin."""
    allowed_hosts: tuple[str, ...] = field(default=(), metadata={"metavar": "NAME"})
    """Another name that the server is reached by, say a proxy's. Names are checked only where it
    listens on this machine alone and asks for no key, which keeps out web pages whose own DNS name
    points to this machine."""
    max_waiting: int = field(default=128, metadata={"rule": COUNT})
    """Answers that may wait beside the running ones; further requests get a 429."""
    max_waiting_tokens: int = field(default=262_144, metadata={"rule": COUNT})
    """Most tokens of all waiting prompts together, estimated by length."""
    max_prompt_tokens: int | None = field(default=None, metadata={"rule": OPTIONAL_COUNT})
    """Longest prompt, in tokens. Default: what the model's context takes."""
    max_body: int | str = field(default="8MB", metadata={"metavar": "SIZE", "rule": SIZE})
    """Largest request, as in 8MB; larger ones get a 413."""
    read_timeout: float = field(default=20, metadata={"metavar": "SECONDS", "rule": SECONDS})
    """How long a client may take to send a request's body; then it gets a 408. A connection is
    closed after as long without a request."""
    queue_timeout: float = field(default=60, metadata={"metavar": "SECONDS", "rule": SECONDS})
    """How long a request may wait; then it gets a 503."""
    drain_timeout: float = field(default=30, metadata={"metavar": "SECONDS", "rule": SECONDS})
    """How long answers under way may take when the server is told to end."""
    keep_alive: float = field(default=15, metadata={"option": False, "rule": SECONDS})
    """Seconds between comments in a stream that has nothing else to send."""
    heartbeat_limit: float = field(default=60, metadata={"metavar": "SECONDS", "rule": SECONDS})
    """/health fails when the engine is silent for longer, so the longest step (a part of a long
    prompt, say) must be shorter."""
    log_prompts: bool = field(default=False, metadata={"rule": FLAG})
    """Write every prompt to the log."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in self.api_keys:  # without a rule, whose error would show the key
            if not key.isascii() or not key.isprintable() or key.split() != [key]:
                raise InvalidInput(
                    "an API key is empty or holds what a header can't carry: use letters and digits"
                )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def max_body_bytes(self) -> int:
        """The bytes of `max_body`."""
        return _bytes_of(self.max_body)


@dataclass(frozen=True)
class ReplicaOptions(Options):
    """Replicas of the model on Ray."""

    replicas: int = field(default=1, metadata={"rule": COUNT})
    """Replicas of the model, with --ray."""
    threads: int = field(default=1, metadata={"rule": COUNT})
    """Threads that each replica computes with, with --ray."""
    cpus: float = field(default=0.5, metadata={"option": False, "rule": RESERVED})
    """CPUs that Ray reserves for a replica. `threads` decides how many it really uses. A half
    leaves capacity for the tasks that read and write data."""
    gpus: float = field(default=0, metadata={"option": False, "rule": RESERVED})
    """GPUs that Ray reserves for a replica."""


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
    accepted = CallOptions.__annotations__
    for option in options.keys() - accepted.keys():
        advice = f"known: {', '.join(accepted)}{did_you_mean(option, accepted)}"
        if option in SamplingParams.__dataclass_fields__:
            advice = f"give it in SamplingParams({option}=…)"
        elif option in TEMPLATE_ARGUMENTS:
            advice = f"give it to `chat` as template={{'{option}': …}}"
        raise InvalidInput(f"unknown option '{option}'; {advice}")
    is_method, method_in_words = METHOD
    rules = {
        "method": (optional(is_method), f"{method_in_words}, or None"),
        "vocab": VOCAB,
        "shortlist": SHORTLIST,
    }
    check_values(options, {name: rule for name, rule in rules.items() if name in options})


def refuse_unknown(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `InvalidInput` for a value of the option `name` that is none of its `choices`."""
    if value not in choices:
        raise InvalidInput(f"unknown {name} {value!r}; known: {', '.join(choices)}")


def parse_budget(budget: int | str | None) -> Budget | None:
    """Return the most nodes of a draft tree: `auto`, a number, or None for the method's own.

    0 means `auto`. Numbers may be text. Raises `InvalidInput` for anything else.
    """
    if budget is None or budget == "auto":
        return budget  # type: ignore[return-value]
    if isinstance(budget, str) and budget.isascii() and budget.isdecimal():
        budget = int(budget)
    if not integer(0, MAX_BUDGET)(budget):
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
