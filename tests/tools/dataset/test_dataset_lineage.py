"""No command turns a validation task into training data, and no job learns what it validates on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import TaskError
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.tasks.load import load_tasks, open_growth
from ajet_sdk.trace.feedback import give
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, Reward, Run, Task
from ajet_tools.cli.app import app
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.from_traces.export import TRAINING
from ajet_tools.dataset.generate.settings import STRATEGIES

HELD_OUT = (
    "How many marbles are left in the jar after Alma gives nine of her twenty-one marbles to a"
    " friend?"
)
ALTERED = (
    "How many marbles are left in the jar after Anna gives nine of her twenty-one marbles to a"
    " friend?"
)
QUESTIONS = [
    "A tram has forty seats and twelve are taken. How many are free?",
    "Which is the third prime number above thirty?",
    "Six crates hold eight melons each. How many melons is that?",
    "A clock loses two minutes a day. How much does it lose in a fortnight?",
]
REPLIES = """
import itertools, json, random
numbers = itertools.count(1000)

def reply(ask):
    messages = ask.messages
    if "Work" not in messages[-1]["content"] and "question" not in messages[-1]["content"]:
        return "ANSWER: 1"
    words = "amber birch cedar dune ember fjord grove heath inlet knoll larch marsh".split()
    def row():
        text = " ".join(random.Random(next(numbers)).choices(words, k=14))
        return {"main_query": f"Say which of these comes first: {text}?", "metadata": {"answer": "1"}}
    rows = [row() for _ in range(3)] + [{"main_query": HELD_OUT_TEXT, "metadata": {"answer": "12"}}]
    return json.dumps(rows)
"""

ASKED = """
import json

def reply(ask):
    open("asked.txt", "a").write(ask.messages[-1]["content"])
    question, quote = "In which year was the quarry north of the valley opened?", "opened in the year 1312 by masons"
    return json.dumps([{"main_query": question, "metadata": {"answer": "1312"}, "quote": quote}])
"""


def episode(name: str, question: str, split: str, reward: float, run: str = "job") -> Episode:
    messages = [{"role": "user", "content": question}]
    reply = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": f"reply {name}"}}]
    }
    call = Call(
        call_id=f"{name}-0",
        episode_id=name,
        request={"messages": messages},
        response=reply,
        prompt_ids=(1, 2),
        output_ids=(3,),
        logprobs=(-0.5,),
    )
    return Episode(
        episode_id=name,
        run_id=run,
        group_id=question,
        split=split,  # type: ignore[arg-type]
        task=Task(main_query=question, metadata={"answer": "12"}),
        calls=(call,),
        output=f"reply {name}",
        rewards=(Reward(value=reward),),
        is_success=reward > 0.5,
    )


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that fails at all of its tasks, one of them a validation task, and one a near copy of
    that."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="job", backbone="local", status="finished"))
        asked = [(question, "train") for question in (*QUESTIONS, ALTERED)] + [(HELD_OUT, "val")]
        for number, (question, split) in enumerate(asked):
            for reward in (0.0, 0.2):
                one = episode(f"e{number}-{reward:g}", question, split, reward)
                writer.put(*one.calls, one)
    give(path, *[Feedback(episode_id=f"e{number}-0", correction="13") for number in range(6)])
    Path("replies.py").write_text(REPLIES.replace("HELD_OUT_TEXT", repr(HELD_OUT)))
    return path


def ajet(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def text_in(path: Path) -> str:
    """All that a file has to learn from: where rows are refused, and where they come from, is no
    part of it."""
    if path.suffix == ".parquet":
        return json.dumps(pq.read_table(path).to_pylist(), default=str)
    return path.read_text(encoding="utf-8")


def exported(format: str, *options: str) -> Callable[[Path, Sequence[str]], Path]:
    def run(trace: Path, more: Sequence[str]) -> Path:
        out = Path("out.parquet" if format == "tokens" else "out.jsonl")
        ajet("trace", "export", trace, "--format", format, "--out", out, *options, *more)
        return out

    return run


def expanded(strategy: str, *source: str) -> Callable[[Path, Sequence[str]], Path]:
    def run(trace: Path, more: Sequence[str]) -> Path:
        ajet(
            "dataset",
            "expand",
            *(source or ("--from-failures", trace)),
            "--strategy",
            strategy,
            "--count",
            5,
            "--out",
            "data",
            "--verify",
            "none",
            "--model",
            "replies.py:reply",
            "--validation",
            0,
            *more,
        )
        return Path("data/train.jsonl")

    return run


def write_seeds(trace: Path) -> None:
    """Tasks of the trace as seeds, those of validation with them: whoever reads the file is to
    leave them out."""
    ajet(
        "trace",
        "export",
        trace,
        "--format",
        "tasks",
        "--failed",
        "--out",
        "seeds.jsonl",
        "--include-validation",
    )
    rows = [json.loads(line) for line in Path("seeds.jsonl").read_text().splitlines()]
    for row in rows:
        row["provenance"]["splits"] = (
            ["val"] if row["main_query"] in (HELD_OUT, ALTERED) else ["train"]
        )
        row["provenance"]["episodes"] = []
    Path("seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def from_docs(trace: Path, more: Sequence[str]) -> Path:
    """What the model that writes the rows is shown."""
    write_seeds(trace)
    Path("stones.md").write_text(
        "# Quarry\n\nThe quarry north of the valley was opened in the year 1312 by masons."
    )
    Path("asked.py").write_text(ASKED)
    ajet(
        "dataset",
        "from-docs",
        "stones.md",
        "--seeds",
        "seeds.jsonl",
        "--out",
        "with" if more else "without",
        "--verify",
        "none",
        "--model",
        "asked.py:reply",
        "--with",
        "shots=6",
        "--validation",
        0,
        *more,
    )
    return Path("asked.txt")


def read_by(kind: str, **reader: Any) -> Callable[[Path, Sequence[str]], Path]:
    """The training tasks of a job with a task reader, and for `growing` those that are added before
    the first step."""

    def run(trace: Path, more: Sequence[str]) -> Path:
        write_seeds(trace)
        Path("val.jsonl").write_text(
            json.dumps({"main_query": HELD_OUT, "metadata": {"answer": "12"}}) + "\n"
        )
        kept = [
            line
            for line in Path("seeds.jsonl").read_text().splitlines(True)
            if HELD_OUT not in line
        ]
        Path("seeds.jsonl").write_text("".join(kept))
        config = load_config(
            values={
                "experiment_dir": "experiment",
                "backbone": "local",
                "task_reader": {"type": kind, **reader},
            }
        )
        tasks = load_tasks(config).train
        growth = open_growth(config, "run")
        if growth is not None:
            asyncio.run(growth.grow(0, attempt))
            tasks += growth.tasks(1)
            assert len(growth.tasks(1)) == 3
        Path("tasks.json").write_text(
            json.dumps([task.model_dump() for task in tasks], default=str)
        )
        return Path("tasks.json")

    return run


async def attempt(attempts: Sequence[Attempt]) -> list[Episode]:
    """A policy that solves each task every other time."""
    return [
        Episode(
            task=one.task,
            rewards=(Reward(value=float(one.attempt % 2)),),
            is_success=bool(one.attempt % 2),
        )
        for one in attempts
    ]


GENERATION = {
    "query_reader": {
        "jsonl_dataset_file": {
            "training": {"file_path": "seeds.jsonl"},
            "validation": {"file_path": "val.jsonl"},
        }
    },
    "scripted": "replies.py->reply",
    "verify": "none",
    "task_num": 5,
}
READERS = {
    "tracing": read_by(
        "tracing", feedback_tracing={"base_url": "trace.duckdb", "validation_share": 0}
    ),
    "data_generation": read_by("data_generation", data_generation=GENERATION),
    "growing": read_by(
        "growing", data_generation=GENERATION, growing={"every": 2, "tasks": 3, "attempts": 2}
    ),
}
WRITERS = {
    **READERS,
    "from-docs --seeds": from_docs,
    **{f"trace export --format {format}": exported(format) for format in TRAINING},
    "trace export --failed": exported("tasks", "--failed"),
    "trace export --feedback": exported("messages", "--feedback", "corrected"),
    **{f"expand --from-failures --strategy {name}": expanded(name) for name in STRATEGIES},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", WRITERS)
def test_no_command_writes_a_validation_task_to_learn_without_being_told_to(
    command: str, trace: Path
) -> None:
    written = text_in(WRITERS[command](trace, []))
    ids = ("e4-", "e5-")  # the near copy, the validation task
    assert (
        HELD_OUT not in written
        and ALTERED not in written
        and not any(one in written for one in ids)
    )
    assert "e0-" in written or QUESTIONS[0] in written or "comes first" in written
    if "expand" not in command and command not in READERS:
        more = ["--include-validation"]
        if "from-docs" in command:
            more = ["--with", "include_validation=true"]
        both = text_in(WRITERS[command](trace, more))
        assert HELD_OUT in both or "e5-" in both


@pytest.mark.slow
def test_what_is_left_out_is_counted(trace: Path) -> None:
    def counts(*options: str) -> tuple[int, dict[str, int]]:
        done = ajet("trace", "export", trace, "--out", "out.jsonl", "--json", *options)
        told = json.loads(done.stdout)
        return told["rows"], told["left_out"]

    rows, left_out = counts()
    assert rows == 8, "of four tasks, a corrected attempt and one that earned something"
    assert sorted(left_out.values()) == [2, 2], "of a validation task and of its near copy"
    assert counts("--split", "val") == (2, {})
    assert counts("--include-validation")[0] == 12
    refused = ajet("trace", "export", trace, "e5-0", "--out", "none.jsonl", code=2).output
    assert "left out: 1 validation episodes" in " ".join(refused.split())
    assert not Path("none.jsonl").exists()
    grown = expanded("harder")
    grown(trace, [])
    rejected = [
        json.loads(line)["rejected"]
        for line in Path("data/rejected.jsonl").read_text().splitlines()
    ]
    assert "repeats a validation task" in {one["reason"] for one in rejected}


def test_rows_carry_their_splits_and_the_card_proves_them(trace: Path) -> None:
    ajet(
        "trace",
        "export",
        trace,
        "--format",
        "tasks",
        "--failed",
        "--out",
        "tasks.jsonl",
        "--include-validation",
    )
    rows = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
    assert {row["main_query"]: row["provenance"]["splits"] for row in rows}[HELD_OUT] == ["val"]
    expanded("harder", "tasks.jsonl")(trace, [])
    card = Path("data/README.md").read_text()
    assert (
        "| train | train | 5 |" in card and "No row to learn was made of a validation task." in card
    )
    first = sorted(rows, key=lambda row: row["main_query"] != HELD_OUT)[:2]
    Path("val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first))
    said = ajet(
        "dataset",
        "expand",
        "val.jsonl",
        "--count",
        5,
        "--model",
        "replies.py:reply",
        "--out",
        "b",
        code=2,
    )
    assert "come from validation tasks" in said.output or "1 of 2 rows" in said.output


def test_seeds_in_a_file_named_after_a_validation_split_are_refused(trace: Path) -> None:
    rows = [{"main_query": question, "metadata": {"answer": "1"}} for question in QUESTIONS]
    Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "test.jsonl",
        "--count",
        "3",
        "--verify",
        "none",
        "--model",
        "replies.py:reply",
        "--validation",
        "0",
    ]
    said = ajet("dataset", "expand", *arguments, "--out", "a", code=2)
    assert (
        "4 of 4 rows of test.jsonl come from validation tasks" in said.output
        and not Path("a").exists()
    )
    ajet("dataset", "expand", *arguments, "--out", "b", "--with", "include_validation=true")
    row = json.loads(Path("b/train.jsonl").read_text().splitlines()[0])
    assert row["provenance"]["splits"] == ["train", "val"]
    assert "3 rows to learn were made of validation tasks" in Path("b/README.md").read_text()


def job(train: list[dict[str, Any]], val: list[dict[str, Any]]) -> Any:
    for name, rows in (("train", train), ("validation", val)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {
        "training": {"file_path": "train.jsonl"},
        "validation": {"file_path": "validation.jsonl"},
    }
    return load_config(
        values={
            "ajet": {"task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": files}}
        }
    )


def ask(question: str, **more: Any) -> dict[str, Any]:
    return {"main_query": question, **more}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (ask("what is  3+5?", task_id="a"), "asks what a validation task asks"),
        (ask("What is 3+5?", metadata={"pass_rate": 0.5}), "asks what a validation task asks"),
        (
            ask("What is 3+5?", metadata={"answer": "8", "id": 7, "Question_ID": "q7"}),
            "asks what a validation task asks",
        ),
        (ask("Anything", provenance={"seeds": ["held"], "splits": ["train"]}), "was made of it"),
        (ask("Anything", task_id="held"), "is a validation task"),
    ],
)
def test_a_job_refuses_a_training_task_that_meets_its_validation(
    row: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        TaskError, match=r"training and validation share 1 task.*train.jsonl line 2"
    ) as error:
        held_out = ask(
            "What is 3+5?", task_id="held", metadata={"answer": "8", "id": 1, "Question_ID": "q1"}
        )
        load_tasks(job([ask("What is 3+6?"), row], [held_out]))
    assert says in str(error.value) and "validation.jsonl line 1" in str(error.value)


def test_tasks_of_one_template_and_mazes_of_one_query_are_tasks_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    train = [ask(f"What is 3+{n}?", metadata={"answer": str(n + 3)}) for n in range(20)]
    train += [ask("Walk to the goal.", metadata={"seed": n, "id": n}) for n in range(20)]
    val = [
        ask("What is 3+21?", metadata={"answer": "24"}),
        ask("Walk to the goal.", metadata={"seed": 99, "id": 99}),
    ]
    assert len(load_tasks(job(train, val)).train) == 40 and not caplog.records
    assert len(load_tasks(job([*train, ask(ALTERED)], [*val, ask(HELD_OUT)])).train) == 41
    assert "1 of 41 training tasks nearly repeat a validation task" in caplog.text
    caplog.clear()
    again = ask(
        "What is 3+21?", metadata={"answer": "24.0"}
    )  # another spelling of its answer makes no other task
    assert len(load_tasks(job([*train, again], val)).train) == 41
    assert "1 of 41 training tasks nearly repeat a validation task" in caplog.text
    made = ask("Anything else at all", provenance={"splits": ["val"], "seeds": ["elsewhere"]})
    load_tasks(job([*train, made], val))
    assert "1 training tasks were made of validation tasks of an earlier run" in caplog.text


OTHER_NAME = {
    "filter": ["filter", "{}", "2"],
    "an expression in SQL": ["filter", "{}", "question LIKE '%2%'"],
    "a query in SQL": ["filter", "{}", "--sql", "SELECT * FROM rows"],
    "some columns": ["filter", "{}", "--sql", "SELECT question, answer FROM rows"],
    "export": ["export", "{}"],
    "messages": ["export", "{}", "--format", "messages"],
    "prompts": ["export", "{}", "--format", "trl-prompt"],
    "dedup": ["dedup", "{}"],
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("command", OTHER_NAME)
def test_a_held_out_file_is_held_out_under_another_name(
    tmp_path: Path, command: str, suffix: str
) -> None:
    rows = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(3)]
    source, out = held_out_file(tmp_path, rows, suffix), tmp_path / f"tasks.{suffix}"
    done = CliRunner().invoke(
        app, ["dataset", *(part.format(source) for part in OTHER_NAME[command]), "-o", str(out)]
    )
    assert done.exit_code == 0, done.output
    written = rows_of(out)
    assert len(written) == 3
    assert all(row["provenance"]["splits"] == ["val"] for row in written)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_count_of_held_out_rows_has_no_lineage(tmp_path: Path, suffix: str) -> None:
    source = held_out_file(tmp_path, [{"question": "1 + 1?", "answer": "2"}], suffix)
    out = tmp_path / "counts.jsonl"
    query = ["--sql", "SELECT answer, count(*) AS n FROM rows GROUP BY answer"]
    done = CliRunner().invoke(app, ["dataset", "filter", str(source), *query, "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text()) == {"answer": "2", "n": 1}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_measured_copy_of_a_held_out_file_is_held_out(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = held_out_file(tmp_path, [{"question": "1 + 1?", "answer": "2"}], suffix)
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    options = ["agent.py:solve", "--judge", "exact", "--model", "agent.py:reply"]
    measured = tmp_path / f"measured.{suffix}"
    done = CliRunner().invoke(
        app, ["run", *options, "--tasks", str(source), "--out", str(measured)]
    )
    assert done.exit_code == 0, done.output
    [row] = rows_of(measured)
    assert row["provenance"]["splits"] == ["val"]


AGENT = """
import ajet

@ajet.workflow
async def solve(question: str, model: ajet.Model) -> str:
    return (await model.chat([{"role": "user", "content": question}]))["content"]

def reply(ask):
    return "2"
"""


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [row.values for row in read(file)]


def held_out_file(folder: Path, rows: Sequence[dict[str, Any]], suffix: str) -> Path:
    file = folder / f"test.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
