"""Loggers of a run's metrics: trace, console, tensorboard, wandb, swanlab, and a PNG of the
learning curve."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting import html, output
from ajet_sdk.reporting.advice import installed_advice
from ajet_sdk.reporting.held_out import (
    compare,
    drop_message,
    dropped,
    task_rewards,
)
from ajet_sdk.reporting.notices import STEPS, discarded, selective, unstable
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.reporting.trackers import TRACKERS, TrackedRun, Tracker
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Metric, Outcome

if TYPE_CHECKING:
    import pyarrow as pa

    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

log = logging.getLogger("ajet")

_QUIET = 30.0
"""Seconds between progress lines without a terminal."""

_SHOWN = ("val/reward", "val/greedy_reward", "val/loss")
_KNOWN = ("console", *TRACKERS)


class Loggers(AbstractContextManager["Loggers"]):
    """Logs metrics by step to the trace and to the loggers in `names`.

    Trackers get the run's name, project and config from its row in the trace. Raises ConfigError
    for an unknown name or an unreachable service, MissingExtra for an absent package.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        directory: Path,
        run_id: str,
        writer: TraceWriter,
        total_steps: int,
    ) -> None:
        for name in names:
            if name not in _KNOWN:
                raise ConfigError(
                    f"trainer_common.logger: {name!r} is unknown; choose from {', '.join(_KNOWN)}"
                )
        self.history: dict[str, dict[int, float]] = defaultdict(dict)
        self.last: dict[str, float] = {}
        """The newest value of each metric."""
        self._warned: dict[str, int] = {}
        """Step from which to repeat a warning, by metric."""
        self.unstable = ""
        """A message about a metric that left its range in the newest steps, or empty."""
        self.best_by: Literal["val/reward", "val/loss"] = "val/reward"
        """Metric that selects the best step: highest reward, or lowest loss."""
        self.advice = installed_advice()
        self._run_id = run_id
        self._writer = writer
        self._directory = directory
        self.display = Display(total_steps) if "console" in names else None
        self._trackers: list[Tracker] = []
        for name in names:
            if name in TRACKERS:
                try:
                    self._trackers.append(Tracker(name, self._describe_run(), self.say))
                except BaseException as error:
                    self.close(error)
                    raise

    @classmethod
    def of(cls, job: Job, writer: TraceWriter, total_steps: int) -> Loggers:
        common = job.config.trainer_common
        directory = job.directory / "metrics"
        loggers = cls(
            common.logger,
            directory=directory,
            run_id=job.run_id,
            writer=writer,
            total_steps=total_steps,
        )
        if "rise" in common.stop_when:
            loggers.best_by = "val/loss"
        else:
            loggers.best_by = "val/reward"
        return loggers

    def _describe_run(self) -> TrackedRun:
        """Reads the run from the trace, whose config has no secrets."""
        self._writer.flush()
        [row] = self._writer.query(
            "SELECT name, config FROM runs WHERE run_id = ?", [self._run_id]
        ).to_pylist()
        config = json.loads(row["config"])
        return TrackedRun(
            self._run_id, config["ajet"]["project_name"], row["name"], config, self._directory
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, without non-finite values, which stores treat
        differently."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.last |= finite
        for name, value in finite.items():
            self.history[name][step] = value
        for tracker in self._trackers:
            tracker.log(step, finite)
        self._writer.put(
            *(Metric(run_id=self._run_id, step=step, name=n, value=v) for n, v in finite.items())
        )
        if self.display is not None:
            self.display.metrics(step, finite)
        self._warn(step)

    def _warn(self, step: int) -> None:
        """Print warnings; those about a rising reward, which persist, again when the run is twice
        as long."""
        signs = self.advice.warning_signs(self.history) if self.advice else {}
        for name, text in signs.items():
            text = f"{text}; inspect some episodes: does the judge reward what you want?"
            self._warn_once(step, name, text, pause=max(2 * STEPS, step))
        warnings = unstable(self.history)
        self.unstable = next(iter(warnings.values()), "")
        newest = sorted(self.history.get("train/tokens_trained", {}))[-STEPS:]
        values = {
            outcome: self.history.get(f"train/tokens_{outcome}", {})
            for outcome in get_args(Outcome)
        }
        tokens = {outcome: sum(of.get(at, 0.0) for at in newest) for outcome, of in values.items()}
        warnings["discarded"] = discarded(tokens)
        warnings["selective"] = selective(self.history.get("train/length_of_trained", {}))
        for name, text in warnings.items():
            self._warn_once(step, name, text)

    def _warn_once(self, step: int, name: str, text: str, pause: int = 2 * STEPS) -> None:
        """Print a warning, and repeat it only after `pause` steps."""
        if text and step >= self._warned.get(name, step):
            self._warned[name] = step + pause
            log.warning("step %d: %s", step, text)

    def advise_on_gap(self, step: int, gap: float, service: str) -> None:
        """Print what makes sampler and trainer disagree, if they do; `gap` is the step's mean."""

        def query(sql: str, parameters: Sequence[object]) -> pa.Table:
            self._writer.flush()
            return self._writer.query(sql, parameters)

        if self.advice and (text := self.advice.on_gap(query, self._run_id, step, gap, service)):
            self.say(f"step {step}: {text}")

    def held_out(self, step: int, sets: Mapping[str, set[str]], *, greedy: bool = False) -> bool:
        """Print warnings about a validation; return whether a set, or all tasks, fell since the
        first.

        `sets`: ids of validation tasks by the name of their set. `greedy`: compare greedy attempts,
        not sampled ones.
        """
        validated = self.history["val/reward"]
        first = min(validated, default=step)
        if first >= step:
            return False
        with open_trace(self._directory.parent, writer=self._writer) as trace:
            before, after = task_rewards(trace, self._run_id, first, step, greedy=greedy)
            sound = task_rewards(trace, self._run_id, first, step, greedy=greedy, sound=True)
            if self.advice:
                signal = self.advice.without_signal(trace, self._run_id)
            else:
                signal = ""
        fell = dropped(before, after, sets)
        failing = dropped(*sound, sets)
        carried = ""
        if self.advice:
            rewards = self.history["train/reward"]
            change = compare(before, after)
            carried = self.advice.not_carried_over(rewards, change, step)
        drop = drop_message(fell, first)
        failures = drop_message(failing, first, "the share of sound validation episodes")
        for name, text in {
            "drop": drop,
            "failures": failures,
            "signal": signal,
            "carry": carried,
        }.items():
            self._warn_once(step, name, text)
        return bool(fell or failing)

    def say(self, text: str) -> None:
        if self.display is not None:
            self.display.say(text)

    def best_step(self) -> int | None:
        """The step with the best validation so far, or the newest of equal ones; None before the
        first."""
        sign = -1 if self.best_by == "val/loss" else 1
        values = self.history[self.best_by]
        return max(values, key=lambda step: (sign * values[step], step), default=None)

    def tuned(
        self, path: Path | None, directory: Path, saved: Mapping[int, Path] = MappingProxyType({})
    ) -> TunedModel:
        """Print and return the model at `path` with the logged metrics.

        `directory` is the experiment's; `saved` are checkpoints by step, that of step 0 is the
        model at the start.
        """
        booked = (
            "SELECT outcome, sum(tokens)::BIGINT AS tokens FROM ledger WHERE run_id = ? GROUP BY"
            " outcome"
        )
        with open_trace(directory, writer=self._writer) as trace:
            rows = trace.query(booked, [self._run_id]).to_pylist()
        best = self.best_step()
        validated = self.history[self.best_by]
        tuned = TunedModel(
            path,
            dict(self.last),
            self._run_id,
            history={name: dict(values) for name, values in self.history.items()},
            directory=directory,
            outcomes={row["outcome"]: int(row["tokens"]) for row in rows},
            best=path if best is None or best == max(validated) else saved.get(best),
        )
        if path is not None:
            self.say(
                f"{'trained model' if tuned.trained_tokens else 'no update was made; model'} saved"
                f" to {path}"
            )
        return tuned

    def close(self, error: BaseException | None = None) -> None:
        """Flush everything and draw the learning curve. `error`: the cause of an early end."""
        if self.display is not None:
            self.display.stop()
        for tracker in self._trackers:
            tracker.finish(error)
        try:
            if (drawn := html.learning_curve(self.history)) is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
                (self._directory / "learning_curve.png").write_bytes(drawn)
        except OSError as lost:
            log.warning("The learning curve could not be drawn: %s", lost)

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.close(error)


class Display:
    """The console: a line for each step, and the progress of its episodes: on a terminal a bar with
    the time left, otherwise a line every `_QUIET` seconds."""

    def __init__(self, total_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._total = total_steps
        self._width = len(str(total_steps))
        self._started = self._begun = self._told = time.perf_counter()
        self._first_step: int | None = None
        self.console = output.console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=1, left="")
        self._progress.start()

    def begin(self, title: str, episodes: int) -> None:
        """Start counting the episodes of a step or a validation."""
        self._progress.reset(self._task, total=episodes, description=title)
        self._begun = self._told = time.perf_counter()

    def advance(self, episodes: int = 1) -> None:
        self._progress.advance(self._task, episodes)
        now = time.perf_counter()
        of = self._progress.tasks[0]
        if self._progress.disable and of.completed < (of.total or 0) and now - self._told >= _QUIET:
            self._told = now
            spent = f"{of.completed:.0f} of {of.total:.0f} in {_duration(now - self._begun)}"
            self.say(f"{of.description}: {spent}")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the main metrics of a step and estimate the time left."""
        if not metrics.keys().isdisjoint({"train/reward", "train/loss"}):
            first = self._first_step = step - 1 if self._first_step is None else self._first_step
            if first == step - 1:
                self._started = time.perf_counter() - metrics.get("time/step", 0.0)
            spent = time.perf_counter() - self._started
            remaining = _duration(spent / (step - first) * (self._total - step))
            self._progress.update(self._task, left=f"{remaining} left")
            self.say(
                f"step {step:>{self._width}}/{self._total}  {_columns(metrics, _TRAIN)} "
                f" {remaining} left"
            )
        validation = {k: v for k, v in metrics.items() if k.startswith("val/")}
        if validation:
            names = [n for n in validation if n in _SHOWN or n.startswith("val/pass@")]
            shown = [(n, n.removeprefix("val/").replace("_", " "), "{:.3f}") for n in names]
            self.say(
                f"step {step:>{self._width}}/{self._total}  validation: {_columns(metrics, shown)}"
            )
            for name, values in _by_set(validation).items():
                self.say(f"{'':{2 * self._width + 8}}{name}: {values}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def stop(self) -> None:
        self._progress.stop()


_TRAIN = [
    ("train/reward", "reward", "{:.3f}"),
    ("train/loss", "loss", "{:+.3f}"),
    ("train/replay_loss", "replay", "{:.3f}"),
    ("train/dpo_accuracy", "preferred", "{:.2f}"),
    ("train/teacher_kl", "teacher kl", "{:.3f}"),
    ("train/entropy", "entropy", "{:.2f}"),
    ("train/logprob_gap_max", "gap", "{:.1e}"),
    ("train/tokens_per_second", "tokens/s", "{:,.0f}"),
    ("cost/prefilled_tokens", "prefilled", "{:,.0f}"),
    ("cost/sampled_tokens", "sampled", "{:,.0f}"),
    ("cost/trained_tokens", "trained", "{:,.0f}"),
    ("cost/dollars", "$", "{:,.2f}"),
    ("time/step", "s", "{:.1f}"),
    ("train/hash", "hash", "{:.0f}"),
]


def _by_set(metrics: Mapping[str, float]) -> dict[str, str]:
    """Formats the rewards of validation sets, a line for each key:
    `family: a .500 (greedy .625)  b .…`."""
    lines: dict[str, list[str]] = defaultdict(list)
    for name, value in metrics.items():
        if name.startswith("val/reward/"):
            key, _, of = name.removeprefix("val/reward/").partition("=")
            greedy = metrics.get(f"val/greedy_reward/{key}={of}")
            lines[key].append(
                f"{of} {value:.3f}" + ("" if greedy is None else f" (greedy {greedy:.3f})")
            )
    return {key: "  ".join(values) for key, values in lines.items()}


def _columns(metrics: Mapping[str, float], wanted: Sequence[tuple[str, str, str]]) -> str:
    return "  ".join(
        f"{label} {form.format(metrics[name])}" for name, label, form in wanted if name in metrics
    )


def _duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds_left:02d}"
    return f"{minutes}:{seconds_left:02d}"
