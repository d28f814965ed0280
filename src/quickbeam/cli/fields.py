"""Options that are fields of dataclasses: declared once, in the dataclass that they fill.

A field of a command's dataclass becomes an option of its name, with its type and default, and its
attribute docstring as help. `metadata` of the field may say more: `choices`, `metavar`, `min`,
`max`, `help` in place of the docstring, `option`: other names, or False for none, `argument`: True
for what is given without a name, and `common`: True for an option that many people use. A command's
dataclass may have `HELP`, texts in place of those of its bases.

The help of a command shows common options first, the others of each dataclass together below the
first words of its docstring. Errors about a field are in the words of the command line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache, wraps
from inspect import Parameter, Signature, cleandoc, getsource, signature
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from quickbeam.errors import InvalidInput

ARGUMENTS, COMMON = "Arguments", "Options"  # the first headings of a command's help
# what stands for a value in help, by its type
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_hints = lru_cache(get_type_hints)  # which compiles every annotation


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` for typer, with options in place of its parameters that are dataclasses."""
    hints = get_type_hints(function, include_extras=True)
    parameters = list[Parameter]()
    groups = dict[str, type]()  # the dataclass of each parameter that is one
    names = dict[str, str]()
    for parameter in signature(function).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        groups[parameter.name] = kind
        parameters += [_option(kind, field, parameter.default) for field in _taken(kind)]
        names |= option_names(kind)

    @wraps(function)
    def run(**values: Any) -> None:
        try:
            for name, kind in groups.items():
                fields_of_group = dict[str, Any]()
                for field in _taken(kind):
                    value = values.pop(field.name)
                    fields_of_group[field.name] = tuple(value) if isinstance(value, list) else value
                values[name] = kind(**fields_of_group)
            function(**values)
        except InvalidInput as error:
            error.args = (in_options(str(error), names),)
            raise

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def in_options(message: str, names: Mapping[str, str]) -> str:
    """Return an error's message with `--max-tokens 0` in place of `max_tokens=0`.

    `names`: the option of each field.
    """

    def option(field: re.Match[str]) -> str:
        return f"{names[field[1]]} " if field[1] in names else field[0]

    return re.sub(r"\b(\w+)=(?=\S)", option, message)


def option_names(kind: type) -> dict[str, str]:
    """Return the option of each field of a dataclass, such as `--max-tokens` of `max_tokens`."""
    return {field.name: _names(kind, field)[0] for field in _taken(kind)}


def _taken(kind: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass that have an option."""
    return [field for field in fields(kind) if field.metadata.get("option") is not False]


def _names(owner: type, field: Field[Any]) -> list[str]:
    """Return the names of an option, such as `--verbose` and `-v`.

    An option that may be repeated has the singular of its field's name.
    """
    if option_text := field.metadata.get("option"):
        return str(option_text).split()
    name = f"--{field.name.replace('_', '-')}"
    return [name.removesuffix("s") if _is_list(_hints(owner)[field.name]) else name]


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (Sequence, tuple)


def _heading(owner: type) -> str:
    """Return the docstring of a dataclass up to the first full stop or colon, in one line."""
    return " ".join(re.split(r"[.:]", owner.__doc__ or "")[0].split())


def _declaring(owner: type, name: str) -> type:
    """Return the class, of `owner` and its bases, that first declared a field."""
    declaring = [base for base in owner.__mro__ if name in vars(base).get("__annotations__", {})]
    return declaring[-1]


def _option(owner: type, field: Field[Any], defaults: Any) -> Parameter:
    """Return the parameter that typer makes an option from.

    `defaults`: an instance of `owner`, or none.
    """
    kind: Any = _hints(owner)[field.name]
    default = getattr(defaults, field.name, field.default)
    for_typer = dict(field.metadata)
    for_typer.pop("option", None)
    for_typer.pop("rule", None)
    is_argument = for_typer.pop("argument", False)
    heading = _heading(_declaring(owner, field.name))
    if for_typer.pop("common", False):
        heading = COMMON
    help_text: str = for_typer.pop("help", None) or _docs(owner).get(field.name, "")
    help_text = getattr(owner, "HELP", {}).get(field.name, help_text)
    name, *short_names = _names(owner, field)

    # what typer converts the text of the command line to
    if default is MISSING:
        default = None if type(None) in get_args(kind) else Parameter.empty
    elif _is_list(kind):
        item, *_ = get_args(kind)
        kind = list[item]  # type: ignore[valid-type]
        default = list(default)
        help_text += " May be repeated."
    if len({*get_args(kind)} - {type(None)}) > 1 and not _is_list(kind):
        # of several types in Python, and text on the command line
        kind = str | None if default is None else str
    choices = for_typer.pop("choices", None)
    if choices:
        kind = Literal[choices] | None if default is None else Literal[choices]
    if kind in (bool, bool | None) and default is not False:
        name += f"/--no-{name[2:]}"
    for candidate in (kind, *get_args(kind)):
        if candidate in METAVARS:
            for_typer.setdefault("metavar", METAVARS[candidate])
            break

    if is_argument:
        argument: Any = typer.Argument(help=help_text, **for_typer)
    else:
        argument = typer.Option(
            name, *short_names, help=help_text, rich_help_panel=heading, **for_typer
        )
    return Parameter(
        field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, argument]
    )


@lru_cache
def _docs(kind: type) -> dict[str, str]:
    """Return the attribute docstrings of a dataclass. Without its source, there are none."""
    docs = dict[str, str]()
    for base in reversed(kind.__bases__):
        docs |= _docs(base) if base is not object else {}
    try:
        (owner,) = ast.parse(dedent(getsource(kind))).body
    except (OSError, TypeError):
        return docs
    assert isinstance(owner, ast.ClassDef)
    for field, text in pairwise(owner.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            continue
        if isinstance(text.value.value, str):
            docs[field.target.id] = cleandoc(text.value.value)
    return docs


class Command(TyperCommand):
    """A command whose help shows its options in groups."""

    def format_options(self, context: Any, formatter: Any) -> None:
        write_options(self, context, formatter)


class Group(TyperGroup):
    """A command with commands of its own, whose help shows its options in groups."""

    def format_options(self, context: Any, formatter: Any) -> None:
        write_options(self, context, formatter)
        self.format_commands(context, formatter)


def write_options(command: TyperCommand | TyperGroup, context: Any, formatter: Any) -> None:
    """Write a command's arguments, its common options, then the others under their headings."""
    groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], COMMON: []}
    for parameter in command.get_params(context):
        heading = getattr(parameter, "rich_help_panel", None) or COMMON
        if parameter.param_type_name == "argument":
            heading = ARGUMENTS
        record = parameter.get_help_record(context)
        if record is not None:
            groups.setdefault(heading, []).append(record)
    for heading, records in groups.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)
