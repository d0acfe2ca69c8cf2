"""Files of another version of ajet, or of no ajet, are refused and left alone."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from ajet_sdk.errors import TraceVersionError
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.schema import COLUMNS, SCHEMA_VERSION
from ajet_sdk.trace.writer import TraceWriter


@pytest.mark.parametrize(
    ("version", "words"), [(SCHEMA_VERSION - 1, "an older ajet"), (99, "a newer ajet")]
)
def test_a_file_of_another_version_is_refused_and_left_alone(
    tmp_path: Path, version: int, words: str
) -> None:
    path = tmp_path / "other.duckdb"
    TraceWriter(path).close()
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE meta SET schema_version = ?", [version])
    before = path.read_bytes()
    for use in (open_trace, TraceWriter):
        with pytest.raises(
            TraceVersionError, match=rf"{words} \(schema {version}; this version reads"
        ):
            use(path)
    assert path.read_bytes() == before


def test_a_meta_that_is_not_ours_is_a_foreign_file(tmp_path: Path) -> None:
    for value in ("'two'", "NULL"):
        path = tmp_path / "other.duckdb"
        with duckdb.connect(str(path)) as connection:
            connection.execute(f"CREATE TABLE meta AS SELECT {value}::VARCHAR AS schema_version")
        for use in (open_trace, TraceWriter):
            with pytest.raises(TraceVersionError, match="not an ajet trace"):
                use(path)
        path.unlink()


@pytest.mark.parametrize("table", COLUMNS)
def test_the_guide_lists_every_column(table: str) -> None:
    guide = (Path(__file__).parents[3] / "docs/guide/traces.md").read_text()
    row = re.search(rf"^\| `{table}` \|.*?\| `([^`]+)`", guide, re.MULTILINE)
    assert row and row[1].replace("[]", "").split() == list(COLUMNS[table])
