"""Pictures of rows: told by their pixels wherever questions are compared, and read within limits."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import PictureError, TaskError
from ajet_sdk.picture_files import PictureFile
from ajet_sdk.pictures import MAX_BYTES, read_picture
from ajet_sdk.swarm.refusals import Refused
from ajet_sdk.swarm.splits import Splits
from ajet_sdk.tasks.jsonl import json_rows
from ajet_sdk.tasks.lineage import same_tasks
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.row_pictures import RowPictures
from ajet_sdk.tasks.task_rows import to_task
from ajet_sdk.types import Task
from tests.drawings import drawn, file_of, part, png, text, url_of

SAME, AGAIN = png(1, 32, 32), file_of(drawn(1, 32, 32), compress_level=0)
ASKED = "How many dots are there?"


def asked(column: str, data: bytes, answer: str = "3") -> Task:
    return Task(main_query=ASKED, metadata={column: url_of(data), "answer": answer})


@pytest.mark.parametrize("column", ["image", "screenshot"])
def test_a_picture_that_was_saved_again_is_held_out(column: str) -> None:
    val = [asked(column, SAME)]
    tasks = [asked(column, AGAIN), asked(column, png(2, 32, 32))]
    assert [place for place, _ in same_tasks(tasks, val)] == [0]


def test_a_client_of_a_swarm_trains_on_no_picture_of_the_validation() -> None:
    splits = Splits(val=[asked("image", SAME)])
    with pytest.raises(Refused):
        splits.check(asked("image", AGAIN), "train")
    splits.check(asked("image", png(2)), "train")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


FORMS: dict[str, dict[str, Any]] = {
    "column": {"question": ASKED, "image": url_of(SAME)},
    "list": {"question": ASKED, "images": [url_of(AGAIN)]},
    "column of another name": {"question": ASKED, "screenshot": url_of(SAME)},
    "place": {"question": f"<image>\n{ASKED}", "images": [url_of(SAME)]},
    "message": {"messages": user([part(SAME), text(ASKED)])},
    "part of type image": {"messages": user([{"type": "image", "image": url_of(AGAIN)}, text(ASKED)])},
    "part without its value": {
        "messages": user([{"type": "image"}, text(ASKED)]),
        "images": [url_of(SAME)],
    },
    "place in a message": {"messages": user(f"<image>{ASKED}"), "images": [url_of(SAME)]},
    "metadata": {"main_query": ASKED, "metadata": {"image": url_of(SAME)}},
    "no place": {"messages": user(ASKED), "image": url_of(SAME)},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_question_is_the_same_in_each_form_of_a_row(form: str) -> None:
    assert text_of(FORMS[form]) == text_of(FORMS["column"])
    assert text_of(FORMS[form]) != ASKED


def test_a_picture_that_answers_is_no_part_of_the_question() -> None:
    row = {"question": "Draw a house.", "answer": url_of(SAME)}
    assert text_of(row) == text_of({"question": "Draw a house."})


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """It would be in memory before anybody sees its size."""
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(PictureError):
        read_picture(large)
    with pytest.raises(TaskError):
        RowPictures("row 1", ()).data_url(PictureFile("large.png", tmp_path))


@pytest.mark.parametrize(
    "name", ["link.png", "folder/a.png", "../secret.png", "figures/../../secret.png"]
)
def test_a_picture_outside_of_the_dataset_is_not_read(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    (data / "figures").mkdir(parents=True)
    outside = tmp_path / "secret.png"
    outside.write_bytes(png(1))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.png").write_bytes(png(1))
    (data / "link.png").symlink_to(outside)
    (data / "folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TaskError):
        RowPictures("row 1", ()).data_url(PictureFile(name, data))
    with pytest.raises(PictureError):
        _ = PictureFile(name, data).digest


def job_of(folder: Path, train: str, val: str) -> Config:
    files = {
        "training": {"file_path": str(folder / train)},
        "validation": {"file_path": str(folder / val)},
    }
    reader = {"type": "jsonl_dataset_file", "jsonl_dataset_file": files}
    return load_config(values={"task_reader": reader})


def dataset(file: Path, picture: bytes) -> None:
    """A row of tasks about a picture beside it, of a name that all have."""
    file.parent.mkdir(exist_ok=True)
    (file.parent / "a.png").write_bytes(picture)
    file.write_text(json.dumps({"question": ASKED, "image": "a.png", "answer": "3"}))


def test_a_job_compares_files_by_their_pixels(tmp_path: Path) -> None:
    dataset(tmp_path / "train" / "tasks.jsonl", SAME)
    dataset(tmp_path / "other" / "tasks.jsonl", png(2, 32, 32))
    dataset(tmp_path / "again" / "tasks.jsonl", AGAIN)
    sets = load_tasks(job_of(tmp_path, "train/tasks.jsonl", "other/tasks.jsonl"))
    [task], [val] = sets.train, sets.val
    assert task.metadata["image"] == "a.png" == val.metadata["image"]
    assert task.task_id != val.task_id
    with pytest.raises(TaskError):
        load_tasks(job_of(tmp_path, "train/tasks.jsonl", "again/tasks.jsonl"))


def test_a_job_says_which_files_it_compares_by_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset(tmp_path / "train" / "tasks.jsonl", SAME)
    dataset(tmp_path / "other" / "tasks.jsonl", png(2, 32, 32))
    job = job_of(tmp_path, "train/tasks.jsonl", "other/tasks.jsonl")
    with caplog.at_level("WARNING", "ajet.tasks"):
        load_tasks(job)
        assert not caplog.records
        (tmp_path / "other" / "a.png").unlink()
        load_tasks(job)
    assert [record.args[0] for record in caplog.records if record.args] == [1]


def test_a_task_with_a_file_crosses_processes(tmp_path: Path) -> None:
    dataset(tmp_path / "tasks.jsonl", SAME)
    [row] = json_rows(tmp_path / "tasks.jsonl")
    task = to_task(row, {})
    received = pickle.loads(pickle.dumps(task))
    assert received == task and text_of(received.metadata) == text_of(task.metadata)
    assert json.loads(task.model_dump_json())["metadata"]["image"] == "a.png"
    assert Task.model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize(
    "name", ["a\0.png", f"{'a' * 300}.png", "loop.png", "folder.png", "pipe.png"]
)
def test_a_name_that_no_file_can_have_is_a_missing_picture(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    file = PictureFile(name, tmp_path)
    with pytest.raises(PictureError):
        _ = file.digest
    row = {"question": ASKED, "image": file}
    assert text_of(row) != text_of({"question": ASKED})
    with pytest.raises(TaskError):
        RowPictures("row 1", ()).data_url(file)
