"""Environments of `verifiers.v1` by the name of their installed package: `verifiers:gsm8k-v1`.

A verifiers environment sends requests to a model; here the agent answers them. The episode runs
with verifiers' harness `null`, whose model is a server in this process: a request is an
observation, and the agent's next action is the reply. Tools, turns and scoring are those of the
environment. A task id is an index into its tasks; `--arg` sets keys of the taskset's config. The
harness starts its program with `uv`, which must be on the path.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from ajet_sdk.environments.spec import Spec, UnknownTask, answer

if TYPE_CHECKING:
    from ajet_sdk.types import Json, JsonView


def load(name: str, spec: Spec) -> Callable[[str], _Conversation]:
    """Raises ImportError if verifiers or the package is not installed, ValueError for an invalid
    config."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, import_taskset, load_environment

    import_taskset(name)  # raises for an unknown name
    config_class: Any = concrete_type(environment_class(name), EnvConfig) or EnvConfig
    agents = [
        key for key, field in config_class.model_fields.items() if field.annotation is AgentConfig
    ]
    default = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = config_class.model_validate(
        {"taskset": {"id": name, **spec.arguments}, **dict.fromkeys(agents, default)}
    )

    def create(task_id: str) -> _Conversation:
        env = load_environment(config)
        if task_id.isdecimal():
            tasks = list(itertools.islice(env.taskset, int(task_id), int(task_id) + 1))
        else:
            tasks = []
        if not tasks:
            raise UnknownTask(
                f"a task of {spec.target} is an index into its tasks (got {task_id!r})"
            )
        return _Conversation(env, tasks[0])

    return create


class _Conversation:
    """A running episode of verifiers, with the requests to its model."""

    def __init__(self, env: Any, task: Any) -> None:
        self._env = env
        self._task = task
        self._stack = AsyncExitStack()
        self._asked: asyncio.Queue[tuple[Json, asyncio.Future[JsonView]]] = asyncio.Queue()
        self._pending: asyncio.Future[JsonView] | None = None
        self._episode: asyncio.Task[Any]
        self._known = 0
        self._tools: list[Json] = []

    async def reset(self) -> list[Json]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        url = await self._listen()
        await self._stack.enter_async_context(self._env.serving())
        model = ModelContext("agent", EvalClientConfig(base_url=url, api_key_var="AJET_NO_KEY"))
        self._episode = asyncio.create_task(self._env.run_episode(self._task, model))
        return await self._observe() or []

    async def step(self, message: JsonView) -> Json:
        if self._pending is None:
            raise LookupError("the episode is over")
        self._pending.set_result(message)
        messages = await self._observe()
        if messages is None:
            return answer("The episode is over.", self._reward(), True, {})
        return answer(messages, 0.0, False, {})

    async def evaluate(self, params: JsonView) -> float:
        """Return the episode's reward. If the agent stopped early, empty actions are sent until the
        episode ends."""
        while self._pending is not None:
            await self.step({"content": ""})
        return self._reward()

    def info(self, params: JsonView) -> Json:
        return {"tools": self._tools}

    async def close(self) -> None:
        self._episode.cancel()
        await asyncio.gather(self._episode, return_exceptions=True)
        await self._stack.aclose()

    async def _observe(self) -> list[Json] | None:
        """The messages that the next request adds to the last one; None if the episode is over."""
        request = asyncio.create_task(self._asked.get())
        await asyncio.wait([request, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            self._pending = None
            return None
        body, self._pending = request.result()
        new = body["messages"][self._known :]
        self._known, self._tools = len(body["messages"]), body.get("tools") or []
        return [message for message in new if message["role"] != "assistant"]

    def _reward(self) -> float:
        """The reward of the episode. Raises the episode's errors."""
        episode = self._episode.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or errors:
            raise RuntimeError(
                "; ".join(f"{error.type}: {error.message}" for error in errors)
                or "the episode failed"
            )
        return float(sum(trace.reward for trace in episode.traces))

    async def _listen(self) -> str:
        """Start a server on loopback that forwards requests to the agent; returns its base URL."""
        from aiohttp import web

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            reply: asyncio.Future[JsonView] = asyncio.get_running_loop().create_future()
            self._asked.put_nowait((body, reply))
            message = await reply
            if not body.get("stream"):
                return web.json_response(_completion("message", message))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            chunk = json.dumps(_completion("delta", message))
            await response.write(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())
            return response

        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


def _completion(key: str, message: JsonView) -> Json:
    """An OpenAI completion with the agent's message as the only choice, under `message` or
    `delta`."""
    reply: Json = {"role": "assistant", "content": message.get("content") or ""}
    calls = message.get("tool_calls") or []
    if calls:
        reply["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    choice = {"index": 0, key: reply, "finish_reason": "tool_calls" if calls else "stop"}
    kind = "chat.completion" if key == "message" else "chat.completion.chunk"
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": "agent",
        "object": kind,
        "created": 0,
        "model": "agent",
        "choices": [choice],
        "usage": usage,
    }
