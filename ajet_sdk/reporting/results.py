"""Results of `ajet.run` and `ajet.train`: a score, a trained model. Both have a readable `repr`.

`to_arrow()` converts either to a table for pandas, polars and DuckDB.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.config.model_source import separate_targets
from ajet_sdk.reporting import html, output
from ajet_sdk.reporting.notices import discarded
from ajet_sdk.rollout.outcomes import failure_messages, failures_by_cause, pass_at_k, solved
from ajet_sdk.trace.counted import counted_rewards
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 40
"""Rows of a printed table; `to_arrow` has all."""


def view_command(directory: Path) -> str:
    """The command that shows a run: the viewer if it is installed, else the list of episodes."""
    return f"ajet trace {'view' if find_spec('textual') else 'ls'} {directory}"


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


@dataclass(frozen=True)
class TaskScore:
    """Attempts at a task."""

    task: Task
    episodes: tuple[Episode, ...]
    failure_reward: float | None = None
    """`rollout.failure_reward` of the run."""

    @property
    def reward(self) -> float | None:
        """Mean over the attempts that count; None without rewards."""
        return _mean(counted_rewards(self.episodes, self.failure_reward))

    @property
    def uncounted(self) -> int:
        """Number of attempts that the mean leaves out."""
        return len(self.episodes) - len(counted_rewards(self.episodes, self.failure_reward))

    @property
    def solved(self) -> int:
        """Number of attempts that solved the task."""
        return sum(map(solved, self.episodes))

    @property
    def failed(self) -> int:
        """Number of attempts without a reward."""
        return sum(e.status != "succeeded" for e in self.episodes)

    def pass_at(self, k: int) -> float | None:
        """pass@k. The agent's failures count as attempts; None if infrastructure failures left
        fewer than k."""
        counted = [e for e in self.episodes if not e.infrastructure]
        if len(counted) >= k:
            return pass_at_k(len(counted), sum(map(solved, counted)), k)
        return None


@dataclass(frozen=True, repr=False)
class Report:
    """Score of an agent, by task and overall. The traces are in `directory`."""

    run_id: str
    directory: Path
    tasks: tuple[TaskScore, ...]
    k: int = 1

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """Every attempt, task by task."""
        return tuple(episode for score in self.tasks for episode in score.episodes)

    @property
    def reward(self) -> float | None:
        """Mean over tasks of their mean reward; None without rewards."""
        return _mean(score.reward for score in self.tasks)

    @property
    def pass_at(self) -> dict[int, float]:
        """pass@1 to pass@k, each averaged over tasks with enough attempts."""
        means = {k: _mean(score.pass_at(k) for score in self.tasks) for k in range(1, self.k + 1)}
        return {k: mean for k, mean in means.items() if mean is not None}

    @property
    def failures(self) -> list[str]:
        """A line for each cause of failure."""
        return failures_by_cause(self.episodes)

    @property
    def notices(self) -> list[str]:
        """Notices about the reliability of the score."""
        messages = failure_messages(self.episodes, cause=False)
        used = [
            call.sampling.get("temperature")
            for e in self.episodes
            for call in e.calls
            if call.phase == "rollout"
        ]
        if self.k > 1 and used and all(temperature == 0 for temperature in used):
            messages.append(
                f"all calls were sampled at temperature 0, so pass@{self.k} equals pass@1"
            )
        return messages

    def to_arrow(self) -> pa.Table:
        """A row for each episode: task_id, question, attempt, reward, status, is_success, output,
        error, tokens, …"""
        import pyarrow as pa

        return pa.Table.from_pylist(list(self._rows()), schema=pa.schema(_COLUMNS))

    def _rows(self) -> Iterator[dict[str, object]]:
        for score in self.tasks:
            for episode in score.episodes:
                text = episode.output
                yield {
                    "task_id": score.task.task_id,
                    "question": _question(score.task),
                    "attempt": episode.attempt,
                    "reward": episode.reward,
                    "status": episode.status,
                    "is_success": episode.is_success,
                    "output": (
                        text
                        if text is None or isinstance(text, str)
                        else json.dumps(text, default=str)
                    ),
                    "error": episode.error,
                    "calls": len(episode.calls),
                    "tokens": sum(
                        len(c.output_ids) for c in episode.calls if c.output_ids is not None
                    ),
                    "seconds": (episode.ended_at - episode.started_at).total_seconds(),
                    "episode_id": episode.episode_id,
                    "run_id": self.run_id,
                }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the printed table, with the first tasks."""
        rows = []
        for score in self.tasks[:SHOWN]:
            question = " ".join(_question(score.task).split())
            values = ["failed" if e.reward is None else f"{e.reward:.3g}" for e in score.episodes]
            rows.append(
                [
                    score.task.task_id[:12],
                    question if len(question) <= 40 else question[:39] + "…",
                    " ".join(values[:8]) + (" …" if len(values) > 8 else ""),
                    "-" if score.reward is None else f"{score.reward:.3g}",
                    f"{score.solved}/{len(score.episodes)}",
                ]
            )
        return ["task", "question", "rewards", "mean", "solved"], rows

    def summary(self) -> str:
        """The score as one line."""
        if self.reward is None:
            return (
                f"No episode has a reward: {_count(self.episodes, 'episode')} of"
                f" {_count(self.tasks, 'task')}"
            )
        passed = "".join(f", pass@{k} {value:.4g}" for k, value in self.pass_at.items())
        counted = f"{_count(self.tasks, 'task')}, {_count(self.episodes, 'episode')}"
        without = sum(score.uncounted for score in self.tasks)
        if without:
            scored = sum(score.reward is not None for score in self.tasks)
            counted = (
                f"the {len(self.episodes) - without} of {len(self.episodes)} episodes that have a"
                f" reward ({scored} of {len(self.tasks)} tasks)"
            )
        return f"Mean reward {self.reward:.4g} over {counted}{passed}"

    def __repr__(self) -> str:
        more, notes = self._notes()
        return output.visible(
            "\n".join([_text_table(*self.table()), *more, "", self.summary(), *notes])
        )

    def _notes(self) -> tuple[list[str], list[str]]:
        """Lines below the table, and lines below the summary."""
        more = len(self.tasks) - SHOWN
        where = f"Traces are in {self.directory}. To view them: ajet trace ls {self.directory}"
        return (
            (
                [f"… and {more} more tasks: ajet trace show {self.directory} has all"]
                if more > 0
                else []
            ),
            [*self.failures, *self.notices, where],
        )

    def _repr_html_(self) -> str:
        more, notes = self._notes()
        table = html.paragraph(self.summary(), bold=True) + html.table(*self.table())
        return table + html.paragraph("\n".join(more + notes))


_COLUMNS = {
    "task_id": "string", "question": "string", "attempt": "int64", "reward": "float64", "status": "string",
    "is_success": "bool", "output": "string", "error": "string", "calls": "int64", "tokens": "int64",
    "seconds": "float64", "episode_id": "string", "run_id": "string",
}  # fmt: skip


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _question(task: Task) -> str:
    messages = task.init_messages
    return task.main_query or (str(messages[-1].get("content", "")) if messages else "")


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    file = io.StringIO()
    output.console(file=file, width=140).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


_CURVES = ("val/reward", "val/greedy_reward", "train/reward")
"""Metrics of the learning curve, the most important first."""


@dataclass(frozen=True, repr=False)
class TunedModel:
    """A trained model: a Hugging Face checkpoint (`path`) and its training metrics."""

    path: Path | None
    """None if nothing was trained (`debug`)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    run_id: str = ""
    episodes: Sequence[Episode] = ()
    """The episodes of a run that trains nothing (`debug`); empty otherwise: they are in the
    trace."""
    history: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Each metric's values by step."""
    directory: Path | None = None
    """The experiment's directory, with the trace, the logs and the checkpoints."""
    outcomes: Mapping[str, int] | None = None
    """Sampled tokens by their outcome in the ledger; None if nothing was trained (`debug`)."""
    best: Path | None = None
    """The checkpoint with the best validation: `path`, an earlier one, or the initial model; None
    if it was deleted."""

    @property
    def trained_tokens(self) -> int | None:
        """Sampled tokens that were trained on; if 0, `path` is the initial model."""
        if self.outcomes is None:
            return None
        return self.outcomes.get("trained", 0)

    @property
    def serve_command(self) -> str:
        """The command that serves the best model; of separate models, that of the first target."""
        best = self.best or self.path
        targets = None if best is None else separate_targets(best)
        return f"ajet serve {best / targets[0] if best and targets else best}"

    @property
    def is_unchanged(self) -> bool:
        """Whether the exported model has the weights that training began with."""
        return self.path is not None and self.trained_tokens == 0

    def warning(self) -> str:
        """A warning if sampled tokens were not trained, no update was made, or the validation fell;
        else empty."""
        return "\n".join(filter(None, (discarded(self.outcomes or {}), self._result_warning())))

    def _result_warning(self) -> str:
        if self.is_unchanged:
            return (
                f"no update was made: {self.path} holds the weights that training began with. "
                f"`ajet trace ledger {self.directory}` lists why no token was trained"
            )
        values = self.history.get("val/reward", {})
        if len(values) < 2 or values[max(values)] >= values[min(values)]:
            return ""
        first = min(values)
        last = max(values)
        best = max(values, key=lambda step: (values[step], step))
        start = "start" if first == 0 else "first validation"
        return (
            f"worse than the {start}; best was step {best} (val/reward {values[first]:.3f} at step"
            f" {first}, {values[last]:.3f} at step"
            f" {last}{f', {values[best]:.3f} at step {best}' if best != first else ''})"
        )

    def to_arrow(self) -> pa.Table:
        """The learning curve: a row for each step, a column for each metric, null where a step has
        no value."""
        import pyarrow as pa

        steps = sorted({step for values in self.history.values() for step in values})
        columns = {
            name: [values.get(step) for step in steps]
            for name, values in sorted(self.history.items())
        }
        return pa.table(
            {
                "step": pa.array(steps, pa.int64()),
                **{n: pa.array(v, pa.float64()) for n, v in columns.items()},
            }
        )

    def __repr__(self) -> str:
        name = "Model" if self.trained_tokens == 0 else "Trained model"
        lines = [
            (
                f"{name}: {self.path}"
                if self.path is not None
                else "No model: this backbone does not train"
            )
        ]
        for name in _CURVES:
            points = sorted(self.history.get(name, {}).items())
            if points:
                (first, before), (last, after) = points[0], points[-1]
                lines.append(f"  {name} {before:.3f} → {after:.3f} (step {first} → {last})")
        if self.episodes:
            rewards = [e.reward for e in self.episodes if e.reward is not None]
            if rewards:
                mean = f"mean reward {sum(rewards) / len(rewards):.3g}"
            else:
                mean = "no reward"
            lines.append(f"  {len(self.episodes)} episodes, {mean}")
        if self.directory is not None:
            lines.append(f"View with:  {view_command(self.directory)}")
        if self.path is not None:
            lines.append(f"Serve with: {self.serve_command}")
        if warning := self.warning():
            lines.append(warning)
        return output.visible("\n".join(lines))

    def _repr_html_(self) -> str:
        return html.picture(html.learning_curve(self.history)) + html.paragraph(repr(self))
