"""The calculator agent in service, observed by `ajet.trace`: it answers the questions that its
users ask.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python service.py TRACES [--questions 400] [--seed 1]

The agent is that of ../example_math_agent, unchanged; whatever model serves at OPENAI_BASE_URL
answers it.
"""

import argparse
import asyncio
import os
import random
import sys
from pathlib import Path

import ajet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "example_math_agent"))
os.environ.setdefault("OPENAI_API_KEY", "none")

from agent import solve
from arithmetic import distinct, question

AT_ONCE = 32


def asked(count: int, seed: int) -> list[str]:
    """What users ask: the same question is asked more than once, and never one that is held out for
    validation."""
    draw = random.Random(seed)
    known = distinct(draw, max(1, count * 3 // 4), val=False)
    return [question(draw.choice(known)) for _ in range(count)]


async def answer_all(questions: list[str]) -> list[str]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def answer(text: str) -> str:
        async with slots:
            return await solve(text)

    return await asyncio.gather(*(answer(text) for text in questions))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with ajet.trace(given.traces):
        answers = asyncio.run(answer_all(asked(given.questions, given.seed)))
    print(f"answered {len(answers)} questions; observed in {given.traces}")


if __name__ == "__main__":
    main()
