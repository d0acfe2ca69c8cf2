"""`python -m tests.gpu [--dry] [--json FILE] [PART ...]`: run parts, print tables, write JSON.

Without names it runs those that need nothing but torch and transformers, the most telling ones
first, each for at most two minutes, and begins none after `--minutes`. `--cluster` runs those for
which Trinity, verl, vLLM or flash-attn must be installed. JSON is written after each part. Ends
with 1 where a part failed or missed its goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.gpu import Figure, Setting, Skipped
from tests.gpu.calculator import calculator, trinity, verl
from tests.gpu.local import eager, flash_attention, large, local, merged
from tests.gpu.machine import describe, free
from tests.gpu.sharded import sharded
from tests.gpu.vllm import vllm

Part = Callable[[Setting], Iterator[Figure]]

_ALONE: dict[str, Part] = {
    "local": local,
    "merged": merged,
    "large": large,
    "sharded": sharded,
    "calculator": calculator,
    "eager": eager,
}
"""By what they tell, most first."""
_CLUSTER: dict[str, Part] = {
    "flash_attention": flash_attention,
    "vllm": vllm,
    "trinity": trinity,
    "verl": verl,
}
_PARTS = _ALONE | _CLUSTER
_LONGEST = 120.0
"""Seconds after which a part begins no further case."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=(__doc__ or "").partition("\n")[2]
    )
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[[], *_PARTS],
        metavar="PART",
        help=f"{', '.join(_ALONE)}; with --cluster: {', '.join(_CLUSTER)}",
    )
    parser.add_argument("--cluster", action="store_true", help="the parts of a cluster")
    parser.add_argument(
        "--minutes",
        type=float,
        default=12.0,
        help="begin no part after these minutes (default: %(default)g)",
    )
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    asked = parser.parse_args(arguments)
    if not asked.dry and not torch.cuda.is_available():
        print(
            "there is no GPU that torch can use here; --dry runs the same code on a CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if asked.dry else "cuda")
    started = time.perf_counter()
    parts: list[dict[str, Any]] = []
    report: dict[str, Any] = {"machine": describe(device), "dry": asked.dry, "parts": parts}
    with tempfile.TemporaryDirectory(prefix="ajet-gpu-") as folder:
        setting = Setting(asked.dry, device, Path(folder), frozenset(asked.parts))
        for name in asked.parts or (_CLUSTER if asked.cluster else _ALONE):
            if time.perf_counter() - started > 60 * asked.minutes:
                reason = f"{asked.minutes:g} minutes are over (--minutes)"
                parts.append({"part": name, "seconds": 0.0, "figures": [], "skipped": reason})
            else:
                parts.append(run(name, setting))
            report["seconds"] = time.perf_counter() - started
            if asked.json:
                asked.json.write_text(json.dumps(report, indent=1))
    print_tables(report)
    return int(
        any("error" in part or any(f["passed"] is False for f in part["figures"]) for part in parts)
    )


def run(name: str, setting: Setting) -> dict[str, Any]:
    """One part: what it measured, and where it ended early the reason."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    started, figures = time.perf_counter(), list[Figure]()
    ended: dict[str, str] = {}
    try:
        for figure in _PARTS[name](setting):
            figures.append(figure)  # those before an error are kept
            if time.perf_counter() - started > _LONGEST and not setting.dry:
                ended = {"ended": f"after {_LONGEST:.0f} s"}
                break
    except Skipped as reason:
        ended = {"skipped": str(reason)}
    except Exception as error:  # noqa: BLE001  (reported with its traceback; the other parts go on)
        ended = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(ended["traceback"], file=sys.stderr)
    free(setting.device)
    seconds = time.perf_counter() - started
    return {
        "part": name,
        "seconds": seconds,
        "figures": [asdict(figure) for figure in figures],
        **ended,
    }


def print_tables(report: dict[str, Any]) -> None:
    """A table for each part, a row for each of its cases."""
    console = Console(width=170)
    machine = report["machine"]
    versions = ", ".join(
        f"{package} {version}" for package, version in machine["versions"].items() if version
    )
    console.print(
        f"{machine['name']} ({machine['device']}), Python {machine['python']}, {versions}"
    )
    for part in report["parts"]:
        title = f"{part['part']}, {part['seconds']:.0f} s"
        if ended := part.get("skipped"):
            console.print(f"{part['part']}: skipped, {ended}")
        if ended := part.get("ended"):
            console.print(f"{part['part']}: not all cases, ended {ended}")
        if ended := part.get("error"):
            console.print(f"{part['part']}: failed, {ended}", markup=False)
        figures = part["figures"]
        if not figures:
            continue
        names = list(dict.fromkeys(figure["name"] for figure in figures))
        table = Table("case", *names, title=title, title_justify="left")
        for case in dict.fromkeys(figure["case"] for figure in figures):
            cells = {figure["name"]: _cell(figure) for figure in figures if figure["case"] == case}
            table.add_row(case, *(cells.get(name, "") for name in names))
        console.print(table)
    missed = [
        (part["part"], figure)
        for part in report["parts"]
        for figure in part["figures"]
        if figure["passed"] is False
    ]
    for part, figure in missed:
        console.print(
            f"missed: {part}, {figure['case']}: {figure['name']} {_cell(figure)}, goal"
            f" {figure['goal']}"
        )
    console.print(f"{report['seconds']:.0f} s in all")


def _cell(figure: dict[str, Any]) -> str:
    value = figure["value"]
    text = (
        value
        if isinstance(value, str)
        else f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.3g}"
    )
    return f"{text} !" if figure["passed"] is False else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
