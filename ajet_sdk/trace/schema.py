"""Tables, views and schema version of a trace file."""

from __future__ import annotations

from collections.abc import Container, Sequence

SCHEMA_VERSION = 10

OF_VALIDATION = """e.split = 'val' AND e.run_id NOT IN (
    SELECT run_id FROM runs
    WHERE backbone = 'run' AND json_extract_string(config, '$.tasks') IS DISTINCT FROM 'validation')"""
"""SQL: whether an episode `e` is of a validation task. All episodes of `ajet run` have the split
`val`, and count only if its tasks are the validation tasks of a job."""

STORAGE_VERSION = "v1.5.0"
"""File format of the oldest DuckDB that pyproject.toml allows, so that all can read it."""

COLUMNS = {
    table: dict(column.split() for column in columns.split(","))
    for table, columns in {
        "runs": (
            "run_id VARCHAR, name VARCHAR, config JSON, backbone VARCHAR, status VARCHAR, "
            "started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ, error VARCHAR"
        ),
        "episodes": (
            "episode_id VARCHAR, run_id VARCHAR, group_id VARCHAR, attempt INTEGER, step INTEGER,"
            " split VARCHAR, task_id VARCHAR, task JSON, output JSON, status VARCHAR, error"
            " VARCHAR, cause VARCHAR, infrastructure BOOLEAN, is_success BOOLEAN, metrics JSON,"
            " started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ, superseded BOOLEAN, decoding VARCHAR,"
            " events JSON, client VARCHAR"
        ),
        "calls": (
            "call_id VARCHAR, episode_id VARCHAR, index INTEGER, agent VARCHAR, target_tag VARCHAR,"
            " trainable BOOLEAN, model VARCHAR, policy_version INTEGER, request JSON, response"
            " JSON, parent_call_id VARCHAR, prefix_len INTEGER, prompt_suffix INTEGER[],"
            " prefix_messages INTEGER, messages_suffix JSON, output_ids INTEGER[], logprobs"
            " FLOAT[], finish_reason VARCHAR, started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ, error"
            " VARCHAR, request_id VARCHAR, sampling JSON, phase VARCHAR, extends_call_id VARCHAR,"
            " cut_tokens INTEGER, pictures JSON, weight_updates INTEGER[]"
        ),
        "rewards": (
            "episode_id VARCHAR, name VARCHAR, value DOUBLE, weight DOUBLE, reason VARCHAR, agent"
            " VARCHAR, call_id VARCHAR"
        ),
        "metrics": "run_id VARCHAR, step INTEGER, name VARCHAR, value DOUBLE, at TIMESTAMPTZ",
        "ledger": (
            "run_id VARCHAR, step INTEGER, episode_id VARCHAR, call_id VARCHAR, outcome VARCHAR,"
            " tokens INTEGER"
        ),
        "trained": (
            "run_id VARCHAR, step INTEGER, episode_id VARCHAR, call_id VARCHAR, advantages FLOAT[],"
            " logprobs FLOAT[], entropy FLOAT[]"
        ),
        "feedback": (
            "feedback_id VARCHAR, episode_id VARCHAR, call_id VARCHAR, author VARCHAR, score"
            " DOUBLE, comment VARCHAR, correction VARCHAR, at TIMESTAMPTZ"
        ),
        "pictures": (
            "digest VARCHAR, media_type VARCHAR, width INTEGER, height INTEGER, data BLOB"
        ),
    }.items()
}
"""Table -> column -> type. There are also `meta(schema_version, batch)`, where `batch` counts
committed batches, and `digests(digest)`, with the digest of each row of these tables as written."""

TABLES = tuple(COLUMNS)

SAMPLED = "coalesce(len(c.output_ids), 0) + coalesce(c.cut_tokens, 0)"
"""SQL: number of tokens sampled in the call `c`."""

LAST_VERSION = "c.policy_version + coalesce(len(c.weight_updates), 0)"
"""SQL: the policy version that sampled the last token of the call `c`."""

WHOLE_CALLS = """
SELECT c.call_id, c.episode_id, c.index, c.agent, c.target_tag, c.trainable, c.model, c.policy_version,
  CASE WHEN c.messages_suffix IS NULL THEN c.request
       WHEN c.request = '{{}}' THEN ('{{"messages": ' || whole.messages || '}}')::JSON
       ELSE ('{{"messages": ' || whole.messages || ', ' || substr(c.request::VARCHAR, 2))::JSON END AS request,
  c.response,
  CASE WHEN c.messages_suffix IS NULL THEN NULL ELSE whole.messages::JSON END AS messages,
  CASE WHEN c.prompt_suffix IS NULL THEN NULL ELSE whole.prompt_ids END AS prompt_ids,
  c.output_ids, c.logprobs, c.finish_reason, c.started_at, c.ended_at, c.error, c.request_id, c.sampling, c.phase,
  c.parent_call_id, c.prefix_len, c.prefix_messages, c.extends_call_id,
  c.cut_tokens, c.pictures, c.weight_updates
FROM {calls} c, LATERAL (
  WITH RECURSIVE up(depth, parent, ids_left, messages_left, ids, messages) AS (
    SELECT 0, c.parent_call_id, c.prefix_len, c.prefix_messages,
      coalesce(c.prompt_suffix, []), coalesce(json_extract(c.messages_suffix, '$[*]'), [])
    UNION ALL
    SELECT up.depth + 1, a.parent_call_id, least(up.ids_left, a.prefix_len),
      least(up.messages_left, a.prefix_messages),
      coalesce(list_concat(a.prompt_suffix, a.output_ids), [])[1:greatest(up.ids_left - a.prefix_len, 0)],
      coalesce(json_extract(a.messages_suffix, '$[*]'), [])[1:greatest(up.messages_left - a.prefix_messages, 0)]
    FROM up JOIN {calls} a ON a.call_id = up.parent AND a.episode_id = c.episode_id
    WHERE up.ids_left > 0 OR up.messages_left > 0
  )
  SELECT flatten(list(ids ORDER BY depth DESC)) AS prompt_ids,
    '[' || array_to_string(flatten(list(messages ORDER BY depth DESC)), ', ') || ']' AS messages
  FROM up
) whole
"""
"""Each call of the table or CTE `calls` with its complete prompt and request.

A prompt is (parent's prompt || parent's output)[:prefix_len] || prompt_suffix, and its messages are
parent's messages[:prefix_messages] || messages_suffix. Filters on `episode_id` or `call_id` apply
to the recursion, so that reading one episode takes time for one.
"""

CALLS_FULL = f"CREATE OR REPLACE VIEW calls_full AS {WHOLE_CALLS.format(calls='calls')}"


def create_statements() -> list[str]:
    """SQL statements that create the tables of a trace file."""
    meta = [
        "CREATE TABLE meta (schema_version INTEGER, batch BIGINT)",
        f"INSERT INTO meta VALUES ({SCHEMA_VERSION}, 0)",
    ]
    columns = {
        t: ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS[t].items()) for t in TABLES
    }
    tables = [f"CREATE TABLE {table} ({listed})" for table, listed in columns.items()]
    return [*meta, *tables, "CREATE TABLE digests (digest UBIGINT)", CALLS_FULL]


def at_rest(table: str, database: str) -> str:
    """A SELECT of a table of an attached file at rest."""
    return f"SELECT {selected(table, tuple(COLUMNS[table]))} FROM {database}.main.{table}"


def selected(table: str, columns: Sequence[str]) -> str:
    """SQL list of a table's columns in a file at rest, where a `running` run was interrupted."""
    listed = [f'"{name}"' for name in columns]
    if table == "runs" and "status" in columns:
        listed[columns.index("status")] = "if(status = 'running', 'interrupted', status) AS status"
    return ", ".join(listed)


def every_column(table: str, known: Container[str]) -> str:
    """A SELECT of every column of a table, without FROM; unknown ones are NULL."""
    values = {
        name: f'"{name}"::{kind}' if name in known else f"NULL::{kind}"
        for name, kind in COLUMNS[table].items()
    }
    return "SELECT " + ", ".join(f'{value} AS "{name}"' for name, value in values.items())


def empty(table: str) -> str:
    """A SELECT of a table's columns without rows."""
    return f"{every_column(table, ())} WHERE false"
