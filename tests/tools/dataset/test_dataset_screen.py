"""What the model that writes rows may not do: begin with our lists, wrap a row in a row, give its
answer away."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.tasks.questions import Reading
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.forms import given_away
from ajet_tools.dataset.documents.read import find_documents
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.quotation import may_be_spelt
from ajet_tools.dataset.generate.records import NO_CHECKS, Candidate
from ajet_tools.dataset.generate.runs import read_corpus
from ajet_tools.dataset.generate.screen import Screen
from ajet_tools.dataset.generate.seeds import as_examples
from ajet_tools.dataset.generate.settings import DocsConfig, GenerationConfig

SEEDS = [
    Row("", {"main_query": text, "metadata": {"answer": "1"}})
    for text in ("How tall is Ben?", "Where is Ann?")
]


def reason(question: str, answer: str = "twelve") -> str | None:
    screen = Screen(GenerationConfig(5), as_examples(SEEDS), NO_CHECKS)
    values = {"task_id": "t", "main_query": question, "metadata": {"answer": answer}}
    _, refused = screen.sort([Candidate(values, {})])
    return refused[0].reason if refused else None


@pytest.mark.parametrize("name", ["personas", "domains"])
def test_a_row_does_not_begin_with_our_own_lists(name: str) -> None:
    for phrase in prompts.phrases(f"expand/{name}"):
        text = f"{phrase[0].upper()}{phrase[1:]} wonders how many loaves fit into the oven."
        if len(phrase.split()) > 4:
            assert reason(text) == "repeats the prompt", phrase
            assert (
                reason(f"As {phrase}, how many loaves fit into the oven?") == "repeats the prompt"
            )
    assert reason("A baker wonders how many loaves fit into the oven before dawn.") is None


@pytest.mark.parametrize("wrap", [json.dumps, lambda row: f"```json\n{json.dumps([row])}\n```"])
def test_a_row_is_no_question(wrap: Any) -> None:
    row = {
        "main_query": "How many loaves fit into the oven of the mill?",
        "metadata": {"answer": "9"},
    }
    assert reason(wrap(row)) == "a row as the question"
    assert (
        reason('{"width": 3} is the size of a box. How deep is it, if it holds nine litres?')
        is None
    )


@pytest.mark.parametrize(
    "values",
    [
        {"instruction": "How many? Hint: the answer is 42.", "output": "42"},
        {"question": "Add 12 and 30. The total is 42. What is the total?", "gold": "42"},
        {"question": "Add 12 and 30. Answer: 42", "final_answer": "42"},
        {
            "messages": [
                {"role": "user", "content": "Say it. The result is 42."},
                {"role": "assistant", "content": "42"},
            ]
        },
    ],
)
def test_an_answer_that_is_given_away_in_any_shape(values: dict[str, Any]) -> None:
    assert given_away(Reading(values)) is not None


def test_documents_that_are_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.md", "deck.pptx", "sub/sheet.xlsx", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# A\n\nSome text of a document.")
    logging.getLogger("ajet").propagate = True
    assert [name for name, _ in find_documents([tmp_path])] == ["a.md"]
    assert (
        "deck.pptx" in caplog.text
        and "sub/sheet.xlsx" in caplog.text
        and "picture.png" not in caplog.text
    )


def test_documents_are_redacted_before_a_model_sees_them(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# Contact\n\nWrite to jo.doe@example.com, or call +49 30 1234567 about the boat."
    )
    config = DocsConfig(2)
    [entry] = read_corpus([tmp_path], config).held
    text = "".join(block.text for block in entry.document.blocks)
    assert "example.com" not in text and "1234567" not in text and "about the boat" in text
    [entry] = read_corpus([tmp_path], config, redact=False).held
    assert "jo.doe@example.com" in "".join(block.text for block in entry.document.blocks)


@pytest.mark.parametrize(
    ("figure", "quote", "may"),
    [
        ("12", "There were twelve of them in the old house.", True),
        ("13", "There were twelve of them there.", False),
        ("1312", "It was opened by the masons of the valley.", False),
        ("1984", "In nineteen eighty-four it was sold.", True),
        ("0.5", "He gave half of it to the people of the town.", True),
        ("42", "The house was painted last year.", False),
    ],
)
def test_a_figure_that_a_quotation_lacks(figure: str, quote: str, may: bool) -> None:
    assert may_be_spelt(figure, quote) is may
