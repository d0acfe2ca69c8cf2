"""The lakes of example_frozenlake as pictures: 8 × 8 pixels a cell, which is one token for the small
model. `python drawn_lake.py` shows one, and says what moves without sight are worth."""

import base64
import io
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.append(str(Path(__file__).resolve().parent.parent / "example_frozenlake"))

from lake import MOVES, Lake

CELL = 8
ICE, HOLE, GOAL, AGENT, EDGE = "#e1f0ff", "#14285a", "#1eaa3c", "#dc2828", "#b4c8dc"


def draw_picture(lake: Lake, cell: int = CELL) -> Image.Image:
    """Ice, holes, the goal, and the agent as a red disc."""
    height, width = len(lake.rows), len(lake.rows[0])
    picture = Image.new("RGB", (width * cell, height * cell), ICE)
    pen = ImageDraw.Draw(picture)
    for i, row in enumerate(lake.rows):
        for j, letter in enumerate(row):
            color = {"#": HOLE, "G": GOAL}.get(letter, ICE)
            x, y = j * cell, i * cell
            pen.rectangle([x, y, x + cell - 1, y + cell - 1], fill=color, outline=EDGE)
    x, y, rim = lake.at[1] * cell, lake.at[0] * cell, cell // 6
    pen.ellipse([x + rim, y + rim, x + cell - 1 - rim, y + cell - 1 - rim], fill=AGENT)
    return picture


def data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def blind(lake: Lake, draw: random.Random, *, knows_goal: bool) -> bool:
    """Whether twelve random moves reach the goal; with `knows_goal` moves towards it, which see no
    holes."""
    goal = next((i, row.index("G")) for i, row in enumerate(lake.rows) if "G" in row)
    for _ in range(12):
        moves = list(MOVES)
        if knows_goal:
            away = abs(goal[0] - lake.at[0]) + abs(goal[1] - lake.at[1])
            near = {m: lake.beside(m) for m in moves}
            moves = [m for m, p in near.items() if abs(goal[0] - p[0]) + abs(goal[1] - p[1]) < away]
        end = lake.go(draw.choice(moves))
        if end:
            return end == "goal"
    return False


def main() -> None:
    rows = Path(__file__).resolve().parent.parent / "example_frozenlake" / "val.jsonl"
    lakes = [json.loads(line)["lake"] for line in rows.read_text().splitlines()]
    draw = random.Random(0)
    for name, knows_goal in (
        ("random moves", False),
        ("moves towards the goal, blind to holes", True),
    ):
        tries = [
            blind(Lake.of(lake), draw, knows_goal=knows_goal) for lake in lakes for _ in range(100)
        ]
        print(f"{name}: {sum(tries) / len(tries):.3f} of {len(lakes)} held-out lakes")
    draw_picture(Lake.of(lakes[0]), 64).save("lake.png")
    print("lake.png written")


if __name__ == "__main__":
    main()
