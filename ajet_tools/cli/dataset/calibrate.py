"""`ajet dataset calibrate`: measures the difficulty of tasks for a model, and keeps a range."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import ProgressBar, echo
from ajet_tools.cli.arguments import AgentOptions
from ajet_tools.cli.dataset.options import Out, RowOptions, Source, check_apart, counted
from ajet_tools.cli.options import pick
from ajet_tools.dataset.calibrate import Band, Calibration
from ajet_tools.dataset.calibrate import calibrate as measure
from ajet_tools.dataset.curation.descent import marked_rows
from ajet_tools.dataset.files.tables import read

_BAR = 40
"""Columns of the longest bar."""


def calibrate(
    file: Source,
    *,
    out: Out,
    workflow: Annotated[str | None, Option("--workflow", "-w", metavar="AGENT")] = None,
    k: Annotated[int, Option("--attempts", "-k", min=1, max=1000, help="Attempts per task.")] = 8,
    band: Annotated[str | None, Option(metavar="LOW:HIGH")] = None,
    answering: AgentOptions,
    concurrency: Annotated[
        int | None, Option(min=1, help="Maximum number of episodes run concurrently.")
    ] = None,
    rejected: Path | None = None,
    measurements: Path | None = None,
    rows: RowOptions,
) -> None:
    """Measure how often a model solves each task, and keep tasks within a range.

    Each row gets `metadata.pass_rate` (of k attempts) and `metadata.difficulty` (1 minus that).
    Rows outside the range, and rows that could not be measured, go to a separate file with the
    reason. Tasks already measured with the same model, agent, judge, k and content are skipped:
    after Ctrl-C or a crash, repeat the command.

    Args:
        workflow: agent.py:solve or package.module->Name.
        band: Keep rows whose pass rate is in this range: 0.1:0.9, 0.1:, :0.9.
        rejected: File for the other rows, with the reason [OUT.rejected.jsonl; .parquet beside Parquet].
        measurements: File of measurements to read and extend [OUT.measured.jsonl].

    \b
    ajet dataset calibrate tasks.jsonl --workflow agent.py:solve \\
      --judge agent.py:exact -k 8 --base-url http://127.0.0.1:8000/v1 \\
      --model NAME --band 0.1:0.9 --out fit.jsonl
    ajet dataset calibrate tasks.jsonl -w agent.py:solve --judge math \\
      --model launcher_record/math/checkpoint/RUN/step_40 --out measured.jsonl
    ajet dataset calibrate tasks.jsonl -w agent.py:solve --judge exact \\
      --scripted replies.py:reply -k 4 --out - | jq .metadata.pass_rate
    """
    kept_band = Band.parse(band) if band else None
    if answering.conf is None and workflow is None:
        raise ConfigError(
            "no agent given: pass --workflow agent.py:solve, or a --conf FILE that names one"
        )
    config = answering.config(workflow, more={"rollout.max_env_worker": concurrency})
    measured = list(
        marked_rows(read(file, mapping=rows.columns, bad=rows.bad), str(file), str(out))
    )
    if not measured:
        raise ConfigError(f"{file} has no rows to measure")
    rejected, measurements = (
        rejected or _beside(out, "rejected"),
        measurements or _beside(out, "measured"),
    )
    check_apart(out=out, rejected=rejected, measurements=measurements)
    try:
        with ProgressBar("Episodes") as bar:
            done = measure(
                measured,
                config,
                out,
                k=k,
                keep=kept_band,
                rejected=rejected,
                measurements=measurements,
                on_start=lambda total: bar.update(0, total),
                on_episode=lambda episode: bar.advance(),
            )
    except KeyboardInterrupt:
        if measurements is not None and measurements.exists():
            echo(
                f"Measurements are in {measurements}; run the same command again to continue",
                err=True,
            )
        raise
    summary = {
        **pick(done, "rows", "tasks", "known", "k", "kept", "outside"),
        "unmeasured": dict(done.unmeasured),
        **pick(done, "histogram", "notices"),
        "traces": str(done.traces) if done.traces else None,
        "out": out,
        "rejected_to": str(rejected) if rejected else None,
        "bad_rows": rows.bad.count,
    }
    rows.report(summary, _lines(done, kept_band, out, rejected, measurements), out)
    if done.unmeasured:
        raise typer.Exit(1)


def _beside(out: str, what: str) -> Path | None:
    """Returns `fit.rejected.jsonl` for `fit.jsonl`, rows in Parquet for Parquet, None for
    stdout."""
    if out == "-":
        return None
    path = Path(out)
    suffix = ".parquet" if what == "rejected" and path.suffix == ".parquet" else ".jsonl"
    return path.with_name(
        f"{path.name.removesuffix('.gz').rpartition('.')[0] or path.name}.{what}{suffix}"
    )


def _lines(
    done: Calibration, band: Band | None, out: str, rejected: Path | None, measurements: Path | None
) -> Iterator[str]:
    fresh = done.tasks - done.known
    parts = [f"{counted(done.rows, 'row')}, {counted(done.tasks, 'task')}"]
    parts += [f"{done.known:,} known from {measurements}"] if done.known else []
    parts += [f"{fresh:,} run {done.k} times"] if fresh else []
    yield ", ".join(parts)
    yield from _histogram(done, band)
    where = "stdout" if out == "-" else out
    apart = f", {done.outside:,} outside the range" if band else ""
    yield f"{counted(done.kept, 'row')} to {where}{apart}" + (
        f" to {rejected}" if rejected and done.outside else ""
    )
    for reason, count in done.unmeasured.most_common(5):
        yield f"  {counted(count, 'row')} {reason}"
    if done.labelled:
        yield (
            f"  {counted(done.labelled, 'row')} with an existing difficulty, which is kept; see"
            " metadata.pass_rate"
        )
    for line in done.notices:
        yield f"  {line}"
    if done.traces is not None:
        yield f"Traces are in {done.traces}. To view them: ajet trace ls {done.traces}"


def _histogram(done: Calibration, band: Band | None) -> Iterator[str]:
    """Yields a line per number of solved attempts, or per tenth if there are many."""
    most = max(done.histogram, default=0)
    step = 1 if done.k <= 16 else -(-(done.k + 1) // 11)
    for low in range(0, done.k + 1, step):
        high = min(low + step - 1, done.k)
        count = sum(done.histogram[low : high + 1])
        is_kept = band is None or any(solved / done.k in band for solved in range(low, high + 1))
        solved = f"{low}/{done.k}" if low == high else f"{low}-{high}/{done.k}"
        bar = "█" * round(_BAR * count / most) if most else ""
        bar = bar or ("▏" if count else "")
        yield (
            f"  solved {solved:>9}  {count:>6,} "
            f" {bar}{'' if is_kept else '  left out' if count else ''}"
        )
