"""Compares many runs: differing settings, groups that differ only by seed, and rewards of tasks
across runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Literal, NamedTuple, TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.paired import paired
from ajet_sdk.samples.prefixes import common_start
from ajet_sdk.trace.counted import COUNTED
from ajet_tools.text.clean import flat_keys, short_ids
from ajet_tools.trace.queries.base import grouped, rows
from ajet_tools.trace.queries.runs import REWARDS, RunOverview

_IDENTITY = ("config_file", "ajet.experiment_name", "ajet.experiment_dir")
SEED = "ajet.trainer_common.seed"

Settings = dict[str, object]


def differing(reader: TraceReader, run_ids: Sequence[str]) -> dict[str, Settings]:
    """Return the settings that differ between runs, by run; None for a missing key."""
    sql = "SELECT run_id, config FROM runs WHERE run_id IN (SELECT unnest($1::VARCHAR[]))"
    configs = {
        row["run_id"]: dict(flat_keys(json.loads(row["config"] or "{}")))
        for row in rows(reader, sql, [*run_ids])
    }
    settings: dict[str, Settings] = {run_id: {} for run_id in run_ids}
    for key in dict.fromkeys(chain.from_iterable(configs.values())):
        texts = {json.dumps(config.get(key), sort_keys=True) for config in configs.values()}
        if key not in _IDENTITY and len(texts) > 1:
            for run_id in run_ids:
                settings[run_id][key] = configs.get(run_id, {}).get(key)
    return settings


@dataclass(frozen=True)
class Group:
    """Runs that differ only by seed."""

    name: str
    """Common part of the run names: `lr=1e-4` for `lr=1e-4,seed=0` and `lr=1e-4,seed=1`."""
    settings: Settings
    runs: tuple[str, ...]
    of: str | None
    """Name in `REWARDS` of the mean reward below; None if the runs share none."""
    mean: float | None
    low: float | None
    """`low` and `high`: the 95 % interval of the mean with six or more runs, otherwise minimum and
    maximum."""
    high: float | None


def groups(runs: Sequence[RunOverview], settings: Mapping[str, Settings]) -> list[Group]:
    """Group runs by their settings without the seed, best first."""
    by_settings: dict[str, list[RunOverview]] = {}
    for run in runs:
        rest = {key: value for key, value in settings[run["run_id"]].items() if key != SEED}
        by_settings.setdefault(json.dumps(rest, sort_keys=True), []).append(run)
    result = [_group(json.loads(text), members) for text, members in by_settings.items()]
    return sorted(
        result, key=lambda group: -1e300 if group.mean is None else group.mean, reverse=True
    )


def _group(settings: Settings, runs: Sequence[RunOverview]) -> Group:
    ids = tuple(run["run_id"] for run in runs)
    called = _shared([run["name"] for run in runs])
    for name in ("last_val", "last_greedy", "last_train", *REWARDS):
        values = [value for run in runs if isinstance(value := run.get(name), float)]
        if len(values) == len(runs):
            test = paired(values)
            low, high = (min(values), max(values)) if test.low is None else (test.low, test.high)
            return Group(called, settings, ids, name, fmean(values), low, high)
    return Group(called, settings, ids, None, None, None, None)


def _shared(names: Sequence[str]) -> str:
    common = set(names[0].split(",")).intersection(*(name.split(",") for name in names))
    parts = [part for part in names[0].split(",") if part in common]
    start = common_start(min(names), max(names))
    return ",".join(parts) or names[0][:start].rstrip(" ,=-_") or names[0]


def seed_groups(runs: Sequence[RunOverview], settings: Mapping[str, Settings]) -> list[Group]:
    """Return the groups with several seeds, best first."""
    several: list[Group] = []
    for group in groups(runs, settings):
        if len({settings[run_id].get(SEED) for run_id in group.runs}) > 1:
            several.append(group)
    return several


def run_names(runs: Sequence[RunOverview]) -> dict[str, str]:
    """Map run ids to display names: the run's name, followed by its id unless unique."""
    return _unique_names({run["run_id"]: run["name"] for run in runs})


def names_of_runs(reader: TraceReader) -> dict[str, str]:
    """Return the display names of all runs of a trace, as `run_names`."""
    return _unique_names(
        {row["run_id"]: row["name"] or "" for row in rows(reader, "SELECT run_id, name FROM runs")}
    )


def _unique_names(names: Mapping[str, str]) -> dict[str, str]:
    ids = short_ids([*names])
    count = [*names.values()].count
    return {
        id: name if name and count(name) == 1 else f"{name} {ids[id]}" for id, name in names.items()
    }


class TaskReward(TypedDict):
    """Mean reward of a task at a step of a run."""

    task_id: str
    task: str
    run_id: str
    step: int
    split: str
    decoding: str
    reward: float
    attempts: int


def task_rewards(
    reader: TraceReader, run_ids: Sequence[str], task_id: str | None = None
) -> list[TaskReward]:
    """Return mean rewards by task, run and step, in order of steps.

    For each run, validation attempts are preferred to training, and sampled to greedy.
    """
    sql = f"""
        SELECT task_id, coalesce(nullif(any_value(task->>'$.main_query'), ''), task_id) AS task, run_id,
          coalesce(step, 0) AS step, coalesce(split, '') AS split, coalesce(decoding, '') AS decoding,
          avg(reward) AS reward, count(*) AS attempts
        FROM episodes JOIN {COUNTED} counted USING (episode_id)
        WHERE run_id IN (SELECT unnest($1::VARCHAR[])) AND reward IS NOT NULL AND NOT superseded
          AND split IS DISTINCT FROM 'trial' AND ($2::VARCHAR IS NULL OR task_id = $2)
        GROUP BY task_id, run_id, step, split, decoding ORDER BY step, task_id"""
    listed: list[TaskReward] = rows(reader, sql, [*run_ids], task_id)
    kinds: dict[str, tuple[str, str]] = {}
    for row in listed:  # val before train, sampled before greedy
        kinds[row["run_id"]] = max(
            kinds.get(row["run_id"], ("", "")), (row["split"], row["decoding"])
        )
    return [row for row in listed if kinds[row["run_id"]] == (row["split"], row["decoding"])]


class TaskRow(NamedTuple):
    """Mean rewards of a task, by run or by step."""

    task_id: str
    task: str
    rewards: dict[str | int, float]


def by_task(rewards: Sequence[TaskReward], column: Literal["run_id", "step"]) -> list[TaskRow]:
    """Return a row per task, with each run's last step or all steps of one run; largest spread
    first."""
    table: dict[str, TaskRow] = {}
    for row in rewards:  # in order of steps: the last step of a run wins
        table.setdefault(row["task_id"], TaskRow(row["task_id"], row["task"], {})).rewards[
            row[column]
        ] = row["reward"]
    return sorted(
        table.values(), key=lambda row: min(row.rewards.values()) - max(row.rewards.values())
    )


class Standing(TypedDict):
    """Mean rewards of a run at a task: at its last, first and best step."""

    run: str
    """Display name of the run."""
    reward: float
    attempts: int
    """At the last step."""
    step: int
    first: float | None
    """None if there is only one step."""
    best: float
    at: int
    """The first step with the best mean."""
    of: str
    """Kind of attempts: `train`, `val greedy`, ..."""
    run_id: str


def leaderboard(reader: TraceReader, runs: Sequence[RunOverview], task_id: str) -> list[Standing]:
    """Rank the runs that attempted a task by the mean reward of their last step; ties by age,
    newest first."""
    table = list[Standing]()
    names = run_names(runs)
    by_run = grouped(task_rewards(reader, [*names], task_id), lambda row: row["run_id"])
    for run_id, name in names.items():
        if steps := by_run.get(run_id):
            last = steps[-1]
            best = max(steps, key=lambda row: row["reward"])
            standing = Standing(
                run=name,
                reward=last["reward"],
                attempts=last["attempts"],
                step=last["step"],
                first=steps[0]["reward"] if len(steps) > 1 else None,
                best=best["reward"],
                at=best["step"],
                of=" ".join(filter(None, (last["split"], last["decoding"]))),
                run_id=run_id,
            )
            table.append(standing)
    return sorted(table, key=lambda standing: standing["reward"], reverse=True)
