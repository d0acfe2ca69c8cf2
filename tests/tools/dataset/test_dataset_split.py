"""`ajet dataset split`, as a user calls it, and the laws of `Splitter`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from ajet_sdk.errors import ConfigError
from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.splitter import Splitter, keys_of
from ajet_tools.dataset.files.blocks import Row, blocks_of

THREE = {"train": 0.7, "validation": 0.2, "test": 0.1}


def stable(values: dict[str, Any], share: float, seed: int = 0) -> str:
    """The side of a row by itself."""
    [block] = blocks_of([Row("", values)], "rows")
    return str(
        Splitter({"train": 1 - share, "validation": share}, seed=seed).sides(block, keys_of(block))[
            0
        ]
    )


def ajet(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["dataset", *arguments])
    assert result.exit_code == code, result.output
    return result


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sides(folder: Path) -> dict[int, str]:
    """Row's number -> its side."""
    return {
        json.loads(line)["n"]: file.stem
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    }


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "n": n,
            "main_query": f"Question {n}?",
            "metadata": {"doc": n // 7, "level": "hard" if n % 3 else "easy"},
        }
        for n in range(count)
    ]


@pytest.mark.parametrize(
    "options", [[], ["--by", "metadata.doc"], ["--stratify", "metadata.level"], ["--near", "0.8"]]
)
def test_a_row_stays_on_its_side_when_the_file_grows(tmp_path: Path, options: list[str]) -> None:
    small, large = write(tmp_path / "a.jsonl", rows(300)), write(tmp_path / "b.jsonl", rows(500))
    for source, name in ((small, "small"), (large, "large")):
        ajet(
            "split",
            source,
            "-o",
            str(tmp_path / name),
            "--fractions",
            "train=0.7,validation=0.2,test=0.1",
            *options,
        )
    before, after = sides(tmp_path / "small"), sides(tmp_path / "large")
    assert len(before) == 300
    assert {n: after[n] for n in before} == before
    shares = Counter(after.values())
    assert 300 < shares["train"] < 400
    assert 60 < shares["validation"] < 140


def test_sides_are_not_left_in_two_formats(tmp_path: Path) -> None:
    """Whoever reads the directory would have rows twice, and on both sides."""
    source, out = write(tmp_path / "a.jsonl", rows(60)), str(tmp_path / "out")
    ajet("split", source, "-o", out, "--fractions", "train=0.7,validation=0.2,test=0.1")
    said = ajet("split", source, "-o", out).stderr
    assert (
        "test.jsonl: not of this split" in said
        and "train.jsonl:" not in said.partition("rows, to")[0]
    )
    for name in ("a.parquet", "a.csv"):
        ajet("export", source, "-o", str(tmp_path / name))
        said = ajet("split", str(tmp_path / name), "-o", out, code=2).stderr
        assert "train.jsonl would be read as train too" in said


def test_a_group_is_on_one_side_and_strata_have_their_fractions(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", rows(700))
    ajet("split", source, "-o", str(tmp_path / "by"), "--by", "metadata.doc", "--fractions", "0.3")
    by = sides(tmp_path / "by")
    assert all(len({by[n] for n in range(start, start + 7)}) == 1 for start in range(0, 700, 7))
    assert len(set(by.values())) == 2
    ajet(
        "split",
        source,
        "-o",
        str(tmp_path / "st"),
        "--stratify",
        "metadata.level",
        "--fractions",
        "0.1",
    )
    level = Counter(
        n % 3 == 0 for n, side in sides(tmp_path / "st").items() if side == "validation"
    )
    assert abs(level[True] - 23.4) < 2
    assert abs(level[False] - 46.6) < 2


def test_near_copies_stay_together(tmp_path: Path) -> None:
    words = [f"w{n * 7919 % 1000}x" for n in range(4000)]
    made = []
    for n in range(60):
        text = " ".join(f"{w}{n}q" for w in words[n * 40 : n * 40 + 30])
        made += [
            {"n": 2 * n, "main_query": text},
            {"n": 2 * n + 1, "main_query": text.replace("q", "p", 3)},
        ]
    source = write(tmp_path / "a.jsonl", made)
    ajet("split", source, "-o", str(tmp_path / "apart"), "--fractions", "0.5")
    ajet(
        "split",
        source,
        "-o",
        str(tmp_path / "near"),
        "--fractions",
        "0.5",
        "--near",
        "0.8",
        "--json",
    )
    apart, near = sides(tmp_path / "apart"), sides(tmp_path / "near")
    assert any(apart[2 * n] != apart[2 * n + 1] for n in range(60))
    assert all(near[2 * n] == near[2 * n + 1] for n in range(60))
    assert len(set(near.values())) == 2


@given(st.text(), st.integers(0, 5), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_larger_share_keeps_what_a_side_had(
    text: str, seed: int, one: float, more: float
) -> None:
    row = {"main_query": text}
    if stable(row, one, seed=seed) == "validation":
        assert stable(row, one + more, seed=seed) == "validation"
    assert stable(row, 0.0) == "train"
    assert stable(row, 1.0) == "validation"


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.text(max_size=5)), st.lists(st.text(max_size=5)), st.booleans())
def test_appended_rows_move_none(first: list[str], then: list[str], stratified: bool) -> None:
    def place(texts: list[str]) -> list[str]:
        splitter = Splitter(THREE, stratify="kind" if stratified else None)
        rows = blocks_of(
            (Row("", {"main_query": text, "kind": len(text)}) for text in texts), "rows"
        )
        return [side for block in rows for side in splitter.sides(block, keys_of(block))]

    assert place([*first, *then])[: len(first)] == place(first)
    together: dict[str, str] = {}
    for text, side in zip(first, place(first), strict=True):
        assert together.setdefault(text or "{}", side) == side


def test_the_sides_of_these_rows_are_written_in_stone() -> None:
    assert [stable({"main_query": f"q{n}"}, 0.3) for n in range(5)] == ["train"] * 3 + [
        "validation",
        "train",
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv", "jsonl.gz"])
def test_sides_have_the_format_of_the_source(tmp_path: Path, suffix: str) -> None:
    source = write(tmp_path / "a.jsonl", rows(50))
    ajet("export", source, "-o", str(tmp_path / f"b.{suffix}"))
    ajet("split", str(tmp_path / f"b.{suffix}"), "-o", str(tmp_path / "p"), "--fractions", "0.4")
    names = [f"{side}.{suffix.removesuffix('.gz')}" for side in ("train", "validation")]
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fractions", "train=0.9,validation=0.2"], "add up to 1"),
        (["--fractions", "a lot"], "--fractions takes"),
        (["--fractions", "a=0.5,a=0.5"], "each side once"),
        (["--fractions", "../a=0.5,b=0.5"], "each side once"),
        (["--by", "metadata.nothing"], "a.jsonl line 1 has no metadata.nothing"),
    ],
)
def test_mistakes(tmp_path: Path, options: list[str], said: str) -> None:
    source = write(tmp_path / "a.jsonl", rows(5))
    result = ajet("split", source, "-o", str(tmp_path / "o"), *options, code=2)
    assert said in result.stderr
    assert not list((tmp_path / "o").glob("*"))


def test_an_empty_side_is_told(tmp_path: Path) -> None:
    result = ajet(
        "split",
        write(tmp_path / "a.jsonl", rows(1)),
        "-o",
        str(tmp_path / "o"),
        "--fractions",
        "0.0001",
    )
    assert "validation got no row" in result.stderr


def test_fractions_of_a_call() -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Splitter({"train": 1.5, "validation": -0.5})


@pytest.mark.slow
def test_a_stratum_is_a_value_and_not_its_text_whatever_tells_it() -> None:
    """Columns of text show 3 and "3" alike; a block of a table, and one row after the other, say
    the same."""
    values = [3, "3", True, "true", None, 2.5, [1], {"a": 1}, 'ä "x"', 1e3, 2**70]
    rows = [
        {"main_query": f"q {i}", "metadata": {"level": values[i % len(values)]}} for i in range(55)
    ]
    rows += [
        {"main_query": f"p {i}", "metadata.level": i % 2, "metadata": {"level": 7}}
        for i in range(10)
    ]
    rows += [{"main_query": f"r {i}"} for i in range(5)]
    made = []
    for size in (1, len(rows)):
        splitter = Splitter({"train": 0.8, "validation": 0.2}, stratify="metadata.level")
        sides = []
        for start in range(0, len(rows), size):
            [block] = blocks_of(
                (Row(f"row {i}", row) for i, row in enumerate(rows[start : start + size])), "rows"
            )
            sides.extend(splitter.sides(block, keys_of(block)))
        made.append((sides, splitter.strata))
    assert made[0] == made[1]
    assert len(made[0][1]) == len(values) + 2 and {"3", '"3"', "null", "0", "1"} <= made[0][1]
