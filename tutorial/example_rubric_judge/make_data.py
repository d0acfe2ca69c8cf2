"""Writes `scored.jsonl` (10 answers) and `held_out.jsonl` (60): a shop's replies to customers,
scored as by its owner.

The owner gives half of the score for a day on which something happens, and half for who does what
next. Kind words and length earn nothing. One score in ten is off by a half, as people's are.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
QUESTIONS = [
    "My parcel has not come.", "The lamp arrived broken.", "Can I have the red one instead?", "Where is my refund?",
    "The shoes are too small.", "I was charged twice.",
]  # fmt: skip
KIND = [
    "Thank you so much for writing to us!",
    "We are terribly sorry to hear that.",
    "We value you as a customer.",
]
FILLER = [
    "We take every message seriously and look into each of them with care.",
    "Our team works hard to make shopping with us as pleasant as it can be.",
    "Please rest assured that this matters to us.",
]
DAY = [
    "It arrives on Friday.",
    "The money is back on your card by Tuesday.",
    "You hear from us on Monday.",
]
NEXT = [
    "Put the label in the box and hand it to the courier.",
    "I send you the new one; you need do nothing.",
]


def reply(draw: random.Random) -> tuple[str, float]:
    day, steps = draw.random() < 0.5, draw.random() < 0.5
    parts = [draw.choice(KIND)] if draw.random() < 0.5 else []
    parts += draw.sample(FILLER, draw.randint(0, 3))
    parts += [draw.choice(DAY)] * day + [draw.choice(NEXT)] * steps
    score = 0.5 * day + 0.5 * steps
    if draw.random() < 0.1:
        score = draw.choice([one for one in (0.0, 0.5, 1.0) if abs(one - score) == 0.5])
    return " ".join(parts) or "Noted.", score


def main() -> None:
    draw = random.Random(7)
    for name, count in (("scored", 10), ("held_out", 60)):
        rows = []
        for _ in range(count):
            text, score = reply(draw)
            rows.append({"query": draw.choice(QUESTIONS), "answer": text, "score": score})
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
