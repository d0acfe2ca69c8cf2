"""What becomes of the calls of several agents: the timelines, and of each split its proven cause.

Real requests through the gateway; the scripted model's template shows tools, so that a changed list
is seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.samples.build import build
from ajet_sdk.samples.splits import HINTS
from ajet_sdk.samples.timelines import Merged, merge
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Call, Episode, Task
from tests.sdk.conftest import Message, user

SYSTEM: Message = {"role": "system", "content": "You are one of a team."}


def tool(name: str) -> Message:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }


def calls_of(gateway: Gateway, team: Any) -> tuple[tuple[Call, ...], Merged]:
    """The calls of a workflow's episode, in order, and what they merge into; every sampled token is
    trained once."""

    @ajet.workflow
    async def workflow(model: ajet.Model) -> ajet.Reward:
        await team(model)
        return ajet.Reward(value=1.0)

    engine = ScriptedEngine(lambda ask: f"reply {len(ask.body['messages'])}", logprob=-1.0)
    attempts = [Attempt(Task(main_query="q"), "run", group_id="g", attempt=n) for n in range(2)]
    config = load_config(values={"rollout": {"timeout": 20}})
    first, second = asyncio.run(
        run_batch(workflow, None, attempts, engine=engine, gateway=gateway, config=config)
    )
    assert first.error is None, first.error
    template = ChatTemplate.known(engine.tokenizer)
    merged = merge(first.calls, engine.tokenizer.decode, template)
    assert all(split.hint.endswith(HINTS[split.cause]) for split in merged.splits)
    everything_is_trained(first, second)
    return first.calls, merged


def everything_is_trained(first: Episode, second: Episode) -> None:
    worse = second.model_copy(update={"rewards": (ajet.Reward(value=0.0),)})
    batch = build([first, worse])
    trained = sum(row.tokens for row in batch.ledger if row.outcome == "trained")
    assert trained == sum(
        len(c.output_ids) for e in (first, second) for c in e.calls if c.output_ids is not None
    )


def shown(calls: Sequence[Call], merged: Merged) -> list[tuple[str, list[int]]]:
    """Each timeline: its agent, and the numbers of the calls that are trained in it."""
    number = {call.call_id: index for index, call in enumerate(calls)}
    return [
        (line.agent, [number[span.call_id] for span in line.spans]) for line in merged.timelines
    ]


def causes(calls: Sequence[Call], merged: Merged) -> list[tuple[int, int | None, str]]:
    """Each split: the number of its call, that of the call that it was expected to extend, and the
    cause."""
    number = {call.call_id: index for index, call in enumerate(calls)}
    return [(number[s.call_id], number.get(s.parent_call_id or ""), s.cause) for s in merged.splits]


def prompt(call: Call) -> list[int]:
    assert call.prompt_ids is not None
    ids: list[int] = call.prompt_ids.tolist()
    return ids


async def turns(model: ajet.Model, history: list[Message], *texts: str, **options: Any) -> None:
    for text in texts:
        history.append(user(text))
        history.append(await model.chat(history, **options))


def test_agents_that_share_a_prompt_have_timelines_of_their_own(gateway: Gateway) -> None:
    async def team(model: ajet.Model) -> None:
        north, south = model.agent("north"), model.agent("south")
        mine, yours = [SYSTEM], [SYSTEM]
        for text in ("a?", "b?"):
            await turns(north, mine, text)
            await turns(south, yours, text)

    calls, merged = calls_of(gateway, team)
    assert shown(calls, merged) == [("north", [0, 2]), ("south", [1, 3])]
    assert not merged.splits
    assert prompt(calls[0])[:40] == prompt(calls[1])[:40], "though they begin with the same tokens"


def test_under_one_name_they_are_branches_of_one_another(gateway: Gateway) -> None:
    async def team(model: ajet.Model) -> None:
        mine, yours = [SYSTEM], [SYSTEM]
        await turns(model, mine, "a?")
        await turns(model, yours, "c?", "d?")
        await turns(model, [*mine[:2]], "e?")

    calls, merged = calls_of(gateway, team)
    assert shown(calls, merged) == [("default", [0]), ("default", [1, 2]), ("default", [3])]
    first, second = causes(calls, merged)
    assert first == (1, 0, "new_conversation") and second == (
        3,
        0,
        "history_edited",
    )  # it left out the reply


def test_a_sub_agent_has_a_timeline_of_its_own_and_its_caller_goes_on(gateway: Gateway) -> None:
    async def team(model: ajet.Model) -> None:
        boss, helper = model.agent("boss"), model.agent("helper")
        history = [SYSTEM]
        await turns(boss, history, "plan", tools=[tool("ask_helper")])
        for question in ("one?", "two?"):
            errand: list[Message] = []
            await turns(helper, errand, question)
            history.append(user(f"the helper says: {errand[-1]['content']}"))
            history.append(await boss.chat(history, tools=[tool("ask_helper")]))

    calls, merged = calls_of(gateway, team)
    assert shown(calls, merged) == [("boss", [0, 2, 4]), ("helper", [1]), ("helper", [3])]
    assert causes(calls, merged) == [(3, 1, "new_conversation")]


def test_a_hand_off_leaves_the_history_as_context(gateway: Gateway) -> None:
    async def team(model: ajet.Model) -> None:
        triage, expert = model.agent("triage"), model.agent("expert")
        history = [SYSTEM]
        await turns(triage, history, "my order is late", "order 7")
        await turns(expert, history, "please help", "thanks")

    calls, merged = calls_of(gateway, team)
    assert shown(calls, merged) == [("triage", [0, 1]), ("expert", [2, 3])]
    assert not merged.splits
    expert = merged.timelines[1]
    assert not expert.loss_mask[: len(prompt(calls[2]))].any(), (
        "trained in the timeline of who said it"
    )


def test_a_hand_off_with_a_system_prompt_of_its_own_under_one_name_says_so(
    gateway: Gateway,
) -> None:
    async def team(model: ajet.Model) -> None:
        history = [SYSTEM]
        await turns(model, history, "my order is late")
        await turns(
            model, [{"role": "system", "content": "You are the expert."}, *history[1:]], "order 7"
        )

    calls, merged = calls_of(gateway, team)
    assert shown(calls, merged) == [("default", [0]), ("default", [1])]
    assert causes(calls, merged) == [(1, 0, "system_changed")]


def test_a_summarised_history_begins_a_timeline(gateway: Gateway) -> None:
    async def team(model: ajet.Model) -> None:
        agent = model.agent("reader")
        history = [SYSTEM]
        await turns(agent, history, "page one", "page two", "page three")
        shorter = [SYSTEM, user("So far: three pages."), *history[-2:]]
        await turns(agent, shorter, "page four", "page five")

    calls, merged = calls_of(gateway, team)
    assert shown(calls, merged) == [("reader", [0, 1, 2]), ("reader", [3, 4])]
    assert causes(calls, merged) == [(3, 2, "summarised")]
    [split] = merged.splits
    assert split.at_token < len(prompt(calls[3])) and split.extra_tokens > 0


def test_tools_that_change_in_mid_episode_split_where_the_template_shows_them(
    gateway: Gateway,
) -> None:
    async def team(model: ajet.Model) -> None:
        agent = model.agent("shopper")
        history = [SYSTEM]
        await turns(agent, history, "find it", "compare", tools=[tool("search")])
        await turns(agent, history, "buy it", "thanks", tools=[tool("search"), tool("buy")])

    calls, merged = calls_of(gateway, team)
    assert shown(calls, merged) == [("shopper", [0, 1]), ("shopper", [2, 3])]
    assert causes(calls, merged) == [(2, 1, "tools_changed")]


def test_agents_at_once_keep_their_timelines_apart(gateway: Gateway) -> None:
    """However their calls interleave."""

    async def team(model: ajet.Model) -> None:
        everybody = [model.agent(f"player {n}", target_tag="crowd") for n in range(12)]
        await asyncio.gather(*(turns(one, [SYSTEM], "a?", "b?", "c?") for one in everybody))

    _, merged = calls_of(gateway, team)
    assert len(merged.timelines) == 12 and not merged.splits
    assert all(len(line.spans) == 3 for line in merged.timelines)
    assert {line.agent for line in merged.timelines} == {f"player {n}" for n in range(12)}
