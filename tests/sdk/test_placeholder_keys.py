"""No API key is needed for what the policy answers, and a placeholder for one reaches no
provider."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import requests

import ajet
from ajet_sdk import run
from ajet_sdk.config.api_keys import KEYS, api_key, placeholder_in, placeholder_keys
from ajet_sdk.config.config import Config
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.open import open_engine
from ajet_sdk.errors import MissingResource
from tests.sdk.episodes import episode_of


def sdk(name: str) -> Any:
    """A vendor's package, imported where a test uses it: each worker of pytest-xdist imports every
    module of tests."""
    return importlib.import_module(name)


PRINT = (
    "import json, os; print(json.dumps({name: os.environ.get(name) for name in os.environ if 'KEY'"
    " in name}))"
)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in {*KEYS, *(other for others in KEYS.values() for other in others)}:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not [name for name in KEYS if name in os.environ and placeholder_in(os.environ[name])], (
        "all are removed"
    )


def test_they_are_set_where_no_key_is_and_removed_with_the_last_that_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "mine")
    monkeypatch.setenv("GEMINI_API_KEY", "mine")
    monkeypatch.setenv("MISTRAL_API_KEY", "mine")
    entered, leave = threading.Event(), threading.Event()

    def other_run() -> None:
        with placeholder_keys():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other_run)
    with placeholder_keys():
        thread.start()
        entered.wait()
    placed = {name for name in KEYS if placeholder_in(os.environ.get(name, ""))}
    assert placed == KEYS.keys() - {"ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "MISTRAL_API_KEY"}
    assert (api_key("MISTRAL_API_KEY"), api_key("OPENAI_API_KEY")) == ("mine", None)
    with placeholder_keys():
        os.environ["GROQ_API_KEY"] = "set by the agent"
    leave.set()
    thread.join()
    assert (
        os.environ.pop("GROQ_API_KEY") == "set by the agent" and "OPENAI_API_KEY" not in os.environ
    )


CLIENTS: list[Callable[[], Any]] = [
    lambda: openai.OpenAI().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}]
    ),
    lambda: openai.OpenAI().responses.create(model="m", input="hi"),
    lambda: openai.AzureOpenAI(
        api_version="2024-10-21", azure_endpoint="https://a.openai.azure.com"
    ).completions.create(model="m", prompt="hi"),
    lambda: (
        sdk("anthropic")
        .Anthropic()
        .messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    ),
    lambda: sdk("google.genai").Client().models.generate_content(model="m", contents="hi"),
]


@pytest.mark.parametrize("ask", CLIENTS)
def test_clients_are_made_without_a_key_and_answered_by_the_policy(ask: Callable[[], Any]) -> None:
    episode = episode_of(ask)
    assert (episode.status, [call.error for call in episode.calls]) == (
        "succeeded",
        [None],
    ), episode.error
    assert "placeholder" not in episode.model_dump_json()


def test_a_module_makes_its_client_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "with_clients.py").write_text(
        "import anthropic, openai\nclients = [openai.OpenAI(), anthropic.Anthropic()]"
    )
    assert len(load_object("with_clients.py->clients", tmp_path)) == 2


def test_a_run_gives_the_environment_back(tmp_path: Path) -> None:
    seen = []

    @ajet.workflow
    def agent(question: str) -> ajet.Reward:
        seen.append(dict(os.environ))
        CLIENTS[0]()
        return ajet.Reward(value=1.0)

    replies = tmp_path / "replies.py"
    replies.write_text("def reply(ask):\n    return 'ok'\n")
    config = Config.model_validate(
        {
            "experiment_name": "keys",
            "experiment_dir": str(tmp_path / "run"),
            "model": {"scripted": f"{replies}:reply"},
        }
    )
    report = run.run(config, workflow=agent, tasks=[{"question": "hi"}])
    assert report.episodes[0].status == "succeeded" and placeholder_in(seen[0]["ANTHROPIC_API_KEY"])


def by_header(url: str, **headers: str) -> Callable[[], Any]:
    return lambda: requests.post(
        url, json={"model": "m", "input": "x"}, headers=headers, timeout=300
    )


@pytest.mark.parametrize(
    ("send", "variable"),
    [
        (
            lambda: openai.OpenAI(max_retries=0).embeddings.create(model="m", input="x"),
            "OPENAI_API_KEY",
        ),
        (lambda: openai.OpenAI(max_retries=0).models.list(), "OPENAI_API_KEY"),
        (lambda: sdk("anthropic").Anthropic(max_retries=0).models.list(), "ANTHROPIC_API_KEY"),
        (
            lambda: sdk("google.genai").Client().models.embed_content(model="m", contents="x"),
            "GOOGLE_API_KEY",
        ),
        (
            lambda: httpx.get(
                f"https://api.mistral.ai/v1/models?key={os.environ['MISTRAL_API_KEY']}"
            ),
            "MISTRAL_API_KEY",
        ),
    ],
)
def test_what_would_carry_one_to_a_provider_ends_the_episode(
    send: Callable[[], Any], variable: str
) -> None:
    """Also where the agent catches the error; nothing is sent, for there is no network here to wait
    for."""

    def act() -> None:
        CLIENTS[0]()
        with pytest.raises(
            (MissingResource, openai.APIConnectionError, sdk("anthropic").APIConnectionError)
        ):
            send()

    episode = episode_of(act)
    assert (episode.status, episode.cause, episode.infrastructure) == (
        "failed",
        "MissingResource",
        False,
    )
    assert f"{variable} is not set" in str(episode.error) and "ajet-placeholder" not in str(
        episode.error
    )


def test_a_model_that_the_policy_does_not_play_needs_its_own_key() -> None:
    episode = episode_of(CLIENTS[0], policy_models=["another"])
    assert episode.cause == "MissingResource" and "OPENAI_API_KEY is not set" in str(episode.error)


def test_a_clients_telemetry_is_discarded_instead() -> None:
    """The OpenAI Agents SDK sends its spans with whatever key there is."""

    def act() -> None:
        CLIENTS[0]()
        headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        answer = httpx.post(
            "https://api.openai.com/v1/traces/ingest", json={"data": []}, headers=headers
        )
        assert answer.status_code == 204

    assert episode_of(act).status == "succeeded"


def test_a_child_process_gets_the_episodes_keys_and_no_placeholder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GROQ_API_KEY", "mine")
    found: dict[str, str] = {}

    def act() -> None:
        CLIENTS[0]()
        done = subprocess.run(
            [sys.executable, "-c", PRINT], capture_output=True, text=True, check=True
        )
        found.update(json.loads(done.stdout))

    assert episode_of(act).status == "succeeded"
    assert found["GROQ_API_KEY"] == "mine" and "MISTRAL_API_KEY" not in found
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"] and found[
        "OPENAI_API_KEY"
    ].startswith("ajet-")
    assert not any(placeholder_in(value) for value in found.values())


def test_no_engine_of_ajet_sends_one() -> None:
    config = Config.model_validate(
        {"model": {"base_url": "https://api.openai.com/v1", "name": "m"}}
    )
    with placeholder_keys():
        engine: Any = open_engine(config)
        assert placeholder_in(repr(vars(engine))) is None


def test_an_episode_without_a_call_is_a_fault_where_a_trainer_makes_it() -> None:
    episode = episode_of(lambda: None, must_call=True)
    assert (episode.status, episode.cause, episode.infrastructure, episode.rewards) == (
        "failed",
        "NoCalls",
        True,
        (),
    )
    for cause in ("caught an exception", "returned before its first call", "a parameter `model`"):
        assert cause in str(episode.error)
    assert episode_of(lambda: None).status == "succeeded", "in `ajet run` it is a notice"
    assert episode_of(CLIENTS[0], must_call=True).status == "succeeded"
