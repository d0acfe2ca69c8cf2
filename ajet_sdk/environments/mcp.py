"""The tools of an MCP server as an environment: `mcp:COMMAND` starts the server, one for each instance.

An action is a message with tool calls, or one whose text is `{"name": ..., "arguments": {...}}`; the observation has an
answer to each call. `info()["tools"]` has the tools as an OpenAI request takes them. There is no reward of the server's
own; where it has a tool for the score, `--arg evaluate=TOOL` names it, and the agent can neither see nor call it.

What a tool answers, an error of its own too, is an observation. A server that dies, does not answer in time or breaks
the protocol has failed, which is raised.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from ajet_sdk.environments.hosted import Spec, WrongTarget, answer

if TYPE_CHECKING:
    from mcp import ClientSession

    from ajet_sdk.types import Json, JsonView

_INVALID_PARAMS = -32602
"""The JSON-RPC error that arguments have which do not fit the tool's schema."""

_LONGEST_LINE = 2**28
"""Bytes of one message of a server."""

_CLOSING = 2.0
"""Seconds that a server has to end once its input is closed."""


def load(name: str, spec: Spec) -> Callable[[str], _Tools]:
    """Raises WrongTarget without a command, ImportError without the package `mcp`."""
    import mcp  # noqa: F401  said now and not when the first instance is asked for

    command = shlex.split(name)
    if not command:
        raise WrongTarget("mcp: needs the server's command, such as mcp:'python server.py'")
    return lambda task_id: _Tools(command, task_id, spec.arguments.get("evaluate"))


class _Tools:
    """A server under way. It is told the task in its environment, as AJET_TASK_ID."""

    def __init__(self, command: list[str], task_id: str, scoring: str | None) -> None:
        self._command = command
        self._task_id = task_id
        self._scoring = scoring
        """The tool that gives the score, which is not the agent's."""
        self._offered: dict[str, Json] = {}
        """The agent's tools by name."""
        self._stack = AsyncExitStack()
        self._session: ClientSession

    async def reset(self) -> list[Json]:
        """No messages: the task says what is asked. Raises WrongTarget where the server has no such scoring tool."""
        environment = {**os.environ, "AJET_TASK_ID": self._task_id}
        self._session = await self._stack.enter_async_context(_session(self._command, environment))
        await self._session.initialize()
        tools = await self._list()
        if self._scoring is not None and self._scoring not in tools:
            names = ", ".join(tools) or "none"
            raise WrongTarget(f"--arg evaluate={self._scoring}: the server has no tool of this name (tools: {names})")
        return []

    async def step(self, message: JsonView) -> Json:
        replies = [await self._reply(call) for call in _calls_of(message)]
        if not replies:
            hint = 'Call a tool, or write {"name": TOOL, "arguments": {...}}.'
            return answer(hint, 0.0, False, {"invalid": True})
        return answer(replies, 0.0, False, {})

    async def evaluate(self, params: JsonView) -> float:
        """The score, of the tool that gives it. Raises LookupError without one, ValueError where it is no number."""
        if self._scoring is None:
            raise LookupError("an MCP server returns no score; name a tool that does: --arg evaluate=TOOL")
        text, failed = await self._call(self._scoring, {})
        score = math.nan if failed else float(text)
        if not math.isfinite(score):
            raise ValueError(f"{self._scoring} returned no score: {text}")
        return score

    async def info(self, params: JsonView) -> Json:
        await self._list()
        return {"tools": [_as_function(tool) for tool in self._offered.values()]}

    async def close(self) -> None:
        await self._stack.aclose()

    async def _list(self) -> dict[str, Json]:
        """All tools of the server by name, from every page of its list; those of the agent are kept."""
        import mcp.types

        tools: dict[str, Json] = {}
        cursor: str | None = None
        while True:
            page = await self._session.list_tools(params=mcp.types.PaginatedRequestParams(cursor=cursor))
            listed = page.model_dump(mode="json", by_alias=True, exclude_none=True)
            tools |= {tool["name"]: tool for tool in listed["tools"]}
            cursor = listed.get("nextCursor")
            if not cursor:
                break
        self._offered = {name: tool for name, tool in tools.items() if name != self._scoring}
        return tools

    async def _reply(self, call: JsonView) -> Json:
        function = call.get("function")
        if not isinstance(function, Mapping):
            function = {}
        text = await self._observation(function.get("name"), function.get("arguments"))
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": text}

    async def _observation(self, name: object, raw: object) -> str:
        """What a call of the agent comes to. Raises what the server did wrong."""
        if not isinstance(name, str) or name not in self._offered:
            await self._list()  # a server may add tools as it goes
        if not isinstance(name, str) or name not in self._offered:
            return f"There is no tool {name!r:.100}. Tools: {', '.join(self._offered) or 'none'}."
        try:
            arguments = _arguments_of(raw)
        except (ValueError, TypeError, RecursionError) as error:  # the agent's mistake
            return f"The arguments of {name} are not a JSON object: {error}"
        text, _ = await self._call(name, arguments, checks=True)
        return text

    async def _call(self, name: str, arguments: Json, *, checks: bool = False) -> tuple[str, bool]:
        """The text of a tool's result, and whether the tool says that it failed.

        With `checks`, the server's refusal of arguments is such a result too. Raises RuntimeError for every other error
        of the protocol, whose cause is the server: the connection is closed, the server failed within.
        """
        import mcp

        protocol_error: Any = getattr(mcp, "MCPError", None) or getattr(mcp, "McpError")  # noqa: B009  # its name in 2.x, and in 1.x
        try:
            result = await self._session.call_tool(name, arguments)
        except protocol_error as error:
            if checks and error.error.code == _INVALID_PARAMS:
                return str(error), True
            raise RuntimeError(f"the MCP server failed in a call of {name}: {error}") from error
        fields = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        texts = [part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in fields.get("content", [])]
        return "\n".join(texts), bool(fields.get("isError"))


@asynccontextmanager
async def _session(command: list[str], environment: dict[str, str]) -> AsyncIterator[ClientSession]:
    """A session with a server that is started for it.

    The server stays in this process's group and so ends with it, however that ends: `mcp.client.stdio` starts it in a
    session of its own, where one that hangs would go on.
    """
    import anyio
    from mcp import ClientSession
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCMessage
    from pydantic import TypeAdapter

    messages: TypeAdapter[JSONRPCMessage] = TypeAdapter(JSONRPCMessage)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=environment, limit=_LONGEST_LINE
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    arrived, read = anyio.create_memory_object_stream[SessionMessage](0)
    write, leaving = anyio.create_memory_object_stream[SessionMessage](0)

    async def receive() -> None:
        async with arrived:  # its end is the connection's
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for line in stdout:
                    with suppress(ValueError):  # a line of a log
                        await arrived.send(SessionMessage(messages.validate_json(line)))

    async def send() -> None:
        async with leaving:
            with suppress(ConnectionError):  # it has died, which `receive` sees
                async for message in leaving:
                    stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await stdin.drain()

    pumps = [asyncio.create_task(receive()), asyncio.create_task(send())]
    try:
        async with ClientSession(read, write) as session:
            yield session
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        stdin.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _CLOSING)
        if process.returncode is None:
            process.kill()


def _calls_of(message: JsonView) -> list[JsonView]:
    """The tool calls of a message, or the one that its text spells; what is no call is one without a name."""
    calls = message.get("tool_calls")
    if calls:
        return [call if isinstance(call, Mapping) else {} for call in (calls if isinstance(calls, list) else [calls])]
    try:
        spelt = json.loads(str(message.get("content") or ""))
    except (ValueError, RecursionError):
        return []
    return [{"function": spelt}] if isinstance(spelt, dict) and "name" in spelt else []


def _arguments_of(raw: object) -> Json:
    """Raises ValueError, TypeError or RecursionError where these are no JSON object that can be sent."""
    arguments = json.loads(raw) if isinstance(raw, str) and raw else raw or {}
    if not isinstance(arguments, Mapping):
        raise TypeError(f"{arguments!r:.100}")
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # half of a surrogate pair cannot be sent
    return dict(arguments)


def _as_function(tool: JsonView) -> Json:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}
