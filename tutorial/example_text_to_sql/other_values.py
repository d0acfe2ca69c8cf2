"""Demonstrations again, about places, people and goods that the shop lacks.

    python other_values.py expert.jsonl > demonstrations.jsonl

Eight cities in 400 demonstrations can be learnt by heart: a model then writes a city that it knows for one that it
does not. A made-up name can only be copied from the question. Each conversation is written twice: as it was recorded,
and with other values in its question and its query.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

_SYLLABLES = (
    "ba ber bri cal cor da del dun el fa fen gal gri ha hol in jor ka kel lan lo mar mi nor o pa pel qui ra ros sa "
    "sten ta tol u va vel wes yar zan"
)
SYLLABLES = _SYLLABLES.split()
VALUE = re.compile(r"(\w+) = '([^']*)'")


def word(draw: random.Random) -> str:
    return "".join(draw.choice(SYLLABLES) for _ in range(draw.randint(2, 3)))


def another(column: str, value: str, draw: random.Random) -> str:
    """A made-up value of the same form: `Vienna` → `Kelrosta`, `Ada Hill` → `Fava Rosco`, `red lamp` → `red galtol`."""
    *first, last = value.split()
    if last.istitle():
        return " ".join(word(draw).capitalize() for _ in (*first, last))
    return " ".join([*first, word(draw)]) + "s" * (column == "category")


def with_other_values(question: str, query: str, draw: random.Random) -> tuple[str, str]:
    for column, value in VALUE.findall(query):
        new = another(column, value, draw)
        question = re.sub(rf"\b{re.escape(value)}\b", new, question)
        query = query.replace(f"'{value}'", f"'{new}'")
    return question, query


def about_others(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    system, asked, replied = row["messages"]
    question, query = with_other_values(asked["content"], replied["content"], draw)
    return {**row, "messages": [system, {**asked, "content": question}, {**replied, "content": query}]}


if __name__ == "__main__":
    draw = random.Random(0)
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    rows += [about_others(row, draw) for row in rows]
    draw.shuffle(rows)
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))
