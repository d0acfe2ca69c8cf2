"""`ajet dataset expand` as a user runs it: what it writes, asks, resumes, and says of bad input."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tools.dataset.terminal import at_a_terminal
from tests.waiting import until

pytestmark = pytest.mark.slow

ROWS = [
    {
        "main_query": f"What is {i} times {i + 3}?",
        "metadata": {"answer": str(i * (i + 3)), "unit": "none"},
    }
    for i in range(1, 9)
]
SCRIPT = """
import json, random, re

def reply(ask):
    text = ask.body["messages"][-1]["content"]
    chance = random.Random(text + str(ask.body.get("seed")))
    count = int(re.search(r"array of (\\d+)", text)[1])
    pairs = [(chance.randint(100, 999), chance.randint(100, 999)) for _ in range(count)]
    return json.dumps([{"main_query": f"What is {a} plus {b}?", "metadata": {"answer": str(a + b)}} for a, b in pairs])
"""


def sums(body: dict[str, Any], number: int = 0) -> str:
    text = body["messages"][-1]["content"]
    found = re.search(r"array of (\d+)", text)
    assert found is not None
    chance = random.Random(text + str(body["seed"]))
    pairs = [
        (chance.randint(100, 999), chance.randint(100, 999)) for _ in range(int(found.group(1)))
    ]
    return json.dumps(
        [
            {"main_query": f"What is {a} plus {b}?", "metadata": {"answer": str(a + b)}}
            for a, b in pairs
        ]
    )


class Place:
    """A directory with seeds, and the command run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seeds(ROWS)
        (path / "replies.py").write_text(SCRIPT)

    def seeds(self, rows: list[Any], name: str = "seeds.jsonl") -> None:
        (self.path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, *arguments: str, file_limit: int | None = None) -> subprocess.Popen[str]:
        def limit() -> None:
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        command = [sys.executable, "-m", "ajet", "dataset", "expand", *arguments]
        env = {
            **os.environ,
            "PYTHONPATH": str(Path.cwd()),
            "OPENAI_API_KEY": "secret-key",
            "NO_COLOR": "1",
        }
        env.pop("OPENAI_BASE_URL", None)
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=limit,
        )

    def run(
        self, *arguments: str, file_limit: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, file_limit=file_limit)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    def bytes_of(self, folder: str) -> dict[str, bytes]:
        found = sorted(file for file in (self.path / folder).rglob("*") if file.is_file())
        return {file.name: file.read_bytes() for file in found if ".expand" not in file.parts}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


SCRIPTED = ("--model", "replies.py:reply", "--verify", "none")


def at(server: Any, settings: str = "") -> tuple[str, ...]:
    return ("--model", f"writer@{server.url}{settings}", "--verify", "none", "--yes")


FOUR = ",concurrency=4"


def test_a_directory_is_written_and_the_same_bytes_again(place: Place) -> None:
    first = place.run("seeds.jsonl", "--count", "30", "--out", "data", *SCRIPTED)
    assert first.returncode == 0, first.stderr
    assert "30 rows accepted: 27 train, 3 validation" in first.stdout
    row = place.rows("data/train.jsonl")[0]
    assert row["metadata"]["unit"] == "none" and row["provenance"]["source"] == "expand"
    assert (place.path / "data" / "README.md").is_file()
    again = place.run("seeds.jsonl", "--count", "30", "--out", "again/data", *SCRIPTED, "--json")
    summary = json.loads(again.stdout)
    assert (summary["accepted"], summary["stopped"]) == (30, None)
    one, other = place.bytes_of("data"), place.bytes_of("again/data")
    assert one == other and {"train.jsonl", "validation.jsonl"} <= set(one)


def test_the_prompts_are_shown_and_nothing_is_sent(place: Place) -> None:
    shown = place.run("seeds.jsonl", "--dry-run", "--strategy", "harder,persona")
    assert shown.returncode == 0, shown.stderr
    assert (
        "===== expand/harder version 1" in shown.stdout
        and "===== expand/persona version 1" in shown.stdout
    )
    assert "metadata.answer: a number, written as text" in shown.stdout
    assert '"main_query": "What is' in shown.stdout


def test_it_says_what_it_may_take_and_asks(place: Place, model_server) -> None:
    server = model_server(sums)
    arguments = (
        "--model",
        f"writer@{server.url},price=1/2",
        "--verify",
        "none",
    )
    asked = place.run("seeds.jsonl", "--count", "100", "--out", "data", *arguments)
    assert asked.returncode == 2 and "pass --yes to continue" in asked.stderr
    assert re.search(
        r"About 32 calls for rows: about [\d,]+ tokens in, [\d,]+ out, \d+\.\d\d in money",
        asked.stderr,
    )
    assert server.requests == []
    assert (
        place.run("seeds.jsonl", "--count", "10", "--out", "data", *arguments, "--yes").returncode
        == 0
    )


def test_killed_at_any_time_resume_loses_nothing_and_pays_for_nothing_twice(
    place: Place, model_server
) -> None:
    def slow(body: dict[str, Any], number: int) -> Any:
        return 0.05, sums(body)

    server = model_server(slow)
    run = ("seeds.jsonl", "--count", "120")
    process = place.start(*run, "--out", "data", *at(server, FOUR))
    until(lambda: len(server.requests) >= 14)
    process.kill()
    process.communicate()
    at_kill = [json.dumps(body) for body in server.requests]
    assert 14 <= len(at_kill) < 30
    refused = place.run(*run, "--out", "data", *at(server, FOUR))
    assert refused.returncode == 2 and "pass --resume" in refused.stderr
    resumed = place.run(*run, "--out", "data", *at(server, FOUR), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    again = [json.dumps(body) for body in server.requests[len(at_kill) :]]
    assert len(set(again) & set(at_kill)) <= 4  # those that were under way, and never answered
    rows = place.rows("data/train.jsonl") + place.rows("data/validation.jsonl")
    assert len(rows) == len({row["task_id"] for row in rows}) == 120


def test_two_processes_do_not_write_to_one_directory(place: Place, model_server) -> None:
    server = model_server(lambda body, number: (0.05, sums(body)))
    run = ("seeds.jsonl", "--out", "data", *at(server))
    first = place.start(*run, "--count", "5000")
    until(lambda: len(server.requests) >= 6)
    second = place.run(*run, "--count", "5000", "--resume")
    assert second.returncode == 2 and "data" in second.stderr and "Traceback" not in second.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=300)
    rows = place.rows("data/train.jsonl") + place.rows("data/validation.jsonl")
    assert rows and len(rows) == len({row["task_id"] for row in rows})


def test_a_resume_with_other_options_says_what_differs(place: Place, model_server) -> None:
    server = model_server(sums)
    assert place.run("seeds.jsonl", "--count", "10", "--out", "data", *at(server)).returncode == 0
    made = len(server.requests)
    other = place.run(
        "seeds.jsonl",
        "--count",
        "10",
        "--out",
        "data",
        *at(server),
        "--resume",
        "--with",
        "temperature=0.5",
    )
    assert other.returncode == 2 and "options.temperature was 1.0, is 0.5" in other.stderr
    same = place.run(
        "seeds.jsonl",
        "--count",
        "10",
        "--out",
        "data",
        *at(server, ",concurrency=3"),
        "--resume",
    )
    assert same.returncode == 0, same.stderr
    assert len(server.requests) == made


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_write_what_there_is(
    place: Place, model_server, sent: int, code: int
) -> None:
    server = model_server(lambda body, number: (0.05, sums(body)))
    process = place.start("seeds.jsonl", "--count", "5000", "--out", "data", *at(server, FOUR))
    until(lambda: len(server.requests) >= 14)
    process.send_signal(sent)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    rows = place.rows("data/train.jsonl") + place.rows("data/validation.jsonl")
    assert len(rows) >= 14 and f"{len(rows)} rows accepted" in out
    assert len(rows) == 4 * len(server.requests) or len(rows) > 30


@pytest.mark.long
def test_rows_stay_through_eight_kills_two_ctrl_c_and_a_sigterm(place: Place, model_server) -> None:
    server = model_server(lambda body, number: (0.02, sums(body)))
    run = ("seeds.jsonl", "--count", "400", "--resume")
    signals = [signal.SIGKILL] * 8 + [signal.SIGINT] * 2 + [signal.SIGTERM]
    random.Random(0).shuffle(signals)
    rows = list[dict[str, Any]]()
    for number, sent in enumerate(signals, 1):
        process = place.start(*run, "--out", "data", *at(server, FOUR))
        until(lambda number=number: len(server.requests) >= 8 * number)
        process.send_signal(sent)
        process.communicate()
        assert process.returncode == (-sent if sent == signal.SIGKILL else 128 + sent)
        if sent != signal.SIGKILL:
            written = place.rows("data/train.jsonl")
            assert written[: len(rows)] == rows
            rows = written
    assert place.run(*run, "--out", "data", *at(server, FOUR)).returncode == 0
    written = place.rows("data/train.jsonl")
    assert written[: len(rows)] == rows
    assert len({row["task_id"] for row in written}) == len(written) == 360
    asked = Counter(json.dumps(body) for body in server.requests)
    assert sum(asked.values()) - len(asked) <= 8 * 8, "only calls under way at a kill are lost"


def test_a_dry_run_says_what_is_left_and_sends_nothing(place: Place, model_server) -> None:
    server = model_server(sums)
    nothing = place.run(
        "seeds.jsonl",
        "--count",
        "100",
        "--dry-run",
        "--model",
        "m@http://127.0.0.1:9,price=1/2",
        "--verify",
        "none",
    )
    assert nothing.returncode == 0, nothing.stderr
    assert re.search(
        r"\nAbout 32 calls for rows: about [\d,]+ tokens in, [\d,]+ out, \d\.\d\d in money\.\nNothing"
        r" was sent\.\n$",
        nothing.stdout,
    )
    run = ("seeds.jsonl", "--out", "data", *at(server))
    assert place.run(*run, "--count", "20").returncode == 0
    made, files = len(server.requests), place.bytes_of("data")
    left = json.loads(place.run(*run, "--count", "60", "--resume", "--dry-run", "--json").stdout)
    assert left["accepted"] >= 20 and left["calls"] == -(-(60 - left["accepted"]) // 4)
    assert len(server.requests) == made and place.bytes_of("data") == files
    assert (
        json.loads(place.run(*run, "--count", "20", "--resume", "--dry-run", "--json").stdout)[
            "calls"
        ]
        == 0
    )
    other = place.run(*run, "--count", "60", "--resume", "--dry-run", "--with", "shots=2")
    assert other.returncode == 2 and "options.shots was 4, is 2" in other.stderr


def test_a_spent_budget_ends_it_cleanly(place: Place, model_server) -> None:
    server = model_server(sums)
    done = place.run(
        "seeds.jsonl", "--count", "500", "--out", "data", *at(server), "--budget", "calls=9"
    )
    assert done.returncode == 1 and "BudgetSpent: the budget of 9 calls is spent" in done.stderr
    assert len(server.requests) == 9 and len(place.rows("data/train.jsonl")) > 20
    assert "Traceback" not in done.stderr


def test_prose_and_a_wrong_key_end_with_one_message(place: Place, model_server) -> None:
    prose = model_server(lambda body, number: "Gladly!")
    done = place.run("seeds.jsonl", "--out", "a", *at(prose))
    assert done.returncode == 1 and "30 calls in a row gave no row" in done.stderr
    assert len(place.rows("a/rejected.jsonl")) >= 30
    wrong = model_server(lambda body, number: model_server.refusal(401, "Incorrect API key"))
    done = place.run("seeds.jsonl", "--out", "b", *at(wrong))
    assert (
        done.returncode == 2
        and "check the API key" in done.stderr
        and "secret-key" not in done.stderr + done.stdout
    )
    assert "Traceback" not in done.stderr


BAD = {
    "empty": (b"", "is empty"),
    "one row": (json.dumps(ROWS[0]).encode(), "has one row"),
    "duplicates only": (b"\n".join([json.dumps(ROWS[0]).encode()] * 5), "which are all the same"),
    "bad JSON": (b"\n".join([*(json.dumps(row).encode() for row in ROWS[:6]), b'{"main_query": '])+b"\n", "line 7"),
    "not UTF-8": (json.dumps(ROWS[0]).encode() + b'\n{"main_query": "caf\xe9"}\n', "line 2"),
    "5 MB row": (json.dumps(ROWS[0]).encode() + b'\n{"main_query": "' + b"x" * 5_000_000 + b'"}\n', "line 2 is 5,000"),
    "mixed shapes": (
        json.dumps(ROWS[0]).encode() + b'\n{"main_query": "a?", "metadata": {"answer": [1]}}\n', "different shapes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_seeds_are_told_in_one_message_with_the_place(place: Place, kind: str) -> None:
    content, message = BAD[kind]
    (place.path / "seeds.jsonl").write_bytes(content)
    done = place.run("seeds.jsonl", "--out", "data", *SCRIPTED)
    assert done.returncode == 2 and message in done.stderr and "seeds.jsonl" in done.stderr
    assert "Traceback" not in done.stderr and not (place.path / "data" / "train.jsonl").exists()


def test_a_full_disk_is_one_message_and_what_was_paid_for_is_kept(
    place: Place, model_server
) -> None:
    server = model_server(sums)
    run = ("seeds.jsonl", "--count", "200", "--out", "data", *at(server))
    full = place.run(*run, file_limit=60_000)
    assert (
        full.returncode in (1, 2) and "cannot" in full.stderr and "Traceback" not in full.stderr
    ), full.stderr
    assert not [name for name in place.bytes_of("data") if name.endswith(".part")]
    made = len(server.requests)
    assert made
    assert place.run(*run, "--resume").returncode == 0
    asked = [json.dumps(body) for body in server.requests]
    assert len(place.rows("data/train.jsonl")) == 180 and len(asked) - len(set(asked)) <= 16


def test_what_is_missing_is_asked_for(place: Place) -> None:
    for arguments, message in (
        ((), "--out"),
        (("--out", "data"), "--model NAME@URL"),
        (("--out", "data", "--model", "gpt-4o"), "gpt-4o@https://HOST/v1"),
        (("--out", "data", *SCRIPTED, "--budget", "usd=1"), "price=IN/OUT"),
        (("--out", "data", *SCRIPTED, "--budget", "euro=1"), "calls=500"),
        (("--out", "data", *SCRIPTED, "--with", "sed=1"), "did you mean seed"),
        (("--out", "data", *SCRIPTED, "--with", "shots=many"), "a whole number"),
        (("--out", "data", *SCRIPTED, "--with", "max_same_form=true"), "a whole number"),
        (("--out", "data", "--model", "m@http://127.0.0.1:9,concurrency=x"), "no number"),
        (("--out", "data", *SCRIPTED, "--strategy", "hardest"), "known: same-style"),
        (("--out", "seeds.jsonl", *SCRIPTED), "is a file"),
    ):
        done = place.run("seeds.jsonl", *arguments)
        assert done.returncode == 2 and message in done.stderr, (arguments, done.stderr)


def test_a_resume_may_ask_for_more_rows_and_makes_only_those(place: Place, model_server) -> None:
    server = model_server(sums)
    run = ("seeds.jsonl", "--out", "data", "--validation", "0.2", *at(server))
    assert place.run(*run, "--count", "20").returncode == 0
    before, asked = (
        {side: place.rows(f"data/{side}.jsonl") for side in ("train", "validation")},
        len(server.requests),
    )
    more = place.run(*run, "--count", "35", "--resume")
    assert more.returncode == 0, more.stderr
    assert "35 rows accepted: 28 train, 7 validation" in more.stdout
    for side, rows in before.items():
        assert place.rows(f"data/{side}.jsonl")[: len(rows)] == rows
    bodies = [json.dumps(body, sort_keys=True) for body in server.requests]
    assert len(bodies) > asked and len(set(bodies)) == len(bodies), "no call is paid for twice"
    after = place.bytes_of("data")
    again = place.run(*run, "--count", "35", "--resume")
    assert again.returncode == 0 and len(server.requests) == len(bodies)
    assert place.bytes_of("data") == after
    fewer = place.run(*run, "--count", "20", "--resume")
    assert fewer.returncode == 2
    assert "the run in data has 35 rows, --count 20 is fewer" in " ".join(fewer.stderr.split())
    assert place.bytes_of("data") == after


def test_a_run_that_was_stopped_may_go_on_to_more_rows(place: Place, model_server) -> None:
    server = model_server(sums)
    run = ("seeds.jsonl", "--out", "data", *at(server))
    assert place.run(*run, "--count", "40", "--budget", "calls=3").returncode == 1
    more = place.run(*run, "--count", "60", "--resume")
    assert more.returncode == 0, more.stderr
    assert "60 rows accepted" in more.stdout
    bodies = [json.dumps(body, sort_keys=True) for body in server.requests]
    assert len(set(bodies)) == len(bodies)


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_bar_stays_where_refusals_are_listed(place: Place, columns: int) -> None:
    reply = (
        '[{"main_query": "What is 1 plus 1?"}, {"main_query": 7, "metadata": {"answer": "7",'
        ' "unit": "none"}}, 5]'
    )
    (place.path / "same.py").write_text(f"def reply(ask):\n    return {reply!r}\n")
    command = [
        sys.executable,
        "-m",
        "ajet",
        "dataset",
        "expand",
        "seeds.jsonl",
        "--count",
        "500",
        "--out",
        "data",
    ]
    environment = {"PYTHONPATH": str(Path.cwd())}
    code, shown = at_a_terminal(
        [*command, "--model", "same.py:reply", "--verify", "none"],
        columns=columns,
        cwd=place.path,
        environment=environment,
    )
    assert code == 1
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", shown)
    ]
    listed = [number for number, line in enumerate(lines) if re.match(r"refused [\d,]+: ", line)]
    assert listed, shown
    for number in listed:
        assert lines[number - 2].startswith("Accepted ") and "━" * 10 in lines[number - 2]
        assert "0/500" in lines[number - 2] and re.match(
            r"[\d,]+ calls, [\d,]+ tokens$", lines[number - 1]
        )
        assert len(lines[number]) <= columns


def test_too_many_requests_are_told_without_a_terminal(place: Place, model_server) -> None:
    def busy(body: dict[str, Any], number: int) -> Any:
        if number < 6:
            return model_server.refusal(429, "slow down", headers={"retry-after": "0.1"})
        return sums(body)

    server = model_server(busy)
    done = place.run("seeds.jsonl", "--count", "10", "--out", "data", *at(server))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("answered 429, too many requests (1 so far); next request in") == 1
    assert "concurrency" in said and "secret-key" not in said
