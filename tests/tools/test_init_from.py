"""`ajet init --from agent.py`: a job around an agent whose file stays as it is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from ajet_tools.cli.from_agent import fitting_model, read_agent

AGENT = '''
from openai import OpenAI

def ask(messages):
    return OpenAI().chat.completions.create(model="gpt-4o", messages=messages).choices[0].message.content

def answer_question(question: str, tone: str = "short") -> str:
    """Answers."""
    return ask([{"role": "system", "content": tone}, {"role": "user", "content": question}])

if __name__ == "__main__":
    print(answer_question("2+2?"))
'''
REPLIES = "def reply(ask):\n    return str(eval(ask.body['messages'][-1]['content'].rstrip('?')))\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(AGENT)
    (tmp_path / "few.jsonl").write_text(
        "".join(
            json.dumps({"question": f"{n}+{n}?", "answer": str(2 * n)}) + "\n" for n in range(8)
        )
    )
    return tmp_path


def ajet(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.slow
def test_the_job_runs_as_it_is_written_and_the_agent_stays_as_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ajet("init", "--from", "mine.py", "--tasks", "few.jsonl", "job")
    assert "ajet run --conf config.yaml --advise" in said and "mine.py:answer_question" in said
    assert (here / "mine.py").read_text() == AGENT
    assert len((here / "job" / "tasks.jsonl").read_text().splitlines()) == 6
    assert len((here / "job" / "val.jsonl").read_text().splitlines()) == 2
    (here / "job" / "replies.py").write_text(REPLIES)
    monkeypatch.chdir(here / "job")
    ran = ajet("run", "--conf", "config.yaml", "--model", "replies.py:reply")
    assert "Mean reward 1 over 2 tasks" in ran


@pytest.mark.slow
def test_tasks_of_recorded_calls_make_a_job_too(here: Path) -> None:
    ajet("init", "--from", "mine.py", "--tasks", "few.jsonl", "job")
    (here / "replies.py").write_text(REPLIES)
    ajet(
        "run",
        "--conf",
        "job/config.yaml",
        "--tasks",
        "few.jsonl",
        "--model",
        "replies.py:reply",
        "--exp-dir",
        "out",
    )
    [trace] = (here / "out").rglob("trace.duckdb")
    ajet("init", "--from", "mine.py", "--tasks", str(trace), "again")
    rows = [
        json.loads(line)
        for name in ("tasks", "val")
        for line in (here / f"again/{name}.jsonl").open()
    ]
    assert {row["question"] for row in rows} == {f"{n}+{n}?" for n in range(8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (
            {"b": [1, 2.0], "a": None},
            ['{"a": null,"b":[1,2]}', '```json\n{"b": [1, 2], "a": null}\n```'],
            ['{"b": [1]}', "{}"],
        ),
        ([1, "x"], ['[1,"x"]'], ["[1]", "1, x", ""]),
        (42, ["42", " 42\n", "42.0"], ["43", "", "forty-two"]),
        (True, ["true"], ["false", "", "[" * 100_000]),
        ('{"a": 1}', ['{ "a":1 }'], ['{"a": 2}']),
        ("a text", ["a text", " a text "], ["A", ""]),
    ],
)
def test_the_judge_compares_values(
    here: Path, answer: object, right: list[str], wrong: list[str]
) -> None:
    rows = [{"question": f"q{n}", "answer": answer} for n in range(2)]
    (here / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ajet("init", "--from", "mine.py", "--tasks", "few.jsonl", "job")
    spec = importlib.util.spec_from_file_location("job", here / "job" / "job.py")
    assert spec is not None and spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    assert [job.judge(output, answer) for output in (*right, answer)] == [1.0] * (len(right) + 1)
    assert [job.judge(output, answer) for output in wrong] == [0.0] * len(wrong)


def test_a_job_names_no_place_of_this_machine(here: Path) -> None:
    ajet("init", "--from", "mine.py", "--tasks", "few.jsonl", "jobs/job")
    files = [file.read_text() for file in (here / "jobs" / "job").iterdir()]
    assert not any(str(here) in text for text in files)
    config = yaml.safe_load((here / "jobs" / "job" / "config.yaml").read_text())
    assert config["ajet"]["model"]["path"] == fitting_model().name
    assert "--from" in ajet("init", "--tasks", "few.jsonl", "demo", code=2)


def test_two_cores_get_a_small_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_tools.cli.from_agent.gpus", list)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert fitting_model().megabytes < 200


def test_a_judge_without_an_answer_is_left_open(here: Path) -> None:
    (here / "few.jsonl").write_text('{"question": "a?"}\n{"question": "b?"}\n')
    said = ajet("init", "--from", "mine.py", "--tasks", "few.jsonl", "job")
    assert (
        "Write the judge" in said
        and "raise NotImplementedError" in (here / "job" / "job.py").read_text()
    )


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("def f(:\n", (), "mine.py line 1 is not Python"),
        (
            "def f(x):\n    return x\n",
            (),
            "found no function in mine.py that calls a model; name the agent",
        ),
        (
            AGENT + "\ndef second(q):\n    return ask([q])\n",
            (),
            "mine.py:answer_question, mine.py:second",
        ),
        (
            AGENT.replace("question: str", "topic: str"),
            (),
            "few.jsonl line 1: the task has no topic",
        ),
        (AGENT, ("--example", "frozenlake"), "either --from or --example"),
    ],
)
def test_what_cannot_be_a_job_is_said_before_anything_is_written(
    here: Path, text: str, arguments: tuple[str, ...], words: str
) -> None:
    (here / "mine.py").write_text(text)
    assert words in ajet(
        "init", "--from", "mine.py", "--tasks", "few.jsonl", *arguments, "job", code=2
    )
    assert not (here / "job").exists()


def test_no_tasks_and_no_such_function(here: Path) -> None:
    assert "--tasks TRACE" in ajet("init", "--from", "mine.py", code=2)
    assert "has no function solve" in ajet(
        "init", "--from", "mine.py:solve", "--tasks", "few.jsonl", code=2
    )
    assert "cannot read other.py" in ajet(
        "init", "--from", "other.py", "--tasks", "few.jsonl", code=2
    )


def test_a_decorated_function_is_the_agent(here: Path) -> None:
    (here / "mine.py").write_text(
        "import ajet\n" + AGENT.replace("def ask(", "@ajet.workflow\ndef ask(")
    )
    agent = read_agent("mine.py")
    assert agent.name == "ask" and agent.is_workflow and agent.parameters == ("messages",)
