"""Filters of episodes: SQL as after WHERE over the columns of an episode.

`reward < 0.5 and status = 'failed' and has('calc') and age() < interval 2 hour`; a text without any
operator is searched for. For the language see `ajet_tools.text.conditions`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ajet_sdk.errors import QueryError
from ajet_sdk.trace.query import check_select
from ajet_sdk.trace.schema import LAST_VERSION
from ajet_tools.text.conditions import condition
from ajet_tools.trace.queries.base import USAGE_TOKENS
from ajet_tools.trace.queries.search import (
    IN_CALL,
    IN_EPISODE,
    call_parameters,
    episode_parameters,
)

SQL = tuple[str, tuple[object, ...]]
"""A text of SQL and its parameters."""

_CALLS = "FROM calls c WHERE c.episode_id = e.episode_id"
_ROLLOUT = f"{_CALLS} AND c.phase = 'rollout'"
_FIRST_CHOICE = "coalesce(c.response->>'$.choices[0].index', '0') = '0'"
"""The choices of a request share its usage, so only the first one counts."""
_PROMPT = f"""coalesce(c.prefix_len + len(c.prompt_suffix),
  CASE WHEN {_FIRST_CHOICE} THEN TRY_CAST(c.response->>'$.usage.prompt_tokens' AS BIGINT) END)"""
_ANSWERED = (
    f"(SELECT sum(TRY_CAST(c.response->>'$.usage.cost' AS DOUBLE)) {_CALLS} AND {_FIRST_CHOICE})"
)
_JUDGED = "TRY_CAST(e.metrics->>'$.judge_cost' AS DOUBLE)"
_UNREAD = f"{_ROLLOUT} AND c.response->>'$.choices[0].unread_tool_call' = 'true'"
REWARD = "(SELECT sum(r.value * r.weight) FROM rewards r WHERE r.episode_id = e.episode_id)"
_LAST_STEP = """(SELECT max(l.step) FROM episodes l WHERE l.run_id = e.run_id AND l.split = e.split
  AND NOT coalesce(l.superseded, false))"""

COLUMNS: dict[str, str] = {
    "episode_id": "e.episode_id",
    "run_id": "e.run_id",
    "group_id": "e.group_id",
    "task_id": "e.task_id",
    "task": "e.task->>'$.main_query'",
    "reward": REWARD,
    "success": f"coalesce(e.is_success, {REWARD} >= 1 - 1e-9, false)",
    "status": "e.status",
    "cause": "e.cause",
    "error": "e.error",
    "split": "e.split",
    "decoding": "e.decoding",
    "step": "e.step",
    "last_step": _LAST_STEP,
    "attempt": "e.attempt",
    "turns": f"(SELECT count(*) {_ROLLOUT})",
    "calls": f"(SELECT count(*) {_CALLS})",
    "tokens": f"(SELECT coalesce(sum(len(c.output_ids)), {USAGE_TOKENS}) {_CALLS})",
    "prompt_tokens": f"(SELECT sum({_PROMPT}) {_CALLS})",
    "cost": f"coalesce({_ANSWERED} + {_JUDGED}, {_ANSWERED}, {_JUDGED})",
    "seconds": "epoch(e.ended_at - e.started_at)",
    "latency": f"(SELECT max(epoch(c.ended_at - c.started_at)) {_CALLS})",
    "started_at": "e.started_at",
    "ended_at": "e.ended_at",
    "output": "e.output->>'$'",
    "metrics": "e.metrics",
    "unread_tool_calls": f"(SELECT count(*) {_UNREAD})",
    "cut_tool_calls": f"(SELECT count(*) {_UNREAD} AND c.finish_reason = 'length')",
    "agents": f"(SELECT list(DISTINCT c.agent) {_CALLS})",
    "models": f"(SELECT list(DISTINCT c.model) {_CALLS})",
    "tags": f"(SELECT list(DISTINCT c.target_tag) {_CALLS})",
    "finish_reasons": f"(SELECT list(DISTINCT c.finish_reason) {_CALLS})",
    "version": f"(SELECT max({LAST_VERSION}) {_CALLS})",
    "outcomes": (
        "(SELECT list(DISTINCT l.outcome) FROM ledger l WHERE l.episode_id = e.episode_id)"
    ),
    "feedback": "(SELECT avg(f.score) FROM feedback f WHERE f.episode_id = e.episode_id)",
    "superseded": "coalesce(e.superseded, false)",
}
"""The columns of a filter, as SQL over a row `e` of `episodes`."""

_CONTAINS = f"({IN_EPISODE} OR e.episode_id IN (SELECT c.episode_id FROM calls c WHERE {IN_CALL}))"
_MISSING = re.compile(r'Referenced column "([^"]+)" (?:was )?not found')


class FilterError(QueryError):
    """A filter that is no condition on these columns."""


@dataclass(frozen=True, slots=True)
class Filter:
    text: str
    condition: str
    """SQL over the columns, and a column `has_N` for each text that is searched for."""
    needles: tuple[str, ...] = ()
    """The texts that are searched for, which takes seconds on a large trace."""

    @property
    def is_empty(self) -> bool:
        return not self.text.strip()

    def query(self, among: str = "true", found: Mapping[str, Sequence[str]] | None = None) -> SQL:
        """Return a SELECT of the ids of the matches.

        Args:
            among: a condition on rows `e` of `episodes`; its parameters come after those returned.
            found: ids of the episodes that hold each needle; None: they are searched for.
        """
        words = set(re.findall(r"\w+", self.condition.lower()))
        columns = [f'{sql} AS "{name}"' for name, sql in COLUMNS.items() if name in words]
        parameters: list[object] = []
        for number, needle in enumerate(self.needles):
            holds = _CONTAINS
            if found is None:
                parameters += [*episode_parameters(needle), *call_parameters(needle)]
            else:
                holds = "e.episode_id IN (SELECT unnest(?::VARCHAR[]))"
                parameters.append(list(found[needle]))
            columns.append(f"{holds} AS has_{number}")
        if "episode_id" not in words:
            columns.append("e.episode_id")
        inner = f"SELECT {', '.join(columns)} FROM episodes e WHERE {among}"
        return f"SELECT episode_id FROM ({inner}) WHERE {self.condition}", tuple(parameters)

    @property
    def sql(self) -> str:
        """The filter as a condition on rows `e` of `episodes`, with `parameters`."""
        return f"e.episode_id IN ({self.query()[0]})"

    @property
    def parameters(self) -> tuple[object, ...]:
        return self.query()[1]


def parse(text: str) -> Filter:
    """Parse a filter; an empty text matches every episode. Raises FilterError."""
    needles: list[str] = []

    def has(needle: str) -> str:
        if needle not in needles:
            needles.append(needle)
        return f"has_{needles.index(needle)}"

    macros = {"has": has, "age": lambda _: "(now() - ended_at)", "metric": _metric}
    try:
        wanted = Filter(text, condition(text, macros, COLUMNS), tuple(needles))
        check_select(*wanted.query())
    except QueryError as error:
        raise FilterError(_explained(str(error))) from error
    return wanted


def _metric(name: str) -> str:
    path = f"$.{json.dumps(name)}".replace("'", "''")
    return f"TRY_CAST(metrics->>'{path}' AS DOUBLE)"


def _explained(message: str) -> str:
    missing = _MISSING.search(message)
    if missing is None:
        return message.partition("\n")[0].replace("query", "filter")
    name = missing[1]
    near = difflib.get_close_matches(name.lower(), COLUMNS, n=1, cutoff=0.6)
    hint = f", did you mean {near[0]}?" if near else ""
    return (
        f"there is no column {name!r}{hint}; columns: {', '.join(COLUMNS)}. Texts are in quotes:"
        " status = 'failed'"
    )
