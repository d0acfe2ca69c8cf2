"""`python -m tests.bench [NAME ...]`: run the benchmarks named (default: all) and print their figures."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time

from rich.console import Console
from rich.table import Table

import tests.bench
from tests.bench import Figure


def main(names: list[str]) -> int:
    as_json = "--json" in names
    wanted = [n for n in names if not n.startswith("--")]
    known = [m.name for m in pkgutil.iter_modules(tests.bench.__path__) if not m.name.startswith("_")]
    unknown = set(wanted) - set(known)
    if unknown:
        print(f"no benchmark named {', '.join(sorted(unknown))}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    rows: list[tuple[str, Figure]] = []
    for name in wanted or known:
        started = time.perf_counter()
        console.print(f"[dim]{name} ...[/dim]")
        rows += [(name, figure) for figure in importlib.import_module(f"tests.bench.{name}").main()]
        console.print(f"[dim]{name} took {time.perf_counter() - started:.0f} s[/dim]")
    if as_json:
        print(json.dumps([{"benchmark": name, **vars(figure)} for name, figure in rows], indent=1))
    else:
        print_table(rows)
    return int(any(figure.passed is False for _, figure in rows))


def print_table(rows: list[tuple[str, Figure]]) -> None:
    table = Table("benchmark", "figure", "measured", "goal", "")
    for name, figure in rows:
        mark = "" if figure.passed is None else "reached" if figure.passed else "missed"
        table.add_row(name, figure.name, f"{figure.value:,.4g} {figure.unit}".strip(), figure.goal, mark)
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
