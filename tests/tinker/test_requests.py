"""Requests out of order, sent twice, of several clients, and to a server that was ended and started
again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.tinker.servers import IDS, Server, datum, logprobs, train
from tests.waiting import until

STEP = types.AdamParams(learning_rate=0.05)


def step(server: Server, model_id: str, number: int) -> str:
    reply = server.post(
        "optim_step", model_id=model_id, seq_id=number, adam_params=STEP.model_dump()
    )
    return str(reply.raise_for_status().json()["request_id"])


def trained(service: Any, model: Path, steps: int) -> np.ndarray[Any, Any]:
    """What so many steps of the SDK lead to."""
    trainer = train(service, model)
    for _ in range(steps):
        trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(STEP).result()
    return logprobs(trainer)[0]


@pytest.mark.slow
def test_requests_out_of_order_and_twice_are_applied_in_order_and_once(
    server: Server, service: Any
) -> None:
    trainer = train(service, server.model)
    step(server, trainer.model_id, 4)
    server.send_pass(trainer.model_id, 3, datum())
    step(server, trainer.model_id, 2)
    waiting = server.post("retrieve_future", request_id=f"{trainer.model_id}:2")
    assert waiting.status_code == 408
    assert "request 1 of" in waiting.json()["queue_state_reason"]  # a stall says what it waits for
    for _ in range(2):
        server.send_pass(trainer.model_id, 1, datum())
        promise = step(server, trainer.model_id, 4)
    metrics = server.result(promise).json()["metrics"]
    assert server.result(step(server, trainer.model_id, 4)).json()["metrics"] == metrics
    trainer._request_id_counter = trainer._turn_counter = 4
    np.testing.assert_array_equal(logprobs(trainer)[0], trained(service, server.model, 2))


def test_a_number_is_not_used_for_two_things(server: Server, service: Any) -> None:
    trainer = train(service, server.model)
    server.send_pass(trainer.model_id, 1, datum())
    reply = server.post("optim_step", model_id=trainer.model_id, seq_id=1, adam_params={})
    assert reply.status_code == 400
    assert "was forward_backward and can't be optim_step" in reply.json()["detail"]


@pytest.mark.slow
def test_each_client_has_an_adapter_of_its_own(server: Server, service: Any) -> None:
    alone = trained(service, server.model, 3)
    done: dict[int, Any] = {}

    def work(number: int) -> None:
        other = server.client()
        if number:
            done[number] = trained(other, server.model, 3)
        else:
            done[number] = logprobs(train(other, server.model))[0]
        other.close("success").result()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 2, 3):
        np.testing.assert_array_equal(done[number], alone)
    assert not np.allclose(done[0], alone, atol=1e-3)


@pytest.mark.slow
def test_states_are_saved_and_loaded(server: Server, service: Any) -> None:
    trainer = train(service, server.model)
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(STEP)
    path = trainer.save_state("one").result().path
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        trainer.save_state("one").result()
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(STEP)
    further = logprobs(trainer)[0]

    again = service.create_training_client_from_state_with_optimizer(path).result()
    again.forward_backward([datum()], "cross_entropy")
    again.optim_step(STEP)
    np.testing.assert_array_equal(logprobs(again)[0], further)

    fresh = service.create_training_client_from_state(path).result()
    fresh.forward_backward([datum()], "cross_entropy")
    fresh.optim_step(STEP)
    assert not np.array_equal(logprobs(fresh)[0], further)  # Adam's moments are part of a state

    trainer.load_state_with_optimizer(path).result()
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(STEP)
    np.testing.assert_array_equal(logprobs(trainer)[0], further)

    with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
        service.create_training_client_from_state(path + "x").result()
    rest = service.create_rest_client()
    assert [
        one.tinker_path for one in rest.list_checkpoints(trainer.model_id).result().checkpoints
    ] == [path]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not rest.list_checkpoints(trainer.model_id).result().checkpoints


@pytest.mark.slow
def test_a_server_that_is_started_again_goes_on(server: Server, tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, tmp_path / "undisturbed") as other:
        client = other.client()
        expected = trained(client, tiny, 4)
        client.close("success").result()
    with Server(tiny, tmp_path / "state") as mine:
        client = mine.client()
        trainer = train(client, tiny)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        for number in range(4):
            done = trainer.forward_backward([datum()], "cross_entropy")
            if number % 2:
                done.result()  # its gradient is lost with the server, and computed again
            mine.stop()
            later = trainer.optim_step(STEP)  # sent while nothing listens
            mine.start()
            later.result()
            done.result()
        np.testing.assert_array_equal(logprobs(trainer)[0], expected)
        prompt = types.ModelInput.from_ints(IDS)
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
        client.close("success").result()


def test_two_servers_do_not_share_a_state(server: Server, tiny: Path) -> None:
    with pytest.raises(ValueError, match="choose another --state"), Server(tiny, server.state):
        pass


def test_only_who_has_the_key_is_answered(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, tmp_path, api_key="tml-right") as keyed:
        assert keyed.post("create_session").status_code == 401
        with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
            tinker.ServiceClient(base_url=keyed.url, api_key="tml-wrong").create_sampling_client(
                base_model=str(tiny)
            ).result()
        client = tinker.ServiceClient(base_url=keyed.url, api_key="tml-right")
        assert len(logprobs(train(client, tiny))[0]) == len(IDS) - 1
        client.close("success").result()


def test_what_the_server_has_not_is_refused_by_name(server: Server, service: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="this server has the base model"):
        service.create_lora_training_client("someone/else").result()
    with pytest.raises(tinker.BadRequestError, match="this server has the base model"):
        service.create_sampling_client(base_model="someone/else").result()
    with pytest.raises(tinker.RequestFailedError, match="AdamW"):
        service.create_lora_training_client(
            str(server.model), optimizer=types.DimuonOptimizerConfig()
        ).result()
    with pytest.raises(tinker.RequestFailedError, match="a rank from 1"):
        service.create_lora_training_client(str(server.model), rank=0).result()
    with pytest.raises(
        tinker.NotFoundError, match="this server has no POST /api/v1/sessions/search"
    ):
        service.create_rest_client().search_sessions(_query()).result()
    assert server.post("get_info", model_id="nobody").status_code == 404


def _query() -> Any:
    return types.SessionSearchRequest.model_construct()


@pytest.mark.long
@pytest.mark.slow
def test_ten_kills_end_where_an_undisturbed_run_ends(
    service: Any, tiny: Path, tmp_path: Path
) -> None:
    """The command itself, killed while it works, at whatever it is at."""
    expected = trained(service, tiny, 10)
    command = [
        sys.executable,
        "-m",
        "ajet",
        "trainer",
        "serve",
        "--model",
        str(tiny),
        "--state",
        str(tmp_path / "s"),
    ]

    def start(port: int) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving"), line
        return process, line.split()[3]

    process, url = start(0)
    client = tinker.ServiceClient(base_url=url)
    trainer = train(client, tiny)
    for _ in range(10):
        trainer.forward_backward([datum()], "cross_entropy")
        later = trainer.optim_step(STEP)
        until(lambda: (tmp_path / "s" / "journal.sqlite").exists())
        process.kill()
        process.wait()
        process, _ = start(int(url.rpartition(":")[2]))
        later.result()
    np.testing.assert_array_equal(logprobs(trainer)[0], expected)
    httpx.post(
        f"{url}/api/v1/optim_step",
        json={"model_id": trainer.model_id, "seq_id": 99, "adam_params": {}},
    )
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(
            httpx.post,
            f"{url}/api/v1/retrieve_future",
            json={"request_id": f"{trainer.model_id}:99"},
        )
        until(lambda: poll.running())
        httpx.get(f"{url}/api/v1/healthz")
        process.send_signal(signal.SIGINT)
        assert poll.result().status_code == 408  # not yet: ask again
    assert process.stderr is not None and "Exception" not in process.stderr.read()
    assert process.wait() == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(url)
