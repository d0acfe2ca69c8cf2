"""Replays of real episodes, made by real runs on the scripted engine: the same calls, and every way to differ."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import QueryError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run, Task
from ajet_tools.trace.compare.requests import compare, requests_of
from ajet_tools.trace.rerun.replay import Replay, recorded_episode, replay
from tests.serving import replying, serving
from tests.waiting import FOREVER

TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


def config(**rollout: Any) -> Config:
    return load_config(values={"ajet": {"backbone": "debug", "rollout": rollout}})


@ajet.judge
def one() -> float:
    return 1.0


def record(
    path: Path, workflow: Any, replies: Any, *, task: Task | None = None, settings: Config | None = None
) -> Episode:
    """Run a workflow once on the scripted engine, and read its episode back from the trace."""
    settings = settings or config()

    async def go() -> Episode:
        with TraceWriter(path / "trace.duckdb") as writer, Gateway(writer) as gateway:
            writer.put(Run(run_id="r", backbone="debug", status="finished"))
            engine = ScriptedEngine(replies)
            attempt = Attempt(task or Task(main_query="go"), run_id="r", attempt=2)
            return await run_episode(
                workflow, one, attempt, engine=engine, gateway=gateway, config=settings, writer=writer
            )

    episode = asyncio.run(go())
    return recorded_episode(open_trace(path), episode.episode_id)


def again(recorded: Episode, workflow: Any, timeout: float = 20.0, **options: Any) -> Replay:
    return asyncio.run(replay(recorded, workflow, config(), timeout=timeout, **options))


def echo(ask: Ask) -> str:
    return f"re: {ask.body['messages'][-1]['content']}"


@ajet.workflow
async def two_turns(task: Task, model: ajet.Model) -> str:
    first = await model.chat([{"role": "user", "content": task.main_query}])
    history = [{"role": "user", "content": task.main_query}, dict(first), {"role": "user", "content": "and?"}]
    return str((await model.chat(history, temperature=0.5))["content"])


def test_the_same_workflow_makes_the_same_calls_and_nothing_is_written(tmp_path: Path) -> None:
    recorded = record(tmp_path, two_turns, echo)
    before = hashlib.sha256((tmp_path / "trace.duckdb").read_bytes()).hexdigest()
    result = again(recorded, two_turns)
    assert result.same and result.same_output and result.differences == ()
    assert (result.requests, result.requests_now) == (2, 2)
    assert result.replayed.output == "re: and?" and result.replayed.attempt == 2
    for then, now in zip(recorded.calls, result.replayed.calls, strict=True):
        assert then.output_ids is not None and now.output_ids is not None
        assert then.output_ids.tolist() == now.output_ids.tolist() and then.logprobs is not None
    assert hashlib.sha256((tmp_path / "trace.duckdb").read_bytes()).hexdigest() == before
    assert [p.name for p in tmp_path.iterdir()] == ["trace.duckdb"]


def test_a_changed_prompt_is_shown_where_it_differs_and_the_rest_is_seen_too(tmp_path: Path) -> None:
    recorded = record(tmp_path, two_turns, echo)

    @ajet.workflow
    async def other(task: Task, model: ajet.Model) -> str:
        first = await model.chat([{"role": "user", "content": "stop"}])
        history = [{"role": "user", "content": "stop"}, dict(first), {"role": "user", "content": "and?"}]
        return str((await model.chat(history, temperature=0.5))["content"])

    result = again(recorded, other)
    assert not result.same and result.error is None
    assert [(d.kind, d.position, d.parts) for d in result.differences] == [
        ("changed", 0, ("messages",)),
        ("changed", 1, ("messages",)),
    ]
    assert [line for line in result.differences[0].lines if line[0] in "-+"] == ["-  go", "+  stop"]
    assert result.differences[0].call_id == recorded.calls[0].call_id
    assert result.replayed.output == "re: and?", "it is answered as the most alike, so that it goes on"


def test_a_changed_parameter_and_changed_tools(tmp_path: Path) -> None:
    @ajet.workflow
    async def agent(task: Task, model: ajet.Model) -> str:
        return str((await model.chat([{"role": "user", "content": "x"}], tools=tools, temperature=heat))["content"])

    tools, heat = [TOOL], 0.2
    recorded = record(tmp_path, agent, ["fine"])
    assert again(recorded, agent).same
    heat = 0.9
    [difference] = again(recorded, agent).differences
    assert difference.parts == ("temperature",)
    assert [line for line in difference.lines if line[0] in "-+"] == ["-temperature: 0.2", "+temperature: 0.9"]
    heat, tools = 0.2, [{**TOOL, "function": {**TOOL["function"], "name": "calc2"}}]
    [difference] = again(recorded, agent).differences
    assert difference.parts == ("tools",) and any('"calc2"' in line for line in difference.lines if line[0] == "+")


def test_extra_and_missing_calls(tmp_path: Path) -> None:
    @ajet.workflow
    async def agent(task: Task, model: ajet.Model) -> int:
        for number in range(turns):
            await model.chat([{"role": "user", "content": f"turn {number}"}])
        return turns

    turns = 2
    recorded = record(tmp_path, agent, echo)
    turns = 1
    result = again(recorded, agent)
    assert [(d.kind, d.position, d.lines[-1]) for d in result.differences] == [("missing", 1, "-  turn 1")]
    assert not result.same and result.error is None and not result.same_output
    turns = 3
    result = again(recorded, agent)
    assert [(d.kind, d.position, d.lines[-1]) for d in result.differences] == [("extra", 2, "+  turn 2")]
    assert result.differences[0].call_id is None
    assert "made a call that was not recorded" in (result.error or "")


def test_parallel_agents_are_matched_by_what_they_ask(tmp_path: Path) -> None:
    order = [0, 1, 2, 3]

    @ajet.workflow
    async def crowd(task: Task, model: ajet.Model) -> list[str]:
        async def ask(number: int) -> str:
            await asyncio.sleep(0.03 * order.index(number))
            agent = model.agent("left" if number % 2 else "right")
            return str((await agent.chat([{"role": "user", "content": f"n{number}"}]))["content"])

        return list(await asyncio.gather(*map(ask, range(4))))

    recorded = record(tmp_path, crowd, echo)
    order.reverse()
    result = again(recorded, crowd)
    assert result.same and result.replayed.output == [f"re: n{i}" for i in range(4)]
    assert {c.agent for c in result.replayed.calls} == {"left", "right"}


def test_equal_requests_at_once_get_one_recording_each(tmp_path: Path) -> None:
    said = iter(["a", "b", "c"])

    @ajet.workflow
    async def votes(task: Task, model: ajet.Model) -> list[str]:
        replies = await asyncio.gather(*(model.chat([{"role": "user", "content": "vote"}]) for _ in range(3)))
        return sorted(str(reply["content"]) for reply in replies)

    recorded = record(tmp_path, votes, lambda ask: next(said))
    result = again(recorded, votes)
    assert result.same and result.replayed.output == ["a", "b", "c"]


def test_a_call_that_only_looks_like_another_does_not_take_its_recording(tmp_path: Path) -> None:
    @ajet.workflow
    async def pair(task: Task, model: ajet.Model) -> list[str]:
        async def ask(text: str, pause: float) -> str:
            await asyncio.sleep(pause)
            return str((await model.chat([{"role": "user", "content": text}]))["content"])

        return list(await asyncio.gather(ask("first", pauses[0]), ask(second, pauses[1])))

    pauses, second = (0.0, 0.1), "second"
    recorded = record(tmp_path, pair, echo)
    pauses, second = (0.2, 0.0), "changed"
    result = again(recorded, pair)
    [difference] = result.differences
    assert (difference.kind, difference.position) == ("changed", 1)
    assert [line for line in difference.lines if line[0] in "-+"] == ["-  second", "+  changed"]
    assert result.replayed.output[0] == "re: first", "it is still there for the one whose it is"


def test_an_agent_that_goes_by_another_name(tmp_path: Path) -> None:
    @ajet.workflow
    async def agent(task: Task, model: ajet.Model) -> str:
        return str((await model.agent(name).chat([{"role": "user", "content": "x"}]))["content"])

    name = "wolf"
    recorded = record(tmp_path, agent, ["aw"])
    name = "sheep"
    result = again(recorded, agent)
    assert [d.parts for d in result.differences] == [("agent",)] and result.replayed.output == "aw"


def test_choices_streams_tools_and_logprobs_come_back_as_they_were(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"e": 1}'}}

    @ajet.workflow
    async def rich(task: Task, model: ajet.Model) -> dict[str, Any]:
        client = model.async_openai()
        several = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "many"}], n=3, logprobs=True
        )
        stream = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "long"}], stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        tool = await model.chat([{"role": "user", "content": "tool"}], tools=[TOOL])
        plain = await client.completions.create(model=model.name, prompt="once upon")
        entries = several.choices[1].logprobs
        return {
            "several": [choice.message.content for choice in several.choices],
            "bytes": [t.bytes for t in entries.content or []] if entries else None,
            "stream": "".join(pieces),
            "tool": tool["tool_calls"],
            "plain": plain.choices[0].text,
        }

    def replies(ask: Ask) -> Any:
        if ask.route == "completions":
            return " a time"
        last = ask.body["messages"][-1]["content"]
        by_text: dict[str, Any] = {
            "many": ["x", "yé", "z"],
            "long": "word " * 40,
            "tool": {"role": "assistant", "content": "", "tool_calls": [call]},
        }
        return by_text[last]

    recorded = record(tmp_path, rich, replies)
    assert recorded.status == "succeeded", recorded.error
    result = again(recorded, rich)
    assert result.same and result.same_output, (result.error, result.replayed.output)
    assert result.replayed.output["several"] == ["x", "yé", "z"] and result.requests == 4


def test_a_request_that_failed_fails_again(tmp_path: Path) -> None:
    @ajet.workflow
    async def stubborn(task: Task, model: ajet.Model) -> str:
        try:
            await model.chat([{"role": "user", "content": "break"}])
        except ajet.AjetError:
            return str((await model.chat([{"role": "user", "content": "mend"}]))["content"])
        return "unbroken"

    def replies(ask: Ask) -> str:
        if ask.body["messages"][-1]["content"] == "break":
            raise ajet.errors.RequestRefused("no such thing")
        return "mended"

    recorded = record(tmp_path, stubborn, replies)
    assert recorded.output == "mended" and recorded.calls[0].error
    result = again(recorded, stubborn)
    assert not result.differences and result.replayed.output == "mended"


def test_a_call_whose_client_did_not_wait_is_waited_for_in_vain_again(tmp_path: Path) -> None:
    @ajet.workflow
    async def hasty(task: Task, model: ajet.Model) -> str:
        async with httpx.AsyncClient(trust_env=False, base_url=model.base_url) as client:
            headers = {"authorization": f"Bearer {model.api_key}"}
            body = {"model": model.name, "messages": [{"role": "user", "content": "same"}]}
            try:
                await client.post("/chat/completions", json=body, headers=headers, timeout=0.3)
            except httpx.ReadTimeout:
                reply = await client.post("/chat/completions", json=body, headers=headers, timeout=300)
                return str(reply.json()["choices"][0]["message"]["content"])
        return "at once"

    asked: list[Ask] = []

    def replies(ask: Ask) -> str:
        asked.append(ask)
        if len(asked) == 1:
            time.sleep(1.5)
        return "at last"

    recorded = record(tmp_path, hasty, replies)
    by_start = sorted(recorded.calls, key=lambda c: c.started_at)
    assert [c.error for c in by_start] == ["undelivered", None] and recorded.output == "at last"
    result = again(recorded, hasty)
    assert result.same and result.replayed.output == "at last"


def test_a_workflow_class(tmp_path: Path) -> None:
    class Agent(ajet.Workflow):
        async def execute(self, workflow_task: Any, tuner: Any) -> Any:
            client = tuner.as_raw_openai_sdk_client()
            messages = workflow_task.task.init_messages
            reply = await client.chat.completions.create(model="any", messages=messages)
            return ajet.WorkflowOutput(reward=0.5, metadata={"final_answer": reply.choices[0].message.content})

    recorded = record(tmp_path, Agent, echo)
    assert recorded.status == "succeeded", recorded.error
    result = again(recorded, Agent)
    assert result.same and result.same_output and result.replayed.output["metadata"] == {"final_answer": "re: go"}


def test_a_workflow_that_raises_or_hangs_now(tmp_path: Path) -> None:
    recorded = record(tmp_path, two_turns, echo)

    @ajet.workflow
    async def raises(task: Task, model: ajet.Model) -> str:
        raise KeyError("lost")

    result = again(recorded, raises)
    assert "KeyError: 'lost'" in (result.error or "") and not result.same
    assert [d.kind for d in result.differences] == ["missing", "missing"]

    @ajet.workflow
    def hangs(task: Task, model: ajet.Model) -> str:
        time.sleep(FOREVER)
        return ""

    result = again(recorded, hangs, timeout=0.3)
    assert "workflow hangs did not finish within" in (result.error or "")


def test_a_failure_of_then_that_is_the_same_now_is_no_difference(tmp_path: Path) -> None:
    @ajet.workflow
    async def fails(task: Task, model: ajet.Model) -> str:
        await model.chat([{"role": "user", "content": "x"}])
        raise ValueError("as ever")

    recorded = record(tmp_path, fails, echo)
    assert recorded.cause == "ValueError"
    assert again(recorded, fails).same


def test_breakpoints_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @ajet.workflow
    async def watched(task: Task, model: ajet.Model) -> str:
        reply = await model.chat([{"role": "user", "content": "x"}])
        ajet.bp("look")
        ajet.bp("elsewhere")
        return str(reply["content"])

    recorded = record(tmp_path, watched, echo)
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append("stopped"))
    assert again(recorded, watched).same and stops == []
    assert again(recorded, watched, debug_tags={"look"}).same and stops == ["stopped"]


def _outside(path: str, headers: Mapping[str, str], asked: Any) -> tuple[int, Any]:
    content = f"from outside: {asked['messages'][-1]['content']}"
    if path.endswith("/messages"):
        return 200, {"type": "message", "content": [{"type": "text", "text": content}], "stop_reason": "end_turn"}
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return 200, {"id": "1", "object": "chat.completion", "model": "big", "choices": [choice]}


@pytest.fixture
def outside() -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of an endpoint that is no gateway, and a function that shuts it."""
    with ExitStack() as stack:
        yield f"{stack.enter_context(serving(replying(_outside)))}/v1", stack.close


def test_calls_of_other_models_are_answered_from_the_recording_too(
    tmp_path: Path, outside: tuple[str, Callable[[], None]]
) -> None:
    url, close = outside

    @ajet.workflow
    async def mixed(task: Task, model: ajet.Model) -> str:
        body = {"model": "big", "messages": [{"role": "user", "content": "hint?"}]}
        async with httpx.AsyncClient(trust_env=False) as client:
            hint = (await client.post(f"{url}/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
        return str((await model.chat([{"role": "user", "content": hint}]))["content"])

    recorded = record(tmp_path, mixed, echo)
    assert recorded.output == "re: from outside: hint?" and len(recorded.calls) == 2
    close()
    result = again(recorded, mixed)
    assert result.same and result.same_output, result.error


def test_an_observed_episode_without_ids(tmp_path: Path, outside: tuple[str, Callable[[], None]]) -> None:
    url, close = outside

    @ajet.workflow
    def deployed(question: str) -> str:
        body = {"model": "big", "messages": [{"role": "user", "content": question}]}
        reply = httpx.post(f"{url}/chat/completions", json=body, trust_env=False).json()
        return str(reply["choices"][0]["message"]["content"])

    with ajet.trace(tmp_path / "trace.duckdb"):
        deployed("where?")
    close()
    reader = open_trace(tmp_path)
    [row] = reader.query("SELECT episode_id FROM calls").to_pylist()[:1]
    recorded = recorded_episode(reader, row["episode_id"])
    assert recorded.calls[0].output_ids is None
    result = again(recorded, deployed)
    assert result.same and result.replayed.output == "from outside: where?", result.error


def test_what_cannot_be_replayed_is_said(tmp_path: Path, outside: tuple[str, Callable[[], None]]) -> None:
    url, _ = outside

    @ajet.workflow
    async def other_dialect(task: Task, model: ajet.Model) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{url}/messages", json={"model": "c", "messages": [{"role": "user", "content": "x"}]})
        return "done"

    with pytest.raises(QueryError, match="another dialect than chat/completions"):
        record(tmp_path / "a", other_dialect, echo)
    with TraceWriter(tmp_path / "b.duckdb") as writer:
        writer.put(Run(run_id="r"), Call(episode_id="cut"))
    with pytest.raises(QueryError, match="has not ended, or its run was killed: it has 1 calls"):
        recorded_episode(open_trace(tmp_path / "b.duckdb"), "cut")


def test_an_episode_without_calls(tmp_path: Path) -> None:
    @ajet.workflow
    async def silent(task: Task) -> str:
        return "nothing asked"

    recorded = record(tmp_path, silent, echo)
    result = again(recorded, silent)
    assert result.same and (result.requests, result.requests_now) == (0, 0)


def test_a_diff_of_ten_megabytes_is_short() -> None:
    def asked(text: str) -> Call:
        return Call(episode_id="e", request={"messages": [{"role": "user", "content": text}]})

    long = "line of text\n" * 800_000
    [difference] = compare(requests_of([asked(long + "a" + long)]), requests_of([asked(long + "b" + long)]))
    assert len(difference.lines) < 20
    assert [line for line in difference.lines if line[0] in "-+"] == ["-  aline of text", "+  bline of text"]
