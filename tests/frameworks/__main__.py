"""`python -m tests.frameworks [NAME ...]`: each framework's agents in an environment of its own,
and the matrix."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from tests.frameworks.probe import Cell
from tests.frameworks.table import CASES, DIALECTS, FRAMEWORKS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/frameworks.md"
SECONDS = 600
"""For all agents of one framework."""
Age = Literal["newest", "oldest"]

console = Console(stderr=True)


@dataclass(frozen=True)
class Result:
    """A framework's cells in one environment."""

    name: str
    age: Age
    versions: str
    cells: list[Cell]
    error: str = ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="just test-frameworks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(FRAMEWORKS)}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--venvs", type=Path, help="folder that keeps the environments")
    parser.add_argument(
        "--age", choices=("newest", "oldest", "both"), default="both", help="of the versions"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {PAGE.relative_to(ROOT)} too; wants all frameworks",
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(FRAMEWORKS):
        parser.error(
            f"no framework named {', '.join(sorted(unknown))}; there are: {', '.join(FRAMEWORKS)}"
        )
    if given.write and given.names:
        parser.error("--write wants all frameworks")
    ages: tuple[Age, ...] = ("newest", "oldest") if given.age == "both" else (given.age,)
    with tempfile.TemporaryDirectory() as temporary:
        venvs = given.venvs or Path(temporary)
        results = [result(name, age, venvs) for name in given.names or FRAMEWORKS for age in ages]
    if given.json:
        print(
            json.dumps(
                [{**vars(one), "cells": [vars(cell) for cell in one.cells]} for one in results],
                indent=1,
            )
        )
    else:
        print_matrix(results)
    if given.write:
        PAGE.write_text(page(results), encoding="utf-8")
    return int(any(one.error or not all(cell.ok for cell in one.cells) for one in results))


def result(name: str, age: Age, venvs: Path) -> Result:
    """Make the environment where it is not there yet, and run the framework's agents in it."""
    console.print(f"[dim]{name} {age} ...[/dim]")
    folder = venvs / f"{name}-{age}"
    python = folder / "bin/python"
    try:
        if not (folder / "installed").exists():
            install(name, age, folder)
        versions = installed(name, age, python)
        ended = subprocess.run(
            [python, "-m", "tests.frameworks.probe", name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return Result(name, age, "", [], str(getattr(error, "stderr", "") or error).strip()[-300:])
    cells = [Cell(**json.loads(line)) for line in ended.stdout.splitlines()]
    return Result(
        name, age, versions, cells, "" if ended.returncode == 0 else ended.stderr.strip()[-300:]
    )


def install(name: str, age: Age, folder: Path) -> None:
    """A virtual environment with the framework and ajet. uv resolves old packages as of their own
    time."""
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("just test-frameworks needs uv: pip install uv")
    framework = FRAMEWORKS[name]
    quiet = {"check": True, "capture_output": True, "text": True}
    subprocess.run([uv, "venv", "--clear", "--python", sys.executable, folder], **quiet)
    command = [uv, "pip", "install", "--python", folder / "bin/python"]
    if age == "oldest":
        subprocess.run([*command, "--exclude-newer", framework.before, *framework.oldest], **quiet)
        subprocess.run([*command, "-e", ROOT], **quiet)
    else:
        subprocess.run([*command, *framework.newest, "-e", ROOT], **quiet)
    (folder / "installed").touch()


def installed(name: str, age: Age, python: Path) -> str:
    """The packages of the table with the versions that are there."""
    framework = FRAMEWORKS[name]
    names = [one.split("[")[0].split("=")[0].split("<")[0] for one in getattr(framework, age)]
    script = (
        "import sys; from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for"
        " n in sys.argv[1:]))"
    )
    return subprocess.run(
        [python, "-c", script, *names], check=True, capture_output=True, text=True
    ).stdout.strip()


def rows(results: Iterable[Result]) -> Iterator[tuple[str, ...]]:
    """A row a framework, age and dialect: title, versions, dialect, and a word a case."""
    for one in results:
        title = FRAMEWORKS[one.name].title
        if not one.cells:
            yield title, one.versions or one.age, "", *(["does not run"] * len(CASES))
        for dialect, shown in DIALECTS.items():
            cells = [cell for cell in one.cells if cell.dialect == dialect]
            if cells:
                yield (
                    title,
                    one.versions,
                    shown,
                    *(word([c for c in cells if c.case == case]) for case in CASES),
                )


def word(cells: list[Cell]) -> str:
    """What the agents of a cell gave: captured of all calls, timelines, causes of splits."""
    if not cells:
        return "–"
    words = []
    for cell in cells:
        ids = "exact" if cell.exact else "no ids"
        splits = f" ({', '.join(cell.splits)})" if cell.splits else ""
        lines = f"{cell.timelines} timeline{'' if cell.timelines == 1 else 's'}{splits}"
        words.append(
            f"{cell.captured}/{cell.calls} {ids}, {lines}"
            if cell.ok
            else f"fails {cell.captured}/{cell.calls}"
        )
    return "; ".join(dict.fromkeys(words))


def print_matrix(results: list[Result]) -> None:
    table = Table("framework", "versions", "dialect", *CASES)
    for row in rows(results):
        table.add_row(*row)
    Console(width=200).print(table)
    for one in results:
        for text in [
            one.error,
            *(f"{cell.agent}: {cell.error}" for cell in one.cells if not cell.ok),
        ]:
            if text:
                console.print(f"{one.name} {one.age}: {text[:400]}", markup=False)


INTRODUCTION = """\
# Frameworks

Written by `just test-frameworks --write` on {today}. Each cell is the agent of the framework's quick
start, run with the real package. The only change is the decorator. A cell has the calls that the policy answered of all
calls, whether ids are exact (each sampled token has its id and log-probability), timelines per episode, and the causes
of splits. `fails` gives the number of calls that the policy answered before the failure. A dash means not tested.
"""


def page(results: list[Result]) -> str:
    """The matrix as a page of the documentation."""
    lines = [
        INTRODUCTION.format(today=datetime.date.today()),
        "| framework | versions | dialect | " + " | ".join(CASES) + " |",
        "|" + "---|" * (len(CASES) + 3),
        *("| " + " | ".join(row) + " |" for row in rows(results)),
    ]
    errors = [(one, "", one.error) for one in results if one.error]
    errors += [
        (one, cell.agent, cell.error) for one in results for cell in one.cells if not cell.ok
    ]
    if errors:
        lines += [
            "",
            "## What fails, and with what",
            "",
            "| framework | versions | agent | error |",
        ]
        lines.append("|" + "---|" * 4)
    for one, agent, error in errors:
        first = (error.splitlines() or [""])[0][:200].replace("|", "\\|").replace("`", "'")
        lines.append(
            f"| {FRAMEWORKS[one.name].title} | {one.versions or one.age} | `{agent}` | `{first}` |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
