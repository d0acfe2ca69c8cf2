"""Options shared by several commands, JSON output, and options grouped in a dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo, json_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
IncludeValidation = Annotated[
    bool,
    Option(
        "--include-validation", help="Also use validation tasks and tasks that nearly repeat one."
    ),
]


def pick(source: object, *names: str) -> dict[str, object]:
    return {name: getattr(source, name) for name in names}


@contextmanager
def explain_listen_errors(host: str, port: int) -> Iterator[None]:
    """Raises an OSError as a ConfigError that names the address."""
    try:
        yield
    except OSError as error:
        message = (
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        )
        raise ConfigError(message) from error


def print_json(value: object, *, indent: int | None = 2, err: bool = False) -> None:
    """Prints a value as JSON: dataclasses as objects (without fields of
    metadata `json: False`), NaN and infinities as null."""
    echo(json_line(_finite(value), indent=indent), err=err)


def print_result(
    result: object, lines: Iterable[str], *, as_json: bool, to_stderr: bool = False
) -> None:
    """Prints what a command that writes a file has done: as JSON, else as lines to stderr.

    With `to_stderr`, stdout is for the rows.
    """
    if as_json:
        print_json(result, indent=None if to_stderr else 2, err=to_stderr)
        return
    for line in lines:
        echo(line, err=True)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.metadata.get("json", True)]
        value = {field.name: getattr(value, field.name) for field in fields}
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each dataclass in a command's signature by the fields of the dataclass.

    Typer creates an option per field, and the command receives the dataclass. Field names must be
    unique.
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

    @functools.wraps(command)
    def called(**values: object) -> None:
        grouped = {
            name: group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
            for name, group in groups.items()
        }
        command(**values, **grouped)

    del called.__wrapped__  # type: ignore[attr-defined]  # else inspect would use its signature
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    docs = [base.__doc__ or "" for group in groups.values() for base in reversed(group.__mro__)]
    sections = ["".join(inspect.cleandoc(doc).partition("Args:\n")[1:]) for doc in docs]
    called.__doc__ = "\n\n".join([inspect.cleandoc(command.__doc__ or ""), *filter(None, sections)])
    return called


def _parameters(group: type[DataclassInstance]) -> list[inspect.Parameter]:
    hints = {
        k: v
        for base in reversed(group.__mro__)
        for k, v in inspect.get_annotations(base, eval_str=True).items()
    }
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
