"""The fields of the filter language: what each means, and its SQL over a row `e` of `episodes`.

A value never stands in the SQL: a condition has a `?` for each of its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ajet_tools.trace.queries.texts import IN_CALL, IN_EPISODE, call_parameters, episode_parameters, matches, pattern

__all__ = ["ALIASES", "FIELDS", "SQL", "Field", "any_text", "contains", "equals"]

Kind = Literal["number", "seconds", "age", "word", "id", "choice", "flag", "text"]
SQL = tuple[str, tuple[Any, ...]]
"""A condition and its parameters."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: of what kind its values are, and what is compared."""

    kind: Kind
    about: str
    expression: str = ""
    """The value, in SQL. Of a field that an episode may have several of, it stands for one of them."""
    among: str = ""
    """`FROM ... WHERE ...` of those several; empty where there is one."""
    choices: tuple[str, ...] = ()

    def where(self, condition: str) -> str:
        """A condition on `expression` as one on the episode; false where there is no value."""
        return f"EXISTS (SELECT 1 {self.among} AND {condition})" if self.among else f"coalesce({condition}, false)"

    @property
    def given(self) -> str:
        """The condition that there is a value."""
        return self.where(f"{self.expression} IS NOT NULL")


_CALLS = "FROM calls c WHERE c.episode_id = e.episode_id"
_ROLLOUT = f"{_CALLS} AND c.phase = 'rollout'"
_FEEDBACK = "FROM feedback f WHERE f.episode_id = e.episode_id"
_LEDGER = "FROM ledger l WHERE l.episode_id = e.episode_id"
QUERY = "e.task->>'$.main_query'"
REWARD = "(SELECT sum(r.value * r.weight) FROM rewards r WHERE r.episode_id = e.episode_id)"
_SOLVED = f"coalesce(e.is_success, {REWARD} >= 1 - 1e-9, false)"
_OUTCOMES = (
    "superseded", "evaluation", "untrainable", "undelivered", "failed", "stale", "zero_advantage", "truncated",
    "trained",
)  # fmt: skip

FIELDS: dict[str, Field] = {
    "reward": Field("number", "the sum of its rewards", REWARD),
    "status": Field("choice", "how it ended", "e.status", choices=("succeeded", "failed", "timeout", "aborted")),
    "success": Field("flag", "whether it solved its task", _SOLVED),
    "agent": Field("word", "an agent that made a call", "c.agent", _CALLS),
    "step": Field("number", "the training step", "e.step"),
    "task": Field("id", "the task: its id, or its query", "e.task_id"),
    "attempt": Field("number", "which attempt of its group, from 0", "e.attempt"),
    "split": Field("choice", "train or val", "e.split", choices=("train", "val")),
    "decoding": Field(
        "choice", "sampled or greedy: how its tokens were drawn", "e.decoding", choices=("sampled", "greedy")
    ),
    "turns": Field("number", "calls of its agents", f"(SELECT count(*) {_ROLLOUT})"),
    "calls": Field("number", "calls, those of judges too", f"(SELECT count(*) {_CALLS})"),
    "agents": Field("number", "how many agents made calls", f"(SELECT count(DISTINCT c.agent) {_ROLLOUT})"),
    "tokens": Field("number", "sampled tokens", f"(SELECT sum(len(c.output_ids)) {_CALLS})"),
    "seconds": Field("seconds", "how long it took: 90, 1.5m, 2h", "epoch(e.ended_at - e.started_at)"),
    "age": Field("age", "how long ago it ended: 30s, 5m, 2h, 1d", "e.ended_at"),
    "cause": Field("word", "the class of its error", "e.cause"),
    "error": Field("word", "its error", "e.error"),
    "model": Field("word", "a model that answered a call", "c.model", _CALLS),
    "version": Field("number", "the policy version of a call", "c.policy_version", _CALLS),
    "tag": Field("word", "the target tag of a call", "c.target_tag", _CALLS),
    "finish": Field("word", "the finish reason of a call", "c.finish_reason", _CALLS),
    "feedback": Field("number", "a score that a person gave; feedback=yes: any word at all", "f.score", _FEEDBACK),
    "outcome": Field("choice", "what the ledger says of a call's tokens", "l.outcome", _LEDGER, choices=_OUTCOMES),
    "episode": Field("id", "the episode's id", "e.episode_id"),
    "group": Field("id", "the group's id", "e.group_id"),
    "run": Field("id", "the run's id", "e.run_id"),
    "superseded": Field("flag", "whether a resume rolled it back", "coalesce(e.superseded, false)"),
    "text": Field("text", "anything said: task, messages, replies, output, errors"),
}
"""Field -> what it is. An id may be given by its beginning."""

ALIASES = {"policy": "version", "policy_version": "version", "policy/version": "version", "duration": "seconds"}


def any_text(needle: str) -> SQL:
    """That a text stands anywhere in an episode: its task, output, error, or what was said in its calls."""
    in_calls = f"e.episode_id IN (SELECT c.episode_id FROM calls c WHERE {IN_CALL})"
    return f"({IN_EPISODE} OR {in_calls})", (*episode_parameters(needle), *call_parameters(needle))


def contains(field: Field, needle: str) -> SQL:
    """That a text stands in a field's value (of a task also in its query)."""
    sql, parameters = field.where(matches(field.expression)), [pattern(needle)]
    if field is FIELDS["task"]:
        sql, parameters = f"({sql} OR {matches(QUERY)})", parameters * 2
    return sql, tuple(parameters)


def equals(field: Field, value: Any) -> SQL:
    """That a field has a value; of an id that it begins so, and of a task also that its query is this."""
    if field.kind != "id":
        return field.where(f"{field.expression} = ?"), (value,)
    sql = field.where(f"starts_with({field.expression}, ?)")
    if field is FIELDS["task"]:
        return f"({sql} OR coalesce(lower({QUERY}) = lower(?), false))", (value, value)
    return sql, (value,)
