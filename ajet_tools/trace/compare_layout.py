"""Conversations in columns: message beside message, with what differs marked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ajet_tools.trace.align import Attempt, Divergence, Said, align
from ajet_tools.trace.decoding import shown
from ajet_tools.trace.token_layout import lay_out

__all__ = ["Cell", "Columns", "Kind", "columns_of"]

Kind = Literal["role", "same", "differs", "after", "left out"]
"""What a part of a line is: the role that speaks, text that the reference has too, the word at which both part, what
comes after it, a word of ours about text that is not shown."""

Cell = list[tuple[str, Kind]]
"""One line of one column."""

_WORDS = re.compile(r"\S{1,64}[^\S\n]*|[^\S\n]+|\n")
_WORD = re.compile(r"\s*\S{0,24}")
_ALIKE, _AFTER = 1500, 4000
"""Characters shown at each end of a text that both have, and of what comes after they part."""


@dataclass(frozen=True, eq=False)
class Columns:
    """What stands in each column, line by line."""

    lines: Sequence[Sequence[Cell]]
    places: Sequence[int]
    """The lines at which columns part from the reference, ascending."""
    messages: Sequence[int]
    """The line at which each message begins."""


def columns_of(shown_attempts: Sequence[Attempt], width: int) -> Columns:
    """Attempts beside each other in columns of `width` cells; the first is the reference of the others."""
    reference, others = shown_attempts[0], shown_attempts[1:]
    parted: list[Divergence | None] = [align(reference, other) for other in others]
    first = min((d for d in parted if d is not None), key=lambda d: (d.message, d.character), default=None)
    marks = [first, *parted]
    lines: list[list[Cell]] = []
    places: set[int] = set()
    messages = []
    for i in range(max((len(a.messages) for a in shown_attempts), default=0)):
        cells = [_message(a.messages, i, mark, width) for a, mark in zip(shown_attempts, marks, strict=True)]
        messages.append(len(lines))
        for j, mark in enumerate(marks[1:], 1):
            if mark is not None and mark.message == i:
                at = next((n for n, line in enumerate(cells[j]) if any(kind == "differs" for _, kind in line)), 0)
                places.add(len(lines) + at)
        height = max(map(len, cells)) + 1
        lines += [[cell[n] if n < len(cell) else [] for cell in cells] for n in range(height)]
    return Columns(lines, sorted(places), messages)


def _message(messages: Sequence[Said], i: int, mark: Divergence | None, width: int) -> list[Cell]:
    """The lines of one message in one column."""
    here = mark is not None and mark.message == i
    if i >= len(messages):
        return [[("(ends here)", "differs")]] if here else []
    said = messages[i]
    title = f"{said.role} ({said.agent})" if said.agent not in ("", "default") else said.role
    labels, kinds = [], list[Kind]()
    for text, kind in _parts(said.text, i, mark):
        for word in _WORDS.findall(shown(text).replace("\t", "    ")):
            labels.append(word)
            kinds.append(kind)
    lines: list[Cell] = [[(text, kinds[word]) for word, text, _ in line] for line in lay_out(labels, width).lines]
    head: Cell = [(shown(title)[:width], "role")]
    if here and not any(kind == "differs" for line in lines for _, kind in line):  # a line break, or another speaker
        head.append((" (differs)", "differs"))
    return [head, *lines]


def _parts(text: str, i: int, mark: Divergence | None) -> Iterator[tuple[str, Kind]]:
    """A message's text in parts, long ones without their middle or end."""
    if mark is None or i < mark.message:
        yield from _ends(text)
        return
    if i > mark.message:
        yield from _start(text)
        return
    yield from _ends(text[: mark.character])
    word = _WORD.match(text, mark.character)
    end = max(word.end() if word else 0, min(mark.character + 1, len(text)))
    if end > mark.character:
        yield text[mark.character : end], "differs"
    elif text or mark.character:
        yield "(ends here)", "differs"
    yield from _start(text[end:])


def _ends(text: str) -> Iterator[tuple[str, Kind]]:
    if len(text) <= 2 * _ALIKE + 200:
        yield text, "same"
        return
    yield text[:_ALIKE], "same"
    yield f"\n… {len(text) - 2 * _ALIKE:,} characters alike …\n", "left out"
    yield text[-_ALIKE:], "same"


def _start(text: str) -> Iterator[tuple[str, Kind]]:
    yield text[:_AFTER], "after"
    if len(text) > _AFTER:
        yield f"\n… {len(text) - _AFTER:,} more characters", "left out"
