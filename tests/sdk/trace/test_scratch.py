"""What a query spills is not in the working directory, and not there afterwards."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from ajet_sdk.trace.query import SETTINGS
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.scratch import open_scratch
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run


def test_a_database_in_memory_spills_outside_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_scratch({"memory_limit": "60MB", "threads": 1}) as connection:
        connection.execute("CREATE TABLE t AS SELECT md5(range::VARCHAR) AS m FROM range(2000000)")
        [place] = connection.execute("SELECT current_setting('temp_directory')").fetchone() or ()
        assert [*Path(place).iterdir()], "it did spill"
    assert not Path(place).exists()
    assert not [*tmp_path.iterdir()]


def test_each_reader_of_a_trace_has_a_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r", name="r", backbone="local"))
    places = []
    for _ in range(2):
        with open_trace(path) as reader:
            [row] = reader.query("SELECT current_setting('temp_directory') AS place").to_pylist()
        places.append(row["place"])
    assert len(set(places)) == 2
    assert not any(Path(place).is_relative_to(tmp_path) for place in places)


def test_sql_without_access_to_files_may_spill_and_reads_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a\n1\n")
    with open_scratch(SETTINGS) as connection:
        with pytest.raises(duckdb.PermissionException):
            connection.execute(f"FROM '{file}'")
        [place] = connection.execute("SELECT current_setting('temp_directory')").fetchone() or ()
    assert not Path(place).is_relative_to(Path.cwd())
