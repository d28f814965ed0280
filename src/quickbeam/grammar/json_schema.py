"""Rewrites JSON schemas for llguidance, and finds what no grammar can hold an answer to."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quickbeam.grammar.patterns import few_texts, without_look_around

TYPES = ("null", "boolean", "number", "string", "array", "object")
# formats that llguidance knows; any other is an annotation
FORMATS = (
    *("date", "date-time", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "time", "uri", "uuid"),
)
# keywords whose value is a schema, a list of schemas, or schemas by names
SCHEMA = ("additionalItems", "additionalProperties", "items")
LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
BY_NAME = ("$defs", "definitions", "patternProperties", "properties")
UNKNOWN = (  # keywords that llguidance doesn't implement
    *("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"),
    *("contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
)
# keywords that mean nothing without another one, which is in `UNKNOWN`
COMPANIONS = ("else", "maxContains", "minContains", "then")
ANCHORS = ("$dynamicAnchor", "$recursiveAnchor")  # mean nothing without their references
MOST_STEPS = 8000  # in which the schemas of a `oneOf` are compared
MOST_PARTS = 20  # schemas that are compared at once
LARGEST = 2**63  # llguidance takes bounds below this

Schema = dict[str, Any]


class LeftOut(NamedTuple):
    """A constraint that a grammar can't hold an answer to.

    `place`: a JSON pointer to the schema that has the keyword: `#/properties/tags`.
    """

    keyword: str
    place: str

    def __str__(self) -> str:
        return f"{self.keyword} at {self.place}"


def enforceable(schema: Any) -> tuple[Any, list[LeftOut]]:
    """Return a schema that llguidance can hold an answer to, and what of `schema` it lacks.

    Where nothing is left out, an answer that fits the returned schema fits `schema`. A schema that
    needs no change is returned as it is. What is wrong in a schema is left to llguidance, which
    refuses it.
    """
    rewriter = _Rewriter(schema)
    rewritten = rewriter.rewrite(schema, "#")
    return {"enum": []} if rewritten is False else rewritten, rewriter.left_out


class _Rewriter:
    """Rewrites the schemas within `root`, and notes in `left_out` what gets lost."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.left_out = list[LeftOut]()

    def rewrite(self, schema: Any, place: str) -> Any:
        """Return a schema rewritten, with all schemas in it."""
        if not isinstance(schema, Mapping):
            return schema
        result: Schema = {}
        for keyword, value in schema.items():
            result[keyword] = self._rewrite_value(keyword, value, f"{place}/{_escaped(keyword)}")
        for keyword, change in CHANGES.items():
            if keyword in result:
                change(self, result, place)
        if result.pop("not", None) is not None:  # `_change_not` left it
            return False
        return result

    def _rewrite_value(self, keyword: str, value: Any, place: str) -> Any:
        if keyword in BY_NAME and isinstance(value, Mapping):
            return {
                name: self.rewrite(one, f"{place}/{_escaped(name)}") for name, one in value.items()
            }
        if keyword in LIST and isinstance(value, list):
            return [self.rewrite(one, f"{place}/{i}") for i, one in enumerate(value)]
        return self.rewrite(value, place) if keyword in SCHEMA else value

    def leave_out(self, schema: Schema, keyword: str, place: str) -> None:
        """Take a keyword from a schema, and note that."""
        del schema[keyword]
        self.note(keyword, place)

    def note(self, keyword: str, place: str) -> None:
        """Note a keyword that has less effect than the schema asks for."""
        self.left_out.append(LeftOut(keyword, place))

    def resolved(self, schema: Any) -> Any:
        """Return what a schema that is only a reference within the document refers to."""
        for _ in range(16):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/") or len(schema) > 1:
                break
            schema = self._root
            for name in reference[2:].split("/"):
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, Mapping) else None
        return schema


# --- what becomes of keywords: functions that change a schema in place ---


def _change_format(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    if schema["format"] not in FORMATS:
        del schema["format"]


def _change_pattern(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    pattern = schema["pattern"]
    if not isinstance(pattern, str):
        return
    rewritten = without_look_around(pattern)
    if rewritten is None:
        rewriter.leave_out(schema, "pattern", place)
        return
    if not rewritten.exact:
        rewriter.note("pattern", place)
    first, *others = rewritten.patterns
    schema["pattern"] = first
    if others:
        kind = {"type": schema["type"]} if "type" in schema else {}
        more = [{**kind, "pattern": one} for one in others]
        known = schema.get("allOf", [])
        schema["allOf"] = [*known, *more] if isinstance(known, list) else known


def _change_pattern_properties(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    """Rewrite patterns, and take away names that the schema asks for by themselves.

    If these were all that match a pattern, llguidance would begin a field that can have no name.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    patterns = schema["patternProperties"]
    if not isinstance(patterns, Mapping) or not isinstance(properties, Mapping):
        return
    if not isinstance(required, list):
        return
    named: Schema = dict(properties)
    left: Schema = {}
    for pattern, value in patterns.items():
        rewritten = without_look_around(pattern)
        if rewritten is None or not rewritten.exact or len(rewritten.patterns) > 1:
            rewriter.note("patternProperties", place)
        pattern = r"[\s\S]*" if rewritten is None else rewritten.patterns[0]
        names = few_texts(pattern) or []
        own = [name for name in names if name in named or name in required]
        for name in own:
            named[name] = {"allOf": [named[name], value]} if name in named else value
        others = [name for name in names if name not in own]
        if not own:
            left[pattern] = value
        elif others:
            left[_one_of(others)] = value
    schema["patternProperties"] = left
    if named != properties:
        schema["properties"] = named


def _change_unique_items(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    if schema["uniqueItems"] is False or schema.get("maxItems") in (0, 1):
        del schema["uniqueItems"]
    else:
        rewriter.leave_out(schema, "uniqueItems", place)


def _change_property_names(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    """Turn what names must fit into the properties with such names."""
    pattern = _pattern_of_names(rewriter.resolved(schema["propertyNames"]))
    if pattern is None or "patternProperties" in schema or "properties" in schema:
        rewriter.leave_out(schema, "propertyNames", place)
        return
    del schema["propertyNames"]
    if pattern:
        value = schema.pop("additionalProperties", {})
        schema |= {"patternProperties": {pattern: value}, "additionalProperties": False}
        _change_pattern_properties(rewriter, schema, place)


def _pattern_of_names(schema: Any) -> str | None:
    """Return an expression for the texts that fit a schema; "" if all do, None if none is known."""
    if schema is True:
        return ""
    if not isinstance(schema, Mapping):
        return None
    kept = {"const", "enum", "format", "maxLength", "minLength", "pattern", "type"}
    asked = {keyword: schema[keyword] for keyword in schema if keyword in kept}
    if asked.get("format") not in FORMATS:
        asked.pop("format", None)
    if asked.get("type") == "string":
        del asked["type"]
    if any(keyword in schema for keyword in (*UNKNOWN, *LIST, "$ref")):
        return None
    match asked:
        case {"enum": list(names), **rest} if not rest:
            pass
        case {"const": name, **rest} if not rest:
            names = [name]
        case {"pattern": str(pattern), **rest} if not rest:
            rewritten = without_look_around(pattern)
            known = rewritten is not None and rewritten.exact and len(rewritten.patterns) == 1
            return pattern if known else None
        case {} if asked.keys() <= {"minLength", "maxLength"}:
            least, most = asked.get("minLength", 0), asked.get("maxLength", "")
            return f"^[\\s\\S]{{{least},{most}}}$" if asked else ""
        case _:
            return None
    return _one_of([name for name in names if isinstance(name, str)])


def _one_of(names: list[str]) -> str:
    """Return an expression for some names."""
    return f"^(?:{'|'.join(map(re.escape, names))})$"


def _change_one_of(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    """Turn `oneOf` into `anyOf`, which means the same where no two of the schemas fit one value."""
    options = schema["oneOf"]
    if not isinstance(options, list) or "anyOf" in schema:
        return
    siblings = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
    pairs = itertools.combinations(options, 2)
    search = _ContradictionSearch(rewriter)
    if not all(search.fits_nothing([siblings, *pair]) for pair in pairs):
        rewriter.note("oneOf", place)
    renamed = [("anyOf" if key == "oneOf" else key, value) for key, value in schema.items()]
    schema.clear()
    schema.update(renamed)


class _ContradictionSearch:
    """Looks for contradictions between schemas, in at most `MOST_STEPS` steps."""

    def __init__(self, rewriter: _Rewriter) -> None:
        self._rewriter = rewriter
        self._steps = MOST_STEPS

    def fits_nothing(self, schemas: list[Any]) -> bool:
        """Whether it is certain that no value fits all of these schemas."""
        self._steps -= 1
        if self._steps < 0:
            return False
        parts = list[Mapping[str, Any]]()
        waiting = list(schemas)
        while waiting and len(parts) < MOST_PARTS:
            part = self._rewriter.resolved(waiting.pop())
            if part is False:
                return True
            if isinstance(part, Mapping):
                parts.append(part)
                waiting += _list(part.get("allOf"))
        if not set.intersection(set(TYPES), *map(_kinds, parts)):
            return True
        values = [_values(part) for part in parts if "const" in part or "enum" in part]
        self._steps -= sum(map(len, values)) // 10
        if values and not set.intersection(*values):
            return True
        for i, part in enumerate(parts):
            others = [*parts[:i], {key: part[key] for key in part if key not in ("anyOf", "oneOf")}]
            others += parts[i + 1 :]
            for keyword in ("anyOf", "oneOf"):
                options = _list(part.get(keyword))
                if options and all(self.fits_nothing([*others, one]) for one in options):
                    return True
        if any(_kinds(part) == {"object"} for part in parts):
            required = {name for part in parts for name in _list(part.get("required"), str)}
            for name in sorted(required):
                if self.fits_nothing([_property(part, name) for part in parts]):
                    return True
        return False


def _list(value: Any, kind: Any = object) -> list[Any]:
    return [one for one in value if isinstance(one, kind)] if isinstance(value, list) else []


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the kinds of values that may fit a schema, by its types and the values it lists."""
    types = _types(schema["type"]) if "type" in schema else TYPES
    kinds = {"number" if one == "integer" else one for one in types}
    if "const" in schema or "enum" in schema:
        kinds &= {_kind(json.loads(value)) for value in _values(schema)}
    return kinds


def _kind(value: Any) -> str:
    """Return the type of a value of JSON; integers are numbers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "number")


def _values(schema: Mapping[str, Any]) -> set[str]:
    """Return the values that a schema with `const` or `enum` lists, as JSON."""
    listed = [schema["const"]] if "const" in schema else _list(schema["enum"])
    whole = (int(one) if isinstance(one, float) and one.is_integer() else one for one in listed)
    return {json.dumps(one, sort_keys=True) for one in whole}


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of an object's field."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _change_not(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    """Turn types that are ruled out into those that are left. `not` stays if no value is left."""
    ruled_out = rewriter.resolved(schema["not"])
    if ruled_out is False:
        del schema["not"]
        return
    if ruled_out is True or ruled_out == {}:
        return
    types = _types(schema.get("type", list(TYPES)))
    out = _types(ruled_out.get("type")) if isinstance(ruled_out, Mapping) else []
    if not out or len(ruled_out) > 1 or ("integer" in out and "number" in types):
        rewriter.leave_out(schema, "not", place)
        return
    if "number" in out:
        out = [*out, "integer"]
    if left := [one for one in types if one not in out]:
        del schema["not"]
        schema["type"] = left


def _types(value: Any) -> list[str]:
    """Return the types of the keyword `type`; none for what it can't hold."""
    types = [value] if isinstance(value, str) else value
    known = (*TYPES, "integer")
    return types if isinstance(types, list) and all(one in known for one in types) else []


def _change_if(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    if "then" in schema or "else" in schema:
        rewriter.leave_out(schema, "if", place)
    else:
        del schema["if"]


def _change_contains(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"]
    else:
        rewriter.leave_out(schema, "contains", place)


def _change_unevaluated(keyword: str, counterpart: str) -> Callable[[_Rewriter, Schema, str], None]:
    def change(rewriter: _Rewriter, schema: Schema, place: str) -> None:
        value = schema[keyword]
        if value is True or value == {}:
            del schema[keyword]
        elif value is False and not schema.keys() & {"$ref", "allOf", "anyOf", "if", "oneOf"}:
            del schema[keyword]
            schema.setdefault(counterpart, False)
        else:
            rewriter.leave_out(schema, keyword, place)

    return change


def _change_bound(keyword: str) -> Callable[[_Rewriter, Schema, str], None]:
    def change(rewriter: _Rewriter, schema: Schema, place: str) -> None:
        value = schema[keyword]
        if not isinstance(value, int | float) or abs(value) < LARGEST:
            return
        if abs(value) >= sys.float_info.max and (value > 0) == keyword.endswith("aximum"):
            del schema[keyword]  # all numbers are within it
        else:
            rewriter.leave_out(schema, keyword, place)

    return change


def _change_property_counts(rewriter: _Rewriter, schema: Schema, place: str) -> None:
    """Leave out counts of properties where some of these are optional, but for simple cases."""
    names, required = schema.get("properties"), schema.get("required", [])
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
    numbers = isinstance(least, int) and isinstance(most, int | float)
    if not isinstance(names, Mapping) or not isinstance(required, list) or not numbers:
        return
    if all(name in required for name in names):
        return
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed and most >= len(names) + len(required):
        schema.pop("maxProperties", None)
        most = math.inf
    more = most - len(required)
    if closed and least - len(required) <= 1 and more in (1, math.inf):
        return  # one of the optional ones, at least or at most
    if most < math.inf:
        rewriter.leave_out(schema, "maxProperties", place)
    if least > len(required):
        rewriter.leave_out(schema, "minProperties", place)


def _leave_out(keyword: str) -> Callable[[_Rewriter, Schema, str], None]:
    return lambda rewriter, schema, place: rewriter.leave_out(schema, keyword, place)


def _drop(keyword: str) -> Callable[[_Rewriter, Schema, str], None]:
    return lambda rewriter, schema, place: schema.pop(keyword)


BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
CHANGES: dict[str, Callable[[_Rewriter, Schema, str], None]] = {
    "format": _change_format,
    "pattern": _change_pattern,
    "patternProperties": _change_pattern_properties,
    "uniqueItems": _change_unique_items,
    "propertyNames": _change_property_names,
    "oneOf": _change_one_of,
    "not": _change_not,
    "if": _change_if,
    "contains": _change_contains,
    "unevaluatedProperties": _change_unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _change_unevaluated("unevaluatedItems", "items"),
    "minProperties": _change_property_counts,
    "maxProperties": _change_property_counts,
    **{keyword: _change_bound(keyword) for keyword in BOUNDS},
    **{keyword: _drop(keyword) for keyword in (*ANCHORS, *COMPANIONS)},
}
CHANGES |= {keyword: _leave_out(keyword) for keyword in UNKNOWN if keyword not in CHANGES}


def _escaped(name: str) -> str:
    """Return a name as it stands in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
