"""The recorded figures of `docs/benchmarks.json`, what moved since, and the tables that pages make
of them.

A page has its tables between `<!-- figures: NAME ... -->` and `<!-- end of figures -->`; NAME is a
benchmark or `learning`, for the rewards of `tutorial/bench.json`. `just bench --pages` writes what
is between the two.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from tests.bench import Figure

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "benchmarks.json"
LEARNING = ROOT / "tutorial" / "bench.json"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "guide" / "trace-tools.md",
)
MOVED = 0.25
"""Relative change from which a figure counts as moved."""
_BLOCK = re.compile(r"(<!-- figures: ([\w ,-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_LEARNED = {"calculator": "calculator", "frozen-lake": "frozen lake"}
"""Tasks of the learning table, with their names there."""


def recorded() -> dict[str, Any]:
    """Each benchmark with its date, commit, machine and figures."""
    if not RECORD.exists():
        return {}
    stored: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return stored


def write(rows: Sequence[tuple[str, Figure]]) -> None:
    """Record the figures of these benchmarks, and leave those of others."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    machine = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}"
    )
    stored = recorded()
    for name in dict.fromkeys(name for name, _ in rows):
        figures = [_rounded(figure) for of, figure in rows if of == name]
        stored[name] = {
            "date": f"{date.today()}",
            "commit": commit,
            "machine": machine,
            "figures": figures,
        }
    RECORD.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n", encoding="utf-8")


def moved(rows: Iterable[tuple[str, Figure]]) -> Iterator[str]:
    """A line for each figure that differs from its record by more than a quarter, or that has
    none."""
    stored = recorded()
    for name, figure in rows:
        before = {old["name"]: old["value"] for old in stored.get(name, {}).get("figures", ())}.get(
            figure.name
        )
        now = f"{figure.value:,.4g} {figure.unit}".strip()
        if before is None:
            yield f"{name}: {figure.name}: {now}, not recorded before"
        elif abs(figure.value - before) > MOVED * abs(before):
            change = f"{(figure.value - before) / abs(before):+.0%}" if before else "from 0"
            since = f"{stored[name]['date']}, {stored[name]['commit']}"
            yield f"{name}: {figure.name}: {now}, was {before:,.4g} ({change}; {since})"


def write_pages() -> list[Path]:
    """Write the tables of all pages; returns those that changed."""
    changed = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = filled_in(text)
        if filled != text:
            page.write_text(filled, encoding="utf-8")
            changed.append(page)
    return changed


def filled_in(text: str) -> str:
    """The text of a page, with the tables that the records make."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_block(match[2].split())}\n{match[3]}", text)


def _block(names: Sequence[str]) -> str:
    return _learning() if names == ["learning"] else _figures(names)


def _figures(names: Sequence[str]) -> str:
    stored = recorded()
    lines = ["", "| figure | measured | goal | command | measured on |", "|---|---|---|---|---|"]
    for name in names:
        if name not in stored:
            raise KeyError(f"{RECORD.name} has no figures of {name}: just bench {name} --write")
        entry = stored[name]
        for figure in entry["figures"]:
            value = f"{figure['value']:,.4g} {figure['unit']}".strip()
            goal = figure["goal"] + (" (missed)" if figure["passed"] is False else "")
            when = f"{entry['date']}, {entry['commit']}"
            lines.append(
                f"| {_cell(figure['name'])} | {value} | {_cell(goal)} | `just bench {name}` |"
                f" {when} |"
            )
    return "\n".join([*lines, ""])


def _learning() -> str:
    """Held-out reward before and after, one row per seed."""
    records = json.loads(LEARNING.read_text(encoding="utf-8"))["records"]
    runs = {
        (record["task"], record["seed"]): record
        for record in records
        if record["backbone"] == "local"
    }
    first = next(iter(runs.values()))
    head = ["seed"]
    for task, name in _LEARNED.items():
        steps = next(record for (of, _), record in runs.items() if of == task)["curve"][-1]["step"]
        head += [f"{name}, before", f"after {steps} steps"]
    lines = ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for seed in sorted({seed for task, seed in runs if task in _LEARNED}):
        cells = [str(seed)]
        for task in _LEARNED:
            curve = runs[task, seed]["curve"]
            cells += [f"{curve[0]['reward']:.2f}", f"{curve[-1]['reward']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    cost = []
    for task, name in _LEARNED.items():
        seconds = sorted(record["cpu_seconds"] for (of, _), record in runs.items() if of == task)
        cost.append(f"{seconds[0]:.0f} to {seconds[-1]:.0f} CPU-seconds per {name} run")
    note = f"(`python -m tests.library`, {first['date']}, {first['machine']}: {', '.join(cost)}.)"
    return "\n".join([*lines, "", note, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


def _rounded(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "value": float(f"{figure.value:.4g}")}
