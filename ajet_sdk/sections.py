"""What the sections of the config are made of: a frozen model whose keys are described for users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

__all__ = ["Section", "key", "section", "wrong"]


def wrong(key: str, message: str) -> PydanticCustomError:
    """A value that is wrong beside another one; `key` is relative to the section that raises it.

    `{got}` in the message is replaced by the value and its place in the file.
    """
    return PydanticCustomError("ajet", "{key} {message}", {"key": key, "message": message})


class Section(BaseModel):
    """A frozen part of the config; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _strict_numbers(cls, data: Any) -> Any:
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            return data
        return {name: _no_bool(value, cls.model_fields.get(name)) for name, value in data.items()}


def _no_bool(value: Any, field: FieldInfo | None) -> Any:
    """`true` is no number: as text it is refused, where pydantic would make it 1."""
    numeric = field is not None and field.annotation in (int, float, int | None, float | None)
    return str(value) if isinstance(value, bool) and numeric else value


def key(default: Any, description: str, **limits: Any) -> Any:
    """A config key: its default, what it does, and the limits of its value."""
    return Field(default=default, description=description, **limits)


def section(of: type[Section], description: str) -> Any:
    """A nested section whose keys all have defaults."""
    return Field(default_factory=of, description=description)
