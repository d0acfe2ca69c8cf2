"""ajet's own JSON lines: whatever a trace holds comes back equal, whoever wrote it and however it
ended."""

from __future__ import annotations

import json
import math
import os
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.errors import ConfigError, TaskError, TraceLocked, TraceVersionError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import (
    Call,
    Episode,
    Event,
    Feedback,
    LedgerEntry,
    Metric,
    Reward,
    Run,
    Task,
    Trained,
)
from ajet_tools.trace.export import export
from ajet_tools.trace.imports import import_files
from ajet_tools.trace.queries.episodes import exported_ids

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_FLOAT = st.floats(width=32)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_TIME = st.integers(0, 10**12).map(lambda n: START + timedelta(microseconds=n))
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": _JSON}
)
_REQUEST = st.fixed_dictionaries(
    {}, optional={"messages": st.lists(_MESSAGE, max_size=4), "tools": _JSON, "x": _JSON}
)


@st.composite
def _call(draw: st.DrawFn, call_id: str, episode_id: str, index: int) -> Call:
    output = draw(st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=4))
    some = output is not None and draw(st.booleans())
    logprobs = [draw(_FLOAT) for _ in output or ()] if some else None
    return Call(
        call_id=call_id,
        episode_id=episode_id,
        index=index,
        agent=draw(_TEXT),
        target_tag=draw(st.none() | _TEXT),
        trainable=draw(st.booleans()),
        model=draw(_TEXT),
        policy_version=draw(st.none() | st.integers(0, 9)),
        request=draw(_REQUEST),
        response=draw(st.dictionaries(_TEXT, _JSON, max_size=2)),
        prompt_ids=draw(st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=4)),
        output_ids=output,
        logprobs=logprobs,
        finish_reason=draw(st.none() | _TEXT),
        started_at=draw(_TIME),
        ended_at=draw(_TIME),
        error=draw(st.none() | _TEXT),
        sampling=draw(st.dictionaries(_TEXT, _JSON, max_size=2)),
        phase=draw(st.sampled_from(["rollout", "judge"])),
    )


@st.composite
def _episode(draw: st.DrawFn, number: int) -> Episode:
    episode_id = f"e{number}"
    calls = tuple(
        draw(_call(f"c{number}-{i}", episode_id, i)) for i in range(draw(st.integers(0, 3)))
    )
    finite = st.floats(allow_nan=False, allow_infinity=False)
    rewards = st.builds(
        Reward,
        name=_TEXT,
        value=finite,
        weight=finite,
        reason=st.none() | _TEXT,
        agent=st.none() | _TEXT,
    )
    events = st.builds(
        Event,
        name=_TEXT,
        arguments=st.dictionaries(_TEXT, _JSON, max_size=2),
        result=_JSON,
        error=st.none() | _TEXT,
        started_at=_TIME,
        ended_at=_TIME,
        trace_id=st.none() | _TEXT,
        span_id=st.none() | _TEXT,
    )
    return Episode(
        episode_id=episode_id,
        run_id="run",
        group_id=draw(_TEXT),
        attempt=draw(st.integers(0, 9)),
        step=draw(st.integers(0, 9)),
        split=draw(st.sampled_from(["train", "val"])),
        task=Task(
            main_query=draw(_TEXT),
            metadata=draw(st.dictionaries(_TEXT, _JSON, max_size=2)),
            task_id=draw(_TEXT),
        ),
        output=draw(_JSON),
        calls=calls,
        events=tuple(draw(st.lists(events, max_size=2))),
        rewards=tuple(draw(st.lists(rewards, max_size=2))),
        status=draw(st.sampled_from(["succeeded", "failed", "timeout", "aborted"])),
        error=draw(st.none() | _TEXT),
        metrics=draw(st.dictionaries(_TEXT, finite, max_size=2)),
        is_success=draw(st.none() | st.booleans()),
        started_at=draw(_TIME),
        ended_at=draw(_TIME),
        cause=draw(st.none() | _TEXT),
        infrastructure=draw(st.booleans()),
    )


def _write(path: Path, *records: Any) -> None:
    with TraceWriter(path) as writer:
        for record in records:
            if isinstance(record, Episode):
                writer.put(*record.calls)
            writer.put(record)


def _everything(reader: TraceReader) -> dict[str, Any]:
    tables = {
        name: sorted(map(str, reader.query(f"SELECT * FROM {name}").to_pylist()))
        for name in ("runs", "rewards", "metrics", "ledger", "feedback", "trained")
    }
    ids = [
        row["episode_id"]
        for row in reader.query("SELECT DISTINCT episode_id FROM calls ORDER BY 1").to_pylist()
    ]
    superseded = "SELECT episode_id FROM episodes WHERE superseded ORDER BY 1"
    return {
        **tables,
        "episodes": {e.episode_id: e for e in episodes(reader, superseded=True)},
        "calls": {episode_id: calls_of(reader, episode_id) for episode_id in ids},
        "superseded": reader.query(superseded).to_pylist(),
    }


def _round_trip(trace: Path, folder: Path) -> Path:
    with open_trace(trace) as reader:
        export(
            reader,
            exported_ids(reader, rolled_back=True),
            "native",
            folder / "all.jsonl",
            redact=False,
        )
    import_files([folder / "all.jsonl"], folder / "back.duckdb")
    return folder / "back.duckdb"


def _same(one: Path, other: Path) -> None:
    first, second = open_trace(one), open_trace(other)
    before, after = _everything(first), _everything(second)
    first.close()
    second.close()
    for name, value in before.items():
        assert after[name] == value, name


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_an_import_of_a_native_export_is_equal(data: st.DataObject) -> None:
    made = [data.draw(_episode(i)) for i in range(data.draw(st.integers(1, 3)))]
    numbers = st.lists(_FLOAT, min_size=2, max_size=2)
    others: list[Any] = [
        Run(run_id="run", name=data.draw(_TEXT), config=data.draw(st.dictionaries(_TEXT, _JSON, max_size=2)),
            status="finished", started_at=START, ended_at=START),
        Metric(run_id="run", step=1, name="train/loss", value=data.draw(st.floats()), at=START),
        LedgerEntry(run_id="run", step=1, episode_id="e0", call_id="c0-0", outcome="trained", tokens=2),
        Trained(run_id="run", step=1, episode_id="e0", call_id="c0-0", advantages=data.draw(numbers),
                logprobs=data.draw(numbers), entropy=data.draw(numbers)),
        Feedback(feedback_id="f", episode_id="e0", author=data.draw(_TEXT), score=data.draw(st.none() | st.floats()),
                 comment=data.draw(st.none() | _TEXT), correction=data.draw(st.none() | _TEXT), at=START),
        data.draw(_call("open-1", "unended", 0)),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "trace.duckdb", *others, *made)
        _same(folder / "trace.duckdb", _round_trip(folder / "trace.duckdb", folder))


def _small(path: Path, **changes: Any) -> Path:
    call = Call(
        call_id="c1",
        episode_id="e1",
        prompt_ids=[1, 2],
        output_ids=[3],
        logprobs=[math.nan],
        started_at=START,
    )
    episode = Episode(
        **{
            "episode_id": "e1",
            "run_id": "r",
            "calls": (call,),
            "rewards": (Reward(value=1),),
            **changes,
        }
    )
    _write(path, Run(run_id="r", status="finished", started_at=START), episode)
    return path


@pytest.mark.slow
def test_what_a_resume_rolled_back_stays_so(tmp_path: Path) -> None:
    trace = tmp_path / "trace.duckdb"
    with TraceWriter(trace) as writer:
        writer.put(Run(run_id="r", status="finished"))
        for step in (1, 2):
            writer.put(
                Call(call_id=f"c{step}", episode_id=f"e{step}", output_ids=[1], logprobs=[0.0])
            )
            writer.put(Episode(episode_id=f"e{step}", run_id="r", step=step))
        writer.flush()
        writer.supersede("r", 1)
    back = _round_trip(trace, tmp_path)
    _same(trace, back)
    with open_trace(back) as reader:
        assert [e.episode_id for e in episodes(reader)] == ["e1"]


@pytest.mark.slow
def test_importing_twice_adds_nothing_and_two_files_add_up(tmp_path: Path) -> None:
    back = _round_trip(_small(tmp_path / "a.duckdb"), tmp_path)
    again = import_files([tmp_path / "all.jsonl"], back)
    assert (again.episodes, again.calls, again.already) == (0, 0, 1)
    _same(tmp_path / "a.duckdb", back)
    other = tmp_path / "other"
    other.mkdir()
    call = Call(call_id="c2", episode_id="e2")
    _round_trip(_small(other / "b.duckdb", episode_id="e2", calls=(call,)), other)
    both = import_files([tmp_path / "all.jsonl", other / "all.jsonl"], back)
    assert (both.episodes, both.already) == (1, 1)


def test_half_a_file_says_where_it_ends_and_goes_on_where_asked(tmp_path: Path) -> None:
    with open_trace(_small(tmp_path / "a.duckdb")) as reader:
        export(reader, ["e1"], "native", tmp_path / "all.jsonl", redact=False)
    whole = (tmp_path / "all.jsonl").read_bytes()
    half = tmp_path / "half.jsonl"
    half.write_bytes(whole[:-40])
    with pytest.raises(TaskError, match=r"half\.jsonl line 3 is not JSON.*truncated"):
        import_files([half], tmp_path / "x.duckdb")
    done = import_files([half], tmp_path / "x.duckdb", skip_bad_rows=True)
    assert done.bad_rows == 1 and done.episodes == 0
    half.write_bytes(whole)
    assert import_files([half], tmp_path / "x.duckdb").episodes == 1, (
        "what was half read is completed later"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"episode": {"episode_id": "e"}}', "line 2 is not in ajet's format: KeyError 'calls'"),
        (
            '{"episode": {"episode_id": "e", "calls": [], "attempt": "x"}}',
            "attempt: Input should be a valid integer",
        ),
        ("[1, 2]", "line 2 item 1 is not an object"),
        ('{"other": 1}', "line 2 has none of ajet_trace, run, metrics, episode; it has other"),
        ("not json", "line 2 is not JSON: Expecting value at column 1"),
        ("\xff\xfe", "line 2 is not UTF-8"),
    ],
)
def test_a_bad_line_is_told_by_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(b'{"ajet_trace": 1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(TaskError, match="bad") as error:
        import_files([source], tmp_path / "x.duckdb")
    assert problem in str(error.value) and "--skip-bad-rows" in str(error.value)
    assert import_files([source], tmp_path / "x.duckdb", skip_bad_rows=True).bad_rows >= 1


def test_files_that_cannot_be_read_at_all(tmp_path: Path) -> None:
    newer = tmp_path / "newer.jsonl"
    newer.write_text('{"ajet_trace": 99}\n')
    with pytest.raises(TraceVersionError, match="version 99"):
        import_files([newer], tmp_path / "x.duckdb")
    wide = tmp_path / "wide.jsonl"
    wide.write_text('{"ajet_trace": 1}\n', encoding="utf-16")
    with pytest.raises(TaskError, match="UTF-16"):
        import_files([wide], tmp_path / "x.duckdb")
    with pytest.raises(ConfigError, match="no file"):
        import_files([tmp_path / "none.jsonl"], tmp_path / "x.duckdb")
    with pytest.raises(ConfigError, match="already a trace"):
        import_files([_small(tmp_path / "a.duckdb")], tmp_path / "x.duckdb")
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("hello\n")
    with pytest.raises(ConfigError, match="unknown format; name it to"):
        import_files([unknown], tmp_path / "y.duckdb")
    assert not (tmp_path / "y.duckdb").exists(), "no trace is made of what is not read"


def test_a_file_that_a_live_run_owns_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"ajet_trace": 1}\n')
    with (
        TraceWriter(tmp_path / "live.duckdb"),
        pytest.raises(TraceLocked, match=f"pid {os.getpid()}"),
    ):
        import_files([source], tmp_path / "live.duckdb")


def test_an_episode_whose_text_was_redacted_keeps_no_token_ids(tmp_path: Path) -> None:
    with open_trace(_small(tmp_path / "a.duckdb", output="write to bob@example.com")) as reader:
        done = export(reader, ["e1"], "native", tmp_path / "all.jsonl")
    assert done.redacted == {"email": 1}
    assert done.left_out == {
        "episodes written without token ids, because their text was redacted": 1
    }
    line = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[-1])["episode"]
    assert line["output"] == "write to [email 1]" and "output_ids" not in line["calls"][0]


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    trace = tmp_path / "a.duckdb"
    values = np.array([np.nan, np.inf, -np.inf, 0.1], np.float32)
    call = Call(call_id="c1", episode_id="e1", output_ids=[1, 2, 3, 4], logprobs=values)
    _write(
        trace,
        Run(run_id="r", status="finished"),
        Episode(episode_id="e1", run_id="r", calls=(call,)),
    )
    _same(trace, _round_trip(trace, tmp_path))
    for line in (tmp_path / "all.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
