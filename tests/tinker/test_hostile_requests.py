"""Requests of a client that means harm, or has a bug: ids are no paths, sizes are limited, wrong
types are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.trainer_service.fields import MOST_SAMPLES
from tests.tinker.servers import IDS, Server, train

LORA = {"rank": 4, "seed": 1}


@pytest.fixture
def session(server: Server) -> str:
    return str(server.post("create_session").json()["session_id"])


@pytest.fixture
def victim(server: Server) -> Iterator[Path]:
    """A file beside the server's state, as a client must not reach it."""
    place = server.state.parent / "victim"
    place.mkdir(exist_ok=True)
    (place / "precious").write_text("here")
    yield place
    assert (place / "precious").read_text() == "here"
    assert [path.name for path in place.iterdir()] == ["precious"]


def create(server: Server, session: object, number: object, **more: Any) -> httpx.Response:
    body = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": str(server.model),
        "lora_config": LORA,
    }
    return server.post("create_model", **{**body, **more})


IDS_THAT_ARE_PATHS = [
    "../../../victim",
    "../victim",
    "..",
    ".",
    "/tmp/x",
    "a/b",
    "a\\b",
    "a\x00b",
    "x:train:1",
    "",
    "a_b",
]


@pytest.mark.parametrize("wrong", IDS_THAT_ARE_PATHS, ids=repr)
def test_ids_of_clients_never_become_paths(
    server: Server, session: str, victim: Path, wrong: str
) -> None:
    before = sorted(server.state.parent.rglob("*.safetensors"))
    assert create(server, session, wrong).status_code == 400
    assert create(server, wrong, 0).status_code == 400
    assert server.post("load_weights", session_id=wrong, model_seq_id=0, path="tinker://x", optimizer=True,
                       base_model=str(server.model)).status_code == 400  # fmt: skip
    sampling = {
        "session_id": session,
        "sampling_session_seq_id": wrong,
        "base_model": str(server.model),
    }
    assert server.post("create_sampling_session", **sampling).status_code == 400
    for route in (
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "optim_step",
        "get_info",
    ):
        assert server.post(route, model_id=wrong, seq_id=1, path=wrong).status_code in (400, 404)
    for path in (
        f"tinker://{wrong}/weights/x",
        f"tinker://{session}:train:0/weights/{wrong}",
        wrong,
    ):
        assert server.post("weights_info", tinker_path=path).status_code in (400, 404)
        assert server.post("create_sampling_session", session_id=session, sampling_session_seq_id=1,
                           model_path=path).status_code in (400, 404)  # fmt: skip
    assert sorted(server.state.parent.rglob("*.safetensors")) == before


@pytest.mark.parametrize(
    "path", ["../victim", "..%2fvictim", "%2e%2e/victim", "x:train:0/weights/..", "a/weights/b"]
)
def test_checkpoints_outside_of_the_state_are_not_deleted(
    server: Server, victim: Path, path: str
) -> None:
    for method in ("DELETE", "GET"):
        for end in ("", "/archive", "/external_weights_urls"):
            url = f"{server.url}/api/v1/training_runs/{path.replace('/weights/', '/checkpoints/weights/')}{end}"
            assert httpx.request(method, url).status_code in (400, 404)
    assert httpx.get(f"{server.url}/files/{path}").status_code in (403, 404)


def test_a_link_opens_files_of_adapters_alone(server: Server, service: Any) -> None:
    """Without the secret of a link nothing is read, and with it nothing beside the adapters."""
    trainer = train(service, server.model)
    path = trainer.save_weights_external("linked").result().path
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    link = urls["adapter_config.json"]
    assert httpx.get(link).json()["r"] == 4
    secret, place = re.search("/files/([^/]+)/(.+)", link).groups()  # type: ignore[union-attr]
    others = [
        place.replace("adapter_config.json", "lora.json"),
        "journal.sqlite",
        place.replace("adapter_config.json", ".."),
        f"{place.rpartition('/')[0]}/../../../../adapter_x",
        "%2e%2e/%2e%2e/etc/adapter_passwd",
    ]
    for other in others:
        assert httpx.get(f"{server.url}/files/{secret}/{other}").status_code == 404, other
    assert httpx.get(f"{server.url}/files/{'x' * len(secret)}/{place}").status_code == 403


WRONG: list[object] = ["7", -1, 1.5, True, None, [], {}, 2**80]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_wrong_types_are_refused(server: Server, session: str, value: object) -> None:
    for name in ("session_id", "model_seq_id"):
        given = {"session_id": session, "model_seq_id": 3}
        if name == "session_id" and value == "7":
            continue  # an id like any other
        assert create(server, **{**renamed(given), renamed_key(name): value}).status_code == 400, (
            name
        )
    assert server.post("retrieve_future", request_id=value).status_code in (400, 404, 410)
    assert server.post("session_heartbeat", session_id=value).status_code in (200, 400)
    assert server.post("weights_info", tinker_path=value).status_code in (400, 404)
    for route in ("optim_step", "save_weights", "load_weights", "save_weights_for_sampler"):
        assert server.post(
            route, model_id=value, seq_id=1, path="x", optimizer=True
        ).status_code in (400, 404)


def renamed(given: dict[str, object]) -> dict[str, object]:
    return {renamed_key(name): value for name, value in given.items()}


def renamed_key(name: str) -> str:
    return {"session_id": "session", "model_seq_id": "number"}[name]


def sample_body(sampler: str, **more: Any) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": IDS}]
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": chunks}}
    return {**body, "sampling_params": {"max_tokens": 2}, "num_samples": 1, **more}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_samples": 20_000_000},
        {"num_samples": MOST_SAMPLES + 1},
        {"num_samples": -1},
        {"num_samples": 0},
        {"num_samples": "4"},
        {"num_samples": 1.5},
        {"seq_id": "x"},
        {"seq_id": -1},
        {"prompt": None},
        {"prompt": {"chunks": "abc"}},
        {"prompt": {"chunks": [{"tokens": "abc"}]}},
        {"prompt": {"chunks": [{"tokens": [1, "2"]}]}},
        {"prompt": {"chunks": [{"tokens": [1, 2**40]}]}},
        {"prompt": {"chunks": [7]}},
        {"sampling_params": None},
        {"sampling_params": {"max_tokens": "9"}},
        {"sampling_params": {"max_tokens": -3}},
        {"sampling_params": {"temperature": "hot"}},
        {"sampling_params": {"top_p": []}},
        {"sampling_params": {"top_k": 1.5}},
        {"sampling_params": {"stop": 7}},
        {"sampling_params": {"stop": [1, "a"]}},
        {"sampling_params": {"stop": [None]}},
        {"topk_prompt_logprobs": 10**6},
        {"topk_prompt_logprobs": "5"},
        {"prompt_logprobs_last_n": "5"},
    ],
    ids=json.dumps,
)
def test_a_wrong_request_to_sample_is_refused_at_once(
    server: Server, session: str, wrong: dict[str, Any]
) -> None:
    opened = server.post("create_sampling_session", session_id=session, sampling_session_seq_id=0,
                         base_model=str(server.model))  # fmt: skip
    sampler = opened.raise_for_status().json()["sampling_session_id"]
    refused = server.post("asample", **sample_body(sampler, **wrong))
    assert refused.status_code == 400, refused.text
    assert server.post("asample", **sample_body(sampler, seq_id=1)).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"lora_config": {"rank": "4"}},
        {"lora_config": [4]},
        {"lora_config": {"rank": 4, "train_mlp": "yes"}},
        {"lora_config": {"rank": 4, "seed": "a"}},
        {"base_model": 7},
        {"user_metadata": "text"},
    ],
    ids=json.dumps,
)
def test_a_wrong_model_is_refused_at_once(
    server: Server, session: str, wrong: dict[str, Any]
) -> None:
    assert create(server, session, 0, **wrong).status_code == 400


def test_steps_of_wrong_types_are_refused_at_once(server: Server, session: str) -> None:
    model = f"{session}:train:0"
    create(server, session, 0).raise_for_status()
    for wrong in (
        {"adam_params": [1]},
        {"adam_params": {"learning_rate": "1"}},
        {"adam_params": {"beta1": None}},
    ):
        assert server.post("optim_step", model_id=model, seq_id=1, **wrong).status_code == 400
    assert server.post("save_weights", model_id=model, seq_id=1, path=7).status_code == 400
    assert server.post("save_weights", model_id=model, seq_id=1, overwrite="yes").status_code == 400


def test_bodies_are_limited_and_must_be_objects(server: Server) -> None:
    url = f"{server.url}/api/v1/create_session"
    small = b"x" * 2**20
    for content in (b"[]", b"7", b"\xff", b"{", b"[" * 100_000, b'{"model_id": "\\ud800"}'):
        assert httpx.post(f"{server.url}/api/v1/get_info", content=content).status_code == 400

    def parts() -> Iterator[bytes]:
        for _ in range(70):
            yield small

    try:
        announced = httpx.post(f"{server.url}/api/v1/get_info", content=parts()).status_code
    except httpx.TransportError:  # the server closes the connection while the client still sends
        announced = 413
    assert announced == 413
    try:
        known = httpx.post(f"{server.url}/api/v1/get_info", content=small * 70).status_code
    except httpx.TransportError:
        known = 413
    assert known == 413
    assert httpx.post(url, json={}).status_code == 200, "the server still answers"


def test_queries_must_be_numbers(server: Server) -> None:
    for query in ("offset=x", "limit=-1", "limit=1e3", f"offset={'9' * 40}"):
        assert httpx.get(f"{server.url}/api/v1/training_runs?{query}").status_code == 400
    assert httpx.get(f"{server.url}/api/v1/training_runs?limit=2").status_code == 200
