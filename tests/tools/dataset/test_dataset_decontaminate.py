"""`ajet dataset dedup --against`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from ajet_tools.cli.app import app
from ajet_tools.dataset.similarity.decontaminate import Leaks, words

CLIPS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May?"
)
RIVER = (
    "Which river flows through the city where the composer of the ninth symphony was born in 1770?"
)


def ajet(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["dataset", *arguments])
    assert result.exit_code == code, result.output
    return result


def write(path: Path, *rows: dict[str, Any] | str) -> str:
    path.write_text(
        "".join(json.dumps({"main_query": r} if isinstance(r, str) else r) + "\n" for r in rows)
    )
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_kind_of_leak_goes_with_its_evidence(tmp_path: Path) -> None:
    quoting = {
        "main_query": "Tell me more",
        "context": f"An exercise reads: {CLIPS.split('?')[0]}. Solve it!",
    }
    source = write(
        tmp_path / "train.jsonl",
        "Fine",
        RIVER.upper(),
        CLIPS.replace("sold half", "sells half"),
        quoting,
    )
    evals = write(tmp_path / "test.jsonl", {"question": CLIPS}, {"question": RIVER})
    out, report = tmp_path / "out.jsonl", tmp_path / "report.jsonl"
    result = ajet(
        "dedup", source, "--against", evals, "-o", str(out), "--report", str(report), "--json"
    )
    assert [row["main_query"] for row in read(out)] == ["Fine"]
    summary = json.loads(result.stdout)
    assert (summary["exact"], summary["near"], summary["words"], summary["eval_rows_found"]) == (
        1,
        1,
        1,
        2,
    )
    exact, near, quoted = read(report)
    assert (exact["row"], exact["eval"], exact["kind"]) == (
        "train.jsonl line 2",
        "test.jsonl line 2",
        "exact",
    )
    assert (near["eval"], near["kind"]) == ("test.jsonl line 1", "near")
    assert near["similarity"] > 0.95
    assert quoted["kind"] == "words"
    assert quoted["evidence"].startswith("natalia sold clips to 48 of her friends")
    assert quoted["similarity"] > 0.9


def test_other_numbers_and_shared_instructions_are_no_leak(tmp_path: Path) -> None:
    told = (
        "Solve the following problem step by step and give the final answer as one number inside a"
        " box at the end:"
    )
    evals = write(tmp_path / "e.jsonl", *(f"{told} {a} plus {a + 1}" for a in range(20)))
    source = write(tmp_path / "t.jsonl", f"{told} 77 plus 99", CLIPS.replace("48", "52"))
    ajet("dedup", source, "--against", evals, "-o", str(tmp_path / "o.jsonl"))
    assert len(read(tmp_path / "o.jsonl")) == 2
    other_numbers = CLIPS.replace("48", "52")
    assert not Leaks([("here", CLIPS)], ngram=30).find([other_numbers], [other_numbers])


def test_chinese_is_read_sign_by_sign() -> None:
    assert words("今天天气 is 3+4") == ["今", "天", "天", "气", "is", "3", "+", "4"]
    question = "请计算从一加到一百的所有整数之和是多少"
    leaks = Leaks([("here", question)]).find(["别的"], [f"有一道题：{question}。请回答"])
    assert [leak.kind for leak in leaks.values()] == ["words"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=6, max_size=40), st.integers(6, 15), st.data()
)
def test_a_quoted_evaluation_row_is_always_found(
    question: list[str], size: int, data: st.DataObject
) -> None:
    before, after = (data.draw(st.lists(st.sampled_from("xyz"), max_size=20)) for _ in range(2))
    leaks = Leaks([("here", " ".join(question))], ngram=size)
    assert leaks.quoted("x y z") is None and leaks.quoted("") is None
    found = leaks.quoted(" ".join([*before, *question, *after]))
    assert found is not None and found.evidence == " ".join(question) and found.similarity == 1


@pytest.mark.parametrize(
    ("evals", "said"),
    [("", "there are no evaluation rows"), ('{"question": "a"}\n{"question"\n', "e.jsonl line 2")],
)
def test_bad_evaluation_files(tmp_path: Path, evals: str, said: str) -> None:
    (tmp_path / "e.jsonl").write_text(evals)
    source, out = write(tmp_path / "t.jsonl", CLIPS), tmp_path / "o.jsonl"
    result = ajet("dedup", source, "--against", str(tmp_path / "e.jsonl"), "-o", str(out), code=2)
    assert said in result.stderr
    assert not out.exists()
