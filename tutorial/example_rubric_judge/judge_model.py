"""A judge's model that is a program: the stand-in for a real one.

It sees five things in a reply, by patterns. Without a rubric it has the taste that is known of LLM
judges: it likes kind words and length. By a rubric it scores the share of the points that hold.
Asked for a rubric, it compares the scored examples with and without each thing, and writes down
those that make a difference.
"""

from __future__ import annotations

import json
import re
from typing import Any

SEEN = {
    "It names the day on which something happens.": r"\b(Mon|Tues|Wednes|Thurs|Fri)day\b",
    "It says who does what next.": r"\b(hand it|I send)\b",
    "It has kind words.": r"\b(sorry|Thank you|value you)\b",
    "It assures the customer of care.": r"\b(seriously|pleasant|rest assured)\b",
    "It is longer than thirty words.": r"^(\S+\s+){30,}",
}
"""A point of a rubric, and how it is seen."""
DIFFERENCE = 0.25
"""In the mean score, from which a thing is worth a point."""


def holds(point: str, reply: str) -> bool:
    return re.search(SEEN[point], reply) is not None


def grade(reply: str, rubric: str) -> tuple[float, str]:
    points = [point for point in SEEN if point in rubric]
    if points:
        held = [point for point in points if holds(point, reply)]
        return len(held) / len(points), " ".join(held) or "No point holds."
    kind, long = holds("It has kind words.", reply), min(1.0, len(reply.split()) / 50)
    return round(0.5 * kind + 0.5 * long, 2), (
        "Kind and thorough." if kind else "Could be warmer and say more."
    )


def write_rubric(examples: list[tuple[float, str]]) -> list[str]:
    found = []
    for point in SEEN:
        scores: dict[bool, list[float]] = {True: [], False: []}
        for score, reply in examples:
            scores[holds(point, reply)].append(score)
        if all(scores.values()):
            gain = sum(scores[True]) / len(scores[True]) - sum(scores[False]) / len(scores[False])
            found += [(gain, point)] if gain >= DIFFERENCE else []
    return [point for _, point in sorted(found, reverse=True)] or ["It answers the customer."]


def reply(ask: Any) -> str:
    """The reply to what ajet's judges ask."""
    prompt = ask.messages[-1]["content"]
    replies = re.findall(r"<answer[^>]*>\n(.*?)\n</answer>", prompt, re.DOTALL)
    if '"points"' in prompt:
        scores = [float(text) for text in re.findall(r'<example score="([^"]+)">', prompt)]
        return json.dumps({"points": write_rubric(list(zip(scores, replies, strict=True)))})
    rubric = (re.search(r"<rubric>\n(.*?)\n</rubric>", prompt, re.DOTALL) or [""])[0]
    score, reason = grade(replies[0], rubric)
    return json.dumps({"reason": reason, "score": score})
