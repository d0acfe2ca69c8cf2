"""Logged consultations: what patients said, what the doctor asked. Writes `train.jsonl` and `val.jsonl`.

A task is a consultation up to the doctor's turn; its `answer` is what the doctor asked then. No conversation stands in
both files: a stable hash decides.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SYSTEM = "You are a doctor."
ASK = {
    "fever": "Do you have a fever?",
    "days": "How many days?",
    "breath": "Is it hard to breathe?",
    "blood": "Is there blood?",
    "food": "What did you eat?",
    "allergy": "Any allergies?",
    "place": "Where does it hurt?",
    "medicine": "Which medicine do you take?",
    "enough": "I know enough.",
}
ANSWERS = {
    "fever": ["yes", "no"], "days": ["two", "nine"], "breath": ["yes", "no"], "blood": ["yes", "no"],
    "food": ["fish", "rice"], "allergy": ["nuts", "none"], "place": ["left", "right"], "medicine": ["aspirin", "none"],
}  # fmt: skip
COMPLAINTS = {
    "I cough.": ["fever", "breath", "blood"],
    "My head hurts.": ["days", "place", "medicine"],
    "My belly hurts.": ["food", "place", "blood"],
    "My skin itches.": ["allergy", "medicine", "days"],
    "My throat is sore.": ["fever", "days", "allergy"],
    "I feel dizzy.": ["medicine", "food", "breath"],
}
GREETINGS = ["", "Hello. ", "Good morning. ", "Help me. "]


def next_topic(complaint: str, told: dict[str, str]) -> str:
    """What the doctor asks: in order, but a fever's days before all else, and nothing more where blood is seen."""
    if told.get("blood") == "yes":
        return "enough"
    if told.get("fever") == "yes" and "days" not in told:
        return "days"
    return next((topic for topic in COMPLAINTS[complaint] if topic not in told), "enough")


def consultation(draw: random.Random) -> tuple[list[dict[str, str]], str]:
    """A conversation up to some turn of the doctor, and the topic of that turn."""
    complaint, told = draw.choice(list(COMPLAINTS)), dict[str, str]()
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": draw.choice(GREETINGS) + complaint},
    ]
    for _ in range(draw.randint(0, 3)):
        topic = next_topic(complaint, told)
        if topic == "enough":
            break
        told[topic] = draw.choice(ANSWERS[topic])
        messages += [{"role": "assistant", "content": ASK[topic]}, {"role": "user", "content": told[topic]}]
    return messages, next_topic(complaint, told)


def held_out(messages: list[dict[str, str]]) -> bool:
    return hashlib.blake2b(json.dumps(messages).encode(), digest_size=1).digest()[0] < 64


def main() -> None:
    draw, seen = random.Random(3), set[str]()
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    while len(rows["train"]) < 192 or len(rows["val"]) < 64:
        messages, topic = consultation(draw)
        name, key = "val" if held_out(messages) else "train", json.dumps(messages)
        if key not in seen and len(rows[name]) < {"train": 192, "val": 64}[name]:
            seen.add(key)
            rows[name].append({"init_messages": messages, "answer": ASK[topic]})
    for name, found in rows.items():
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
