"""The commands that train take the options of one class, with its help, names and defaults."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from bssearch.cli import run, study
from bssearch.cli.arguments import launched, typed
from bssearch.commands.launch import HERE, OPTIONS, Launch
from bssearch.registry import Option


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (run.run, {"db", "data_dir", "allow_changed_workload", "allow_busy"}),
        (study.confirm, {"db", "workload", "data_dir", "allow_busy"}),
        (study.audit, {"db", "workload", "data_dir", "allow_busy"}),
    ],
)
def test_a_command_has_the_help_and_the_default_of_the_class(command: Any, names: set[str]) -> None:
    single = typer.Typer(add_completion=False)
    single.command()(command)
    made: Any = typer.main.get_command(single)
    found = {one.name: one for one in made.params}
    assert found.keys() & OPTIONS.keys() == names
    for name in names:
        assert (found[name].help, found[name].envvar) == (OPTIONS[name].help, OPTIONS[name].variable)
        assert found[name].opts[0] == f"--{name.replace('_', '-')}"


def test_what_is_given_comes_to_the_command_as_one_launch() -> None:
    got: list[Launch] = []

    @launched("db", "allow_busy")
    def command(launch: Launch, form: str = "table") -> None:
        got.append(launch)

    command(db="sqlite://", allow_busy=True, form="json")
    command(db=None, allow_busy=False, form="json")
    assert got == [Launch(db="sqlite://", allow_busy=True), HERE]


def test_the_choices_of_an_option_stand_in_its_help() -> None:
    assert typed(Option("Which.", choices=("a", "b"))).help == "Which. (a, b)"
