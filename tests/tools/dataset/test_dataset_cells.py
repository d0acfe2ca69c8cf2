"""Cells: which there are, which is asked for next, and what steering gives with a writer that reads
them or doesn't.

The writers are those of the tutorial: deterministic functions with favourites, one of which writes
of the cell that a prompt names.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.engines.budget import Budget
from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.cells import Axis, Cells, axes_of, cells_of
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.pipeline import Pipeline
from ajet_tools.dataset.generate.records import GenerationResult
from ajet_tools.dataset.generate.seeds import read_seeds
from ajet_tools.dataset.generate.settings import GenerationConfig
from ajet_tools.dataset.model.open import open_endpoint

TUTORIAL = Path(__file__).parents[3] / "tutorial" / "example_dataset_expansion"
TOPICS = [f"topic={TUTORIAL / 'topics.txt'}", "skill=sum,difference,product,remainder"]


def grown(
    writer: str, cells: list[str], tokens: int | None = 20_000, **options: Any
) -> GenerationResult:
    config = GenerationConfig(options.pop("count", 5000), cells=cells_of(cells), **options)

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
    free, steered = grown("reply", []), grown("reply", TOPICS)
    assert steered.diversity().forms >= 2 * free.diversity().forms
    assert grown("stubborn", []).diversity().forms == free.diversity().forms
    stubborn = grown("stubborn", TOPICS)
    assert stubborn.diversity().forms < 1.25 * free.diversity().forms


def test_a_steered_run_asks_for_each_cell_in_turn() -> None:
    result = grown("reply", TOPICS, None, count=70, window=8, validation=0.2)
    cells = Counter(
        (
            row["provenance"]["parameters"]["cell"]["topic"],
            row["provenance"]["parameters"]["cell"]["skill"],
        )
        for row in result.train
    )
    assert max(cells.values()) <= 8, "a call or two each"


SEEDS = [
    Row(f"line {i}", {"question": f"What is {i} plus 1?", "answer": str(i + 1), "form": "open",
                      "metadata": {"topic": topic, "source": "us"}})
    for i, topic in enumerate(["rates", "ages", "rates", "areas"])
]  # fmt: skip


def test_an_axis_is_a_field_of_the_seeds_where_they_have_one_of_its_name() -> None:
    given_axes = {"topic": ("x", "y"), "form": ("open", "choice"), "skill": ("p", "q")}
    assert axes_of(SEEDS, given_axes) == [
        Axis("topic", ("x", "y"), ("metadata", "topic")),
        Axis("form", ("open", "choice"), ("form",)),
        Axis("skill", ("p", "q")),
    ]
    with pytest.raises(ConfigError, match=r"there are 3,000 cells \(topic 3, x 1000\)"):
        axes_of(SEEDS, {"topic": ("a", "b", "c"), "x": tuple(map(str, range(1000)))})


def test_cells_are_read_from_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "topics.txt").write_text("rates\n\nages\n")
    assert cells_of([]) == {}
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


@given(st.lists(st.integers(2, 4), min_size=0, max_size=3), st.integers(0, 2**32))
def test_every_cell_is_asked_for_before_one_is_asked_for_twice(sizes: list[int], seed: int) -> None:
    axes = [Axis(str(number), tuple(map(str, range(size)))) for number, size in enumerate(sizes)]
    cells = Cells(axes, seed)
    asked = [tuple(cells.of_call(number).items()) for number in range(2 * math.prod(sizes))]
    assert set(Counter(asked[: len(asked) // 2]).values()) == {1}
    assert set(Counter(asked).values()) == {2}


def test_the_personas_of_a_strategy_are_those_that_are_given() -> None:
    given_cells = {"persona": ("a baker", "a nurse"), "topic": ("rates", "ages")}
    source = Expansion(SEEDS, GenerationConfig(4, cells=given_cells, strategies={"persona": 1.0}))
    prompts = [source.next_call(number, "m", 1.0).messages[1]["content"] for number in range(2)]  # type: ignore[union-attr]
    assert all(any(persona in text for text in prompts) for persona in given_cells["persona"])
