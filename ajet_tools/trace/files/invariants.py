"""SQL of a trace's invariants: queries of the ids that violate them."""

from __future__ import annotations

from ajet_sdk.trace.pictures import references
from ajet_sdk.types import OUTCOMES


def _twice(table: str, *keys: str) -> str:
    shown = " || ' ' || ".join(f"coalesce({key}::VARCHAR, '')" for key in keys)
    return f"SELECT {shown} AS id FROM {table} GROUP BY {', '.join(keys)} HAVING count(*) > 1"


def _absent(
    table: str, column: str, others: str, where: str = "true", id: str | None = None
) -> str:
    return (
        f"SELECT DISTINCT {id or column} AS id FROM {table} WHERE {column} IS NOT NULL AND {where} "
        f"AND {column} NOT IN ({others})"
    )


def _without_picture(table: str, id: str) -> str:
    return f"{references(table, id)} WHERE digest NOT IN (SELECT digest FROM pictures)"


_EPISODES = "SELECT episode_id FROM episodes WHERE episode_id IS NOT NULL"
_CALLS = "SELECT call_id FROM calls WHERE call_id IS NOT NULL"
_RUNS = "SELECT run_id FROM runs WHERE run_id IS NOT NULL"
_KNOWN = f"{_EPISODES} UNION SELECT episode_id FROM calls WHERE episode_id IS NOT NULL"
_LEFT_OPEN = """
SELECT c.call_id AS id FROM (SELECT * FROM calls WHERE NOT $live) c ANTI JOIN episodes e USING (episode_id)
ASOF JOIN runs r ON c.started_at >= r.started_at
WHERE r.status IN ('finished', 'failed')
  AND r.run_id NOT IN (SELECT run_id FROM ledger WHERE outcome = 'superseded')"""
CIRCLES = """
WITH RECURSIVE late AS (
    SELECT DISTINCT c.episode_id
    FROM calls c JOIN calls p ON p.call_id = c.parent_call_id AND p.episode_id = c.episode_id
    WHERE (p.ended_at, p.index) >= (c.ended_at, c.index)),
candidates AS MATERIALIZED (SELECT call_id, parent_call_id, episode_id FROM calls WHERE episode_id IN (FROM late)),
reached AS (
    SELECT call_id, episode_id FROM candidates WHERE parent_call_id IS NULL
    UNION
    SELECT o.call_id, o.episode_id
    FROM candidates o JOIN reached r ON r.call_id = o.parent_call_id AND r.episode_id = o.episode_id)
SELECT call_id AS id FROM candidates WHERE call_id NOT IN (SELECT call_id FROM reached)"""
"""Calls in a cycle. Only episodes in `late`, with a parent that ended after its child, can have
one."""

INVARIANTS: dict[str, tuple[str, str]] = {
    "run ids": ("a run occurs twice", _twice("runs", "run_id")),
    "episode ids": (
        "an episode occurs twice: it must have one final status",
        _twice("episodes", "episode_id"),
    ),
    "call ids": ("a call occurs twice", _twice("calls", "call_id")),
    "feedback ids": ("a feedback occurs twice", _twice("feedback", "feedback_id")),
    "ledger rows": (
        "an outcome of a call is in the ledger twice",
        _twice("ledger", "run_id", "call_id", "outcome"),
    ),
    "trained rows": (
        "a call is trained twice in one step",
        _twice("trained", "run_id", "step", "call_id"),
    ),
    "run status": (
        "the status of a run is unknown, or it has ended without an end time",
        (
            "SELECT run_id AS id FROM runs WHERE status IS NULL OR status NOT IN ('running',"
            " 'finished', 'failed', 'interrupted') OR status = 'finished' AND ended_at IS NULL OR"
            " status = 'running' AND ended_at IS NOT NULL"
        ),
    ),
    "episode status": (
        "the status or split of an episode is unknown",
        (
            "SELECT episode_id AS id FROM episodes WHERE status IS NULL OR (split IS NULL) <> (step"
            " IS NULL) OR status NOT IN ('succeeded', 'failed', 'timeout', 'aborted') OR split NOT"
            " IN ('train', 'val', 'trial')"
        ),
    ),
    "outcomes": (
        "a ledger entry has an unknown outcome or a negative number of tokens",
        (
            "SELECT call_id AS id FROM ledger WHERE tokens IS NULL OR tokens < 0 OR outcome IS"
            f" NULL OR outcome NOT IN {OUTCOMES}"
        ),
    ),
    "runs of episodes": (
        "an episode belongs to a run that does not exist",
        _absent("episodes", "run_id", _RUNS, "run_id <> ''", id="episode_id"),
    ),
    "runs of metrics": (
        "a metric belongs to a run that does not exist",
        _absent("metrics", "run_id", _RUNS),
    ),
    "episodes of calls": ("a call of a run that has ended belongs to no episode", _LEFT_OPEN),
    "episodes of rewards": (
        "a reward belongs to an episode that does not exist",
        _absent("rewards", "episode_id", _EPISODES),
    ),
    "calls of rewards": (
        "a reward names a call that does not exist",
        _absent("rewards", "call_id", _CALLS),
    ),
    "calls of the ledger": (
        "the ledger names a call that does not exist",
        _absent("ledger", "call_id", _CALLS),
    ),
    "calls of trained": (
        "a trained row names a call that does not exist",
        _absent("trained", "call_id", _CALLS),
    ),
    "episodes of feedback": (
        "feedback on an episode that does not exist",
        _absent("feedback", "episode_id", _KNOWN),
    ),
    "calls of feedback": (
        "feedback on a call that does not exist",
        _absent("feedback", "call_id", _CALLS),
    ),
    "prefixes": (
        (
            "a prompt cannot be reconstructed: its earlier call is not in the episode, or is"
            " shorter than the part taken from it"
        ),
        """
        SELECT c.call_id AS id FROM calls c
        LEFT JOIN calls p ON p.call_id = c.parent_call_id AND p.episode_id = c.episode_id
        WHERE c.prefix_len IS NULL OR c.prefix_len < 0 OR c.prefix_messages IS NULL OR c.prefix_messages < 0
          OR CASE WHEN c.parent_call_id IS NULL THEN c.prefix_len > 0 OR c.prefix_messages > 0
             ELSE p.call_id IS NULL
               OR c.prefix_len > p.prefix_len + coalesce(len(p.prompt_suffix), 0) + coalesce(len(p.output_ids), 0)
               OR c.prefix_messages > p.prefix_messages + coalesce(json_array_length(p.messages_suffix), 0) END""",
    ),
    "extended calls": (
        "a call extends one that is not in its episode, or is of another agent or phase",
        (
            "SELECT c.call_id AS id FROM calls c LEFT JOIN calls p ON p.call_id = c.extends_call_id"
            " AND p.episode_id = c.episode_id WHERE c.extends_call_id IS NOT NULL AND (p.call_id IS"
            " NULL OR p.agent <> c.agent OR p.phase <> c.phase)"
        ),
    ),
    "log-probabilities": (
        "a call does not have one log-probability per sampled token",
        (
            "SELECT call_id AS id FROM calls WHERE logprobs IS NOT NULL AND len(logprobs) IS"
            " DISTINCT FROM len(output_ids)"
        ),
    ),
    "trained arrays": (
        "a trained row is not as long as its call's sampled tokens",
        (
            "SELECT t.call_id AS id FROM trained t JOIN calls c USING (call_id) WHERE"
            " len(advantages) IS DISTINCT FROM len(c.output_ids) OR len(t.logprobs) IS DISTINCT"
            " FROM len(c.output_ids) OR len(entropy) IS DISTINCT FROM len(c.output_ids)"
        ),
    ),
    "trained tokens": (
        "the number of advantages of a trained row differs from the trained tokens in the ledger",
        (
            "SELECT t.call_id AS id FROM trained t LEFT JOIN (FROM ledger WHERE outcome ="
            " 'trained') l USING (run_id, step, call_id) WHERE list_count(list_filter(advantages,"
            " lambda a: isfinite(a))) IS DISTINCT FROM l.tokens"
        ),
    ),
    "superseded": (
        "a call of a rolled-back episode has another outcome in the ledger, or is trained",
        (
            "SELECT call_id AS id FROM ledger JOIN episodes USING (episode_id) "
            "WHERE superseded AND outcome <> 'superseded' "
            "UNION SELECT call_id FROM trained JOIN episodes USING (episode_id) WHERE superseded"
        ),
    ),
    "pictures of calls": (
        "a call refers to a picture that the trace does not have",
        _without_picture("calls", "call_id"),
    ),
    "pictures of episodes": (
        "an episode refers to a picture that the trace does not have",
        _without_picture("episodes", "episode_id"),
    ),
    "places of pictures": (
        "a picture of a prompt lies outside of it, or across the next one",
        """
        SELECT call_id AS id FROM (
            SELECT call_id, size, place->'$[0]' AS start, (place->>'$[1]')::BIGINT AS "end",
                lead((place->>'$[0]')::BIGINT) OVER (PARTITION BY call_id ORDER BY number) AS next
            FROM (SELECT call_id, generate_subscripts(json_extract(pictures, '$[*]'), 1) AS number,
                    unnest(json_extract(pictures, '$[*]')) AS place,
                    prefix_len + coalesce(len(prompt_suffix), 0) AS size
                FROM calls WHERE pictures IS NOT NULL))
        WHERE start::BIGINT < 0 OR start::BIGINT >= "end" OR "end" > size OR next < "end" """,
    ),
    "times": (
        "something ends before it starts",
        " UNION ALL ".join(
            f"SELECT {id} AS id FROM {table} WHERE ended_at < started_at"
            for table, id in (("runs", "run_id"), ("episodes", "episode_id"), ("calls", "call_id"))
        ),
    ),
    "times of calls": (
        "a call starts before its episode, or an episode before its run",
        (  # 0: not known
            "SELECT c.call_id AS id FROM calls c JOIN episodes e USING (episode_id) "
            "WHERE c.started_at < e.started_at - INTERVAL 1 SECOND AND epoch(c.started_at) <> 0 "
            "UNION ALL SELECT e.episode_id FROM episodes e JOIN runs r USING (run_id) "
            "WHERE e.started_at < r.started_at - INTERVAL 1 SECOND AND epoch(e.started_at) <> 0"
        ),
    ),
}
"""Message of a violation, and query of the violating ids, by name."""

SAME_REPLY = """c.call_id <> o.call_id AND c.output_ids = o.output_ids
    AND coalesce(try_cast(c.sampling->>'$.n' AS INTEGER), 1) = 1
    AND (c.response->>'$.id' = o.response->>'$.id'
        OR c.logprobs = o.logprobs AND c.started_at = o.started_at AND c.ended_at = o.ended_at
            AND epoch(c.started_at) <> 0)"""
"""SQL: whether two calls `c` and `o` have one reply. Choices of one request have a common id; times
of 0 are not known."""
