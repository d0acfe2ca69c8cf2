"""Each call stands in the tree once, each fork says why, and a call without ids stands where its
messages say."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from typing import Any

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.samples.timelines import merge
from ajet_sdk.types import Call
from ajet_tools.trace.episode.tree import Branch, EpisodeTree, episode_tree

NOON = datetime(2026, 1, 2, tzinfo=timezone.utc)


def call(id: str, prompt: str | None = None, output: str = "", at: float = 0, **more: Any) -> Call:
    encode = ByteTokenizer().encode
    ids = {} if prompt is None else {"prompt_ids": encode(prompt), "output_ids": encode(output)}
    start = NOON + timedelta(seconds=at)
    return Call(
        call_id=id,
        episode_id="e",
        started_at=start,
        ended_at=start + timedelta(seconds=0.5),
        **ids,
        **more,
    )


def plain(id: str, messages: list[str], reply: str | None, at: float = 0, **more: Any) -> Call:
    """A call without ids; messages are `role text`."""
    asked = [dict(zip(("role", "content"), m.split(" ", 1), strict=True)) for m in messages]
    response = (
        {} if reply is None else {"choices": [{"message": {"role": "assistant", "content": reply}}]}
    )
    return call(id, at=at, request={"messages": asked}, response=response, **more)


def shape(tree: EpisodeTree) -> list[str]:
    """The rows, with their depth as dots."""
    return [f"{'.' * row.depth}{row.call_id or f'#{row.branch}'}" for row in tree.rows()]


def holds(tree: EpisodeTree, calls: list[Call]) -> None:
    """The laws of a tree."""
    ids = sorted({c.call_id for c in calls})
    assert sorted(tree.call_order()) == ids, "each call is shown exactly once"
    assert sorted(c for branch in tree.branches for c in branch.calls) == ids
    assert sorted(row.branch for row in tree.rows() if row.call_id is None) == [
        b.number for b in tree.branches
    ]
    for branch in tree.branches:
        assert branch.calls and not set(branch.calls) & set(branch.trunk)
        assert branch.after is None or tree.branch_of[branch.after] == branch.parent
        assert all(tree.branch_of[call_id] == branch.number for call_id in branch.calls)


def test_one_timeline() -> None:
    calls = [call("a", "u", "x"), call("b", "uxv", "y", 1)]
    tree = episode_tree(calls)
    holds(tree, calls)
    assert shape(tree) == ["#0", "a", "b"]
    (branch,) = tree.branches
    assert (branch.timeline, branch.tokens, branch.trained, branch.fork) == (0, 4, 2, None)
    assert tree.spans == {"a": (0, 1, 2), "b": (0, 3, 4)}


def test_a_fork_says_where_why_and_what_it_costs() -> None:
    calls = [call("a", "ask", "(hm)x"), call("b", "askx!", "y", 1), call("c", "askx!y?", "z", 2)]
    tree = episode_tree(calls, ByteTokenizer().decode)
    holds(tree, calls)
    assert shape(tree) == [
        "#0",
        "a",
        "#1",
        "b",
        "c",
    ], "what follows a last call goes on at its depth"
    fork = tree.branches[1].fork
    assert fork is not None and (fork.parent_call_id, fork.at, fork.unit, fork.extra_tokens) == (
        "a",
        3,
        "token",
        5,
    )
    assert fork.cause == merge(calls, ByteTokenizer().decode).splits[0].cause and fork.hint
    assert fork.expected == f"id {ord('(')}, '(hm)x'" and fork.actual == f"id {ord('x')}, 'x!'"
    assert episode_tree(calls).branches[1].fork.actual == f"id {ord('x')}"  # type: ignore[union-attr]


def test_branches_of_one_call_stand_behind_it() -> None:
    calls = [
        call("a", "u", "x"),
        call("b", "ux1", "yyyy", 1),
        call("c", "ux2", "z", 2),
        call("d", "ux1yyyy", "w", 3),
    ]
    tree = episode_tree(calls)
    holds(tree, calls)
    assert shape(tree) == ["#0", "a", ".#1", ".c", "b", "d"]
    assert tree.branches[1].chain == ("a", "c") and tree.branches[1].trunk == ("a",)


def test_agents_and_judges_stand_apart() -> None:
    calls = [
        call("a", "u", "x"),
        call("b", "ux", "y", 1, agent="other"),
        call("c", "ux", "y", 2, phase="judge"),
    ]
    tree = episode_tree(calls)
    holds(tree, calls)
    assert [(b.agent, b.phase, b.calls) for b in tree.branches] == [
        ("default", "rollout", ("a",)), ("other", "rollout", ("b",)), ("default", "judge", ("c",)),
    ]  # fmt: skip
    assert not any(b.fork for b in tree.branches)


def test_calls_without_ids_stand_where_their_messages_say() -> None:
    start = ["system s", "user q"]
    calls = [
        plain("a", start, "x"),
        plain("b", [*start, "assistant x", "user r"], "y", 1),
        plain("b2", [*start, "assistant x", "user r"], "z", 2),
        plain("c", [*start, "assistant x", "user r", "assistant y", "user t"], "w", 3),
        plain("new", ["user other"], "o", 4),
        plain("edited", ["system S", "user q", "assistant x", "user r"], "v", 5),
    ]
    tree = episode_tree(calls)
    holds(tree, calls)
    assert shape(tree) == ["#0", "a", ".#1", ".b2", "b", "c", "#2", "new", "#3", "edited"]
    causes = {b.calls[0]: (b.fork.cause, b.fork.at, b.fork.unit) for b in tree.branches if b.fork}
    assert causes["b2"] == ("parallel_branch", 3, "message")
    assert causes["new"][0] == "new_conversation" and causes["edited"][0] in (
        "system_changed",
        "new_conversation",
    )
    assert tree.branches[1].trunk == ("a",) and tree.spans == {}


def test_a_call_that_names_an_earlier_response_goes_on_from_it() -> None:
    one = call("a", request={"input": "hi"}, response={"id": "resp_1", "output": []})
    two = call(
        "b",
        at=1,
        request={"input": "go on", "previous_response_id": "resp_1"},
        response={"id": "resp_2"},
    )
    assert shape(episode_tree([one, two])) == ["#0", "a", "b"]


def test_a_call_that_failed_stands_behind_the_one_it_went_on_from() -> None:
    asked = {"messages": [{"role": "user", "content": "u"}]}
    said = {"role": "assistant", "content": "x"}
    ok = call("a", "u", "x", request=asked, response={"choices": [{"message": said}]})
    longer = {"messages": [*asked["messages"], said, {"role": "user", "content": "too long"}]}
    bad = call("b", at=1, request=longer, error="the prompt is too long")
    tree = episode_tree([ok, bad])
    holds(tree, [ok, bad])
    assert shape(tree) == ["#0", "a", "#1", "b"] and tree.branches[1].chain == ("a", "b")
    assert tree.branches[1].timeline is None


def test_malformed_messages_have_a_place_too() -> None:
    odd = [{"role": "assistant", "tool_calls": ["x"]}, "text", 7, None]
    calls = [call(f"c{n}", request={"messages": odd[: n + 1]}, at=n) for n in range(4)]
    calls += [call("d", request={"messages": "no list"}, at=5), call("e", request={}, at=6)]
    holds(episode_tree(calls), calls)


def test_laws_of_random_episodes() -> None:
    rng = random.Random(3)
    for _ in range(150):
        calls, texts = list[Call](), ["q"]
        for n in range(rng.randint(0, 12)):
            prompt = rng.choice(texts)[: rng.randint(1, 12)] + rng.choice(("", "u", "v"))
            output = rng.choice(("x", "yy", ""))
            texts.append(prompt + output)
            asked = {"messages": [{"role": "user", "content": c} for c in prompt]}
            said = {"choices": [{"message": {"role": "assistant", "content": output}}]}
            agent, at = rng.choice(("a", "a", "b")), rng.choice((n, n, 0))
            shown = prompt if rng.random() < 0.7 else None
            calls.append(
                call(f"c{n}", shown, output, at, agent=agent, request=asked, response=said)
            )
        rng.shuffle(calls)
        tree = episode_tree(calls)
        holds(tree, calls)
        own: list[Branch] = [b for b in tree.branches if b.timeline is not None]
        merged = merge(calls)
        assert [b.chain for b in own] == [t.call_ids for t in merged.timelines]
        assert {b.fork.call_id for b in own if b.fork} == {s.call_id for s in merged.splits}
        for call_id, (timeline, start, end) in tree.spans.items():
            known = next(c for c in calls if c.call_id == call_id)
            assert (
                merged.timelines[timeline].token_ids[start:end].tolist()
                == known.output_ids.tolist()
            )


def test_a_long_chain_of_forks_is_no_deep_recursion() -> None:
    calls = [call(f"c{n}", f"{n} prompt", "x", n) for n in range(1500)]
    tree = episode_tree(calls)
    holds(tree, calls)
    assert len(tree.branches) == 1500
