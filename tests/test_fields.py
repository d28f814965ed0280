"""Options that are fields of dataclasses. `pytest tests/test_fields.py`"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import typer
from typer.testing import CliRunner

from quickbeam.cli.fields import command
from quickbeam.cli.loading import Loading
from quickbeam.params import SamplingParams
from quickbeam.serve.settings import ServeSettings


@dataclass(frozen=True)
class Tea:
    """How tea is made."""

    kind: str = field(default="green", metadata={"choices": ("green", "black")})
    """What leaves are taken."""
    spoons: Sequence[int] = ()
    """Sizes of the spoons."""
    milk: bool = False
    """Add milk."""
    warm: bool = True
    """Warm the pot."""
    minutes: float | None = field(default=None, metadata={"option": "--time", "min": 1})
    """How long."""
    hidden: int = field(default=7, metadata={"option": False})


def run(*arguments: str, default: Tea | None = None):
    """Run a command with these options. Returns the result and the dataclass it was given."""
    made: list[Tea] = []

    def brew(tea: Tea = default) -> None:  # type: ignore[assignment]
        made.append(tea)

    if default is None:

        def brew(tea: Tea) -> None:
            made.append(tea)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command(brew))
    return CliRunner().invoke(app, arguments), made


def test_options_fill_the_dataclass():
    assert run()[1] == [Tea()]
    given = "--kind black --spoon 1 --spoon 2 --milk --no-warm --time 2.5"
    result, made = run(*given.split())
    assert result.exit_code == 0, result.output
    assert made == [Tea("black", (1, 2), True, False, 2.5)]


def test_a_default_of_the_command_holds_where_nothing_is_given():
    default = Tea("black", minutes=3)
    assert run(default=default)[1] == [default]
    assert run("--kind", "green", default=default)[1] == [Tea("green", minutes=3)]


@pytest.mark.parametrize("given", [["--kind", "red"], ["--time", "0"], ["--hidden", "1"]])
def test_what_a_field_does_not_take_is_refused(given):
    result, made = run(*given)
    assert result.exit_code == 2 and not made


def test_docstrings_are_the_help():
    shown = " ".join(run("--help")[0].output.split())
    for text in ("What leaves are taken.", "Sizes of the spoons. May be repeated.", "--no-warm"):
        assert text in shown
    assert "hidden" not in shown


@pytest.mark.parametrize("kind", [SamplingParams, ServeSettings, Loading])
def test_every_option_says_what_it_is_for(kind):
    def show(options) -> None:
        pass

    show.__annotations__["options"] = kind
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command(show))
    for option in typer.main.get_command(app).params:
        assert option.name == "help" or option.name.startswith("install") or option.help, option
