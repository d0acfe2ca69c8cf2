"""The results of `tests.library`: kept as JSON, compared between versions, and written as a page
with pictures."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import ajet
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.whole_file import write_whole

LEAST_CHANGE = 0.02
"""Of a mean reward: a smaller loss is no regression."""


@dataclass(frozen=True)
class Point:
    """One validation: mean held-out reward sampled and greedy, and what the training steps so far
    cost.

    `seconds` are those of the steps alone, `tokens` and `episodes` those sampled for training.
    """

    step: int
    reward: float
    greedy: float | None
    seconds: float
    tokens: int
    episodes: int


@dataclass(frozen=True)
class Record:
    """One run: its curve, and what the whole process took, the making of the model and validations
    included."""

    task: str
    backbone: str
    version: str
    seed: int
    overrides: tuple[str, ...]
    machine: str
    python: str
    date: str
    seconds: float
    cpu_seconds: float
    memory_gib: float
    curve: tuple[Point, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """A later run with the same key replaces this one."""
        return (self.task, self.backbone, self.version, self.overrides, self.seed)

    def summary(self) -> str:
        first, last = self.curve[0], self.curve[-1]
        return (
            f"reward {first.reward:.3f} → {last.reward:.3f} in {last.step} steps,"
            f" {self.cpu_seconds:,.0f} CPU-s"
        )

    def row(self) -> dict[str, object]:
        """The result as a row of a table."""
        first, last = self.curve[0], self.curve[-1]
        return {
            "task": self.task,
            "backbone": self.backbone,
            "version": self.version,
            "seed": self.seed,
            "reward": f"{first.reward:.3f} → {last.reward:.3f}",
            "greedy": last.greedy,
            "steps": last.step,
            "tokens": last.tokens,
            "CPU-s": round(self.cpu_seconds),
            "GiB": self.memory_gib,
            "overrides": " ".join(self.overrides),
        }


class Library:
    """The tasks of a directory of examples, each with the configs that are trained one after the
    other, and the results of the last: its `bench.json`."""

    def __init__(self, file: Path, tasks: dict[str, list[str]], records: list[Record]) -> None:
        self.file, self.directory, self.tasks, self.records = file, file.parent, tasks, records

    @classmethod
    def open(cls, directory: Path) -> Library:
        """Raises ConfigError where the directory has no bench.json, or one that cannot be read."""
        file = directory / "bench.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                file,
                content["tasks"],
                TypeAdapter(list[Record]).validate_python(content["records"]),
            )
        except FileNotFoundError:
            raise ConfigError(
                f"{file} does not exist. Run this in a clone of the repository, or name the"
                " examples: --library DIR"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} does not contain results of the library: {error}") from error

    def keep(self, record: Record) -> None:
        """Store a result, in place of one with the same key."""
        by_key = {stored.key: stored for stored in self.records} | {record.key: record}
        self.records = [by_key[key] for key in sorted(by_key)]
        text = json.dumps(
            {"tasks": self.tasks, "records": [asdict(stored) for stored in self.records]}, indent=1
        )
        write_whole(self.file, text + "\n")

    @property
    def others(self) -> list[str]:
        """The other versions with results, the newest last."""
        return sorted({r.version for r in self.records} - {ajet.__version__}, key=_order)

    def version(self, wanted: str) -> str:
        """The version named by `last` or a version number. Raises ConfigError if it has no
        results."""
        if wanted == "last" and self.others:
            return self.others[-1]
        if wanted in {record.version for record in self.records}:
            return wanted
        known = ", ".join(self.others) or "none"
        raise ConfigError(f"{self.file} has no results of {wanted}; versions: {known}")


def _order(version: str) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in version.split(".")]


@dataclass(frozen=True)
class Comparison:
    """The mean reward of one task after its last step, in another version and in this one, and its
    cost."""

    task: str
    backbone: str
    other_version: str
    seeds: tuple[int, ...]
    other: float
    now: float
    error: float | None
    cpu_ratio: float

    @property
    def worse(self) -> bool:
        """Lower by more than twice the standard error of the difference, and by more than 0.02."""
        return self.other - self.now > max(LEAST_CHANGE, 2 * (self.error or 0.0))

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "worse": self.worse}

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.3f}"
        verdict = "worse" if self.worse else "not worse"
        return (
            f"{self.task} ({self.backbone}, seeds {' '.join(map(str, self.seeds))}): reward"
            f" {self.other:.3f} in {self.other_version}, {self.now:.3f} now"
            f" ({self.now - self.other:+.3f}{error}), {self.cpu_ratio:.2f} × its CPU time:"
            f" {verdict}"
        )


def compared(records: Sequence[Record], version: str) -> list[Comparison]:
    """Each task that both versions have results of, paired by seed. Raises ConfigError where there
    is none."""
    comparisons = []
    for task, backbone, overrides in sorted({(r.task, r.backbone, r.overrides) for r in records}):
        same = [
            r for r in records if (r.task, r.backbone, r.overrides) == (task, backbone, overrides)
        ]
        then = {r.seed: r for r in same if r.version == version}
        now = {r.seed: r for r in same if r.version == ajet.__version__}
        seeds = tuple(sorted(then.keys() & now.keys()))
        if not seeds:
            continue
        changes = [now[s].curve[-1].reward - then[s].curve[-1].reward for s in seeds]
        comparisons.append(
            Comparison(
                task=task,
                backbone=backbone,
                other_version=version,
                seeds=seeds,
                other=statistics.fmean(then[s].curve[-1].reward for s in seeds),
                now=statistics.fmean(now[s].curve[-1].reward for s in seeds),
                error=statistics.stdev(changes) / math.sqrt(len(seeds)) if len(seeds) > 1 else None,
                cpu_ratio=sum(now[s].cpu_seconds for s in seeds)
                / sum(then[s].cpu_seconds for s in seeds),
            )
        )
    if not comparisons:
        raise ConfigError(
            f"no task was measured with the same seed in both {version} and {ajet.__version__}"
        )
    return comparisons


MADE = "<!-- Generated by `python -m tests.library --no-run --report docs`; do not edit. -->"


def page(library: Library) -> str:
    """The Markdown page of all results."""
    parts = [
        "# The example library as a benchmark",
        MADE,
        (
            "Each row is one run: a task, a backbone, a version and a seed. The model is made from"
            " scratch from the seed, then trained by the real agent. Rewards are means over"
            " held-out tasks at temperature 1, at the steps of the run's validations. Tokens are"
            " those sampled for training. CPU seconds and memory are those of the whole process,"
            " including the making of the model and the validations. `python -m tests.library` runs"
            " the benchmark, and `python -m tests.library --compare last` compares with the"
            " previous release. Results are in `tutorial/bench.json`; add a line there for a new"
            " task."
        ),
    ]
    for task, configs in library.tasks.items():
        records = [r for r in library.records if r.task == task]
        parts.append(f"## {task}")
        parts.append(", then ".join(f"`ajet --conf tutorial/{config}`" for config in configs))
        parts += _results(task, records) if records else ["Not measured yet."]
    return "\n\n".join(parts) + "\n"


def _results(task: str, records: Sequence[Record]) -> Iterator[str]:
    yield f"![{task}: held-out reward by step and by sampled tokens](pictures/bench-{task}.svg)"
    steps = sorted({point.step for record in records for point in record.curve})
    head = [
        "version",
        "backbone",
        "seed",
        *(f"step {step}" for step in steps),
        "greedy, after",
        "tokens",
        "CPU-s",
        "GiB",
    ]
    rows = []
    for record in records:
        by_step = {point.step: point for point in record.curve}
        rewards = [f"{by_step[step].reward:.3f}" if step in by_step else "" for step in steps]
        greedy = record.curve[-1].greedy
        rows.append(
            [
                record.version,
                ", ".join([record.backbone, *record.overrides]),
                str(record.seed),
                *rewards,
                "" if greedy is None else f"{greedy:.3f}",
                f"{record.curve[-1].tokens:,}",
                f"{record.cpu_seconds:,.0f}",
                f"{record.memory_gib:.2f}",
            ]
        )
    yield "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
    machines = sorted({f"{r.machine}, Python {r.python}, {r.date}" for r in records})
    yield f"Machines: {'; '.join(machines)}."


def write_report(library: Library, directory: Path) -> list[Path]:
    """Write `bench.md` and a picture of each task's curves. Raises MissingExtra without
    matplotlib."""
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    written = [directory / "bench.md"]
    written[0].write_text(page(library), encoding="utf-8")
    for task in library.tasks:
        if records := [r for r in library.records if r.task == task]:
            written.append(directory / "pictures" / f"bench-{task}.svg")
            written[-1].write_bytes(_picture(task, records))
    return written


def _picture(task: str, records: Sequence[Record]) -> bytes:
    """Reward by step and by sampled tokens, a line per run; the same results give the same
    bytes."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "local") from None
    with matplotlib.rc_context({"svg.hashsalt": task, "font.size": 9}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes: Any = figure.subplots(1, 2, sharey=True)
        for record in records:
            label = f"{record.version} {record.backbone}, seed {record.seed}"
            rewards = [point.reward for point in record.curve]
            axes[0].plot(
                [point.step for point in record.curve],
                rewards,
                marker="o",
                markersize=3,
                label=label,
            )
            axes[1].plot(
                [point.tokens for point in record.curve], rewards, marker="o", markersize=3
            )
        for axis, name in zip(axes, ("optimizer step", "sampled tokens"), strict=True):
            axis.set_xlabel(name)
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("held-out reward")
        axes[0].legend(loc="lower right", frameon=False)
        written = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None})
    return written.getvalue()
