"""The place of a call under laws: against plain, slow readings of the rules, over random branching
episodes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.samples.prefixes import CallPlace, PrefixIndex, common_prefix, place_all
from ajet_sdk.samples.timelines import merge
from ajet_sdk.types import Call

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


@st.composite
def episodes(draw: st.DrawFn) -> list[Call]:
    """Calls in the order in which they were recorded: turns, forks, retries, edits, several agents
    and phases, some without ids, outputs or messages, and few token ids, so that equal prompts are
    common."""
    seed = draw(st.integers(0, 2**32 - 1))
    size = draw(st.integers(1, 24))
    vocabulary = draw(st.sampled_from([2, 3, 50]))
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(low, high))]

    calls: list[Call] = []
    for i in range(size):
        prompt, messages = tokens(0, 4), [rng.choice("abc") for _ in range(rng.randint(0, 2))]
        if calls and rng.random() < 0.85:
            old = rng.choice(calls[-4:] if rng.random() < 0.7 else calls)
            before, sampled = listed(old.prompt_ids), listed(old.output_ids)
            way = rng.random()
            if way < 0.5:
                prompt = before + sampled + tokens(0, 4)
            elif way < 0.6:
                prompt = before
            elif way < 0.75:
                whole = before + sampled
                prompt = whole[: rng.randint(0, len(whole))] + tokens(0, 2)
            elif way < 0.9:
                prompt = before + sampled[: rng.randint(0, len(sampled))]
            earlier = texts(old) or []
            messages = (
                earlier[: rng.choice([len(earlier), rng.randint(0, len(earlier))])] + messages
            )
        calls.append(
            Call(
                call_id=f"c{i}",
                episode_id="e",
                index=i,
                agent=rng.choice("aab"),
                trainable=rng.random() < 0.85,
                phase="judge" if rng.random() < 0.1 else "rollout",
                prompt_ids=prompt if rng.random() < 0.95 else None,  # type: ignore[arg-type]
                output_ids=tokens(0, 5) if rng.random() < 0.95 else None,  # type: ignore[arg-type]
                request=(
                    {"messages": [{"role": "user", "content": m} for m in messages]}
                    if rng.random() < 0.9
                    else {}
                ),
                started_at=BEGAN + timedelta(seconds=rng.randrange(size)),
                ended_at=BEGAN + timedelta(seconds=size),
            )
        )
    return calls


def listed(ids: Any) -> list[int]:
    return [] if ids is None else ids.tolist()


def texts(call: Call) -> list[str]:
    return [message["content"] for message in call.request.get("messages", [])]


def whole(call: Call) -> list[int]:
    return listed(call.prompt_ids) + (
        listed(call.output_ids) if call.prompt_ids is not None else []
    )


def shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def has_ids(call: Call) -> bool:
    return call.prompt_ids is not None and call.output_ids is not None


def extended(call: Call, others: Sequence[Call]) -> str | None:
    """The rule: of the same agent and phase, the longest that is wholly a prefix; a trained one,
    then the earliest."""
    found = [
        o
        for o in others
        if o is not call and (o.agent, o.phase) == (call.agent, call.phase) and has_ids(o)
    ]
    found = [o for o in found if listed(call.prompt_ids)[: len(whole(o))] == whole(o)]
    found = [o for o in found if len(whole(o)) < len(whole(call))]
    if not found or not has_ids(call):
        return None
    return min(
        found, key=lambda o: (-len(whole(o)), not o.trainable, o.started_at, o.call_id)
    ).call_id


@given(episodes())
def test_a_call_extends_the_longest_earlier_call_that_is_wholly_its_prefix(
    calls: list[Call],
) -> None:
    index = PrefixIndex()
    for i, call in enumerate(calls):
        assert index.place(call).extends_call_id == extended(call, calls[:i])


@given(episodes())
def test_the_nearest_call_is_the_first_leaf_that_shares_most(calls: list[Call]) -> None:
    index, leaves = PrefixIndex(), list[Call]()
    for call in calls:
        place = index.place(call)
        prompt = listed(call.prompt_ids)
        shares = [
            (shared(prompt, whole(leaf)), shared(texts(call), texts(leaf))) for leaf in leaves
        ]
        most = max(shares, default=(0, 0))
        nearest = leaves[shares.index(most)] if most > (0, 0) else None
        assert (place.prefix_len, place.prefix_messages) == most
        assert place.parent_call_id == (nearest.call_id if nearest else None)
        if nearest is not None and most == (len(whole(nearest)), len(texts(nearest))):
            leaves.remove(nearest)
        leaves.append(call)


@given(episodes())
def test_what_is_stored_is_never_more_than_what_follows_the_call_that_is_extended(
    calls: list[Call],
) -> None:
    known = {call.call_id: call for call in calls}
    for call in place_all(calls):
        if call.extends_call_id is not None:
            assert call.prefix_len >= len(whole(known[call.extends_call_id]))


@given(episodes())
def test_merge_follows_the_call_that_is_extended_wherever_it_was_recorded_earlier(
    calls: list[Call],
) -> None:
    """`merge` of calls that have no place finds the same, but for what was recorded later."""
    placed = {call.call_id: call for call in place_all(calls)}
    for timeline in merge(calls).timelines:
        for before, after in zip(timeline.call_ids, timeline.call_ids[1:], strict=False):
            if placed[before].index < placed[after].index:
                assert placed[after].extends_call_id is not None
                found = placed[after].extends_call_id
                assert whole(placed[found]) == whole(placed[before])


@given(episodes(), st.randoms(use_true_random=False))
def test_the_order_of_the_list_changes_no_place(calls: list[Call], rng: random.Random) -> None:
    shuffled = list(calls)
    rng.shuffle(shuffled)
    assert sorted(place_all(shuffled), key=lambda c: c.index) == place_all(calls)


@given(episodes())
def test_placing_placed_calls_changes_nothing(calls: list[Call]) -> None:
    placed = place_all(calls)
    assert place_all(placed) == placed


def test_the_longest_prefix_wins_and_a_fork_keeps_both() -> None:
    index = PrefixIndex()

    def place(call_id: str, prompt: list[int], output: list[int] | None, said: str) -> CallPlace:
        request = {"messages": [{"role": "user", "content": one} for one in said]}
        ids: dict[str, Any] = {"prompt_ids": prompt, "output_ids": output}
        return index.place(Call(call_id=call_id, episode_id="e", request=request, **ids))

    assert place("a", [1, 2], [3], "x") == CallPlace()
    assert place("b", [1, 2, 3, 4], [5], "xy") == CallPlace("a", "a", 3, 1)
    assert place("fork", [1, 2, 3, 9], [6], "xz") == CallPlace("a", "b", 3, 1)
    assert place("c", [1, 2, 3, 4, 5, 7], None, "xyw") == CallPlace(None, "b", 5, 2)
    assert place("d", [1, 2, 3, 4, 5, 7, 8], [8], "xyw") == CallPlace("b", "c", 6, 3)


def conversation(turns: int, observed: int = 200, sampled: int = 100) -> list[Call]:
    draw = np.random.default_rng(0)
    prompt, calls = draw.integers(0, 50_000, observed).astype(np.int32), list[Call]()
    for turn in range(turns):
        output = draw.integers(0, 50_000, sampled).astype(np.int32)
        calls.append(
            Call(
                call_id=f"c{turn}", episode_id="e", index=turn, prompt_ids=prompt, output_ids=output
            )
        )
        prompt = np.concatenate(
            (prompt, output, draw.integers(0, 50_000, observed).astype(np.int32))
        )
    return calls


@pytest.mark.parametrize("forked", [False, True])
def test_memory_is_linear_in_what_is_distinct(forked: bool) -> None:
    """Also where every turn is followed by a call of another agent that repeats the history so far
    and ends there."""
    calls = conversation(200)
    if forked:
        asides = [
            call.model_copy(
                update={
                    "call_id": f"{call.call_id}-aside",
                    "agent": "critic",
                    "prompt_ids": np.append(call.prompt_ids, -1).astype(np.int32),  # type: ignore[arg-type]
                }
            )
            for call in calls
        ]
        calls = [one for pair in zip(calls, asides, strict=True) for one in pair]
    distinct = len(whole(calls[-1])) * 4
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for call in calls:
            index.place(call)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 * distinct + 1024 * len(calls), "whole, 200 prompts are a hundred times of it"


def test_a_branch_of_many_finds_the_call_that_it_extends_beyond_the_leaves() -> None:
    index = PrefixIndex()
    for i in range(200):
        index.place(Call(call_id=f"c{i}", episode_id="e", index=i, prompt_ids=[i], output_ids=[i]))  # type: ignore[arg-type]
    late = Call(call_id="late", episode_id="e", index=200, prompt_ids=[3, 3, 1], output_ids=[7])  # type: ignore[arg-type]
    assert index.place(late) == CallPlace(extends_call_id="c3"), (
        "that it is extended is known, its ids are not held"
    )


def test_messages_that_are_equal_in_python_alone_are_not_shared() -> None:
    index = PrefixIndex()
    for i, value in enumerate([1, True, 1.0]):
        request = {"messages": [{"role": "tool", "content": value}]}
        assert (
            index.place(Call(call_id=f"c{i}", episode_id="e", request=request)).prefix_messages == 0
        )


def test_a_message_that_cannot_be_spelt_ends_what_is_shared() -> None:
    loop: dict[str, Any] = {"role": "user"}
    loop["content"] = loop
    said = {"role": "user", "content": "hi"}
    index = PrefixIndex()
    for call_id in "ab":
        place = index.place(
            Call(call_id=call_id, episode_id="e", request={"messages": [said, loop, said]})
        )
    assert (place.parent_call_id, place.prefix_messages) == ("a", 1)


def test_the_place_of_ids_of_which_a_part_is_no_array_of_its_own() -> None:
    """A view with gaps."""
    index, ids = PrefixIndex(), np.arange(20, dtype=np.int32)
    ids.flags.writeable = False
    index.place(Call(call_id="a", episode_id="e", prompt_ids=ids[:8:2], output_ids=ids[8:12:2]))
    assert index.place(
        Call(call_id="b", episode_id="e", prompt_ids=ids[:14:2], output_ids=ids[:2])
    ) == CallPlace("a", "a", 6, 0)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == shared(a, b)
    long = [1] * 5000
    assert common_prefix(
        np.array(long + a, np.int32), np.array(long + b, np.int32)
    ) == 5000 + shared(a, b)


@given(episodes())
def test_merge_goes_by_what_was_recorded_and_searches_the_rest(calls: list[Call]) -> None:
    placed = place_all(calls)
    expected = {call.call_id: call.extends_call_id or extended(call, calls) for call in placed}
    behind: dict[str, str] = {}
    for timeline in merge(placed).timelines:
        assert expected[timeline.call_ids[0]] is None
        behind |= dict(zip(timeline.call_ids[1:], timeline.call_ids, strict=False))
    assert behind == {call_id: other for call_id, other in expected.items() if other is not None}


@given(episodes(), st.randoms(use_true_random=False))
def test_nothing_is_trained_behind_a_prefix_that_it_was_not_sampled_behind(
    calls: list[Call], rng: random.Random
) -> None:
    """Whatever the calls say that they extend: another agent's call, one of other ids, one that is
    not there."""
    names = [call.call_id for call in calls] + ["missing", None]
    wrong = [
        call.model_copy(update={"extends_call_id": rng.choice(names)}) for call in place_all(calls)
    ]
    known = {call.call_id: call for call in calls}
    trained = []
    for timeline in merge(wrong).timelines:
        for span in timeline.spans:
            call = known[span.call_id]
            assert timeline.token_ids[: span.end].tolist() == whole(call) and span.start == len(
                listed(call.prompt_ids)
            )
            assert call.agent == timeline.agent
            trained.append(span.call_id)
    wanted = [
        c.call_id
        for c in calls
        if has_ids(c) and c.trainable and c.phase == "rollout" and len(c.output_ids)
    ]  # type: ignore[arg-type]
    assert sorted(trained) == sorted(wanted)
