"""Audits dumps of other trainers by importing them into a temporary trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import open_trace
from ajet_tools.text.clean import counted
from ajet_tools.trace.files.audit import Audit, Differs, Unchecked, audit, first_of_each_run
from ajet_tools.trace.imports import import_files
from ajet_tools.trace.queries.base import rows


@dataclass(frozen=True, slots=True)
class Dump:
    """Contents of a dump, and its errors."""

    formats: Mapping[str, str]
    """Format of each file."""
    episodes: int
    without_calls: int
    """Episodes without a recorded request."""
    calls: int
    unreadable: int
    """Rows with inconsistent tokens, masks, log-probabilities or spans, or of another format."""
    problems: Sequence[str]
    """Errors of the first unreadable rows."""
    audit: Audit
    splits: Sequence[str]
    """Prompts that extend no earlier call of their episode: no error, but trained twice."""

    @property
    def sound(self) -> bool:
        return not self.unreadable and not self.audit.differs


def audit_dump(files: Sequence[Path], tokenizer: Path | None = None) -> Dump:
    """Audit files with token ids. `tokenizer` is a directory or a `tokenizer.json`; without it,
    text is not compared.

    Raises ConfigError for an unknown format, files without token ids, or an invalid tokenizer, and
    TraceError for an unreadable file.
    """
    with TemporaryDirectory(prefix="ajet-audit-") as folder:
        path = Path(folder) / "dump.duckdb"
        done = import_files(files, path, skip_bad_rows=True)
        audited = audit(path, tokenizer=tokenizer)
        with open_trace(path) as reader:
            [sampled] = rows(reader, "SELECT count(*) AS n FROM calls WHERE output_ids IS NOT NULL")
            if not sampled["n"] and not done.bad_rows:
                raise ConfigError(
                    f"{', '.join(done.formats)}: no call has token ids, so there is nothing to"
                    " audit"
                )
            [silent] = rows(
                reader, "SELECT count(*) AS n FROM episodes ANTI JOIN calls USING (episode_id)"
            )
            centred = tuple(done.formats.values()) == ("tinker",) * len(done.formats)
            differs = [
                *audited.differs,
                *_advantages(reader, _ORDER),
                *(_advantages(reader, _SUM) if centred else ()),
            ]
            named = [
                replace(entry, row=_named(reader, entry.row, done.places)) for entry in differs
            ]
            splits = [
                _named(reader, row["id"], done.places) + row["shares"]
                for row in rows(reader, _SPLITS)
            ]
    unchecked = audited.unchecked
    if done.guessed:
        have = f"{counted(done.guessed, 'row')} {'has' if done.guessed == 1 else 'have'}"
        reason = (
            f"{have} neither mask, weights nor spans: tokens with an advantage are taken as the"
            " sampled ones"
        )
        unchecked = (Unchecked("what is trained", "", reason), *unchecked)
    result = replace(
        audited, differs=tuple(named), unchecked=unchecked, checks=audited.checks + 1 + centred
    )
    counts = done.episodes, silent["n"], done.calls, done.bad_rows
    return Dump(done.formats, *counts, done.problems, result, splits)


_MEANS = """
WITH means AS (
    SELECT t.run_id, coalesce(e.step, 0) AS step, e.group_id, e.episode_id, c.agent,
        avg(list_avg(advantages)) AS advantage, any_value(w.reward) AS reward
    FROM trained t JOIN episodes e USING (episode_id) JOIN calls c USING (call_id)
    LEFT JOIN (SELECT episode_id, agent, sum(weight * value) AS reward FROM rewards WHERE call_id IS NULL
        GROUP BY ALL) w
        ON w.episode_id = e.episode_id AND (w.agent IS NULL OR w.agent = c.agent)
    WHERE e.group_id <> '' GROUP BY ALL)"""
_ORDER = f"""{_MEANS}
SELECT a.run_id, a.episode_id, 'at least ' || b.advantage || ' for reward ' || a.reward
    || ', since another attempt of its group has that for ' || b.reward AS expected, a.advantage::VARCHAR
FROM means a JOIN means b USING (run_id, step, group_id, agent)
WHERE a.reward > b.reward AND a.advantage < b.advantage - 1e-5 ORDER BY a.step, group_id, a.episode_id"""
_SUM = f"""{_MEANS}
SELECT run_id, min(episode_id), 'a sum of 0 over the ' || count(*) || ' attempts of group ' || group_id,
    sum(advantage)::VARCHAR
FROM means GROUP BY run_id, step, group_id, agent
HAVING count(*) > 1 AND abs(sum(advantage)) > 1e-4 * (1 + max(abs(advantage))) ORDER BY step, group_id"""
_SPLITS = """
SELECT call_id AS id, ' shares ' || prefix_len || ' of the ' || (prefix_len + len(prompt_suffix))
    || ' tokens of its prompt with an earlier call' AS shares
FROM (SELECT *, min("index") OVER (PARTITION BY episode_id, agent) AS first FROM calls WHERE output_ids IS NOT NULL)
WHERE "index" > first AND extends_call_id IS NULL ORDER BY episode_id, "index" """


def _advantages(reader: TraceReader, sql: str) -> list[Differs]:
    return first_of_each_run(
        "advantages of a group", [tuple(row.values()) for row in rows(reader, sql)]
    )


def _named(reader: TraceReader, id: str, places: Mapping[str, str]) -> str:
    """Return the source row of a call or episode, or its id."""
    calls = rows(reader, 'SELECT episode_id, "index" AS i FROM calls WHERE call_id = ?', id)
    if calls and calls[0]["episode_id"] in places:
        return f"{places[calls[0]['episode_id']]}, call {calls[0]['i']}"
    return places.get(id, id)
