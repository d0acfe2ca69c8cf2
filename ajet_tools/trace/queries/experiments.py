"""Many runs side by side: what differs in their configs, which differ by their seed only, and tasks over runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple, TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.paired import paired
from ajet_sdk.samples.prefixes import common_start
from ajet_tools.text.clean import flat_keys, short_ids
from ajet_tools.trace.queries.base import grouped, rows
from ajet_tools.trace.queries.runs import REWARDS, Curve, Panel, RunOverview

_IDENTITY = ("config_file", "ajet.experiment_name", "ajet.experiment_dir")
SEED = "ajet.trainer_common.seed"

Settings = dict[str, object]


def differing(reader: TraceReader, run_ids: Sequence[str]) -> dict[str, Settings]:
    """Of each run the settings that are not the same in all of them; None where one is not set."""
    sql = "SELECT run_id, config FROM runs WHERE run_id IN (SELECT unnest($1::VARCHAR[]))"
    configs = {
        row["run_id"]: dict(flat_keys(json.loads(row["config"] or "{}"))) for row in rows(reader, sql, [*run_ids])
    }
    keys = dict.fromkeys(key for config in configs.values() for key in config if key not in _IDENTITY)
    varied = [key for key in keys if len({json.dumps(c.get(key), sort_keys=True) for c in configs.values()}) > 1]
    return {run_id: {key: configs.get(run_id, {}).get(key) for key in varied} for run_id in run_ids}


@dataclass(frozen=True)
class Group:
    """Runs whose settings differ by the seed only."""

    name: str
    """What the names of its runs have in common: `lr=1e-4` of `lr=1e-4,seed=0` and `lr=1e-4,seed=1`."""
    settings: Settings
    runs: tuple[str, ...]
    of: str | None
    """Which mean reward the next three are of, by its name in `REWARDS`; None: the runs have none in common."""
    mean: float | None
    low: float | None
    """This and `high`: the 95 % interval of the mean from six runs on, else the least and the greatest."""
    high: float | None


def groups(runs: Sequence[RunOverview], settings: Mapping[str, Settings]) -> list[Group]:
    """The runs by their settings without the seed, the best first."""
    by_settings: dict[str, list[RunOverview]] = {}
    for run in runs:
        rest = {key: value for key, value in settings[run["run_id"]].items() if key != SEED}
        by_settings.setdefault(json.dumps(rest, sort_keys=True), []).append(run)
    result = [_group(json.loads(text), members) for text, members in by_settings.items()]
    return sorted(result, key=lambda group: -1e300 if group.mean is None else group.mean, reverse=True)


def _group(settings: Settings, runs: Sequence[RunOverview]) -> Group:
    ids, called = tuple(run["run_id"] for run in runs), _shared([run["name"] for run in runs])
    for name in ("last_val", "last_greedy", "last_train", *REWARDS):
        values = [value for run in runs if isinstance(value := run.get(name), float)]
        if len(values) == len(runs):
            test = paired(values)
            low, high = (min(values), max(values)) if test.low is None else (test.low, test.high)
            return Group(called, settings, ids, name, fmean(values), low, high)
    return Group(called, settings, ids, None, None, None, None)


def _shared(names: Sequence[str]) -> str:
    parts = [part for part in names[0].split(",") if all(part in name.split(",") for name in names)]
    start = common_start(min(names), max(names))
    return ",".join(parts) or names[0][:start].rstrip(" ,=-_") or names[0]


def seed_groups(runs: Sequence[RunOverview], settings: Mapping[str, Settings]) -> list[Group]:
    """The groups of runs with several seeds, the best first."""
    return [of for of in groups(runs, settings) if len({settings[run_id].get(SEED) for run_id in of.runs}) > 1]


def run_names(runs: Sequence[RunOverview]) -> dict[str, str]:
    """What runs are called: their names where these tell them apart, else their ids too."""
    return _unique_names({run["run_id"]: run["name"] for run in runs})


def names_of_runs(reader: TraceReader) -> dict[str, str]:
    """Those of all runs of a trace."""
    return _unique_names({row["run_id"]: row["name"] or "" for row in rows(reader, "SELECT run_id, name FROM runs")})


def _unique_names(names: Mapping[str, str]) -> dict[str, str]:
    ids, count = short_ids([*names]), [*names.values()].count
    return {id: name if name and count(name) == 1 else f"{name} {ids[id]}" for id, name in names.items()}


class TaskReward(TypedDict):
    """A task's mean reward at a step of a run."""

    task_id: str
    task: str
    run_id: str
    step: int
    split: str
    decoding: str
    reward: float
    attempts: int


def task_rewards(reader: TraceReader, run_ids: Sequence[str], task_id: str | None = None) -> list[TaskReward]:
    """Mean rewards by task, run and step, the first step first: of validations and sampled attempts where there are."""
    sql = """
        WITH value AS (SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY ALL)
        SELECT task_id, coalesce(nullif(any_value(task->>'$.main_query'), ''), task_id) AS task, run_id,
          coalesce(step, 0) AS step, coalesce(split, '') AS split, coalesce(decoding, '') AS decoding,
          avg(reward) AS reward, count(*) AS attempts
        FROM episodes JOIN value USING (episode_id)
        WHERE run_id IN (SELECT unnest($1::VARCHAR[])) AND status = 'succeeded' AND NOT superseded
          AND split IS DISTINCT FROM 'trial' AND ($2::VARCHAR IS NULL OR task_id = $2)
        GROUP BY task_id, run_id, step, split, decoding ORDER BY step, task_id"""
    listed: list[TaskReward] = rows(reader, sql, [*run_ids], task_id)
    kinds: dict[str, tuple[str, str]] = {}
    for row in listed:  # val before train, sampled before greedy
        kinds[row["run_id"]] = max(kinds.get(row["run_id"], ("", "")), (row["split"], row["decoding"]))
    return [row for row in listed if kinds[row["run_id"]] == (row["split"], row["decoding"])]


class TaskRow(NamedTuple):
    """The mean rewards of a task, by run or by step."""

    task_id: str
    task: str
    rewards: dict[str | int, float]


def by_task(rewards: Sequence[TaskReward], column: Literal["run_id", "step"]) -> list[TaskRow]:
    """A row a task: of each run the last step, or of one run each step; where they differ most first."""
    table: dict[str, TaskRow] = {}
    for row in rewards:  # by step: the last one stays
        table.setdefault(row["task_id"], TaskRow(row["task_id"], row["task"], {})).rewards[row[column]] = row["reward"]
    return sorted(table.values(), key=lambda row: min(row.rewards.values()) - max(row.rewards.values()))


class Standing(TypedDict):
    """How a run does at a task: mean rewards of its last step, of its first, and of its best."""

    run: str
    """What the run is called."""
    reward: float
    attempts: int
    """At the last step."""
    step: int
    first: float | None
    """None where the last step is the only one."""
    best: float
    at: int
    """The first step with the best mean."""
    of: str
    """Which attempts these are, `val sampled` or another kind."""
    run_id: str


def leaderboard(reader: TraceReader, runs: Sequence[RunOverview], task_id: str) -> list[Standing]:
    """Who solves a task best: of each run that attempted it the last step, the best first, of equals the newest."""
    names = run_names(runs)
    steps = grouped(task_rewards(reader, [*names], task_id), lambda row: row["run_id"])
    table = [_standing(names[run_id], steps[run_id]) for run_id in names if run_id in steps]
    return sorted(table, key=lambda standing: standing["reward"], reverse=True)


def _standing(name: str, steps: Sequence[TaskReward]) -> Standing:
    """`steps` are one run's at one task, the first step first."""
    last, best = steps[-1], max(steps, key=lambda row: row["reward"])
    return {
        "run": name,
        "reward": last["reward"],
        "attempts": last["attempts"],
        "step": last["step"],
        "first": steps[0]["reward"] if len(steps) > 1 else None,
        "best": best["reward"],
        "at": best["step"],
        "of": kind_of(last),
        "run_id": last["run_id"],
    }


def kind_of(row: TaskReward) -> str:
    """Which attempts a mean is of: `train`, `val greedy`."""
    return " ".join(filter(None, (row["split"], row["decoding"])))


def reward_panel(rewards: Sequence[TaskReward], names: Mapping[str, str]) -> Panel:
    """The mean reward by step, a curve a run."""
    totals: dict[tuple[str, int], list[float]] = {}
    for row in rewards:
        total = totals.setdefault((row["run_id"], row["step"]), [0.0, 0.0])
        total[0] += row["reward"] * row["attempts"]
        total[1] += row["attempts"]
    means = {key: total / attempts for key, (total, attempts) in totals.items()}
    points = {run_id: [(step, mean) for (of, step), mean in means.items() if of == run_id] for run_id in names}
    kinds = sorted({kind_of(row) for row in rewards})
    curves = tuple(Curve(names[run_id], of) for run_id, of in points.items() if of)
    return Panel(f"mean reward ({', '.join(kinds)})", curves)
