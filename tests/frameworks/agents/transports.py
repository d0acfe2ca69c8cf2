"""requests, httpx, aiohttp, urllib3 and urllib, without an SDK."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import aiohttp
import httpx
import requests
import urllib3

import ajet

URL = "https://api.openai.com/v1/chat/completions"
HEADERS = {"Authorization": "Bearer key", "Content-Type": "application/json"}


def body(question: str, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": question}],
        "stream": stream,
    }


def text(reply: Any) -> str:
    return str(reply["choices"][0]["message"]["content"])


def pieces(lines: Any) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]
    )


@ajet.workflow
def chat_plain_requests(question: str) -> str:
    return text(requests.post(URL, json=body(question), headers=HEADERS, timeout=600).json())


@ajet.workflow
def chat_stream_requests(question: str) -> str:
    with requests.post(
        URL, json=body(question, True), headers=HEADERS, stream=True, timeout=600
    ) as reply:
        return pieces(line.decode() for line in reply.iter_lines())


@ajet.workflow
def chat_plain_httpx(question: str) -> str:
    return text(httpx.post(URL, json=body(question), headers=HEADERS).json())


@ajet.workflow
def chat_stream_httpx(question: str) -> str:
    with httpx.stream("POST", URL, json=body(question, True), headers=HEADERS) as reply:
        return pieces(reply.iter_lines())


@ajet.workflow
async def chat_plain_aiohttp(question: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(URL, json=body(question), headers=HEADERS) as reply,
    ):
        return text(await reply.json())


@ajet.workflow
async def chat_stream_aiohttp(question: str) -> str:
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.post(URL, json=body(question, True)) as reply,
    ):
        return pieces([line.decode().strip() async for line in reply.content])


@ajet.workflow
def chat_plain_urllib3(question: str) -> str:
    data = json.dumps(body(question)).encode()
    return text(
        json.loads(urllib3.PoolManager().request("POST", URL, body=data, headers=HEADERS).data)
    )


@ajet.workflow
def chat_stream_urllib3(question: str) -> str:
    data = json.dumps(body(question, True)).encode()
    reply = urllib3.PoolManager().request(
        "POST", URL, body=data, headers=HEADERS, preload_content=False
    )
    return pieces(b"".join(reply.stream()).decode().splitlines())


@ajet.workflow
def chat_plain_urllib(question: str) -> str:
    request = urllib.request.Request(URL, json.dumps(body(question)).encode(), HEADERS)
    with urllib.request.urlopen(request) as reply:
        return text(json.load(reply))


@ajet.workflow
def chat_stream_urllib(question: str) -> str:
    request = urllib.request.Request(URL, json.dumps(body(question, True)).encode(), HEADERS)
    with urllib.request.urlopen(request) as reply:
        return pieces(line.decode().strip() for line in reply)
