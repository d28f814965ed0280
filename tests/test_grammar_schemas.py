"""Schemas as clients write them: what is rewritten, what is left out and named, what is refused."""

import itertools
import json
import logging
import random
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples, few, refuses
from quickbeam import Grammar, InvalidInput
from quickbeam.grammar.json_schema import BY_NAME, CHANGES, LIST, SCHEMA, enforceable
from quickbeam.grammar.patterns import few_texts, without_look_around
from serving import ask, good, junk, refused
from test_grammar_vocabulary import compiler, json_values, object_of, schemas, shown, write

# of pydantic 2.14 and zod 4.4, unless their names say another version
LINES = Path(__file__).with_name("published_schemas.jsonl").read_text().splitlines()
PUBLISHED = {line["name"]: line for line in map(json.loads, LINES)}
RUST = r"\\p\{"  # what Python's expressions, by which answers are checked, don't have


def fits(answer, schema, exact=True):
    if not re.search(RUST, json.dumps(schema)):
        checked = schema if exact else loosened(schema)
        jsonschema.validate(json.loads(answer), checked)


def loosened(schema):
    """A schema as it is rewritten, which is what answers are held to if something is left out."""
    return enforceable(schema)[0]


SOME = ["pydantic model", "pydantic dict of enum", "pydantic Path", "zod emoji", "zod hostname"]
SOME += ["zod regex", "zod never", "zod partialRecord", "zod 4.0 email", "zod discriminated"]
SOME += ["pydantic 2.12 Decimal", "pydantic 2.12 Decimal digits", "zod startsWith", "zod float32"]


@pytest.mark.parametrize("name", few(PUBLISHED, SOME))
def test_answers_keep_to_schemas_that_libraries_write(name):
    schema, left_out = PUBLISHED[name]["schema"], PUBLISHED[name]["left_out"]
    grammar = Grammar.json_schema(schema)
    assert list(grammar.left_out) == left_out
    if name == "zod startsWith":  # random letters seldom come to its end
        compiler("qwen").compile(grammar)
        return
    for seed in range(3):
        fits(shown("qwen", write("qwen", grammar, seed, most=3000)), schema, not left_out)
    if left_out:
        refuses(re.escape(left_out[0]), Grammar.json_schema, schema, strict=True)
    else:
        assert Grammar.json_schema(schema, strict=True) == grammar


def test_what_is_left_out_is_logged_once_a_grammar(caplog):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "title": "logged"}
    grammar = Grammar.json_schema(schema)
    with caplog.at_level(logging.WARNING):
        for _ in "12":
            compiler("qwen").compile(grammar)
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == "json_schema: answers are not held to uniqueItems at #"


A, B = {"const": "a"}, {"enum": ["b", 2]}


def fields(**properties):
    return {"properties": properties}


DISJOINT = [
    [{"type": "integer"}, {"type": ["string", "null"]}],
    [A, B, {"const": 3}],
    [{"type": "object", "required": ["k"], **fields(k=one)} for one in (A, B)],
    [{"anyOf": [A, {"type": "null"}]}, B],
    [{"type": "object", "required": ["k"]}, {"type": "object", "additionalProperties": False}],
]
REWRITTEN = [
    ({"type": "string", "format": "path"}, {"type": "string"}),
    ({"format": "int32", "type": "integer"}, {"type": "integer"}),
    ({"uniqueItems": False, "type": "array"}, {"type": "array"}),
    ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ({"not": {}, "type": "string"}, {"enum": []}),
    ({"properties": {"a": {"not": True}}}, {"properties": {"a": False}}),
    ({"not": False}, {}),
    ({"not": {"type": "null"}, "type": ["string", "null"]}, {"type": ["string"]}),
    ({"not": {"type": "number"}, "type": ["integer", "null"]}, {"type": ["null"]}),
    ({"not": {"type": ["string", "null"]}}, {"type": ["boolean", "number", "array", "object"]}),
    ({"if": {"type": "string"}}, {}),
    ({"contains": {}, "minContains": 0}, {}),
    (
        {"unevaluatedProperties": False, "properties": {}},
        {"properties": {}} | {"additionalProperties": False},
    ),
    ({"propertyNames": {"type": "string"}}, {}),
    (
        {"propertyNames": {"enum": ["a.", "b"]}, "additionalProperties": {"type": "null"}},
        {"patternProperties": {r"^(?:a\.|b)$": {"type": "null"}}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"minLength": 1, "maxLength": 3}},
        {"patternProperties": {r"^[\s\S]{1,3}$": {}}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"const": "x"}}},
        {
            "$defs": {"a/b": {"const": "x"}},
            "patternProperties": {"^(?:x)$": {}},
            "additionalProperties": False,
        },
    ),
    ({"type": "number", "maximum": 1.7976931348623157e308}, {"type": "number"}),
    *(({"oneOf": one}, {"anyOf": one}) for one in DISJOINT),
    (
        {"required": ["k"], "type": "object", "oneOf": [fields(k=A), fields(k=B)]},
        {"required": ["k"], "type": "object", "anyOf": [fields(k=A), fields(k=B)]},
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
    ),
    (
        {"type": "string", "pattern": "^(?=.{2,3}$)[a-z]+$"},
        {
            "type": "string",
            "pattern": "^[a-z]+$",
            "allOf": [{"type": "string", "pattern": "^(?:.{2,3}$)"}],
        },
    ),
    (
        {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "maxProperties": 2},
        {"properties": {"a": {}, "b": {}}, "additionalProperties": False},
    ),
]


@pytest.mark.parametrize(("schema", "expected"), REWRITTEN, ids=str)
def test_what_can_be_said_otherwise_is(schema, expected):
    assert enforceable(schema) == (expected, [])
    assert enforceable(expected) == (expected, [])


LEFT_OUT = [
    ({"uniqueItems": True}, ["uniqueItems at #"]),
    ({"not": {"const": 3}}, ["not at #"]),
    ({"not": {"type": "integer"}, "type": "number"}, ["not at #"]),
    ({"if": {}, "then": {}, "else": {}}, ["if at #"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf at #"]),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, ["oneOf at #"]),
    ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ["oneOf at #"]),
    ({"contains": {}, "minContains": 2}, ["contains at #"]),
    ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired at #"]),
    ({"dependentSchemas": {}}, ["dependentSchemas at #"]),
    ({"dependencies": {}}, ["dependencies at #"]),
    ({"anyOf": [{}, {"unevaluatedItems": False, "$ref": "#"}]}, ["unevaluatedItems at #/anyOf/1"]),
    ({"properties": {"a/b": {"uniqueItems": True}}}, ["uniqueItems at #/properties/a~1b"]),
    ({"$defs": {"x": {"items": {"not": {"enum": [1]}}}}}, ["not at #/$defs/x/items"]),
    ({"propertyNames": {"pattern": "a", "maxLength": 3}}, ["propertyNames at #"]),
    ({"pattern": r"a(?!b)"}, ["pattern at #"]),
    ({"pattern": r"(a)\1"}, ["pattern at #"]),
    ({"patternProperties": {r"^(?=.{3}$)a": {}}}, ["patternProperties at #"]),
    ({"type": "number", "minimum": -1e30}, ["minimum at #"]),
    ({"properties": {"a": {}}, "minProperties": 2}, ["minProperties at #"]),
]


@pytest.mark.parametrize(("schema", "names"), LEFT_OUT, ids=str)
def test_what_cannot_be_enforced_is_named_with_its_place(schema, names):
    rewritten, left_out = enforceable(schema)
    assert [*map(str, left_out)] == names
    assert enforceable(rewritten)[1] == []
    assert Grammar.json_schema(schema).left_out == tuple(names)
    compiler("qwen").compile(Grammar.json_schema(schema))
    words = f"json_schema: {re.escape(names[0])}: answers can't be held to it"
    refuses(words, Grammar.json_schema, schema, strict=True)


def test_a_value_that_looks_like_a_schema_is_left_alone():
    schema = {
        "const": {"uniqueItems": True, "pattern": "(?=a)"},
        "enum": [{"format": "x"}],
        "default": {"not": {}},
        "properties": {"not": {}, "format": {"type": "string"}},
    }
    assert enforceable(schema) == (schema, [])


NAMES = sorted({*CHANGES, *BY_NAME, *LIST, *SCHEMA, "type", "$ref", "enum", "required"})


@examples(300, deadline=None)
@given(schema=junk(*NAMES))
def test_junk_is_left_to_llguidance(schema):
    rewritten, left_out = enforceable(schema)
    assert enforceable(rewritten)[0] == rewritten or left_out


SMALL = st.sampled_from(["a", "b"])


@examples(400, deadline=None)
@given(one=schemas(SMALL), other=schemas(SMALL), value=json_values(SMALL))
def test_schemas_of_one_value_are_never_said_to_exclude_each_other(one, other, value):
    if all(jsonschema.Draft202012Validator(schema).is_valid(value) for schema in (one, other)):
        assert enforceable({"oneOf": [one, other]})[1] == [("oneOf", "#")]


PATTERNS = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,1}|(?=[\d.]{1,4}0*$)\d{0,1}\.\d{0,2}0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,2}|(?=[\d.]{1,3}0*$)\d*\.\d*0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,4}0*$)\d{0,0}\.\d{0,5}0*$)",
    r"^(?!\.)(?!.*\.\.)[ab.]*[ab]@(?:[ab]+\.)+[ab]{2,}$",
    r"^(?=.{1,4}\.?$)[ab]+(\.[ab]+)*\.?$",
    r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{3,}$",
    r"^(?!-)[ab-]+(?<!-)$",
    r"^(?!(?:ab|ba)$)[ab]*$",
    r"^(?!ab)[ab.]*$",
    r"^(?!.*ab)[ab.-]*$",
    r"^(?!.*(--|\.\.))[ab.-]*$",
    r"^(?!.*ab$)[ab]*$",
    r"^(?!$)[ab]*$",
    r"^(?!\s*$).+$",
    r"^(?![a-c]+$)[abc.]*$",
    r"^(?!a|\.)",
    r"^[ab]*(?<=ab)$",
    r"(?<!ab)$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_look_around_that_excludes_characters_or_a_length_is_said_otherwise(pattern):
    rewritten = without_look_around(pattern)
    assert rewritten.exact
    rng = random.Random(0)
    short = itertools.chain(*(itertools.product("ab.-", repeat=n) for n in range(5)))
    long = ([rng.choice("ab.-+1A @") for _ in range(rng.randrange(9))] for _ in range(2000))
    numbers = itertools.chain(*(itertools.product("01.", repeat=n) for n in range(8)))
    for text in map("".join, itertools.chain(short, long, numbers)):
        expected = re.search(pattern, text) is not None
        found = all(re.search(one, text) for one in rewritten.patterns)
        assert found == expected, text


@pytest.mark.parametrize(
    ("pattern", "rest"),
    [
        (r"a(?!b)c", "ac"),
        (r"\bab\b", "ab"),
        (r"^(?!(a+)b)c$", "^c$"),
        (r"^a(?=b(?!c))*d|^e", "^ad|^e"),
    ],
)
def test_other_look_around_is_left_out(pattern, rest):
    assert without_look_around(pattern) == ([rest], False)
    assert without_look_around(r"(a)\1") is None


@pytest.mark.parametrize(
    "text", ["^" + "(?=a)" * 90_000, "^(?!" + "a|" * 90_000 + ")", "^(?!" + "(" * 900]
)
def test_rewriting_takes_time_in_proportion_to_an_expression(text):
    without_look_around(text)


def test_a_property_keeps_to_the_patterns_that_match_it():
    def answers(value, pattern, **more):
        schema = {
            "type": "object",
            "properties": {"ab": value},
            "patternProperties": {"^a": pattern},
            "additionalProperties": False,
            **more,
        }
        for seed in range(6):
            answer = json.loads(
                shown("qwen", write("qwen", Grammar.json_schema(schema), seed, 3000))
            )
            jsonschema.validate(answer, schema)
            yield answer

    low, high = {"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}
    assert all(2 <= one["ab"] <= 5 for one in answers(low, high, required=["ab"]))
    assert all("ab" not in one for one in answers({"type": "string"}, high))
    with pytest.raises(InvalidInput, match="required property 'ab' is unsatisfiable"):
        list(answers({"type": "string"}, high, required=["ab"]))


@pytest.mark.parametrize(
    ("pattern", "required"),
    [("^ab$", ["ab"]), ("^(?:ab|cd)$", ["ab", "cd"]), ("^(?:ab|cd)$", ["cd"]), ("^a[ab]$", ["ab"])],
)
def test_a_pattern_whose_names_are_all_required_begins_no_further_field(pattern, required):
    schema = {
        "type": "object",
        "patternProperties": {pattern: {"enum": [1, 2]}},
        "additionalProperties": False,
        "required": required,
    }
    for seed in range(8):
        answer = json.loads(shown("qwen", write("qwen", Grammar.json_schema(schema), seed, 3000)))
        jsonschema.validate(answer, schema)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^a$|^b$", ["a", "b"]),
        (r"^(?:a\.|b(c|d)?)$", ["a.", "b", "bc", "bd"]),
        ("^[a-c]x$", ["ax", "bx", "cx"]),
        *((pattern, None) for pattern in ("a", "^a|b$", "^a+$", "^[^a]$", "^.$", "^[a-z]{2}$")),
        ("^[0-9A-Za-z][0-9A-Za-z]$", None),
    ],
)
def test_the_texts_of_an_expression_that_has_few(pattern, texts):
    assert few_texts(pattern) == texts


# --- served ---

UNIQUE = object_of("tags", {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True})
HEADER = "x-quickbeam-ignored"


def form(schema, strict=None):
    own = {"name": "x", "schema": schema} | ({} if strict is None else {"strict": strict})
    return {"type": "json_schema", "json_schema": own}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_served_schema_names_what_it_lacks_or_is_refused_if_strict(scripted, path):
    chat = path.endswith("completions")
    where = "response_format" if chat else "text"

    def asked(**fields):
        given = form(UNIQUE, **fields)
        if chat:
            return {"messages": [{"role": "user", "content": "hi"}], "response_format": given}
        return {"input": "hi", "text": {"format": {"type": "json_schema", **given["json_schema"]}}}

    for fields in ({}, {"strict": False}):
        response = ask(scripted, path, asked(**fields))
        good(response)
        assert response.headers[HEADER] == f"{where} (uniqueItems at #/properties/tags)"
    words = refused(ask(scripted, path, asked(strict=True)), where)
    assert "uniqueItems at #/properties/tags" in words
