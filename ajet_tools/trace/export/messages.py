"""OpenAI chat messages, one conversation a line; and the same as ShareGPT.

Task rows, as `task_reader.type: jsonl_dataset_file` reads them back: each task once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from ajet_sdk.dialects.message_parts import content_text
from ajet_sdk.types import Episode
from ajet_tools.trace.export.conversations import conversations
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.export.target import json_line


def about(episode: Episode, agent: str | None = None, call_id: str | None = None) -> dict[str, object]:
    """The fields that every row has of its episode: ids, status, reward."""
    return {
        "episode_id": episode.episode_id,
        "run_id": episode.run_id,
        "group_id": episode.group_id,
        "task_id": episode.task.task_id,
        "attempt": episode.attempt,
        "step": episode.step,
        "split": episode.split,
        "decoding": episode.decoding,
        "status": episode.status,
        "agent": agent,
        "reward": episode.reward if agent is None else episode.value(agent, call_id),
    }


def write_messages(job: Job, file: BinaryIO) -> None:
    """A line for each conversation: `messages`, `tools`, and in `calls` which messages are replies of which call."""
    for record in job.records():
        job.write(file, record, _conversation_rows(record.episode))


def _conversation_rows(episode: Episode) -> Iterator[dict[str, object]]:
    index = {call.call_id: call.index for call in episode.calls}
    for conversation in conversations(episode):
        calls = [{"call_id": c, "index": index[c], "message": place} for c, place in conversation.turns]
        row = {"messages": conversation.messages, "tools": conversation.tools}
        yield {**row, **about(episode, conversation.agent), "calls": calls}


def write_sharegpt(job: Job, file: BinaryIO) -> None:
    """A line for each conversation, in the form that LLaMA-Factory and Axolotl read."""
    for record in job.records():
        rows = (
            {**sharegpt(c.messages, c.tools), **about(record.episode, c.agent)} for c in conversations(record.episode)
        )
        job.write(file, record, rows)


_ROLES = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def sharegpt(messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None) -> dict[str, object]:
    """`conversations` of `from` and `value`; tool calls and tools are JSON texts, as that form has them."""
    turns = [part for message in messages for part in _turns(message)]
    offered = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools or ()]
    return {"conversations": turns, "tools": json.dumps(offered, ensure_ascii=False) if offered else ""}


def _turns(message: Mapping[str, object]) -> Iterator[dict[str, str]]:
    role = str(message.get("role", ""))
    calls = message.get("tool_calls")
    functions = [_function(call) for call in calls] if isinstance(calls, list) else []
    content = content_text(message.get("content"))
    if content or not functions:
        yield {"from": _ROLES.get(role, role), "value": content}
    if functions:
        whole: object = functions[0] if len(functions) == 1 else functions
        yield {"from": "function_call", "value": json.dumps(whole, ensure_ascii=False)}


def _function(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {"name": function.get("name"), "arguments": arguments}
    return {"name": function.get("name"), "arguments": arguments}


def write_tasks(job: Job, file: BinaryIO) -> None:
    """One line for each task: the first form in which an id is met; a second one under the same id is left out."""
    known: dict[bytes, bytes] = {}
    for record in job.records():
        task = record.episode.task
        line = json_line(task.model_dump())
        digest = hashlib.blake2b(line, digest_size=16).digest()
        key = hashlib.blake2b(task.task_id.encode("utf-8", "replace"), digest_size=16).digest()
        if not (task.main_query or task.init_messages or task.metadata):
            job.left_out["episodes without a task"] += 1
        elif key not in known:
            known[key] = digest
            file.write(line)
            job.wrote(record)
        elif known[key] != digest:
            job.left_out["episodes whose task has the id of another task"] += 1
        else:
            job.wrote(record, rows=0)
