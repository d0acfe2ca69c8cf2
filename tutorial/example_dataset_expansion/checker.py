"""A scripted verifier that is not the teacher: it works a task out on its own, and errs on other
tasks, one in fifty.

The teacher that checks itself shares its own errors; whoever checks must err on other tasks than
the writer.
"""

import random
import re

WRONG = 0.02
SUM = re.compile(r"(\d+)\s*([-+*])\s*(\d+)")


def reply(ask):
    """Independent answers to the task that ends the prompt; equal requests, equal replies."""
    prompt = ask.body["messages"][-1]["content"]
    chance = random.Random(f"checker {ask.sampling.seed} {prompt}")
    a, operator, b = SUM.findall(prompt)[-1]
    right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator]
    return [
        f"ANSWER: {right + (1 if chance.random() < WRONG else 0)}" for _ in range(ask.sampling.n)
    ]
