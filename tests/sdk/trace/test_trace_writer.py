"""Writing a trace: from any thread, in order, without secrets, and what a resume marks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import TraceError
from ajet_sdk.trace.reader import episodes, ledger_balance, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Reward, Run, Task, Trained
from tests.waiting import until


def call(episode_id: str, index: int = 0, **fields: Any) -> Call:
    return Call(
        **{
            "call_id": f"{episode_id}-{index}",
            "episode_id": episode_id,
            "index": index,
            "prompt_ids": [1, 2, 3],
            "output_ids": [4, 5],
            "logprobs": [-0.1, -0.2],
            **fields,
        }
    )


def test_every_record_comes_back_as_it_was(tmp_path: Path) -> None:
    run = Run(name="math", config={"ajet": {"rollout": {"num_repeat": 4}}}, backbone="local")
    episode = Episode(
        episode_id="e1",
        run_id=run.run_id,
        group_id="g",
        attempt=3,
        step=7,
        split="val",
        task=Task(main_query="2+2", metadata={"answer": "4"}),
        output={"text": "vier", "n": [1, None]},
        calls=(
            call("e1", 0),
            call("e1", 1, prompt_ids=[1, 2, 3, 4, 5, 6], output_ids=[], logprobs=[], error="x"),
        ),
        rewards=(
            Reward(value=0.5, weight=2, reason="half"),
            Reward(name="style", value=1, agent="a", call_id="e1-0"),
        ),
        status="failed",
        error="RuntimeError: no",
        cause="RuntimeError",
        metrics={"turns": 2.0},
        is_success=False,
    )
    said = Feedback(episode_id="e1", author="me", score=1.0, comment="good")
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            run,
            *episode.calls,
            episode,
            Metric(run_id=run.run_id, step=7, name="val/reward", value=0.5),
            said,
        )
        writer.put(run.model_copy(update={"status": "finished"}))
    reader = open_trace(tmp_path)
    assert episodes(reader) == [episode]
    assert episodes(reader, run.run_id, 7, split="val", episode_ids=["e1"]) == [episode]
    assert (
        episodes(reader, step=8)
        == episodes(reader, "other")
        == episodes(reader, split="train")
        == []
    )
    assert reader.query("SELECT run_id, status FROM runs").to_pylist() == [
        {"run_id": run.run_id, "status": "finished"}
    ]
    assert reader.query("SELECT comment, score FROM feedback").to_pylist() == [
        {"comment": "good", "score": 1.0}
    ]
    assert reader.query('SELECT value, "at" IS NOT NULL AS dated FROM metrics').to_pylist() == [
        {"value": 0.5, "dated": True}
    ]


def test_many_threads_put_at_once_and_all_is_kept_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb", flush_rows=64) as writer:

        def work(name: int) -> None:
            for i in range(200):
                writer.put(call(f"t{name}", i))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.flush()
        [row] = writer.query(
            "SELECT count(*) AS n, count(DISTINCT call_id) AS ids FROM calls"
        ).to_pylist()
    assert row == {"n": 1600, "ids": 1600}


def test_what_is_put_shows_soon_without_a_flush(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(call("e"))
        until(lambda: writer.query("SELECT 1 FROM calls").num_rows)


SECRET = "sk-THIS-IS-A-SECRET"


def test_secrets_are_in_no_byte_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    request = {
        "model": "m",
        "api_key": SECRET,
        "extra_headers": {
            "Authorization": f"Bearer {SECRET}",
            "X-Api-Key": SECRET,
            "Cookie": SECRET,
        },
        "tools": [
            {
                "type": "mcp",
                "authorization": SECRET,
                "parameters": {"properties": {"api_key": {"type": "string"}}},
            }
        ],
        "messages": [{"role": "user", "content": "hi", "openai_api_key": SECRET}],
    }
    with TraceWriter(path) as writer:
        writer.put(
            Run(config={"judge": {"api_key": SECRET}}),
            call("e", request=request, response={"access_token": SECRET}),
        )
        writer.flush()
        files = [file.read_bytes() for file in tmp_path.iterdir()]
        [row] = writer.query("SELECT request FROM calls_full").to_pylist()
    assert not any(SECRET.encode() in content for content in [*files, path.read_bytes()])
    assert '"properties": {"api_key": {"type": "string"}}' in row["request"], (
        "a tool's parameter is no secret"
    )


def test_strange_text_and_numbers_are_kept_or_left_out_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            call(
                "lone",
                request={"messages": [{"role": "user", "content": "\ud800 \x00 é 🦆"}]},
                error="\udfff\x00",
            ),
            call("nan", response={"a": float("nan"), "b": 10**30}),
            call("loop", request={"a": loop}),
            call("big", policy_version=2**40),
            call("after"),
        )
        assert writer.flush()
        rows = writer.query(
            "SELECT episode_id, response FROM calls ORDER BY episode_id"
        ).to_pylist()
    assert [row["episode_id"] for row in rows] == ["after", "lone", "nan"]
    assert str(10**30) in rows[2]["response"]
    assert len([r for r in caplog.records if "ould not store" in r.message]) == 2


def entry(call_id: str, step: int, outcome: str = "trained", tokens: int = 2) -> LedgerEntry:
    episode_id = call_id.rpartition("-")[0]
    return LedgerEntry(
        run_id="r",
        step=step,
        episode_id=episode_id,
        call_id=call_id,
        outcome=outcome,
        tokens=tokens,
    )  # type: ignore[arg-type]


def trained(call_id: str, step: int = 1, **fields: Any) -> Trained:
    arrays = {"advantages": [0.5, 0.5], "logprobs": [-0.25, -1], "entropy": [1, 2]}
    episode_id = call_id.rpartition("-")[0]
    return Trained(
        **{
            "run_id": "r",
            "step": step,
            "episode_id": episode_id,
            "call_id": call_id,
            **arrays,
            **fields,
        }
    )


def test_what_was_trained_comes_back_with_its_unknowns(tmp_path: Path) -> None:
    nan = float("nan")
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(trained("e-0", advantages=[0.5, nan], entropy=[nan, nan]), trained("e-1", 2))
    rows = open_trace(tmp_path).query("SELECT * FROM trained ORDER BY call_id").to_pylist()
    assert [Trained(**row) for row in rows] == [
        trained("e-0", advantages=[0.5, nan], entropy=[nan, nan]),
        trained("e-1", 2),
    ]
    with pytest.raises(ValueError, match=r"different lengths: \[1, 2\]"):
        trained("e-2", logprobs=[0.0])


def test_the_ledger_balances_or_says_which_call_does_not(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        for i in range(3):
            writer.put(call(f"e{i}"), Episode(episode_id=f"e{i}", run_id="r", step=1))
        writer.put(
            call("judged", phase="judge"),
            call("held", trainable=False),
            Episode(episode_id="judged", run_id="r"),
            Episode(episode_id="held", run_id="r"),
            Episode(episode_id="foreign", run_id="other"),
            call("foreign"),
        )
        writer.put(
            entry("e0-0", 1), entry("e1-0", 1, "truncated", 1), entry("e1-0", 1, "trained", 1)
        )
        writer.flush()
        assert ledger_balance(writer, "r") == [
            "call e2-0 of episode e2: 2 tokens sampled, 0 in the ledger"
        ]
        writer.put(entry("e2-0", 1, tokens=3), entry("nowhere-0", 1))
        writer.flush()
        assert ledger_balance(writer, "r") == [
            "call e2-0 of episode e2: 2 tokens sampled, 3 in the ledger",
            "call nowhere-0 of episode unknown: 0 tokens sampled, 2 in the ledger",
        ]


def test_a_resume_supersedes_what_it_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r"))
        for step in (1, 2, 3):
            writer.put(call(f"s{step}"), Episode(episode_id=f"s{step}", run_id="r", step=step))
            writer.put(
                Metric(run_id="r", step=step, name="train/reward", value=step),
                trained(f"s{step}-0", step),
            )
        writer.put(
            entry("s1-0", 1),
            entry("s2-0", 2),
            call("cut-off"),
            call("idle", output_ids=[], logprobs=[]),
        )
    with TraceWriter(path) as writer:
        writer.supersede("r", 1)
        writer.supersede("r", 1)
        rows = writer.query(
            "SELECT call_id, outcome, tokens FROM ledger ORDER BY call_id"
        ).to_pylist()
        assert ledger_balance(writer, "r") == []
        assert [e.episode_id for e in episodes(writer, "r")] == ["s1"]
        assert len(episodes(writer, "r", superseded=True)) == 3
        assert writer.query("SELECT max(step) AS m FROM metrics").to_pylist() == [{"m": 1}]
        assert writer.query("SELECT call_id FROM trained").to_pylist() == [{"call_id": "s1-0"}]
    assert [(row["call_id"], row["outcome"]) for row in rows] == [
        ("cut-off-0", "superseded"),
        ("s1-0", "trained"),
        ("s2-0", "superseded"),
        ("s3-0", "superseded"),
    ]


def test_after_close_a_put_is_an_error_or_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path / "a.duckdb")
    writer.close()
    writer.close()
    with pytest.raises(TraceError, match="closed"):
        writer.put(call("e"))
    quiet = TraceWriter(tmp_path / "b.duckdb", on_error="warn")
    quiet.close()
    for _ in range(3):
        quiet.put(call("e"))
    assert [
        r.message for r in caplog.records if "dropping" in r.message and "b.duckdb" in r.message
    ] == [f"dropping records for the trace {tmp_path / 'b.duckdb'}: the writer is closed"]


def test_a_directory_gives_each_writer_a_file_of_its_own(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as one, TraceWriter(tmp_path) as two:
        one.put(call("one"))
        two.put(call("two"))
    assert one.path != two.path
    rows = open_trace(tmp_path).query("SELECT episode_id FROM calls ORDER BY 1").to_pylist()
    assert [row["episode_id"] for row in rows] == ["one", "two"]
