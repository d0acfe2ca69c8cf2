"""`ajet trace export` and `ajet trace import` as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.cli.app import app
from ajet_tools.dataset.from_traces.export import FORMATS

VALIDATION = "--include-validation"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "launcher_record" / "math" / "trace.duckdb"
    with TraceWriter(path) as writer:
        for run in ("old", "run-1"):
            writer.put(Run(run_id=run, name=run, status="finished"))
        for i, (run, split) in enumerate([("old", "train"), ("run-1", "train"), ("run-1", "val")]):
            messages = [{"role": "user", "content": f"What is {i}+2? I am bob{i}@example.com"}]
            reply = {"choices": [{"message": {"role": "assistant", "content": str(i + 2)}}]}
            writer.put(
                Call(
                    call_id=f"c{i}",
                    episode_id=f"e{i}",
                    request={"messages": messages},
                    response=reply,
                )
            )
            task = Task(task_id=f"t{i}", main_query=f"{i}+2")
            rewards = (Reward(value=float(i)),)
            writer.put(
                Episode(episode_id=f"e{i}", run_id=run, split=split, task=task, rewards=rewards)
            )  # type: ignore[arg-type]
    return path


def ajet(*arguments: str, code: int = 0, input: bytes | None = None) -> Result:
    result = CliRunner().invoke(app, ["trace", *arguments], input=input, env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result


def test_export_to_a_file_says_what_it_wrote_and_redacted(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    said = ajet(
        "export", str(trace), "--format", "messages", "--out", str(out), "run", VALIDATION
    ).output
    assert (
        "2 rows of messages into" in said
        and "redacted: 2 email" in said
        and "names" in said.lower()
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["episode_id"] for row in rows] == ["e1", "e2"], "of the run, oldest first"
    assert "[email 1]" in rows[0]["messages"][0]["content"]
    ajet(
        "export",
        str(trace),
        "--format",
        "messages",
        "--out",
        str(out),
        "run",
        "--no-redact",
    )
    assert "bob1@example.com" in out.read_text()


def test_export_of_some_episodes(trace: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "o.jsonl")

    def ids(*options: str) -> list[str]:
        ajet("export", str(trace), "--format", "messages", "-o", out, *options)
        return [json.loads(line)["episode_id"] for line in Path(out).read_text().splitlines()]

    assert ids("--split", "val", "run-1") == ["e2"]
    assert ids(VALIDATION) == ["e1", "e2"], "e0 earned nothing"
    assert ids(VALIDATION, "--include-failures") == ["e0", "e1", "e2"]
    assert ids("e2", "e0", VALIDATION) == ["e2", "e0"]


@pytest.fixture
def cut_trace(tmp_path: Path) -> Path:
    """Episodes of one reply each, by reward and finish reason, and one of two replies, the second
    cut."""
    path = tmp_path / "cut.duckdb"
    scored = {"good": (1.0, "stop"), "cut": (1.0, "length"), "vendor": (1.0, "max_tokens"), "zero": (0.0, "stop"),
              "minus": (-1.0, "stop"), "none": (None, "stop")}  # fmt: skip
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run", name="run", status="finished"))
        for name, (value, reason) in scored.items():
            asked = [{"role": "user", "content": f"Do {name}."}]
            choice = {
                "message": {"role": "assistant", "content": f"did {name}"},
                "finish_reason": reason,
            }
            writer.put(Call(call_id=f"c-{name}", episode_id=name, request={"messages": asked}, finish_reason=reason,
                            response={"choices": [choice]}))  # fmt: skip
            rewards = () if value is None else (Reward(value=value),)
            task = Task(main_query=f"Do {name}.")
            writer.put(
                Episode(episode_id=name, run_id="run", group_id="g", task=task, rewards=rewards)
            )
        asked = [{"role": "user", "content": "First."}]
        for number, reason in enumerate(("stop", "length")):
            message = {"role": "assistant", "content": f"reply {number}"}
            writer.put(Call(call_id=f"two-{number}", episode_id="two", index=number, finish_reason=reason,
                            request={"messages": [*asked]}, response={"choices": [{"message": message}]}))  # fmt: skip
            asked += [message, {"role": "user", "content": "Next."}]
        writer.put(
            Episode(
                episode_id="two",
                run_id="run",
                task=Task(main_query="two"),
                rewards=(Reward(value=1.0),),
            )
        )
    return path


@pytest.mark.parametrize("format", ["messages", "sharegpt", "trl-prompt"])
def test_what_is_cut_or_earned_nothing_is_no_example(
    cut_trace: Path, tmp_path: Path, format: str
) -> None:
    out = tmp_path / "o.jsonl"
    told = json.loads(
        ajet("export", str(cut_trace), "--format", format, "-o", str(out), "--json").stdout
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["episode_id"] for row in rows} == {"good", "two"}
    assert "reply 1" not in out.read_text() and "reply 0" in out.read_text()
    assert (
        sum(told["left_out"].values()) == 3 + 3
    )  # replies that were cut; episodes of 0, -1 and without a reward
    ajet("export", str(cut_trace), "--format", format, "-o", str(out), "--include-failures")
    assert {json.loads(line)["episode_id"] for line in out.read_text().splitlines()} == {
        *("good", "cut", "vendor", "zero", "minus", "none", "two")
    }


def test_a_cut_reply_is_neither_preferred_nor_rejected(cut_trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    with TraceWriter(cut_trace) as writer:
        for name, value, reason in (
            ("a", 1.0, "length"),
            ("b", 0.0, "stop"),
            ("c", 1.0, "stop"),
            ("d", 0.5, "length"),
        ):
            choice = {"message": {"role": "assistant", "content": f"said {name}"}}
            asked = [{"role": "user", "content": "Choose."}]
            writer.put(Call(call_id=f"p-{name}", episode_id=name, request={"messages": asked}, finish_reason=reason,
                            response={"choices": [choice]}))  # fmt: skip
            writer.put(Episode(episode_id=name, run_id="run", group_id="pairs", task=Task(main_query="Choose."),
                               rewards=(Reward(value=value),)))  # fmt: skip
    ajet("export", str(cut_trace), "--format", "preferences", "-o", str(out))
    [row] = [
        row for row in map(json.loads, out.read_text().splitlines()) if row["group_id"] == "pairs"
    ]
    assert (row["chosen_episode_id"], row["rejected_episode_id"]) == ("c", "b")


@pytest.mark.parametrize(
    ("option", "format"),
    [
        ("--accept-outputs", "messages"),
        ("--need-answer", "tokens"),
        ("--margin=0.5", "messages"),
    ],
)
def test_an_option_without_meaning_for_a_format_is_refused(
    trace: Path, tmp_path: Path, option: str, format: str
) -> None:
    out = tmp_path / "out.jsonl"
    ajet("export", str(trace), "--format", format, option, "-o", str(out), code=2)
    assert not out.exists()


def test_a_run_is_named_in_place_of_a_path(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceWriter(trace) as writer:
        writer.put(Run(run_id="abc", name="math-v1.2", status="finished"))
        messages = [{"role": "user", "content": "Hi"}]
        reply = {"choices": [{"message": {"role": "assistant", "content": "hello"}}]}
        writer.put(
            Call(call_id="c", episode_id="e", request={"messages": messages}, response=reply)
        )
        writer.put(Episode(episode_id="e", run_id="abc", task=Task(main_query="Hi")))
    monkeypatch.chdir(tmp_path)
    done = ajet("export", "math-v1.2", "--format", "messages", "-o", "out.jsonl", "--json")
    assert json.loads(done.stdout)["of"] == 1


def test_a_trace_without_rewards_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "plain.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run", name="run", status="finished"))
        reply = {"choices": [{"message": {"role": "assistant", "content": "hello"}}]}
        writer.put(Call(call_id="c", episode_id="e", request={"messages": [{"role": "user", "content": "Hi"}]},
                        response=reply))  # fmt: skip
        writer.put(Episode(episode_id="e", run_id="run", task=Task(main_query="Hi")))
    out = tmp_path / "o.jsonl"
    ajet("export", str(path), "--format", "messages", "-o", str(out))
    assert len(out.read_text().splitlines()) == 1


def test_export_with_a_filter(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    ajet(
        "export",
        str(trace),
        "--format",
        "messages",
        "-o",
        str(out),
        "--filter",
        "reward>0.5",
        VALIDATION,
    )
    assert [json.loads(line)["episode_id"] for line in out.read_text().splitlines()] == ["e1", "e2"]


def test_json_tells_the_counts(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    told = json.loads(
        ajet("export", str(trace), "--format", "native", "-o", str(out), "--json").stdout
    )
    assert told["episodes"] == 3 and told["redacted"] == {"email": 3} and told["path"] == str(out)
    back = tmp_path / "back.duckdb"
    told = json.loads(ajet("import", str(out), "--out", str(back), "--json").stdout)
    assert (told["episodes"], told["calls"], told["formats"]) == (3, 3, {str(out): "native"})


def test_through_pipes_the_trace_comes_back_equal(trace: Path, tmp_path: Path) -> None:
    back = tmp_path / "back.duckdb"
    command = [sys.executable, "-m", "ajet", "trace"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    exported = subprocess.run(
        [
            *command,
            "export",
            str(trace),
            "--format",
            "native",
            "-o",
            "-",
            "--no-redact",
        ],
        capture_output=True,
        check=True,
        env=environment,
    )
    assert exported.stdout.startswith(b'{"ajet_trace"') and b"3 episodes" in exported.stderr
    imported = subprocess.run(
        [*command, "import", "-", "--out", str(back)],
        input=exported.stdout,
        capture_output=True,
        check=True,
        env=environment,
    )
    assert b"3 episodes with 3 calls" in imported.stdout and b"-: native" in imported.stdout
    one, other = open_trace(trace), open_trace(back)
    assert episodes(one) == episodes(other)
    one.close()
    other.close()


def test_import_skips_bad_rows_only_where_asked(tmp_path: Path) -> None:
    source, out = tmp_path / "c.jsonl", tmp_path / "c.duckdb"
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    source.write_text(f"{json.dumps(good)}\nnonsense \x1b[31m\n{json.dumps(good)}\n")
    refused = ajet("import", str(source), "--out", str(out), "--from", "openai", code=2).output
    assert "c.jsonl line 2 is not JSON" in refused and "--skip-bad-rows" in refused
    said = ajet("import", str(source), "--out", str(out), "--skip-bad-rows").output
    assert "skipped: 1 bad row" in said and "c.jsonl line 2" in said and "\x1b" not in said
    assert (
        "already there: 2 episodes"
        in ajet("import", str(source), "--out", str(out), "--skip-bad-rows").output
    )


@pytest.mark.slow
def test_what_is_wrong_is_said(trace: Path, tmp_path: Path) -> None:
    where = str(trace)
    assert (
        "there is no 'csv'; choose one of"
        in ajet("export", where, "--format", "csv", code=2).output
    )
    assert (
        "there is no 'test'; choose one of"
        in ajet("export", where, "--split", "test", code=2).output
    )
    assert "is a trace, which" in ajet("export", where, "--out", where, code=2).output
    assert "'zz'" in ajet("export", where, "zz", code=2).output
    refused = ajet("export", where, "old", "--split", "val", code=2).output
    assert "no episode of this trace was selected" in refused
    assert (
        "no file"
        in ajet(
            "import", str(tmp_path / "none"), "--out", str(tmp_path / "o.duckdb"), code=2
        ).output
    )
    assert (
        "name it *.duckdb" in ajet("import", where, "--out", str(tmp_path / "o.db"), code=2).output
    )
    assert (
        "no import format 'x'"
        in ajet("import", where, "--from", "x", "--out", "o.duckdb", code=2).output
    )
    with TraceWriter(tmp_path / "live.duckdb"):
        source = tmp_path / "n.jsonl"
        source.write_text('{"ajet_trace": 1}\n')
        assert (
            "being written by a run"
            in ajet("import", str(source), "-o", str(tmp_path / "live.duckdb"), code=1).output
        )


@pytest.mark.parametrize("command", ["export", "import"])
def test_help_has_examples(command: str) -> None:
    said = ajet(command, "--help").output
    assert f"ajet trace {command} " in said and "--json" in said


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "suffix", [".jsonl", ".parquet", ".csv", ".jsonl.gz", ".html", ".xlsx", ".txt", ".v2"]
)
def test_a_file_is_what_its_name_says_or_is_refused(
    format: str, suffix: str, trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"o{suffix}"
    done = CliRunner().invoke(
        app, ["trace", "export", str(trace), "--format", format, "--out", str(out)]
    )
    if done.exit_code:
        assert done.exit_code == 2 and not out.exists() and "bug" not in done.output, done.output
        return
    first = out.read_bytes()[:4]
    starts = {".parquet": b"PAR1", ".jsonl.gz": b"\x1f\x8b", ".jsonl": b"{", ".html": b"<"}
    assert (not first and format == "preferences") or first.startswith(starts.get(suffix, b""))
    assert suffix in (*starts, ".csv")
