"""What grew: lines of Python by room, and the longest files, against an earlier commit.

    python -m tests.growth [COMMIT]

Printed by CI, which refuses nothing for it. COMMIT: by default the 20th before this one, or the first that is here.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("ajet", "ajet_sdk", "ajet_tools", "tutorial", "tests")
LONG = 400
"""Lines that a reader takes in in a few minutes."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def rooms(commit: str) -> tuple[Counter[str], dict[str, int]]:
    """Lines of each room, such as `ajet_sdk/trace`, and of each file."""
    files: dict[str, int] = {}
    for line in git("grep", "-c", "", commit, "--", *(f"{room}/**.py" for room in ROOMS)).splitlines():
        _, path, count = line.rsplit(":", 2)
        files[path] = int(count)
    by_room: Counter[str] = Counter()
    for path, count in files.items():
        room, *inner = Path(path).parts
        by_room["/".join([room, *inner[:-1][: room.startswith("ajet_")]])] += count
    return by_room, files


def main(commit: str | None = None) -> None:
    before = commit or git("rev-list", "--first-parent", "-n", "21", "HEAD").split()[-1]
    (now, files), (then, _) = rooms("HEAD"), rooms(before)
    print(f"lines of Python, and what grew since {git('log', '-1', '--format=%h, %cs', before).strip()}")
    for room in sorted(now | then):
        if now[room] != then[room]:
            print(f"  {room:28} {now[room]:7,} {now[room] - then[room]:+7,}")
    tests, all_now, all_then = now["tests"], now.total(), then.total()
    print(f"{'product':30} {all_now - tests:7,} {all_now - tests - all_then + then['tests']:+7,}")
    long = [path for path, count in files.items() if count > LONG and not path.startswith("tests/")]
    for path in sorted(long, key=lambda path: -files[path]):
        print(f"  over {LONG} lines: {path} {files[path]:,}")


if __name__ == "__main__":
    main(*sys.argv[1:])
