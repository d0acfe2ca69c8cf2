"""The filter language of rows, and what else keeps a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.errors import AjetError
from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.keep import Keep
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.curation.sql import Where
from ajet_tools.dataset.files.blocks import Row, blocks_of
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.verify import open_verifier

ROW: dict[str, Any] = {
    "main_query": "How many 'fast' trains are there?",
    "metadata": {"answer": "42", "level": 3, "tags": ["math", "easy"], "note": None},
    "messages": [{"role": "user", "content": "Hello"}],
    "score.raw": 0.5,
}
OTHER = {"main_query": "Zug?", "metadata": {"answer": "4", "level": 1}}


def kept(path: Path, expression: str, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    path = path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or (ROW,)))
    return keep_rows(Keep(where=Where(expression, Rows(path))), *rows or (ROW,))


def keep_rows(keep: Keep, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = blocks_of((Row(f"rows line {i}", row) for i, row in enumerate(rows, 1)), "rows")
    return [row.values for block, indices in keep.of(blocks) for row in block.take(indices).rows()]


@pytest.mark.parametrize(
    "expression",
    [
        "metadata.level=3",
        "metadata.level >= 3 AND metadata.level < 4 -- a comment",
        "metadata.level in (1, 3)",
        "metadata.answer = '42'",
        "list_contains(metadata.tags, 'math')",
        "len(metadata.tags) = 2",
        "metadata.note is null",
        '"score.raw" < 1',
        "messages[1].content = 'Hello'",
        "chars = 33 and words = 6",
        "language = 'en'",
        "TRAINS",
        "many 'fast' trains".replace("'", "''").join(["has('", "')"]),
        "trains are",
        '"are there"',
        "has('zebra') or has( 'TRAINS' )",
        "main_query = 'has(''x'')' or HAS('fast')",
        "regexp_matches(main_query, '^How .* there')",
        "not has('zebra')",
    ],
)
def test_a_row_fits_and_does_not_fit_the_opposite(tmp_path: Path, expression: str) -> None:
    assert kept(tmp_path, expression) == [ROW]
    if not expression.endswith("comment"):
        words = expression.strip('"')
        is_search = not any(sign in expression for sign in "=<>()") and " null" not in expression
        opposite = f"not has('{words}')" if is_search else f"not ({expression})"
        assert not kept(tmp_path, opposite)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("metadata.level >", "cannot evaluate"),
        ("(zebra", "cannot evaluate"),
        ("metadata.levle = 3", "did you mean metadata.level?"),
        ("levle = 3", "did you mean metadata.level?"),
        ("chars(main_query)", "is not a condition"),
        ("main_query = 'open", "cannot evaluate"),
        ("true); DROP TABLE x; --", "cannot evaluate"),
        ("x" * 20_000, "at most"),
        ("a\0b", "does not take"),
    ],
)
def test_what_is_not_understood_is_told(tmp_path: Path, expression: str, message: str) -> None:
    with pytest.raises(AjetError) as caught:
        kept(tmp_path, expression)
    assert message in str(caught.value)


def test_values_of_several_types_are_compared_where_they_can_be(tmp_path: Path) -> None:
    rows = [{"main_query": "a", "n": 3}, {"main_query": "b", "n": "x"}, {"main_query": "c"}]
    assert kept(tmp_path, "n = '3'", *rows) == [rows[0]]
    assert kept(tmp_path, "n is null", *rows) == [rows[2]]


def test_stdin_and_renamed_columns_are_filtered_too(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"q": row["main_query"]}) + "\n" for row in (ROW, OTHER))
    arguments = ["dataset", "filter", "-", "chars < 9", "--map", "q=main_query"]
    done = CliRunner().invoke(app, arguments, input=rows)
    assert json.loads(done.stdout) == {"main_query": "Zug?"}, done.output


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


def test_a_judge_keeps_what_it_gives_full_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [
        {"main_query": "q", "metadata": {"answer": answer}}
        for answer in ("2", "3", "no number", "4")
    ]
    keep = Keep(judge=open_verifier("judge:judges.py:even"))
    assert keep_rows(keep, *rows) == [rows[0], rows[3]]
    assert keep.left_out.total() == 2
    assert len(keep.failures) == 1 and keep.failures[0].startswith(
        "rows line 3: ValueError: invalid literal"
    )
