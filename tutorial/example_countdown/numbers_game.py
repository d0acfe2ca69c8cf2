"""The numbers game of Countdown with three numbers. `python numbers_game.py` writes train.jsonl and
val.jsonl.

Two numbers are joined by + - * or / until the target is there; halves and negative numbers don't
exist. A task is held out by a stable hash of its numbers and target, so that warm-up and training
never see one of validation.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from string import ascii_lowercase

SMALLEST, LARGEST, COUNT = 1, 12, 3
Numbers = tuple[int, ...]


def moves(numbers: Numbers) -> dict[str, int]:
    """What may be said, and what comes of it: `7*3` and 21. The larger number comes first."""
    found = {}
    for a, b in permutations(numbers, 2):
        if a < b:
            continue
        found |= {f"{a}+{b}": a + b, f"{a}*{b}": a * b}
        if a > b:
            found[f"{a}-{b}"] = a - b
        if b > 1 and a % b == 0:
            found[f"{a}/{b}"] = a // b
    return found


def after(numbers: Numbers, move: str) -> Numbers:
    """The numbers that are left once a move is made."""
    result = moves(numbers)[move]
    left = Counter(numbers)
    left.subtract(
        int(part)
        for part in (
            move.replace("+", " ").replace("-", " ").replace("*", " ").replace("/", " ").split()
        )
    )
    return (result, *sorted(left.elements(), reverse=True))


def look(numbers: Numbers, target: int) -> str:
    """What the player sees: each move with a letter and how far its result is from the target, as
    by a calculator."""
    lines = [f"target {target}"]
    for letter, (move, result) in zip(ascii_lowercase, moves(numbers).items(), strict=False):
        lines.append(f"{'hit' if result == target else f'{result - target:+}'} {letter} {move}")
    return "\n".join(lines)


def chosen(numbers: Numbers, answer: str) -> str | None:
    """The move that a letter stands for; None where it stands for none."""
    return dict(zip(ascii_lowercase, moves(numbers), strict=False)).get(answer)


def solutions(numbers: Numbers, target: int) -> Iterator[str]:
    """The first moves of every shortest way to the target."""
    first = moves(numbers)
    direct = [move for move, result in first.items() if result == target]
    yield from direct or (
        m for m in first if len(numbers) > 2 and target in moves(after(numbers, m)).values()
    )


def held_out(numbers: Numbers, target: int) -> bool:
    text = f"{sorted(numbers)}={target}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[1] % 5 == 0


def draw_task(draw: random.Random, *, val: bool = False) -> tuple[Numbers, int]:
    """Numbers and a target that takes two moves."""
    while True:
        numbers = tuple(
            sorted((draw.randint(SMALLEST, LARGEST) for _ in range(COUNT)), reverse=True)
        )
        first = moves(numbers)
        target = draw.choice([*moves(after(numbers, draw.choice([*first]))).values()])
        if (
            target <= 100
            and target not in first.values()
            and target not in numbers
            and held_out(numbers, target) == val
        ):
            return numbers, target


def main() -> None:
    draw = random.Random(0)
    for name, count, val in (("train", 1024, False), ("val", 256, True)):
        found: dict[tuple[Numbers, int], None] = {}
        while len(found) < count:
            found[draw_task(draw, val=val)] = None
        rows = [
            {"question": f"Reach {target}.", "numbers": list(n), "target": target}
            for n, target in found
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(__file__).with_name(f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
