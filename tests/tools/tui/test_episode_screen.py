"""The Episode screen on real trace files: each key, what it must survive, and how it looks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Event, Feedback, LedgerEntry, Reward, Run, Task
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.dialogs import TextScreen
from ajet_tools.tui.trace.episode import EpisodeScreen
from ajet_tools.tui.trace.episode_tree import CallTree
from ajet_tools.tui.trace.screen import TraceChanged
from ajet_tools.tui.widgets.long_text import LongText
from ajet_tools.tui.widgets.messages import Messages
from tests.tools.tui.palette import choose
from tests.waiting import until_async, until_shown

NOON = datetime(2026, 1, 2, 12, 0, tzinfo=timezone.utc)
EVIL = (
    "[bold red]not markup[/] :smile: \x1b[31mred\x1b]0;title\x07 \u202eback <answer>7</answer> 你好"
    " 👩‍👩‍👧\ttab"
)
REPLY = """## Result

The product is **391**, because:

1. `17 * 20 = 340`
2. `17 * 3 = 51`

| part | value |
|------|-------|
| sum  | 391   |

```python
print(17 * 23)
```
"""
TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "agent.py", line {n}, in step_{n}\n    return step_{n + 1}(state)\n' for n in range(12)
)
RUN = Run(
    run_id="run-1",
    name="math",
    backbone="local",
    config={"ajet": {"model": {"scripted": "agent.py:replies"}}},
)


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def rendered(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<{m['role']}>{m.get('content') or ''}" for m in messages) + "<assistant>"


def call(episode_id: str, n: int, messages: list[Any], reply: dict[str, Any], **more: Any) -> Call:
    """A call as the gateway records it, the ids being the text's bytes; `seconds` after noon."""
    ids = {} if more.pop("without_ids", False) else _ids(messages, reply, more)
    start = NOON + timedelta(seconds=more.pop("seconds", n))
    fields = {
        "index": n,
        "model": "policy",
        "policy_version": 3,
        "finish_reason": "stop",
        **ids,
        **more,
    }
    return Call(
        call_id=f"{episode_id}-c{n:03}",
        episode_id=episode_id,
        request={"model": "policy", "messages": messages},
        response={"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]},
        started_at=start,
        ended_at=start + timedelta(seconds=0.5),
        **fields,
    )


def _ids(messages: list[Any], reply: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    encode = ByteTokenizer().encode
    prompt, output = (
        more.pop("prompt", rendered(messages)),
        more.pop("output", reply.get("content") or "→"),
    )
    ids = encode(output)
    return {"prompt_ids": encode(prompt), "output_ids": ids, "logprobs": [-0.5] * len(ids)}


def episode(episode_id: str, **more: Any) -> Episode:
    task = Task(task_id="t1", main_query="What is 17 * 23?")
    span = {"started_at": NOON, "ended_at": NOON + timedelta(seconds=4.5)}
    return Episode(
        episode_id=episode_id, run_id="run-1", **{"step": 7, "task": task, **span, **more}
    )


def booked(outcome: Any, *calls: Call) -> list[LedgerEntry]:
    return [
        LedgerEntry(
            run_id="run-1", step=7, episode_id=c.episode_id, call_id=c.call_id, outcome=outcome,
            tokens=0 if c.output_ids is None else len(c.output_ids),
        )
        for c in calls
    ]  # fmt: skip


ASK = [
    {"role": "system", "content": "You calculate."},
    {"role": "user", "content": "What is 17 * 23?"},
]


def with_tools() -> list[Any]:
    """Two calls: a tool that is asked for after some thought, then the answer."""
    first = said(
        "",
        tool_calls=[
            tool_call("t1", "calc", '{"expression": "17*23", "digits": 10, "unit": "none at all"}')
        ],
    )
    first["reasoning_content"] = "I should not guess.\nThe tool knows."
    result = {"role": "tool", "tool_call_id": "t1", "content": '{"value": 391}'}
    one = call("tools01", 0, ASK, first)
    asked = [*ASK, first, result]
    two = call(
        "tools01", 1, asked, said(REPLY), prompt=rendered(ASK) + "→" + "<tool>391<assistant>"
    )
    rewards = (
        Reward(name="exact", value=1.0, reason="391 is the answer"),
        Reward(
            name="style", value=-0.25, weight=0.5, reason="[red]too long[/]", call_id="tools01-c001"
        ),
    )
    ended = episode("tools01", rewards=rewards, group_id="g1", output="391")
    praise = Feedback(
        feedback_id="f1",
        episode_id="tools01",
        call_id="tools01-c001",
        author="ann",
        score=1,
        at=NOON,
    )
    return [one, two, ended, *booked("trained", one, two), praise]


def forked() -> list[Any]:
    """Two agents; the second turn of one shows the first without its thoughts, and one call is made
    twice."""
    thoughtful = said("Four.", reasoning_content="two and two")
    plan = call("fork01", 0, ASK, thoughtful, output="(two and two)Four.")
    more = {"role": "user", "content": "And 3+3?"}
    again = call("fork01", 1, [*ASK, said("Four."), more], said("Six."))
    twin = call("fork01", 2, [*ASK, said("Four."), more], said("Half a dozen."), seconds=1.2)
    check = call(
        "fork01", 3, [{"role": "user", "content": "Is it six?"}], said("Yes."), agent="checker"
    )
    calls = [plan, again, twin, check]
    ended = episode("fork01", group_id="g1", attempt=1, rewards=(Reward(value=0.5),))
    return [*calls, ended, *booked("trained", *calls)]


def observed() -> list[Any]:
    """A deployed agent: no ids, a conversation that branches, and one in another provider's
    form."""
    turn = [*ASK, said("one"), {"role": "user", "content": "next"}]
    calls = [
        call("noids01", 0, ASK, said("one"), without_ids=True),
        call("noids01", 1, turn, said("two"), without_ids=True),
        call("noids01", 2, turn, said("two again"), without_ids=True),
        call(
            "noids01",
            3,
            [{"role": "user", "content": "Something else"}],
            said("three"),
            without_ids=True,
        ),
    ]
    return [*calls, episode("noids01")]


def hostile() -> list[Any]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": EVIL}, image]},
        "not a message",
        {"no": "role"},
        {"role": "[b]x[/b]\x1b[2J", "content": EVIL},
    ]
    reply = said(EVIL + "\n\n# " + EVIL, tool_calls=[tool_call("x", EVIL, EVIL), "not a call"])
    one = call("evil001", 0, messages, reply, without_ids=True, agent=EVIL, model=EVIL)
    bad = {"status": "failed", "error": EVIL, "cause": "RuntimeError"}
    return [one, episode("evil001", rewards=(Reward(value=0.0, name=EVIL, reason=EVIL),), **bad)]


def long(turns: int = 200) -> list[Any]:
    messages, prompt, found = list(ASK), rendered(ASK), list[Any]()
    for n in range(turns):
        reply = said(f"Turn {n}: **bold** and `code`\n\n- one\n- two {n}")
        found.append(call("long001", n, list(messages), reply, prompt=prompt))
        prompt += reply["content"] + f"<user>Go on {n}<assistant>"
        messages += [reply, {"role": "user", "content": f"Go on {n}"}]
    return [*found, episode("long001")]


def huge() -> list[Any]:
    text = "".join(f"line {n} of *many* 你好\n" for n in range(450_000))
    one = call("huge001", 0, [{"role": "user", "content": text}], said(text), without_ids=True)
    return [one, episode("huge001")]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("episodes") / "trace.duckdb"
    failed = call("fail001", 0, ASK, said(""), error="undelivered")
    broken = {
        "status": "failed",
        "error": TRACEBACK + "ValueError: no answer",
        "cause": "ValueError",
    }
    one = call("one0001", 0, ASK, said("391"))
    cut_off = call("cutoff1", 0, ASK, said("391"))
    with TraceWriter(path) as writer:
        writer.put(RUN)
        for records in (with_tools(), forked(), observed(), hostile(), long(), huge()):
            writer.put(*records)
        writer.put(failed, episode("fail001", **broken), *booked("failed", failed))
        writer.put(one, episode("one0001"), episode("none001"), cut_off)
        writer.put(RUN.model_copy(update={"status": "finished"}))
    yield path


@asynccontextmanager
async def opened(
    path: Path, episode_id: str, call_id: str | None = None, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Pilot[None], EpisodeScreen]]:
    app = TraceApp(open_trace(path), path)
    async with app.run_test(size=size) as pilot:
        screen = EpisodeScreen(episode_id, call_id)
        await shows(pilot, screen)
        yield pilot, screen


async def shows(pilot: Pilot[None], screen: EpisodeScreen) -> None:
    """Open a screen and wait until its episode is read."""
    await pilot.pause()
    await pilot.app.push_screen(screen)
    while screen.overview is None:
        await settled(pilot)
    await settled(pilot)


async def settled(pilot: Pilot[None]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def shown(screen: EpisodeScreen) -> str:
    """What the conversation's window shows."""
    messages = screen.query_one(Messages)
    return "\n".join(
        messages.render_line(y).text.replace("▌", " ").rstrip() for y in range(messages.size.height)
    )


def tree(screen: EpisodeScreen) -> list[str]:
    calls = screen.query_one(CallTree)
    return [calls.render_line(y).text.rstrip() for y in range(calls.size.height)]


def facts(screen: EpisodeScreen) -> str:
    return str(screen.query_one("#facts", Static).render())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_it_opens_at_the_beginning_and_says_what_the_episode_was(traced: Path) -> None:
    async with opened(traced, "tools01") as (_, screen):
        assert all(
            part in facts(screen)
            for part in (
                "~ reward 0.875",
                "group [~]",
                "step 7",
                "2 calls",
                "attempt 0 of a group of 2",
            )
        )
        assert "What is 17 * 23?" in facts(screen)
        text = shown(screen)
        for part in (
            "166 tokens trained",
            "exact 1",
            "391 is the answer",
            "You calculate.",
            "→ calc",
            "result of calc",
        ):
            assert part in text, part
        assert (
            "call 0 tools01-c000 · 12:00:00 · 0.50 s · 55 → 3 tokens · stop · policy · version 3 ·"
            " trained" in " ".join(line.strip() for line in text.splitlines())
        )
        assert [line.strip() for line in tree(screen)][:3] == [
            "▌episode  succeeded  reward 0.875", "default timeline 0  241 tok", "0 55 → 3     trained → calc",
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.asyncio
async def test_tools_that_were_called_over_mcp_are_shown(tmp_path: Path) -> None:
    ended = NOON + timedelta(seconds=0.25)
    added = Event(
        name="add", arguments={"a": 1}, result={"isError": False}, started_at=NOON, ended_at=ended
    )
    lost = Event(name="look_up", error="ConnectionError: [gone]", started_at=NOON, ended_at=ended)
    one = call("mcp0001", 0, ASK, said("391"))
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            RUN,
            one,
            episode("mcp0001", events=(added, lost)),
            RUN.model_copy(update={"status": "finished"}),
        )
    async with opened(tmp_path / "trace.duckdb", "mcp0001") as (_, screen):
        text = " ".join(shown(screen).split())
        assert '2 tool calls → add 0.25 s {"a": 1} {"isError": false} → look_up 0.25 s' in text
        assert "ConnectionError: [gone]" in text


@pytest.mark.slow
@pytest.mark.asyncio
async def test_markdown_is_laid_out_and_m_shows_it_as_written(traced: Path) -> None:
    async with opened(traced, "tools01", "tools01-c001") as (pilot, screen):
        assert "## Result" not in shown(screen) and "1. 17 * 20 = 340" in shown(screen)
        await choose(pilot, "Markdown or as written")
        assert "## Result" in shown(screen) and "1. `17 * 20 = 340`" in shown(screen)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_reasoning_is_folded_until_space(traced: Path) -> None:
    async with opened(traced, "tools01") as (pilot, screen):
        assert "reasoning, 2 lines" in shown(screen) and "The tool knows." not in shown(screen)
        await pilot.press(*"jjjjj", "u")
        assert (
            screen.messages.chosen is not None
            and screen.messages.chosen.key == "tools01-c000/reply0"
        )
        assert "The tool knows." in shown(screen)
        await pilot.press("u")
        assert "The tool knows." not in shown(screen)
        await choose(pilot, "Unfold all reasoning")
        assert "The tool knows." in shown(screen)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_from_message_to_message_and_call_to_call(traced: Path) -> None:
    async with opened(traced, "tools01") as (pilot, screen):

        async def after(*keys: str) -> str:
            await pilot.press(*keys)
            assert screen.messages.chosen is not None
            line = next(line for line in tree(screen) if line.startswith("▌"))
            return f"{screen.messages.chosen.key} {line[1:8].strip()}"

        assert await after("j", "j", "j") == "tools01-c000/0 0 55"
        assert await after("k") == "output episode"
        screen.call_tree.focus()
        await pilot.press("home", "down")
        assert await after("down") == "tools01-c000/0 0 55"
        assert await after("down") == "tools01-c001/3 1 78"
        assert await after("down") == "tools01-c001/3 1 78", "the last call stays"
        assert await after("up") == "tools01-c000/0 0 55"
        screen.messages.focus()
        assert await after("end") == "tools01-c001/reply0 1 78"
        assert await after("home") == "about episode"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_tree_leads_the_conversation(traced: Path) -> None:
    async with opened(traced, "fork01") as (pilot, screen):
        screen.call_tree.focus()
        await pilot.press("down", "down", "down", "down")
        assert (
            screen.messages.chosen is not None and screen.messages.chosen.key == "fork01-c001/fork"
        )
        await pilot.press("end")
        assert "Is it six?" in shown(screen) and "Half a dozen" not in shown(screen)
        await pilot.press("home")
        assert screen.messages.chosen.key == "about"
        await pilot.click(CallTree, offset=(8, 2))
        assert screen.messages.chosen.call_id == "fork01-c000"
        await pilot.press("enter")
        assert screen.messages.has_focus


@pytest.mark.slow
@pytest.mark.asyncio
async def test_forks_say_where_they_part_why_and_what_they_cost(traced: Path) -> None:
    async with opened(traced, "fork01") as (pilot, screen):
        assert any("think_stripped at 55 +85 tok" in line for line in tree(screen))
        await pilot.press("b")
        text = " ".join(shown(screen).split())
        for part in (
            "fork: think_stripped",
            "the first token that differs is 55",
            "id 40, '(two a'",
            "85 more tokens",
            "Earlier reasoning",
        ):
            assert part in text, part
        await pilot.press("b")
        assert "fork: parallel_branch" in shown(screen) and "Half a dozen." in shown(screen)
        await pilot.press("b")
        assert "new" not in facts(screen), "another branch is no news"
        assert "fork: parallel_branch" in shown(screen), "the last one stays"
        await pilot.press("N")
        assert "fork: think_stripped" in shown(screen), "backwards, as the last jump was to a fork"
        await pilot.press("n")
        assert "fork: parallel_branch" in shown(screen)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_without_a_tokenizer_a_fork_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.duckdb"
    asked = [{"role": "user", "content": "hi"}]
    again = [*asked, said("a b"), {"role": "user", "content": "go on"}]
    with TraceWriter(path) as writer:
        writer.put(RUN.model_copy(update={"config": {"ajet": {"model": {"path": "org/model"}}}}))
        writer.put(
            call("e", 0, asked, said("a b"), output=" a b"),
            call("e", 1, again, said("ok")),
            episode("e"),
        )
    async with opened(path, "e") as (pilot, screen):
        await pilot.press("b")
        text = " ".join(shown(screen).split())
        assert "fork: unknown" in text and "There is no tokenizer" in text and "org/model" in text


@pytest.mark.slow
@pytest.mark.asyncio
async def test_keys_that_lead_elsewhere(traced: Path) -> None:
    from ajet_tools.tui.trace.compare import CompareScreen
    from ajet_tools.tui.trace.dialogs import FeedbackScreen
    from ajet_tools.tui.trace.tokens import TokensScreen

    async with opened(traced, "tools01", "tools01-c001") as (pilot, screen):
        await pilot.press("t")
        tokens = pilot.app.screen
        assert isinstance(tokens, TokensScreen) and tokens.episode_id == "tools01"
        await settled(pilot)
        await pilot.press("escape", "f")
        assert isinstance(pilot.app.screen, FeedbackScreen)
        await settled(pilot)
        await pilot.press("escape", "g")
        await settled(pilot)
        assert isinstance(pilot.app.screen, CompareScreen)
        await pilot.press("escape")
        assert pilot.app.screen is screen


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_json_of_a_call(traced: Path) -> None:
    async with opened(traced, "tools01", "tools01-c001") as (pilot, screen):
        await pilot.press("r")
        await settled(pilot)
        whole = pilot.app.screen
        assert isinstance(whole, TextScreen)
        text = whole.query_one(LongText).text
        assert (
            text.startswith('request\n{\n  "messages"')
            and "response\n{" in text
            and "## Result" in text
        )
        await pilot.press("slash", *"finish_reason", "enter", "n", "y")
        assert pilot.app.clipboard == text
        await pilot.press("escape")
        assert pilot.app.screen is screen


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_next_attempt_of_the_group(traced: Path) -> None:
    async with opened(traced, "tools01") as (pilot, _):
        await choose(pilot, "Next attempt")
        await settled(pilot)
        other = pilot.app.screen
        assert (
            isinstance(other, EpisodeScreen)
            and other.episode_id == "fork01"
            and "attempt 1" in facts(other)
        )
        await choose(pilot, "Next attempt")
        await choose(pilot, "Previous attempt")
        await settled(pilot)
        assert (
            isinstance(pilot.app.screen, EpisodeScreen) and pilot.app.screen.episode_id == "tools01"
        )


@pytest.mark.slow
@pytest.mark.asyncio
async def test_search_in_every_branch(traced: Path) -> None:
    async with opened(traced, "fork01") as (pilot, screen):
        await pilot.press("slash", *"HALF A", "enter")
        await settled(pilot)
        assert (
            screen.messages.chosen is not None
            and screen.messages.chosen.key == "fork01-c002/reply0"
        )
        assert not screen.query_one(Input).has_focus
        await pilot.press("slash", *(["backspace"] * 6), *"two and", "enter")
        await settled(pilot)
        assert screen.messages.chosen.key == "fork01-c000/reply0"
        assert "two and two" in shown(screen), "what was found in folded reasoning is unfolded"
        await pilot.press("slash", *(["backspace"] * 7), *"six", "enter")
        await settled(pilot)
        seen = [screen.messages.chosen.key]
        for key in ("n", "n", "N"):
            await pilot.press(key)
            seen.append(screen.messages.chosen.key)
        assert (
            set(seen) == {"fork01-c001/reply0", "fork01-c003/0"}
            and seen[0] == seen[2] != seen[1] == seen[3]
        )


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_search_that_finds_nothing_says_so(traced: Path) -> None:
    async with opened(traced, "fork01") as (pilot, screen):
        await pilot.press("slash", *"nowhere", "enter")
        await settled(pilot)
        assert "nowhere is not in this episode" in "".join(
            str(s.render()) for s in screen.query("Prompt Static")
        )
        await pilot.press("escape", "n")
        assert screen.messages.has_focus and pilot.app.screen is screen


@pytest.mark.slow
@pytest.mark.asyncio
async def test_copy(traced: Path) -> None:
    async with opened(traced, "tools01") as (pilot, _):
        await pilot.press("end", "y")
        assert pilot.app.clipboard.startswith(REPLY)
        await choose(pilot, "Copy the episode's id")
        assert pilot.app.clipboard == "tools01"
        await choose(pilot, "Play again: copy the command that samples from this call")
        assert pilot.app.clipboard == f"ajet trace branch tools01 {traced} --at tools01-c001"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_failed_episode_shows_its_traceback(traced: Path) -> None:
    async with opened(traced, "fail001") as (pilot, screen):
        assert "ValueError: no answer" in facts(screen)
        assert "error: ValueError" in shown(
            screen
        ) and 'File "agent.py", line 11, in step_11' in shown(screen)
        await pilot.press("end")
        assert "no reply" in shown(screen) and "undelivered" in shown(screen)


@pytest.mark.asyncio
async def test_an_observed_episode_has_a_tree_but_no_tokens(traced: Path) -> None:
    async with opened(traced, "noids01") as (pilot, screen):
        assert [line.strip().split("  ")[0] for line in tree(screen)[1:7]] == [
            "default no token ids", "0", "↳ parallel_branch at 3", "2", "1", "↳ new_conversation at 0",
        ]  # fmt: skip
        await pilot.press("j", "j", "j", "t")
        assert pilot.app.screen is screen


@pytest.mark.slow
@pytest.mark.asyncio
async def test_hostile_text_is_shown_as_text(traced: Path) -> None:
    async with opened(traced, "evil001") as (pilot, screen):
        for _ in range(3):
            text = "\n".join([shown(screen), *tree(screen), facts(screen)])
            assert (
                not set(text) & set("\x1b\x07\u202e")
                and "[bold red]not markup[/] :smile: \\x1b[31mred" in text
            )
            await pilot.press("pagedown")
        assert "<answer>7</answer>" in shown(screen)
        for widget in (screen.messages, screen.call_tree):
            assert {widget.render_line(y).cell_length for y in range(widget.size.height)} == {
                widget.size.width
            }


@pytest.mark.slow
@pytest.mark.asyncio
async def test_one_call_none_and_unknown(traced: Path) -> None:
    async with opened(traced, "one0001") as (pilot, screen):
        assert "1 call" in facts(screen)
        await pilot.press("j", "j", "j", "b", "g")
    async with opened(traced, "none001") as (pilot, screen):
        assert "the episode made no call" in facts(screen)
        await pilot.press("j", "b", "t", "r", "n", "u", "end", "tab", "down")
        assert pilot.app.screen is screen
    async with opened(traced, "nothing") as (_, screen):
        assert "The trace has no episode with this id" in shown(screen)
    async with opened(traced, "cutoff1") as (_, screen):
        assert "cut off" in facts(screen) and "391" in shown(screen)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_episode_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.duckdb"
    records = long(30)
    with TraceWriter(path, flush_ms=5) as writer:
        writer.put(RUN, *records[:10])
    async with opened(path, "long001") as (pilot, screen):
        await pilot.press("pagedown", "j")
        place, chosen = screen.messages.scroll_offset, screen.messages.chosen
        text = shown(screen)
        assert chosen is not None and place.y > 0 and "cut off" in facts(screen)
        with TraceWriter(path) as writer:
            writer.put(*records[10:])
        for _ in range(3):
            screen.post_message(TraceChanged())
        await until_shown(pilot, lambda: "30 calls" in facts(screen))
        assert "succeeded" in facts(screen)
        now = screen.messages.chosen
        assert now is not None and now.key == chosen.key and len(tree(screen)) >= 30
        assert [line for line in shown(screen).splitlines() if "Turn" in line] == [
            line for line in text.splitlines() if "Turn" in line
        ], "the reader's place stays"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_at_the_end_it_follows_and_elsewhere_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.duckdb"
    records = long(30)

    async def grow(screen: EpisodeScreen, start: int, stop: int) -> None:
        with TraceWriter(path) as writer:
            writer.put(*records[start:stop])
        screen.post_message(TraceChanged())
        await until_async(lambda: f"{stop} calls" in facts(screen))

    with TraceWriter(path, flush_ms=5) as writer:
        writer.put(RUN, *records[:10])
    async with opened(path, "long001") as (pilot, screen):
        await pilot.press("end")
        await grow(screen, 10, 11)
        assert screen.messages.cursor == len(screen.messages.blocks) - 1 and "Turn 10" in shown(
            screen
        )
        assert "new" not in facts(screen)
        await pilot.press("home")
        at = screen.messages.scroll_offset
        await grow(screen, 11, 12)
        await grow(screen, 12, 13)
        assert screen.messages.cursor == 0 and screen.messages.scroll_offset == at
        assert "4 messages new" in facts(screen), "two results of tools, two replies"
        await pilot.press("end")
        await until_shown(pilot, lambda: "Turn 12" in shown(screen) and "new" not in facts(screen))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_long_episode_opens_at_once_and_every_line_of_it_is_reached(traced: Path) -> None:
    async with opened(traced, "long001", size=(100, 40)) as (pilot, _):
        began = time.process_time()
        pilot.app.push_screen(again := EpisodeScreen("long001", "long001-c199"))
        while again.overview is None:
            await asyncio.sleep(0.005)
        assert time.process_time() - began < 5, (
            "the figure is in the benchmark; this only finds what is quadratic"
        )
        await settled(pilot)
        assert "Turn 199" in shown(again)
        again.messages.focus()
        await pilot.press("home")
        down = [turns(again)]
        while again.messages.scroll_offset.y < again.messages.max_scroll_y and len(down) < 200:
            again.messages.action_page_down()
            down.append(turns(again))
        up = [turns(again)]
        while again.messages.scroll_offset.y > 0 and len(up) < 200:
            again.messages.action_page_up()
            up.append(turns(again))
        assert set().union(*down) == set().union(*up) == set(range(200)), (
            "no turn is skipped on either way"
        )


def turns(screen: EpisodeScreen) -> set[int]:
    """The turns whose last line is in sight."""
    return {int(n) for n in re.findall(r"• two (\d+)$", shown(screen), re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_message_of_megabytes_is_cut_and_opened_whole(traced: Path) -> None:
    async with opened(traced, "huge001") as (pilot, screen):
        await pilot.press("j", "j")
        text, pages = "", 0
        while "more characters; enter opens it whole" not in text and pages < 40:
            await pilot.press("pagedown")
            text, pages = shown(screen), pages + 1
        assert "more characters; enter opens it whole" in text
        await pilot.press("home", "j", "enter")
        await settled(pilot)
        whole = pilot.app.screen.query_one(LongText)
        assert len(whole.text) > 10_000_000
        await pilot.press("end")
        last = "line 449999 of *many* 你好"
        await until_shown(
            pilot, lambda: any(last in whole.render_line(y).text for y in range(whole.size.height))
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (60, 15)])
@pytest.mark.asyncio
async def test_a_small_terminal(traced: Path, size: tuple[int, int]) -> None:
    async with opened(traced, "tools01", size=size) as (pilot, screen):
        assert screen.messages.size.height >= 5 and screen.call_tree.size.height >= 2
        await pilot.press("end", "home")
        assert "episode succeeded" in shown(screen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("episode_id", "keys", "size"),
    [
        ("tools01", ["j", "j", "j"], (80, 24)),
        ("fork01", ["b"], (120, 40)),
        ("fail001", [], (80, 24)),
        ("evil001", ["j", "j", "j"], (120, 40)),
    ],
    ids=["tools", "fork", "failed", "hostile"],
)
def test_pictures(
    traced: Path, snap_compare: Any, episode_id: str, keys: list[str], size: tuple[int, int]
) -> None:
    async def before(pilot: Pilot[None]) -> None:
        await shows(pilot, EpisodeScreen(episode_id))
        await pilot.press(*keys)
        await settled(pilot)

    assert snap_compare(TraceApp(open_trace(traced), traced), terminal_size=size, run_before=before)
