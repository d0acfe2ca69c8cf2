"""The filter language: what fits on a real trace, what is refused and where, and that nothing typed
breaks the SQL."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Reward, Run, Task, now
from ajet_tools.trace.queries.filters import COLUMNS, FilterError, parse
from ajet_tools.trace.queries.listing import open_listing


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    path = tmp_path_factory.mktemp("filters") / "trace.duckdb"
    tool = {"function": {"name": "calculator", "arguments": '{"sum": "17+4"}'}}
    said = [{"role": "user", "content": [{"type": "text", "text": 'Say "hello"\nto 世界'}]}]
    message = {"role": "assistant", "content": None, "tool_calls": [tool]}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total": 9, "cost": 0.25}
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run"))
        writer.put(
            Call(
                call_id="c1",
                episode_id="one",
                agent="werewolf",
                model="m-1",
                policy_version=3,
                request={"messages": said},
                response={"choices": [{"message": message, "unread_tool_call": True}]},
                output_ids=[1, 2, 3],
                finish_reason="stop",
            ),
            Call(
                episode_id="one",
                index=1,
                agent="seer",
                target_tag="good",
                phase="judge",
                output_ids=[1],
            ),
            *(
                Call(
                    episode_id="two",
                    agent="seer",
                    request={"prompt": "once upon"},
                    response={"choices": [{"index": i, "unread_tool_call": True}], "usage": usage},
                    finish_reason="length",
                    started_at=now() - timedelta(minutes=1),
                )
                for i in (0, 1)
            ),
        )
        ended = now() - timedelta(hours=3)
        task = Task(task_id="t-9", main_query="Add 100% of it")
        rewards = (Reward(value=0.5), Reward(name="style", value=0.25, weight=-1))
        writer.put(
            Episode(
                episode_id="one", run_id="run", step=11, task=task, rewards=rewards, output="Done."
            )
        )
        failed = Episode(
            episode_id="two",
            run_id="run",
            step=2,
            attempt=1,
            split="val",
            status="failed",
            cause="ValueError",
            error="it broke at 5",
            metrics={"judge_cost": 0.5, "pass@1": 0.75},
            started_at=ended - timedelta(minutes=2),
            ended_at=ended,
        )
        writer.put(failed, Feedback(episode_id="two", score=-1, comment="bad"))
        writer.put(
            LedgerEntry(
                run_id="run", step=11, episode_id="one", call_id="c1", outcome="trained", tokens=3
            )
        )
    with open_trace(path) as found:
        yield found


def fitting(reader: TraceReader, text: str) -> str:
    parsed = parse(text)
    sql = f"SELECT episode_id FROM episodes e WHERE {parsed.sql} ORDER BY 1"
    ids = " ".join(reader.query(sql, parsed.parameters)["episode_id"].to_pylist())
    listed = open_listing(reader, None, parsed, "episode_id", descending=False).ids()
    assert " ".join(listed) == ids, "a listing, which searches in spans, gives the same"
    return ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", "one two"),
        ("reward<0.5", "one"),
        ("reward is null", "two"),
        ("status='failed'", "two"),
        ("status in ('failed', 'timeout') -- a comment", "two"),
        ("'werewolf' in agents", "one"),
        ("'seer' in agents", "one two"),
        ("step between 2 and 10", "two"),
        ("turns=1", "one"),
        ("calls=2 and len(agents) = 1", "two"),
        ("tokens>=4", "one"),
        ("tokens=3", "two"),
        ("prompt_tokens=7", "two"),
        ("cost=0.75", "two"),
        ("latency>50", "two"),
        ("unread_tool_calls=2 and cut_tool_calls=2", "two"),
        ("metric('pass@1')>0.7", "two"),
        ("step=last_step and split='val'", "two"),
        ("seconds>90", "two"),
        ("age() < interval 2 hour", "one"),
        ("AGE ( ) > interval 2 hour", "two"),
        ("task_id = 't-9'", "one"),
        ("task ilike '%100\\%%' escape '\\'", "one"),
        ("cause='ValueError' and error like '%broke%'", "two"),
        ("'m-1' in models", "one"),
        ("version>=3", "one"),
        ("version is null", "two"),
        ("'good' in tags", "one"),
        ("'stop' in finish_reasons", "one"),
        ("feedback < 0", "two"),
        ("feedback is null", "one"),
        ("'trained' in outcomes", "one"),
        ("superseded", ""),
        ("not superseded", "one two"),
        ("success", ""),
        ("output = 'Done.'", "one"),
        ("status='failed' or reward>0", "one two"),
        ("has('say \"hello\"\nto')", "one"),
        ("世界", "one"),
        ("calculator", "one"),
        ("17+4", "one"),
        ("done.", "one"),
        ("has('broke') or has('upon')", "two"),
        ("not has('upon')", "one"),
        ("has('it''s')", ""),
        ("task = 'has(''x'')' or HAS('upon')", "two"),
        ("100%", "one"),
        ("once upon", "two"),
        ('"100%"', "one"),
        (".", "one"),
    ],
)
def test_what_fits(reader: TraceReader, text: str, ids: str) -> None:
    assert fitting(reader, text) == ids


def test_the_words_of_the_json_are_not_text(reader: TraceReader) -> None:
    words = ("role", "content", "usage", "arguments", "choices")
    assert [fitting(reader, word) for word in words] == [""] * 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step>1 and rewrd<0.5", "did you mean reward?"),
        ("status=failed", "in quotes"),
        ("reward<", "syntax error"),
        ("(status='failed'", "syntax error"),
        ("status='open", "unterminated"),
        ("reward < 0.5 status='failed'", "syntax error"),
        ("true); DROP TABLE runs; --", "syntax error"),
        ("true) UNION SELECT call_id FROM calls --", ""),
        ("read_text('/etc/passwd') = ''", ""),
        ("a" * 20_000, "at most 10,000 characters"),
        ("\ud800", "does not take"),
        ("a\0b", "does not take"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_looked_for_is_named_and_stays_out_of_the_sql() -> None:
    found = parse("status = 'failed' and has('it''s') and not has('x') or has('x')")
    assert found.needles == ("it's", "x")
    assert "it's" not in found.sql and found.sql.count("?") == len(found.parameters)


_PIECES = st.one_of(
    st.sampled_from(
        [*COLUMNS, "and", "or", "not", "null", "is", "in", "'failed'", "-1.5", "has('"]
    ),
    st.sampled_from(["=", "<>", "<", ">", "(", ")", ",", " ", '"', "'", "\\", "%", "?", ";", "--"]),
    st.text(max_size=5),
)


@given(st.lists(_PIECES, max_size=8).map(" ".join))
def test_whatever_is_typed_parses_and_runs_or_is_refused(reader: TraceReader, text: str) -> None:
    try:
        parse(text)
    except FilterError:
        return
    try:
        fitting(reader, text)
    except QueryError as error:
        assert "Conversion" in str(error) or "Out of Range" in str(error)
