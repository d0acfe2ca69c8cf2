"""A frozen lake of 4 × 4: from A to G past the holes (#). `python lake.py` writes train.jsonl and
val.jsonl.

A lake is held out by a stable hash of its map, so that warm-up and training never see one of
validation.
"""

import hashlib
import json
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SIZE, HOLES = 4, 0.3
Place = tuple[int, int]


@dataclass
class Lake:
    """The lake and where one stands."""

    rows: list[str]
    at: Place

    @classmethod
    def of(cls, rows: list[str]) -> "Lake":
        return cls(rows, _find(rows, "A"))

    def cell(self, place: Place) -> str:
        inside = 0 <= place[0] < len(self.rows) and 0 <= place[1] < len(self.rows[0])
        return self.rows[place[0]][place[1]] if inside else "|"

    def beside(self, move: str) -> Place:
        return self.at[0] + MOVES[move][0], self.at[1] + MOVES[move][1]

    def look(self) -> str:
        """Where the goal is, and which moves are safe."""
        goal = _find(self.rows, "G")
        down, right = goal[0] - self.at[0], goal[1] - self.at[1]
        way = [f"{'down' if down > 0 else 'up'} {abs(down)}"] if down else []
        way += [f"{'right' if right > 0 else 'left'} {abs(right)}"] if right else []
        safe = [move for move in MOVES if self.cell(self.beside(move)) in "A.G"]
        return f"goal {' '.join(way)}\nsafe {' '.join(safe)}"

    def go(self, move: str) -> str:
        """Step there; `goal`, `hole`, or nothing. At the edge one stays."""
        place = self.beside(move)
        if self.cell(place) != "|":
            self.at = place
        return {"G": "goal", "#": "hole"}.get(self.cell(self.at), "")


def _find(rows: list[str], letter: str) -> Place:
    return next((i, row.index(letter)) for i, row in enumerate(rows) if letter in row)


def distances(rows: list[str]) -> dict[Place, int]:
    """Steps to the goal from every place that leads there."""
    lake = Lake(rows, _find(rows, "G"))
    found = {lake.at: 0}
    queue = deque([lake.at])
    while queue:
        here = lake.at = queue.popleft()
        for move in MOVES:
            place = lake.beside(move)
            if lake.cell(place) in ("A", ".") and place not in found:
                found[place] = found[here] + 1
                queue.append(place)
    return found


def held_out(rows: list[str]) -> bool:
    return hashlib.blake2b("/".join(rows).encode(), digest_size=8).digest()[1] % 5 == 0


def draw_lake(draw: random.Random, *, val: bool = False) -> list[str]:
    """A lake whose goal can be reached and is at least two steps away."""
    while True:
        cells = [["#" if draw.random() < HOLES else "." for _ in range(SIZE)] for _ in range(SIZE)]
        start, goal = draw.sample([(i, j) for i in range(SIZE) for j in range(SIZE)], 2)
        cells[start[0]][start[1]], cells[goal[0]][goal[1]] = "A", "G"
        rows = ["".join(row) for row in cells]
        if distances(rows).get(start, 0) >= 2 and held_out(rows) == val:
            return rows


def main() -> None:
    draw = random.Random(0)
    for name, count, val in (("train", 1024, False), ("val", 256, True)):
        lakes: dict[str, list[str]] = {}
        while len(lakes) < count:
            rows = draw_lake(draw, val=val)
            lakes["/".join(rows)] = rows
        text = "".join(
            json.dumps({"main_query": "Reach the goal.", "lake": rows}) + "\n"
            for rows in lakes.values()
        )
        Path(__file__).with_name(f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
