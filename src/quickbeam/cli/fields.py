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
from functools import lru_cache, wraps
from inspect import Parameter, Signature, cleandoc, getsource, signature
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

_hints = lru_cache(get_type_hints)  # which compiles every annotation


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
            given = {field: values.pop(field) for field in taken}
            lists = {field: tuple(v) for field, v in given.items() if isinstance(v, list)}
            values[name] = kind(**{**given, **lists})
        function(**values)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _option(owner: type, field: Field[Any], given: Any) -> Parameter:
    """Return the parameter that typer makes an option from. `given`: an instance with defaults."""
    kind: Any = _hints(owner)[field.name]
    more, default = dict(field.metadata), getattr(given, field.name, field.default)
    text = more.pop("help", None) or _docs(owner).get(field.name, "")
    name, *others = (more.pop("option", "") or f"--{field.name.replace('_', '-')}").split()
    if default is MISSING:
        default = None if type(None) in get_args(kind) else Parameter.empty
    elif get_origin(kind) in (Sequence, tuple):
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
        name = name.removesuffix("s")
        text += " May be repeated."
    if choices := more.pop("choices", None):
        kind = Literal[choices] | None if default is None else Literal[choices]
    if kind in (bool, bool | None) and default is not False:
        name += f"/--no-{name[2:]}"
    argument = more.pop("argument", False)
    what: Any = typer.Option(name, *others, help=text, **more)
    if argument:
        what = typer.Argument(help=text, **more)
    return Parameter(
        field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, what]
    )


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
