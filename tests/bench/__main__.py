"""`python -m tests.bench [NAME ...]`: run the benchmarks named (default: those without peers),
print their figures."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tests.bench
from tests.bench import Figure
from tests.bench._record import moved, write, write_pages


def main(arguments: list[str]) -> int:
    known = [
        m.name for m in pkgutil.iter_modules(tests.bench.__path__) if not m.name.startswith("_")
    ]
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Run benchmarks, print their figures."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which (default: all but peers, dataset_peers): {', '.join(known)}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--write",
        action="store_true",
        help="record the figures in docs/benchmarks.json and the pages",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print what moved by more than a quarter since recorded",
    )
    parser.add_argument(
        "--pages", action="store_true", help="write the pages' tables from the records; run nothing"
    )
    parser.add_argument(
        "--venvs", type=Path, help="peers, dataset_peers: folder that keeps their environments"
    )
    parser.add_argument("--rllm", type=Path, help="peers: a checkout of rLLM")
    given = parser.parse_args(arguments)
    if given.pages:
        print("\n".join(map(str, write_pages())) or "The pages are up to date.")
        return 0
    unknown = set(given.names) - set(known)
    if unknown:
        parser.error(
            f"no benchmark named {', '.join(sorted(unknown))}; there are: {', '.join(known)}"
        )
    console = Console(stderr=True)
    rows: list[tuple[str, Figure]] = []
    for name in given.names or [name for name in known if not name.endswith("peers")]:
        started = time.perf_counter()
        console.print(f"[dim]{name} ...[/dim]")
        options = {"peers": (given.venvs, given.rllm), "dataset_peers": (given.venvs,)}.get(
            name, ()
        )
        rows += [
            (name, figure)
            for figure in importlib.import_module(f"tests.bench.{name}").main(*options)
        ]
        console.print(f"[dim]{name} took {time.perf_counter() - started:.0f} s[/dim]")
    if given.json:
        print(json.dumps([{"benchmark": name, **vars(figure)} for name, figure in rows], indent=1))
    else:
        print_table(rows)
    if given.compare:
        print("\n".join(moved(rows)) or "No figure moved by more than a quarter.")
    if given.write:
        write(rows)
        write_pages()
    return int(any(figure.passed is False for _, figure in rows))


def print_table(rows: list[tuple[str, Figure]]) -> None:
    table = Table("benchmark", "figure", "measured", "goal", "")
    for name, figure in rows:
        mark = "" if figure.passed is None else "reached" if figure.passed else "missed"
        table.add_row(
            name, figure.name, f"{figure.value:,.4g} {figure.unit}".strip(), figure.goal, mark
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
