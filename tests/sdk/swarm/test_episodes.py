"""Episodes of a swarm: claims, keys, ends, and what becomes of each token."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ajet_sdk.swarm.messages import PREFIX
from ajet_sdk.swarm.routes import Keys
from ajet_sdk.types import Task
from tests.sdk.swarm.served import serve
from tests.waiting import until


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def test_a_step_trains_what_its_clients_ended(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        step = served.begin()
        claims = [
            served.attempt(task, reward, client_id=client)
            for task, client in (("a", "c1"), ("b", "c2"))
            for reward in (0.0, 1.0)
        ]
        episodes = step.result(10)
        assert [e.episode_id for e in episodes] == [c["episode_id"] for c in claims]
        assert len({e.group_id for e in episodes}) == 2
        tokens = served.train(1, episodes)
        assert set(tokens) == {"trained"}
        assert served.ledger() == tokens and tokens["trained"] == served.sampled()
        for claimed in claims:
            receipt = served.receipt(claimed)
            assert receipt["state"] == "ended" and receipt["step"] == 1
            assert receipt["tokens"] == {"trained": receipt["calls"][0]["tokens"]["trained"]}


def test_each_claim_has_an_id_and_a_key_of_its_own(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.rollout.num_repeat=8") as served:
        served.begin()
        claims = [served.claimed("a") for _ in range(8)]
        assert len({c["episode_id"] for c in claims}) == 8
        assert len({c["api_key"] for c in claims}) == 8
        assert [c["attempt"] for c in claims] == list(range(8))
        assert len({c["seed"] for c in claims}) == 8


def test_a_repeated_or_duplicated_claim_is_one_episode(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(served.claim("a", request_id="same", wait=5.0))
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {a.json()["episode_id"] for a in answers} == {answers[0].json()["episode_id"]}
        assert sorted(a.status_code for a in answers) == [200] * 7 + [201]
        assert len(served.collection.attempts.open) == 1


@pytest.mark.parametrize("how", ["end", "abort", "idle"])
def test_the_key_of_an_episode_that_is_over_answers_410(tmp_path: Path, how: str) -> None:
    with serve(tmp_path) as served:
        served.begin()
        claimed = served.claimed("a", idle_timeout=0.2 if how == "idle" else 60.0)
        assert served.call(claimed).status_code == 200
        if how == "end":
            served.end(claimed)
        elif how == "abort":
            served.abort(claimed, reason="no more")
        else:
            until(lambda: not served.collection.attempts.open)
        sampled = served.sampled()
        late = served.call(claimed)
        assert late.status_code == 410
        assert served.sampled() == sampled, "nothing is sampled late"
        other = served.claimed("a")
        assert other["episode_id"] != claimed["episode_id"]
        wrong = served.post(f"/episodes/{other['episode_id']}/end", claimed["api_key"], reward=1.0)
        assert wrong.status_code == 401 and other["episode_id"] in served.collection.attempts.open


def test_what_idles_out_is_abandoned_and_its_place_is_given_to_another(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1") as served:
        step = served.begin()
        lost = served.claimed("a", idle_timeout=0.2)
        served.call(lost)
        served.attempt("a", 0.0)
        assert code_of(served.claim("a")) == "group_full"
        until(lambda: not served.collection.attempts.open)
        assert code_of(served.end(lost)) == "episode_over"
        served.attempt("a", 1.0)
        tokens = served.train(1, step.result(10))
        receipt = served.receipt(lost)
        assert receipt["state"] == "abandoned" and list(receipt["tokens"]) == ["abandoned"]
        assert served.ledger() == {**tokens, "abandoned": receipt["tokens"]["abandoned"]}
        assert sum(served.ledger().values()) == served.sampled()


def test_an_end_is_applied_once(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        claimed = served.claimed("a")
        served.call(claimed)
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(served.end(claimed, 0.5)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [a.status_code for a in answers] == [200] * 8
        assert len({a.text for a in answers}) == 1
        assert code_of(served.end(claimed, 0.7)) == "already_ended"
        assert code_of(served.abort(claimed, reason="late")) == "already_ended"
        assert [len(g.ended) for g in served.collection.pool.groups] == [1]
        assert served.receipt(claimed)["reward"] == 0.5


@pytest.mark.parametrize(
    "reward",
    [math.nan, math.inf, "1.0", True, 1e308, [], {}, None, [1.0, "x"], {"nobody": 1.0}],
    ids=str,
)
def test_what_is_no_reward_is_refused_and_the_episode_stays_open(
    tmp_path: Path, reward: object
) -> None:
    with serve(tmp_path) as served:
        served.begin()
        claimed = served.claimed("a")
        served.call(claimed)
        answer = served.http.post(
            f"/episodes/{claimed['episode_id']}/end",
            content=json.dumps({"reward": reward}),
            headers={
                "authorization": f"Bearer {claimed['end_key']}",
                "content-type": "application/json",
            },
        )
        assert answer.status_code == 422 and code_of(answer) == "bad_reward"
        assert served.end(claimed, 0.25).json()["reward"] == 0.25


def test_an_end_without_a_call_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        claimed = served.claimed("a")
        assert code_of(served.end(claimed)) == "no_calls"
        served.call(claimed)
        assert served.end(claimed).status_code == 200


@pytest.mark.parametrize(
    ("reward", "total"),
    [
        (0.5, 0.5),
        ([0.25, 0.5], 0.75),
        ({"default": 2.0}, 2.0),
        ([{"name": "format", "value": 1.0, "weight": 0.5}, {"value": 1.0}], 1.5),
    ],
)
def test_rewards_of_each_form(tmp_path: Path, reward: object, total: float) -> None:
    with serve(tmp_path) as served:
        served.begin()
        claimed = served.claimed("a")
        served.call(claimed)
        assert served.end(claimed, reward).json()["reward"] == total


def test_calls_of_an_episode_run_in_parallel(tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=10)

    def reply(ask: object) -> str:
        together.wait()  # passes only if four calls are answered at once
        return "yes"

    with serve(tmp_path, replies=reply) as served:
        served.begin()
        claimed = served.claimed("a")
        answers: list[int] = []
        threads = [
            threading.Thread(
                target=lambda i=i: answers.append(served.call(claimed, f"{i}").status_code)
            )
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [200] * 4
        assert len(served.end(claimed).json()["calls"]) == 4


def test_a_client_that_hangs_up_trains_nothing(tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def reply(ask: object) -> str:
        if "slow" in str(ask.messages[-1]["content"]):  # type: ignore[attr-defined]
            asked.set()
            go_on.wait(10)
        return "yes"

    with serve(tmp_path, "ajet.data.train_batch_size=1", replies=reply) as served:
        step = served.begin()
        claimed = served.claimed("a")
        served.call(claimed, "quick")
        with pytest.raises(httpx.ReadTimeout):
            served.call(claimed, "slow", timeout=httpx.Timeout(10, read=0.2))
        assert asked.wait(10)
        go_on.set()
        until(lambda: not served.collection.attempts.open[claimed["episode_id"]].opened.in_flight)
        served.call(claimed, "quick again")
        served.end(claimed, 1.0)
        served.attempt("a", 0.0)
        episodes = step.result(10)
        errors = [call.error for call in episodes[0].calls]
        assert [bool(error) for error in errors] == [False, True, False]
        tokens = served.train(1, episodes)
        assert "undelivered" in tokens or "cancelled" in tokens or len(tokens) == 1
        assert served.ledger().get("trained") == sum(
            len(call.output_ids) for e in episodes for call in e.calls if call.error is None
        )


def test_a_failure_of_the_agent_counts_and_one_of_the_infrastructure_does_not(
    tmp_path: Path,
) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1") as served:
        step = served.begin()
        broken = served.claimed("a")
        served.call(broken)
        receipt = served.abort(
            broken, status="failed", cause="WorkerLost", infrastructure=True, reason="power cut"
        ).json()
        assert receipt["state"] == "aborted" and list(receipt["tokens"]) == ["failed"]
        wrong = served.claimed("a")
        served.call(wrong)
        receipt = served.abort(wrong, status="failed", cause="ValueError", error="no number").json()
        assert receipt["state"] == "failed"
        served.attempt("a", 1.0)
        episodes = step.result(10)
        assert [(e.status, e.cause) for e in episodes] == [
            ("failed", "ValueError"),
            ("succeeded", None),
        ]
        served.train(1, episodes)
        assert sum(served.ledger().values()) == served.sampled()


def test_a_task_that_is_held_out_is_not_trained(tmp_path: Path) -> None:
    held = Task(task_id="v", main_query="what is 2+2?")
    with serve(tmp_path, val=[held]) as served:
        served.begin()
        assert code_of(served.claim("v")) == "held_out"
        same = {"task_id": "other", "main_query": "what is 2+2?"}
        assert code_of(served.claim(same)) == "held_out"
        claimed = served.claimed("v", split="val")
        served.call(claimed)
        receipt = served.end(claimed, 1.0).json()
        assert list(receipt["tokens"]) == ["evaluation"]
        unknown = served.claimed(None, task_at_end=True)
        served.call(unknown)
        assert code_of(served.end(unknown, 1.0, task={"task_id": "v"})) == "held_out"


def test_what_a_client_validates_is_not_trained(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        served.attempt("v", split="val")
        assert code_of(served.claim("v")) == "held_out"
        same = {"task_id": "other", "main_query": "task v"}
        assert code_of(served.claim(same)) == "held_out"
        assert served.claim("a").status_code == 201


def test_what_is_trained_is_not_validated(tmp_path: Path) -> None:
    own = Task(task_id="own", main_query="what is 2+2?")
    before = Task(task_id="before", main_query="what is 3+3?")
    with serve(tmp_path, train=[own], given_out=[(before, "train")]) as served:
        served.begin()
        served.attempt("a")
        for task in ("a", "own", "before"):
            assert code_of(served.claim(task, split="val")) == "held_out"
        for query in ("task a", "what is 2+2?", "What is  3+3?"):
            same = {"task_id": "another", "main_query": query}
            assert code_of(served.claim(same, split="val")) == "held_out"
        late = served.claimed(None, split="val", task_at_end=True)
        served.call(late)
        served.end(late, 1.0, task={"task_id": "a", "main_query": "task a"})
        served.attempt("b", split="val")
        [counted] = served.collection.take_validated().values()
        assert [episode.task.task_id for episode in counted] == ["b"]
        assert code_of(served.claim("b")) == "held_out"


def test_a_claim_that_waits_is_looked_at_again_when_it_gets_its_place(tmp_path: Path) -> None:
    with serve(tmp_path) as served, ThreadPoolExecutor(1) as pool:
        served.begin()
        first = [served.claimed(name) for name in ("a", "a", "b", "b")]
        waiting = pool.submit(served.claim, "c", wait=20.0, client_id="late")
        until(lambda: any(info.client_id == "late" for info in served.host.clients.infos()))
        served.attempt("c", split="val")
        for claimed in first[:2]:
            served.abort(claimed, reason="lost")
        assert code_of(waiting.result(20)) == "held_out"


def test_what_was_made_of_a_validation_task_is_not_trained(tmp_path: Path) -> None:
    held = Task(task_id="v", main_query="what is 2+2?")
    grown = {
        "task_id": "grown",
        "main_query": "what is 3+3?",
        "metadata": {"provenance": {"seeds": ["v"], "roots": ["v"]}},
    }
    with serve(tmp_path, val=[held]) as served:
        served.begin()
        assert code_of(served.claim(grown)) == "held_out"
    with serve(tmp_path / "other") as served:
        served.begin()
        assert served.claim(grown).status_code == 201
        source = {"task_id": "v", "main_query": "what is 2+2?"}
        assert code_of(served.claim(source, split="val")) == "held_out"


def test_the_tasks_of_a_validation_stay_held_out_after_a_restart(tmp_path: Path) -> None:
    validated = Task(task_id="v", main_query="what is 2+2?")
    with serve(tmp_path, given_out=[(validated, "val")]) as served:
        served.begin()
        assert code_of(served.claim({"task_id": "x", "main_query": "What is 2+2?"})) == "held_out"


def test_a_task_that_is_named_at_the_end_joins_the_group_of_its_task(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1") as served:
        step = served.begin()
        served.attempt("a", 0.0)
        unknown = served.claimed(None, task_at_end=True)
        served.call(unknown)
        assert code_of(served.end(unknown, 1.0)) == "bad_request"
        served.end(unknown, 1.0, task={"task_id": "a"})
        episodes = step.result(10)
        assert len({e.group_id for e in episodes}) == 1
        assert [e.task.task_id for e in episodes] == ["a", "a"]


def test_the_server_gives_out_its_own_tasks(tmp_path: Path) -> None:
    tasks = [Task(task_id=name, main_query=name) for name in ("x", "y", "z")]
    with serve(tmp_path) as served:
        step = served.begin(tasks=tasks)
        given = [served.claimed(None) for _ in range(4)]
        assert [g["task"]["task_id"] for g in given] == ["x", "x", "y", "y"]
        assert code_of(served.claim(None)) == "full"
        served.abort(given[0], reason="lost")
        again = served.claimed(None)
        assert again["task"]["task_id"] == "x" and again["attempt"] == 0
        for number, claimed in enumerate([*given[1:], again]):
            served.call(claimed)
            served.end(claimed, number / 4)
        assert [e.task.task_id for e in step.result(10)] == ["x", "x", "y", "y"]


def test_a_claim_waits_for_its_place_without_polling(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1") as served:
        step = served.begin()
        first, second = served.claimed("a"), served.claimed("a")
        answers: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(served.claim("b", wait=20.0)), daemon=True
        )
        waiting.start()
        for claimed, reward in ((first, 0.0), (second, 1.0)):
            served.call(claimed)
            served.end(claimed, reward)
        served.train(1, step.result(10))
        assert not answers
        served.begin(2)
        waiting.join(10)
        assert answers[0].status_code == 201 and answers[0].json()["step"] == 2


def test_a_place_is_not_given_to_a_client_that_has_left(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1") as served:
        served.begin()
        first, second = served.claimed("a"), served.claimed("a")
        with pytest.raises(httpx.ReadTimeout):
            served.http.post(
                "/episodes",
                json={
                    "request_id": "gone",
                    "client_id": "gone",
                    "task": {"task_id": "a"},
                    "wait": 25.0,
                },
                timeout=httpx.Timeout(10.0, read=0.3),
            )
        assert served.abort(first, reason="makes room").status_code == 200
        until(lambda: len(served.collection.attempts.open) == 1)
        assert second["episode_id"] in served.collection.attempts.open
        assert served.claim("a").status_code == 201, "the place is free"


def test_attempts_beyond_a_group_begin_another_group_of_the_task(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        step = served.begin()
        for reward in (0.0, 1.0, 0.0, 1.0):
            served.attempt("a", reward)
        episodes = step.result(10)
        groups = [e.group_id for e in episodes]
        assert groups[0] == groups[1] != groups[2] == groups[3]


def test_keys_of_owner_worker_and_episode_open_what_is_theirs(tmp_path: Path) -> None:
    with serve(tmp_path, keys=Keys("owner", "worker")) as served:
        served.begin()
        assert served.claim("a").status_code == 401
        assert served.claim("a", key="wrong").status_code == 401
        mine = served.claimed("a", key="worker")
        other = served.claimed("a", key="owner")
        for path in ("/start", "/stop"):
            assert served.post(path, "worker").status_code == 403
            assert served.post(path, mine["api_key"]).status_code == 401
            assert served.post(path, "owner").status_code == 200
        put = served.http.put("/config", content="ajet: {}", headers={"x-api-key": "worker"})
        assert put.status_code == 403
        guessed = "ajet-e" + mine["episode_id"]
        of_the_agent = (mine["api_key"], mine["capture_key"])
        for key in ("worker", other["end_key"], *of_the_agent, guessed, ""):
            path = f"/episodes/{mine['episode_id']}/end"
            assert served.post(path, key, reward=1.0).status_code == 401
            stolen = served.http.get(path[:-4] + "/calls", headers={"x-api-key": key})
            assert stolen.status_code == 401
        receipt = f"/episodes/{mine['episode_id']}"
        seen = {
            key: served.http.get(receipt, headers={"x-api-key": key}).status_code
            for key in ("worker", mine["end_key"], other["end_key"], "")
        }
        assert seen == {"worker": 200, mine["end_key"]: 200, other["end_key"]: 401, "": 401}
        text = served.http.get("/status", headers={"x-api-key": "worker"}).text
        assert not any(mine[key] in text for key in ("api_key", "capture_key", "end_key"))


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"request_id": 5}', b'{"request_id": "a", "client_id": "c", "x": 1}'],
)
def test_a_claim_that_is_none_is_refused(tmp_path: Path, body: bytes) -> None:
    with serve(tmp_path) as served:
        served.begin()
        answer = served.http.post("/episodes", content=body)
        assert answer.status_code == 422 and code_of(answer) == "bad_request"
        assert not served.collection.attempts.open


def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        answer = served.claim({"task_id": "a", "main_query": "x" * 40_000_000})
        assert answer.status_code == 413 and code_of(answer) == "too_large"


def test_ids_of_clients_are_no_paths(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        for name in ("../../etc", "a/b", "a%2Fb", "x" * 500):
            answer = served.http.get(f"/episodes/{name}", headers={"x-api-key": "k"})
            assert answer.status_code in (401, 404)


def test_a_slow_episode_ends_with_the_grace_of_its_step(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1", "ajet.swarm.collect=episodes") as served:
        step = served.begin()
        slow = served.claimed("b")
        served.call(slow)
        served.attempt("a", 0.0)
        served.attempt("a", 1.0)
        episodes = step.result(10)
        served.train(1, episodes)
        receipt = served.receipt(slow)
        assert receipt["state"] == "abandoned"
        assert sum(served.ledger().values()) == served.sampled()


def test_with_staleness_an_episode_goes_on_over_an_update(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1", "ajet.rollout.max_staleness=1") as served:
        step = served.begin()
        slow = served.claimed("b", client_id="slow")  # takes the only place
        served.call(slow)
        assert code_of(served.claim("a")) == "group_full"
        served.abort(slow, reason="makes room")
        early = served.attempt("a", 0.0)
        served.attempt("a", 1.0)
        served.train(1, step.result(10))
        step = served.begin(2)
        carried = served.claimed("c")
        served.call(carried)
        done = served.attempt("c", 0.0)
        assert served.end(carried, 1.0).status_code == 200
        episodes = step.result(10)
        assert {e.episode_id for e in episodes} == {carried["episode_id"], done["episode_id"]}
        assert {e.step for e in episodes} == {2}
        assert served.receipt(early)["step"] == 1


def test_an_attempt_that_ends_after_its_group_was_trained_counts_in_the_next_step(
    tmp_path: Path,
) -> None:
    with serve(
        tmp_path,
        "ajet.data.train_batch_size=1",
        "ajet.rollout.max_staleness=1",
        "ajet.swarm.collect=any_client",
    ) as served:
        step = served.begin()
        slow = served.claimed("a")
        served.call(slow)
        served.attempt("a", 0.0)
        assert served.post("/agree", client_id="c").json()["accepted"]
        first = step.result(10)
        assert len(first) == 1
        served.train(1, first)
        step = served.begin(2)
        assert served.end(slow, 1.0).status_code == 200
        assert served.post("/agree", client_id="c").json()["accepted"]
        second = step.result(10)
        assert [e.episode_id for e in second] == [slow["episode_id"]]
        served.train(2, second)
        assert served.receipt(slow)["step"] == 2
        assert sum(served.ledger().values()) == served.sampled()


@pytest.mark.parametrize("rule", ["any_client", "all_clients"])
def test_a_step_that_clients_agree_to(tmp_path: Path, rule: str) -> None:
    with serve(tmp_path, f"ajet.swarm.collect={rule}") as served:
        step = served.begin()
        assert not served.post("/agree", client_id="c1").json()["accepted"]
        served.attempt("a", 1.0, client_id="c1")
        served.attempt("b", 0.0, client_id="c2")
        assert served.post("/agree", client_id="c1").json()["accepted"]
        if rule == "all_clients":
            assert not step.done()
            assert served.post("/agree", client_id="c2").json()["accepted"]
        assert len(step.result(10)) == 2


def test_a_step_of_groups_with_signal(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.data.train_batch_size=1", "ajet.swarm.collect=signal") as served:
        step = served.begin()
        for _ in range(2):
            served.attempt("easy", 1.0)
        assert not step.done()
        served.attempt("hard", 0.0)
        served.attempt("hard", 1.0)
        episodes = step.result(10)
        assert len(episodes) == 4, "groups without signal are booked, not lost"
        assert set(served.train(1, episodes)) == {"trained", "zero_advantage"}


def test_a_step_ends_at_its_limit_with_what_has_ended(tmp_path: Path) -> None:
    with serve(tmp_path, "ajet.swarm.step_timeout=0.3") as served:
        step = served.begin()
        served.attempt("a", 1.0)
        episodes = step.result(10)
        assert len(episodes) == 1
        assert set(served.train(1, episodes)) == {"zero_advantage"}


def test_the_status_says_what_the_step_waits_for_and_who_is_there(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        served.attempt("a", 1.0, client_id="c1", client_name="laptop of Ada")
        served.claimed("b", client_id="c2")
        status = served.http.get("/status").json()
        assert status["state"] == "collecting" and status["step"] == 1
        assert status["target"] == {"rule": "groups", "groups": 2, "attempts": 2}
        assert [(g["task_id"], g["ended"], g["open"]) for g in status["groups"]] == [
            ("a", 1, 0),
            ("b", 0, 1),
        ]
        assert [(c["client_name"], c["ended"], c["open"]) for c in status["clients"]] == [
            ("laptop of Ada", 1, 0),
            ("", 0, 1),
        ]
        assert "0 of 2 groups" in status["waiting"]


def test_events_are_streamed_in_order(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        served.begin()
        claimed = served.attempt("a", 1.0)
        kinds: list[str] = []
        with httpx.stream("GET", f"{served.url}{PREFIX}/events", timeout=10.0) as stream:
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: "))
                if line.startswith("data: ") and kinds[-1] == "ended":
                    assert claimed["episode_id"] in line
                    break
        assert kinds == ["step", "state", "claimed", "ended"]


def test_the_document_of_the_routes_names_all_of_them(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        document = httpx.get(f"{served.url}/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        assert f"{PREFIX}/episodes/{{id}}/end" in document["paths"]
        assert {"Claim", "Claimed", "End", "Receipt"} <= document["components"]["schemas"].keys()
        page = httpx.get(f"{served.url}/docs").text
        assert f"{PREFIX}/episodes" in page
