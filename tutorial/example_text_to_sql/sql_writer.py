"""A scripted writer of questions with queries: it stands in for a large model, the same on every
machine.

It does what `ajet dataset expand` asks a model for: it writes questions of the family that the
prompt names, and answers questions with SQL. One query in ten is wrong, as a model's may be, and
one reply in fifty is prose.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache

from questions import FAMILIES, Family, draw_values
from wordings import pattern, worded

WRONG, PROSE = 0.10, 0.02
HOW_MANY = re.compile(r"JSON array of (\d+)")
MISTAKES = [(" > ", " < "), (" < ", " > "), (" desc", ""), ("count(*)", "max(id)"), ("avg(", "sum("),
            ("sum(", "count("), (" = ", " != "), ("max(", "min(")]  # fmt: skip
CELL = re.compile(r"^  - metadata\.family: (\w+)$", re.MULTILINE)


def reply(ask):
    """Questions in the wordings for training."""
    return replies(ask, "training")


def tuning(ask):
    """Questions in wordings to choose a recipe on."""
    return replies(ask, "tuning")


def held_out(ask):
    """Questions in other wordings, about other values."""
    return replies(ask, "held_out")


def replies(ask, wordings):
    prompt = ask.body["messages"][-1]["content"]
    draw = random.Random(f"{ask.sampling.seed} {prompt}")
    return [said(prompt, draw, wordings) for _ in range(ask.sampling.n)]


def said(prompt, draw, wordings):
    if draw.random() < PROSE:
        return "Sure! Here is what you asked for."
    wanted = HOW_MANY.search(prompt)
    if wanted is None:
        return f"ANSWER: {spoilt(answer_to(prompt), draw)}"
    name = CELL.search(prompt)[1]
    return json.dumps([task(name, draw, wordings) for _ in range(int(wanted[1]))])


def task(name, draw, wordings):
    family = FAMILIES[name]
    values = draw_values(draw, family.names, held_out=wordings == "held_out")
    asked = worded(draw.choice(getattr(family, wordings)), draw).format(**values)
    query = spoilt(family.query.format(**values), draw)
    return {"question": asked, "answer": query, "metadata": {"family": name}}


def spoilt(query, draw):
    """One in ten with a mistake that models make."""
    if draw.random() >= WRONG:
        return query
    for right, wrong in draw.sample(MISTAKES, len(MISTAKES)):
        if right in query:
            return query.replace(right, wrong, 1)
    return "select 1"


@cache
def patterns() -> list[tuple[re.Pattern[str], Family]]:
    return [
        (pattern(wording), family)
        for family in FAMILIES.values()
        for wording in (*family.training, *family.tuning, *family.held_out)
    ]


def answer_to(prompt: str) -> str:
    """The query for the question that ends the prompt."""
    for line in reversed(prompt.splitlines()):
        for form, family in patterns():
            if match := form.fullmatch(line.strip()):
                values = {
                    name.rpartition("_")[0]: value
                    for name, value in match.groupdict().items()
                    if value
                }
                return family.query.format(**values)
    return "select 1"
