"""Extracts rows from a model's reply: JSON as requested, in a fence, within prose, or truncated."""

from __future__ import annotations

import json
import re

_THOUGHT_END = "</think>"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_MISREAD = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f]"
    r"|\t(?=(?:imes|ext|heta|au|frac|ilde|riangle|op)\b)"
    r"|\n(?=(?:abla|eq|otin|eg|mid)\b)"
    r"|\r(?=(?:ight|ho|angle|ceil|floor)\b)"
)
"""What is left of `\\frac`, `\\times` or `\\neq` if a writer of JSON does not double the backslash."""
_SPACE = re.compile(r"[\s,]*")
_INNER_LIST = re.compile(r'^\{\s*"\w+"\s*:\s*(\[)', re.MULTILINE)
_LISTED = ("tasks", "rows", "items", "data", "examples")


def rows_in(text: str) -> tuple[list[object], str | None]:
    """Returns the rows, and the problem: `not JSON` or `incomplete JSON` with its position, or
    None.

    Complete rows before a truncation are kept. Text up to `</think>` is skipped, unless it is
    inside a row.
    """
    # `\\(` and `\\sqrt` are no escapes of JSON, but writers of formulas leave them single
    text = _ESCAPE.sub(lambda match: match[0] if match[1] else r"\\", text)
    rows, problem, end = _read(text)
    while (thought := text.find(_THOUGHT_END, end)) >= 0:
        text = text[thought + len(_THOUGHT_END) :]
        rows, problem, end = _read(text)
    return rows, problem


def misread_escape(text: str) -> str | None:
    """Returns the place where an escape of JSON took the beginning of a LaTeX command, if any."""
    match = _MISREAD.search(text)
    if match is None:
        return None
    return text[max(0, match.start() - 10) : match.end() + 10]


def _read(text: str) -> tuple[list[object], str | None, int]:
    """Returns the rows, the problem, and the end of the parsed text."""
    start = _first(text)
    if start is None:
        shown_text = " ".join(text.split())
        return (
            [],
            f"not JSON: {shown_text[:120]!r}" if shown_text else "not JSON: the reply is empty",
            0,
        )
    listed = text[start] == "["
    place = start + 1 if listed else start
    rows: list[object] = []
    while True:
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # matches the empty string too
        if place >= len(text):
            return rows if listed else _unwrap(rows), _half(rows) if listed else None, place
        if (
            (text[place] == "]") if listed else (text[place] not in "{[")
        ):  # the end, or prose after the objects
            return _unwrap(rows), None, place
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            inner = None if listed or rows else _INNER_LIST.search(text, start)
            if inner is None:
                return rows, _half(rows), place
            rows, problem, end = _read(text[inner.start(1) :])
            return rows, problem, end + inner.start(1)
        rows.append(value)


def _first(text: str) -> int | None:
    """Returns the position of the first bracket that a JSON value follows."""
    for match in re.finditer(r"[\[{]", text):
        after = text[match.end() : match.end() + 40].lstrip()
        if not after or after[0] in ('"{}' if match.group() == "{" else "{]"):
            return match.start()
    return None


def _half(rows: list[object]) -> str:
    return f"incomplete JSON: the reply ends, or breaks, in row {len(rows) + 1}"


def _unwrap(rows: list[object]) -> list[object]:
    """Returns the list in `{"tasks": [...]}`."""
    if len(rows) == 1 and isinstance(rows[0], dict):
        for name in _LISTED:
            if isinstance(rows[0].get(name), list) and len(rows[0]) == 1:
                return list(rows[0][name])
    if len(rows) == 1 and isinstance(rows[0], list):
        return list(rows[0])
    return rows
