"""Somebody who knows the way: one shortest walk over each training lake, as a conversation. Writes
walks.jsonl.

python walks.py
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "example_frozenlake"))

from lake import MOVES, Lake, distances
from lake_agent import SYSTEM

HERE = Path(__file__).resolve().parent


def walk(rows: list[str], draw: random.Random) -> list[dict[str, str]]:
    """The conversation of a shortest walk; where two moves are as good, one is drawn."""
    lake, steps = Lake.of(rows), distances(rows)
    messages = [{"role": "system", "content": SYSTEM}]
    while True:
        move = draw.choice([m for m in MOVES if steps.get(lake.beside(m), 99) < steps[lake.at]])
        messages += [
            {"role": "user", "content": lake.look()},
            {"role": "assistant", "content": move},
        ]
        if lake.go(move) == "goal":
            return messages


def main() -> None:
    draw = random.Random(0)
    tasks = map(
        json.loads,
        (HERE.parent / "example_frozenlake/train.jsonl").read_text(encoding="utf-8").splitlines(),
    )
    rows = [{**task, "messages": walk(task["lake"], draw)} for task in tasks]
    (HERE / "walks.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
