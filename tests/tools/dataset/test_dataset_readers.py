"""`task_reader.type: data_generation` and `tracing`: a job that makes its own tasks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import AjetError, ConfigError, TaskError
from ajet_sdk.tasks.load import TaskSets, load_tasks
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Run, Task

pytestmark = pytest.mark.slow

SEEDS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(1, 9)]
HELD_OUT = [
    {"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in (1000, 1037, 5000)
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(body: dict[str, Any], number: int) -> str:
    wanted = int(re.search(r"array of (\d+)", body["messages"][-1]["content"])[1])  # type: ignore[index]
    numbers = [1000 * (number + 1) + 37 * place for place in range(wanted)]
    return json.dumps(
        [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in numbers]
    )


def config(folder: Path, kind: str, **sections: Any) -> Config:
    reader = {"type": kind, **sections}
    return load_config(values={"experiment_dir": str(folder / "experiment"), "task_reader": reader})


def seeded(folder: Path, url: str, *, held_out: Path | None = None, **more: Any) -> Config:
    """A job whose tasks grow from seeds."""
    files: dict[str, Any] = {"training": {"file_path": str(folder / "seeds.jsonl")}}
    if held_out:
        files["validation"] = {"file_path": str(held_out)}
    generation = {"query_reader": {"jsonl_dataset_file": files}, "llm_model": "teacher", "base_url": url,
                  "verify": "none", "task_num": 10, "num_workers": 2, **more}  # fmt: skip
    return config(folder, "data_generation", data_generation=generation)


def queries(tasks: list[Task]) -> set[str]:
    return {task.main_query for task in tasks}


def test_tasks_grow_from_seeds_and_the_model_is_asked_once(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    server = model_server(answers)
    lines(tmp_path / "seeds.jsonl", SEEDS)
    job = seeded(tmp_path, server.url)
    assert not job.notices()
    made = load_tasks(job)
    assert (len(made.train), len(made.val)) == (9, 1)
    assert not queries(made.train) & queries(made.val)
    assert not (queries(made.train) | queries(made.val)) & {row["question"] for row in SEEDS}
    assert set(made.train[0].metadata) == {
        "question",
        "answer",
    }, "where a row is from is no part of the task"
    asked = len(server.requests)
    assert {body["model"] for body in server.requests} == {"teacher"}
    assert load_tasks(job) == made
    assert len(server.requests) == asked
    lines(tmp_path / "seeds.jsonl", SEEDS[:5])
    load_tasks(job)
    assert len(server.requests) > asked, "other seeds, other tasks"


def test_a_generation_that_failed_goes_on_and_pays_for_no_call_twice(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    def fail_later(body: dict[str, Any], number: int) -> Any:
        return answers(body, number) if number < 2 else model_server.refusal(401, "no such key")  # type: ignore[attr-defined]

    lines(tmp_path / "seeds.jsonl", SEEDS)
    replies = [fail_later]
    server = model_server(lambda body, number: replies[0](body, number))
    with pytest.raises(AjetError, match="no such key"):
        load_tasks(seeded(tmp_path, server.url, num_workers=1))
    refused = len(server.requests) - 2
    replies[0] = answers
    made = load_tasks(seeded(tmp_path, server.url, num_workers=1))
    assert len(made.train) + len(made.val) == 10
    paid = [
        json.dumps(body, sort_keys=True)
        for body in (*server.requests[:2], *server.requests[2 + refused :])
    ]
    assert len(paid) == len(set(paid)), "a reply that was paid for is not asked for again"


def test_generated_tasks_that_were_edited_are_not_written_over(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    server = model_server(answers)
    lines(tmp_path / "seeds.jsonl", SEEDS)
    made = load_tasks(seeded(tmp_path, server.url))
    [file] = tmp_path.rglob("data/*/train.jsonl")
    asked = len(server.requests)
    text = file.read_text()
    file.write_text(text.replace("What is", "How much is", 1))
    with pytest.raises(ConfigError, match=r"train.jsonl was edited"):
        load_tasks(seeded(tmp_path, server.url))
    file.unlink()
    assert load_tasks(seeded(tmp_path, server.url)) == made
    assert len(server.requests) == asked, "it is written again from the replies that are kept"


def test_embeddings_that_no_task_is_compared_by_are_told(tmp_path: Path) -> None:
    params = {"base_url": "http://127.0.0.1:9/v1", "model": "vectors"}
    job = seeded(tmp_path, "http://127.0.0.1:9/v1", deduplication_filter={"params": params})
    [notice] = job.notices()
    assert "deduplication_filter.params.base_url" in notice and "dedup --embed" in notice


def test_given_validation_tasks_are_the_validation_set_and_are_never_trained_on(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    server = model_server(answers)
    lines(tmp_path / "seeds.jsonl", SEEDS)
    job = seeded(tmp_path, server.url, held_out=lines(tmp_path / "val.jsonl", HELD_OUT))
    made = load_tasks(job)
    assert queries(made.val) == {row["question"] for row in HELD_OUT}
    assert len(made.train) == 10
    assert not queries(made.train) & queries(made.val)
    refused = [
        json.loads(line) for line in next(tmp_path.rglob("rejected.jsonl")).read_text().splitlines()
    ]
    assert "What is 1000 plus 1000?" in {row["question"] for row in refused}, (
        "the model did write one of them"
    )


def test_a_seed_that_is_a_validation_task_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "seeds.jsonl", SEEDS)
    job = seeded(
        tmp_path, "http://127.0.0.1:9/v1", held_out=lines(tmp_path / "val.jsonl", SEEDS[3:4])
    )
    with pytest.raises(
        TaskError, match=r"seeds.jsonl line 4 is also a validation task \(val.jsonl line 1\)"
    ):
        load_tasks(job)


def test_columns_of_other_names_go_through_the_mapping(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    def say(body: dict[str, Any], number: int) -> str:
        rows = json.loads(answers(body, number))
        return json.dumps(
            [{"main_query": row["question"], "metadata": {"answer": row["answer"]}} for row in rows]
        )

    server = model_server(say)
    lines(
        tmp_path / "seeds.jsonl",
        [{"sum": row["question"], "result": row["answer"]} for row in SEEDS],
    )
    job = seeded(tmp_path, server.url)
    reader = job.task_reader.model_copy(
        update={"field_mapping": {"sum": "main_query", "result": "metadata.answer"}}
    )
    made = load_tasks(job.model_copy(update={"task_reader": reader}))
    assert made.train[0].main_query.startswith("What is ")
    assert made.train[0].metadata["answer"].isdecimal()


def test_a_document_is_on_one_side_of_the_split(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    (tmp_path / "handbook").mkdir()
    for n in range(6):
        text = (
            f"# Pump P{n}\n\nThe pump P{n} moves exactly {100 + n} litres in a minute, as long as"
            " it is cold.\n"
        )
        (tmp_path / "handbook" / f"pump{n}.md").write_text(text)

    def say(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][-1]["content"]
        pump, litres = re.search(r"pump (P\d) moves exactly (\d+) litres", prompt).groups()  # type: ignore[union-attr]
        quote = f"The pump {pump} moves exactly {litres} litres in a minute, as long as it is cold."
        return json.dumps(
            [
                {
                    "question": f"How much does {pump} move?",
                    "answer": f"{litres} litres",
                    "quote": quote,
                }
            ]
        )

    server = model_server(say)
    generation = {"document_reader": {"document_path": [str(tmp_path / "handbook")]}, "llm_model": "teacher",
                  "base_url": server.url, "verify": "none", "task_num": 6, "validation_share": 0.3}  # fmt: skip
    made = load_tasks(config(tmp_path, "data_generation", data_generation=generation))
    assert made.train
    assert made.val
    assert not queries(made.train) & queries(made.val)
    assert all("litres" in json.dumps(task.metadata) for task in made.train)


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({}, "data_generation has no source for tasks: set document_reader.document_path"),
        ({"document_reader": {"document_path": ["none.pdf"]}}, "there is no none.pdf (argument)"),
        (
            {"query_reader": {"type": "parquet"}},
            "query_reader.type must be jsonl_dataset_file (got 'parquet', argument)",
        ),
    ],
)
def test_what_is_missing_is_told(tmp_path: Path, generation: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tasks(config(tmp_path, "data_generation", data_generation=generation))
    assert said in str(caught.value)


def test_a_job_needs_to_say_which_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_MODEL", raising=False)
    lines(tmp_path / "seeds.jsonl", SEEDS)
    files = {"training": {"file_path": str(tmp_path / "seeds.jsonl")}}
    with pytest.raises(ConfigError, match=r"no model to generate tasks: .*llm_model"):
        generation = {"query_reader": {"jsonl_dataset_file": files}}
        load_tasks(config(tmp_path, "data_generation", data_generation=generation))


def test_an_endpoint_that_refuses_the_key_is_told_with_the_job(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    server = model_server(lambda body, number: model_server.refusal(401, "no such key"))  # type: ignore[attr-defined]
    lines(tmp_path / "seeds.jsonl", SEEDS)
    with pytest.raises(AjetError, match="no such key"):
        load_tasks(seeded(tmp_path, server.url))


# Traces


def traces(folder: Path, count: int = 20) -> Path:
    """Episodes of a deployed agent: of a polite one every other time."""
    with TraceWriter(folder / "trace.duckdb") as writer:
        writer.put(Run(run_id="run", name="prod"))
        for n in range(count):
            task = Task(
                main_query=f"Where is parcel number {n}?", metadata={"answer": f"depot {n}"}
            )
            output = "It is in the depot, thank you." if n % 2 == 0 else "No idea."
            writer.put(Episode(run_id="run", task=task, output=output, status="succeeded"))
    return folder


def traced(folder: Path, **more: Any) -> TaskSets:
    given = {"base_url": str(folder / "prod"), "validation_share": 0.3, **more}
    return load_tasks(config(folder, "tracing", feedback_tracing=given))


def test_traced_tasks_are_split_by_what_they_ask(tmp_path: Path) -> None:
    (tmp_path / "prod").mkdir()
    traces(tmp_path / "prod")
    made = traced(tmp_path, train_output_path=str(tmp_path / "out/traced.jsonl"))
    assert len(made.train) + len(made.val) == 20
    assert 2 <= len(made.val) <= 10
    assert traced(tmp_path) == made
    assert len((tmp_path / "out/traced.jsonl").read_text().splitlines()) == 20
    assert made.train[0].metadata["answer"].startswith("depot")


def test_a_rubric_leaves_out_what_it_refuses_and_grades_once(
    tmp_path: Path, model_server: Callable[..., Any]
) -> None:
    def say(body: dict[str, Any], number: int) -> str:
        polite = "thank you" in body["messages"][-1]["content"]
        return json.dumps({"score": 9 if polite else 1, "reason": "polite" if polite else "rude"})

    server = model_server(say)
    (tmp_path / "prod").mkdir()
    traces(tmp_path / "prod")
    params = {"custom_rubrics": "The agent is friendly.", "temperature": 0.25, "max_thread": 4}
    asked = {
        "alien_llm_model": "grader",
        "llm_base_url": server.url,
        "alien_llm_response_length": 300,
    }
    made = traced(tmp_path, filters=[{"type": "llm_evaluate", "params": params}], **asked)
    assert len(made.train) + len(made.val) == 10
    assert len(server.requests) == 20
    assert {
        (body["model"], body["temperature"], body["max_tokens"]) for body in server.requests
    } == {("grader", 0.25, 300)}
    assert "The agent is friendly." in server.requests[0]["messages"][-1]["content"]
    assert server.most_at_once <= 4
    assert traced(tmp_path, filters=[{"type": "llm_evaluate", "params": params}], **asked) == made
    assert len(server.requests) == 20
    off = traced(
        tmp_path, filters=[{"type": "llm_evaluate", "enabled": False, "params": params}], **asked
    )
    assert len(off.train) + len(off.val) == 20


def test_tasks_that_are_alike_are_one_where_a_filter_says_so(tmp_path: Path) -> None:
    (tmp_path / "prod").mkdir()
    asked = [
        "Where is the parcel of Mrs Miller?",
        "Where is the parcel of Mrs. Miller??",
        "How tall is a giraffe?",
    ]
    with TraceWriter(tmp_path / "prod" / "trace.duckdb") as writer:
        writer.put(Run(run_id="run", name="prod"))
        for text in asked:
            writer.put(
                Episode(
                    run_id="run", task=Task(main_query=text), output="no idea", status="succeeded"
                )
            )
    alike = [{"type": "deduplication", "params": {"similarity_threshold": 0.8}}]
    assert len(traced(tmp_path, validation_share=0).train) == 3
    assert len(traced(tmp_path, validation_share=0, filters=alike).train) == 2
    assert (
        len(traced(tmp_path, validation_share=0, filters=[{**alike[0], "enabled": False}]).train)
        == 3
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"base_url": None}, "feedback_tracing.base_url is not set"),
        ({"base_url": "http://127.0.0.1:3000"}, "is a URL (argument); give a trace directory"),
        ({"base_url": "nowhere"}, "feedback_tracing.base_url: there is no nowhere"),
        ({"filters": [{"type": "llm_evaluate"}]}, "llm_evaluate needs custom_rubrics"),
    ],
)
def test_what_a_traced_job_lacks_is_told(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    (tmp_path / "prod").mkdir()
    with pytest.raises(ConfigError) as caught:
        traced(tmp_path, **given)
    assert said in str(caught.value)


def test_the_sdk_loads_no_toolkit_until_a_job_asks_for_it() -> None:
    code = (
        "import ajet, sys, ajet_sdk.tasks.load; print([m for m in sys.modules if"
        " m.startswith('ajet_tools')])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
