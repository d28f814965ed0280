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


MADE = list[Tea]()


def brew(tea: Tea) -> None:
    MADE.append(tea)


def brew_black(tea: Tea = Tea("black", minutes=3)) -> None:
    MADE.append(tea)


def app(function):
    made = typer.Typer(rich_markup_mode=None)
    made.command()(command(function))
    return made


@pytest.mark.parametrize(
    ("how", "line", "tea"),
    [
        (brew, "", Tea()),
        (
            brew,
            "--kind black --spoon 1 --spoon 2 --milk --no-warm --time 2.5",
            Tea("black", (1, 2), True, False, 2.5),
        ),
        (brew_black, "", Tea("black", minutes=3)),
        (brew_black, "--kind green", Tea("green", minutes=3)),
        (brew, "--kind red", None),
        (brew, "--time 0", None),
        (brew, "--hidden 1", None),
    ],
)
def test_options_fill_the_dataclass_or_are_refused(how, line, tea):
    MADE.clear()
    assert CliRunner().invoke(app(how), line.split()).exit_code == (0 if tea else 2)
    assert ([tea] if tea else []) == MADE


def test_docstrings_are_the_help(monkeypatch):
    shown = " ".join(CliRunner().invoke(app(brew), ["--help"]).output.split())
    for text in ("What leaves are taken.", "Sizes of the spoons. May be repeated.", "--no-warm"):
        assert text in shown
    assert "hidden" not in shown
    for kind in (SamplingParams, ServeSettings, Loading):
        monkeypatch.setitem(brew.__annotations__, "tea", kind)
        for option in typer.main.get_command(app(brew)).params:
            own = option.name == "help" or option.name.startswith("install")
            assert own or option.help, option
