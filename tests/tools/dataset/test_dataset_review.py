"""What a person decides of a dataset: nothing is lost, nothing is written before it is saved, and
then whole."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import ConfigError, TaskError
from ajet_tools.dataset.curation.filter import parse
from ajet_tools.dataset.files.tables import read
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.review.journal import Decision
from ajet_tools.dataset.review.review import Only, Review
from ajet_tools.dataset.review.save import Plan, proposed, rejected_beside, save


def row(i: int) -> dict[str, Any]:
    return {"main_query": f"What is {i} + 1?", "metadata": {"answer": str(i + 1), "level": i % 3}}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [one.values for one in read(path)]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    with Writer(path) as writer:
        for i in range(20):
            writer.write(row(i))
    return path


def opened(path: Path | str, **options: Any) -> Review:
    review = Review(str(path), **options)
    review.load()
    return review


def fitting(review: Review, text: str, only: Only = "all") -> list[int] | None:
    return review.fitting(parse(text), only, stop=threading.Event())


def test_what_was_decided_is_there_again_after_a_kill(tasks: Path) -> None:
    before = tasks.read_bytes()
    review = opened(tasks)
    review.mark([1, 2], "rejected")
    review.mark([3], "accepted")
    review.edit(4, {**row(4), "metadata": {"answer": "five", "level": 1}})
    # no close, no save: the process is gone
    again = opened(tasks)
    assert again.decisions == review.decisions and again.restored == 4 and not again.unsaved
    assert again.row(4).values["metadata"]["answer"] == "five"
    assert tasks.read_bytes() == before


def test_undo_goes_back_to_the_beginning_step_by_step(tasks: Path) -> None:
    chance, review = random.Random(7), opened(tasks)
    states = [dict(review.decisions)]
    for _ in range(60):
        numbers = chance.sample(range(20), chance.randint(1, 4))
        if chance.random() < 0.3:
            review.edit(numbers[0], {**row(numbers[0]), "main_query": f"And {chance.random()}?"})
        else:
            review.mark(numbers, chance.choice(("accepted", "rejected")))
        states.append(dict(review.decisions))
    for state in reversed(states[:-1]):
        assert review.undo()
        assert review.decisions == state
    assert not review.undo() and not review.unsaved
    assert opened(tasks).decisions == {}


def test_the_same_mark_again_takes_it_back_and_an_edit_back_is_no_edit(tasks: Path) -> None:
    review = opened(tasks)
    review.mark([1, 2], "accepted")
    review.mark([2, 3], "accepted")
    assert [review.mark_of(i) for i in (1, 2, 3)] == ["accepted"] * 3
    review.mark([1, 2, 3], "accepted")
    review.edit(5, {**row(5), "main_query": "Other?"})
    review.edit(5, row(5))
    assert review.decisions == {}


def test_rows_are_known_again_in_a_file_that_was_changed(tasks: Path) -> None:
    review = opened(tasks)
    review.mark([0, 19], "rejected")
    review.mark([5], "accepted")
    lines = tasks.read_text().splitlines(keepends=True)
    tasks.write_text(
        "".join(reversed(lines[1:]))
    )  # the first row is gone, the others stand elsewhere
    again = opened(tasks)
    assert (
        again.marks["rejected"] == 1
        and again.mark_of(0) == "rejected"
        and again.mark_of(14) == "accepted"
    )
    assert again.lost == 1
    again.undo()
    again.mark([0], "rejected")  # taken back
    assert opened(tasks).decisions == {14: Decision("accepted")}


def test_two_rows_that_are_the_same_are_decided_on_apart(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text((json.dumps(row(1)) + "\n") * 2)
    opened(path).mark([1], "rejected")
    review = opened(path)
    assert review.decisions == {1: Decision("rejected")}
    save(review, path)
    assert rows_of(path) == [row(1)]


def test_a_journal_that_was_cut_off_loses_the_last_key_alone(tasks: Path) -> None:
    review = opened(tasks)
    review.mark([1], "accepted")
    review.mark([2], "rejected")
    path = review.journal.path
    path.write_bytes(path.read_bytes()[:-9])
    again = opened(tasks)
    assert again.decisions == {1: Decision("accepted")}
    again.mark([3], "accepted")
    assert set(opened(tasks).decisions) == {1, 3}
    path.write_text("something else\n")
    with pytest.raises(ConfigError, match="move it away"):
        opened(tasks)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_where_nothing_can_be_kept_that_is_known(tasks: Path) -> None:
    tasks.parent.chmod(0o500)
    try:
        review = opened(tasks)
        review.mark([1], "accepted")
        assert review.unkept is not None and not review.is_kept and review.mark_of(1) == "accepted"
    finally:
        tasks.parent.chmod(0o700)


def test_a_full_disk_under_the_journal_is_known_and_stops_nothing(tasks: Path) -> None:
    review = opened(tasks)
    review.journal.path.mkdir()
    review.mark([1], "accepted")
    assert "lost unless saved" in str(review.unkept) and review.mark_of(1) == "accepted"


# Saving


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".parquet"])
def test_saved_in_place_it_has_all_but_the_rejected_and_those_are_beside(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"tasks{suffix}"
    with Writer(path) as writer:
        for i in range(20):
            writer.write(row(i))
    review = opened(path)
    original = [one.values for one in review.rows(range(20))]
    review.mark([0, 7], "rejected")
    review.mark([3], "accepted")
    changed = {**original[4], "main_query": "What is four and one?"}
    review.edit(4, changed)
    saved = save(review, proposed(review))
    assert saved.in_place and not review.unsaved
    assert rows_of(path) == [
        changed if i == 4 else original[i] for i in range(20) if i not in (0, 7)
    ]
    apart = rows_of(rejected_beside(path))
    assert [one["main_query"] for one in apart] == [original[i]["main_query"] for i in (0, 7)]
    again = opened(path)
    assert [again.row(n).values for n in again.decisions] == [original[3]] and again.marks[
        "accepted"
    ] == 1
    assert [p.name for p in tmp_path.iterdir() if ".part" in p.name] == []


def test_what_was_rejected_before_stays_on_record(tasks: Path) -> None:
    for number in (2, 2, 5):
        review = opened(tasks)
        review.mark([number], "rejected")
        save(review, tasks)
    left, apart = rows_of(tasks), rows_of(rejected_beside(tasks))
    assert len(left) == 17 and len(apart) == 3
    key = "main_query"
    assert {one[key] for one in left} | {one[key] for one in apart} == {
        row(i)[key] for i in range(20)
    }
    assert all(one["rejected"] == {"reason": "rejected by hand"} for one in apart)


def test_saved_elsewhere_the_dataset_is_as_it_was_and_twice_is_as_once(
    tasks: Path, tmp_path: Path
) -> None:
    before, target = tasks.read_bytes(), tmp_path / "out" / "good.parquet"
    review = opened(tasks)
    review.mark([1], "rejected")
    for _ in range(2):
        save(review, target)
        assert len(rows_of(target)) == 19 and len(rows_of(rejected_beside(target))) == 1
    assert tasks.read_bytes() == before and opened(tasks).mark_of(1) == "rejected"


def test_only_accepted_rows_where_nothing_is_lost_by_it(tasks: Path, tmp_path: Path) -> None:
    review = opened(tasks)
    review.mark([1, 5], "accepted")
    with pytest.raises(ConfigError, match="18 undecided rows would be lost"):
        save(review, tasks, only_accepted=True)
    save(review, tmp_path / "good.jsonl", only_accepted=True)
    assert rows_of(tmp_path / "good.jsonl") == [row(1), row(5)]


def test_what_would_lose_something_is_refused(tasks: Path, tmp_path: Path) -> None:
    review = opened(tasks)
    review.mark([1], "rejected")
    tasks.write_text(tasks.read_text() + json.dumps(row(99)) + "\n")
    with pytest.raises(ConfigError, match="changed by another program"):
        save(review, tasks)
    assert len(rows_of(tasks)) == 21 and not rejected_beside(tasks).exists()
    mapped = opened(tasks, mapping={"main_query": "metadata.asked"})
    with pytest.raises(ConfigError, match="would be renamed"):
        save(mapped, tasks)
    assert proposed(mapped).name == "tasks.reviewed.jsonl"
    (tmp_path / "bad.jsonl").write_text(json.dumps(row(1)) + "\nno row\n")
    bad = opened(tmp_path / "bad.jsonl", skip_bad=True)
    with pytest.raises(ConfigError, match="1 invalid rows"):
        save(bad, tmp_path / "bad.jsonl")
    with pytest.raises(ConfigError, match="not a dataset file name"):
        Plan.of(review, tmp_path)
    unread = Review(str(tasks))
    with pytest.raises(ConfigError, match="still being read"):
        Plan.of(unread, tmp_path / "x.jsonl")


def test_a_disk_that_is_full_leaves_everything_as_it_was(tasks: Path, tmp_path: Path) -> None:
    review = opened(tasks)
    review.mark([1], "rejected")
    before = tasks.read_bytes()
    rejected_beside(tasks).mkdir()  # cannot be written
    with pytest.raises(ConfigError):
        save(review, tasks)
    assert tasks.read_bytes() == before and review.unsaved


def test_splits_of_a_directory_and_stdin(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        with Writer(tmp_path / "hub", split=split) as writer:
            for i in range(3):
                writer.write(row(i))
    review = opened(f"{tmp_path / 'hub'}:validation")
    review.mark([0], "rejected")
    assert review.journal.path == tmp_path / "hub" / ".validation.review.jsonl"
    assert proposed(review).name == "validation-00000-of-00001.parquet"
    save(review, proposed(review))
    assert len(rows_of(tmp_path / "hub")) == 3
    assert [one.values for one in read(f"{tmp_path / 'hub'}:validation")] == [row(1), row(2)]
    with pytest.raises(ConfigError, match="stdin"):
        Review("-")


# Finding


def test_filter_and_search_see_what_was_edited(tasks: Path) -> None:
    review = opened(tasks)
    review.edit(4, {**row(4), "main_query": 'Say "größer" to 5?'})
    review.mark([4], "accepted")
    review.mark([1], "rejected")
    assert fitting(review, 'text~"GRÖSSER"') == [4] and fitting(review, "metadata.level=2") == [
        2,
        5,
        8,
        11,
        14,
        17,
    ]
    assert fitting(review, "metadata.level=1", "undecided") == [7, 10, 13, 16, 19]
    assert fitting(review, "", "rejected") == [1] and fitting(review, "", "edited") == [4]
    look = {"stop": threading.Event()}
    assert review.holding('"GRÖSSER"', **look) == [4] and review.holding("what is 1", **look) == [
        1,
        *range(10, 20),
    ]
    with pytest.raises(ConfigError, match=r"did you mean metadata[.]level"):
        fitting(review, "metadata.levl=1")
    look["stop"].set()
    assert review.holding("x", **look) is None


# What a row is


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"main_query": " ", "metadata": {}}, "has no question any more"),
        ({"main_query": ["a"]}, "main_query is a list, and text in these rows"),
        (
            {"metadata": {"answer": 5, "level": 1}},
            "metadata.answer is a number, and text in these rows",
        ),
        (
            {"metadata": {"anwser": "5", "level": 1}},
            "metadata.anwser is a field that no row has, and answer is missing",
        ),
        ({"metadata": []}, "metadata is a list, and an object in these rows"),
    ],
)
def test_an_edit_that_makes_no_row_is_refused(
    tasks: Path, change: dict[str, Any], why: str
) -> None:
    review = opened(tasks)
    with pytest.raises(TaskError, match=why):
        review.edit(4, {**row(4), **change})
    assert review.decisions == {} and not review.journal.path.exists()


def test_an_edit_may_add_a_field_and_take_one_away(tasks: Path) -> None:
    review = opened(tasks)
    review.edit(4, {"main_query": "Four?", "metadata": {"answer": "4", "note": "by hand"}})
    review.edit(5, {**row(5), "metadata": {"answer": None, "level": 1.5}})
    assert review.marks["edited"] == 2


def test_an_edited_row_says_so_in_its_provenance_and_has_the_id_of_what_it_asks(
    tmp_path: Path,
) -> None:
    from ajet_tools.dataset.generate.examples import task_id_of

    values = row(1)
    values = {
        "task_id": task_id_of(values),
        **values,
        "provenance": {"source": "expand", "verdict": {"ok": True}},
    }
    path = tmp_path / "made.jsonl"
    path.write_text(json.dumps(values) + "\n")
    review = opened(path)
    review.edit(0, {**values, "main_query": "What is 1 + 1, then?"})
    made = review.row(0).values
    assert made["provenance"] == {**values["provenance"], "edited": ["main_query"]}
    without = {name: value for name, value in made.items() if name not in ("task_id", "provenance")}
    assert made["task_id"] == task_id_of(without) != values["task_id"]
    review.edit(0, {**made, "main_query": values["main_query"]})
    assert review.row(0).values == values and not review.decisions


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Rows are on disk."""
    import tracemalloc

    def held(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        path.write_text(
            "".join(json.dumps({"main_query": f"{i} " + "x" * 2000}) + "\n" for i in range(count))
        )
        tracemalloc.start()
        review = opened(path)
        fitting(review, "chars>5000")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        review.close()
        return peak

    held(100)
    small, large = held(5000), held(12_000)  # more than what is read at a time
    assert large - small < 1_500_000  # 14 MB of rows


@pytest.fixture(autouse=True)
def _no_draft_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob("*.part"))
