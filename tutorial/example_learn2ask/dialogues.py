"""Logged consultations: what patients said, what the doctor asked. Writes `train.jsonl` and
`val.jsonl`.

A task is a consultation up to the doctor's turn; its `answer` is what the doctor asked then. A
patient tells a story of three parts. Any two stories share at most one part, and a story is in one
file only: no validation task nearly repeats a training task.
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
BEGINNINGS = [
    "It began last Monday at work", "It came while I was out running", "It started after my long flight home",
    "I woke up with it on my birthday", "It came back when the summer ended", "It began in the car with the children",
    "I first felt it during the concert", "It started the week we moved house", "It came slowly over the whole winter",
    "I had it once as a small child",
]  # fmt: skip
WORSE = [
    "it wakes me several times a night", "climbing stairs makes it much worse", "it goes away when I lie down",
    "cold air brings it back at once", "it is bad before breakfast and then better", "I can hardly read a page with it",
    "it troubles me most after lunch", "sitting at my desk is no longer possible", "loud music makes it a lot stronger",
    "it comes and goes without any reason",
]  # fmt: skip
AROUND = [
    "my sister has the same", "nobody else in the office has it", "my wife told me to come here",
    "the pharmacist had nothing for it", "my father had trouble like this too", "I have a wedding to go to on Friday",
    "tea with honey did not help", "my neighbour thinks it is nothing", "we only just got a new dog",
    "I am afraid it will not stop",
]  # fmt: skip


def next_topic(complaint: str, told: dict[str, str]) -> str:
    """What the doctor asks: in order, but a fever's days before all else, and nothing more where
    blood is seen."""
    if told.get("blood") == "yes":
        return "enough"
    if told.get("fever") == "yes" and "days" not in told:
        return "days"
    return next((topic for topic in COMPLAINTS[complaint] if topic not in told), "enough")


def story(draw: random.Random) -> str:
    """Two parts choose the third, so that another story has at most one of them in its place."""
    begun, worse = draw.randrange(10), draw.randrange(10)
    return f"{BEGINNINGS[begun]}, {WORSE[worse]}, and {AROUND[(begun + worse) % 10]}."


def consultation(draw: random.Random) -> tuple[list[dict[str, str]], str]:
    """A conversation up to some turn of the doctor, and the topic of that turn."""
    complaint, told = draw.choice(list(COMPLAINTS)), dict[str, str]()
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{draw.choice(GREETINGS)}{complaint} {story(draw)}"},
    ]
    for _ in range(draw.randint(0, 3)):
        topic = next_topic(complaint, told)
        if topic == "enough":
            break
        told[topic] = draw.choice(ANSWERS[topic])
        messages += [
            {"role": "assistant", "content": ASK[topic]},
            {"role": "user", "content": told[topic]},
        ]
    return messages, next_topic(complaint, told)


def held_out(messages: list[dict[str, str]]) -> bool:
    """One story in four is for validation, whatever the complaint: a stable hash decides."""
    told = messages[1]["content"].rstrip(".").rpartition(". ")[2]
    return hashlib.blake2b(told.encode(), digest_size=1).digest()[0] < 64


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
