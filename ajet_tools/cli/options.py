"""Options shared by several commands, JSON output, and options grouped in a dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, get_args

from typer import Exit, Option

from ajet_tools.cli.result import Result, print_result
from ajet_tools.cli.result import print_json as print_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


def pick(source: object, *names: str) -> dict[str, object]:
    return {name: getattr(source, name) for name in names}


def expand_options(command: Callable[..., Result | None]) -> Callable[..., None]:
    """Replaces each dataclass in a command's signature by the fields of the dataclass.

    Typer creates an option per field, and the command receives the dataclass. Field names must be
    unique. A command that returns a `Result` gets `--json`, and its result is printed.
    """
    hints = inspect.get_annotations(
        command, eval_str=True
    )  # get_type_hints wraps defaults of None on Python 3.10
    groups: dict[str, type[DataclassInstance]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            groups[parameter.name] = hint
            parameters += _parameters(hint)
        else:
            parameters.append(
                parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    returns_result = _is_result(hints.get("return"))
    if returns_result:
        as_json = inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson
        )
        parameters.append(as_json)

    @functools.wraps(command)
    def called(**values: object) -> None:
        as_json = False
        if returns_result:
            as_json = bool(values.pop("as_json"))
        grouped: dict[str, object] = {}
        for name, group in groups.items():
            fields = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            grouped[name] = group(**fields)
        result = command(**values, **grouped)
        if isinstance(result, Result):
            print_result(result, as_json=as_json)
            if result.failure is not None:
                raise result.failure
            if result.exit_code:
                raise Exit(result.exit_code)

    del called.__wrapped__  # type: ignore[attr-defined]  # else inspect would use its signature
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    docs = [base.__doc__ or "" for group in groups.values() for base in reversed(group.__mro__)]
    sections = ["".join(inspect.cleandoc(doc).partition("Args:\n")[1:]) for doc in docs]
    called.__doc__ = "\n\n".join([inspect.cleandoc(command.__doc__ or ""), *filter(None, sections)])
    return called


def _is_result(annotation: object) -> bool:
    """Whether a return annotation is a Result, a choice of them, or of them and None."""
    kinds = get_args(annotation) or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, Result) for kind in kinds)


def _parameters(group: type[DataclassInstance]) -> list[inspect.Parameter]:
    hints: dict[str, object] = {}
    for base in reversed(group.__mro__):
        hints |= inspect.get_annotations(base, eval_str=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
