"""What became of the tokens of a swarm's clients: by client, by episode, by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.schema import SAMPLED
from ajet_sdk.types import OUTCOMES
from ajet_tools.trace.queries.base import rows

HERE = "(this run)"
"""Stands for episodes that the run made itself."""

_TOKENS = f"""
    WITH sampled AS (
        SELECT e.run_id, coalesce(e.client, '{HERE}') AS client, e.episode_id, e.step, e.status, e.task_id,
            c.call_id, c."index", c.policy_version, {SAMPLED} AS tokens
        FROM episodes e JOIN calls c USING (episode_id)
        WHERE e.run_id = $1 AND c.trainable AND c.phase = 'rollout' AND {SAMPLED} > 0),
    booked AS (
        SELECT s.*, l.outcome, l.tokens AS counted
        FROM sampled s JOIN ledger l USING (run_id, call_id)
        UNION ALL
        SELECT s.*, 'pending', s.tokens FROM sampled s
        WHERE s.call_id NOT IN (SELECT call_id FROM ledger WHERE run_id = $1))"""


@dataclass(frozen=True)
class TokenReceipt:
    """Tokens of a client, an episode or a call, by outcome; `pending`: its step is not trained."""

    name: str
    """Client, or id of the episode or call."""
    episodes: int
    tokens: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    status: str | None = None
    task_id: str | None = None
    policy_version: int | None = None

    @property
    def total(self) -> int:
        return sum(self.tokens.values())


def by_client(reader: TraceReader, run_id: str) -> list[TokenReceipt]:
    """The tokens of each client of a run; their sums are the run's ledger."""
    return _receipts(reader, "client", "true", [run_id])


def by_episode(reader: TraceReader, run_id: str, client: str) -> list[TokenReceipt]:
    """The tokens of each episode of a client."""
    return _receipts(reader, "episode_id", "client = $2", [run_id, client])


def by_call(reader: TraceReader, run_id: str, episode_id: str) -> list[TokenReceipt]:
    """The tokens of each call of an episode."""
    return _receipts(reader, "call_id", "episode_id = $2", [run_id, episode_id])


def client_rows(receipts: Sequence[TokenReceipt]) -> list[dict[str, object]]:
    """A table's row for each client, with a column for each outcome, and one for their sum."""
    outcomes = list(dict.fromkeys(name for receipt in receipts for name in receipt.tokens))
    rows: list[dict[str, object]] = [
        {"client": r.name, "episodes": r.episodes, **_counts(r, outcomes), "tokens": r.total}
        for r in receipts
    ]
    return _with_sum(rows, "client")


def part_rows(receipts: Sequence[TokenReceipt]) -> list[dict[str, object]]:
    """The same for episodes or calls."""
    outcomes = list(dict.fromkeys(name for receipt in receipts for name in receipt.tokens))
    rows: list[dict[str, object]] = [
        {
            "id": r.name[:12],
            "step": r.step,
            "status": r.status,
            "task": r.task_id,
            "version": r.policy_version,
            **_counts(r, outcomes),
            "tokens": r.total,
        }
        for r in receipts
    ]
    return _with_sum(rows, "id")


def _counts(receipt: TokenReceipt, outcomes: Sequence[str]) -> dict[str, int]:
    return {outcome: receipt.tokens.get(outcome, 0) for outcome in outcomes}


def _with_sum(rows: list[dict[str, object]], name: str) -> list[dict[str, object]]:
    if len(rows) < 2:
        return rows
    summed = [column for column in rows[0] if column not in _NOT_SUMMED]
    total: dict[str, object] = {name: "sum"}
    for column in summed:
        total[column] = sum(int(str(row[column])) for row in rows)
    return [*rows, total]


_NOT_SUMMED = ("client", "id", "step", "status", "task", "version")


def _receipts(
    reader: TraceReader, key: str, chosen: str, values: Sequence[object]
) -> list[TokenReceipt]:
    sql = f"""{_TOKENS}
        SELECT {key} AS name, outcome, sum(counted)::BIGINT AS tokens, count(DISTINCT episode_id) AS episodes,
            min(step) AS step, any_value(status) AS status, any_value(task_id) AS task_id,
            min(policy_version) AS policy_version, min("index") AS place
        FROM booked WHERE {chosen} GROUP BY {key}, outcome ORDER BY step, place, name"""
    found: dict[str, list[dict[str, object]]] = {}
    for row in rows(reader, sql, *values):
        found.setdefault(str(row["name"]), []).append(row)
    return [_receipt(name, outcomes, key) for name, outcomes in found.items()]


def _receipt(name: str, outcomes: Sequence[Mapping[str, object]], key: str) -> TokenReceipt:
    by_outcome = {str(row["outcome"]): int(str(row["tokens"])) for row in outcomes}
    ordered = {
        outcome: by_outcome[outcome]
        for outcome in (*reversed(OUTCOMES), "pending")
        if outcome in by_outcome
    }
    if key == "client":
        # an episode may have tokens of several outcomes
        return TokenReceipt(name, max(int(str(row["episodes"])) for row in outcomes), ordered)
    first = outcomes[0]
    step = first["step"]
    version = first["policy_version"]
    return TokenReceipt(
        name,
        1,
        ordered,
        step=step if isinstance(step, int) else None,
        status=str(first["status"]),
        task_id=str(first["task_id"]),
        policy_version=version if isinstance(version, int) else None,
    )
