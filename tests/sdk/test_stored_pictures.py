"""Rows of conversations with pictures: every form, where files may lie, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.shared.stored import open_stored
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import TaskError
from ajet_sdk.pictures import picture_at, picture_of
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Task
from tests.drawings import part, png, text, url_of
from tests.sdk.test_stored import job, rows

ANSWER = {"role": "assistant", "content": "left"}
A, B = png(1), png(2)


def user(*content: Any) -> dict[str, Any]:
    whole = content[0] if len(content) == 1 and isinstance(content[0], str) else list(content)
    return {"role": "user", "content": whole}


def learnt(path: Path, row: dict[str, Any], algorithm: str = "sft") -> list[list[Any]]:
    """The contents of the user's messages of each conversation of a row, pictures by digest."""
    stored = open_stored(job({"adv_estimator": algorithm, "data": rows(path, row)}))
    assert stored is not None
    found = []
    for episode in stored.loads[0]():
        for call in episode.calls:
            messages = call.request["messages"]
            found += [_plain(m["content"]) for m in messages if m["role"] == "user"]
    return found


def _plain(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        picture_at(each["image_url"]["url"]) if each["type"] == "image_url" else each["text"]
        for each in content
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(A)
    (tmp_path / "figures" / "b.png").write_bytes(B)
    return tmp_path / "data.jsonl"


ROWS: dict[str, dict[str, Any]] = {
    "data URLs": {"messages": [user(part(A), text("or"), part(B)), ANSWER]},
    "paths": {"messages": [user(part("figures/a.png"), text("or"), part("figures/b.png")), ANSWER]},
    "parts of a column": {
        "messages": [user({"type": "image"}, text("or"), {"type": "image"}), ANSWER],
        "images": ["figures/a.png", url_of(B)],
    },
    "parts of type image": {
        "messages": [
            user({"type": "image", "image": url_of(A)}, text("or"), {"type": "image", "path": "figures/b.png"}),
            ANSWER,
        ]
    },
    "places": {
        "messages": [user("<image>or<image>"), ANSWER],
        "images": ["figures/a.png", "figures/b.png"],
    },
    "prompt and completion": {
        "prompt": [user("<image>or<image>")],
        "completion": [ANSWER],
        "images": [url_of(A), {"path": "figures/b.png", "bytes": None}],
    },
    "columns of structs": {
        "messages": [
            user(
                {"type": "image", "text": None}, {"type": "text", "text": "or"}, {"type": "image", "text": None}
            ),
            ANSWER,
        ],
        "images": ["figures/a.png", "figures/b.png"],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
def test_each_form_of_a_row_has_its_pictures(data: Path, form: str) -> None:
    assert learnt(data, ROWS[form]) == [[picture_of(A), "or", picture_of(B)]]


def test_pictures_without_a_place_precede_the_first_text(data: Path) -> None:
    row = {"messages": [user("Which?"), ANSWER], "images": ["figures/a.png", url_of(B)]}
    assert learnt(data, row) == [[picture_of(A), picture_of(B), "Which?"]]
    row = {"messages": [user("Which?"), ANSWER], "image": "figures/a.png"}
    assert learnt(data, row) == [[picture_of(A), "Which?"]]


def test_pairs_have_their_pictures(data: Path) -> None:
    row = {
        "prompt": [user("<image>Which?")],
        "chosen": [ANSWER],
        "rejected": [{"role": "assistant", "content": "right"}],
        "images": ["figures/a.png"],
    }
    assert learnt(data, row, "dpo") == 2 * [[picture_of(A), "Which?"]]


def test_a_column_of_other_images_is_left_alone(data: Path) -> None:
    row = {"messages": [user("What does <image> mean?"), ANSWER], "image": "python:3.11"}
    assert learnt(data, row) == ["What does <image> mean?"]


WRONG: dict[str, dict[str, Any]] = {
    "missing file": {"messages": [user(part("figures/c.png")), ANSWER]},
    "above": {"messages": [user(part("../secret.png")), ANSWER]},
    "elsewhere": {"messages": [user(part("/etc/passwd")), ANSWER]},
    "link": {"messages": [user(part("https://example.org/a.png")), ANSWER]},
    "too few": {"messages": [user("<image><image>"), ANSWER], "images": ["figures/a.png"]},
    "too many": {"messages": [user("<image>?"), ANSWER], "images": ["figures/a.png", url_of(B)]},
    "nothing": {"messages": [user({"type": "image_url"}), ANSWER]},
    "no user": {"messages": [ANSWER], "images": ["figures/a.png"]},
}


@pytest.mark.parametrize("form", WRONG)
def test_a_row_without_its_pictures_is_refused_before_the_training(data: Path, form: str) -> None:
    with pytest.raises(TaskError):
        open_stored(job({"adv_estimator": "sft", "data": rows(data, WRONG[form])}))


def test_a_file_that_is_no_picture_is_refused(data: Path) -> None:
    (data.parent / "figures" / "a.png").write_text("no picture")
    with pytest.raises(TaskError):
        learnt(data, ROWS["paths"])


def test_pictures_of_the_training_tasks_lie_beside_their_file(data: Path) -> None:
    reader = {"training": {"file_path": rows(data, ROWS["paths"])}}
    values = {
        "task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": reader},
        "trainer_common": {"algorithm": "sft"},
    }
    config = load_config(values=values)
    of = job({"adv_estimator": "sft"}, load_tasks(config).train)
    stored = open_stored(replace(of, config=config))
    assert stored is not None
    (episode,) = stored.loads[0]()
    (call,) = episode.calls
    assert _plain(call.request["messages"][0]["content"]) == [picture_of(A), "or", picture_of(B)]


def test_the_same_words_about_other_pictures_are_other_tasks(data: Path) -> None:
    """Else their replies would be attempts at one task, of which the best is learned, or pairs."""
    columns = [
        {"messages": [user("<image>Which?"), ANSWER], "images": [f"figures/{name}.png"]}
        for name in ("a", "b")
    ]
    stored = open_stored(job({"adv_estimator": "sft", "data": rows(data, *columns)}))
    assert stored is not None
    ids = [load()[0].task.task_id for load in stored.loads]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("again", [A, B])
def test_a_row_with_a_validation_question_and_its_picture_is_refused(
    data: Path, again: bytes
) -> None:
    val = [Task(main_query="Which?", metadata={"image": url_of(A)})]
    row = {"messages": [user("<image>Which?"), ANSWER], "images": [url_of(again)]}
    of = job({"adv_estimator": "sft", "data": rows(data, row)}, val=val)
    if again == A:
        with pytest.raises(TaskError):
            open_stored(of)
    else:
        assert open_stored(of) is not None
