"""Reads arguments that a model wrote as text (Qwen3-Coder's and GLM's formats) by the types that
their tool declares.

A text may be a string or the JSON of something else: `90210` is a zip code or a number. As in vLLM
and SGLang, the declared types decide. A parameter that may be a string is one, unless the text is
the JSON of an object, array or null that is declared, too: these a template writes as JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence

from ajet_sdk.types import JsonView

_ALIASES = {
    "str": "string",
    "text": "string",
    "char": "string",
    "varchar": "string",
    "enum": "string",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "num": "number",
    "bool": "boolean",
    "arr": "array",
    "list": "array",
    "dict": "object",
    "none": "null",
}
"""Types that tools declare besides those of JSON Schema; vLLM's parsers accept them, too."""
_IMPLIED = {
    "pattern": "string",
    "minLength": "string",
    "maxLength": "string",
    "format": "string",
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minimum": "number",
    "maximum": "number",
    "multipleOf": "number",
}
"""Keywords of schemas without `type`, and the type to which they apply."""
_CONTAINERS = frozenset({"object", "array"})
_DEEPEST = 16
"""Nested references and alternatives to follow; schemas may refer to themselves."""


class ArgumentTypes:
    """The types of a tool's parameters."""

    def __init__(self, parameters: object) -> None:
        self._root: JsonView = parameters if isinstance(parameters, Mapping) else {}

    @staticmethod
    def of(name: str, tools: Sequence[JsonView]) -> ArgumentTypes:
        """Those of the tool of that name; without types if none has it."""
        for tool in tools:
            function = tool.get("function") or {}
            if function.get("name") == name:
                return ArgumentTypes(function.get("parameters"))
        return ArgumentTypes(None)

    def read(self, key: str, text: str) -> object:
        """The value of an argument that is written as `text`."""
        schemas = self._schemas_of(key)
        types = {kind for schema in schemas for kind in self._types(schema)}
        for value in (value for schema in schemas for value in self._constants(schema)):
            if text == value or (json_or_literal(text) == value and not isinstance(value, str)):
                return value
        if not types:
            # nothing is declared: a template writes objects and arrays as JSON, and anything else
            # as text
            parsed = json_or_literal(text)
            return parsed if isinstance(parsed, dict | list) else text
        if "string" in types:
            return _string_or(text, types)
        parsed = json_or_literal(text)
        if (
            isinstance(parsed, float)
            and parsed.is_integer()
            and "integer" in types
            and "number" not in types
        ):
            return int(parsed)
        return parsed if _is_one_of(parsed, types) else text

    def _schemas_of(self, key: str) -> list[JsonView]:
        """The declarations of a parameter, wherever the root has its properties."""
        found: list[JsonView] = []
        others: list[JsonView] = []
        for schema in self._alternatives(self._root, 0):
            properties = schema.get("properties")
            if isinstance(properties, Mapping):
                declared = properties.get(key)
            else:
                declared = None
            other = schema.get("additionalProperties")
            if isinstance(declared, Mapping):
                found.append(declared)
            elif isinstance(other, Mapping):
                others.append(other)
        return found or others

    def _alternatives(self, schema: object, depth: int) -> Iterator[JsonView]:
        """A schema, with those that it refers to or combines."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return
        yield schema
        if isinstance(schema.get("$ref"), str):
            yield from self._alternatives(self._target(schema["$ref"]), depth + 1)
        for name in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(name)
            for part in parts if isinstance(parts, list) else ():
                yield from self._alternatives(part, depth + 1)

    def _target(self, reference: str) -> object:
        """What a reference within the parameters refers to, such as `#/$defs/City`."""
        if not reference.startswith("#"):
            return None
        found: object = self._root
        for name in reference[1:].strip("/").split("/"):
            unescaped = name.replace("~1", "/").replace("~0", "~")
            if name and isinstance(found, Mapping):
                found = found.get(unescaped)
        return found

    def _types(self, schema: JsonView) -> Iterator[str]:
        for part in self._alternatives(schema, 0):
            kinds = part.get("type")
            listed = kinds if isinstance(kinds, list) else [kinds]
            named = [kind.strip().lower() for kind in listed if isinstance(kind, str)]
            if not named:
                named = [kind for keyword, kind in _IMPLIED.items() if keyword in part]
            for kind in named:
                yield _ALIASES.get(kind, kind)
            if part.get("nullable") is True:
                yield "null"

    def _constants(self, schema: JsonView) -> list[object]:
        """All values that the schema allows, if it lists them; empty if any part allows others."""
        values: list[object] = []
        combined = ("$ref", "anyOf", "oneOf", "allOf")
        for part in self._alternatives(schema, 0):
            if isinstance(part.get("enum"), list):
                values += part["enum"]
            elif "const" in part:
                values.append(part["const"])
            elif part.get("type") == "null":
                values.append(None)
            elif not any(name in part for name in combined):
                return []
            if part.get("nullable") is True:
                values.append(None)
        return values if any(value is not None for value in values) else []


def json_or_literal(text: str) -> object:
    """The value of a text in JSON or as a Python literal, else the text itself."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    if isinstance(value, dict | list | bool | int | float | None):
        return value
    return text


def _string_or(text: str, types: set[str]) -> object:
    """The text, or the object, array or null that it is the JSON of and that is declared besides
    `string`."""
    if "null" in types and text.strip() in ("null", "None"):  # Jinja writes None
        return None
    if not types & _CONTAINERS or not text.strip().startswith(("{", "[")):
        return text
    parsed = json_or_literal(text)
    return parsed if _is_one_of(parsed, types & _CONTAINERS) else text


def _is_one_of(value: object, types: set[str]) -> bool:
    kinds = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    # an unknown type, such as a library's own, allows everything
    return any(kinds.get(kind, True) for kind in types)
