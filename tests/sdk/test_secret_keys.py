"""No text under a key that names a secret reaches a file, at whatever depth; and the files are
their owner's."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.run import run
from ajet_sdk.secret_keys import is_secret, masked
from ajet_sdk.trace.reader import open_trace
from ajet_tools.trace.redact import Redactor

SECRET = "hunter2-hunter2"
NAMES = [
    "token", "api_key", "apikey", "apiKey", "X-API-Key", "openai_api_key", "API_KEYS", "authorization",
    "Proxy-Authorization", "password", "db.password", "passwd", "hf_token", "github-token", "accessToken",
    "client_secret", "private_key", "aws_secret_access_key", "Set-Cookie", "credentials",
]  # fmt: skip
HARMLESS = [
    "eos_token",
    "pad_token",
    "next_page_token",
    "max_tokens",
    "tokens",
    "tokenizer",
    "api_key_env",
    "secretary",
]


def inside(depth: int) -> st.SearchStrategy[Any]:
    leaf = st.sampled_from(NAMES).flatmap(
        lambda name: st.sampled_from([{name: SECRET}, {name: [SECRET, [SECRET]]}])
    )
    return st.recursive(
        leaf, lambda below: st.lists(below) | st.dictionaries(st.text(), below), max_leaves=depth
    )


@given(value=inside(8))
def test_nothing_under_a_secret_key_is_left_at_any_depth(value: Any) -> None:
    assert SECRET not in json.dumps(masked(value, "***"))
    assert SECRET not in json.dumps(Redactor().value(value))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_sounds_like_one_stays(name: str) -> None:
    assert not is_secret(name) and masked({name: "<eos>"}, "***") == {name: "<eos>"}


def test_the_tokens_of_a_reply_and_the_schema_of_a_password_stay() -> None:
    reply = {
        "logprobs": {
            "content": [
                {"token": "7", "logprob": -0.5, "top_logprobs": [{"token": "8", "logprob": -1}]}
            ]
        }
    }
    schema = {"properties": {"password": {"type": "string", "description": "of the account"}}}
    assert masked([reply, schema], "***") == [reply, schema]


@ajet.workflow
def leaky(task: ajet.Task) -> dict[str, Any]:
    return {"said": "done", "headers": {"Authorization": SECRET}}


@pytest.fixture
def for_all_to_read() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_run_keeps_secrets_out_of_its_files_and_the_files_to_their_owner(
    tmp_path: Path, for_all_to_read: None
) -> None:
    (tmp_path / "replies.py").write_text("def reply(ask): return 'hi'\n")
    place = tmp_path / "runs" / "one"
    config = load_config(
        values={
            "ajet": {
                "experiment_dir": str(place),
                "model": {"scripted": f"{tmp_path}/replies.py->reply"},
            },
            "service": {"nested": [{"token": SECRET}]},
        }
    )
    seen = []
    task = {"question": "q", "token": SECRET, "login": {"user": "me", "password": SECRET}}
    report = run(
        config,
        workflow=leaky,
        judge=ajet.judge(lambda output: 1.0),
        tasks=[task],
        on_episode=lambda _: seen.extend(
            (p, stat.S_IMODE(p.stat().st_mode)) for p in place.rglob("*") if p.is_file()
        ),
    )
    assert report.reward == 1.0 and report.tasks[0].task.metadata["token"] == SECRET, (
        "the agent has it"
    )
    trace = open_trace(place)
    stored = [
        trace.query(f"SELECT * FROM {table}").to_pylist()
        for table in ("runs", "episodes", "calls", "rewards")
    ]
    assert SECRET not in str(stored) + (place / "config.yaml").read_text()
    assert "***" in str(yaml.safe_load((place / "config.yaml").read_text())["service"])
    after = [(p, stat.S_IMODE(p.stat().st_mode)) for p in place.rglob("*") if p.is_file()]
    assert {p.name for p, _ in seen} >= {"trace.duckdb", "config.yaml", "gateway.json"}
    assert {(p.name, oct(mode)) for p, mode in seen + after if mode != 0o600} == set()
    assert {
        oct(stat.S_IMODE(p.stat().st_mode)) for p in [place, *place.iterdir()] if p.is_dir()
    } == {"0o700"}
