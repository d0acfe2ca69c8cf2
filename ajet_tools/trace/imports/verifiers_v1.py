"""Imports `traces.jsonl` of `verifiers` (0.4): an episode per line, with a graph of messages for
each agent.

A node has the tokens that it adds to its parents; every sampled node is a call of the model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone

from pydantic import BaseModel

from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Reward, Run, Trained
from ajet_tools.trace.imports.sampled import agree, each, sampled_call, scored
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, task_of


class _Node(BaseModel):
    parent: int | None = None
    message: dict[str, object]
    sampled: bool = False
    timestamp: float = 0
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] | None = None
    trainer_logprobs: list[float] | None = None
    entropies: list[float] | None = None


class _Score(BaseModel):
    score: float
    weight: float = 1.0


class _Task(BaseModel):
    type: str = ""
    data: dict[str, object] = {}
    key: str | None = None


class _Agent(BaseModel):
    name: str = "agent"
    trainable: bool = True


class _Error(BaseModel):
    type: str
    message: str


class _Trace(BaseModel):
    id: str
    task: _Task
    agent: _Agent = _Agent()
    nodes: list[_Node] = []
    rewards: dict[str, _Score | None] = {}
    metrics: dict[str, float | None] = {}
    ok: bool = False
    errors: list[_Error] = []


class _Work(BaseModel):
    type: str
    step: int = 0


class _Run(BaseModel):
    id: str
    name: str | None = None
    work: _Work | None = None


class _Group(BaseModel):
    id: str


class _Line(BaseModel):
    id: str
    group: _Group | None = None
    run: _Run | None = None
    traces: list[_Trace] = []


def read(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read an episode per agent trace; traces of a group or task are its attempts."""
    attempts: Counter[str] = Counter()
    runs: set[str] = set()

    def parse(row: Row) -> Iterator[Parsed]:
        line = _Line.model_validate(row.value)
        if line.run is not None and line.run.id not in runs:
            runs.add(line.run.id)
            run = Run(
                run_id=line.run.id,
                name=line.run.name or "",
                status="finished",
                started_at=UNKNOWN_TIME,
            )
            yield Parsed(run=run)
        for trace in line.traces:
            group = (
                f"{line.group.id if line.group else trace.task.key or line.id}:{trace.agent.name}"
            )
            yield _episode(line, trace, group, attempts[group])
            attempts[group] += 1

    return each(rows, bad, parse)


def _episode(line: _Line, trace: _Trace, group: str, attempt: int) -> Parsed:
    work = line.run.work if line.run else None
    calls: list[Call] = []
    trained: list[Trained] = []
    for at, node in enumerate(trace.nodes):
        try:
            if node.sampled:
                call = _call(trace, at, len(calls))
                calls.append(call)
                trained += scored(
                    call,
                    work.step if work else 0,
                    node.advantages,
                    node.trainer_logprobs,
                    node.entropies,
                )
            elif any(node.mask):
                raise ValueError("the mask is on tokens that no model sampled")
        except ValueError as error:
            raise ValueError(f"trace {trace.id}, node {at}: {error}") from error
    asked = calls[0].request.get("messages") if calls else [node.message for node in trace.nodes]
    last = trace.errors[-1] if trace.errors else None
    times = [_time(node.timestamp) for node in trace.nodes]
    return Parsed(
        episode=Episode(
            episode_id=trace.id,
            run_id=line.run.id if line.run else "",
            group_id=group,
            attempt=attempt,
            step=work.step if work else 0,
            split={"train": "train", "eval": "val"}.get(work.type, "") if work else "",  # type: ignore[arg-type]
            task=task_of(
                asked,
                trace.task.data,
                trace.id,
                {"task_id": trace.task.key} if trace.task.key else None,
            ),
            calls=tuple(calls),
            rewards=tuple(
                Reward(name=n, value=r.score, weight=r.weight)
                for n, r in trace.rewards.items()
                if r
            ),
            status="succeeded" if trace.ok else "failed",
            error=None if trace.ok else last.message if last else "not ok",
            cause=None if trace.ok else last.type if last else None,
            metrics={name: value for name, value in trace.metrics.items() if value is not None},
            started_at=min(times, default=UNKNOWN_TIME),
            ended_at=max(times, default=UNKNOWN_TIME),
        ),
        trained=tuple(trained),
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _call(trace: _Trace, at: int, index: int) -> Call:
    """Convert a sampled node to a call. Raises ValueError for inconsistent tokens, mask and
    log-probabilities."""
    node, path, parent = trace.nodes[at], list[_Node](), trace.nodes[at].parent
    while parent is not None:
        if not 0 <= parent < at:
            raise ValueError(f"its parent is node {parent}, which is no earlier one")
        path.insert(0, trace.nodes[parent])
        at, parent = parent, trace.nodes[parent].parent
    agree("mask", node.mask, len(node.token_ids))
    first = node.mask.index(True) if True in node.mask else len(node.mask)
    if not all(node.mask[first:]):
        raise ValueError(
            f"token {node.mask.index(False, first)} is not sampled, but one before it is"
        )
    prompt = [token for earlier in path for token in earlier.token_ids] + node.token_ids[:first]
    return sampled_call(
        trace.id,
        index,
        prompt if node.token_ids else None,
        node.token_ids[first:] if node.token_ids else None,
        node.logprobs or None,
        messages=[_message_of(earlier.message) for earlier in path],
        reply=_message_of(node.message),
        agent=trace.agent.name,
        trainable=trace.agent.trainable,
        at=_time(node.timestamp),
    )


def _message_of(message: Mapping[str, object]) -> dict[str, object]:
    """Convert the tool calls of a message to OpenAI's format."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    return {
        **message,
        "tool_calls": [_tool_call(json.loads(c) if isinstance(c, str) else c) for c in calls],
    }


def _tool_call(call: object) -> object:
    if not isinstance(call, Mapping) or "function" in call or "name" not in call:
        return call
    function = {"name": call["name"], "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}
