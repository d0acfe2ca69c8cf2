"""Made-up sums: tasks for trying a set-up before there is a dataset."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ajet_sdk.config import Config
from ajet_sdk.tasks.rows import Row

__all__ = ["read_random"]

LARGEST = 999


def read_random(config: Config) -> tuple[Iterator[Row], Iterator[Row]]:
    """Distinct sums of two numbers, the same for the same seed; no sum stands in both splits."""
    sizes = config.task_reader.random_dummy
    count = sizes.training + sizes.validation
    pairs = random.Random(config.trainer_common.seed).sample(range((LARGEST + 1) ** 2), count)
    rows = [_row(number, *divmod(pair, LARGEST + 1)) for number, pair in enumerate(pairs, 1)]
    return iter(rows[: sizes.training]), iter(rows[sizes.training :])


def _row(number: int, a: int, b: int) -> Row:
    return Row(f"random task {number}", {"main_query": f"What is {a} + {b}?", "answer": str(a + b)})
