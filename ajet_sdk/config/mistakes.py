"""Converts validation errors of configs to messages with key, value, file and line, and the nearest
existing key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from pydantic import ValidationError

from ajet_sdk.config.source import Source


def explain(
    error: ValidationError, source: Source, known: Sequence[str], default: Callable[[str], object]
) -> list[str]:
    """Return a line per error: the key, the expected and the actual value, and its location.

    `known` are all keys, and `default` returns the default of a key.
    """
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        steps = [
            step
            for step in item["loc"]
            if isinstance(step, str) and step not in _BRANCHES and "[" not in step
        ]
        if item["type"] == "extra_forbidden":
            path = ".".join(steps)
            lines.setdefault(path, _unknown_key(steps, source, known))
            continue
        context = item.get("ctx", {})
        ours = item["type"] == "ajet"
        path = ".".join([*steps, context["key"]] if ours else _places(item["loc"]))
        if ours:
            demand = context["message"]
        else:
            demand = f"{_demand(item['type'], item['msg'], context, item['input'])} {{got}}"
        lines.setdefault(
            path, f"{path or 'ajet'} {demand.replace('{got}', _got(path, source, default))}"
        )
    return list(lines.values())


def _places(loc: Sequence[str | int]) -> list[str]:
    """The steps to a value, with indices only for lists of sections: a list of numbers is one
    value."""
    steps = [
        step for step in loc if isinstance(step, int) or (step not in _BRANCHES and "[" not in step)
    ]
    return [
        str(step)
        for number, step in enumerate(steps)
        if isinstance(step, str) or any(isinstance(later, str) for later in steps[number + 1 :])
    ]


_BRANCHES = (
    "str",
    "int",
    "float",
    "bool",
)  # steps that pydantic adds to the location of an error in a union


def _got(path: str, source: Source, default: Callable[[str], object]) -> str:
    value: object = source.document.get("ajet")
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdigit():
            value = value[int(step)]
        else:
            section = source.origin(f"ajet.{path}")
            return f"(by default {default(path)!r}" + (
                f"; its section is {section})" if section else ")"
            )
    where = source.origin(f"ajet.{path}")
    if where:
        return f"(got {value!r:.200}, {where})"
    return f"(got {value!r:.200})"


_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def _demand(kind: str, message: str, context: Mapping[str, object], value: object) -> str:
    """The expected value, from the type of pydantic's error."""
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"must be {words} {context[name]:g}"
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        near = difflib.get_close_matches(str(value), expected.split(", "), n=1, cutoff=0.6)
        return f"must be one of {expected}" + (f"; did you mean {near[0]}?" if near else "")
    for start, words in _KINDS.items():
        if kind.startswith(start):
            return f"must be {words}"
    return f"is invalid: {message[0].lower()}{message[1:]}"


_KINDS = {
    "finite": "a finite number",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a section with keys of its own",
    "too_short": "longer",
    "too_long": "shorter",
    "missing": "a list of two values",
}


def _unknown_key(steps: list[str], source: Source, known: Sequence[str]) -> str:
    """The message for an unknown key, with its location and the nearest key of the section, else of
    any."""
    path = ".".join(steps)
    last = steps[-1]
    parent = ".".join(steps[:-1])
    siblings = [p for p in known if p.rpartition(".")[0] == parent]
    near = _closest(last, siblings, 0.7) or [p for p in known if p.rpartition(".")[2] == last]
    near = near or _closest(last, siblings, 0.5) or _closest(last, known, 0.6)
    if near:
        hint = f"; did you mean {near[0]}?"
    else:
        hint = f"; {parent or 'ajet'} has {', '.join(p.rpartition('.')[2] for p in siblings)}"
    where = source.origin(f"ajet.{path}")
    return f"{path} is not a known key" + (f" ({where})" if where else "") + hint


def _closest(last: str, paths: Sequence[str], cutoff: float) -> list[str]:
    """The paths whose last step is most similar to `last`."""
    names = difflib.get_close_matches(
        last, [p.rpartition(".")[2] for p in paths], n=1, cutoff=cutoff
    )
    return [p for p in paths if names and p.rpartition(".")[2] == names[0]]
