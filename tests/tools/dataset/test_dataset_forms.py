"""Rows that say the same but for numbers and names, and questions that say their own answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.tasks.questions import Reading
from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.forms import form_of, given_away

pytestmark = pytest.mark.slow

TEMPLATES = r"""
import json, random, re

NAMES = ["Tom", "Anna", "Priya", "Chen", "Lena", "Omar", "Mia", "Ravi", "Zoe"]
SENTENCES = [
    "{name} has {a} red apples and buys {b} more at the market. How many apples does {name} have now?",
    "A train covers {a} kilometres before noon and {b} kilometres after it. How far does it go on that day?",
    "In the library of {name} there are {a} novels and {b} atlases on the shelves. How many books is that?",
    "{name} bakes {a} rolls in the morning and {b} rolls at night. How many rolls come out of the oven?",
    "The school buys {a} pencils for its pupils and {b} for its teachers. How many pencils does it buy?",
    "A farmer counts {a} sheep on the hill and {b} in the barn. How many sheep are there altogether?",
    "{name} walks {a} steps to the station and {b} steps back by another way. How many steps is the walk?",
    "The tank holds {a} litres, and {b} litres are poured in. How many litres are in the tank after that?",
    "On Monday {a} people see the film, and on Tuesday {b} people do. How many people saw it in these two days?",
]

def reply(ask):
    text = ask.body["messages"][-1]["content"]
    chance = random.Random(text + str(ask.body.get("seed")))
    rows = []
    for _ in range(int(re.search(r"array of (\d+)", text)[1])):
        a, b = chance.randint(100, 9999), chance.randint(100, 9999)
        asked = chance.choice(SENTENCES).format(a=a, b=b, name=chance.choice(NAMES))
        if chance.random() < GIVEN:
            asked += f" (The answer is {a + b}.)"
        rows.append({"main_query": asked, "metadata": {"answer": str(a + b)}})
    return json.dumps(rows)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    seeds = [
        "What is 3 plus 4?",
        "How much is 8 less 5?",
        "Which number is twice 6?",
        "Which number is half of 18?",
    ]
    answers = ["7", "3", "12", "9"]
    rows = [
        {"main_query": q, "metadata": {"answer": a}} for q, a in zip(seeds, answers, strict=True)
    ]
    Path("seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def expand(*arguments: str, given: float = 0.0, code: int = 0) -> str:
    Path("replies.py").write_text(f"GIVEN = {given}\n{TEMPLATES}")
    scripted = ("--model", "replies.py:reply", "--verify", "none")
    result = CliRunner().invoke(
        app, ["dataset", "expand", "seeds.jsonl", "--out", "data", *scripted, *arguments]
    )
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


def test_five_hundred_tasks_of_nine_sentences_are_told_as_nine(place: Path) -> None:
    said = expand("--count", "500", "--with", "per_call=20")
    assert (
        "500 rows accepted" in said and "rows are 9 sentences with other numbers and names" in said
    )
    assert "--with max_same_form=5 keeps at most five of each" in said
    card = Path("data/README.md").read_text()
    assert "Without their numbers and names the questions of 500 rows have 9 forms." in card
    assert "> 500 rows are 9 sentences" in card
    stats = CliRunner().invoke(app, ["dataset", "check", "data/train.jsonl"]).output
    assert "9 forms" in stats and "rows are 9 sentences" in " ".join(stats.split())
    found = json.loads(
        CliRunner().invoke(app, ["dataset", "check", "data/train.jsonl", "--json"]).stdout
    )
    found = found["stats"]["data/train.jsonl"]
    assert found["diversity"]["forms"] == 9 and found["diversity"]["commonest"] >= 500 / 9


def test_a_bound_takes_so_many_of_each_form_and_refuses_the_rest(place: Path) -> None:
    said = expand("--count", "500", "--with", "per_call=20", "--with", "max_same_form=3", code=1)
    assert "27 rows accepted" in said and "refused: form used too often" in said
    rows = [json.loads(line) for line in Path("data/train.jsonl").read_text().splitlines()]
    forms = [form_of(row["main_query"]) for row in rows]
    assert {forms.count(form) for form in forms} == {3} and len(set(forms)) == 9


def test_a_question_that_says_its_answer_is_refused(place: Path) -> None:
    said = expand("--count", "60", given=0.3)
    assert "refused: answer in the question" in said
    rows = [json.loads(line) for line in Path("data/train.jsonl").read_text().splitlines()]
    assert len(rows) == 60 and not any("answer is" in row["main_query"] for row in rows)
    refused = [json.loads(line) for line in Path("data/rejected.jsonl").read_text().splitlines()]
    away = [row for row in refused if row["rejected"]["reason"] == "answer in the question"]
    assert away and all(row["rejected"]["detail"].startswith("answer is ") for row in away)
    Path("bad.jsonl").write_text(
        json.dumps({key: away[0][key] for key in ("main_query", "metadata")}) + "\n"
    )
    found = CliRunner().invoke(app, ["dataset", "check", "bad.jsonl"]).output
    assert "a question contains its answer (1)" in found


def test_rows_of_other_sentences_are_not_called_alike(place: Path) -> None:
    words = [
        "river",
        "stone",
        "lamp",
        "harbour",
        "violin",
        "meadow",
        "ladder",
        "candle",
        "bridge",
        "garden",
    ]
    rows = [
        {"main_query": f"Which {a} stands by the {b}, and why?", "answer": "x"}
        for a in words
        for b in words
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stats = CliRunner().invoke(app, ["dataset", "check", "rows.jsonl"]).output
    assert "100 forms" in stats and "other numbers and names" not in stats


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "Tom has 5 apples and buys 7. How many has he?",
            "Anna Maria has 12.5 apples and buys three. How many has she?",
        ),
        ("What is 31 * 96?", "What is 7 * -3?"),
        ("In Paris, John's car goes 50 km/h.", "In New York, Ann's car goes 1,200 km/h."),
        ("Wie viel kosten 3 Brote?", "Wie viel kosten 17 Brote?"),
    ],
)
def test_numbers_and_names_make_no_other_form(one: str, other: str) -> None:
    assert form_of(one) == form_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 + 4?", "What is 3 * 4?"),
        ("What is 3 + 4?", "How much is 3 + 4?"),
        ("Wie heißt die Hauptstadt von Peru?", "Wie heißt die Mutter von Peter?"),
        ("Add 3 and 4.", "Multiply 3 and 4."),
    ],
)
def test_other_words_make_another_form(one: str, other: str) -> None:
    assert form_of(one) != form_of(other)


@given(
    st.lists(st.integers(0, 10**9), min_size=2, max_size=2),
    st.lists(st.sampled_from(["Tom", "Anna"]), min_size=2),
)
def test_a_form_does_not_depend_on_what_is_put_in(numbers: list[int], names: list[str]) -> None:
    texts = [
        f"{name} has {n} coins. How many coins does {name} have?"
        for n, name in zip(numbers, names, strict=False)
    ]
    assert len({form_of(text) for text in texts}) == 1
    assert form_of(form_of(texts[0])) == form_of(texts[0])


@pytest.mark.parametrize(
    ("question", "answer", "away"),
    [
        ("What is 31 * 96? (The answer is 2976.)", "2976", True),
        ("What is 31 * 96? (the answer is: $2976$)", 2976, True),
        ("What is 31 * 96? 2976", "2976", True),
        ("Compute 31 * 96 = 2976", "2976", True),
        ("Where is the Louvre? Solution: Paris", "paris", True),
        ("die Antwort lautet 5, warum?", "5", True),
        ("31乘以96是多少？答案是2976。", "2976", True),
        ("Which is larger, 3 or 5?", "5", False),
        ("A) 3 B) 5: which one is odd and above four?", "5", False),
        ("Is the answer 5 or 7?", "5", False),
        ("Which is the result: 5 or 7?", "5", False),
        ("If the answer is 12, what is twice that?", "24", False),
        ("Solve x + 0 = 5", "5", False),
        ("The answer is 29761? Or what is it?", "2976", False),
        ("Is water wet?", True, False),
        ("Compute 31 * 96. Hint: 2,976", "2976", True),
        ("How many legs has an insect? (Six)", "6", True),
        ("What is 31 * 96? The result is 2976.0", 2976, True),
        ("The correct option is B. Which one is it?", "B", True),
        ("Why does the battle of Hastings in 1066 matter?", "the battle of Hastings in 1066", True),
        (
            "Was it the battle of Hastings in 1066 or the siege of York?",
            "the battle of Hastings in 1066",
            False,
        ),
        (
            "It was the battle of Hastings in 1066. What came after it?",
            "the battle of Hastings in 1066",
            False,
        ),
        ("Six men dig for 5 days. How many men dig it in 10?", "6", False),
        ("What is it?", "", False),
    ],
)
def test_what_gives_an_answer_away(question: str, answer: object, away: bool) -> None:
    assert (
        given_away(Reading({"main_query": question, "metadata": {"answer": answer}})) is not None
    ) is away
    assert (given_away(Reading({"question": question, "solution": answer})) is not None) is away
