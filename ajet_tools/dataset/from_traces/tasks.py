"""Converts episodes to tasks: the question, the messages before it, and the answer if known."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ajet_sdk.dialects.message_parts import parts_of
from ajet_sdk.judges.math import number
from ajet_sdk.tasks.lineage import plain_text
from ajet_sdk.types import Episode, Feedback, Task
from ajet_tools.dataset.from_traces.choice import Opinion, opinion
from ajet_tools.dataset.verify.agreement import final_of
from ajet_tools.trace.export.conversations import Conversation, conversations
from ajet_tools.trace.queries.records import Record
from ajet_tools.trace.redact import KINDS

Message = Mapping[str, object]
_PLACEHOLDER = re.compile(rf"\[(?:{'|'.join(KINDS)}) \d+\]|\[removed by ajet\]")
_MOST_EPISODES = 16
_ORIGINS = ("task", "output", "wording")
"""Origins of answers without a correction, best first."""
_MARKED = re.compile(r"^\s*ANSWER:|\\boxed\s*\{|####|\banswer is\b", re.MULTILINE)
"""Marks of a final answer that is not a number."""


@dataclass(frozen=True)
class TracedTask:
    """A task as an episode shows it."""

    key: str
    """Identifies the task."""
    task: Task
    episode_id: str
    answer: Any = None
    answer_from: str | None = None
    """correction, task, output (a value found by a rule), or wording (a whole output)."""
    corrected: Any = None
    """The stored answer that a correction replaces."""
    said: Opinion = field(default_factory=Opinion)
    problem: str | None = None
    """Why it must not be learned from."""
    stored: bool = False
    """Whether the trace stores the task itself, so that the agent builds its conversation."""


@dataclass(frozen=True)
class _Question:
    """A question in a conversation; it is the last of `messages`."""

    messages: tuple[Message, ...]
    reply: Message | None = None
    """The last reply after it."""
    call_ids: tuple[str, ...] = ()
    """The calls after it, to the end of the conversation."""
    own: bool = True
    """Whether it is the episode's stored task, and not a later question."""


def traced_tasks(
    record: Record, *, foreign: bool = False, accept_output: bool = False
) -> Iterator[TracedTask]:
    """Yields the task of an episode; for a process observed without a workflow, a task per
    conversation.

    Args:
        record: the episode with its feedback, redacted or not.
        foreign: another tool recorded it, so its task id does not identify the task.
        accept_output: use a liked output as the answer.
    """
    episode = record.episode
    overall_opinion = opinion(record.feedback)
    for question in _questions(episode, overall_opinion):
        own_opinion = _about(record.feedback, question, episode)
        task = _task(episode.task, question)
        if not (task.main_query or task.init_messages or task.metadata):
            continue
        stored = question.own and not foreign
        key = f"id:{task.task_id}" if stored else f"text:{task_key(task)}"
        answer, origin, corrected = _answer(episode, question, own_opinion, accept_output)
        hidden = (
            record.redacted
            and origin is not None
            and isinstance(answer, str)
            and has_placeholder(answer)
        )
        if hidden:
            problem = "the answer contained personal data or a secret, now redacted"
        else:
            problem = None
        yield TracedTask(
            key, task, episode.episode_id, answer, origin, corrected, own_opinion, problem, stored
        )


def has_placeholder(text: str) -> bool:
    """Whether redaction replaced a part of the text."""
    return _PLACEHOLDER.search(text) is not None


def task_key(task: Task) -> str:
    """Hashes the question, ignoring case and white space."""
    turns = [(str(m.get("role")), plain_text(parts_of(m).text)) for m in task.init_messages]
    turns = turns or [("", plain_text(task.main_query))]
    if task.init_messages:
        more = {}
    else:
        more = {k: v for k, v in task.metadata.items() if k != "answer"}
    text = json.dumps([turns, more], ensure_ascii=True, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _questions(episode: Episode, overall_opinion: Opinion) -> list[_Question]:
    all_conversations = conversations(episode)
    if not all_conversations:
        return [_Question(())]
    if _is_process(episode):
        return [_last_of(conversation) for conversation in all_conversations]
    if overall_opinion.correction:
        named = overall_opinion.correction.call_id
    else:
        named = None
    later = _question_of_call(named, all_conversations)
    if later is not None and any(m.get("role") == "assistant" for m in later.messages):
        return [later]
    return [_of_task(episode.task, all_conversations)]


def _question_of_call(
    call_id: str | None, all_conversations: Sequence[Conversation]
) -> _Question | None:
    for conversation in all_conversations:
        place = dict(conversation.turns).get(call_id or "")
        if place is not None:
            return _cut(conversation, _last_user(conversation.messages[:place]), own=False)
    return None


def _is_process(episode: Episode) -> bool:
    return episode.task.env_type == "process" and not episode.task.main_query


def _last_of(conversation: Conversation) -> _Question:
    return _cut(
        conversation, _last_user(conversation.messages[: conversation.turns[-1][1]]), own=False
    )


def _of_task(task: Task, all_conversations: Sequence[Conversation]) -> _Question:
    """Locates the stored question: as a whole message, else inside a message, else at the
    beginning."""
    query = task.main_query.strip()
    located_messages: list[tuple[Conversation, int, Message]] = []
    for conversation in all_conversations:
        for place, message in enumerate(conversation.messages):
            located_messages.append((conversation, place, message))
    for conversation, place, message in located_messages:
        if query and message.get("role") == "user" and parts_of(message).text.strip() == query:
            return _cut(conversation, place)
    if not query or any(
        m.get("role") == "tool" and parts_of(m).text.strip() == query
        for _, _, m in located_messages
    ):
        return _last_of(all_conversations[0])  # the query of a served request may be a tool result
    for conversation, place, message in located_messages:
        if message.get("role") == "user" and query in parts_of(message).text:
            return _cut(conversation, place)
    first = all_conversations[0]
    return _cut(first, _last_user(first.messages[: first.turns[0][1]]))


def _last_user(messages: Sequence[Message]) -> int:
    places = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    return places[-1] if places else len(messages) - 1


def _cut(conversation: Conversation, at: int, *, own: bool = True) -> _Question:
    turns = [(call_id, place) for call_id, place in conversation.turns if place > at]
    reply = conversation.messages[turns[-1][1]] if turns else None
    return _Question(
        conversation.messages[: at + 1], reply, tuple(call_id for call_id, _ in turns), own
    )


def _task(stored: Task, question: _Question) -> Task:
    """Returns the stored task with its conversation, or a new task for a different question."""
    messages = [dict(message) for message in question.messages]
    if question.own:
        if stored.init_messages or not messages:
            return stored
        return stored.model_copy(update={"init_messages": messages})
    if messages:
        query = parts_of(messages[-1]).text.strip()
    else:
        query = stored.main_query
    moved = {
        k: query if v == stored.main_query and v else v
        for k, v in stored.metadata.items()
        if k != "answer"
    }
    return Task(main_query=query, init_messages=messages, env_type=stored.env_type, metadata=moved)


def _about(feedback: Sequence[Feedback], question: _Question, episode: Episode) -> Opinion:
    if question.own:
        return opinion(feedback)
    call_ids = (*question.call_ids, *([] if _is_process(episode) else [None]))
    return opinion(entry for entry in feedback if entry.call_id in call_ids)


def _answer(
    episode: Episode, question: _Question, feedback_opinion: Opinion, accept_output: bool
) -> tuple[Any, str | None, Any]:
    """Returns the answer, its origin, and the stored answer that a correction contradicts."""
    stored = episode.task.metadata.get("answer") if question.own else None
    stored = None if isinstance(stored, str) and not stored.strip() else stored
    correction = feedback_opinion.correction
    if (
        correction is not None
        and correction.correction
        and not _asks_a_tool(episode, correction.call_id)
    ):
        text = correction.correction.strip()
        if stored is None or str(stored).strip() == text:
            return (text if stored is None else stored), "correction", None
        return text, "correction", stored
    if stored is not None:
        return stored, "task", None
    if accept_output and feedback_opinion.correction is None and "up" in feedback_opinion.kinds:
        if question.own and episode.output != "":
            liked = episode.output
        else:
            liked = None
        if not isinstance(liked, str | int | float):
            liked = parts_of(question.reply or {"role": "?"}).content.strip()
        value = _value(liked)
        if liked != "":
            if value is None:
                return (liked, "wording", None)
            return (value, "output", None)
    return None, None, None


def _value(liked: object) -> Any:
    """Returns the answer of a liked output if a rule finds it (`42` in `So the answer is 42.`),
    else None."""
    if not isinstance(liked, str):
        return liked
    final = final_of(liked)
    if final is None or (number(final) is None and not _MARKED.search(liked)):
        return None
    return final


def _asks_a_tool(episode: Episode, call_id: str | None) -> bool:
    """Whether a call's reply is a tool call, so that a correction of it is not an answer."""
    for call in episode.calls:
        if call.call_id == call_id:
            choices = call.response.get("choices")
            if isinstance(choices, list) and choices:
                message = choices[0].get("message")
            else:
                message = None
            return isinstance(message, Mapping) and bool(message.get("tool_calls"))
    return False


@dataclass(frozen=True)
class _Seen:
    """An episode of a task, with what is known of it."""

    traced: TracedTask
    failure: str | None
    verdict: Mapping[str, object] | None
    split: str


def _settled_answer(seen: Sequence[_Seen]) -> tuple[Any, str | None, Any]:
    """Returns the latest correction, else the stored answer, else that of a liked output; its
    origin; and the stored answer that a correction replaces."""
    corrected = [each.traced for each in seen if each.traced.said.correction is not None]
    corrected = [traced for traced in corrected if traced.answer_from == "correction"]
    if corrected:
        latest = max(corrected, key=lambda traced: traced.said.correction.at)  # type: ignore[union-attr]
        return latest.answer, "correction", latest.corrected
    for origin in _ORIGINS:
        for each in seen:
            if each.traced.answer_from == origin:
                return each.traced.answer, origin, None
    return None, None, None


def _count_attempts(seen: Sequence[_Seen], tried: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Returns the number of attempts at a task, and of failures."""
    attempts, failed = tried.get(seen[0].traced.task.task_id, (0, 0))
    failures = sum(each.failure is not None for each in seen)
    return max(attempts, len(seen)), max(failed, failures)


def _task_row(
    seen: Sequence[_Seen],
    tried: Mapping[str, tuple[int, int]] | None,
    more: Mapping[str, object],
) -> dict[str, object]:
    answer, origin, replaced = _settled_answer(seen)
    task = seen[0].traced.task
    if tried is not None and seen[0].traced.stored:
        task = _seed(task)
    provenance: dict[str, object] = {
        "source": "trace",
        "seeds": [task.task_id],
        "episodes": [each.traced.episode_id for each in seen[:_MOST_EPISODES]],
        "splits": sorted({each.split for each in seen}),
        "attempts": len(seen),
        "answer_from": origin,
        **more,
    }
    if replaced is not None:
        provenance["instead_of"] = replaced
    scores = [each.traced.said.score for each in seen if each.traced.said.score is not None]
    if scores:
        provenance["feedback"] = {"mean": sum(scores) / len(scores), "given": len(scores)}
    comments = list(chain.from_iterable(each.traced.said.comments for each in seen))
    if comments:
        provenance["comments"] = comments[:_MOST_EPISODES]
    if tried is not None:
        attempts, failed = _count_attempts(seen, tried)
        failures = Counter(each.failure for each in seen if each.failure is not None)
        provenance |= {"attempts": attempts, "failed": failed, "failures": dict(failures)}
    for each in seen:
        if each.verdict is not None:
            provenance["verdict"] = dict(each.verdict)
            break
    row: dict[str, object] = {"main_query": task.main_query, "task_id": task.task_id}
    if task.init_messages:
        row["init_messages"] = task.init_messages
    if task.env_type:
        row["env_type"] = task.env_type
    row["metadata"] = task.metadata if origin is None else {**task.metadata, "answer": answer}
    return {**row, "provenance": provenance}


class TaskPool:
    """Collects tasks by key, in order of first occurrence; each becomes a row unless it is
    disputed."""

    def __init__(self, disputed: Collection[str] = ()) -> None:
        self._disputed = disputed
        self._seen: dict[str, list[_Seen]] = {}
        self.rejected: list[dict[str, object]] = []
        """Rejected tasks, each with a `reason`."""
        self.answered: Counter[str] = Counter()
        """Rows by origin of their answer; `none` without an answer."""

    @property
    def duplicates(self) -> int:
        """Episodes of tasks that are in the pool already."""
        return sum(len(seen) - 1 for seen in self._seen.values())

    def add(
        self,
        traced: TracedTask,
        failure: str | None = None,
        verdict: Mapping[str, object] | None = None,
        split: str = "train",
    ) -> None:
        """Adds an episode of a task, with its reason for failure, its grade and its run's split."""
        if traced.problem:
            self.rejected.append(rejected_row(traced.task, traced.episode_id, traced.problem))
            return
        seen = self._seen.setdefault(traced.key, [])
        if seen:
            traced = replace(traced, task=seen[0].traced.task)  # one copy in memory
        seen.append(_Seen(traced, failure, verdict, split))

    def rows(
        self,
        tried: Mapping[str, tuple[int, int]] | None = None,
        *,
        need_answer: bool = False,
        provenance: Mapping[str, object] | None = None,
    ) -> Iterator[dict[str, object]]:
        """Yields task rows; with `tried` (task id -> attempts, failures) as seeds, by decreasing
        failure rate.

        Tasks with contradicting corrections and no majority are rejected.
        """

        def failure_rank(key: str) -> tuple[float, int]:
            attempts, failed = _count_attempts(self._seen[key], tried or {})
            return -failed / attempts, -failed

        for key in self._seen if tried is None else sorted(self._seen, key=failure_rank):
            seen = self._seen[key]
            _, origin, _ = _settled_answer(seen)
            reason = None
            if key in self._disputed:
                reason = "people gave different corrections, without a majority"
            elif need_answer and origin is None:
                reason = "no answer is known"
            if reason is not None:
                first = seen[0].traced
                self.rejected.append(rejected_row(first.task, first.episode_id, reason))
                continue
            self.answered[origin or "none"] += 1
            yield _task_row(seen, tried, provenance or {})


def rejected_row(
    task: Task, episode_id: str, reason: str, verdict: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Returns a rejected task with the reason, without its answer."""
    identity = {"main_query": task.main_query, "task_id": task.task_id, "episode_id": episode_id}
    return {**identity, "reason": reason, **({"verdict": dict(verdict)} if verdict else {})}


def _seed(task: Task) -> Task:
    """Removes metadata that repeats the question, which generated rows would have to repeat too."""
    metadata = {name: value for name, value in task.metadata.items() if name != "answer"}
    repeats = len(metadata) == 1 and next(iter(metadata.values())) == task.main_query
    opening = not any(message.get("role") == "assistant" for message in task.init_messages)
    kept = {name: value for name, value in task.metadata.items() if not repeats or name == "answer"}
    return task.model_copy(update={"metadata": kept, **({"init_messages": []} if opening else {})})
