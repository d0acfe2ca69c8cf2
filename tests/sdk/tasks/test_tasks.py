"""Reading tasks: formats, mapping, bad rows, splits that stay apart."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import ConfigError, EnvironmentUnavailable, MissingResource, TaskError
from ajet_sdk.tasks.lineage import same_tasks
from ajet_sdk.tasks.load import TaskSets, load_tasks
from ajet_sdk.tasks.task_rows import Row, to_task
from ajet_sdk.types import Task

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
    return path


def reader(**task_reader: Any) -> Config:
    return load_config(values={"task_reader": task_reader})


def jsonl(training: Path, validation: Path | None = None, **more: Any) -> Config:
    files = {
        "training": {"file_path": str(training)},
        "validation": {"file_path": validation and str(validation)},
    }
    return reader(type="jsonl_dataset_file", jsonl_dataset_file=files, **more)


def repo(path: Any, more: Mapping[str, Any] | None = None, **keys: Any) -> Config:
    return reader(huggingface_dat_repo={"dataset_path": str(path), **keys}, **(more or {}))


def refused(config: Config, kind: type[Exception] = TaskError) -> str:
    with pytest.raises(kind) as caught:
        load_tasks(config)
    return str(caught.value)


def test_a_row_s_columns_fill_the_task(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        ROWS[0],
        {
            "main_query": "q",
            "init_messages": messages,
            "task_id": 7,
            "env_type": "lake",
            "metadata": {"a": 1},
            "level": 3,
        },
    ]
    first, second = load_tasks(jsonl(lines(tmp_path / "t.jsonl", rows))).train
    assert first.main_query == "What is 0 + 1?"
    assert first.metadata == ROWS[0]
    assert len(first.task_id) == 24
    assert (second.main_query, second.task_id, second.env_type) == ("q", "7", "lake")
    assert second.init_messages == messages
    assert second.metadata == {"a": 1, "level": 3}


def test_the_id_is_the_content_s(tmp_path: Path) -> None:
    one = load_tasks(jsonl(lines(tmp_path / "a.jsonl", ROWS))).train
    other = load_tasks(
        jsonl(lines(tmp_path / "b.jsonl", [dict(reversed(row.items())) for row in reversed(ROWS)]))
    ).train
    assert [task.task_id for task in one] == [task.task_id for task in reversed(other)]
    assert len({task.task_id for task in one}) == len(ROWS)


def test_a_mapping_says_where_columns_go(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.jsonl", [{"question": "no", "text": "yes", "solution": "5", "key": "k1"}]
    )
    mapping = {"text": "main_query", "solution": "metadata.answer", "key": "task_id"}
    (task,) = load_tasks(jsonl(path, field_mapping=mapping)).train
    assert (task.main_query, task.task_id, task.metadata["answer"]) == ("yes", "k1", "5")
    assert "has no column 'gone' for main_query; it has question, text" in refused(
        jsonl(path, field_mapping={"gone": "main_query"})
    )
    assert "it may map to main_query" in refused(jsonl(path, field_mapping={"text": "query"}))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            "{not json",
            (
                "t.jsonl line 2 is not JSON: Expecting property name enclosed in double quotes at"
                " column 2"
            ),
        ),
        ("[1]", "t.jsonl line 2: a task must be an object with keys (got list)"),
        ("3", "t.jsonl line 2: a task must be an object with keys (got int)"),
        ('{"question": NaN}', "t.jsonl line 2 is not JSON: NaN is no JSON value"),
        ("{}", "t.jsonl line 2 is empty"),
        ('{"main_query": 5}', "t.jsonl line 2: main_query: input should be a valid string (got 5)"),
        ('{"init_messages": "hi"}', "t.jsonl line 2: init_messages: input should be a valid list"),
        ('{"metadata": "hi"}', "t.jsonl line 2: metadata must be an object"),
        (
            '{"task_id": "x", "question": "a"}\n{"task_id": "x", "question": "b"}',
            "t.jsonl line 3: task_id 'x' is already used for another task in t.jsonl line 2",
        ),
    ],
)
def test_a_bad_row_is_an_error(tmp_path: Path, row: str, expected: str) -> None:
    assert expected in refused(jsonl(lines(tmp_path / "t.jsonl", [ROWS[0], row, ROWS[1]])))


def test_text_that_is_not_utf_8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"question": "a"}\n{"question": "\xff"}\n')
    assert "t.jsonl line 2 is not UTF-8" in refused(jsonl(path))


def test_blank_lines_a_byte_order_mark_and_an_array_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + b"\n\n".join(json.dumps(row).encode() for row in ROWS) + b"\n\n"
    )
    assert len(load_tasks(jsonl(path)).train) == len(ROWS)
    path.write_text(json.dumps(ROWS, indent=1))
    assert len(load_tasks(jsonl(path)).train) == len(ROWS)
    path.write_text(json.dumps([ROWS[0], 5]))
    assert "t.jsonl item 2" in refused(jsonl(path))


def test_splits_share_no_task(tmp_path: Path) -> None:
    train, val = lines(tmp_path / "train.jsonl", ROWS[:4]), lines(tmp_path / "val.jsonl", ROWS[2:])
    said = refused(jsonl(train, val))
    assert "share 2 tasks" in said
    assert "train.jsonl line 3 is a validation task (val.jsonl line 1)" in said
    sets = load_tasks(jsonl(train, lines(val, ROWS[4:])))
    assert (len(sets.train), len(sets.val)) == (4, 2)


def test_a_task_may_stand_twice_in_one_split(tmp_path: Path) -> None:
    assert len(load_tasks(jsonl(lines(tmp_path / "t.jsonl", [ROWS[0], ROWS[0]]))).train) == 2


def test_what_is_not_given_or_not_there_is_said(tmp_path: Path) -> None:
    assert "training.file_path is not set" in refused(
        reader(type="jsonl_dataset_file"), ConfigError
    )
    assert "there is no file" in refused(jsonl(tmp_path / "none.jsonl"), ConfigError)
    assert "dataset_path is not set" in refused(load_config(), ConfigError)
    assert "there is no directory /no/such" in refused(repo("/no/such"), ConfigError)
    assert "there are no training tasks" in refused(jsonl(lines(tmp_path / "t.jsonl", [])))


READER = """
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader

class Squares(BaseTaskReader):
    def get_training_tasks(self):
        size = self.reader_config.random_dummy.training
        return [Task(main_query=f"{n} squared?", metadata={"answer": str(n * n)}) for n in range(size)]

    def get_validation_tasks(self):
        return [{"question": "7 squared?", "answer": "49"}]

class Bad(Squares):
    def get_validation_tasks(self):
        return [{"question": "7 squared?", "answer": "49"}, {"main_query": 3}]

class Half:
    def get_training_tasks(self): ...
"""


def test_a_reader_of_ones_own_is_named_by_its_class_path(tmp_path: Path) -> None:
    path = tmp_path / "squares.py"
    path.write_text(READER)
    squares = {"type": f"{path}->Squares", "random_dummy": {"training": 3}}
    sets = load_tasks(reader(**squares))
    assert [task.metadata["answer"] for task in sets.train] == ["0", "1", "4"]
    assert [task.main_query for task in sets.val] == ["7 squared?"]
    assert "Bad.get_validation_tasks task 2: main_query" in refused(
        reader(**{**squares, "type": f"{path}->Bad"})
    )
    assert "get_validation_tasks" in refused(reader(type=f"{path}->Half"), ConfigError)
    with pytest.raises(ConfigError, match="did you mean env_service"):
        reader(type="env_servise")


def test_a_service_that_is_not_there_is_said() -> None:
    with pytest.raises(
        EnvironmentUnavailable, match=r"http://127.0.0.1:9 cannot be reached.*env_service.env_url"
    ):
        load_tasks(reader(type="env_service", env_service={"env_url": "http://127.0.0.1:9"}))


def layout(folder: Path, name: str) -> None:
    """The ways in which a dataset lies in a directory."""
    for split, rows in {"train": ROWS[:4], "validation": ROWS[4:]}.items():
        table = pa.Table.from_pylist(rows)
        if name == "hub":
            (folder / "data").mkdir(parents=True, exist_ok=True)
            pq.write_table(table.slice(0, 1), folder / "data" / f"{split}-00000-of-00002.parquet")
            pq.write_table(table.slice(1), folder / "data" / f"{split}-00001-of-00002.parquet")
        elif name == "flat":
            pq.write_table(table, folder / f"{split}.parquet")
        elif name == "json":
            (folder / f"{split}.json").write_text(json.dumps(rows))
        elif name == "jsonl":
            lines(folder / f"{split}.jsonl", rows)
        else:
            (folder / split).mkdir()
            with pa.ipc.new_stream(
                folder / split / "data-00000-of-00001.arrow", table.schema
            ) as sink:
                sink.write_table(table)
            (folder / split / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("name", ["hub", "flat", "json", "jsonl", "saved"])
def test_a_directory_is_read_however_it_lies(tmp_path: Path, name: str) -> None:
    layout(tmp_path, name)
    sets = load_tasks(repo(tmp_path))
    assert [task.metadata for task in sets.train] == ROWS[:4]
    assert [task.metadata for task in sets.val] == ROWS[4:]


def test_a_configuration_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    layout(tmp_path / "main", "flat")
    sets = load_tasks(repo(tmp_path, dataset_name="main"))
    assert [task.metadata for task in sets.train] == ROWS[:4]
    alone = load_tasks(repo(tmp_path / "main" / "train.parquet"))  # one split
    assert alone.train[0].metadata == ROWS[0] and not alone.val


def test_splits_of_configurations_stay_apart(tmp_path: Path) -> None:
    for name, rows in (("main/train", ROWS[:2]), ("main/test", ROWS[2:4])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines(tmp_path / f"{name}.jsonl", rows)
    sets = load_tasks(repo(tmp_path, validation_split="test"))
    assert ([task.metadata for task in sets.train], [task.metadata for task in sets.val]) == (
        ROWS[:2],
        ROWS[2:4],
    )
    (tmp_path / "socratic").mkdir()
    lines(tmp_path / "socratic" / "train.jsonl", ROWS[4:])
    assert "it has main/test, main/train, socratic/train" in refused(repo(tmp_path))
    assert [
        task.metadata for task in load_tasks(repo(tmp_path, training_split="main/train")).train
    ] == ROWS[:2]


def test_a_split_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines(tmp_path / "train.jsonl", ROWS)
    with caplog.at_level(logging.WARNING, logger="ajet.tasks"):
        assert load_tasks(repo(tmp_path)).val == []
    assert "has no split 'validation'; it has train" in caplog.text
    assert "has no split 'validation'; it has train" in refused(
        repo(tmp_path, validation_split="validation")
    )
    assert "has no split 'test'" in refused(repo(tmp_path, training_split="test"))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("no")
    assert "cannot read" in refused(repo(tmp_path, validation_split=None))


def test_a_hub_name_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    said = refused(repo("nobody/nothing-such"), MissingResource)
    assert "cannot load split 'train' of the dataset 'nobody/nothing-such'" in said
    assert "to its directory" in said


def dummy(seed: int) -> TaskSets:
    values = {"task_reader": {"type": "random_dummy"}, "trainer_common": {"seed": seed}}
    return load_tasks(load_config(values=values))


def test_made_up_sums_are_right_and_repeat() -> None:
    sets = dummy(3)
    assert (len(sets.train), len(sets.val)) == (64, 16)
    for task in (*sets.train, *sets.val):
        assert str(eval(task.main_query[8:-1])) == task.metadata["answer"]  # "What is a + b?"
    assert dummy(3) == sets
    assert dummy(4) != sets


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(json_values)
def test_any_row_is_a_task_with_an_id_or_an_error_with_its_place(values: Any) -> None:
    try:
        task = to_task(Row("t.jsonl line 3", values), {})
    except TaskError as error:
        assert "t.jsonl line 3" in str(error)
    else:
        assert task.task_id
        assert to_task(Row("elsewhere", values), {}) == task


def test_what_json_cannot_hold_becomes_text() -> None:
    from datetime import date
    from decimal import Decimal

    task = to_task(
        Row(
            "t",
            {"question": "q", "day": date(2026, 1, 2), "price": Decimal("1.5"), "image": b"\x00"},
        ),
        {},
    )
    assert json.loads(json.dumps(task.metadata)) == {
        "question": "q",
        "day": "2026-01-02",
        "price": "1.5",
        "image": "AA==",
    }


def test_a_held_out_question_is_recognised_in_parts_and_by_its_image() -> None:
    def task(*parts: object) -> Task:
        return Task(
            init_messages=[
                {"role": "system", "content": "x"},
                {"role": "user", "content": list(parts)},
            ]
        )

    def image(data: str) -> dict[str, object]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    text = {"type": "text", "text": "What is  shown?"}
    plain = Task(init_messages=[{"role": "user", "content": "what is shown?"}])
    assert [place for place, _ in same_tasks([task(text)], [plain])] == [0]
    two = [task(text, image("A")), task(text, image("B"))]
    assert [place for place, _ in same_tasks(two, [task(text, image("B"))])] == [1]
