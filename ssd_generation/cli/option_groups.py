"""Options in groups: a command takes dataclasses, and Typer sees each of their fields as a separate parameter.

Typer reads the signature of a function and has no groups. `with_option_groups` gives it a flat one:

    @dataclass(frozen=True)
    class Sampling:
        panel: ClassVar[str] = "How to decode"  # the heading in --help

        temperature: Annotated[float | None, typer.Option(metavar="T", help="…")] = None
        seed: Annotated[int, typer.Option(min=0, help="…")] = 0

    @with_option_groups
    def generate(prompt: PromptArgument, sampling: Sampling, as_json: JsonOption = False) -> None: ...

A field is declared like a parameter of a Typer command, with its default; a field without a default is required.
Groups may inherit from one another. cyclopts and tyro accept dataclasses directly. But cyclopts 5 needs Python 3.11,
and tyro prints its errors in several lines and exits: this one function costs less than either.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

__all__ = ["with_option_groups"]

Result = TypeVar("Result")


def with_option_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """Replace a command's dataclass parameters by their fields, for `typer.Typer.command`.

    The arguments of a call are collected into the dataclasses, which are passed to the command.

    Raises:
        ValueError: two parameters or fields have the same name.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    # Not by `get_type_hints`: Python 3.10's wraps the `Annotated` of a parameter whose default is None in `Optional`,
    # and Typer then takes an argument for an option.
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found = list(_field_parameters(kind))
            groups[name] = kind, [field.name for field in found]
            parameters += found
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def flat(**values: Any) -> Result:
        filled = {name: kind(**{field: values.pop(field) for field in of}) for name, (kind, of) in groups.items()}
        return command(**values, **filled)

    # Typer must read this signature, not that of the wrapped command.
    del flat.__wrapped__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _field_parameters(group: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield a group's fields as parameters; options that name no other heading get the group's."""
    hints = get_type_hints(group, include_extras=True)
    panel = getattr(group, "panel", None)
    for field in dataclasses.fields(group):
        annotation = hints[field.name]
        if get_origin(annotation) is Annotated:
            kind, *notes = get_args(annotation)
            parts: Any = (kind, *(_under(panel, note) for note in notes))
            annotation = Annotated[parts]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _under(panel: str | None, note: Any) -> Any:
    if not isinstance(note, OptionInfo) or note.rich_help_panel is not None:
        return note
    note = copy.copy(note)
    note.rich_help_panel = panel
    return note
