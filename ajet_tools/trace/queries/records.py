"""Episodes with feedback, ledger and trained tokens, their change markers, and advantages
recomputed from rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import arrays_of, calls_of, episodes
from ajet_sdk.types import Episode, Feedback, Json, JsonView, LedgerEntry, Trained, now
from ajet_tools.trace.queries.base import among, grouped, rows
from ajet_tools.trace.queries.episodes import attempts_of, step_of

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Record:
    """An episode with the requested feedback, ledger entries and trained tokens."""

    episode: Episode
    """With its calls. An unfinished episode has nothing else and counts to the newest run."""
    ended: bool = True
    feedback: tuple[Feedback, ...] = ()
    ledger: tuple[LedgerEntry, ...] = ()
    trained: tuple[Trained, ...] = ()
    """In order of steps."""
    superseded: bool = False
    redacted: Mapping[str, int] = field(default_factory=dict)
    """Number of redacted values by kind."""

    @property
    def scores(self) -> dict[str, Trained]:
        """Trained tokens of the last step, by call."""
        return {trained.call_id: trained for trained in self.trained}

    @property
    def advantage(self) -> float | None:
        """Mean advantage of the trained tokens; None if there are none, or none recorded."""
        return mean_of([scores.advantages for scores in self.scores.values()])


def mean_of(values: Sequence[_Floats]) -> float | None:
    """Return the mean over all finite values, or None without any."""
    known = [array[np.isfinite(array)] for array in values]
    if any(array.size for array in known):
        return float(np.concatenate(known).mean())
    return None


def records_of(
    reader: TraceReader,
    ids: Sequence[str],
    *,
    whole: bool = False,
    feedback: bool = False,
    trained: bool = False,
) -> list[Record]:
    """Read records in the order of `ids`; `whole` reads all parts of a record, and unfinished
    episodes too."""
    ids = list(dict.fromkeys(ids))
    known = {e.episode_id: e for e in episodes(reader, episode_ids=ids, superseded=True)}
    remarks = {}
    if feedback or whole:
        remarks = _by_episode(reader, Feedback, "feedback", ids, '"at", feedback_id')
    booked = {}
    if whole:
        booked = _by_episode(reader, LedgerEntry, "ledger", ids, "step, call_id, outcome")
    scored = {}
    if trained or whole:
        scored = _by_episode(reader, Trained, "trained", ids, "step, call_id")
    condition, named = among("episode_id", ids)
    sql = f"SELECT episode_id FROM episodes WHERE superseded AND {condition}"
    if whole:
        superseded = {row["episode_id"] for row in rows(reader, sql, *named)}
    else:
        superseded = set()
    return [
        Record(
            known.get(episode_id) or _running(reader, episode_id),
            episode_id in known,
            tuple(remarks.get(episode_id, ())),
            tuple(booked.get(episode_id, ())),
            tuple(scored.get(episode_id, ())),
            episode_id in superseded,
        )
        for episode_id in ids
        if episode_id in known or whole
    ]


def known_records(reader: TraceReader, ids: Sequence[str]) -> list[Record]:
    """Read whole records. Raises QueryError for an unknown episode."""
    records = records_of(reader, ids, whole=True)
    for record in records:
        if not record.ended and not record.episode.calls:
            raise QueryError(
                f"the trace has no episode {record.episode.episode_id}; `ajet trace ls` lists them"
            )
    return records


_Model = TypeVar("_Model", Feedback, LedgerEntry, Trained)


def _by_episode(
    reader: TraceReader, model: type[_Model], table: str, ids: Sequence[str], order: str
) -> dict[str, list[_Model]]:
    condition, named = among("episode_id", ids)
    listed = reader.query(f"SELECT * FROM {table} WHERE {condition} ORDER BY {order}", named)
    columns = [arrays_of(c) if pa.types.is_list(c.type) else c.to_pylist() for c in listed.columns]
    fields = (
        dict(zip(listed.column_names, values, strict=True)) for values in zip(*columns, strict=True)
    )
    return grouped(map(model.model_validate, fields), lambda record: record.episode_id)


def _running(reader: TraceReader, episode_id: str) -> Episode:
    """Make an episode from calls alone; they don't name their run, so the newest run is assumed."""
    calls = tuple(calls_of(reader, episode_id))
    newest = rows(
        reader, "SELECT run_id FROM runs ORDER BY status = 'running' DESC, started_at DESC LIMIT 1"
    )
    return Episode(
        episode_id=episode_id,
        run_id=newest[0]["run_id"] if newest else "",
        calls=calls,
        started_at=min((call.started_at for call in calls), default=now()),
        ended_at=max((call.ended_at for call in calls), default=now()),
    )


def feedback_of(reader: TraceReader, episode_id: str, call_id: str | None = None) -> list[Feedback]:
    """Return the feedback on an episode and its calls, or on a single call, oldest first."""
    listed = _by_episode(reader, Feedback, "feedback", [episode_id], '"at", feedback_id').get(
        episode_id, []
    )
    return [feedback for feedback in listed if call_id is None or feedback.call_id == call_id]


def attempt_rewards(reader: TraceReader, episode_ids: Sequence[str]) -> list[float | None]:
    """Return the reward of each episode, or None, in order."""
    sql = (
        "SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE list_contains($1,"
        " episode_id)"
    )
    known = {
        row["episode_id"]: row["reward"]
        for row in rows(reader, f"{sql} GROUP BY ALL", list(episode_ids))
    }
    return [known.get(episode_id) for episode_id in episode_ids]


class Pulse(NamedTuple):
    """State of an episode in a trace, equal as long as nothing has been added to it."""

    calls: int
    feedback: int
    running: bool
    """The episode is unfinished, and a run is active."""
    ended: int
    superseded: bool
    group_id: str | None
    booked: int = 0
    """Ledger entries; this and `attempts` are counted after the end of the episode."""
    attempts: int = 0


def episode_pulse(reader: TraceReader, episode_id: str) -> Pulse:
    """Read the state of an episode, cheaply enough for polling: ledger and group only after its
    end."""
    [row] = rows(
        reader,
        """
        SELECT (SELECT count(*) FROM calls WHERE episode_id = $1) AS calls,
          (SELECT count(*) FROM feedback WHERE episode_id = $1) AS feedback,
          (SELECT count(*) > 0 FROM runs WHERE status = 'running') AS running, ended.*
        FROM (SELECT count(*) AS ended, coalesce(bool_or(superseded), false) AS superseded,
                any_value(group_id) AS group_id
              FROM episodes WHERE episode_id = $1) ended""",
        episode_id,
    )
    # ledger and group are written after the end
    if not row["ended"]:
        return Pulse(**row)
    [after] = rows(
        reader,
        """
        SELECT (SELECT count(*) FROM ledger WHERE episode_id = $1) AS booked,
          (SELECT count(*) FROM episodes WHERE group_id = $2 AND group_id <> '') AS attempts""",
        episode_id,
        row["group_id"],
    )
    return Pulse(**{**row, **after, "running": False})


def mark_of(reader: TraceReader, *episode_ids: str) -> tuple[int, ...]:
    """Count the rows of episodes in the tables of a trace, as a cheap way to detect changes."""
    sql = " UNION ALL ".join(
        f"SELECT {i} AS i, count(*) AS n FROM {table} WHERE list_contains($1, episode_id)"
        for i, table in enumerate(("calls", "episodes", "rewards", "ledger", "trained"))
    )
    return tuple(row["n"] for row in rows(reader, f"FROM ({sql}) ORDER BY i", list(episode_ids)))


def recomputed_advantages(reader: TraceReader, *episode_ids: str) -> dict[str, _Floats]:
    """Recompute the advantages of trainable calls, by token, from stored rewards and the config of
    the run.

    For old files and foreign trainers, which record none; the step may have used different values,
    so callers label these as recomputed. Calls that would not be trained are missing, tokens beyond
    the length limits are NaN. Raises ConfigError for an unknown estimator.
    """
    recomputed: dict[str, _Floats] = {}
    done: set[str] = set()
    for episode_id in episode_ids:
        if episode_id not in done:
            compared, settings = _compared(reader, episode_id)
            done |= {episode_id, *(episode.episode_id for episode in compared)}
            recomputed |= _of_compared(reader, compared, settings)
    return recomputed


def _compared(reader: TraceReader, episode_id: str) -> tuple[list[Episode], Json]:
    """Return the group (or step) over which an episode's advantage is computed, and the settings of
    `build`."""
    run_rows = rows(
        reader,
        "SELECT run_id, config FROM runs WHERE run_id IN (SELECT run_id FROM episodes WHERE"
        " episode_id = $1)",
        episode_id,
    )
    settings = {}
    if run_rows:
        settings = _settings(json.loads(run_rows[0]["config"] or "{}").get("ajet") or {})
    of_step = settings.get("estimator") == "reinforce_plus_plus"
    if of_step:
        ids = step_of(reader, episode_id)
    else:
        ids = attempts_of(reader, episode_id)
    return episodes(reader, episode_ids=ids, superseded=True), settings


def _of_compared(
    reader: TraceReader, compared: Sequence[Episode], settings: Json
) -> dict[str, _Floats]:
    if not compared or settings.pop("use_kl_in_reward", False):  # the trace has no KL values
        return {}
    batch = build(compared, policy_version=trained_version(reader, compared[0]), **settings)
    lengths: dict[str, int] = {}
    for call in chain.from_iterable(episode.calls for episode in compared):
        if call.output_ids is not None:
            lengths[call.call_id] = len(call.output_ids)
    recomputed: dict[str, _Floats] = {}
    for sample in batch.samples:
        for span in sample.timeline.spans:
            whole = np.full(lengths[span.call_id], np.nan, np.float32)
            whole[: span.end - span.start] = sample.advantages[span.start : span.end]
            recomputed[span.call_id] = whole
    return recomputed


def _settings(config: JsonView) -> Json:
    """Map a recorded config to the arguments of `build`."""
    algorithm = (config.get("trainer_common") or {}).get("algorithm") or {}
    rollout = config.get("rollout") or {}
    options = {
        "estimator": algorithm.get("adv_estimator"),
        "normalize_std": algorithm.get("normalize_std"),
        "use_kl_in_reward": algorithm.get("use_kl_in_reward"),
        "max_staleness": rollout.get("max_staleness"),
        "max_tokens": rollout.get("max_model_len"),
        "failure_reward": rollout.get("failure_reward"),
        "overlong_filtering": (
            rollout.get("overlong_filtering")
            and algorithm.get("adv_estimator") not in ("sft", "dpo", "opd")
        ),
        "gamma": rollout.get("gamma"),
        "max_samples": (rollout.get("multi_turn") or {}).get("max_sample_per_task"),
        "max_lengths": tuple(
            (config.get("data") or {}).get(f"max_{part}_length") for part in ("prompt", "response")
        ),
    }
    return {name: value for name, value in options.items() if value is not None}


def trained_version(reader: TraceReader, episode: Episode) -> int | None:
    """Return the policy version trained by an episode's step: the last one before it, or else the
    newest that sampled.

    Validation and trial episodes belong to the version after their step.
    """
    matches = rows(
        reader,
        """
        SELECT coalesce(
            (SELECT arg_max(value, step)::INTEGER FROM metrics
             WHERE run_id = $1 AND name = 'train/policy_version' AND (step < $2 OR step = $2 AND $3 <> 'train')),
            (SELECT max(policy_version) FROM calls WHERE episode_id IN
                (SELECT episode_id FROM episodes WHERE run_id = $1 AND step = $2 AND split = $3))) AS version""",
        episode.run_id,
        episode.step,
        episode.split,
    )
    version: int | None = matches[0]["version"]
    return version
