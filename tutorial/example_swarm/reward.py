"""The reward of an answer. Edit it while the model trains: the next episode uses it."""

import re


def score(answer: str, expected: str) -> float:
    """1 where the last number of the answer is the expected one."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == int(expected))
