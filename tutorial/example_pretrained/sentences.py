"""Write train.jsonl and val.jsonl: sentences with one number each. No sentence is in both files."""

from __future__ import annotations

import json
import random
from pathlib import Path

SENTENCES = (
    "The train leaves from platform {}.",
    "We sold {} tickets yesterday.",
    "My sister is {} years old.",
    "The recipe needs {} eggs.",
    "There are {} students in the class.",
    "The hotel has {} rooms.",
    "He ran {} miles last week.",
    "Page {} is missing.",
    "The bus to town is number {}.",
    "She paid {} dollars for the coat.",
    "It took {} days to finish the house.",
    "The box weighs {} pounds.",
)
TRAIN, HELD_OUT = 256, 104


def rows(count: int) -> list[dict[str, str]]:
    """Tasks of different sentences and numbers."""
    draw = random.Random(7)
    numbers = draw.sample(range(2, 1000), count)
    asked = 'Which number is in this sentence? "{}" Answer with the number only.'
    return [
        {"question": asked.format(draw.choice(SENTENCES).format(number)), "answer": str(number)}
        for number in numbers
    ]


if __name__ == "__main__":
    made = rows(TRAIN + HELD_OUT)
    for name, part in (("train", made[:TRAIN]), ("val", made[TRAIN:])):
        Path(__file__).with_name(f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part)
        )
