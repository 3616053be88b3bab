"""Dataclasses as groups of options: the parameters Typer sees, and the values a command receives."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import typer

from ssd_generation.cli.option_groups import with_option_groups
from test_architecture import PACKAGE


@dataclass(frozen=True)
class Place:
    panel: ClassVar[str] = "Where"

    folder: Annotated[Path | None, typer.Option("--folder", "-o", help="Where it goes.")] = None
    name: Annotated[str, typer.Argument(help="Its name.")] = "demo"


@dataclass(frozen=True)
class OtherPlace(Place):
    name: Annotated[str, typer.Option(help="Its name, as an option.", rich_help_panel="Elsewhere")] = "other"
    tries: int = 1


@dataclass(frozen=True)
class Needed:
    task: Annotated[str, typer.Argument(help="What to do.")]


Runner = Callable[..., Any]


@pytest.fixture
def run() -> Runner:
    def run(command: Callable[..., Any], *arguments: str) -> Any:
        app = typer.Typer(add_completion=False)
        app.command()(command)
        return app(arguments, standalone_mode=False)

    return run


def test_fields_are_options_and_come_back_as_the_group(run: Runner) -> None:
    got: list[Any] = []

    @with_option_groups
    def command(place: Place, loud: bool = False) -> None:
        got.append((place, loud))

    run(command)
    run(command, "here", "-o", "there", "--loud")
    assert got == [(Place(), False), (Place(Path("there"), "here"), True)]


def test_a_parameter_that_may_be_none_stays_an_argument(run: Runner) -> None:
    # In Python 3.10 `typing.get_type_hints` wraps its type in Optional, in which Typer finds no argument.
    got: list[Any] = []

    @with_option_groups
    def command(prompt: Annotated[str | None, typer.Argument(help="What to ask.")] = None, *, place: Place) -> None:
        got.append((prompt, place))

    run(command)
    run(command, "why", "here")
    assert got == [(None, Place()), ("why", Place(name="here"))]
    assert inspect.signature(command).parameters["prompt"].annotation.__metadata__[0].help == "What to ask."


def test_a_group_may_build_on_another(run: Runner) -> None:
    got: list[Any] = []

    @with_option_groups
    def command(place: OtherPlace) -> None:
        got.append(place)

    run(command, "--name", "x", "--tries", "3", "--folder", "there")
    assert got == [OtherPlace(Path("there"), "x", 3)]


def test_options_stand_under_the_heading_of_their_group() -> None:
    @with_option_groups
    def command(place: OtherPlace, needed: Needed) -> None: ...

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["folder", "name", "tries", "task"]
    panels = {
        name: parameter.annotation.__metadata__[0].rich_help_panel
        for name, parameter in parameters.items()
        if name != "tries"
    }
    assert panels == {"folder": "Where", "name": "Elsewhere", "task": None}
    assert parameters["task"].default is inspect.Parameter.empty and parameters["tries"].default == 1
    # The field's own annotation is unchanged, since groups are shared.
    hints = inspect.get_annotations(Place, eval_str=True)
    assert hints["folder"].__metadata__[0].rich_help_panel is None


def test_a_field_without_a_default_is_required(run: Runner) -> None:
    got: list[Any] = []

    @with_option_groups
    def command(needed: Needed, place: OtherPlace) -> None:
        got.append((needed, place))

    run(command, "sum")
    assert got == [(Needed("sum"), OtherPlace())]
    with pytest.raises(Exception, match=r"Missing (argument|parameter)"):
        run(command)


def test_two_fields_of_one_name_are_refused() -> None:
    def command(place: Place, other: OtherPlace) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name"):
        with_option_groups(command)


def test_no_function_of_the_command_line_takes_more_than_eight() -> None:
    wide = [
        f"{path.name}:{node.lineno} {node.name}"
        for path in sorted((PACKAGE / "cli").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and len(node.args.args + node.args.kwonlyargs) > 8
    ]
    assert wide == []
