"""`verifiers`' results.jsonl (0.1: `vf-eval --save-results`), a rollout a line.

Every assistant message of a completion was one call of the model. Rollouts of one `example_id` are attempts of one
group, in the order of the file. The file does not say when anything happened.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import ValidationError

from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Reward, Task
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, stable_id

_KNOWN = {
    "example_id", "prompt", "completion", "answer", "info", "task", "env_id", "reward", "error", "timing", "metrics",
    "is_completed", "is_truncated", "stop_condition", "tool_defs", "oai_tools", "token_usage", "error_chain",
    "long_error_chain", "trajectory", "generation_ms", "scoring_ms", "total_ms", "id",
}  # fmt: skip


def read(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """An episode for each row."""
    attempts: Counter[str] = Counter()
    for row in rows:
        value = row.value
        if not isinstance(value, Mapping) or "prompt" not in value or "completion" not in value:
            bad.add(row.where, "is not a verifiers rollout: it has no prompt and completion")
            continue
        try:
            group = str(value.get("example_id", ""))
            yield _episode(row, value, group, attempts[group] if group else 0)
            attempts[group] += 1
        except (ValidationError, TypeError, ValueError, AttributeError) as error:
            bad.add(row.where, f"cannot be read as an episode: {str(error).splitlines()[0]}")


def _episode(row: Row, value: Mapping[str, object], group: str, attempt: int) -> Parsed:
    episode_id = stable_id("verifiers", row.number, row.text)
    error = value.get("error")
    text = error.get("error_chain_str") or error.get("error") if isinstance(error, Mapping) else error
    reward = value.get("reward")
    numbers = {n: v for n, v in value.items() if n not in _KNOWN and isinstance(v, int | float)}
    field_names = ("example_id", "answer", "info", "task", "env_id", "timing", "stop_condition", "token_usage")
    metadata = {name: value[name] for name in field_names if value.get(name) not in (None, "", {})}
    metadata |= {n: v for n, v in value.items() if n not in _KNOWN and n not in numbers}
    prompt = _messages(value["prompt"], "user")
    return Parsed(
        episode=Episode(
            episode_id=episode_id,
            group_id=group,
            attempt=attempt,
            split="",
            task=Task(init_messages=prompt, metadata=metadata),
            calls=tuple(_calls(value, prompt, episode_id)),
            rewards=(Reward(value=reward),) if isinstance(reward, int | float) else (),
            status="failed" if text else "succeeded",
            error=str(text) if text else None,
            cause=str(error["error"]) if isinstance(error, Mapping) and error.get("error") else None,
            metrics=numbers,
            started_at=UNKNOWN_TIME,
            ended_at=UNKNOWN_TIME,
        )
    )


def _calls(value: Mapping[str, object], prompt: Sequence[dict[str, object]], episode_id: str) -> Iterator[Call]:
    trajectory = value.get("trajectory")
    if (
        isinstance(trajectory, list)
        and trajectory
        and all(isinstance(step, Mapping) and "prompt" in step and "completion" in step for step in trajectory)
    ):
        for i, step in enumerate(trajectory):
            asked, messages = _messages(step["prompt"], "user"), _messages(step["completion"], "assistant")
            yield _call(value, episode_id, i, asked, messages[-1] if messages else None, step.get("tokens"))
        return
    messages = [*prompt, *_messages(value["completion"], "assistant")]
    places = [i for i in range(len(prompt), len(messages)) if messages[i].get("role") == "assistant"]
    for i, index in enumerate(places):
        yield _call(value, episode_id, i, messages[:index], messages[index], None)


def _call(
    value: Mapping[str, object], episode_id: str, index: int, asked: Sequence[object], reply: object, tokens: object
) -> Call:
    tools = value.get("tool_defs") or value.get("oai_tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    prompt_ids = output_ids = logprobs = None
    if isinstance(tokens, Mapping) and tokens.get("prompt_ids") and tokens.get("completion_ids") is not None:
        prompt_ids, output_ids = tokens["prompt_ids"], tokens["completion_ids"]
        logprobs = tokens.get("completion_logprobs")
        logprobs = logprobs if logprobs and len(logprobs) == len(output_ids) else None
    return Call(
        call_id=stable_id("call", episode_id, index),
        episode_id=episode_id,
        index=index,
        trainable=output_ids is not None,
        request={"messages": list(asked), **({"tools": tools} if tools else {})},
        response={} if reply is None else {"choices": [{"index": 0, "message": reply}]},
        started_at=UNKNOWN_TIME,
        ended_at=UNKNOWN_TIME,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
    )


def _messages(value: object, role: str) -> list[dict[str, object]]:
    """Messages as OpenAI has them: a bare text is one, and tool calls that were written as JSON texts are read."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise TypeError(f"messages are not a list (got {type(value).__name__})")
    return [message_of(message) for message in value if isinstance(message, Mapping)]


def message_of(message: Mapping[str, object]) -> dict[str, object]:
    """A message with its tool calls as OpenAI has them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    return {**message, "tool_calls": [_tool_call(json.loads(c) if isinstance(c, str) else c) for c in calls]}


def _tool_call(call: object) -> object:
    if not isinstance(call, Mapping) or "function" in call or "name" not in call:
        return call
    function = {"name": call["name"], "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}
