"""Rows of other trainers as rows of token ids (`ajet_tools/trace/imports/token_rows.py`).

Each converter takes a row of JSON and raises KeyError, TypeError or ValueError for another form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ajet_tools.trace.imports.sink import stable_id
from ajet_tools.trace.imports.token_rows import Converter, agree

_SPLITS = {"train": "train", "eval": "val"}


def verifiers(line: Any) -> Iterator[dict[str, object]]:
    """`traces.jsonl` of verifiers 0.4: a graph of messages for each agent, whose sampled nodes are
    calls."""
    run = line.get("run") or {}
    work = run.get("work") or {}
    for trace in line["traces"]:
        key = trace["task"].get("key") or line["id"]
        group = line["group"]["id"] if line.get("group") else key
        error = (trace.get("errors") or [{"message": "not ok"}])[-1]
        rewards = trace.get("rewards") or {}
        episode = {
            "episode_id": trace["id"],
            "run_id": run.get("id", ""),
            "group_id": f"{group}:{trace['agent']['name']}",
            "step": work.get("step", 0),
            "split": _SPLITS.get(str(work.get("type")), ""),
            "task_id": key,
            "task": trace["task"].get("data"),
            "rewards": [_reward(name, score) for name, score in rewards.items() if score],
            "metrics": trace.get("metrics") or {},
            "status": "succeeded" if trace["ok"] else "failed",
            "error": None if trace["ok"] else error["message"],
            "cause": None if trace["ok"] else error.get("type"),
        }
        for row in _sampled_nodes(trace) or [{}]:
            yield {**episode, **row}


def _reward(name: str, score: Mapping[str, object]) -> dict[str, object]:
    return {"name": name, "value": score["score"], "weight": score.get("weight", 1.0)}


def _sampled_nodes(trace: Any) -> list[dict[str, object]]:
    """Return a row for each sampled node, with all tokens on its path from the root."""
    paths: list[list[Any]] = []
    rows = []
    for index, node in enumerate(trace["nodes"]):
        parent = node.get("parent")
        if parent is not None and not 0 <= parent < index:
            raise ValueError(
                f"the parent of node {index} is node {parent}, which is no earlier one"
            )
        before = [] if parent is None else paths[parent]
        paths.append([*before, node])
        mask = node.get("mask") or []
        agree(f"node {index}: mask", mask, len(node.get("token_ids") or ()))
        if any(mask) and not node.get("sampled"):
            raise ValueError(f"node {index}: the mask is on tokens that no model sampled")
        if not node.get("sampled"):
            continue
        first = mask.index(True) if True in mask else len(mask)
        if not all(mask[first:]):
            raise ValueError(f"node {index}: a token is not sampled, but one before it is")
        prompt = [token for earlier in before for token in earlier.get("token_ids") or ()]
        row = _row(
            [*prompt, *node["token_ids"][:first]] if mask else None,
            node["token_ids"][first:] if mask else None,
            logprobs=node.get("logprobs") or None,
            advantages=node.get("advantages"),
            trainer_logprobs=node.get("trainer_logprobs"),
            entropies=node.get("entropies"),
        )
        row["messages"] = [_with_openai_calls(earlier["message"]) for earlier in before]
        row["reply"] = _with_openai_calls(node["message"])
        row["agent"] = trace["agent"]["name"]
        row["trainable"] = trace["agent"].get("trainable", True)
        row["time"] = node.get("timestamp")
        rows.append(row)
    return rows


def _with_openai_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for value in message.get("tool_calls") or ():
        call = json.loads(value) if isinstance(value, str) else value
        if "function" not in call and "name" in call:
            function = {"name": call["name"], "arguments": call.get("arguments")}
            call = {"id": call.get("id"), "type": "function", "function": function}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else dict(message)


def _row(
    prompt_ids: Sequence[int] | None, output_ids: Sequence[int] | None, **of_output: Any
) -> dict[str, Any]:
    """Return a row of a call. Lists in `of_output` have a value for each sampled token."""
    if prompt_ids is None or output_ids is None:
        return {}
    if not isinstance(prompt_ids, list) or not isinstance(output_ids, list):
        raise TypeError("the token ids are no lists")
    before = [0] * len(prompt_ids)
    row: dict[str, Any] = {"token_ids": [*prompt_ids, *output_ids]}
    row["loss_mask"] = [*before, *[1] * len(output_ids)]
    for name, values in of_output.items():
        if isinstance(values, list):
            agree(name, values, len(output_ids), "sampled tokens")
            values = [*before, *values]
        row[name] = values
    return row


def trl(value: Any) -> Iterator[dict[str, object]]:
    """TRL 1.16: a `RolloutSample` of `AsyncGRPOTrainer`, or what a `rollout_func` returns, also a
    batch with a list a column."""
    columns = {name: column for name, column in value.items() if isinstance(column, list)}
    batch = columns.get("completion_ids")
    if batch and isinstance(batch[0], list):
        for name, column in columns.items():
            agree(name, column, len(batch), "completions")
        for index in range(len(batch)):
            yield from trl({name: column[index] for name, column in columns.items()})
        return
    mask = _first(value, "completion_mask", "env_mask", "tool_mask")
    values = {
        "logprobs": _first(value, "logprobs", "old_log_probs"),
        "advantages": _first(value, "advantages", "advantage"),
    }
    tokens = value.get("input_ids")
    if tokens is not None:
        row = {"token_ids": tokens, "loss_mask": mask, **values}
    else:
        completion = value["completion_ids"]
        row = _row(
            value["prompt_ids"], completion, loss_mask=mask or [1] * len(completion), **values
        )
    row["policy_version"] = value.get("model_version")
    row["group_id"] = str(value.get("group_id", ""))
    row["reward"] = value.get("reward", (value.get("metrics") or {}).get("reward"))
    yield {**row, **_trl_messages(value)}


def _first(value: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if value.get(name) is not None:
            return value[name]
    return None


def _trl_messages(value: Mapping[str, Any]) -> dict[str, object]:
    prompt, completion = value.get("prompt") or [], value.get("completion") or []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return {"messages": prompt, "reply": completion[-1]} if completion else {}


def tinker(value: Any) -> Iterator[dict[str, object]]:
    """A `Datum` of the SDK 0.38, whose targets are the input shifted by one."""
    inputs = [token for chunk in value["model_input"]["chunks"] for token in chunk["tokens"]]
    given = {}
    for name, tensor in value["loss_fn_inputs"].items():
        given[name] = tensor["data"] if isinstance(tensor, dict) else tensor
    targets = [int(token) for token in given["target_tokens"]]
    agree("target_tokens", targets, len(inputs), "input tokens")
    if targets[:-1] != inputs[1:]:
        raise ValueError("the targets are not the input shifted by one")
    row: dict[str, object] = {"token_ids": [inputs[0], *targets]}
    given["loss_mask"] = _datum_mask(value, given)
    row["mask_guessed"] = not given["loss_mask"]
    if row["mask_guessed"]:
        given["loss_mask"] = [advantage != 0 for advantage in given["advantages"]]
    for name in ("loss_mask", "logprobs", "advantages"):
        if name in given:
            agree(name, given[name], len(targets), "targets")
            row[name] = [0, *given[name]]
    row["group_id"] = str(value.get("group_idx", ""))
    row["attempt"] = value.get("traj_idx", 0)
    yield {**row, "reward": value.get("reward")}


def _datum_mask(value: Any, given: Mapping[str, Any]) -> list[float]:
    """Return which targets were sampled, by the provenance spans of a Datum or else by its mask or
    weights; empty where it has none of these."""
    weights = given.get("mask") or given.get("weights") or []
    size = len(given["target_tokens"])
    provenance: list[float] = []
    for name in ("model_input_spans", "loss_fn_input_spans"):  # the second is of the targets
        provenance = []
        for span in value.get(name) or ():
            provenance += [span["type"].lower().startswith("sampled")] * span["length"]
        if value.get(name) is not None:
            agree(name, provenance, size)
    if not provenance:
        return list(weights)
    for index, weight in enumerate(weights):
        if weight and not provenance[index]:
            raise ValueError(f"target {index} is trained, but its provenance is a prompt")
    return provenance


def tinker_capture(value: Any) -> Iterator[dict[str, object]]:
    """A line of `capture/sample.jsonl` of tinker-cookbook 0.6: a request and its samples."""
    scope = value.get("scope") or {}
    group = [str(scope.get(name)) for name in ("run_id", "split", "iteration", "group_idx")]
    trajectory = scope.get("traj_idx")
    for drawn in value["samples"]:
        row = _row(value["prompt_tokens"], drawn["tokens"], logprobs=drawn.get("logprobs"))
        row["group_id"] = ":".join(group)
        if trajectory is not None and len(value["samples"]) == 1:
            row["episode_id"] = stable_id("tinker", *group, trajectory)
        yield row


def rllm(value: Any) -> Iterator[dict[str, object]]:
    """`Episode.to_dict()` of rLLM 0.3; its id is `TASK:ATTEMPT`, and a trajectory is an agent's."""
    group, _, attempt = value["id"].partition(":")
    metrics = value.get("metrics") or {}
    episode = {
        "episode_id": value["id"],
        "group_id": group,
        "attempt": int(attempt) if attempt.isdigit() else 0,
        "task": value.get("task") or group,
        "metrics": {n: v for n, v in metrics.items() if isinstance(v, int | float)},
        "is_success": bool(value.get("is_correct")),
    }
    for trajectory in value["trajectories"]:
        name = trajectory.get("name") or "default"
        if trajectory.get("reward") is not None:
            yield {**episode, "rewards": [{"value": trajectory["reward"], "agent": name}]}
        for step in trajectory["steps"]:
            row = _row(
                step["prompt_ids"],
                step["response_ids"],
                logprobs=step.get("logprobs") or None,
                advantages=step.get("advantage"),
            )
            row |= _spoken(step.get("chat_completions") or [])
            yield {**episode, **row, "agent": name, "policy_version": step.get("weight_version")}


def _spoken(chat: Sequence[Any]) -> dict[str, object]:
    if chat and chat[-1].get("role") == "assistant":
        return {"messages": chat[:-1], "reply": chat[-1]}
    return {"messages": chat}


def agent_lightning(event: Any) -> Iterator[dict[str, object]]:
    """An `Event` of agent-lightning's server 1.0, from `/rollouts/ID/events`, also as triplet."""
    rollout, data = event["rollout_id"], event["data"]
    row: dict[str, object] = {"reward": data.get("value")}
    if event["event_type"] not in ("reward", "model_request"):
        return
    if event["event_type"] == "model_request":
        response = data.get("response") or {}
        choice = (response.get("choices") or [{}])[0]  # the one that it trains on
        prompt_ids = data.get("prompt_token_ids") or response.get("prompt_token_ids")
        logprobs = choice.get("logprobs") or {}
        listed = logprobs.get("token_logprobs")
        if logprobs.get("content") is not None:
            listed = [token["logprob"] for token in logprobs["content"]]
        row = _row(
            prompt_ids or choice.get("prompt_token_ids"),
            _first(data, "response_token_ids") or choice.get("token_ids"),
            logprobs=_first(data, "response_log_probs") or listed,
        )
        row["messages"] = (data.get("request") or {}).get("messages") or []
        row |= {"reply": choice.get("message"), "policy_version": data.get("model_version")}
        row["call_error"] = None if data.get("status", "ok") == "ok" else "the request failed"
    episode_id = stable_id("agent-lightning", rollout, event["attempt_id"])
    yield {**row, "episode_id": episode_id, "group_id": rollout, "time": event["timestamp"]}


CONVERTERS: dict[str, Converter] = {
    "verifiers": verifiers,
    "trl": trl,
    "tinker": tinker,
    "tinker-capture": tinker_capture,
    "rllm": rllm,
    "agent-lightning": agent_lightning,
}
