"""`quickbeam generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quickbeam.bench.files import check_output, save
from quickbeam.bench.methods import PEERS
from quickbeam.cli import options, peer
from quickbeam.cli.common import follow, load, statistics_line, strict_json, write
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.engine.result import Completion


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer; - reads standard input.")],
    model: options.Model = None,
    method: options.AnyMethod = "auto",
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = [],  # noqa: B006 (typer copies it)
    stop: options.Stop = [],  # noqa: B006
    stop_token_id: options.StopTokenId = [],  # noqa: B006
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    seed: options.Seed = None,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = False,
    regex: options.Regex = None,
    lark: options.Lark = None,
    coupling: options.CouplingOption = None,
    budget: options.Budget = None,
    drafter: options.Drafter = None,
    vocab: options.Vocab = None,
    shortlist: options.Shortlist = None,
    exact: options.Exact = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    system: options.System = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    weights: options.Weights = options.WeightsKind.bfloat16,
    draft_weights: options.DraftWeights = options.WeightsKind.bfloat16,
    memory: options.Memory = None,
    device: options.DeviceOption = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_memory: options.KVMemory = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON record instead of the text.")
    ] = False,
    trace_path: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Write every step's draft tree here, for `quickbeam inspect`.",
        ),
    ] = None,
) -> None:
    """Answer one prompt: text on stdout as it is made, statistics on stderr. Ctrl-C keeps the
    answer so far."""
    if raw and system is not None:
        raise InvalidInput(
            "--system goes through the chat template, which --raw skips: leave one of them out"
        )
    if logprobs is not None and not as_json:
        raise InvalidInput("--logprobs shows in the JSON record only: add --json")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=options.biases(logit_bias),
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_id),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        seed=seed,
        coupling=options.coupling(coupling),
        grammar=options.grammar(json_schema, json_object, regex, lark),
    )
    nodes = options.nodes(budget)
    text = read(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    if method in PEERS:
        ours = {
            "budget": budget,
            "vocab": vocab,
            "shortlist": shortlist,
            "exact": exact,
            "trace": trace_path,
        }
        ours |= {
            "coupling": coupling,
            "json-schema": json_schema,
            "json-object": json_object or None,
            "regex": regex,
            "lark": lark,
        }
        ours["trust-remote-code"] = trust_remote_code or None
        ours["kv-memory"] = kv_memory
        ours["memory"] = memory
        ours["draft-weights"] = (
            None if draft_weights is options.WeightsKind.bfloat16 else draft_weights.value
        )
        ours["weights"] = None if weights is options.WeightsKind.bfloat16 else weights.value
        place = device.value if device else None
        show(
            peer.answer(
                method, text if raw else messages, params, model, drafter, dtype.value, place, ours
            ),
            as_json,
            peer.KERNELS,
        )
        return
    if trace_path is not None:
        check_output("--trace", trace_path)
    from quickbeam.engine.trace import Trace

    trace = Trace() if trace_path is not None else None
    llm = load(
        model,
        method,
        dtype,
        device,
        nodes,
        exact,
        drafter,
        vocab,
        shortlist,
        trust_remote_code,
        kv_memory,
        weights,
        memory=memory,
        draft_weights=draft_weights.value,
    )
    completion, interrupted = follow(
        lambda: (
            llm.stream(text, params, observer=trace)
            if raw
            else llm.chat_stream(messages, params, observer=trace)
        ),
        show=not as_json,
    )
    show(completion, as_json, llm.describe(), text=False)
    if trace_path is not None and trace is not None:
        try:
            save(trace_path, trace.to_json(completion, llm.tokenizer))
        except OSError as error:
            raise QuickbeamError(f"--trace {trace_path}: not written ({error.strerror})") from error
    if interrupted:
        raise typer.Exit(130)


def show(completion: Completion, as_json: bool, kernels: str, text: bool = True) -> None:
    """Print the JSON record to stdout, or the text to stdout and the statistics to stderr.

    `text` is False if the text was streamed already.
    """
    if as_json:
        write(strict_json({**completion.to_json(), "kernels": kernels}) + "\n")
        return
    if text:
        write(completion.text + "\n")
    print(statistics_line(completion, kernels), file=sys.stderr)


def read(prompt: str) -> str:
    """Return the prompt. `-` reads it from standard input, without its last line end.

    Raises `InvalidInput` if it is empty or not UTF-8.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise InvalidInput(f"the prompt is not UTF-8 text: {error}") from error
    if not text:
        raise InvalidInput("the prompt is empty: give a text, or - to read standard input")
    return text
