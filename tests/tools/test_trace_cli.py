"""`ajet trace` on a file, a directory and the newest run; ids by prefix; model output that would be
markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.reporting.output import visible
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Metric, Reward, Run, Task, now
from ajet_tools.cli.app import app
from ajet_tools.text.clean import short_ids

EVIL = "[bold red]not markup[/] :smile: \x1b[31mred\x1b]0;title\x07 \u202eback\nnext line"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("work")
    directory = root / "launcher_record" / "math"
    tool_call = {
        "id": "1",
        "type": "function",
        "function": {"name": "calc", "arguments": '{"a": "[b]"}'},
    }
    first = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You calculate."},
        {"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]},
    ]
    calls = [
        Call(
            call_id="cafe01",
            episode_id="abcd01",
            request={"model": "m", "messages": messages},
            response={"choices": [{"message": first}]},
            prompt_ids=[1, 2, 3],
            output_ids=[4, 5],
            logprobs=[-0.5, -0.5],
            model="m",
        ),
        Call(
            call_id="cafe02",
            episode_id="abcd01",
            index=1,
            request={
                "messages": [
                    *messages,
                    first,
                    {"role": "tool", "content": "4", "tool_call_id": "1"},
                ]
            },
            response={"choices": [{"message": {"role": "assistant", "content": EVIL}}]},
            prompt_ids=[1, 2, 9],
            output_ids=[6],
            logprobs=[-1.0],
        ),
        Call(episode_id="abff02", prompt_ids=[1], output_ids=[2], logprobs=[-1.0]),
    ]
    with TraceWriter(directory / "trace.duckdb") as writer:
        writer.put(
            Run(run_id="run-1", name="math", backbone="local"), *place_all(calls[:2]), calls[2]
        )
        task = Task(task_id="t1", main_query="What is 2+2?")
        rewards = (Reward(value=0.75, reason=EVIL),)
        writer.put(
            Episode(
                episode_id="abcd01", run_id="run-1", step=3, task=task, output=EVIL, rewards=rewards
            )
        )
        failed = {"status": "failed", "error": EVIL, "cause": "RuntimeError"}
        writer.put(Episode(episode_id="abff02", run_id="run-1", step=3, **failed))
        for call, outcome in zip(calls, ("trained", "trained", "failed"), strict=True):
            assert call.output_ids is not None
            booked = {
                "episode_id": call.episode_id,
                "call_id": call.call_id,
                "tokens": len(call.output_ids),
            }
            writer.put(LedgerEntry(run_id="run-1", step=3, outcome=outcome, **booked))
        writer.put(
            *(Metric(run_id="run-1", step=i, name="train/reward", value=i / 10) for i in range(4))
        )
        writer.put(Run(run_id="run-1", name="math", backbone="local", status="finished"))
    yield directory


def ajet(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.mark.slow
def test_ls_of_a_directory_a_file_and_all_below(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = experiment.parent / "older"
    with TraceWriter(older / "trace.duckdb") as writer:
        writer.put(Run(run_id="old", started_at=now() - timedelta(days=1)))
    monkeypatch.chdir(experiment.parent.parent)
    said = [
        ajet("ls", *where) for where in ([str(experiment)], [str(experiment / "trace.duckdb")], [])
    ]
    for text in said:
        assert "run-1" in text and "finished" in text and "abcd01" in text and "0.75" in text
        assert "RuntimeError" in text and all(len(line) <= 100 for line in text.splitlines()[1:])
    found = json.loads(ajet("ls", "--json", "-f", "status = 'failed'"))
    assert [e["episode_id"] for e in found["episodes"]] == ["abff02"]
    assert found["runs"][0]["episodes"] == 2 and found["runs"][0]["unsound"] == 1
    assert ajet("ledger", "run-1") == ajet("ledger", "math", str(experiment)) != ""
    monkeypatch.chdir(older)
    assert "old" in ajet("ls") and "No episodes yet" in ajet("ls")


def test_receipts_of_a_run_that_is_named_without_a_client(experiment: Path) -> None:
    assert json.loads(ajet("receipts", str(experiment), "--json"))["run_id"] == "run-1"
    assert "neither a client" in ajet("receipts", "nobody", str(experiment), code=2)


def test_ls_lists_the_episodes_of_the_newest_run_that_has_any(tmp_path: Path) -> None:
    """A service has just begun its next file."""
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        for id, hours in (("full", 2), ("next", 1)):
            writer.put(
                Run(
                    run_id=id,
                    name="service",
                    backbone="trace",
                    started_at=now() - timedelta(hours=hours),
                )
            )
        writer.put(
            Episode(episode_id="asked", run_id="full", task=Task(task_id="t", main_query="Why?"))
        )
    assert "1 of 1 episodes, run full" in ajet("ls", str(tmp_path)) and "asked" in ajet(
        "ls", str(tmp_path)
    )
    assert "No episodes yet" in ajet("ls", "next", str(tmp_path))


def test_show_an_episode_without_taking_its_text_for_anything_else(experiment: Path) -> None:
    text = ajet("show", "abc", str(experiment))
    for part in (
        "You calculate.",
        "What is 2+2?",
        '{"a": "[b]"}',
        "0.75",
        "tokens trained",
        "cafe02",
    ):
        assert part in text, part
    assert "[bold red]not markup[/] :smile: \\x1b[31mred\\x1b]0;title\\x07 \\u202eback" in text
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert text.count("You calculate.") == 1, "what an earlier call said is not repeated"
    assert text.count("→ calc") == 1, "nor is a reply that comes back"
    whole = json.loads(ajet("show", "abcd01", str(experiment), "--json"))
    assert (
        whole["calls"][1]["prompt_ids"] == [1, 2, 9] and whole["calls"][1]["request"]["messages"][0]
    )
    assert whole["reward"] == 0.75 and [e["outcome"] for e in whole["ledger"]] == [
        "trained",
        "trained",
    ]


def test_show_a_call_and_a_run(experiment: Path) -> None:
    text = ajet("show", "cafe02", str(experiment))
    assert (
        "You calculate." in text
        and "not markup" in text
        and "trained: 1" in text
        and "\x1b" not in text
    )
    assert (
        json.loads(ajet("show", "cafe02", str(experiment), "--json"))["request"]["messages"][3][
            "content"
        ]
        == "4"
    )
    assert "train/reward" in ajet("show", "run", str(experiment))
    assert (
        json.loads(ajet("show", "run-1", str(experiment), "--json"))["metrics"][0]["value"] == 0.3
    )


def test_an_id_that_fits_several_or_none_is_an_error(experiment: Path) -> None:
    assert "is ambiguous: episode abcd01, episode abff02" in ajet(
        "show", "ab", str(experiment), code=2
    )
    assert "nothing in this trace" in ajet("show", "zz", str(experiment), code=2)
    assert "no run 'zz'" in ajet("ledger", "zz", str(experiment), code=2)


@pytest.mark.slow
def test_sql(experiment: Path) -> None:
    where = str(experiment)
    tokens = "(SELECT sum(tokens) FROM ledger) AS n, (SELECT [sum(tokens)] FROM ledger) AS l"
    assert json.loads(
        ajet("sql", f"SELECT 'nan'::FLOAT AS a, 1 AS a, [1] AS b, {tokens}", where, "--json")
    ) == [{"a": None, "a:1": 1, "b": [1], "n": 4, "l": [4]}]
    some = ajet("sql", f"SELECT step, name, value, {tokens} FROM metrics, range(60)", where)
    assert "100 of 240 rows" in some and '"' not in some
    wide = ajet(
        "sql",
        "SELECT episodes.output, episodes.error, calls.* FROM episodes JOIN calls USING"
        " (episode_id)",
        where,
    )
    assert (
        all(len(line) <= 100 for line in wide.splitlines())
        and "no room for" in wide
        and "\x1b" not in wide
    )
    assert "no rows" in ajet("sql", "SELECT 1 AS one WHERE false", where)
    assert f"ajet trace sql 'SELECT 1' {where}" in " ".join(
        ajet("sql", where, "SELECT 1", code=2).split()
    )
    query = f"SELECT {' + '.join('1' * 200)}"  # longer than the name of a file may be
    assert "ajet trace sql" in ajet("sql", where, query, code=2)
    assert "projection" in ajet("sql", "EXPLAIN SELECT 1", where).lower()
    assert "exactly one SELECT" in ajet("sql", "DELETE FROM runs", where, code=2)


def test_ledger_says_whether_it_balances(experiment: Path, tmp_path: Path) -> None:
    text = ajet("ledger", str(experiment))
    assert "the ledger balances" in text and "trained" in text and "75.0%" in text
    assert json.loads(ajet("ledger", str(experiment), "--json"))["balanced"] is True
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        call = Call(call_id="c", episode_id="e", output_ids=[1], logprobs=[0.0])
        writer.put(Run(run_id="r", status="finished"), call, Episode(episode_id="e", run_id="r"))
    assert "call c of episode e: 1 tokens sampled, 0 in the ledger" in ajet(
        "ledger", str(tmp_path), code=1
    )


def test_a_ledger_by_kind_of_task(tmp_path: Path) -> None:
    """The kind is the metadata that the config names, else the task's environment."""
    kinds = {"a": {"metadata": {"sort": "math"}}, "b": {"env_type": "lake"}, "c": {}}
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(
            Run(run_id="r", status="finished", config={"ajet": {"swarm": {"kind_key": "sort"}}})
        )
        for tokens, (name, fields) in enumerate(kinds.items(), 1):
            episode = Episode(episode_id=name, run_id="r", task=Task(**fields))
            ids = [1] * tokens
            call = Call(call_id=name, episode_id=name, output_ids=ids, logprobs=[0.0] * tokens)
            entry = LedgerEntry(
                run_id="r",
                step=1,
                episode_id=name,
                call_id=name,
                outcome="trained",
                tokens=tokens,
            )
            writer.put(episode, call, entry)
    found = json.loads(ajet("ledger", str(tmp_path), "--by", "kind", "--json"))
    tokens = {row["kind"]: row["tokens"] for row in found["outcomes"]}
    assert tokens == {"math": 1, "lake": 2, "": 3}
    found = json.loads(ajet("ledger", str(tmp_path), "--by", "step", "--json"))
    assert [(row["step"], row["tokens"]) for row in found["outcomes"]] == [(1, 6)]


def test_splits(experiment: Path) -> None:
    found = json.loads(ajet("ledger", "--splits", str(experiment), "--json"))
    assert [(s["call_id"], s["parent_call_id"], s["at_token"]) for s in found["splits"]] == [
        ("cafe02", "cafe01", 2)
    ]
    assert found["timelines"] == 3 and found["causes"][0]["splits"] == 1
    assert "cafe02" in ajet("ledger", "--splits", str(experiment))


def reformatted(directory: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The splits of a run whose reply loses a space before it is sent back: only the text tells."""
    tokenizer = ByteTokenizer()
    said = [{"role": "user", "content": "hi"}]
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    back = [*said, {"role": "assistant", "content": "a b"}, {"role": "user", "content": "go on"}]
    again = f"{asked}a b<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    with TraceWriter(directory / "trace.duckdb") as writer:
        writer.put(Run(run_id="r", config={"ajet": {"model": model}}))
        for index, (messages, prompt, reply) in enumerate(
            ((said, asked, " a b<|im_end|>"), (back, again, "ok"))
        ):
            ids = tokenizer.encode(reply)
            writer.put(
                Call(
                    episode_id="e",
                    index=index,
                    request={"messages": messages},
                    response={
                        "choices": [
                            {"message": {"role": "assistant", "content": "ok" if index else "a b"}}
                        ]
                    },
                    prompt_ids=tokenizer.encode(prompt),
                    output_ids=ids,
                    logprobs=[-1.0] * len(ids),
                )
            )
        writer.put(Episode(episode_id="e", run_id="r"))
    result = CliRunner().invoke(app, ["trace", "ledger", "--splits", str(directory), "--json"])
    assert result.exit_code == 0, result.output
    return {"stderr": result.stderr, **json.loads(result.stdout)}


def test_splits_reads_the_text_where_the_tokenizer_is_at_hand(tmp_path: Path) -> None:
    unread = reformatted(tmp_path / "absent", {"path": "org/model"})
    assert [cause["cause"] for cause in unread["causes"]] == ["unknown"]
    assert unread["stderr"].count("model.path org/model is not a directory here") == 1
    read = reformatted(tmp_path / "scripted", {"scripted": "agent.py:replies"})
    assert "unknown" not in [cause["cause"] for cause in read["causes"]] and read["stderr"] == ""


def test_splits_reads_the_text_with_the_tokenizer_of_a_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(code): code for code in range(128)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token="~")
    fast.save_pretrained(tmp_path / "model")
    read = reformatted(tmp_path / "run", {"path": str(tmp_path / "model")})
    assert "unknown" not in [cause["cause"] for cause in read["causes"]] and read["stderr"] == ""


def test_no_trace_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "ajet run" in ajet("ls", code=1)
    assert "there is no file or directory absent.duckdb" in ajet("ls", "absent.duckdb", code=1)


def test_text_and_short_ids() -> None:
    assert visible("plain é 🦆\tx\n") == "plain é 🦆\tx\n"
    assert visible("\x00\x9b\u2066\ufeff") == "\\x00\\x9b\\u2066\\ufeff"
    assert short_ids(["a" * 32, "b" * 32]) == {"a" * 32: "a" * 8, "b" * 32: "b" * 8}
    assert set(short_ids(["same-prefix-1", "same-prefix-2"]).values()) == {
        "same-prefix-1",
        "same-prefix-2",
    }
    assert short_ids([]) == {}
