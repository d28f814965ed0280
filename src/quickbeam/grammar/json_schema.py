"""Rewrites JSON schemas for llguidance, and notes keywords that it can't hold an answer to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quickbeam.grammar.patterns import without_look_around

TYPES = ("null", "boolean", "number", "string", "array", "object")
# formats that llguidance knows; any other is an annotation
FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"),
}
# keywords whose value is a schema, a list of schemas, or schemas by names
SCHEMA = ("additionalItems", "additionalProperties", "items")
LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
BY_NAME = ("$defs", "definitions", "patternProperties", "properties")
UNKNOWN = (  # keywords that llguidance doesn't implement
    *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired"),
    *("dependentSchemas", "if", "unevaluatedItems", "unevaluatedProperties"),
)
# keywords that mean nothing without one of those
COMPANIONS = ("$dynamicAnchor", "$recursiveAnchor", "else", "maxContains", "minContains", "then")
BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
LARGEST = 2**63  # llguidance takes bounds below this
MOST_NOTES = 100
LONGEST_NAME = 100  # in a note
# Limits of what is compared to tell the options of `oneOf` apart.
MOST_OPTIONS = 300  # of a whole document
MOST_TAGS = 30  # required properties of an option
MOST_VALUES = 20  # of a property

Schema = dict[str, Any]


def enforceable(schema: Any) -> tuple[Any, list[str]]:
    """Return a schema that llguidance can hold an answer to, and notes on what it lacks.

    A note is a keyword of `schema` with a JSON pointer to the schema that has it:
    `uniqueItems at #/properties/tags`. There are at most `MOST_NOTES`. Without any, an answer that
    fits the returned schema fits `schema`. A schema that needs no change is returned as it is. A
    schema that is wrong is refused by llguidance, not here.
    """
    rewriter = _Rewriter(schema)
    return rewriter.rewrite(schema), rewriter.left_out


class _Rewriter:
    """Rewrites the schemas within `root`, and notes in `left_out` the keywords that get lost."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._pointer = ["#"]  # to the schema that is being rewritten
        self._options_left = MOST_OPTIONS
        self.left_out = list[str]()

    def rewrite(self, schema: Any, *names: Any) -> Any:
        """Return a schema rewritten. `names` lead to it from the schema around it."""
        if not isinstance(schema, Mapping):
            return schema
        for name in names:
            name = str(name)[:LONGEST_NAME]
            self._pointer.append(name.replace("~", "~0").replace("/", "~1"))
        result = {
            keyword: self._rewrite_value(keyword, value)
            for keyword, value in schema.items()
            if keyword not in COMPANIONS
        }
        for keyword, change in CHANGES.items():
            if keyword in result:
                change(self, result, keyword)
        del self._pointer[len(self._pointer) - len(names) :]
        return result

    def _rewrite_value(self, keyword: str, value: Any) -> Any:
        if keyword in BY_NAME and isinstance(value, Mapping):
            return {name: self.rewrite(value[name], keyword, name) for name in value}
        if keyword in LIST and isinstance(value, list):
            return [self.rewrite(schema, keyword, i) for i, schema in enumerate(value)]
        return self.rewrite(value, keyword) if keyword in SCHEMA else value

    def leave_out(self, schema: Schema, keyword: str) -> None:
        """Take a keyword from a schema, and note that."""
        del schema[keyword]
        self.note(keyword)

    def note(self, keyword: str) -> None:
        """Note a keyword that has less effect than the schema asks for."""
        if len(self.left_out) < MOST_NOTES:
            self.left_out.append(f"{keyword} at {'/'.join(self._pointer)}")

    def resolved(self, schema: Any) -> Any:
        """Return the schema that a reference within the document refers to.

        A schema that is anything else than a reference is returned as it is.
        """
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/") or len(schema) > 1:
            return schema
        target = self._root
        for name in reference[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        return target

    def are_disjoint(self, options: list[Any]) -> bool:
        """Whether it is certain that no value fits two of the options of `oneOf`.

        Options are told apart by their types, by the values that they list, or by the values of a
        property that all of them require.
        """
        self._options_left -= len(options)
        if self._options_left < 0:
            return False
        schemas = [self.resolved(option) for option in options]
        if _no_overlap(map(_types, schemas)) or _no_overlap(map(_values, schemas)):
            return True
        tags = [_tags(schema) for schema in schemas]
        return any(
            _no_overlap(values_of.get(name, set()) for values_of in tags) for name in tags[0]
        )


# --- what tells schemas apart: sets, which are empty where a schema says nothing of it ---


def _no_overlap(sets: Iterable[set[str]]) -> bool:
    """Whether no two of the sets overlap, and none is empty."""
    union = set[str]()
    for values in sets:
        if not values or not union.isdisjoint(values):
            return False
        union |= values
    return True


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows; integers are numbers."""
    value = schema.get("type") if isinstance(schema, Mapping) else None
    names = value if isinstance(value, list) else [value]
    if len(names) > len(TYPES):
        return set()
    types = {"number" if name == "integer" else name for name in _texts(names)}
    return types if types.issubset(TYPES) else set()


def _values(schema: Any) -> set[str]:
    """Return the `repr` of each value that a schema lists, if all are plain and few."""
    if not isinstance(schema, Mapping):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > MOST_VALUES:
        return set()
    plain = all(isinstance(value, (str, int, type(None))) for value in values)
    return set(map(repr, values)) if plain else set()


def _tags(schema: Any) -> dict[str, set[str]]:
    """Return the values of properties that an object must have, where it lists them."""
    if _types(schema) != {"object"}:
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    return {name: _values(properties.get(name)) for name in _texts(required[:MOST_TAGS])}


def _texts(value: Any) -> list[str]:
    """Return a list of texts; an empty one for anything else."""
    is_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return value if is_texts else []


# --- what becomes of keywords: functions that change a schema in place ---


def _change_format(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    if isinstance(schema[keyword], str) and schema[keyword] not in FORMATS:
        del schema[keyword]


def _change_pattern(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    if not isinstance(schema["pattern"], str):
        return
    rewritten = without_look_around(schema["pattern"])
    schema["pattern"], *others = rewritten.patterns
    if not rewritten.exact:
        rewriter.note(keyword)
    all_of = schema.get("allOf", [])
    if others and isinstance(all_of, list):
        schema["allOf"] = [*all_of, *({"pattern": pattern} for pattern in others)]


def _change_property_names(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    """Turn a condition on names into the properties with such names."""
    names = rewriter.resolved(schema.pop(keyword))
    condition = dict(names) if isinstance(names, Mapping) else {keyword: names}
    for annotation in ("description", "title"):
        condition.pop(annotation, None)
    if condition.get("type") == "string":
        del condition["type"]
    if not condition:
        return
    if condition.keys() <= {"maxLength", "minLength"}:
        least = condition.get("minLength", 0)
        most = condition.get("maxLength", "")
        condition = {"pattern": rf"^[\s\S]{{{least},{most}}}$"}
    value = schema.get("additionalProperties", {})
    naming_keywords = schema.keys() & {"patternProperties", "properties", "required"}
    if condition.keys() in ({"const"}, {"enum"}) and naming_keywords <= {"required"}:
        accepted = _texts(condition.get("enum", [condition.get("const")]))
        schema["properties"] = dict.fromkeys(accepted, value)
    elif (
        condition.keys() == {"pattern"} and _is_plain(condition["pattern"]) and not naming_keywords
    ):
        schema["patternProperties"] = {condition["pattern"]: value}
    else:
        rewriter.note(keyword)
        return
    schema["additionalProperties"] = False


def _change_pattern_properties(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    """Leave out patterns that can't be read, or that few names may match.

    If the schema names all names that match a pattern, llguidance begins a field that can have no
    name. This may happen with a pattern that says how a name ends.
    """
    patterns = schema[keyword]
    if not isinstance(patterns, Mapping):
        return
    names_some = schema.get("properties") or schema.get("required")
    says_the_end = any("$" in pattern or r"\z" in pattern for pattern in patterns)
    if (names_some and says_the_end) or not all(map(_is_plain, patterns)):
        rewriter.leave_out(schema, keyword)
        schema.pop("additionalProperties", None)  # is for names that match none of the patterns


def _is_plain(pattern: Any) -> bool:
    return isinstance(pattern, str) and without_look_around(pattern) == ([pattern], True)


def _change_one_of(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    """Turn `oneOf` into `anyOf`, which means the same where no two of the options fit one value."""
    options = schema[keyword]
    if not isinstance(options, list) or not options or "anyOf" in schema:
        return
    if not rewriter.are_disjoint(options):
        rewriter.note(keyword)
    schema["anyOf"] = schema.pop(keyword)


def _change_not(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    if schema[keyword] in ({}, True):
        schema["enum"] = []  # no value fits
        del schema[keyword]
    else:
        rewriter.leave_out(schema, keyword)


def _change_unique_items(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    if schema[keyword] is False:
        del schema[keyword]
    else:
        rewriter.leave_out(schema, keyword)


def _change_bound(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    value = schema[keyword]
    if not isinstance(value, int | float) or abs(value) < LARGEST:
        return
    if abs(value) >= sys.float_info.max and (value > 0) == keyword.endswith("aximum"):
        del schema[keyword]  # all numbers are within it
    else:
        rewriter.leave_out(schema, keyword)


def _change_property_count(rewriter: _Rewriter, schema: Schema, keyword: str) -> None:
    """Leave out a count of properties where some of these are optional."""
    properties, required = schema.get("properties"), _texts(schema.get("required"))
    if isinstance(properties, Mapping) and not properties.keys() <= set(required):
        rewriter.leave_out(schema, keyword)


CHANGES: dict[str, Callable[[_Rewriter, Schema, str], None]] = {
    "format": _change_format,
    "pattern": _change_pattern,
    "propertyNames": _change_property_names,
    "patternProperties": _change_pattern_properties,
    "oneOf": _change_one_of,
    "not": _change_not,
    "uniqueItems": _change_unique_items,
    "minProperties": _change_property_count,
    "maxProperties": _change_property_count,
    **dict.fromkeys(BOUNDS, _change_bound),
    **dict.fromkeys(UNKNOWN, _Rewriter.leave_out),
}
