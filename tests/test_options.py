"""An option is declared once: Python, the commands and the reference are made from its field."""

import inspect
from collections import Counter
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass

import pytest
import typer
from typer.testing import CliRunner

from cases import refuses
from quickbeam.cli import bench, generate, serve, train
from quickbeam.cli.fields import Command, command
from quickbeam.config import (
    COUNT,
    DrafterOptions,
    EngineOptions,
    InvalidInput,
    LLMOptions,
    ModelOptions,
    ReplicaOptions,
    ServerOptions,
    takes,
)
from test_docs import hooks

NEW = field(default=3, metadata={"rule": COUNT, "help": "Leaps of a beam."})
COMMANDS = (
    generate.generate,
    generate.chat,
    serve.serve,
    serve.batch,
    bench.bench,
    bench.throughput,
    train.train,
)


def app_of(kind, received):
    """A command whose options are the fields of `kind`."""
    app = typer.Typer()

    @app.command(cls=Command)
    @command
    def run(options: kind) -> None:
        received.append(options)

    return app


@pytest.mark.parametrize("kind", [LLMOptions, ServerOptions, ReplicaOptions])
def test_a_field_that_is_added_is_an_option_everywhere(kind):
    extended = make_dataclass(
        kind.__name__, [("leaps", int, NEW)], bases=(kind,), frozen=True, kw_only=True
    )

    class FromPython:
        @takes(extended)
        def __init__(self, options):
            self.leaps = options.leaps

    assert inspect.signature(FromPython).parameters["leaps"].default == 3
    assert FromPython(leaps=5).leaps == 5
    refuses("leaps=0: must be an integer of at least 1", FromPython, leaps=0)

    received = []
    app, runner = app_of(extended, received), CliRunner()
    assert runner.invoke(app, ["--leaps", "5"]).exit_code == 0 and received[0].leaps == 5
    refused = runner.invoke(app, ["--leaps", "0"]).exception
    assert isinstance(refused, InvalidInput)
    assert str(refused) == "--leaps 0: must be an integer of at least 1"
    reference = "\n".join(hooks().described(typer.main.get_command(app), "run"))
    assert "| `--leaps N` | Leaps of a beam. | `3` |" in reference


def declared_again(kind):
    """The fields of a dataclass that more than one of it and its bases declare."""
    names = Counter(name for base in kind.__mro__ for name in vars(base).get("__annotations__", {}))
    return {name for name, count in names.items() if count > 1} & {one.name for one in fields(kind)}


@pytest.mark.parametrize("function", COMMANDS, ids=lambda function: function.__name__)
def test_no_option_is_declared_twice(function):
    hints = inspect.get_annotations(inspect.unwrap(function), eval_str=True)
    kinds = [kind for kind in hints.values() if is_dataclass(kind)]
    assert kinds
    for kind in kinds:
        assert declared_again(kind) == set()


def test_groups_share_no_option_and_state_a_bound_once():
    groups = (ModelOptions, DrafterOptions, EngineOptions, ServerOptions, ReplicaOptions)
    names = Counter(option.name for group in groups for option in fields(group))
    assert names.most_common(1)[0][1] == 1
    for group in (*groups, LLMOptions):
        for option in fields(group):
            assert not option.metadata.keys() & {"min", "max"}, option.name  # the rule says it


def test_a_field_that_is_declared_twice_is_seen():
    @dataclass(frozen=True)
    class Again(ServerOptions):
        port: int = 80

    assert declared_again(Again) == {"port"}
