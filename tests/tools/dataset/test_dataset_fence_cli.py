"""`verify: code` as a user runs it: inside the fence, and on a machine that has none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.sandbox.fence import NoFence, fence, fenced
from ajet_tools.cli.app import app
from ajet_tools.dataset.readers import read_generated

pytestmark = pytest.mark.slow

REPLIES = """
import json, random, re

def reply(ask):
    text = ask.body["messages"][-1]["content"]
    chance = random.Random(text + str(ask.body.get("seed")))
    count = int(re.search(r"array of (\\d+)", text)[1])
    pairs = [(chance.randint(100, 999), chance.randint(100, 999)) for _ in range(count)]
    return json.dumps([
        {"main_query": f"What is {a} plus {b}, and why is it more than {a}?",
         "metadata": {"answer": str(a + b), "program": f"print({a} + {b} + {int(a % 3 == 0)})"}}
        for a, b in pairs
    ])
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with seeds that have programs, and a writer of more, right but for a third."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "main_query": f"{n} + {n}?",
            "metadata": {"answer": str(2 * n), "program": f"print({n} + {n})"},
        }
        for n in range(8)
    ]
    Path("seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("replies.py").write_text(REPLIES)
    Path("notes.txt").write_text("The moon is far away. " * 50)


EXPAND = (
    "expand",
    "seeds.jsonl",
    "--count",
    "6",
    "--verify",
    "code",
    "--model",
    "replies.py:reply",
    "--out",
    "data",
)
FROM_DOCS = (
    "from-docs",
    "notes.txt",
    "--count",
    "6",
    "--verify",
    "code",
    "--model",
    "replies.py:reply",
    "--out",
    "data",
)


def ajet(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["dataset", *arguments])


def config(**more: Any) -> Config:
    seeds = {"jsonl_dataset_file": {"training": {"file_path": "seeds.jsonl"}}}
    generation = {
        "query_reader": seeds,
        "task_num": 6,
        "scripted": "replies.py->reply",
        "verify": "code",
        **more,
    }
    values = {
        "experiment_dir": "runs",
        "task_reader": {"type": "data_generation", "data_generation": generation},
    }
    return load_config(values=values)


def checked(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows and all(row["provenance"]["verdict"]["verifier"] == "code" for row in rows)
    assert all(int(row["main_query"].split()[2]) % 3 for row in rows)


@pytest.mark.usefixtures("fenced")
def test_programs_of_many_rows_are_run_at_once_and_wrong_ones_refused() -> None:
    done = ajet(*EXPAND, "--count", "10")
    assert done.exit_code == 0, done.output
    checked(Path("data/train.jsonl"))
    reasons = {
        json.loads(line)["rejected"]["reason"]
        for line in Path("data/rejected.jsonl").read_text().splitlines()
    }
    assert "the row's program prints a different answer" in reasons


# Where there is none


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without bubblewrap."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    fence.cache_clear()
    yield
    fence.cache_clear()


def test_a_bubblewrap_that_does_not_work_is_none(without: None, tmp_path: Path) -> None:
    """As on a system that forbids namespaces."""
    broken = tmp_path / "bin" / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    with pytest.raises(
        NoFence, match="does not work here: bwrap: setting up uid map: Permission denied"
    ):
        fence()


FAKE = """#!{python}
import os, sys
if "--version" in sys.argv:
    sys.exit(print("bubblewrap 0.8.0"))
os.chdir({folder!r})
with open("program.py", "wb") as file:
    file.write(os.read(int(sys.argv[sys.argv.index("--file") + 1]), 1 << 20))
command = sys.argv[sys.argv.index("--") + 1 :]
os.execv(command[0], command)
"""


def test_a_bubblewrap_that_fences_nothing_in_is_found_out(without: None, tmp_path: Path) -> None:
    """Belief in the name of a program is no fence."""
    fake = tmp_path / "bin" / "bwrap"
    fake.write_text(FAKE.format(python=sys.executable, folder=str(tmp_path)))
    fake.chmod(0o755)
    with pytest.raises(NoFence, match="a program inside reads files of yours"):
        fence()


def test_without_a_fence_it_is_refused_and_unfenced_says_what_that_means(
    without: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoFence, match=r"bubblewrap is not installed.*unfenced"):
        fenced("--verify code", unfenced=False)
    with caplog.at_level("WARNING"):
        assert not fenced("--verify code", unfenced=True)
    assert "with your permissions" in caplog.text


@pytest.mark.parametrize("command", [EXPAND, FROM_DOCS], ids=["expand", "from-docs"])
def test_every_command_that_runs_programs_is_refused_without_a_fence(
    without: None, command: tuple[str, ...]
) -> None:
    done = ajet(*command)
    assert (
        done.exit_code == 2
        and "there is no working sandbox: bubblewrap is not installed" in done.output
    )
    assert not Path("data/train.jsonl").exists()


def test_unfenced_runs_them_with_the_users_rights(without: None) -> None:
    assert ajet(*EXPAND, "--with", "unfenced=true").exit_code == 0
    checked(Path("data/train.jsonl"))


def test_a_job_that_makes_its_tasks_is_refused_too(without: None) -> None:
    with pytest.raises(NoFence, match="bubblewrap is not installed"):
        read_generated(config())
    train, _ = read_generated(config(unfenced=True))
    assert len(list(train)) == 5
