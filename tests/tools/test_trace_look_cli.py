"""`ajet trace ls show sql ledger splits`: filters, orders, pages, files, long episodes, and the
pager."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Reward, Run, Task
from ajet_tools.cli.app import app
from ajet_tools.trace.queries.filters import COLUMNS as FILTER_COLUMNS
from ajet_tools.trace.queries.listing import COLUMNS

LONG = 60
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
EVIL = "\x1b[31mred"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("look") / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run"))
        for i in range(30):
            id = f"e{i:02}"
            said = [{"role": "user", "content": f"Question {i}: {EVIL}"}]
            call = Call(
                call_id=f"c{i}", episode_id=id, request={"messages": said}, output_ids=[1] * (i + 1)
            )
            reward = Reward(value=i / 10)
            writer.put(
                call,
                Episode(
                    episode_id=id,
                    run_id="run",
                    step=i,
                    task=Task(main_query=EVIL),
                    rewards=(reward,),
                ),
            )
            booked = {
                "run_id": "run",
                "step": i,
                "episode_id": id,
                "call_id": f"c{i}",
                "tokens": i + 1,
            }
            writer.put(LedgerEntry(outcome="trained" if i % 2 else "stale", **booked))
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "begin\n" + "line\n" * 500 + "the very end"}
        ]
        calls: list[Call] = []
        for i in range(LONG):
            reply = {"role": "assistant", "content": f"turn {i} said"}
            request = {"messages": list(messages)}
            response = {"content": f"turn {i} said"}
            calls.append(
                Call(
                    call_id=f"long{i}",
                    episode_id="long",
                    index=i,
                    request=request,
                    response=response,
                )
            )
            messages += [reply, {"role": "user", "content": "x" * 100_000 if i == 5 else "go on"}]
        writer.put(*place_all(calls))
        writer.put(
            Episode(episode_id="long", run_id="run", step=99), Run(run_id="run", status="finished")
        )
    yield path


def ajet(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, ["trace", *arguments], input=stdin, env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def listed(trace: Path, *arguments: str) -> list[str]:
    return [
        row["episode_id"]
        for row in json.loads(ajet("ls", str(trace), *arguments, "--json"))["episodes"]
    ]


@pytest.mark.slow
def test_ls_filters_sorts_and_limits(trace: Path) -> None:
    assert listed(trace, "-f", "reward<0.3", "--sort", "reward") == ["e00", "e01", "e02"]
    assert listed(trace, "-f", "reward<0.3", "--sort", "-reward") == ["e02", "e01", "e00"]
    assert listed(trace, "--sort", "step", "-n", "3") == ["e00", "e01", "e02"]
    assert listed(trace, "-f", "has('question 7') or step=8", "--sort", "step") == ["e07", "e08"]
    assert listed(trace, "-f", "status = 'failed'") == []
    whole = json.loads(ajet("ls", str(trace), "-f", "step<10", "-n", "4", "--json"))
    assert (whole["count"], whole["of"], len(whole["episodes"])) == (10, 31, 4)


def test_ls_fits_the_terminal_and_says_what_it_shows(trace: Path) -> None:
    text = ajet("ls", str(trace), "-f", "step<10", "-n", "4", "--sort", "step")
    assert "4 of 10 of 31 episodes, run run, by step, smallest first" in text
    assert "more with -n" in text and "\x1b" not in text and "\\x1b[31m" in text
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    assert "No episode of 31 matches" in ajet("ls", str(trace), "-f", "step<0")


def test_the_help_names_every_field_and_column() -> None:
    words = set(re.findall(r"\w+", ajet("ls", "--help")))
    assert {*FILTER_COLUMNS, *COLUMNS} <= words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-f", "rewrd<1"), "did you mean reward?"),
        (("-f", "reward<"), "syntax error"),
        (("--sort", "colour"), "no column 'colour'"),
    ],
)
def test_ls_says_what_is_wrong_with_a_question(
    trace: Path, arguments: tuple[str, ...], says: str
) -> None:
    said = ajet("ls", str(trace), *arguments, code=2)
    assert says in " ".join(said.split())


@pytest.mark.slow
def test_show_of_a_long_episode_stays_usable(trace: Path) -> None:
    text = ajet("show", "long", str(trace))
    assert len(text) < 40_000 and "20 calls left out here; --full shows all" in text
    assert "turn 9 said" in text and "turn 10 said" not in text and "turn 59 said" in text
    assert "more characters; --full shows all" in text and "the very end" not in text
    full = ajet("show", "long", str(trace), "--full")
    assert (
        len(full) > 100_000
        and "the very end" in full
        and "turn 10 said" in full
        and "--full" not in full
    )
    call = ajet("show", "long7", str(trace))
    assert len(call) < 20_000 and "x" * 100_000 in "".join(
        ajet("show", "long7", str(trace), "--full").split()
    )
    assert len(json.loads(ajet("show", "long", str(trace), "--json"))["calls"]) == LONG


@pytest.mark.slow
def test_sql_from_stdin_and_as_csv(trace: Path) -> None:
    query = (
        "SELECT step, [step] AS l, task->>'$.main_query' AS q, NULL AS n FROM episodes ORDER BY"
        " step LIMIT 2"
    )
    rows = list(csv.reader(io.StringIO(ajet("sql", "-", str(trace), "--csv", stdin=query))))
    assert rows == [["step", "l", "q", "n"], ["0", "[0]", EVIL, ""], ["1", "[1]", EVIL, ""]]
    assert "exactly one SELECT" in ajet("sql", "-", str(trace), stdin="", code=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_sql_writes_files(trace: Path, tmp_path: Path, kind: str) -> None:
    import duckdb

    file = tmp_path / f"rows.{kind}"
    ajet(
        "sql",
        "SELECT step, [step, 1] AS l FROM episodes ORDER BY step",
        str(trace),
        "-o",
        str(file),
    )
    name = {"csv": "read_csv", "jsonl": "read_json", "parquet": "read_parquet"}[kind]
    assert duckdb.sql(f"SELECT count(*), sum(step) FROM {name}('{file}')").fetchall() == [
        (31, 29 * 30 // 2 + 99)
    ]
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "no draft is left"
    assert "exists" in ajet("sql", "SELECT 1", str(trace), "-o", str(file), code=2)
    assert ".parquet" in ajet(
        "sql", "SELECT 1", str(trace), "-o", str(tmp_path / "rows.xls"), code=2
    )


@pytest.mark.slow
def test_ledger_and_splits_over_a_filter(trace: Path) -> None:
    found = json.loads(ajet("ledger", str(trace), "-f", "step<3", "--json"))
    assert [(row["outcome"], row["tokens"]) for row in found["outcomes"]] == [
        ("trained", 2),
        ("stale", 4),
    ]
    assert "of episodes that match step<4" in ajet("ledger", str(trace), "-f", "step<4")
    assert "no tokens in the ledger" in ajet("ledger", str(trace), "-f", "step<0")
    assert (
        json.loads(ajet("ledger", "--splits", str(trace), "-f", "step<4", "--json"))["episodes"]
        == 4
    )


def at_a_terminal(command: list[str], pager: str, **environment: str) -> str:
    """What a command writes to a terminal of 24 lines."""
    import pty

    main, side = pty.openpty()
    env = {
        **os.environ,
        "PAGER": pager,
        "COLUMNS": "80",
        "LINES": "24",
        "TERM": "xterm",
        **environment,
    }
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=subprocess.PIPE, env=env)
    os.close(side)
    written = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed: that is how a terminal ends on Linux
            break
        if not part:
            break
        written += part
    os.close(main)
    assert process.wait() == 0, process.stderr and process.stderr.read()
    if process.stderr:
        process.stderr.close()
    return written.decode()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no pseudo-terminal")
def test_what_is_longer_than_the_screen_goes_through_the_pager(trace: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ajet", "trace", "show", "long", str(trace)]
    paged = tmp_path / "paged"
    at_a_terminal(command, f"tee {paged}")
    assert "turn 59 said" in paged.read_text()
    paged.unlink()
    short = at_a_terminal([*command[:5], "e01", str(trace)], f"tee {paged}")
    assert not paged.exists() and "Question 1" in short
    assert "turn 59 said" in at_a_terminal(command, ""), "an empty $PAGER is none"
    assert "turn 59 said" in at_a_terminal(command, "no-such-pager"), "nor is one that is not there"


@pytest.mark.slow
def test_whoever_looks_at_a_part_says_so(tmp_path: Path) -> None:
    """Counts are of all episodes by default, however many; of a part, both numbers are there."""
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="run", status="finished"))
        for i in range(1203):  # the two oldest have a split each
            ask = [{"role": "user", "content": "q"}]
            writer.put(
                Call(
                    call_id=f"{i}a",
                    episode_id=f"e{i}",
                    request={"messages": ask},
                    prompt_ids=[1],
                    output_ids=[2],
                )
            )
            if i < 2:
                other = {"call_id": f"{i}b", "index": 1, "prompt_ids": [7, 8], "output_ids": [9]}
                writer.put(Call(episode_id=f"e{i}", request={"messages": ask}, **other))
            writer.put(
                Episode(episode_id=f"e{i}", run_id="run", ended_at=BEGAN + timedelta(seconds=i))
            )
    whole = json.loads(ajet("ledger", "--splits", str(file), "--json"))
    assert (whole["episodes"], whole["of"], len(whole["splits"])) == (1203, 1203, 2)
    part = json.loads(ajet("ledger", "--splits", str(file), "-n", "1000", "--json"))
    assert (part["episodes"], part["of"], len(part["splits"])) == (1000, 1203, 0)
    assert "newest 1,000 of 1,203 episodes" in ajet("ledger", "--splits", str(file), "-n", "1000")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "-n", "1000"],
        ["show", "long", "--full"],
        ["sql", "FROM calls", "--csv"],
        ["export", "--format", "native"],
        ["ledger"],
    ],
)
def test_a_reader_that_leaves_ends_a_command_quietly(trace: Path, arguments: list[str]) -> None:
    """As `ajet trace ... | true`: whatever was not written yet has nobody to read it."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ajet", "trace", arguments[0], *arguments[1:], str(trace)],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(write)
    assert done.returncode == 141
    assert (
        "Traceback" not in done.stderr
        and "Exception ignored" not in done.stderr
        and "rror" not in done.stderr
    )
