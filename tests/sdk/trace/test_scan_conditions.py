"""The filter of a scan, as DuckDB gives it to a dataset: the ids that it lets through, the columns
that it names."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ajet_sdk.trace.conditions import columns_in, ids_in

MANY = [f"e{i}" for i in range(40)]
LISTED = ", ".join(f"'{id}'" for id in MANY)


def condition_of(where: str) -> Any:
    """The expression that DuckDB passes to a scan with this condition."""
    given: list[Any] = []

    class Asked(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
        schema = pa.schema(
            [(name, pa.string()) for name in ("episode_id", "run_id", "phase", "agent")]
        )

        def __init__(self) -> None:
            pass

        def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> Any:
            given.append(filter)
            return ds.dataset(self.schema.empty_table()).scanner(columns=columns)

    with duckdb.connect() as connection:
        connection.register("asked", Asked())
        connection.execute(f"SELECT agent FROM asked WHERE {where}").fetchall()
    assert given
    return given[-1]


@pytest.mark.parametrize(
    ("where", "by", "among"),
    [
        ("episode_id = 'e1'", "episode_id", ["e1"]),
        ("episode_id IN ('e1', 'e2')", "episode_id", ["e1", "e2"]),
        (f"episode_id IN ({LISTED})", "episode_id", MANY),
        ("episode_id = 'e1' AND phase = 'rollout'", "episode_id", ["e1"]),
        (
            "(phase = 'a' OR phase > 'b') AND episode_id IN ('e1', 'e2')",
            "episode_id",
            ["e1", "e2"],
        ),
        ("phase IN ('a', 'b') AND run_id = 'r'", "run_id", ["r"]),
        ("episode_id = 'e1' OR phase = 'a'", None, []),
        ("episode_id <> 'e1'", None, []),
        ("episode_id NOT IN ('e1', 'e2') AND phase = 'a'", None, []),
        ("episode_id > 'e1'", None, []),
        ("phase = 'e1'", None, []),
        ("phase = 'a'' and (episode_id == \"e1\") and ''b'", None, []),
    ],
)
def test_the_ids_of_all_rows_that_a_condition_lets_through(
    where: str, by: str | None, among: list[str]
) -> None:
    assert ids_in(condition_of(where)) == (by, tuple(among))


def test_the_columns_that_a_condition_names() -> None:
    condition = condition_of("episode_id = 'run_id' AND (phase > 'a' OR phase IS NULL)")
    assert columns_in(condition) == {"episode_id", "phase"}
