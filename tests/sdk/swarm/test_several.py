"""Several models in one block: all episodes are opened or none, and ended or none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import ajet
from ajet_sdk.errors import ConfigError, SwarmError
from tests.sdk.swarm.scripted_server import ScriptedSwarm


def call(episode: Any) -> None:
    answer = httpx.post(
        f"{episode.base_url}/chat/completions",
        json={"model": episode.model, "messages": [{"role": "user", "content": "Hi."}]},
        headers={"authorization": f"Bearer {episode.api_key}"},
        trust_env=False,
    )
    assert answer.status_code == 200


def test_each_model_gets_its_calls_and_its_reward(tmp_path: Path) -> None:
    with (
        ScriptedSwarm(tmp_path / "p") as planning,
        ScriptedSwarm(tmp_path / "e") as executing,
        ajet.SwarmClient(planning.url) as planner,
        ajet.SwarmClient(executing.url) as executor,
    ):
        with ajet.episodes({planner: {"task_id": "t"}, executor: {"task_id": "t"}}) as opened:
            call(opened[planner])
            call(opened[executor])
            call(opened[executor])
            with pytest.raises(ConfigError):
                opened.end({planner: 1.0})
            with pytest.raises(SwarmError):
                opened.end({planner: float("nan"), executor: 1.0})
            receipts = opened.end({planner: 0.25, executor: 1.0})
        assert [receipts[c].reward for c in (planner, executor)] == [0.25, 1.0]
        assert [len(receipts[c].calls) for c in (planner, executor)] == [1, 2]


def test_none_is_ended_unless_all_can_be(tmp_path: Path) -> None:
    with (
        ScriptedSwarm(tmp_path / "p") as planning,
        ScriptedSwarm(tmp_path / "e") as executing,
        ajet.SwarmClient(planning.url) as planner,
        ajet.SwarmClient(executing.url) as executor,
    ):
        tasks = {planner: {"task_id": "t"}, executor: {"task_id": "t"}}
        with pytest.raises(SwarmError) as raised, ajet.episodes(tasks) as opened:
            call(opened[planner])
            ids = [opened[client].id for client in (planner, executor)]
            opened.end({planner: 1.0, executor: 1.0})  # the executor was never asked
        assert raised.value.code == "no_calls"
        for client, episode_id in zip((planner, executor), ids, strict=True):
            assert client.receipt(episode_id).state in ("aborted", "failed")


def test_none_is_open_if_one_cannot_be_opened(tmp_path: Path) -> None:
    with (
        ScriptedSwarm(tmp_path / "p") as planning,
        ajet.SwarmClient(planning.url) as planner,
        ajet.SwarmClient("http://127.0.0.1:9", patience=0.2) as away,
    ):
        with (
            pytest.raises(SwarmError),
            ajet.episodes({planner: {"task_id": "t"}, away: {"task_id": "t"}}),
        ):
            pass
        assert not planner.status().open


def test_async_blocks(tmp_path: Path) -> None:
    async def solve() -> float | None:
        async with (
            ajet.AsyncSwarmClient(one.url) as first,
            ajet.AsyncSwarmClient(two.url) as second,
            ajet.episodes({first: {"task_id": "t"}, second: {"task_id": "t"}}) as opened,
        ):
            for client in (first, second):
                await asyncio.to_thread(call, opened[client])
            receipts = await opened.end({first: 0.0, second: 1.0})
            return receipts[second].reward

    with ScriptedSwarm(tmp_path / "1") as one, ScriptedSwarm(tmp_path / "2") as two:
        assert asyncio.run(solve()) == 1.0
