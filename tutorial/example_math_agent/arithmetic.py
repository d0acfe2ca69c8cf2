"""The problems: `What is 57+38?`, operands 10 to 99. `python arithmetic.py` writes train.jsonl and
val.jsonl.

A problem is held out by a stable hash of its text, so that warm-up and training never see one of
validation.
"""

import hashlib
import json
import random
from pathlib import Path

OPERATORS = "+-*"
Problem = tuple[int, str, int]


def held_out(problem: Problem) -> bool:
    text = "{}{}{}".format(*problem)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[1] % 5 == 0


def draw_problem(draw: random.Random, *, val: bool = False) -> Problem:
    while True:
        problem = (draw.randint(10, 99), draw.choice(OPERATORS), draw.randint(10, 99))
        if held_out(problem) == val:
            return problem


def question(problem: Problem) -> str:
    return "What is {}{}{}?".format(*problem)


def answer(problem: Problem) -> int:
    a, operator, b = problem
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def distinct(draw: random.Random, count: int, *, val: bool) -> list[Problem]:
    found: dict[Problem, None] = {}
    while len(found) < count:
        found[draw_problem(draw, val=val)] = None
    return list(found)


def main() -> None:
    draw = random.Random(0)
    for name, count, val in (("train", 1024, False), ("val", 256, True)):
        rows = [
            {"question": question(p), "answer": str(answer(p))}
            for p in distinct(draw, count, val=val)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(__file__).with_name(f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
