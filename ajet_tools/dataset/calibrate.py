"""Measures difficulty by pass@k: how often a model solves each task, in ordinary runs of an agent.

`metadata.pass_rate` is the share of k attempts that the judge counts as solved,
`metadata.difficulty` is 1 minus that; the rest of a row is unchanged. The resolution of a rate is
1/k: with k=8 and a true rate of one half, 0.25 to 0.75 are all likely. An agent's own failure
counts as unsolved. If infrastructure or the judge spoils an attempt, the row is not measured and is
set apart with the reason.

Measurements of trials (`ajet dataset expand --for`) are stored, and nothing is measured twice under
the same conditions: model, agent, judge, sampling and limits, number of attempts. The key is a hash
of these and the task's content. Agent and judge are hashed by the text of their file
(not of its imports), a local model by its files' names, sizes and times, an endpoint by its URL and
model name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ajet_sdk.config.config import Config
from ajet_sdk.engines.reply_cache import ReplyCache
from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.reporting.results import Report
from ajet_sdk.rollout.outcomes import solved
from ajet_sdk.tasks.task_rows import to_task
from ajet_sdk.types import Episode, Task
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.model.open import local_url

_ELSEWHERE = {
    "model": ("api_key_env", "scripted"),
    "rollout": ("user_workflow", "max_env_worker"),
    "task_judge": (),
}
"""Config keys without influence, or whose content is hashed instead."""


@dataclass(frozen=True)
class Measurement:
    """The result of all attempts at a task."""

    solved: int
    attempts: int
    reward: float
    """The mean reward."""

    @property
    def pass_rate(self) -> float:
        return self.solved / self.attempts


def conditions(config: Config, k: int) -> str:
    """Hashes everything besides the task that a measurement depends on."""
    values = config.model_dump(mode="json")
    facts: dict[str, Any] = {"k": k}
    for section, left_out in _ELSEWHERE.items():
        facts[section] = {
            name: value for name, value in values[section].items() if name not in left_out
        }
    named = (config.rollout.user_workflow, config.task_judge.judge_protocol, config.model.scripted)
    facts["code"] = [_code(config, class_path) for class_path in named if class_path]
    facts["task_judge"].pop("judge_protocol", None)
    if config.model.path and config.resolve(config.model.path).is_dir():
        facts["files"] = local_url(config.resolve(config.model.path))
    return _digest(facts)


def _code(config: Config, class_path: str) -> list[str]:
    """Returns the name, and a hash of its source file."""
    name = class_path.replace("->", ":").rpartition(":")[2]
    target = inspect.unwrap(config.load(class_path))
    target = target if inspect.isclass(target) or inspect.isroutine(target) else type(target)
    try:
        file = inspect.getsourcefile(target)
        text = Path(file).read_bytes() if file else class_path.encode()
    except (TypeError, OSError):  # built by a call, or in a shell: use its name
        text = class_path.encode()
    return [name, hashlib.blake2b(text, digest_size=16).hexdigest()]


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Measurements:
    """The measurements of trials, in a reply cache: nothing is measured twice under the same
    conditions."""

    PREFIX = "measured "

    def __init__(self, cache: ReplyCache, held_under: str) -> None:
        self.held_under = held_under
        self._cache = cache

    def _key(self, task: Task) -> str:
        return self.PREFIX + _digest([self.held_under, content_key(task)])

    def get(self, task: Task) -> Measurement | None:
        texts = self._cache.get(self._key(task))
        if isinstance(texts, list):
            return Measurement(**json.loads(texts[0]))
        return None

    def put(self, task: Task, measured: Measurement) -> None:
        """Stores a measurement. Raises CacheError."""
        self._cache.put(self._key(task), [json.dumps(asdict(measured))])


_SHORT = 300
_MODULE = re.compile(r"^(?:[a-z_]\w*\.)+(?=[A-Z]\w+:)")


@dataclass(frozen=True)
class Band:
    """A range of pass rates, inclusive."""

    low: float = 0.0
    high: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Band:
        """Parses `0.1:0.9`, `0.1:` or `:0.9`. Raises ConfigError."""
        low, colon, high = (part.strip() for part in text.partition(":"))
        try:
            band = cls(float(low) if low else 0.0, float(high) if high else 1.0)
        except ValueError:
            band = cls(1.0, 0.0)
        if not colon or not 0.0 <= band.low <= band.high <= 1.0:
            raise ConfigError(
                f"a range of pass rates is LOW:HIGH, from 0 to 1, such as 0.1:0.9 (got {text!r})"
            )
        return band

    def __contains__(self, rate: float) -> bool:
        return self.low - 1e-9 <= rate <= self.high + 1e-9

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


@dataclass
class ScoredRows:
    """Where the rows of a run's tasks were written, with their measured difficulty."""

    path: str
    rows: int = 0
    unmeasured: Counter[str] = field(default_factory=Counter)
    """Rows without a measurement, by reason."""
    rejected_path: str | None = None
    """File of the rows without a measurement."""


def content_key(task: Task) -> str:
    """Hashes a task; its id counts only if the task has no content."""
    content = task.model_dump(mode="json", exclude={"task_id"})
    if not any(content.values()):
        content = {"task_id": task.task_id}
    return _digest(content)


def write_scored(rows: Sequence[tuple[Row, Task]], report: Report, out: str) -> ScoredRows:
    """Writes rows with the difficulty that a run measured; rows without a measurement go to
    `OUT.rejected.jsonl`, with the reason.

    Raises TaskError if no row was measured.
    """
    measured: dict[str, Measurement] = {}
    reasons: dict[str, str] = {}
    for score in report.tasks:
        key = content_key(score.task)
        try:
            measured[key] = measurement(score.episodes)
        except Inconclusive as error:
            reasons[key] = str(error)
    if not measured:
        why = "; ".join(f"{n} × {reason}" for reason, n in Counter(reasons.values()).most_common(3))
        raise TaskError(f"none of the {len(rows)} rows could be measured: {why}")
    done = ScoredRows(out)
    rejected: list[dict[str, object]] = []
    with Writer(out) as writer:
        for row, task in rows:
            key = content_key(task)
            if key in measured:
                writer.write(with_difficulty(row.values, measured[key]))
            else:
                done.unmeasured[reasons[key]] += 1
                rejected.append({**row.values, "rejected": reasons[key]})
        done.rows = writer.rows
    if rejected and out != "-":
        path = Path(out)
        stem = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
        done.rejected_path = str(path.with_name(f"{stem}.rejected.jsonl"))
        with Writer(done.rejected_path) as writer:
            for values in rejected:
                writer.write(values)
    return done


def task_of_row(
    where: str, values: Mapping[str, object], mapping: Mapping[str, str] | None = None
) -> Task:
    """Returns the task of a row, measured or not. Raises TaskError.

    `mapping` is the job's `task_reader.field_mapping`.
    """
    bare = {name: value for name, value in values.items() if name != "provenance"}
    metadata = values.get("metadata")
    if isinstance(metadata, Mapping) and _has_calibration(
        metadata
    ):  # a repeated calibration has the same task
        bare["metadata"] = {
            n: value for n, value in metadata.items() if n not in ("pass_rate", "difficulty")
        }
    return to_task(Row(where, bare), mapping or {})


def _has_calibration(metadata: Mapping[str, Any]) -> bool:
    """Whether both values are from a calibration; a difficulty alone is the dataset's own."""
    rate = metadata.get("pass_rate")
    difficulty = metadata.get("difficulty")
    return (
        isinstance(rate, int | float)
        and isinstance(difficulty, int | float)
        and abs(1 - rate - difficulty) < 1e-5
    )


class Inconclusive(Exception):
    """Unusable attempts; the message has the reason."""


def measurement(episodes: Sequence[Episode]) -> Measurement:
    """Returns the result of all attempts at a task. Raises Inconclusive if one is unusable."""
    for why in filter(None, map(_reason_to_discard, episodes)):
        raise Inconclusive(why)
    reward = sum(episode.reward or 0.0 for episode in episodes) / len(episodes)
    return Measurement(sum(solved(episode) for episode in episodes), len(episodes), reward)


def _reason_to_discard(episode: Episode) -> str | None:
    if episode.status == "succeeded":
        return None
    error = _MODULE.sub("", (episode.error or "no message").strip().partition("\n")[0])[:_SHORT]
    calls = [call for call in episode.calls if call.phase == "rollout"]
    last = calls[-1].error if calls else None
    refused = (
        last is not None
        and not last.startswith("undelivered")
        and episode.cause != "ContextOverflow"
    )
    judged = error.startswith("judge ") or episode.cause == "NoReward"
    spoilt = episode.infrastructure or episode.status == "aborted" or refused or judged
    return f"not measured: {error}" if spoilt else None


def outside_band(measured: Measurement, keep: Band) -> str:
    side = "too hard" if measured.pass_rate < keep.low else "too easy"
    return f"{side}: solved in {measured.solved} of {measured.attempts} attempts"


def with_difficulty(values: Mapping[str, object], measured: Measurement) -> dict[str, Any]:
    """Sets `metadata.pass_rate` and, unless the row has its own, `metadata.difficulty`."""
    old_metadata = values.get("metadata")
    metadata = dict(old_metadata) if isinstance(old_metadata, Mapping) else {}
    ours = "difficulty" not in metadata or _has_calibration(metadata)
    metadata["pass_rate"] = round(measured.pass_rate, 6)
    if ours:
        metadata["difficulty"] = round(1 - measured.pass_rate, 6)
    return {**values, "metadata": metadata}
