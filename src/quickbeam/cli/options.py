"""Options that several commands share. Each is declared once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from quickbeam.bench.methods import PEERS
from quickbeam.errors import InvalidInput
from quickbeam.grammar import Grammar
from quickbeam.hub import DEFAULT
from quickbeam.params import COUPLED, RESIDUAL
from quickbeam.presets import PRESETS, VOCABS


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    auto = "auto"


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class WeightsKind(str, Enum):
    bfloat16 = "bfloat16"
    int8 = "int8"
    int4 = "int4"


class Coupling(str, Enum):
    coupled = COUPLED
    residual = RESIDUAL


Model = Annotated[
    str | None,
    typer.Option(
        "--model", help=f"Folder, .gguf file, Hugging Face id or embedded name. Default: {DEFAULT}."
    ),
]
Method = Annotated[
    str, typer.Option("--method", help=f"How tokens are drafted: {', '.join(PRESETS)}.")
]
AnyMethod = Annotated[
    str,
    typer.Option(
        "--method",
        help=f"How tokens are drafted: {', '.join(PRESETS)}; or "
        f"transformers' own: {', '.join(PEERS)}.",
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A smaller model with the same vocabulary, or a feature "
        "drafter, for the methods that draft with one.",
    ),
]
Vocab = Annotated[
    str | None,
    typer.Option(
        "--vocab",
        metavar="|".join(VOCABS),
        help="Which part of the vocabulary a feature drafter scores. Default: the method's own.",
    ),
]
Shortlist = Annotated[
    int | None,
    typer.Option(
        "--shortlist",
        metavar="SIZE",
        help="About how many tokens that is. Default: frequency a quarter of the vocabulary, "
        "clusters an eighth, router a sixteenth.",
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype", help="Number format of the weights; auto: the one in the model's configuration."
    ),
]
Weights = Annotated[
    WeightsKind,
    typer.Option(
        "--weights",
        help="Quantise the weights (on a CPU): int8 reads half "
        "the bytes of bfloat16, int4 a third.",
    ),
]
DraftWeights = Annotated[
    WeightsKind, typer.Option("--draft-weights", help="The same of a smaller model that drafts.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="For the weights, as in 2GB: the rest is read from disk in every pass (CUDA: from "
        "host memory). Default: all in memory.",
    ),
]
DeviceOption = Annotated[
    Device | None,
    typer.Option("--device", help="Where the model runs. Default: cuda where there is one."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="N|auto",
        help="Nodes of a draft tree; auto: as many as pay, by "
        "measured cost. Default: the method's own.",
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="Require logits with the bits of plain decoding, or do without. "
        "Default: wherever the device can.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model. Read it first."
    ),
]
KVMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        help="Memory for keys and values, as in 2GB or 512MiB. Default: half of what is free.",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Give prompts as they are, without the chat template.")
]
System = Annotated[
    str | None, typer.Option("--system", help="System message put before the conversation.")
]

MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
Temperature = Annotated[
    float, typer.Option("--temperature", help="0 takes the most probable token.")
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Keep the most probable tokens up to this mass. 1: off.")
]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many tokens. 0: off.")]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", help="Drop tokens below this share of the best one's probability. 0: off."
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", help="Above 1 makes tokens seen in prompt or output rarer."
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="Subtracted from the logits of tokens in the output."),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option("--frequency-penalty", help="Subtracted once for every occurrence in the output."),
]
LogitBias = Annotated[
    list[str],
    typer.Option(
        "--logit-bias",
        metavar="ID=VALUE",
        help="Added to the logit of this token; -inf bans it. May be repeated.",
    ),
]
Stop = Annotated[
    list[str], typer.Option("--stop", metavar="TEXT", help="End before this text. May be repeated.")
]
StopTokenId = Annotated[
    list[int],
    typer.Option("--stop-token-id", metavar="N", help="End at this token. May be repeated."),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence token.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="K",
        help="With --json: log-probabilities of the tokens, and of the K likeliest alternatives.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes a sampled answer repeatable.")]
CouplingOption = Annotated[
    Coupling | None,
    typer.Option(
        "--coupling",
        help="Above temperature 0. coupled: the answer depends on the seed alone, not on the "
        "draft; residual: the papers' rule. "
        "Default: coupled.",
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|JSON",
        help="The answer is JSON that fits this schema, in a file or as it is.",
    ),
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")]
Regex = Annotated[
    str | None,
    typer.Option(
        "--regex", metavar="PATTERN", help="The answer is what this regular expression matches."
    ),
]
Lark = Annotated[
    Path | None,
    typer.Option(
        "--lark",
        metavar="FILE",
        help="The answer follows this Lark grammar, whose first rule is start.",
    ),
]


def grammar(
    json_schema: str | None, json_object: bool, regex: str | None, lark: Path | None
) -> Grammar | None:
    """Return what `SamplingParams` takes for these options.

    Raises `InvalidInput` if more than one is given, and for files that can't be read.
    """
    given = {
        "--json-schema": json_schema,
        "--json-object": json_object or None,
        "--regex": regex,
        "--lark": lark,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidInput(
            f"{' and '.join(names)}: an answer follows one grammar; give one of them"
        )
    if json_schema is not None:
        inline = json_schema.lstrip().startswith("{")
        return Grammar.json_schema(
            json_schema if inline else _text("--json-schema", Path(json_schema))
        )
    if regex is not None:
        return Grammar.regex(regex)
    if lark is not None:
        return Grammar.lark(_text("--lark", lark))
    return Grammar.json_object() if json_object else None


def _text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{option} {path}: can't be read ({error.strerror})") from error
    except UnicodeError as error:
        raise InvalidInput(f"{option} {path}: not UTF-8 text ({error})") from error


def biases(given: list[str]) -> dict[int, float]:
    """Return what `SamplingParams` takes for `--logit-bias`, given as ID=VALUE.

    Raises `InvalidInput` for other text and for a token that is named twice. Whether the model has
    the tokens shows when it answers.
    """
    found: dict[int, float] = {}
    for text in given:
        token, equals, value = text.partition("=")
        try:
            if not equals or int(token) in found:
                raise ValueError
            found[int(token)] = float(value)
        except ValueError:
            raise InvalidInput(
                f"--logit-bias {text!r}: must be ID=VALUE, as in 42=-5, each token once"
            ) from None
    return found


def coupling(given: Coupling | None) -> str:
    """Return what `SamplingParams` takes for `--coupling`."""
    return (given or Coupling.coupled).value


def nodes(budget: str | None) -> int | None:
    """Return what `LLM` takes for `--budget`: a number of nodes, 0 for auto, None if not given.

    Raises `InvalidInput` for other values.
    """
    if budget is None:
        return None
    if budget == "auto":
        return 0
    if not budget.isascii() or not budget.isdecimal() or int(budget) < 1:
        raise InvalidInput(f"--budget {budget!r}: must be auto or a number of at least 1")
    return int(budget)
