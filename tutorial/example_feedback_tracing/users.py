"""SIMULATED users: nobody real was asked. They look at the answers in a trace and give thumbs and
corrected answers.

    python users.py TRACES [--seed 1]

A user knows the right result. Of ten, four say nothing. One who is content gives a thumb up; one
who is not gives a thumb down, and in seven of ten cases writes the right answer as well. One in
fifty is mistaken, and corrects to a wrong one.
"""

import argparse
import os
import random
import re
import sys
from collections import Counter
from pathlib import Path

from ajet_sdk.errors import AjetError
from ajet_sdk.trace.feedback import give
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Feedback

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "example_math_agent"))

os.environ.setdefault(
    "OPENAI_API_KEY", "none"
)  # the agent makes its client as it is imported; nobody is asked here

from agent import calc, right

SILENT, CORRECTS, MISTAKEN = 0.4, 0.7, 0.02
NEW = """
    SELECT episode_id, task->>'$.main_query' AS question, output->>'$' AS output
    FROM episodes WHERE task->>'$.env_type' = 'solve' AND episode_id NOT IN (SELECT episode_id FROM feedback)
    ORDER BY question, started_at, episode_id"""


def opinion(episode_id: str, question: str, output: str, draw: random.Random) -> Feedback | None:
    """What a user says of one answer; None: nothing."""
    silent, corrects, mistaken, slip = (draw.random() for _ in range(4))
    if silent < SILENT:
        return None
    answer = calc(re.sub(r"[^\d+*-]", "", question))
    said: dict[str, object] = {
        "episode_id": episode_id,
        "author": f"simulated user {draw.randint(1, 50)}",
    }
    if mistaken < MISTAKEN:
        return Feedback(**said, score=0.0, correction=str(int(answer) + 1 + int(9 * slip)))
    if right(output, answer):
        return Feedback(**said, score=1.0)
    return Feedback(**said, score=0.0, correction=answer if corrects < CORRECTS else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    reader, draw = open_trace(given.traces), random.Random(given.seed)
    answers = reader.query(NEW).to_pylist()
    reader.close()
    said = [
        opinion(row["episode_id"], row["question"], row["output"] or "", draw) for row in answers
    ]
    feedback = [one for one in said if one is not None]
    give(given.traces, *feedback)
    counts = Counter("up" if one.score else "down" for one in feedback)
    corrected = sum(one.correction is not None for one in feedback)
    print(
        f"simulated users on {len(answers)} answers: {counts['up']} thumbs up, {counts['down']}"
        f" down ({corrected} with a corrected answer), {len(answers) - len(feedback)} said nothing"
    )
    print(f"content, of those who spoke: {counts['up'] / max(1, len(feedback)):.2f}")


if __name__ == "__main__":
    try:
        main()
    except AjetError as error:  # there is no such trace, say
        sys.exit(f"{type(error).__name__}: {error}")
