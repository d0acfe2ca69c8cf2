"""The judge's model as a program: the stand-in for a real one.

By the rubric in `rubric.txt` it compares what was asked with what the doctor asked and with what is
known already.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dialogues import ASK, COMPLAINTS


def topic_of(text: str) -> str | None:
    return next((topic for topic, words in ASK.items() if words == text.strip()), None)


def grade(consultation: str, doctors: str, asked: str) -> tuple[float, str]:
    topic = topic_of(asked)
    if topic is None:
        return 0.0, "It is nothing that a doctor would say."
    if topic == topic_of(doctors):
        return 1.0, "The doctor asked the same."
    if ASK[topic] in consultation:
        return 0.0, "It was asked and answered before."
    complaint = next((one for one in COMPLAINTS if one in consultation), None)
    useful = complaint is not None and topic in COMPLAINTS[complaint]
    return (0.3, "It matters, but not yet.") if useful else (0.0, "It is beside the complaint.")


def part(prompt: str, tag: str) -> str:
    found = re.search(rf"<{tag}>\n(.*?)\n</{tag}>", prompt, re.DOTALL)
    return found[1] if found else ""


def reply(ask: Any) -> str:
    """The reply to what ajet's judge asks."""
    prompt = ask.messages[-1]["content"]
    score, reason = grade(part(prompt, "task"), part(prompt, "reference"), part(prompt, "answer"))
    return json.dumps({"reason": reason, "score": score})
