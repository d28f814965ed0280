"""No grammar ends or freezes the process that compiles it."""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from cases import few
from scripts import captured

# Compiles a grammar in a thread like a server's, and says what came of it.
CHILD = """
import json, sys, threading
from pathlib import Path
from quickbeam import Grammar, InvalidInput
from quickbeam.grammar.compiler import GrammarCompiler
from quickbeam.models.weights.checkpoint import read_config
from quickbeam.models.text.tokenizer import load_tokenizer

def work():
    for kind, text in json.loads(sys.stdin.read()):
        try:
            masks = compiler.begin(Grammar(kind, text), [tokenizer.eos_token_id])
            print("compiled", masks.find() is not None, flush=True)
        except InvalidInput as error:
            print("refused", str(error)[:300].encode(), flush=True)

folder = Path(sys.argv[1])
tokenizer = load_tokenizer(folder, read_config(folder))
compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def outcomes(toy_folder, *grammars):
    ended = captured([sys.executable, "-c", CHILD, toy_folder], input=json.dumps(grammars))
    assert ended.returncode == 0, f"the process ended with {ended.returncode}: {ended.stderr}"
    lines = ended.stdout.splitlines()
    assert len(lines) == len(grammars)
    return lines


def nested(wrap, value, depth):
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS: dict[str, Callable[[Any], Any]] = {
    "ref": lambda one: one,
    "anyOf": lambda one: {"anyOf": [one, {"type": "integer"}]},
    "allOf": lambda one: {"allOf": [one, {"type": "object"}]},
    "oneOf": lambda one: {"oneOf": [one, {"type": "integer"}]},
    "items": lambda one: {"type": "array", "items": one},
    "prefixItems": lambda one: {"type": "array", "prefixItems": [one]},
    "properties": lambda one: {"type": "object", "properties": {"a": one}},
    "required": lambda one: {"type": "object", "properties": {"a": one}, "required": ["a"]},
    "additionalProperties": lambda one: {"type": "object", "additionalProperties": one},
    "patternProperties": lambda one: {"type": "object", "patternProperties": {"^a$": one}},
    "objects in anyOf": lambda one: {
        "anyOf": [{"type": "object", "properties": {"a": one}}, {"type": "integer"}]
    },
    "$defs inside": lambda one: {"$defs": {"b": {"type": "integer"}}, "anyOf": [one]},
}


def chain(wrap, length, depth=1):
    """A schema of so many definitions, each with a reference to the next inside `depth` wraps."""
    definitions = {str(i): nested(wrap, {"$ref": f"#/$defs/{i + 1}"}, depth) for i in range(length)}
    last = {str(length): {"type": "integer"}}
    return json.dumps({"$defs": {**definitions, **last}, "$ref": "#/$defs/0"})


def circle(wrap, length):
    definitions = {str(i): wrap({"$ref": f"#/$defs/{(i + 1) % length}"}) for i in range(length)}
    return json.dumps({"$defs": definitions, "$ref": "#/$defs/0"})


@pytest.mark.parametrize("name", few(WRAPS, ["ref"]))
def test_schemas_however_they_nest_end_no_process(toy_folder, name):
    wrap = WRAPS[name]
    text = '{"type": "integer"}'
    outer, inner = json.dumps(wrap({})).split("{}") if name != "ref" else ("", "")
    deep = outer * 5000 + text + inner * 5000  # written as text, since json.dumps would recurse
    outcomes(
        toy_folder,
        *(("json_schema", chain(wrap, length)) for length in (800, 20_000)),
        ("json_schema", chain(wrap, 200, 40)),
        ("json_schema", circle(wrap, 3000)),
        ("json_schema", json.dumps(nested(wrap, {"type": "integer"}, 40))),
        ("json_schema", deep),
        ("lark", f"start: %json {chain(wrap, 3000)}"),
        ("lark", f"start: %json {deep}"),
    )


RULES: dict[str, Callable[[str, str], str]] = {
    "alone": lambda rule, following: f"{rule}: {following}",
    "between": lambda rule, following: f'{rule}: "b" {following} "c"',
    "left": lambda rule, following: f'{rule}: {following} "c" | "d"',
    "right": lambda rule, following: f'{rule}: "c" {following} | "d"',
    "optional": lambda rule, following: f'{rule}: {following}? "c"',
    "repeated": lambda rule, following: f"{rule}: ({following} | A)*",
    "grouped": lambda rule, following: f"{rule}: {'(' * 20}{following}{' A)' * 20}",
}


@pytest.mark.parametrize("name", few(RULES, ["right"]))
def test_lark_rules_however_they_chain_end_no_process(toy_folder, name):
    def lark(length, last='"a"', prefix="r"):
        names = [f"{prefix}{i}" for i in range(length)]
        rules = [RULES[name](one, other) for one, other in pairwise(names)]
        return "\n".join([f"start: {names[0]}", *rules, f"{names[-1]}: {last}", 'A: "x"\n'])

    outcomes(
        toy_folder,
        *(("lark", lark(length)) for length in (3000, 20_000)),
        ("lark", lark(3000, "r0")),  # left and right recursion
        ("lark", lark(5000, prefix="R")),  # terminals
    )


@pytest.mark.long
def test_groups_and_expressions_however_they_nest_end_no_process(toy_folder):
    n = 20_000
    groups = [("(", ")"), ("[", "]"), ("(", ")*"), ("(", ")?"), ("(", "){1,9}"), ("(", ' "b")')]
    texts = ["(" * n + "a" + ")" * n, "(?:" * n + "a" + ")*" * n, "(a|" * n + "b" + ")" * n]
    texts += ["[" * n + "a" + "]" * n, "a" + "?" * n, "a" + "{1,9}" * n, "(?i:" * n + "a" + ")" * n]
    outcomes(
        toy_folder,
        *(("lark", "start: " + start * n + '"a"' + end * n) for start, end in groups),
        ("lark", "start: A\nA: " + "~" * n + '"a"'),
        ("lark", "start: A\nA: " + "(" * n + '"a" & "a")' * n),
        ("lark", "start: " + "%lark {\nstart: " * n + '"a"\n' + "}\n" * n),
        *(("regex", text) for text in texts),
        *(("lark", f"start: /{text}/") for text in texts),
        *(("json_schema", json.dumps({"type": "string", "pattern": text})) for text in texts),
        ("json_schema", '{"const": ' + "[" * n + "]" * n + "}"),
        ("json_schema", '{"enum": [' + '{"a":' * n + "1" + "}" * n + "]}"),
    )


HUGE = ("json_schema", '{"type": "integer", "multipleOf": 99999999}')  # all memory, for minutes

PATTERNS = {"patternProperties": {f"^a{i}.*b{i}$": {"type": "null"} for i in range(3000)}}
SLOW = [HUGE, ("json_schema", json.dumps(PATTERNS)), ("regex", "a?" * 60_000)]


@pytest.mark.parametrize(("kind", "text"), few(SLOW, [HUGE]))
def test_what_takes_minutes_or_all_memory_is_refused(toy_folder, kind, text):
    """The limits are of processor time and memory, so a busy machine refuses no more."""
    (outcome,) = outcomes(toy_folder, (kind, text))
    assert outcome.startswith("refused") and "make it smaller" in outcome


def test_a_deep_schema_that_fits_compiles(toy_folder):
    schema = ("json_schema", chain(WRAPS["objects in anyOf"], 1000))
    rules = [f"r{i}: r{i + 1}" for i in range(3000)]
    lark = ("lark", "\n".join(["start: r0", *rules, 'r3000: "a"\n']))
    assert outcomes(toy_folder, schema, lark) == ["compiled True"] * 2
