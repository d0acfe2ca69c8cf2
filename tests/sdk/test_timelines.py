"""Merging under laws: over random trees of calls, what was sampled is masked in once, where it was
sampled."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.samples.timelines import Merged, merge
from ajet_sdk.types import Call

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def call(
    call_id: str,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    agent: str = "default",
    at: int = 0,
    trainable: bool = True,
    phase: str = "rollout",
    version: int | None = None,
) -> Call:
    return Call(
        call_id=call_id,
        episode_id="e",
        index=at,
        agent=agent,
        trainable=trainable,
        phase=phase,  # type: ignore[arg-type]
        policy_version=version,
        prompt_ids=prompt,  # type: ignore[arg-type]
        output_ids=output,  # type: ignore[arg-type]
        logprobs=[-(i + 1) / 7 for i in range(len(output))],  # type: ignore[arg-type]
        started_at=BEGAN + timedelta(seconds=at),
        ended_at=BEGAN + timedelta(seconds=at),
    )


@dataclass
class Forest:
    """Calls that grew from each other in the ways that agents make them grow."""

    calls: list[Call]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Random calls: turns, forks, retries, drift, edits, truncation, agents, and few token ids (so
    they collide)."""
    seed = draw(st.integers(0, 2**32 - 1))
    size = draw(st.integers(1, 24))
    vocabulary = draw(st.sampled_from([2, 3, 50]))
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(low, high))]

    calls: list[Call] = []
    for i in range(size):
        prompt = tokens(0, 4)
        if calls and rng.random() < 0.85:
            old = rng.choice(calls[-4:] if rng.random() < 0.7 else calls)
            asked, sampled = old.prompt_ids.tolist(), old.output_ids.tolist()  # type: ignore[union-attr]
            way = rng.random()
            if way < 0.5:  # the next turn
                prompt = asked + sampled + tokens(0, 4)
            elif way < 0.6:  # a retry, or another choice
                prompt = asked
            elif way < 0.7 and sampled:  # re-tokenised: one sampled token comes back otherwise
                sampled[rng.randrange(len(sampled))] = rng.randrange(vocabulary)
                prompt = asked + sampled + tokens(0, 3)
            elif way < 0.8 and asked:  # the history edited or cut short
                cut = rng.randrange(len(asked))
                prompt = asked[:cut] + tokens(0, 2)
            elif way < 0.9:  # the reply cut short in the history
                prompt = asked + sampled[: rng.randint(0, len(sampled))]
        agent = rng.choice("aab")
        trainable = rng.random() < 0.85
        phase = "judge" if rng.random() < 0.05 else "rollout"
        version = rng.choice([None, 1, 2, 3])
        at = rng.randrange(size)
        calls.append(
            call(
                f"c{i}",
                prompt,
                tokens(0, 5),
                agent=agent,
                at=at,
                trainable=trainable,
                phase=phase,
                version=version,
            )
        )
    return Forest(calls)


@given(forests())
def test_each_sampled_token_is_masked_in_once_behind_the_prefix_at_which_it_was_sampled(
    forest: Forest,
) -> None:
    calls = {c.call_id: c for c in forest.calls}
    trained: Counter[str] = Counter()
    for timeline in merge(forest.calls).timelines:
        claimed = np.zeros(len(timeline.token_ids), bool)
        for span in timeline.spans:
            c = calls[span.call_id]
            assert c.prompt_ids is not None and c.output_ids is not None and c.logprobs is not None
            assert np.array_equal(timeline.token_ids[: span.start], c.prompt_ids)
            assert np.array_equal(timeline.token_ids[span.start : span.end], c.output_ids)
            assert np.array_equal(timeline.logprobs[span.start : span.end], c.logprobs)
            assert not claimed[span.start : span.end].any()
            claimed[span.start : span.end] = True
            trained[span.call_id] += 1
            assert c.agent == timeline.agent
        assert np.array_equal(claimed, timeline.loss_mask)
        assert not timeline.logprobs[~timeline.loss_mask].any()
    wanted = {
        c.call_id: 1
        for c in forest.calls
        if c.trainable and c.phase == "rollout" and len(c.output_ids)
    }  # type: ignore[arg-type]
    assert trained == wanted


@given(forests(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(forest: Forest, rng: random.Random) -> None:
    shuffled = list(forest.calls)
    rng.shuffle(shuffled)
    shuffled = [c.model_copy(update={"index": i}) for i, c in enumerate(shuffled)]
    assert merge(shuffled) == merge(forest.calls)


@given(forests())
def test_every_call_stands_where_its_timeline_says(forest: Forest) -> None:
    calls = {c.call_id: c for c in forest.calls}
    own: Counter[str] = Counter()
    for timeline in merge(forest.calls).timelines:
        full = timeline.token_ids.tolist()
        for call_id in timeline.call_ids:
            c = calls[call_id]
            sequence = c.prompt_ids.tolist() + c.output_ids.tolist()  # type: ignore[union-attr]
            assert full[: len(sequence)] == sequence
        own[timeline.call_ids[-1]] += 1
        versions = [v for s in timeline.spans if (v := calls[s.call_id].policy_version) is not None]
        if versions:
            assert timeline.policy_version == min(versions)
    assert max(own.values()) == 1
    assert {c for t in merge(forest.calls).timelines for c in t.call_ids} == set(calls)


def slowly(calls: Sequence[Call]) -> list[tuple[str, ...]]:
    """The calls of each timeline, by a plain reading of the rule, in the order in which the
    timelines' calls began.

    A call goes on from the longest sequence (prompt and reply) that is a prefix of its prompt; of
    several that are alike from one that is trained, else from the earliest. Of several that go on
    from one place, the one with most sampled in it and behind it keeps the timeline; where equal,
    the one whose ids come first as bytes, then the earliest.
    """
    order = sorted(calls, key=lambda c: (c.started_at, c.call_id))
    whole = {c.call_id: (*c.prompt_ids.tolist(), *c.output_ids.tolist()) for c in calls}  # type: ignore[union-attr]
    parents: dict[str, Call] = {}
    for c in order:
        prompt = tuple(c.prompt_ids.tolist())  # type: ignore[union-attr]
        found = [o for o in order if (o.agent, o.phase) == (c.agent, c.phase) and o is not c]
        found = [
            o
            for o in found
            if prompt[: len(e := whole[o.call_id])] == e and len(e) < len(whole[c.call_id])
        ]
        if found:
            longest = max(len(whole[o.call_id]) for o in found)
            alike = [o for o in found if len(whole[o.call_id]) == longest]
            parents[c.call_id] = next(
                (o for o in alike if o.trainable and o.phase == "rollout"), alike[0]
            )
    weight = {c.call_id: len(c.output_ids) for c in calls}  # type: ignore[arg-type]
    for c in sorted(calls, key=lambda c: (len(c.prompt_ids), len(whole[c.call_id])), reverse=True):  # type: ignore[arg-type]
        if c.call_id in parents:
            weight[parents[c.call_id].call_id] += weight[c.call_id]
    heirs: dict[str, Call] = {}
    for c in order:
        parent = parents.get(c.call_id)
        rival = heirs.get(parent.call_id) if parent else None
        if parent and (rival is None or _claim(c, weight) < _claim(rival, weight)):
            heirs[parent.call_id] = c
    lines = []
    for c in order:
        parent = parents.get(c.call_id)
        if parent is None or heirs[parent.call_id] is not c:
            chain = [c]
            while chain[0].call_id in parents:
                chain.insert(0, parents[chain[0].call_id])
            while chain[-1].call_id in heirs:
                chain.append(heirs[chain[-1].call_id])
            lines.append(tuple(link.call_id for link in chain))
    return lines


def _claim(call: Call, weight: dict[str, int]) -> tuple[int, bytes, bytes]:
    assert call.prompt_ids is not None and call.output_ids is not None
    return -weight[call.call_id], call.prompt_ids.tobytes(), call.output_ids.tobytes()


@given(forests())
def test_who_goes_on_from_whom_and_who_keeps_the_timeline(forest: Forest) -> None:
    merged = merge(forest.calls)
    assert [t.call_ids for t in merged.timelines] == slowly(forest.calls)
    assert len(merged.splits) == len(merged.timelines) - len(
        {(c.agent, c.phase) for c in forest.calls}
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=14))
def test_a_call_that_shares_nothing_was_expected_to_go_on_from_the_last_that_had_ended(
    times: list[tuple[int, int]],
) -> None:
    """Of those that began before it; where none of them had ended when it began, from the last that
    began."""
    calls = [
        call(f"c{i}", [100 + i], [i], at=began).model_copy(
            update={"ended_at": BEGAN + timedelta(seconds=began + lasting)}
        )
        for i, (began, lasting) in enumerate(times)
    ]
    order = sorted(calls, key=lambda c: (c.started_at, c.call_id))
    for split in merge(calls).splits:
        place = next(i for i, c in enumerate(order) if c.call_id == split.call_id)
        before = order[:place][::-1][:8]
        ended = [c for c in before if c.ended_at <= order[place].started_at]
        assert split.parent_call_id == (ended or before)[0].call_id


@pytest.mark.parametrize(("later", "sampled"), [("c", 1), ("c", 9), ("b", 1)])
def test_without_messages_a_prompt_that_only_misses_a_reply_is_no_branch(
    later: str, sampled: int
) -> None:
    """Its tokens go on from an older call, but it shows the whole prompt of the call before it, and
    then another reply.

    Whichever of the two keeps the timeline. One that began before the other cannot have gone on
    from it.
    """
    at = {"b": 1, "c": 2} if later == "c" else {"b": 2, "c": 1}
    a, b = call("a", [1], [2], at=0), call("b", [1, 2, 3], [4, 8], at=at["b"])
    c = call("c", [1, 2, 3, 4, 5], [7] * sampled, at=at["c"])
    (split,) = merge([a, b, c]).splits
    if later == "b":
        assert (split.cause, split.parent_call_id) == ("parallel_branch", "a")
    elif sampled == 1:
        assert (split.call_id, split.cause, split.parent_call_id, split.at_token) == (
            "c",
            "unknown",
            "b",
            4,
        )
    else:
        assert (split.call_id, split.cause, split.parent_call_id, split.at_token) == (
            "b",
            "unknown",
            "a",
            3,
        )


def spans(merged: Merged) -> list[list[str]]:
    return [[s.call_id for s in t.spans] for t in merged.timelines]


def test_two_replies_to_one_prompt_are_both_kept_even_where_they_are_equal() -> None:
    merged = merge(
        [call("a", [1], [2], at=0), call("b", [1], [2], at=1), call("c", [1, 2, 9], [3], at=2)]
    )
    assert spans(merged) == [["a", "c"], ["b"]]
    assert [s.cause for s in merged.splits] == ["parallel_branch"]


def test_a_branch_masks_out_what_another_timeline_trains() -> None:
    merged = merge(
        [
            call("a", [1], [2], at=0),
            call("b", [1, 2, 3], [4, 4], at=1),
            call("c", [1, 2, 5], [6], at=2),
        ]
    )
    assert spans(merged) == [["a", "b"], ["c"]]
    branch = merged.timelines[1]
    assert branch.call_ids == ("a", "c")
    assert branch.token_ids.tolist() == [1, 2, 5, 6]
    assert branch.loss_mask.tolist() == [False, False, False, True]
    (split,) = merged.splits
    assert (split.call_id, split.parent_call_id, split.at_token, split.cause) == (
        "c",
        "a",
        2,
        "parallel_branch",
    )
    assert split.extra_tokens == 3 and split.hint


def test_untrainable_calls_are_context_and_calls_without_ids_are_nothing() -> None:
    judged = call("j", [1, 2, 3], [9], phase="judge")
    unknown = Call(call_id="u", episode_id="e")
    half = Call(call_id="h", episode_id="e", prompt_ids=[1])  # type: ignore[arg-type]
    merged = merge(
        [
            call("a", [1], [2], trainable=False),
            call("b", [1, 2, 3], [4], at=1),
            judged,
            unknown,
            half,
        ]
    )
    assert [t.call_ids for t in merged.timelines if t.spans] == [("a", "b")]
    assert merged.timelines[0].loss_mask.tolist() in ([False, False, False, True], [False] * 4)
    assert not {"u", "h"} & {c for t in merged.timelines for c in t.call_ids}
    assert merge([]) == Merged((), ())


def test_a_call_given_twice_is_one_call() -> None:
    a = call("a", [1], [2])
    assert spans(merge([a, a])) == [["a"]]


def test_a_trainable_call_without_log_probabilities_says_that_they_are_unknown() -> None:
    a = call("a", [1], [2]).model_copy(update={"logprobs": None})
    assert np.isnan(merge([a]).timelines[0].logprobs).tolist() == [False, True]


@pytest.mark.parametrize("n", [3, 40])
def test_splits_without_text_are_unknown(n: int) -> None:
    calls = [call(f"c{i}", [1, 100 + i], [3], at=i) for i in range(n)]
    assert {s.cause for s in merge(calls).splits} == {"unknown"}
    assert {s.at_token for s in merge(calls).splits} == {1}
