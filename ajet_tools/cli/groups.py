"""Options that several commands share, as one parameter: a dataclass whose fields are the options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["spelt_out"]


def spelt_out(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass in its signature replaced by that dataclass's fields.

    Typer makes an option of every field, and the command gets them as one object. No two may have one name.
    """
    hints = inspect.get_annotations(command, eval_str=True)  # get_type_hints wraps defaults of None on Python 3.10
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            groups[parameter.name] = hint
            parameters += _parameters(hint)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def called(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    del called.__wrapped__  # type: ignore[attr-defined]  # or the signature is looked for behind it
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = inspect.get_annotations(group, eval_str=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
