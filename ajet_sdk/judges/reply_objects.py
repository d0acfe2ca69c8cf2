"""The one JSON object that a judge's reply states, and never one that it quotes."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Any

_BROKEN = re.compile(r"\{\s*\"")
_TAGGED = re.compile(
    r"<(task|query|question|answer|response|output|reference|rubric|example|quote)\b[^>]*>.*?</\1>", re.DOTALL
)
_FENCE = re.compile(r"```\w*|~~~\w*")
_ESCAPED = re.compile(r"\\(?:u00|x)([0-9a-fA-F]{2})")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff]")
_MARKS = tuple("\"'`“”‘’«»")


def object_in(reply: str, fields: Collection[str] = (), quoted: Sequence[str] = ()) -> dict[str, Any]:
    """The object that a reply consists of or states, whatever prose or fence is around it.

    Where a text of `quoted` names a field, the reply could quote it, and only an object alone counts, with no more than
    thoughts and a fence around it. Whether one counts never depends on its values: a text that names all low scores
    would have low verdicts refused. What stands in a block quote, in quotation marks or between tags of the question
    never counts. Raises ValueError where there is no object with one of `fields`, where two differ, and where one is
    broken off by what it quotes: it is not JSON, names a field twice, or a field stands outside.

    Args:
        reply: what the model said, its thoughts too.
        fields: an object that has none of them is passed over; empty: none is.
        quoted: what the reply may quote: what is judged, and its task.
    """
    text = _TAGGED.sub(lambda match: "_" * len(match[0]), _without_thoughts(reply, quoted))
    objects, stated, outside, end = 0, list[dict[str, object]](), list[str](), 0
    for start, behind, value in _objects(text):
        outside.append(text[end:start])
        objects, end = objects + 1, behind
        has_field = not fields or any(name in value for name in fields)
        if has_field and not _is_quoted(text, start) and value not in stated:
            stated.append(value)
    outside_text = "".join([*outside, text[end:]])
    if any(re.search(rf'"{re.escape(name)}"\s*:', outside_text) for name in fields):
        raise ValueError("the JSON object in it is incomplete: one of its fields is outside it")
    if len(stated) > 1:
        raise ValueError(f"{len(stated)} JSON objects in it differ")
    if not stated:
        raise ValueError("no JSON object in it is the verdict")
    if (objects > 1 or _FENCE.sub("", outside_text).strip()) and _names_any(quoted, fields):
        raise ValueError("the JSON object in it may be a quote: other words stand beside it")
    return stated[0]


def _without_thoughts(reply: str, quoted: Sequence[str]) -> str:
    """The reply behind its thoughts. A mark of their end that may be quoted ends nothing."""
    before, mark, behind = reply.partition("</think>")
    begun = before.lstrip().startswith("<think>")
    in_object = _FENCE.sub("", before).lstrip().startswith("{")
    alone = "</think>" not in behind and not in_object and not any("</think>" in text for text in quoted)
    return behind if mark and (begun or alone) else reply


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The outermost objects of a text, with their places. Raises ValueError for one that is not JSON."""
    decoder, position = json.JSONDecoder(strict=False, object_pairs_hook=_once), 0  # a model breaks lines in strings
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            if _BROKEN.match(text, start):
                raise ValueError("an object in it is not valid JSON") from None
            position = start + 1
            continue
        yield start, position, value


def _once(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object names a field twice")
    return fields


def _is_quoted(text: str, start: int) -> bool:
    before = text[:start].rstrip(" ")
    line = before.rpartition("\n")[2].lstrip()
    return line.startswith(">") or (before.endswith(_MARKS) and not before.endswith("```"))


def _names_any(texts: Sequence[str], fields: Collection[str]) -> bool:
    """Whether a text has the name of a field, also within a word, escaped, or in look-alike letters."""
    for text in texts:
        unescaped = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), html.unescape(text))
        shown = _INVISIBLE.sub("", unicodedata.normalize("NFKC", unescaped)).casefold()
        if any(name.casefold() in shown for name in fields):
            return True
    return False
