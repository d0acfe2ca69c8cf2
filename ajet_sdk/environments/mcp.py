"""The tools of an MCP server as an environment: `mcp:COMMAND` starts the server, one for each
instance.

An action is a message with tool calls, or with the text `{"name": ..., "arguments": {...}}`; the
observation has the result of each call. `info()["tools"]` has the tools in OpenAI's format. MCP has
no rewards; `--arg evaluate=TOOL` names a tool that returns the score, which is hidden from the
agent.

Results of tools, including their errors, are observations. If the server dies, times out or breaks
the protocol, the step fails.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from ajet_sdk.environments.spec import Spec, WrongTarget, answer

if TYPE_CHECKING:
    from mcp import ClientSession

    from ajet_sdk.types import Json, JsonView

_INVALID_PARAMS = -32602
"""The JSON-RPC error for arguments that do not match the tool's schema."""

_ENDING_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""A program that becomes the server, which the system kills (PR_SET_PDEATHSIG, SIGKILL) when this
process ends: `mcp` starts servers in a session of their own, where a hanging one would survive."""


def load(name: str, spec: Spec) -> Callable[[str], _Tools]:
    """Raises WrongTarget without a command, ImportError without the package `mcp`."""
    import mcp  # noqa: F401  fails here, not at the first instance

    command = shlex.split(name)
    if not command:
        raise WrongTarget("mcp: needs the server's command, such as mcp:'python server.py'")
    return lambda task_id: _Tools(command, task_id, spec.arguments.get("evaluate"))


class _Tools:
    """A running server, which gets the task id in the environment variable AJET_TASK_ID."""

    def __init__(self, command: list[str], task_id: str, scoring: str | None) -> None:
        self._command = command
        self._task_id = task_id
        self._scoring = scoring
        """The tool that returns the score, hidden from the agent."""
        self._offered: dict[str, Json] = {}
        """The agent's tools by name."""
        self._stack = AsyncExitStack()
        self._session: ClientSession

    async def reset(self) -> list[Json]:
        """Return no messages, as the task has the prompt. Raises WrongTarget without the scoring
        tool."""
        environment = {**os.environ, "AJET_TASK_ID": self._task_id}
        self._session = await self._stack.enter_async_context(_session(self._command, environment))
        await self._session.initialize()
        tools = await self._list()
        if self._scoring is not None and self._scoring not in tools:
            names = ", ".join(tools) or "none"
            raise WrongTarget(
                f"--arg evaluate={self._scoring}: the server has no tool of this name (tools:"
                f" {names})"
            )
        return []

    async def step(self, message: JsonView) -> Json:
        replies = [await self._reply(call) for call in _calls_of(message)]
        if not replies:
            hint = 'Call a tool, or write {"name": TOOL, "arguments": {...}}.'
            return answer(hint, 0.0, False, {"invalid": True})
        return answer(replies, 0.0, False, {})

    async def evaluate(self, params: JsonView) -> float:
        """Return the score of the scoring tool. Raises LookupError without one, ValueError if it is
        no number."""
        if self._scoring is None:
            raise LookupError(
                "an MCP server returns no score; name a tool that does: --arg evaluate=TOOL"
            )
        text, failed = await self._call(self._scoring, {})
        score = math.nan if failed else float(str(text))
        if not math.isfinite(score):
            raise ValueError(f"{self._scoring} returned no score: {text!s:.1000}")
        return score

    async def info(self, params: JsonView) -> Json:
        await self._list()
        functions = [
            {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["inputSchema"],
            }
            for tool in self._offered.values()
        ]
        return {"tools": [{"type": "function", "function": function} for function in functions]}

    async def close(self) -> None:
        await self._stack.aclose()

    async def _list(self) -> dict[str, Json]:
        """List all tools of the server by name, and store those of the agent."""
        import mcp.types

        tools: dict[str, Json] = {}
        cursor: str | None = None
        while True:
            page = await self._session.list_tools(
                params=mcp.types.PaginatedRequestParams(cursor=cursor)
            )
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
        content = await self._observation(function.get("name"), function.get("arguments"))
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": content}

    async def _observation(self, name: object, raw: object) -> str | list[Json]:
        """The observation of a tool call. Raises the errors of the server."""
        if not isinstance(name, str) or name not in self._offered:
            await self._list()  # a server may add tools
        if not isinstance(name, str) or name not in self._offered:
            return f"There is no tool {name!r:.100}. Tools: {', '.join(self._offered) or 'none'}."
        try:
            if isinstance(raw, str) and raw:
                arguments = json.loads(raw)
            else:
                arguments = raw or {}
            if not isinstance(arguments, Mapping):
                raise TypeError(f"{arguments!r:.100}")
            json.dumps(
                arguments, ensure_ascii=False, allow_nan=False
            ).encode()  # lone surrogates cannot be sent
        except (ValueError, TypeError, RecursionError) as error:  # a mistake of the agent
            return f"The arguments of {name} are not a JSON object: {error}"
        content, _ = await self._call(name, dict(arguments), checks=True)
        return content

    async def _call(
        self, name: str, arguments: Json, *, checks: bool = False
    ) -> tuple[str | list[Json], bool]:
        """Call a tool; returns the text of its result, with pictures the parts of a message, and
        whether the tool reports a failure.

        With `checks`, the server's refusal of the arguments counts as a result. Raises RuntimeError
        for all other errors of the protocol, such as a closed connection.
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
        return _content(fields.get("content", [])), bool(fields.get("isError"))


def _content(parts: Sequence[JsonView]) -> str | list[Json]:
    """The parts of a result as a message's content: text, or with pictures a list."""
    shown: list[Json] = []
    for part in parts:
        if part["type"] == "image":
            url = f"data:{part['mimeType']};base64,{part['data']}"
            shown.append({"type": "image_url", "image_url": {"url": url}})
        else:
            if part["type"] == "text":
                text = part["text"]
            else:
                text = f"[{part['type']}]"
            shown.append({"type": "text", "text": text})
    if any(part["type"] == "image_url" for part in shown):
        return shown
    return "\n".join(part["text"] for part in shown)


@asynccontextmanager
async def _session(command: list[str], environment: dict[str, str]) -> AsyncIterator[ClientSession]:
    """Start a server and open a session with it."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    if sys.platform == "linux":
        command = [sys.executable, "-ISc", _ENDING_WITH_PARENT, *command]
    server = StdioServerParameters(command=command[0], args=command[1:], env=environment)
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        yield session


def _calls_of(message: JsonView) -> list[JsonView]:
    """The tool calls of a message, or the call in its text; invalid calls become calls without a
    name."""
    calls = message.get("tool_calls")
    if calls:
        return [
            call if isinstance(call, Mapping) else {}
            for call in (calls if isinstance(calls, list) else [calls])
        ]
    try:
        spelt = json.loads(str(message.get("content") or ""))
    except (ValueError, RecursionError):
        return []
    if isinstance(spelt, dict) and "name" in spelt:
        return [{"function": spelt}]
    return []
