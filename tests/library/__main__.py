"""`python -m tests.library`: train the examples of a library, and keep what they reached and what
it cost."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, MissingExtra, TrainingError
from ajet_sdk.reporting.output import echo
from ajet_sdk.trace.reader import open_trace
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.text.tables import console, table
from tests.library.report import Library, Point, Record, compared, write_report

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK]... [KEY=VALUE]...", help="Tasks (default: all), and overrides."
        ),
    ] = None,
    library: Annotated[
        Path,
        typer.Option(
            help="Directory of the examples; its bench.json lists the tasks and stores the results."
        ),
    ] = Path("tutorial"),
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Random seed; repeat it for several. Default: 0, 1 and 2."),
    ] = None,
    backbone: Annotated[str, typer.Option(help="Backbone: local, trinity or verl.")] = "local",
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Compare with the results of VERSION; `last`: the newest other version.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write DIR/bench.md and its plots from the results."),
    ] = None,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Do not train; use the stored results.")
    ] = False,
    exp_dir: Annotated[
        Path | None,
        typer.Option(help="Keep the runs' directories here; by default they are removed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the example library as a benchmark: reward and cost, compared between versions.

    Each run is a process of its own and makes its own model from its seed. Its result goes to
    LIBRARY/bench.json, in place of an earlier one of the same task, backbone, version, seed and
    overrides. --compare exits with 1 where a task's mean reward is lower than in the other version
    by more than twice its standard error and by more than 0.02.

    \b
    python -m tests.library
    python -m tests.library calculator --seed 0 ajet.trainer_common.total_steps=10
    python -m tests.library --no-run --compare last
    python -m tests.library --no-run --report docs
    """
    try:
        passed = _bench(
            tasks or [],
            library,
            seed or [0, 1, 2],
            backbone,
            compare,
            report,
            no_run,
            exp_dir,
            as_json,
        )
    except (ConfigError, MissingExtra) as error:
        echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if passed else 1)


def _bench(
    tasks: list[str],
    library: Path,
    seeds: list[int],
    backbone: str,
    compare: str | None,
    report: Path | None,
    no_run: bool,
    exp_dir: Path | None,
    as_json: bool,
) -> bool:
    """Returns whether every run ended and none is worse than in the other version."""
    shelf = Library.open(library)
    named = [text for text in tasks if "=" not in text]
    overrides = [text for text in tasks if "=" in text]
    if unknown := set(named) - set(shelf.tasks):
        raise ConfigError(
            f"{library} has no task {', '.join(sorted(unknown))}; tasks: {', '.join(shelf.tasks)}"
        )
    failed = 0
    for task in [] if no_run else named or shelf.tasks:
        for number in seeds:
            try:
                record = _measure(shelf, task, number, backbone, overrides, exp_dir)
            except TrainingError as error:  # the other runs still say something
                echo(f"{task}, seed {number}: {error}", err=True)
                failed += 1
                continue
            shelf.keep(record)
            echo(f"{task}, seed {number}: {record.summary()}", err=True)
    chosen = [record for record in shelf.records if not named or record.task in named]
    worse = _show(chosen, shelf, compare, as_json)
    if report is not None:
        for path in write_report(shelf, report):
            echo(f"  {path}", err=True)
    return not (failed or worse)


def _show(records: list[Record], library: Library, version: str | None, as_json: bool) -> bool:
    """Print the results or their comparison. Returns whether one is worse."""
    if version is None:
        if as_json:
            print_json(records)
            return False
        out = console()
        out.print(table([record.row() for record in records], out.width, right=("reward",)))
        return False
    if version == "last" and not library.others:
        echo(
            f"{library.file} has results of {ajet.__version__} alone; there is no earlier version"
            " to compare with",
            err=True,
        )
        return _show(records, library, None, as_json)
    comparisons = compared(records, library.version(version))
    if as_json:
        print_json([comparison.as_dict() for comparison in comparisons])
    for comparison in [] if as_json else comparisons:
        echo(str(comparison))
    return any(comparison.worse for comparison in comparisons)


def _measure(
    library: Library, task: str, seed: int, backbone: str, overrides: list[str], keep: Path | None
) -> Record:
    """Train one task from one seed, each config in a process of its own. Raises TrainingError where
    one fails."""
    values = [f"ajet.backbone={backbone}", f"ajet.trainer_common.seed={seed}", *overrides]
    files = [(library.directory / config).absolute() for config in library.tasks[task]]
    configs = [
        load_config(file, values) for file in files
    ]  # a wrong override is an error before anything runs
    with _directory(keep, f"{task}-seed-{seed}") as folder:
        log = folder / "bench.log"
        echo(f"{task}, seed {seed}: training; log file: {log}", err=True)
        started = time.perf_counter()
        used = [_train(file, values, log) for file in files]
        unit = (
            2**30 if sys.platform == "darwin" else 2**20
        )  # ru_maxrss is in bytes on macOS, else in KiB
        return Record(
            task=task,
            backbone=backbone,
            version=ajet.__version__,
            seed=seed,
            overrides=tuple(overrides),
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            python=platform.python_version(),
            date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
            seconds=round(time.perf_counter() - started, 1),
            cpu_seconds=round(sum(usage.ru_utime + usage.ru_stime for usage in used), 1),
            memory_gib=round(max(usage.ru_maxrss for usage in used) / unit, 2),
            curve=tuple(_curve(folder / configs[-1].directory)),
        )


def _train(config: Path, values: list[str], log: Path) -> resource.struct_rusage:
    """Train a config in the log's directory. Returns the resources that its process used."""
    with log.open("a") as output:
        command = [sys.executable, "-m", "ajet", "train", "--conf", str(config), *values]
        process = subprocess.Popen(command, cwd=log.parent, stdout=output, stderr=subprocess.STDOUT)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise TrainingError(f"{config.name} ended with exit code {process.returncode}:\n{tail}")
    return usage


@contextmanager
def _directory(keep: Path | None, name: str) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ajet-bench-") as temporary:
            yield Path(temporary)
        return
    folder = keep.absolute() / name
    if (folder / "launcher_record").exists():
        raise ConfigError(
            f"{folder} already contains a run; remove it, or choose another --exp-dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


COSTS = ("time/step", "train/tokens_sampled", "train/episodes")


def _curve(experiment: Path) -> Iterator[Point]:
    """The validations of the run in a directory, each with the cost of the steps before it."""
    with open_trace(experiment) as reader:
        rows = reader.query("SELECT step, name, value FROM metrics ORDER BY step").to_pylist()
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {})[row["name"]] = row["value"]
    spent = dict.fromkeys(COSTS, 0.0)
    for step, values in sorted(by_step.items()):
        for name in COSTS:
            spent[name] += values.get(name, 0.0)
        if "val/reward" in values:
            greedy = values.get("val/greedy_reward")
            yield Point(
                step=step,
                reward=round(values["val/reward"], 4),
                greedy=None if greedy is None else round(greedy, 4),
                seconds=round(spent["time/step"], 1),
                tokens=int(spent["train/tokens_sampled"]),
                episodes=int(spent["train/episodes"]),
            )
