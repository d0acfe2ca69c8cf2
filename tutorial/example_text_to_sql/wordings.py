"""A family of questions: one query, and wordings with alternatives:
`[Count|Please count] the customers in {city}.`"""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass

__all__ = ["Family", "family"]

WORDS = {
    "ask": "what is|give me|tell me|show me|I need|find",
    "at": "of|in|at",
    "best": "best paid|highest paid",
    "buyers": "clients|shoppers|buyers|customers",
    "down": (
        "|, highest first|, from the top|, in descending order|, starting with the highest|, from"
        " high to low"
    ),
    "eldest": "oldest|eldest",
    "fetch": "look up|fetch|work out",
    "from": "in|of|from",
    "known": "know|see",
    "largest": "highest|largest|biggest|greatest|top",
    "list": "list|name|show|give me|find",
    "many": "how many|what number of|tell me how many|I want to know how many|please say how many",
    "mean": "average|mean",
    "more": "more than|over|above|upwards of",
    "names": "the names of|names of|give me the names of|list the names of|what are the names of",
    "number": "number|count|total number",
    "over": "over|above|older than|past|more than",
    "put": "arrange|line up|put",
    "return": "return|print|give me",
    "smallest": "lowest|smallest|least",
    "sort": "rank|order|sort",
    "staff": "employees|people|workers",
    "take": "take|consider|look at",
    "under": "below|under|less than",
    "up": (
        "|, lowest first|, from the bottom|, in ascending order|, starting with the lowest|, from"
        " low to high"
    ),
    "worst": "worst paid|lowest paid",
}


@dataclass(frozen=True)
class Family:
    query: str
    training: tuple[str, ...]
    tuning: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [name for _, name, _, _ in string.Formatter().parse(self.query) if name]


def family(query: str, training: str, tuning: str, held_out: str) -> Family:
    """A wording a line; `<many>` stands for the alternatives of `WORDS`."""

    def wordings(text: str) -> tuple[str, ...]:
        full = re.sub(r"<(\w+)>", lambda word: f"[{WORDS[word[1]]}]", text)
        return tuple(line.strip() for line in full.strip().splitlines())

    return Family(query, wordings(training), wordings(tuning), wordings(held_out))


def worded(wording: str, draw: random.Random) -> str:
    """One of each alternatives."""
    while "[" in wording:
        wording = re.sub(
            r"\[([^\[\]]*)\]", lambda choice: draw.choice(choice[1].split("|")), wording
        )
    return wording[0].upper() + wording[1:]


def pattern(wording: str) -> re.Pattern[str]:
    """Matches all questions of a wording; the group `city_1` is a value of `city`."""
    special = {"[": "(?:", "|": "|", "]": ")"}
    parts = []
    for place, part in enumerate(re.split(r"([\[\]|]|\{\w+\})", wording)):
        if part.startswith("{"):
            words = r"\w+ \w+" if part in ("{name}", "{product}") else r"\w+"
            parts.append(f"(?P<{part[1:-1]}_{place}>{words})")
        else:
            parts.append(special.get(part) or re.escape(part))
    return re.compile("".join(parts), re.IGNORECASE)
