"""Extracts rows from a model's reply: JSON as requested, in a fence, within prose, or truncated."""

from __future__ import annotations

import json
import re

_THOUGHT_END = "</think>"
_DECODER = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"[\s,]*")
_INNER_LIST = re.compile(r'^\{\s*"\w+"\s*:\s*(\[)', re.MULTILINE)
_LISTED = ("tasks", "rows", "items", "data", "examples")


def rows_in(text: str) -> tuple[list[object], str | None]:
    """Returns the rows, and the problem: `not JSON` or `incomplete JSON` with its position, or
    None.

    Complete rows before a truncation are kept. Text up to `</think>` is skipped, unless it is
    inside a row.
    """
    rows, problem, end = _read(text)
    while (thought := text.find(_THOUGHT_END, end)) >= 0:
        text = text[thought + len(_THOUGHT_END) :]
        rows, problem, end = _read(text)
    return rows, problem


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
    at = start + 1 if listed else start
    rows: list[object] = []
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches the empty string too
        if at >= len(text):
            return rows if listed else _unwrap(rows), _half(rows) if listed else None, at
        if (
            (text[at] == "]") if listed else (text[at] not in "{[")
        ):  # the end, or prose after the objects
            return _unwrap(rows), None, at
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            inner = None if listed or rows else _INNER_LIST.search(text, start)
            if inner is None:
                return rows, _half(rows), at
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
