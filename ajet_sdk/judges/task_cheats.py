"""Cheats made from the user's own tasks, for `attack`: fields repeated, answers of other tasks,
hollow answers.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ajet_sdk.agent.decorators import GROUP_NAMES, JUDGE_NAMES, spec_of
from ajet_sdk.judges.cheats import Cheat
from ajet_sdk.judges.code import REFERENCES, TESTS
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.tasks.row_names import ANSWERS, QUERY_COLUMNS, REPLIES
from ajet_sdk.types import Task

_MOST_SEEN = 200
"""Answers of other tasks in one cheat."""


def reference_names(judges: Sequence[object], task: Task) -> list[str]:
    """Keys of the metadata that are the reference: those that judges take by name, else a usual
    name."""
    known = JUDGE_NAMES | GROUP_NAMES | set(QUERY_COLUMNS)
    named: list[str] = []
    for judge in judges:
        if isinstance(judge, LlmJudge):
            named.append(judge.reference_key)
        elif inspect.isfunction(judge) or hasattr(judge, "__wrapped__"):
            named += spec_of(judge, "judge").parameters
    taken = [name for name in dict.fromkeys(named) if name in task.metadata and name not in known]
    return taken or [name for name in (*ANSWERS, *REPLIES) if name in task.metadata][:1]


def cheats_of(task: Task, references: Collection[str], answers: Sequence[object]) -> list[Cheat]:
    """Outputs made from a task and the answers of all tasks; none of them solves the task.

    `references`: keys of the task's reference answer, the first of which is the answer.
    """
    answer = next((task.metadata[name] for name in references), None)
    cheats = [*_echoes(task, references, answer), *_other_answers(answer, answers)]
    if answer is not None:
        cheats += _hollow(answer)
    seen: set[str] = set()
    different = []
    for cheat in cheats:
        content = json.dumps(cheat.content, sort_keys=True, default=str)
        if content not in seen and not _is_answer(cheat.content, answer):
            seen.add(content)
            different.append(cheat)
    return different


def _is_answer(content: object, answer: object) -> bool:
    return content == answer or (
        isinstance(content, str) and content.strip() == text_of_value(answer).strip()
    )


def text_of_value(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _echoes(task: Task, references: Collection[str], answer: object) -> Iterator[Cheat]:
    fields = dict(_fields("", task.metadata, {*references, *TESTS, *REFERENCES, "entry_point"}))
    if task.main_query:
        fields = {"the question": task.main_query, **fields}
    messages = [str(message.get("content") or "") for message in task.init_messages]
    if any(messages):
        fields["the messages"] = "\n".join(messages)
    for name, value in fields.items():
        # A copy of the answer under another name is the answer, not a cheat.
        if value is not None and text_of_value(value).strip() != text_of_value(answer).strip():
            yield Cheat("echo", f"echo of {name}", text_of_value(value))
    if len(fields) > 1:
        yield Cheat("echo", "echo of all fields", "\n".join(map(text_of_value, fields.values())))


def _fields(
    place: str, values: Mapping[str, object], left_out: set[str]
) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if name in left_out:
            continue
        if isinstance(value, Mapping):
            yield from _fields(f"{place}{name}.", value, left_out)
        else:
            yield f"{place}{name}", value


def _other_answers(answer: object, answers: Sequence[object]) -> Iterator[Cheat]:
    """The answers of all tasks at once, the commonest, and one of another task."""
    counts = Counter(text_of_value(other) for other in answers if other is not None)
    others = [text for text in counts if text != text_of_value(answer)]
    if not others:
        return
    if answer is not None:
        listed = [text_of_value(answer), *others[:_MOST_SEEN]]
    else:
        listed = others[:_MOST_SEEN]
    for between in (", ", "\n", " or "):
        yield Cheat("answers", f"all answers, joined by {between!r}", between.join(sorted(listed)))
    commonest, _ = counts.most_common(1)[0]
    yield Cheat("answers", "the commonest answer", commonest)
    yield Cheat("answers", "the answer of another task", others[0])


def _hollow(answer: object) -> Iterator[Cheat]:
    """The shape of an answer that is an object or a list, with nothing in it or a part of it."""
    value = _parsed(answer)
    if not isinstance(value, Mapping | list) or not value:
        return
    shapes: dict[str, Any] = {
        "its shape with nulls": _filled(value, None),
        "its shape with empty texts": _filled(value, ""),
        "its shape with zeros": _filled(value, 0),
        "nothing": type(value)(),
    }
    if isinstance(value, Mapping):
        key, first = next(iter(value.items()))
        shapes["one key without its value"] = {key: None}
        if len(value) > 1:
            shapes["one key"] = {key: first}
    elif len(value) > 1:
        shapes["its first item"] = value[:1]
    for name, shape in shapes.items():
        if not isinstance(answer, str):
            yield Cheat("hollow", name, shape)
        yield Cheat(
            "hollow", f"{name}, as text", json.dumps(shape, ensure_ascii=False, default=str)
        )


def _parsed(answer: object) -> object:
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def _filled(value: object, leaf: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(inner, leaf) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, leaf) for inner in value]
    return leaf
