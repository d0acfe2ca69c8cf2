"""Cells: which there are, which is asked for next, and what steering gives with a writer that reads
them or doesn't.

The writers are those of the tutorial: deterministic functions with favourites, one of which writes
of the cell that a prompt names.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.engines.budget import Budget
from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.card import Facts, write_card
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.cells import (
    WINDOW,
    Axis,
    Collapsed,
    Coverage,
    axes_of,
    cells_of,
)
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.pipeline import Pipeline
from ajet_tools.dataset.generate.records import GenerationResult
from ajet_tools.dataset.generate.seeds import read_seeds
from ajet_tools.dataset.generate.settings import GenerationConfig
from ajet_tools.dataset.model.open import open_endpoint

TUTORIAL = Path(__file__).parents[3] / "tutorial" / "example_dataset_expansion"
TOPICS = f"topic={TUTORIAL / 'topics.txt'}"


def grown(writer: str, cells: str, tokens: int | None = 20_000, **options: Any) -> GenerationResult:
    config = GenerationConfig(
        options.pop("count", 5000), cells=cells_of([cells]), min_new_forms=0.0, **options
    )

    async def run() -> GenerationResult:
        endpoint = open_endpoint(
            None, None, scripted=f"{TUTORIAL / 'writer.py'}:{writer}", budget=Budget(tokens=tokens)
        )
        source = Expansion(read_seeds(TUTORIAL / "problems.jsonl"), config)
        return await Pipeline(source, endpoint).run()

    return asyncio.run(run())


@pytest.mark.slow
def test_at_equal_cost_cells_give_twice_the_forms_of_a_writer_that_reads_them_and_none_of_one_that_does_not() -> (
    None
):
    free, steered = grown("reply", "none"), grown("reply", TOPICS)
    assert steered.diversity().forms >= 2 * free.diversity().forms
    assert steered.coverage["cells"]["of"] == 64
    assert grown("stubborn", "none").diversity().forms == free.diversity().forms
    stubborn = grown("stubborn", TOPICS)
    assert stubborn.diversity().forms < 1.25 * free.diversity().forms
    assert "cells" in steered.coverage_text and "cells" not in free.coverage_text


def test_a_steered_run_asks_for_each_cell_in_turn() -> None:
    result = grown("reply", TOPICS, None, count=70, window=8, validation=0.2)
    cells = Counter(tuple(row["provenance"]["parameters"]["cell"].items()) for row in result.train)
    assert max(cells.values()) <= 8, "a call or two each"


SEEDS = [
    Row(f"line {i}", {"question": "What is " + "really " * (2 * i) + f"{i} plus 1?", "answer": str(i + 1),
                      "metadata": {"topic": topic, "difficulty": i % 2, "source": "us"}})
    for i, topic in enumerate(["rates", "ages", "rates", "areas"])
]  # fmt: skip


def test_the_axes_are_the_seeds_fields_and_those_that_are_given() -> None:
    axes = {axis.name: axis.values for axis in axes_of(SEEDS, None)}
    assert axes == {
        "topic": ("ages", "areas", "rates"),
        "difficulty": ("0", "1"),
    }
    given_too = {
        axis.name: axis for axis in axes_of(SEEDS, {"topic": ("x", "y"), "skill": ("p", "q")})
    }
    assert given_too["topic"] == Axis("topic", ("x", "y"), ("metadata", "topic"))
    assert given_too["skill"].value_of({"question": "?"}, {"skill": "p"}) == "p"
    assert given_too["topic"].value_of({"metadata": {"topic": "y"}}, {"topic": "x"}) == "y"
    assert axes_of(SEEDS, {}) == [] and axes_of(SEEDS, {"domain": ("a", "b")}) == axes_of(
        SEEDS, None
    )
    with pytest.raises(
        ConfigError, match=r"there are 6,000 cells \(topic 3, difficulty 2, x 1000\)"
    ):
        axes_of(SEEDS, {"x": tuple(map(str, range(1000)))})


def test_cells_are_read_from_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "topics.txt").write_text("rates\n\nages\n")
    assert cells_of([]) is None and cells_of(["none"]) == {}
    assert cells_of([f"topic={tmp_path / 'topics.txt'}", "form = open , choice"] ) == {
        "topic": ("rates", "ages"), "form": ("open", "choice"),
    }  # fmt: skip
    for text, message in (
        ("nope", "write AXIS="),
        ("topic=a", "at least 2 different"),
        ("topic=a,a", "different"),
    ):
        with pytest.raises(ConfigError, match=message):
            cells_of([text])


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.integers(0, 2**32))
def test_every_cell_is_asked_for_before_one_is_asked_for_twice(sizes: list[int], seed: int) -> None:
    """And every value of an axis before one stands twice, where the axes are as long as each
    other."""
    axes = [Axis(str(number), tuple(map(str, range(size)))) for number, size in enumerate(sizes)]
    coverage, chance, asked = Coverage(axes, [], 0.1), random.Random(seed), list[tuple[str, ...]]()
    for _ in range(2 * int(np.prod(sizes))):
        cell = coverage.choose(chance)
        coverage.ask(cell)
        asked.append(tuple(cell.values()))
    half = len(asked) // 2
    assert set(Counter(asked[:half]).values()) == {1} and set(Counter(asked).values()) == {2}
    assert {cell[0] for cell in asked[: sizes[0]]} == set(axes[0].values)


def test_a_cell_is_covered_by_a_form_of_its_own() -> None:
    coverage = Coverage([Axis("topic", ("a", "b"))], [], 0.1)
    coverage.add({"question": "Tom has 5 apples and buys 7."}, {"topic": "a"})
    coverage.add({"question": "Anna has 8 apples and buys 9."}, {"topic": "b"})
    assert coverage.as_json()["cells"] == {
        "covered": 1,
        "of": 2,
        "forms": {"topic": {"a": 1, "b": 0}},
    }
    assert coverage.choose(random.Random(0)) == {"topic": "b"}


def test_seeds_of_one_form_are_followed_and_others_end_in_a_collapse() -> None:
    row = {"question": "What is 3 plus 4?"}
    same, other = (
        [{"question": text} for text in texts]
        for texts in (["1 + 2?", "3 + 4?"], ["1 + 2?", "Why is it?"])
    )
    assert Coverage([], same, 0.1).seeds_repeat and not Coverage([], other, 0.1).seeds_repeat
    for seeds, least in ((same, 0.1), (other, 0.0)):
        coverage = Coverage([], seeds, least)
        for _ in range(3 * WINDOW):
            coverage.add(row, {})
            coverage.check()
    coverage = Coverage([], other, 0.1)
    for _ in range(WINDOW - 1):
        coverage.add(row, {})
        coverage.check()
    coverage.add(row, {})
    with pytest.raises(Collapsed):
        coverage.check()


def test_the_card_has_the_cells(tmp_path: Path) -> None:
    cells = {"covered": 3, "of": 4, "forms": {"topic": {"rates": 2, "ages": 1}}}
    rows = [
        {"question": f"What is {word} of it?", "answer": "1"} for word in ("half", "a third", "all")
    ]
    card = write_card(tmp_path, rows, Facts(coverage={"cells": cells})).read_text()
    assert "3 of 4 cells have a form of their own" in card and "| topic | ages | 1 |" in card
