"""The tools of an MCP server as an environment: `mcp:COMMAND` starts the server, one for each instance.

An action is a message with tool calls, or one whose text is `{"name": ..., "arguments": {...}}`; the observation has an
answer to each call. `info()["tools"]` has the tools as an OpenAI request takes them. There is no reward of the server's
own; where it has a tool for the score, `--arg evaluate=TOOL` names it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from ajet_sdk.environments.hosted import Spec, WrongTarget, answer, split_of

__all__ = ["load"]


def load(name: str, spec: Spec) -> _Server:
    """Raises WrongTarget without a command, ImportError without the package `mcp`."""
    import mcp  # noqa: F401  said now and not when the first instance is asked for

    command = shlex.split(name)
    if not command:
        raise WrongTarget("mcp: needs the server's command, such as mcp:'python server.py'")
    return _Server(command, spec)


class _Server:
    def __init__(self, command: list[str], spec: Spec) -> None:
        self._command = command
        self._spec = spec

    def tasks(self, split: str) -> list[str]:
        return split_of(self._spec, split)

    def create(self, task_id: str, params: Mapping[str, Any]) -> _Tools:
        return _Tools(self._command, task_id, self._spec.arguments.get("evaluate"))


class _Tools:
    """A server under way. It is told the task in its environment, as AJET_TASK_ID."""

    def __init__(self, command: list[str], task_id: str, evaluate: str | None) -> None:
        self._command = command
        self._task_id = task_id
        self._evaluate = evaluate
        self._stack = AsyncExitStack()
        self._session: Any = None

    async def reset(self) -> list[dict[str, Any]]:
        """No messages: the task says what is asked."""
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        environment = {**os.environ, "AJET_TASK_ID": self._task_id}
        server = StdioServerParameters(command=self._command[0], args=self._command[1:], env=environment)
        streams = await self._stack.enter_async_context(stdio_client(server))
        self._session = await self._stack.enter_async_context(ClientSession(*streams))
        await self._session.initialize()
        return []

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        replies = [await self._reply(call) for call in _calls_of(message)]
        if not replies:
            said = 'Call a tool, or write {"name": TOOL, "arguments": {...}}.'
            return answer(said, 0.0, False, {"invalid": True})
        return answer(replies, 0.0, False, {})

    async def evaluate(self, params: Mapping[str, Any]) -> float:
        """The score, of the tool that gives it. Raises LookupError without one, ValueError where it is no number."""
        if self._evaluate is None:
            raise LookupError("an MCP server returns no score; name a tool that does: --arg evaluate=TOOL")
        text, failed = await self._call(self._evaluate, {})
        if failed:
            raise ValueError(f"{self._evaluate} failed: {text}")
        return float(text)

    async def info(self, params: Mapping[str, Any]) -> dict[str, Any]:
        listed = (await self._session.list_tools()).tools
        tools = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in listed]
        return {"tools": [_as_function(tool) for tool in tools if tool["name"] != self._evaluate]}

    async def close(self) -> None:
        await self._stack.aclose()

    async def _reply(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", {})
        name = str(function.get("name"))
        try:
            given = function.get("arguments") or {}
            arguments = json.loads(given) if isinstance(given, str) else dict(given)
            text, _ = await self._call(name, arguments)
        except (ValueError, TypeError) as error:
            text = f"The arguments of {name} are not a JSON object: {error}"  # the agent's mistake
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": text}

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The text of a tool's result, and whether the tool says that it failed."""
        import mcp

        error: Any = getattr(mcp, "MCPError", None) or mcp.McpError  # its name in 2.x, and in 1.x
        try:
            result = await self._session.call_tool(name, arguments)
        except error as refused:  # an unknown tool, arguments that do not fit: the server's own words
            return str(refused), True
        found = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        texts = [part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in found.get("content", [])]
        return "\n".join(texts), bool(found.get("isError"))


def _calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if message.get("tool_calls"):
        return list(message["tool_calls"])
    try:
        said = json.loads(str(message.get("content") or ""))
    except ValueError:
        return []
    return [{"function": said}] if isinstance(said, dict) and "name" in said else []


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}
