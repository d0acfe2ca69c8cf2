"""The filter language of rows, and what else keeps a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.curation.filter import parse
from ajet_tools.dataset.curation.keep import Keep
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.blocks import Row, as_table, blocks_of
from ajet_tools.dataset.files.tables import read_blocks
from ajet_tools.dataset.verify import open_verifier
from ajet_tools.text.grammar import FilterError

ROW: dict[str, Any] = {
    "main_query": "How many trains are there?",
    "metadata": {
        "answer": "42",
        "level": 3,
        "tags": ["math", "easy"],
        "checked": True,
        "note": None,
    },
    "messages": [{"role": "user", "content": "Hello"}],
    "score.raw": 0.5,
}


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "metadata.level=3",
        "metadata.level>=3 metadata.level<4",
        "metadata.level=1,3",
        "metadata.level!=4",
        "metadata.answer=42",
        "metadata.answer>41",
        "metadata.tags=math",
        "metadata.tags.count=2",
        "metadata.checked=true",
        "metadata.note=none",
        "metadata.absent=none",
        "metadata.tags.--1=none",
        "metadata.tags.²=none",
        "metadata.tags.5=none",
        "metadata.note!=x",
        "score.raw<1",
        "messages.0.content=Hello",
        "messages.-1.role~USER",
        "main_query.chars=26",
        "chars=26 and words=5",
        "language=en",
        "TRAINS",
        '"many trains"',
        "not zebra",
        "zebra or trains",
        "(zebra or trains) metadata.level=3",
        "not (zebra trains)",
        'main_query~"regex:^How .* there.$"',
        "metadata~easy",
        "task_id!=none",
    ],
)
def test_a_row_fits_and_does_not_fit_the_opposite(expression: str) -> None:
    assert kept(Keep(parse(expression)), ROW) == [ROW]
    if expression:
        assert not kept(Keep(parse(f"not ({expression})")), ROW)


@pytest.mark.parametrize(
    ("expression", "message", "position"),
    [
        ("metadata.level>", "a value is missing", 15),
        ("(zebra", r"this \( is never closed", 0),
        ("zebra)", r"this \) has no matching \(", 5),
        ("or zebra", "a condition is missing here", 0),
        ("level<1,2", "< takes a single value", 8),
        ('main_query~"regex:("', "not a regular expression", 11),
        ('main_query~"regex:a{9999999999}"', "not a regular expression", 11),
        ('main_query~"open', "never closed", 11),
    ],
)
def test_what_is_not_understood_is_told_by_its_place(
    expression: str, message: str, position: int
) -> None:
    with pytest.raises(FilterError, match=message) as caught:
        parse(expression)
    assert caught.value.position == position


def kept(keep: Keep, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = blocks_of((Row(f"rows line {i}", row) for i, row in enumerate(rows, 1)), "rows")
    return [row.values for block, indices in keep.of(blocks) for row in block.rows(indices)]


def test_a_field_that_no_row_has_is_a_typing_error() -> None:
    with pytest.raises(
        ConfigError, match=r"no row has a field 'metadata.levle'; did you mean metadata.level\?"
    ):
        kept(Keep(parse("metadata.levle=3")), ROW)
    assert kept(Keep(parse("metadata.rare=3")), ROW, {"main_query": "x", "metadata": {"rare": 3}})
    assert kept(Keep(parse("metadata.never=none")), ROW) == [ROW]


def test_languages_are_of_what_the_row_asks() -> None:
    rows = [
        {"main_query": text}
        for text in ("short", "Wie viele Züge sind das?", "How many trains are there?")
    ]
    assert kept(Keep(parse("chars>=6 chars<=25")), *rows) == [rows[1]]
    keep = Keep(languages=("en",))
    assert kept(keep, *rows) == [rows[2]]
    assert keep.left_out == {"in another language (und)": 1, "in another language (de)": 1}
    with pytest.raises(ConfigError, match="--language xx"):
        Keep(languages=("xx",))


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is 3 + 4?", "en"),
        ("Compute 33 plus 69.", "en"),
        ("Wie viele Züge fahren ab?", "de"),
        ("Combien de trains y a-t-il dans la gare ?", "fr"),
        ("¿Cuántos trenes hay en la estación?", "es"),
        ("Quanti treni ci sono nella stazione?", "it"),
        ("Quantos trens existem na estação?", "pt"),
        ("小明有三个苹果，吃了一个，还剩几个？", "zh"),
        ("太郎はりんごを三つ持っています。", "ja"),
        ("기차가 몇 대 있습니까?", "ko"),
        ("Сколько поездов на станции?", "ru"),
        ("Скільки потягів є на станції?", "uk"),
        ("كم عدد القطارات؟", "ar"),
        ("3 + 4 =", "und"),
        ("def f(x): return x", "und"),
        ("", "und"),
    ],
)
def test_the_language_of_a_question(text: str, language: str) -> None:
    assert language_of(text) == language


JUDGES = """
import ajet

@ajet.judge
def even(output: str, answer: str) -> float:
    return 1.0 if int(output) % 2 == 0 else 0.25
"""


def test_a_judge_keeps_what_it_gives_full_marks_or_the_least_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [
        {"main_query": "q", "metadata": {"answer": answer}}
        for answer in ("2", "3", "no number", "4")
    ]
    keep = Keep(judge=open_verifier("judge:judges.py:even"))
    assert kept(keep, *rows) == [rows[0], rows[3]]
    assert keep.left_out.total() == 2
    assert len(keep.failures) == 1 and keep.failures[0].startswith(
        "rows line 3: ValueError: invalid literal"
    )
    keep = Keep(judge=open_verifier("judge:judges.py:even"), reward=0.25)
    assert kept(keep, *rows) == [rows[0], rows[1], rows[3]]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        ["42", "3", "3.0", "true", "math", " 3", "[x]", "ß", "1e3", "", "nan", "Train 7"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)
FILTERS = [
    "a=3", "a=42", "a=true", "a=True", "a=none", "a!=3", "a<3", "a>=42", "a>m", "a~math", "a~1", 'a~"regex:^[0-9]+$"',
    "a.b=3", "a.b.b~3", "a.0=3", "a.count=2", "a.chars=4", "chars>3", "words=2", "text~train", "train", "b=3,42",
    "a=3 or b=none", "not (a=3 b=3)", "a=1e3", "language=und", "task_id!=none", "a.b=none", "question=3",
]  # fmt: skip


@pytest.mark.slow
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(["a", "b", "a.b", "question", "prompt"]), VALUES),
        max_size=6,
    ),
    expression=st.sampled_from(FILTERS),
)
@settings(max_examples=60)
def test_columns_say_of_each_row_what_the_row_itself_says(
    rows: list[dict[str, Any]], expression: str
) -> None:
    for block in blocks_of((Row(f"line {i}", row) for i, row in enumerate(rows, 1)), "rows"):
        wanted = parse(expression)
        assert wanted.mask(block).tolist() == wanted.mask_rows(rows).tolist()
        assert wanted.mask(as_table(block)).tolist() == wanted.mask_rows(rows).tolist()


LABELS = {
    "label": {"names": ["cat", "dog", "1"], "_type": "ClassLabel"},
    "kinds": {"feature": {"names": ["red", "blue"], "_type": "ClassLabel"}, "_type": "List"},
}


@pytest.mark.parametrize(
    ("expression", "questions"),
    [
        ("label=dog", "bc"),
        ("label=dog,cat", "abc"),
        ("label!=dog", "ade"),
        ("label~DO", "bc"),
        ("label=0", "a"),
        ("label=1", "d"),
        ("label>=1", "bcd"),
        ("label=none", "e"),
        ("kinds=blue", "bd"),
        ("metadata.label=dog", "bc"),
    ],
)
def test_a_class_label_is_known_by_its_name(
    expression: str, questions: str, tmp_path: Path
) -> None:
    labels = pa.array([0, 1, 1, 2, None])
    table = pa.table(
        {
            "question": list("abcde"),
            "label": labels,
            "kinds": [[0], [0, 1], [], [1], None],
            "metadata": pa.StructArray.from_arrays([labels], ["label"]),
        }
    )
    features = {
        **LABELS,
        "question": {"dtype": "string", "_type": "Value"},
        "metadata": {"label": LABELS["label"]},
    }
    noted = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(noted), tmp_path / "rows.parquet")
    wanted = parse(expression)
    [block] = read_blocks(tmp_path / "rows.parquet")
    assert (
        "".join(row.values["question"] for row in block.rows(np.flatnonzero(wanted.mask(block))))
        == questions
    )
    with pytest.raises(ConfigError, match=r"'dgo' is not one of: cat, dog, 1"):
        parse("label=dgo").mask(block)
