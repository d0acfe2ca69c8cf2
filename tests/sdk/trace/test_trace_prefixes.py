"""A trace keeps of each prompt only what an earlier call has not, and gives it back whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.samples.prefixes import PrefixIndex, place_all
from ajet_sdk.trace.encoding import StoredCalls
from ajet_sdk.trace.reader import calls_of
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, new_id


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def linear(
    turns: int, episode_id: str = "e", start: int = 400, observed: int = 200, sampled: int = 120
) -> list[Call]:
    """One conversation in which every prompt extends the call before."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50_000, start).astype(np.int32)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * 100}]
    calls = []
    for i in range(turns):
        messages = [*messages, {"role": "user", "content": f"observation {i}"}]
        output = rng.integers(0, 50_000, sampled).astype(np.int32)
        calls.append(
            Call(
                call_id=f"{episode_id}-{i}",
                episode_id=episode_id,
                index=i,
                request={"model": "m", "messages": messages, "temperature": 1.0},
                response={"choices": [{"message": {"role": "assistant", "content": f"reply {i}"}}]},
                prompt_ids=prompt,
                output_ids=output,
                logprobs=np.full(sampled, -0.5, dtype=np.float32),
            )
        )
        messages = [*messages, {"role": "assistant", "content": f"reply {i}"}]
        prompt = np.concatenate(
            [prompt, output, rng.integers(0, 50_000, observed).astype(np.int32)]
        )
    return calls


def test_a_fifty_turn_episode_costs_its_distinct_tokens(tmp_path: Path) -> None:
    calls = place_all(linear(50))
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(*calls)
        writer.flush()
        [row] = writer.query(
            "SELECT sum(len(prompt_suffix)) + sum(len(output_ids)) AS stored, max(prefix_messages)"
            " AS m FROM calls"
        ).to_pylist()
    distinct = len(calls[-1].prompt_ids) + len(calls[-1].output_ids)  # type: ignore[arg-type]
    assert row["stored"] == distinct
    assert row["m"] == 98


def test_no_call_refers_to_one_that_the_file_may_not_have(tmp_path: Path) -> None:
    calls = place_all(linear(3))
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(calls[1], calls[2])
        writer.flush()
        rows = writer.query(
            "SELECT parent_call_id, extends_call_id, prefix_len FROM calls ORDER BY index"
        ).to_pylist()
    whole = {"parent_call_id": None, "extends_call_id": None, "prefix_len": 0}
    assert rows == [whole, {"parent_call_id": "e-1", "extends_call_id": "e-1", "prefix_len": 840}]


@pytest.mark.slow
def test_of_all_calls_that_were_stored_the_latest_are_known() -> None:
    stored = StoredCalls()
    first = Call(call_id="first", episode_id="e")
    stored.add(first)
    for i in range(100_000):
        assert i % 1000 or stored.has("e", "first"), "it is referred to: it stays"
        stored.add(Call.model_construct(call_id=str(i), episode_id="e"))
    assert len(stored) < 100_000 and stored.has("e", "99999") and not stored.has("e", "0")
    assert not stored.has("other", "first") and not stored.has("e", None)
    stored.clear()
    assert not stored.has("e", "first")


def test_nothing_refers_to_a_call_that_could_not_be_stored(tmp_path: Path) -> None:
    deep: Any = "end"
    for _ in range(1500):
        deep = {"in": deep}
    spoilt = [{"role": "user", "content": "hi"}, {"role": "tool", "content": deep}]
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        first = Call(
            call_id="a",
            episode_id="e",
            request={"messages": spoilt},
            prompt_ids=ids(1, 2),
            output_ids=ids(),
        )
        index = PrefixIndex()
        writer.put(index.add(first))
        request = {"messages": spoilt[:1]}
        second = Call(
            call_id="b", episode_id="e", request=request, prompt_ids=ids(1, 2, 3), output_ids=ids()
        )
        writer.put(second := index.add(second))
        writer.flush()
        rows = writer.query(
            "SELECT call_id, parent_call_id, extends_call_id FROM calls"
        ).to_pylist()
    assert (second.parent_call_id, second.extends_call_id) == ("a", "a")
    assert rows == [{"call_id": "b", "parent_call_id": None, "extends_call_id": None}]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": json_values}
)


@st.composite
def trees(draw: st.DrawFn) -> list[Call]:
    """Calls that extend, fork from, cut short or have nothing to do with earlier ones, some without
    ids or messages."""
    calls: list[Call] = []
    for i in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from(calls)) if calls and draw(st.booleans()) else None
        tokens: list[int] = []
        messages: list[Any] = []
        if parent is not None:
            before = [*_list(parent.prompt_ids), *_list(parent.output_ids)]
            tokens = before[: draw(st.integers(0, len(before)))]
            said = parent.request.get("messages", [])
            messages = said[: draw(st.integers(0, len(said)))]
        tokens = tokens + draw(st.lists(st.integers(0, 5), max_size=4))
        messages = messages + draw(st.lists(message, max_size=3))
        request: dict[str, Any] = draw(
            st.dictionaries(st.sampled_from(["model", "n", "tools"]), json_values, max_size=2)
        )
        if draw(st.integers(0, 4)):
            request["messages"] = messages
        output = draw(st.none() | st.lists(st.integers(0, 5), max_size=4))
        calls.append(
            Call(
                call_id=f"c{i}",
                episode_id="e",
                index=i,
                request=request,
                prompt_ids=tokens if draw(st.integers(0, 4)) else None,
                output_ids=output,
                logprobs=None if output is None else [-0.25] * len(output),
            )
        )
    return calls


def _list(array: Any) -> list[int]:
    return [] if array is None else array.tolist()


def exact(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _surrogate_free(calls: list[Call]) -> bool:
    try:
        json.dumps([c.request for c in calls], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceWriter]:
    with TraceWriter(tmp_path_factory.mktemp("store") / "trace.duckdb") as writer:
        yield writer


EXAMPLES = settings.default.max_examples if settings.default else 0


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES if EXAMPLES > 100 else 20
)  # each is written to a file and read back twice
@given(drawn=trees().filter(_surrogate_free))
def test_what_was_put_comes_back_exactly(store: TraceWriter, drawn: list[Call]) -> None:
    episode = new_id()
    calls = place_all(
        c.model_copy(update={"episode_id": episode, "call_id": f"{episode}-{c.index}"})
        for c in drawn
    )
    store.put(*calls)
    store.flush()
    back = calls_of(store, episode)
    rows = store.query(
        "SELECT * FROM calls_full WHERE episode_id = ? ORDER BY index", [episode]
    ).to_pylist()
    assert [c.call_id for c in back] == [c.call_id for c in calls]
    for put, got, row in zip(calls, back, rows, strict=True):
        assert got == put
        assert exact(got.request) == exact(put.request) == exact(json.loads(row["request"]))
        assert row["prompt_ids"] == (None if put.prompt_ids is None else put.prompt_ids.tolist())
        if "messages" in put.request:
            assert exact(json.loads(row["messages"])) == exact(put.request["messages"])


def test_the_view_rebuilds_a_long_episode(tmp_path: Path) -> None:
    calls = place_all(linear(120, start=50, observed=20, sampled=10))
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(*calls)
        writer.flush()
        rows = writer.query(
            "SELECT call_id, prompt_ids, request FROM calls_full WHERE episode_id = 'e'"
        ).to_pylist()
        [one] = writer.query(
            "SELECT prompt_ids FROM calls_full WHERE call_id = 'e-119'"
        ).to_pylist()
    whole = {row["call_id"]: row for row in rows}
    assert len(whole) == len(calls)
    for call in calls:
        assert whole[call.call_id]["prompt_ids"] == _list(call.prompt_ids)
        assert json.loads(whole[call.call_id]["request"]) == call.request
    assert one["prompt_ids"] == _list(calls[-1].prompt_ids)
