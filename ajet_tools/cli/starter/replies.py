"""Scripted replies: they stand in for a model, so that the agent runs without one."""

from __future__ import annotations

import re

from ajet_sdk.protocols import Ask


def reply(ask: Ask) -> str:
    """The sum that the last message asks for; wrong, on purpose, where it is above 100."""
    numbers = re.findall(r"\d+", str(ask.body["messages"][-1]["content"]))
    total = sum(int(number) for number in numbers)
    return str(total if total <= 100 else total + 1)
