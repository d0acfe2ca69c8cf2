"""`ajet run`: scores an agent over tasks, and advises how to train it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from ajet_sdk import run as sdk
from ajet_sdk.config.config import Config
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.reporting.results import Report, TaskScore
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Episode, Task
from ajet_tools.cli.arguments import (
    AgentAndOverrides,
    AgentOptions,
    HeldOutTasks,
    MostTasks,
    Tasks,
    split_arguments,
)
from ajet_tools.cli.result import HIDDEN, TextResult
from ajet_tools.dataset.calibrate import ScoredRows, content_key, task_of_row, write_scored
from ajet_tools.dataset.curation.descent import marked_rows
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.text.clean import counted

_NEARLY_ALL = 0.95
"""pass@1 above which little is left to learn."""
_FEW = 0.25
"""With a smaller share of tasks with signal, most attempts of a step are useless."""
_MANY = 64
"""Number of unsuccessful attempts from which a task set is likely beyond the model."""


_ADVICE_ATTEMPTS = 8
_ADVICE_TASKS = 32


@dataclass(frozen=True)
class ScoredEpisode:
    episode_id: str
    attempt: int
    status: str
    reward: float | None
    is_success: bool | None
    error: str | None


@dataclass(frozen=True)
class ScoredTask:
    task_id: str
    main_query: str
    reward: float | None
    solved: int
    failed: int
    episodes: list[ScoredEpisode]


@dataclass(frozen=True)
class RunResult(TextResult):
    """Score of one set of tasks."""

    run_id: str
    directory: Path
    reward: float | None
    pass_at: dict[int, float]
    failures: list[str]
    notices: list[str]
    tasks: list[ScoredTask]
    scored: ScoredRows | None = None
    """The file of --out."""
    report: Report | None = field(default=None, metadata=HIDDEN)

    @property
    def exit_code(self) -> int:
        is_measured = self.scored is None or not self.scored.unmeasured
        if self.reward is not None and is_measured:
            return 0
        return 1

    @property
    def compact(self) -> bool:
        return self.scored is not None and self.scored.path == "-"

    def lines(self) -> Iterator[str]:
        yield str(self.report)
        yield from _scored_lines(self.scored)


@dataclass(frozen=True)
class SetScore:
    """Score of the training or the held-out tasks, for advice."""

    run_id: str
    reward: float | None
    pass_at: dict[int, float]
    failures: list[str]
    notices: list[str]
    tasks: int
    with_signal: int
    failed: int


@dataclass(frozen=True)
class AdviceResult(TextResult):
    """Scores of the training and held-out tasks, and how to train."""

    reports: dict[str, Report]
    directory: Path

    @property
    def exit_code(self) -> int:
        return int(all(report.reward is None for report in self.reports.values()))

    def document(self) -> object:
        scores = {name: _set_score(report) for name, report in self.reports.items()}
        return {**scores, "next": advice(self.reports)}

    def lines(self) -> Iterator[str]:
        yield from _advice_table(self.reports)
        for name, report in self.reports.items():
            for line in (*report.failures, *report.notices):
                yield f"{name}: {line}"
        steps = "\n      ".join(advice(self.reports))
        yield f"\nNext: {steps}"
        yield f"Traces are in {self.directory}"


def run(
    arguments: AgentAndOverrides = None,
    *,
    tasks: Tasks = None,
    val_tasks: HeldOutTasks = None,
    answering: AgentOptions,
    k: Annotated[int | None, Option("--attempts", "-k", min=1, show_default=False)] = None,
    limit: MostTasks = None,
    out: Annotated[str | None, Option("--out", "-o", metavar="FILE|-")] = None,
    advise: Annotated[bool, Option("--advise")] = False,
) -> RunResult | AdviceResult:
    """Run an agent over tasks and score it; nothing is trained.

    With --out, each task's row is written with metadata.pass_rate (of its attempts) and
    metadata.difficulty (1 minus that); a row whose attempts the endpoint or the judge spoiled goes
    to OUT.rejected.jsonl, with the reason. With --val-tasks or --advise, training and held-out tasks
    are scored, and the training that fits the scores is named: a task has signal if its attempts
    differ in reward, and reinforcement learning learns from those only. Exit code 1 if no attempt
    has a reward, or a row of --out no measurement.

    Args:
        k: Attempts per task, for pass@k. Default: 1, for advice 8.
        out: File for the rows of --tasks with their measured difficulty.
        advise: Score the first 32 training and held-out tasks, and say how to train.

    \b
    ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --model NAME@http://127.0.0.1:8000/v1 -k 4
    ajet run agent.py:solve --judge math --tasks tasks.jsonl --model PATH
    ajet run agent.py:solve --judge exact --tasks tasks.jsonl \\
      --model replies.py:reply --limit 3
    ajet run --conf job.yaml --tasks tasks.jsonl -k 8 --out scored.jsonl
    ajet dataset filter scored.jsonl "metadata.pass_rate between 0.1 and 0.9" \\
      --out fit.jsonl
    ajet run --conf job.yaml --advise -k 16 --limit 64
    """
    agent, overrides = split_arguments(arguments or [])
    if answering.conf is None and agent is None:
        raise ConfigError(
            "no agent given: name it (agent.py:solve) or pass a config file (--conf FILE)"
        )
    if answering.conf is None and tasks is None:
        raise ConfigError("no tasks given: pass --tasks tasks.jsonl")
    more: dict[str, object] = {}
    if tasks is not None and val_tasks is None:
        # Named tasks replace the validation tasks of the config file.
        more["task_reader.jsonl_dataset_file.validation"] = {"file_path": None}
    config = answering.config(agent, overrides, tasks=tasks, val_tasks=val_tasks, more=more)
    if advise or val_tasks is not None:
        if out is not None:
            raise ConfigError(
                "--out is for the rows of one set: leave out --val-tasks and --advise"
            )
        return _run_both(config, k or _ADVICE_ATTEMPTS, limit or _ADVICE_TASKS)
    rows = None if out is None else _rows(tasks, out, config, limit)
    if rows is not None:
        # rows with one question are run once and measured together
        chosen = list({content_key(task): task for _, task in rows}.values())
    else:
        sets = load_tasks(config)
        chosen = (sets.train if tasks is not None or not sets.val else sets.val)[:limit]
    k = k or 1
    with ProgressBar("Episodes", len(chosen) * k) as bar:
        report = sdk.run(config, tasks=chosen, k=k, on_episode=lambda episode: bar.advance())
    scored = None
    if rows is not None and out is not None:
        scored = write_scored(rows, report, out)
    return _result(report, scored)


def _rows(tasks: str | None, out: str, config: Config, limit: int | None) -> list[tuple[Row, Task]]:
    """Reads the rows of --tasks, whose other columns --out keeps."""
    if tasks is None:
        raise ConfigError("--out writes the rows of --tasks: name their file")
    mapping = config.task_reader.field_mapping
    rows: list[tuple[Row, Task]] = []
    for row in marked_rows(Rows(tasks), out):
        if limit is not None and len(rows) == limit:
            break
        rows.append((row, task_of_row(row.where, row.values, mapping)))
    if not rows:
        raise ConfigError(f"{tasks} has no rows to run")
    return rows


def _scored_lines(scored: ScoredRows | None) -> list[str]:
    if scored is None:
        return []
    if scored.path == "-":
        lines = []
    else:
        lines = [f"{counted(scored.rows, 'row')} to {scored.path}"]
    for reason, count in scored.unmeasured.most_common(5):
        lines.append(f"  {counted(count, 'row')} {reason}")
    if scored.rejected_path is not None:
        lines.append(f"  rows without a measurement are in {scored.rejected_path}")
    return lines


def _result(report: Report, scored: ScoredRows | None) -> RunResult:
    return RunResult(
        run_id=report.run_id,
        directory=report.directory,
        reward=report.reward,
        pass_at=report.pass_at,
        failures=report.failures,
        notices=report.notices,
        tasks=[_scored_task(score) for score in report.tasks],
        scored=scored,
        report=report,
    )


def _scored_task(score: TaskScore) -> ScoredTask:
    return ScoredTask(
        task_id=score.task.task_id,
        main_query=score.task.main_query,
        reward=score.reward,
        solved=score.solved,
        failed=score.failed,
        episodes=[_scored_episode(episode) for episode in score.episodes],
    )


def _scored_episode(episode: Episode) -> ScoredEpisode:
    return ScoredEpisode(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        status=episode.status,
        reward=episode.reward,
        is_success=episode.is_success,
        error=episode.error,
    )


def _run_both(config: Config, k: int, limit: int) -> AdviceResult:
    """Scores training and held-out tasks."""
    if not config.is_set("rollout.temperature"):
        # Attempts that are sampled greedily can't differ.
        sampled = config.rollout.model_copy(update={"temperature": 1.0})
        config = config.model_copy(update={"rollout": sampled})
    sets = load_tasks(config)
    reports: dict[str, Report] = {}
    for name, all_tasks in (("training", sets.train), ("held-out", sets.val)):
        if all_tasks:
            reports[name] = _score(config, name, all_tasks[:limit], k)
    return AdviceResult(reports, config.directory)


def _score(config: Config, name: str, tasks: Sequence[Task], k: int) -> Report:
    with ProgressBar(f"{name} episodes", len(tasks) * k) as bar:
        return sdk.score_tasks(
            config,
            tasks,
            k=k,
            of_validation=name == "held-out",
            on_episode=lambda episode: bar.advance(),
        )


def _set_score(report: Report) -> SetScore:
    return SetScore(
        run_id=report.run_id,
        reward=report.reward,
        pass_at=report.pass_at,
        failures=report.failures,
        notices=report.notices,
        tasks=len(report.tasks),
        with_signal=_count_with_signal(report),
        failed=sum(score.failed for score in report.tasks),
    )


def _count_with_signal(report: Report) -> int:
    count = 0
    for score in report.tasks:
        count += len({episode.reward for episode in score.episodes} - {None}) > 1
    return count


def _advice_table(reports: Mapping[str, Report]) -> list[str]:
    k = max(report.k for report in reports.values())
    rows: list[tuple[str, ...]] = [
        ("", "tasks", "reward", "pass@1", f"pass@{k}", "with signal", "failed")
    ]
    for name, report in reports.items():
        shown = [f"{report.pass_at[n]:.3f}" if n in report.pass_at else "-" for n in (1, k)]
        if report.reward is None:
            reward = "-"
        else:
            reward = f"{report.reward:.3f}"
        failed = f"{sum(score.failed for score in report.tasks)} of {len(report.episodes)}"
        signal = f"{_count_with_signal(report)} of {len(report.tasks)}"
        rows.append((name, str(len(report.tasks)), reward, *shown, signal, failed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return lines


def advice(reports: Mapping[str, Report]) -> list[str]:
    """Returns advice from the scores of training tasks and held-out tasks, if any."""
    train = reports["training"]
    held_out = reports.get("held-out")
    if train.reward is None:
        return ["make the agent run: no attempt has a reward. See the failures above"]
    first = train.pass_at.get(1, 0.0)
    best = max(train.pass_at.values(), default=0.0)
    signal = _count_with_signal(train)
    steps = [_first_step(train, first, best, signal)]
    if held_out is None:
        steps.append(
            "pass --val-tasks: without held-out tasks nothing shows whether what is learnt carries"
            " over"
        )
    elif best and held_out.pass_at and not max(held_out.pass_at.values()):
        steps.append(
            "the held-out tasks are never solved, the training tasks are: they are harder or of"
            " another kind, so expect no gain there unless training tasks like them are added"
            " (`ajet dataset expand`)"
        )
    return steps


def _first_step(train: Report, first: float, best: float, signal: int) -> str:
    attempts = len(train.episodes)
    count = len(train.tasks)
    always = sum(score.solved == len(score.episodes) for score in train.tasks)
    alike = f"{always} always solved, {count - signal - always} never"
    if first >= _NEARLY_ALL:
        return f"harder tasks: {first:.0%} of attempts solve theirs already"
    if not signal and always:
        return (
            f"no task has signal ({alike}), so reinforcement learning has nothing to learn from:"
            " raise rollout.temperature (attempts sampled alike cannot differ), or add tasks of medium"
            " difficulty (`ajet run --out`)"
        )
    if not signal:
        sure = ""
        if attempts < _MANY:
            sure = f" ({attempts} attempts are few: confirm it with a larger -k)"
        return (
            "demonstrations, easier tasks or a larger model: no attempt solved its task, so"
            f" reinforcement learning has nothing to learn from{sure}. Train on demonstrations"
            " first (ajet.trainer_common.algorithm=sft), or let the judge give partial credit"
        )
    if signal < _FEW * count:
        if best > 0.5:
            more = ""
        else:
            more = "; demonstrations (ajet.trainer_common.algorithm=sft) bring more within reach"
        return (
            f"select tasks first (`ajet run --out`, `ajet dataset filter`): {signal} of {count} have signal"
            f" ({alike}){more}"
        )
    return (
        f"reinforcement learning (`ajet train`): {signal} of {count} tasks have signal; what"
        f" pass@{train.k} solves and pass@1 does not ({best:.3f} against {first:.3f}) is what it"
        " can reach soon"
    )
