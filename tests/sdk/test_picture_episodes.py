"""Random episodes with pictures over HTTP, in four dialects, from the request to the trained tokens."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.pictures import Picture
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.reader import calls_of, open_trace
from ajet_sdk.trace.writer import TraceWriter
from tests.tiny_vision import picture, plain_pass, save_tiny_vision

pytestmark = pytest.mark.slow
EPISODES = 40
TYPED = ("Which move?", "<|image_pad|>", "up", "a <|vision_start|> b", "")
Part = Picture | str


@dataclass
class Turn:
    said: list[Part]
    by_tool: bool
    reply: str = ""


@dataclass
class Talk:
    """A conversation, before it is written in a dialect."""

    turns: list[Turn] = field(default_factory=list)

    def pictures(self) -> list[Picture]:
        return [part for turn in self.turns for part in turn.said if isinstance(part, Picture)]


def encoded(shown: Picture) -> str:
    return base64.b64encode(shown.data).decode()


def completions(talk: Talk) -> tuple[str, dict[str, Any]]:
    def part(value: Part) -> dict[str, Any]:
        if isinstance(value, str):
            return {"type": "text", "text": value}
        return {"type": "image_url", "image_url": {"url": value.url, "detail": "auto"}}

    messages: list[dict[str, Any]] = []
    for turn in talk.turns:
        role = {"role": "tool", "tool_call_id": "c1"} if turn.by_tool else {"role": "user"}
        messages.append({**role, "content": list(map(part, turn.said))})
        messages.append({"role": "assistant", "content": turn.reply})
    return "chat/completions", {"messages": messages[:-1], "max_completion_tokens": 6}


def responses(talk: Talk) -> tuple[str, dict[str, Any]]:
    def part(value: Part) -> dict[str, Any]:
        if isinstance(value, str):
            return {"type": "input_text", "text": value}
        return {"type": "input_image", "image_url": value.url, "detail": "auto"}

    items: list[dict[str, Any]] = []
    for turn in talk.turns:
        said = list(map(part, turn.said))
        if turn.by_tool:
            items.append({"type": "function_call_output", "call_id": "c1", "output": said})
        else:
            items.append({"role": "user", "content": said})
        items.append({"role": "assistant", "content": turn.reply})
    return "responses", {"input": items[:-1], "max_output_tokens": 6}


def messages(talk: Talk) -> tuple[str, dict[str, Any]]:
    def part(value: Part) -> dict[str, Any]:
        if isinstance(value, str):
            return {"type": "text", "text": value}
        source = {"type": "base64", "media_type": value.media_type, "data": encoded(value)}
        return {"type": "image", "source": source}

    written: list[dict[str, Any]] = []
    for turn in talk.turns:
        said = list(map(part, turn.said))
        if turn.by_tool:
            said = [{"type": "tool_result", "tool_use_id": "c1", "content": said}]
        written.append({"role": "user", "content": said})
        written.append({"role": "assistant", "content": turn.reply})
    return "messages", {"messages": written[:-1], "max_tokens": 6}


def gemini(talk: Talk) -> tuple[str, dict[str, Any]]:
    def part(value: Part) -> dict[str, Any]:
        if isinstance(value, str):
            return {"text": value}
        return {"inlineData": {"mimeType": value.media_type, "data": encoded(value)}}

    contents: list[dict[str, Any]] = []
    for turn in talk.turns:
        contents.append({"role": "user", "parts": list(map(part, turn.said))})
        contents.append({"role": "model", "parts": [{"text": turn.reply}]})
    limit = {"maxOutputTokens": 6}
    return "models/m:generateContent", {"contents": contents[:-1], "generationConfig": limit}


DIALECTS = {
    "completions": completions,
    "responses": responses,
    "messages": messages,
    "gemini": gemini,
}


def reply_of(name: str, body: dict[str, Any]) -> str:
    if name == "completions":
        return body["choices"][0]["message"]["content"] or ""
    if name == "responses":
        return "".join(p["text"] for item in body["output"] for p in item.get("content") or ())
    if name == "messages":
        return "".join(part["text"] for part in body["content"])
    return "".join(part.get("text", "") for part in body["candidates"][0]["content"]["parts"])


def draw_part(draw: random.Random) -> Part:
    if draw.random() < 0.5:
        return draw.choice(TYPED)
    width, height = draw.choice([(64, 64), (64, 64), (64, 32)])
    return picture(draw.randrange(6), width, height)


def talk_to(episode: OpenEpisode, seed: int) -> tuple[list[list[Picture]], int]:
    """Run a random conversation; returns the pictures of each request, and how often the agent
    exchanged an earlier picture for one of the same size."""
    draw = random.Random(seed)
    name = draw.choice(list(DIALECTS))
    model = episode.model()
    base = model.base_url.removesuffix("/v1")
    at = f"{base}/v1beta" if name == "gemini" else f"{base}/v1"
    headers = {"authorization": f"Bearer {model.api_key}", "x-api-key": model.api_key}
    if name == "gemini":
        headers = {"x-goog-api-key": model.api_key}
    talk, sent, swaps = Talk(), list[list[Picture]](), 0
    with httpx.Client(headers=headers, timeout=120) as client:
        for number in range(draw.randint(1, 4)):
            if number and draw.random() < 0.2:
                swaps += swap(talk, draw)
            said = [draw_part(draw) for _ in range(draw.randint(1, 4))]
            by_tool = bool(number) and name != "gemini" and draw.random() < 0.3
            talk.turns.append(Turn(said, by_tool))
            route, body = DIALECTS[name](talk)
            answer = client.post(f"{at}/{route}", json={"model": "m", **body})
            assert answer.status_code == 200, answer.text
            talk.turns[-1].reply = reply_of(name, answer.json())
            sent.append(talk.pictures())
    return sent, swaps


def swap(talk: Talk, draw: random.Random) -> int:
    places = [
        (turn, i) for turn in talk.turns for i, p in enumerate(turn.said) if isinstance(p, Picture)
    ]
    if not places:
        return 0
    turn, i = draw.choice(places)
    old = turn.said[i]
    assert isinstance(old, Picture)
    turn.said[i] = picture(50 + draw.randrange(5), old.width, old.height)
    return 1


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TokenEngine, Any]]:
    place = save_tiny_vision("qwen3_vl", tmp_path_factory.mktemp("vision"))
    tokenizer, model = HFTokenizer(place), load_model(place)
    sampler = LocalSampler(model, tokenizer, model_name="m", max_model_len=4000)
    yield TokenEngine(sampler, tokenizer), model


def check_episodes(
    trace: Path,
    model: Any,
    tokenizer: HFTokenizer,
    sent: dict[str, Sequence[list[Picture]]],
    swaps: int,
) -> int:
    """Every call of the trace has the pictures that were sent, in order, and log-probabilities that
    the model gives these tokens with these pictures; returns the number of timelines beyond one an
    episode."""
    branches = 0
    with open_trace(trace) as reader:
        for episode_id, requests in sent.items():
            calls = calls_of(reader, episode_id)
            assert [[p.picture for p in call.pictures] for call in calls] == list(requests)
            for call in calls:
                expected = plain_pass(model, tokenizer, call)[:, 0].numpy()
                assert np.abs(expected - call.logprobs).max() < 1e-5
            lines = merge(calls, tokenizer.decode).timelines
            trained = [span.call_id for line in lines for span in line.spans]
            assert sorted(trained) == sorted(call.call_id for call in calls)
            branches += len(lines) - 1
    assert branches <= swaps
    return branches


def test_random_episodes_have_no_wrong_token(
    seeing: tuple[TokenEngine, Any], tmp_path: Path
) -> None:
    run_episodes(seeing, tmp_path, EPISODES)


def run_episodes(seeing: tuple[TokenEngine, Any], place: Path, count: int) -> None:
    engine, model = seeing
    tokenizer = engine.tokenizer
    assert isinstance(tokenizer, HFTokenizer)
    trace = place / "trace.duckdb"
    sent: dict[str, Sequence[list[Picture]]] = {}
    with TraceWriter(trace) as writer, Gateway(writer) as gateway:
        opened = [gateway.open(EpisodeSpec(f"e{n}", engine)) for n in range(count)]
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(talk_to, opened, range(count)))
        for n, (requests, _) in enumerate(told):
            sent[f"e{n}"] = requests
    swaps = sum(swapped for _, swapped in told)
    branches = check_episodes(trace, model, tokenizer, sent, swaps)
    assert swaps and branches, "the control: exchanged pictures split timelines"
