"""Recordings as animated SVG: `ajet demo` line by line, and a walk through the viewer.

    python docs/recording.py OUT

runs `ajet demo` in a directory of its own and writes OUT/demo.svg and, of the pictures that docs/screenshots.py left in
OUT, OUT/viewer.svg.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

SECONDS = 20.0
"""How long the recording of a command plays, whatever it took."""
SHOWN = 3.0
"""Seconds that each screen of the viewer is shown."""
SCREENS = ("runs", "run", "run-ledger", "episodes", "episode", "tokens", "compare")


def record(command: list[str]) -> list[tuple[float, str]]:
    """The lines that a command writes, each with the seconds since the start. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        lines = []
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic() - started, line.rstrip("\n").replace(folder, "~")))
        if process.wait():
            raise RuntimeError(
                f"{' '.join(command)} failed:\n" + "\n".join(line for _, line in lines[-8:])
            )
    return lines


def animated(title: str, lines: list[tuple[float, str]]) -> str:
    """The lines as a terminal in which each appears at its time, scaled to the length of the recording."""
    console = Console(record=True, width=110, file=io.StringIO(), highlight=False, markup=False)
    rows: list[float] = []
    for at, line in lines:
        wrapped = Text.from_ansi(line).wrap(console, console.width) or [Text()]
        rows += [at] * len(wrapped)
        console.print(*wrapped, sep="\n")
    svg = console.export_svg(title=title)
    prefix = re.search(r"terminal-\d+", svg)
    assert prefix
    scale = SECONDS / max(rows[-1], 1e-9)
    css = ["@keyframes appear{from{opacity:0}to{opacity:1}}"]
    css += [
        f'[clip-path="url(#{prefix[0]}-line-{row})"]{{animation:appear .01s {at * scale:.2f}s both}}'
        for row, at in enumerate(rows)
    ]
    return svg.replace("</style>", "\n".join(css) + "</style>", 1)


def walk(folder: Path) -> str:
    """The screens one after another, over and over."""
    frames = [(folder / f"{name}.svg").read_text(encoding="utf-8") for name in SCREENS]
    box = re.search(r'viewBox="([^"]*)"', frames[0])
    assert box
    share = 100 / len(frames)
    css = f"@keyframes turn{{0%,{share:.2f}%{{visibility:visible}}{share + 0.01:.2f}%,100%{{visibility:hidden}}}}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box[1]}"><style>{css}</style>']
    for number, frame in enumerate(frames):
        timing = f"turn {SHOWN * len(frames)}s {SHOWN * number}s infinite steps(1)"
        parts.append(
            f'<g style="visibility:hidden;animation:{timing}">{frame[frame.index("<svg") :]}</g>'
        )
    return "".join([*parts, "</svg>"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    (out / "demo.svg").write_text(animated("ajet demo", record(["ajet", "demo"])), encoding="utf-8")
    (out / "viewer.svg").write_text(walk(out), encoding="utf-8")
    print(out / "demo.svg", out / "viewer.svg", sep="\n")
