"""Options that are fields of dataclasses: declared once, in the dataclass that they fill.

A field of a command's dataclass becomes an option of its name, with its type and default, and its
attribute docstring as help. `metadata` of the field may say more: `choices`, `metavar`, `min`,
`max`, `help` in place of the docstring, `option`: other names, or False for none, and `argument`:
True for what is given without a name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import lru_cache, wraps
from inspect import Parameter, Signature, cleandoc, getsource, signature
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from quickbeam.errors import InvalidInput
from quickbeam.sizes import parse_bytes


def biases(given: list[str]) -> dict[int, float]:
    """Return what `SamplingParams` takes for `--logit-bias`, given as ID=VALUE."""
    read: dict[int, float] = {}
    for text in given:
        token, equals, value = text.partition("=")
        try:
            if not equals or int(token) in read:
                raise ValueError
            read[int(token)] = float(value)
        except ValueError:
            raise InvalidInput(
                f"--logit-bias {text!r}: must be ID=VALUE, as in 42=-5, each token once"
            ) from None
    return read


def split(given: str) -> list[str]:
    """Return the parts of a comma-separated text."""
    return [word.strip() for word in given.split(",") if word.strip()]


_hints = lru_cache(get_type_hints)  # which compiles every annotation


class Words(NamedTuple):
    """How the command line writes a field: the option's type, how it is read, and how written."""

    kind: Any
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


# fields that the command line writes in another way than Python
WORDS = {
    "logit_bias": Words(
        list[str], biases, lambda given: [f"{token}={value:g}" for token, value in given.items()]
    ),
    "languages": Words(str, split, ",".join),
    "max_body_bytes": Words(str, parse_bytes, lambda size: f"{size / 1e6:g}MB"),
}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` for typer, with options in place of its parameters that are dataclasses."""
    hints = get_type_hints(function, include_extras=True)
    parameters, kinds = list[Parameter](), dict[str, tuple[type, list[str]]]()
    for parameter in signature(function).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        taken = [field for field in fields(kind) if field.metadata.get("option") is not False]
        kinds[parameter.name] = kind, [field.name for field in taken]
        parameters += [_option(kind, field, parameter.default) for field in taken]

    @wraps(function)
    def run(**values: Any) -> None:
        for name, (kind, taken) in kinds.items():
            values[name] = kind(**{field: _read(field, values.pop(field)) for field in taken})
        function(**values)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _option(owner: type, field: Field[Any], given: Any) -> Parameter:
    """Return the parameter that typer makes an option from. `given`: an instance with defaults."""
    kind: Any = _hints(owner)[field.name]
    more, default = dict(field.metadata), _default(field, given)
    text = more.pop("help", None) or _docs(owner).get(field.name, "")
    name, *others = (more.pop("option", "") or f"--{field.name.replace('_', '-')}").split()
    if field.name in WORDS:
        kind, default = WORDS[field.name].kind, WORDS[field.name].write(default)
    elif get_origin(kind) in (Sequence, tuple):
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
        name = name.removesuffix("s")
    elif default is Parameter.empty and type(None) in get_args(kind):
        default = None
    if isinstance(default, list):
        text += " May be repeated."
    if choices := more.pop("choices", None):
        words: Any = Enum("Words", {word: word for word in choices}, type=str)  # type: ignore[misc]
        kind = words | None if default is None else words
        default = None if default is None else words(default)
    if kind in (bool, bool | None) and default is not False:
        name += f"/--no-{name[2:]}"
    argument = more.pop("argument", False)
    what: Any = typer.Option(name, *others, help=text, **more)
    if argument:
        what = typer.Argument(help=text, **more)
    return Parameter(
        field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, what]
    )


def _default(field: Field[Any], given: Any) -> Any:
    if given is not Parameter.empty:
        return getattr(given, field.name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


def _read(name: str, value: Any) -> Any:
    if name in WORDS:
        return WORDS[name].read(value)
    if isinstance(value, list):
        return tuple(value)
    return value.value if isinstance(value, Enum) else value


@lru_cache
def _docs(kind: type) -> dict[str, str]:
    """Return the attribute docstrings of a dataclass. Without its source, there are none."""
    docs = _docs(kind.__base__) if kind.__base__ not in (None, object) else {}
    try:
        (owner,) = ast.parse(dedent(getsource(kind))).body
    except (OSError, TypeError):
        return docs
    assert isinstance(owner, ast.ClassDef)
    return docs | {
        field.target.id: cleandoc(text.value.value)
        for field, text in pairwise(owner.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def changed(options: Any, but: Sequence[str] = ()) -> list[str]:
    """Return the options of a dataclass that differ from their defaults, `but` some."""
    plain, now = vars(type(options)()), vars(options)
    names = [name for name in now if name not in but and now[name] != plain[name]]
    return [f"--{name.replace('_', '-')}" for name in names]


def numbers(option: str, text: str, most: int) -> list[int]:
    """Return comma-separated whole numbers from 1 to `most`, each once. Raises `InvalidInput`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= most for part in parts):
        raise InvalidInput(f"{option} {text!r}: must be numbers from 1 to {most}, comma-separated")
    return list(dict.fromkeys(map(int, parts)))
