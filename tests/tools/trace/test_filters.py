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
from ajet_tools.text.grammar import FilterError
from ajet_tools.trace.queries.filters import FIELDS, parse


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
    return " ".join(reader.query(sql, parsed.parameters)["episode_id"].to_pylist())


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", "one two"),
        ("reward<0.5", "one"),
        ("reward=0.25", "one"),
        ("reward=none", "two"),
        ("reward!=0.25", "two"),
        ("status=failed", "two"),
        ("status!=failed", "one"),
        ("status=failed,timeout", "two"),
        ("status = FAILED , succeeded", "one two"),
        ("agent=werewolf", "one"),
        ("agent=seer", "one two"),
        ("agent!=werewolf", "two"),
        ("agent~WOLF", "one"),
        ("agent!~wolf", "two"),
        ("step>10", "one"),
        ("step>=2 step<=2", "two"),
        ("step=1,2,3", "two"),
        ("turns=1", "one"),
        ("calls=2", "one two"),
        ("agents=1", "one two"),
        ("tokens>=4", "one"),
        ("tokens=3", "two"),
        ("tokens=none", ""),
        ("prompt_tokens=7", "two"),
        ("cost=0.75", "two"),
        ("cost=none", "one"),
        ("latency>50s", "two"),
        ("unread_tool_calls=1", "one"),
        ("unread_tool_calls=2 cut_tool_calls=2", "two"),
        ("cut_tool_calls=0", "one"),
        ("metric.pass@1>0.7", "two"),
        ("metric.pass@1=none", "one"),
        ("step=last split=val", "two"),
        ("step<last", ""),
        ("seconds>1.5m", "two"),
        ("age<2h", "one"),
        ("age>2h", "two"),
        ("attempt=1 split=val", "two"),
        ("task=t-", "one"),
        ('task="add 100% of it"', "one"),
        ("task~100%", "one"),
        ("cause=ValueError", "two"),
        ("error~BROKE", "two"),
        ("error=none", "one"),
        ("error!=none", "two"),
        ("model~m-", "one"),
        ("policy/version>=3", "one"),
        ("version=none", "two"),
        ("tag=good", "one"),
        ("finish=stop", "one"),
        ("feedback=yes", "two"),
        ("feedback=no", "one"),
        ("feedback<0", "two"),
        ("outcome=trained", "one"),
        ("superseded=no", "one two"),
        ("success=yes", ""),
        ("episode=on", "one"),
        ("status=failed or reward>0", "one two"),
        ("not status=failed", "one"),
        ("not (status=failed or step>10)", ""),
        ("status=failed, step=2 and attempt=1", "two"),
        ("status=failed, not step=11", "two"),
        ("agent=seer,(status=failed or step=3)", "two"),
        ("agent=seer,not", "one two"),
        ('text~"say \\"hello\\"\\nto"', "one"),
        ("世界", "one"),
        ("17+4 CALCULATOR", "one"),
        ("done.", "one"),
        ("broke or upon", "two"),
        ("text!~upon", "one"),
        ("100%", "one"),
        ('"."', "one"),
    ],
)
def test_what_fits(reader: TraceReader, text: str, ids: str) -> None:
    assert fitting(reader, text) == ids


def test_the_words_of_the_json_are_not_text(reader: TraceReader) -> None:
    assert [
        fitting(reader, word) for word in ("role", "content", "usage", "arguments", "choices")
    ] == [""] * 5


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("step>1 rewrd<0.5", 7, "did you mean reward?"),
        ("status~fail", 6, "supports = !="),
        ("status=faild", 7, "did you mean failed?"),
        ("reward<", 7, "a value is missing"),
        ("reward<many", 7, "not a number"),
        ("reward<1e999", 7, "not a number"),
        ("age<2y", 4, "not a time"),
        ("age=2h", 3, "supports < <= > >="),
        ("(status=failed", 0, "never closed"),
        ("status=failed)", 13, "this ) has no matching ("),
        ("a or", 4, "a condition is missing"),
        ("or a", 0, "a condition is missing"),
        ("<3", 0, "a field is missing before <"),
        ('x "half', 2, "never closed"),
        ("wow!", 3, "put it in quotes"),
        ("step<1,2", 7, "takes a single value"),
        ("success=maybe", 8, "not one of yes"),
        ("(" * 50 + "a" + ")" * 50, 30, "levels of nested conditions"),
        ("a " * 100, 120, "more than 60 conditions"),
        ("a" * 20_000, 10_000, "at most 10,000 characters"),
        ("\ud800", 0, "surrogate"),
    ],
)
def test_what_is_refused_and_where(text: str, position: int, says: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert says in str(caught.value) and caught.value.position == position
    assert f"character {position + 1}" in str(caught.value) and isinstance(caught.value, QueryError)


def test_what_is_looked_for_is_named_and_values_stay_out_of_the_sql() -> None:
    found = parse('status=failed word text~"it\'s" not task~x')
    assert found.needles == ("word", "it's", "x") and found.reads_text
    assert "it's" not in found.sql and found.sql.count("?") == len(found.parameters)
    assert not parse("status=failed task~x").reads_text


_PIECES = st.one_of(
    st.sampled_from(
        [
            *FIELDS,
            "policy/version",
            "and",
            "or",
            "not",
            "none",
            "yes",
            "failed",
            "train",
            "2h",
            "-1.5",
        ]
    ),
    st.sampled_from(
        [
            "=",
            "!=",
            "<",
            "<=",
            ">",
            ">=",
            "~",
            "!~",
            "(",
            ")",
            ",",
            " ",
            '"',
            "'",
            "\\",
            "\0",
            "%",
            "?",
        ]
    ),
    st.text(max_size=5),
)
_TERMS = st.builds(
    lambda f, o, v: f"{f}{o}{v}",
    st.sampled_from(sorted(FIELDS)),
    st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~", "!~"]),
    st.one_of(
        st.sampled_from(
            [
                "1",
                "-2.5e3",
                "none",
                "yes",
                "failed",
                "val",
                "trained",
                "3m",
                "a,b",
                "1,2,none",
                '"x y"',
            ]
        ),
        st.text(max_size=6).map(lambda s: '"' + s.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    ),
)
_JOINED = st.lists(
    st.tuples(st.sampled_from(["", "or ", "not ", "and ", "("]), _TERMS), max_size=4
).map(
    lambda terms: " ".join(f"{word}{term}" + (")" if word == "(" else "") for word, term in terms)
)


@given(st.one_of(st.lists(_PIECES, max_size=8).map("".join), _JOINED))
def test_whatever_is_typed_parses_and_runs_or_is_refused(reader: TraceReader, text: str) -> None:
    try:
        parsed = parse(text)
    except FilterError as error:
        assert 0 <= error.position <= len(text)
        return
    sql = f"SELECT count(*) AS n FROM episodes e WHERE {parsed.sql}"
    assert 0 <= reader.query(sql, parsed.parameters)["n"][0].as_py() <= 2
