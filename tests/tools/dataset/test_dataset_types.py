"""A table that a dataset command writes has the types of the table that it read, and its values to
the bit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.files.writer import Writer
from tests.tools.dataset.typed import ROWS, check_kept, typed_table, write_typed


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_typed(tmp_path / "typed.parquet")


def ajet(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["dataset", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("filter", "typed.parquet", "chars>10"),
        ("filter", "typed.parquet", "metadata.level>=3"),
        ("dedup", "typed.parquet"),
        ("dedup", "typed.parquet", "--keep", "last"),
        ("dedup", "typed.parquet", "--against", "eval.jsonl"),
        ("export", "typed.parquet"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_command_leaves_types_and_values_as_they_are(
    source: Path, arguments: tuple[str, ...]
) -> None:
    Path("eval.jsonl").write_text(
        json.dumps({"question": typed_table()["question"][4].as_py()}) + "\n"
    )
    ajet(*arguments, "--out", "out.parquet")
    assert check_kept(source, Path("out.parquet")).num_rows


def test_rows_that_are_left_out_keep_their_types_too(source: Path) -> None:
    ajet("filter", "typed.parquet", "small<20", "-o", "out.parquet", "--rejected", "rest.parquet")
    rest = check_kept(source, Path("rest.parquet"), more=("left_out",))
    assert rest.num_rows + check_kept(source, Path("out.parquet")).num_rows == ROWS
    assert set(rest["left_out"].to_pylist()) == {"not matching the expression"}


def test_a_table_without_rows_keeps_its_columns(source: Path) -> None:
    ajet("filter", "typed.parquet", "chars>9999", "-o", "none.parquet")
    assert check_kept(source, Path("none.parquet")).num_rows == 0
    Path("eval.jsonl").write_text(
        "".join(json.dumps({"q": one}) + "\n" for one in typed_table()["question"].to_pylist())
    )
    ajet("dedup", "typed.parquet", "--against", "eval.jsonl", "-o", "none.parquet")
    assert check_kept(source, Path("none.parquet")).num_rows == 0


def test_both_sides_of_a_split_have_the_types(source: Path) -> None:
    ajet(
        "split",
        "typed.parquet",
        "--fractions",
        "train=0.6,validation=0.4,test=0",
        "-o",
        "data",
    )
    sizes = [
        check_kept(source, Path("data") / f"{name}.parquet", more=("provenance",)).num_rows
        for name in ("train", "validation", "test")
    ]
    assert sum(sizes) == ROWS and sizes[2] == 0
    ajet("split", "typed.parquet", "--fractions", "0.4", "-o", "two")
    ajet("export", "two", "-o", "hub")
    for file in Path("hub/data").iterdir():
        check_kept(source, file, more=("provenance",))


def test_a_hub_directory_of_a_typed_directory_keeps_both_splits(source: Path) -> None:
    Path("in").mkdir()
    write_typed(Path("in") / "train.parquet")
    write_typed(Path("in") / "validation.parquet", 7)
    ajet("export", "in", "-o", "hub")
    check_kept(source, Path("hub/data/train-00000-of-00001.parquet"))
    check_kept(source, Path("hub/data/validation-00000-of-00001.parquet"))


def test_a_renamed_column_keeps_its_type_and_what_goes_into_metadata_is_json(source: Path) -> None:
    rename = ("--map", "question=main_query", "--map", "big=task_id")
    ajet("filter", "typed.parquet", "chars>5", *rename, "-o", "out.parquet")
    before, after = pq.read_table(source), pq.read_table("out.parquet")
    assert after.schema.field("task_id").type == pa.uint64()
    assert after["task_id"].equals(before["big"]) and after["main_query"].equals(before["question"])
    noted = json.loads(after.schema.metadata[b"huggingface"])["info"]["features"]
    assert noted["main_query"]["dtype"] == "string" and "question" not in noted
    ajet("filter", "typed.parquet", "chars>5", "--map", "label=metadata.label", "-o", "out.parquet")
    rows = [row.values for row in Rows("out.parquet")]
    assert [row["metadata"]["label"] for row in rows] == before["label"].to_pylist()
    assert pq.read_schema("out.parquet").field("metadata").type == pa.json_(pa.string())


def test_forms_of_other_libraries_keep_the_types_of_the_columns_beside(source: Path) -> None:
    ajet("export", "typed.parquet", "--format", "messages", "-o", "sft.parquet")
    made = pq.read_table("sft.parquet")
    before = pq.read_table(source)
    for name in ("image", "label", "weight", "big", "seen", "price", "kind", "metadata"):
        assert made.schema.field(name).type == before.schema.field(name).type, name
    assert made["image"].equals(before["image"]) and made["price"].equals(before["price"])
    ajet("export", "typed.parquet", "--format", "trl-prompt", "-o", "prompts.parquet")
    made = pq.read_table("prompts.parquet")
    assert "metadata" not in made.schema.names and made.schema.field("level").type == pa.int64()
    assert made["level"].to_pylist() == [
        one and one["level"] for one in before["metadata"].to_pylist()
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("filter", "typed.parquet", "chars>5", "-o", "out.jsonl"),
        ("export", "typed.parquet", "-o", "out.jsonl"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_text_that_cannot_hold_a_type_says_so(source: Path, arguments: tuple[str, ...]) -> None:
    told = ajet(*arguments)
    assert (
        "image (struct<bytes: binary, path: string>)" in told
        and "price (decimal128(12, 2))" in told
    )
    assert "label (class label of" in told and "NaN or an infinity in loss" in told
    assert "small" not in told and "write .parquet" in told


def test_commands_that_only_look_take_every_type(source: Path) -> None:
    whole = source.read_bytes()
    assert f"{ROWS} rows" in ajet("check", "typed.parquet")
    ajet("check", "typed.parquet")
    assert source.read_bytes() == whole


def test_seeds_with_images_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any call: their bytes would stand in each prompt, and the model would make some up."""
    monkeypatch.chdir(tmp_path)
    write_typed(Path("typed.parquet"))
    Path("replies.py").write_text("def reply(ask):\n    raise AssertionError\n")
    grow = (
        "expand",
        "--verify",
        "none",
        "--model",
        "replies.py:reply",
        "--out",
        "data",
        "--dry-run",
    )
    said = ajet(*grow, "typed.parquet", code=2)
    assert "typed.parquet row 1 has bytes in image, blob" in said
    query = said[said.index('"') + 1 : said.rindex('"')]
    ajet("filter", "typed.parquet", "--sql", query, "-o", "seeds.parquet")
    assert pq.read_schema("seeds.parquet").names == [
        name for name in pq.read_schema("typed.parquet").names if name not in ("image", "blob")
    ]


def test_columns_that_tables_do_not_share_are_as_of_lines_or_keep_a_type_that_json_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = pa.array([1], pa.int8())
    pq.write_table(pa.table({"question": ["a"], "n": numbers, "blob": [b"\0"]}), "1.parquet")
    pq.write_table(pa.table({"question": ["b"], "n": [300]}), "2.parquet")
    ajet("export", "1.parquet", "2.parquet", "-o", "out.parquet")
    rows = pq.read_table("out.parquet")
    assert rows.schema.types == [pa.string(), pa.binary(), pa.int64()]
    assert rows["n"].to_pylist() == [1, 300] and rows["blob"].to_pylist() == [b"\0", None]
    Path("3.jsonl").write_text('{"question": "c", "n": 1.5}\n')
    told = ajet("export", "1.parquet", "3.jsonl", "-o", "out.parquet")
    assert "blob (binary)" in told
    assert [row.values for row in Rows("out.parquet")] == [
        {"question": "a", "n": 1, "blob": "AA=="},
        {"question": "c", "n": 1.5},
    ]


def test_a_directory_of_tables_and_text_says_which_types_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mixed").mkdir()
    pq.write_table(pa.table({"question": ["a"], "blob": [b"\0"]}), "mixed/train-1.parquet")
    Path("mixed/train-2.jsonl").write_text('{"question": "c"}\n')
    for out in ("out.parquet", "out.jsonl"):
        assert ajet("export", "mixed", "-o", out).count("blob (binary)") == 1


def test_class_labels_of_other_names_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, names in enumerate((["easy", "hard"], ["hard", "easy"])):
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        table = pa.table({"label": [0]}).replace_schema_metadata(metadata)
        pq.write_table(table, f"{number}.parquet")
    ajet("export", "0.parquet", "1.parquet", "-o", "out.parquet", code=2)
    assert not Path("out.parquet").exists()


# Laws over any schema

_LEAVES = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
    (pa.large_string(), st.text("ab", max_size=3)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.binary(2), st.binary(min_size=2, max_size=2)),
    (pa.timestamp("ns"), st.integers(-(2**60), 2**60)),
    (pa.timestamp("ms", "UTC"), st.integers(-(2**50), 2**50)),
    (pa.date32(), st.integers(-(2**20), 2**20)),
    (pa.time64("us"), st.integers(0, 86_400_000_000 - 1)),
    (pa.duration("us"), st.integers(-(2**50), 2**50)),
    (pa.decimal128(20, 3), st.decimals(-(10**15), 10**15, places=3)),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", "c"])),
    (pa.null(), st.none()),
]


def _nullable(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def _lists(inner: tuple[Any, Any]) -> tuple[Any, Any]:
    return pa.list_(inner[0]), st.lists(_nullable(inner[1]), max_size=3)


def _structs(fields: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    types = pa.struct([(name, one[0]) for name, one in fields.items()])
    return types, st.fixed_dictionaries({name: _nullable(one[1]) for name, one in fields.items()})


_plain = st.sampled_from([leaf for leaf in _LEAVES if not pa.types.is_dictionary(leaf[0])])
_types = st.sampled_from(_LEAVES) | st.recursive(
    _plain,
    lambda inner: (
        inner.map(_lists)
        | st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3).map(_structs)
    ),
    max_leaves=4,
)


@st.composite
def _tables(draw: st.DrawFn) -> pa.Table:
    columns = draw(
        st.dictionaries(
            st.sampled_from(["question", "metadata", "a", "b", "c"]), _types, min_size=1
        )
    )
    rows = draw(st.integers(0, 6))
    arrays = {
        name: pa.array(draw(st.lists(_nullable(values), min_size=rows, max_size=rows)), kind)
        for name, (kind, values) in columns.items()
    }
    return pa.table(arrays).replace_schema_metadata({"mine": "kept"})


def _printed(column: Any) -> str:
    """Every value as Arrow prints it, which knows NaN, nanoseconds and any year."""
    decoded = column.combine_chunks()
    if pa.types.is_dictionary(decoded.type):
        decoded = decoded.dictionary_decode()
    return str(decoded.to_string(window=100, container_window=100))


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(
    table=pa.table(
        {"a": [None, [-(2**63)]], "b": [2**63 - 1, -(2**63)]}, metadata={"mine": "kept"}
    ),
    keep={1},
    add=True,
)
@given(table=_tables(), keep=st.sets(st.integers(0, 5)), add=st.booleans())
def test_whatever_the_schema_the_rows_that_stay_are_the_same(
    tmp_path: Path, table: pa.Table, keep: set[int], add: bool
) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table, source, row_group_size=2)
    before = pq.read_table(source)
    rows = Rows(source)

    def chosen(block: Block) -> Block:
        block = block.take([i for i, place in enumerate(block.places) if int(place) - 1 in keep])
        return (
            block.changed([{**row, "new": 1} for row in block.values()], ("new",)) if add else block
        )

    with Writer(out, schema=chosen(rows.empty()).data.schema) as writer:
        for block in rows.blocks():
            writer.write_block(chosen(block))
    after = pq.read_table(out)
    if add and writer.rows:
        assert after["new"].to_pylist() == [1] * writer.rows
        after = after.drop_columns(["new"])
    if not before.num_rows:
        return
    assert after.schema.equals(before.schema)
    assert after.schema.metadata[b"mine"] == b"kept"
    expected = before.take(pa.array(sorted(i for i in keep if i < before.num_rows), pa.int64()))
    for name in before.schema.names:
        assert _printed(after[name]) == _printed(expected[name])


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_infinity=False, allow_nan=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=5,
)


@pytest.mark.slow
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from("abcd"), _json, min_size=1), min_size=1, max_size=5
    )
)
def test_text_that_went_through_tables_comes_back_as_it_was(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    names = ["1.jsonl", "2.parquet", "3.parquet", "4.jsonl"]
    with Writer(tmp_path / names[0]) as writer:
        for row in rows:
            writer.write(row)
    for before, after in pairwise(names):
        with Writer(tmp_path / after) as writer:
            for block in Rows(tmp_path / before).blocks():
                writer.write_block(block)
    assert [row.values for row in Rows(tmp_path / names[-1])] == rows
