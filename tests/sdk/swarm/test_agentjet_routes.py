"""AgentJet's routes of a swarm server, asked as its clients ask them: raw HTTP, no key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml

from ajet_sdk.config.agentjet import for_swarm
from ajet_sdk.config.config import load_config
from ajet_sdk.swarm.routes import Keys
from ajet_sdk.types import Task
from tests.sdk.swarm.served import Served, serve
from tests.waiting import until

FOREVER = "No available episodes to claim."


class Client:
    """A client of AgentJet's, as far as the server sees it."""

    def __init__(self, server: Served, key: str = "") -> None:
        self.url = server.url
        self.uuid = str(uuid4())
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False, headers=headers)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def state(self) -> str:
        return str(self.get("/get_engine_status")["engine_status"])

    def claim(self, task_id: str = "", **more: Any) -> Any:
        policy = {"ratio": 1.5, "expected_batch_size": 2, "expected_num_repeat": 2}
        body = {
            "client_uuid": self.uuid,
            "episode_type": "train",
            "discard_episode_timeout": 240,
            "throttle_policy": {**policy, "current_task_id": task_id} if task_id else None,
            **more,
        }
        answer = self.post("/claim_episode", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def call(self, claimed: Any) -> httpx.Response:
        base_url = re.sub(r"^https?://[^/]+", self.url, claimed["openai_base_url"])
        return httpx.post(
            f"{base_url}/chat/completions",
            json={"model": "any", "messages": [{"role": "user", "content": "hello"}]},
            headers={"authorization": f"Bearer {claimed['openai_api_key']}"},
            trust_env=False,
        )

    def end(self, claimed: Any, task_id: str = "t", reward: Any = 1.0, **more: Any) -> Any:
        output = {"reward": reward, "is_success": None, "log_metrics": {}, **more}
        output["metadata"] = {"task_id": task_id, "final_answer": "42"}
        return self.post(
            "/end_episode",
            client_uuid=self.uuid,
            episode_uuid=claimed["episode_uuid"],
            workflow_output=output,
            task_id=task_id,
            declare_client_active=True,
        )

    def attempt(self, task_id: str = "t", reward: float = 1.0, **more: Any) -> Any:
        claimed = self.claim(**more)
        assert claimed["success"], claimed
        assert self.call(claimed).status_code == 200
        ended = self.end(claimed, task_id, reward)
        assert ended.json() == {"success": True}, ended.text
        return claimed


def test_a_step_is_trained_from_claim_to_end(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        assert client.get("/health") == {"status": "ok"}
        assert client.state == "ENGINE.OFFLINE"
        done = server.begin()
        assert client.state == "ENGINE.ROLLING"
        for reward in (0.0, 1.0):
            client.attempt("a", reward)
            client.attempt("b", reward)
        episodes = done.result(10)
        assert client.state == "ENGINE.WEIGHT_SYNCING"
        assert server.train(1, episodes)["trained"] > 0
        assert [e.task.task_id for e in episodes] == ["a", "a", "b", "b"]
        assert [e.attempt for e in episodes] == [0, 1, 0, 1]
        assert {e.client for e in episodes} == {client.uuid}
        assert episodes[0].output == {"final_answer": "42"}
        assert client.get("/get_engine_status")["global_step"] == 1


def test_the_engines_states_have_agentjets_names(tmp_path: Path) -> None:
    names = {
        "offline": "OFFLINE", "booting": "BOOTING", "collecting": "ROLLING",
        "closing": "ROLLING_POST", "updating": "WEIGHT_SYNCING", "saving": "WEIGHT_EXPORTING",
    }  # fmt: skip
    with serve(tmp_path) as server:
        client = Client(server)
        for state, name in names.items():
            server.host.submit(_enter(server, state)).result(5)
            assert client.state == f"ENGINE.{name}"


async def _enter(server: Served, state: Any) -> None:
    server.host.board.enter(state)


@pytest.mark.parametrize(
    ("state", "text"),
    [("updating", "Engine is syncing weights"), ("closing", "Engine is in post-rolling phase")],
)
def test_a_claim_that_finds_no_place_says_why_in_the_words_of_agentjet(
    tmp_path: Path, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_sdk.swarm.agentjet.routes.WAIT", 0.05)
    with serve(tmp_path) as server:
        client = Client(server)
        server.host.submit(_enter(server, state)).result(5)
        answer = client.claim()
        assert not answer["success"] and text in answer["fail_cause"]
        assert answer["episode_uuid"] == answer["openai_api_key"] == ""


def test_a_full_step_says_that_there_is_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_sdk.swarm.agentjet.routes.WAIT", 0.05)
    with serve(tmp_path, "ajet.swarm.max_open=1") as server:
        client = Client(server)
        server.begin()
        assert client.claim()["success"]
        answer = client.claim()
        assert not answer["success"] and FOREVER in answer["fail_cause"]
        assert (
            client.post(
                "/claim_episode", client_uuid="c", episode_type="other", discard_episode_timeout=1
            ).status_code
            == 400
        )


def test_nobody_ends_what_another_client_claimed(tmp_path: Path) -> None:
    """Neither by the ids that lists show, nor by a forged name, nor with the right name."""
    with serve(tmp_path) as server:
        mine, other = Client(server), Client(server)
        server.begin()
        claimed = mine.claim()
        assert mine.call(claimed).status_code == 200
        [listed] = other.post("/get_episode_buffer").json()["buffer"]
        assert listed["openai_api_key"] == "" and listed["client_uuid"] == mine.uuid
        other.uuid = mine.uuid  # which the lists show
        shown = listed["episode_uuid"]
        for forged in (shown, f"ajet-u{shown}-{'0' * 40}", "", "x", "é"):
            assert other.end({"episode_uuid": forged}).status_code == 400
            assert other.post(
                "/abort_episode",
                client_uuid=mine.uuid,
                episode_uuid=forged,
                workflow_output={"reward": 0.0, "metadata": {}},
                task_id="",
            ).json() == {"success": True}
            assert other.post(
                "/can_continue_episode", client_uuid=mine.uuid, episode_uuid=forged
            ).json() == {"can_continue": False}
        other.uuid = "another"
        assert other.end(claimed).status_code == 404
        assert mine.post(
            "/can_continue_episode", client_uuid=mine.uuid, episode_uuid=claimed["episode_uuid"]
        ).json() == {"can_continue": True}
        assert mine.end(claimed).status_code == 200


def test_an_end_is_applied_once(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        server.begin()
        for planned in ("", "planned"):
            claimed = client.claim(planned)
            assert client.call(claimed).status_code == 200
            task_id = planned or "t"
            for _ in range(2):
                assert client.end(claimed, task_id, 1.0).json() == {"success": True}
            changed = client.end(claimed, task_id, 0.0)
            assert changed.status_code == 400 and "ended" in changed.json()["detail"]


@pytest.mark.parametrize("reward", [None, "1.0", [], [0.5, "x"], 1e308, {"a": "b"}, True])
def test_what_is_no_reward_is_refused_and_the_episode_stays_open(
    tmp_path: Path, reward: Any
) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        server.begin()
        claimed = client.claim()
        client.call(claimed)
        assert client.end(claimed, reward=reward).status_code == 400
        nan = client.http.post(
            "/end_episode",
            content=b'{"client_uuid": "%s", "episode_uuid": "%s", "task_id": "t", "workflow_output":'
            b' {"reward": NaN}}' % (client.uuid.encode(), claimed["episode_uuid"].encode()),
        )
        assert nan.status_code == 400
        assert client.end(claimed, reward=[0.25, 0.5]).status_code == 200
        assert server.ledger() == {} or "abandoned" not in server.ledger()


def test_an_end_names_its_task_and_has_called(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        server.begin()
        claimed = client.claim("planned")
        silent = client.end(claimed, "planned")
        assert silent.status_code == 400 and "not called" in silent.json()["detail"]
        client.call(claimed)
        assert client.end(claimed, "").status_code == 400
        assert client.end(claimed, "another").status_code == 400
        assert client.end(claimed, "planned").status_code == 200


def test_what_idles_out_is_told_with_the_remedy_and_never_trained(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        server.begin()
        claimed = client.claim(discard_episode_timeout=0.2)
        client.call(claimed)
        until(lambda: not client.post("/get_episode_buffer").json()["buffer"])
        late = client.end(claimed)
        assert late.status_code == 400 and "discard_episode_timeout" in late.json()["detail"]
        assert client.call(claimed).status_code == 410
        assert server.ledger().get("abandoned", 0) > 0


def test_an_aborted_episode_frees_its_place(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.swarm.max_open=1") as server:
        client = Client(server)
        server.begin()
        claimed = client.claim()
        for _ in range(2):
            assert client.post(
                "/abort_episode",
                client_uuid=client.uuid,
                episode_uuid=claimed["episode_uuid"],
                workflow_output={"reward": 0.0, "metadata": {}},
                task_id="",
            ).json() == {"success": True}
        assert client.claim()["success"]


def test_evaluation_is_a_validation_and_not_trained(tmp_path: Path) -> None:
    with serve(tmp_path, val=[Task(task_id="held", main_query="?")]) as server:
        client = Client(server)
        server.begin()
        for task_id in ("v", "v", "w"):
            client.attempt(task_id, 0.5, episode_type="eval")
        [episodes] = server.host.submit(_validated(server)).result(5).values()
        assert [(e.task.task_id, e.attempt, e.split) for e in episodes] == [
            ("v", 0, "val"),
            ("v", 1, "val"),
            ("w", 0, "val"),
        ]
        assert len({e.group_id for e in episodes}) == 2
        claimed = client.claim()
        client.call(claimed)
        assert client.end(claimed, "held").status_code == 400, "a validation task is not trained"


async def _validated(server: Served) -> Any:
    return server.collection.take_validated()


def test_the_pool_is_shown_against_its_target(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        server.begin()
        client.attempt("a", 1.0)
        claimed = client.claim("b")
        client.call(claimed)
        pool = client.get("/get_current_batch_rollout_pool_information")
        assert pool["sample_collection_method"] == "rollout_until_finish_enough_tasks"
        assert (pool["completed_episodes"], pool["completed_episode_target"]) == (1, 4)
        assert (pool["completed_tasks"], pool["completed_task_target"]) == (0, 2)
        assert pool["completed_tasks_client_uuids"] == {"a": [client.uuid]}
        [running] = pool["running_episode_details"].values()
        assert (running["optional_task_id"], running["llm_call_count"]) == ("b", "1")
        [active] = pool["swarm_client_instruction"]["active_clients"]
        assert active["client_uuid"] == client.uuid and not active["allowed_sync_weight"]


def test_clients_agree_to_train(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.swarm.collect=all_clients") as server:
        client = Client(server)
        done = server.begin()
        refused = client.post("/agree_sync_weight", client_uuid=client.uuid).json()
        assert not refused["success"] and refused["failure_reason"]
        client.attempt()
        assert client.post("/agree_sync_weight", client_uuid=client.uuid).json()["success"]
        assert len(done.result(10)) == 1


def test_keys_of_owner_and_worker(tmp_path: Path) -> None:
    with serve(tmp_path, keys=Keys("owner", "worker")) as server:
        server.begin()
        stranger, worker, owner = (Client(server, key) for key in ("", "worker", "owner"))
        for path in ("/claim_episode", "/end_episode", "/get_episode_buffer", "/stop_engine"):
            assert stranger.post(path, client_uuid="c").status_code == 401, path
        assert stranger.get("/health") == {"status": "ok"}
        assert worker.claim()["success"]
        config = {"yaml_as_string": "ajet: {}"}
        for path in ("/start_engine", "/stop_engine", "/sync_train_config", "/sync_train_code"):
            assert worker.post(path, **config).status_code == 403, path
        assert owner.post("/stop_engine").status_code == 200
        code = owner.post("/sync_train_code")
        assert code.status_code == 400 and "sync_train_code" in code.json()["detail"]


def test_a_running_engine_takes_no_config(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        server.begin()
        for path in ("/sync_train_config", "/start_engine"):
            assert client.post(path, yaml_as_string="ajet: {}").status_code == 400


def test_lines_of_clients_are_kept_for_a_while(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = Client(server)
        for n in range(60):
            client.post("/push_verbose_log", tag="t", message=f"line {n}")
        entries = client.get("/get_verbose_logs")["entries"]
        assert [entry["message"] for entry in entries] == [f"line {n}" for n in range(10, 60)]


def test_a_config_of_agentjets_client_is_read() -> None:
    text = (Path(__file__).parents[1] / "agentjet" / "swarm.yaml").read_text()
    translated, changed = for_swarm(text)
    config = load_config(values=yaml.safe_load(translated))
    assert config.backbone == "local" and config.swarm.collect == "signal"
    assert (config.model.lora.enabled, config.model.lora.r, config.model.lora.alpha) == (
        True,
        8,
        16,
    )
    assert not config.is_set("task_reader") and not config.rollout.user_workflow
    assert {line.partition(":")[0].partition(" ")[0] for line in changed} >= {
        "backbone",
        "task_reader",
        "rollout.user_workflow",
    }
