"""Directories of partitions, as Hive and Spark write them: `label=dog/part-0.parquet`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ajet
from ajet_sdk.tasks.huggingface import path_rows
from ajet_tools.cli.app import app
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.files.writer import Writer


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_directories_of_partitions_are_columns(tmp_path: Path, suffix: str) -> None:
    for label, level in (("dog", "2"), ("cat", "10"), ("a%2Fb", "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / "pets" / f"label={label}" / f"level={level}"
        folder.mkdir(parents=True)
        with Writer(folder / f"part-{label[:1]}-4f2a{suffix}") as writer:
            writer.write({"question": f"What does a {label} say?"})
    rows = [row.values for row in read(tmp_path / "pets")]
    assert [(row["label"], row["level"]) for row in rows] == [
        ("a/b", None),
        ("cat", 10),
        ("dog", 2),
    ]
    assert list(rows[0]) == ["question", "label", "level"]
    assert ajet.dataset.read(tmp_path / "pets").collect().to_dicts() == rows
    pattern = str(tmp_path / "pets" / "*" / "level=*" / f"*{suffix}")
    assert [row.values for row in read(pattern, mapping={"label": "metadata.answer"})][2][
        "metadata"
    ] == {"answer": "dog"}
    assert [row.values["label"] for row in path_rows(tmp_path / "pets", "pets")] == [
        "a/b",
        "cat",
        "dog",
    ]
    out = tmp_path / "out.parquet"
    for arguments in (
        ["label = 'dog'"],
        ["label IN ('dog')"],
        ["--sql", "SELECT * FROM rows WHERE level = 2"],
    ):
        result = CliRunner().invoke(
            app, ["dataset", "filter", str(tmp_path / "pets"), *arguments, "-o", str(out)]
        )
        assert result.exit_code == 0, result.output
        assert [row.values for row in read(out)] == [rows[2]], arguments


def test_a_partition_by_split_is_one_and_a_column_of_the_file_stands(tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / "data" / f"split={split}" / "label=cat"
        folder.mkdir(parents=True)
        (folder / "0.jsonl").write_text(json.dumps({"question": split, "label": "mine"}) + "\n")
    assert [row.values for row in read(f"{tmp_path}/data:test")] == [
        {"question": "test", "label": "mine", "split": "test"}
    ]
    assert [row.values["question"] for row in read(tmp_path / "data")] == ["train"]
    assert [
        row.values for row in read(tmp_path / "data" / "split=test" / "label=cat" / "0.jsonl")
    ] == [{"question": "test", "label": "mine"}], "a file alone is what is in it"
