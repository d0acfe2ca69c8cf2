"""Rows of other trainers as rows of token ids (`ajet_tools/trace/imports/token_rows.py`).

Each converter takes a row of JSON and raises KeyError, TypeError or ValueError for another form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ajet_tools.trace.imports.sink import stable_id
from ajet_tools.trace.imports.token_rows import Converter, agree

TokenFields = dict[str, Any]
"""Columns of a row of token ids."""


def _call(
    prompt_ids: Sequence[int] | None, output_ids: Sequence[int] | None, **of_output: Any
) -> TokenFields:
    """Return the columns of one call. Lists in `of_output` have a value for each sampled token."""
    if prompt_ids is None or output_ids is None:
        return {}
    if not isinstance(prompt_ids, list) or not isinstance(output_ids, list):
        raise TypeError("the token ids are no lists")
    before = [0] * len(prompt_ids)
    columns: TokenFields = {"token_ids": prompt_ids + output_ids}
    for name, values in {"loss_mask": [1] * len(output_ids), **of_output}.items():
        if isinstance(values, list):
            agree(name, values, len(output_ids), "sampled tokens")
            values = before + values
        columns[name] = values
    return columns


def _first(value: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if value.get(name) is not None:
            return value[name]
    return None


def verifiers(line: Any) -> Iterator[TokenFields]:
    """`traces.jsonl` of verifiers 0.4: a graph of messages for each agent."""
    run = line.get("run") or {}
    work = run.get("work") or {}
    for trace in line["traces"]:
        task = trace["task"]
        key = task.get("key") or line["id"]
        group = (line.get("group") or {"id": key})["id"]
        episode = {
            "episode_id": trace["id"],
            "run_id": run.get("id", ""),
            "group_id": f"{group}:{trace['agent']['name']}",
            "step": work.get("step", 0),
            "split": {"train": "train", "eval": "val"}.get(str(work.get("type")), ""),
            "task_id": key,
            "task": task.get("data"),
            "rewards": _verifiers_rewards(trace.get("rewards") or {}),
            "metrics": trace.get("metrics") or {},
        }
        if not trace["ok"]:
            error = (trace.get("errors") or [{"message": "not ok"}])[-1]
            episode |= {"status": "failed", "error": error["message"], "cause": error.get("type")}
        for call in _sampled_nodes(trace) or [{}]:
            yield {**episode, **call}


def _verifiers_rewards(scores: Mapping[str, Any]) -> list[dict[str, object]]:
    rewards = []
    for name, score in scores.items():
        if score:
            weight = score.get("weight", 1.0)
            rewards.append({"name": name, "value": score["score"], "weight": weight})
    return rewards


def _sampled_nodes(trace: Any) -> list[TokenFields]:
    """Each sampled node of verifiers' graph is a call, whose prompt is its path from the root."""
    paths: list[list[Any]] = []
    calls = []
    for index, node in enumerate(trace["nodes"]):
        parent = node.get("parent")
        if parent is not None and not 0 <= parent < index:
            raise ValueError(
                f"the parent of node {index} is node {parent}, which is no earlier one"
            )
        before = [] if parent is None else paths[parent]
        paths.append([*before, node])
        ids = node.get("token_ids") or []
        mask = node.get("mask") or []
        agree(f"node {index}: mask", mask, len(ids))
        if not node.get("sampled"):
            if any(mask):
                raise ValueError(f"node {index}: the mask is on tokens that no model sampled")
            continue
        start = mask.index(True) if True in mask else len(mask)
        if not all(mask[start:]):
            raise ValueError(f"node {index}: a token is not sampled, but one before it is")
        prompt = list(chain.from_iterable(earlier.get("token_ids") or () for earlier in before))
        names = ("logprobs", "advantages", "trainer_logprobs", "entropies")
        values = {name: node.get(name) or None for name in names}
        call = {}
        if mask:
            call = _call(prompt + ids[:start], ids[start:], **values)
        call["messages"] = [_verifiers_message(earlier["message"]) for earlier in before]
        call["reply"] = _verifiers_message(node["message"])
        call["agent"] = trace["agent"]["name"]
        call["trainable"] = trace["agent"].get("trainable", True)
        call["time"] = node.get("timestamp")
        calls.append(call)
    return calls


def _verifiers_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with OpenAI's tool calls, which verifiers may store as JSON text."""
    calls = []
    for value in message.get("tool_calls") or ():
        call = json.loads(value) if isinstance(value, str) else value
        if "function" not in call and "name" in call:
            function = {"name": call["name"], "arguments": call.get("arguments")}
            call = {"id": call.get("id"), "type": "function", "function": function}
        calls.append(call)
    if calls:
        return {**message, "tool_calls": calls}
    return dict(message)


def trl(value: Any) -> Iterator[TokenFields]:
    """TRL 1.16: a `RolloutSample` of `AsyncGRPOTrainer`, or what a `rollout_func` returns, also a
    batch with a list a column."""
    batch = value.get("completion_ids")
    if batch and isinstance(batch[0], list):
        lists = {name: column for name, column in value.items() if isinstance(column, list)}
        for name, column in lists.items():
            agree(name, column, len(batch), "completions")
        for index in range(len(batch)):
            yield from trl({name: column[index] for name, column in lists.items()})
        return
    columns: TokenFields = {
        "loss_mask": _first(value, "completion_mask", "env_mask", "tool_mask"),
        "logprobs": _first(value, "logprobs", "old_log_probs"),
        "advantages": _first(value, "advantages", "advantage"),
    }
    if value.get("input_ids") is not None:
        columns["token_ids"] = value["input_ids"]
    else:
        columns["loss_mask"] = columns["loss_mask"] or [1] * len(value["completion_ids"])
        columns = _call(value["prompt_ids"], value["completion_ids"], **columns)
    columns["policy_version"] = value.get("model_version")
    columns["group_id"] = str(value.get("group_id", ""))
    columns["reward"] = value.get("reward", (value.get("metrics") or {}).get("reward"))
    yield {**columns, **_trl_messages(value.get("prompt") or [], value.get("completion"))}


def _trl_messages(prompt: Any, completion: Any) -> TokenFields:
    if not completion:
        return {}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return {"messages": prompt, "reply": completion[-1]}


def tinker(value: Any) -> Iterator[TokenFields]:
    """A `Datum` of the SDK 0.38, whose targets are the input shifted by one."""
    inputs = list(chain.from_iterable(c["tokens"] for c in value["model_input"]["chunks"]))
    tensors = {}
    for name, tensor in value["loss_fn_inputs"].items():
        tensors[name] = tensor["data"] if isinstance(tensor, dict) else tensor
    targets = [int(token) for token in tensors["target_tokens"]]
    if targets[:-1] != inputs[1:] or len(targets) != len(inputs):
        raise ValueError("the targets are not the input shifted by one")
    mask = _datum_mask(value, tensors)
    columns: TokenFields = {"token_ids": [inputs[0], *targets], "mask_guessed": not mask}
    tensors["loss_mask"] = mask or [advantage != 0 for advantage in tensors["advantages"]]
    for name in ("loss_mask", "logprobs", "advantages"):
        if name in tensors:
            agree(name, tensors[name], len(targets), "targets")
            columns[name] = [0, *tensors[name]]
    columns["group_id"] = str(value.get("group_idx", ""))
    columns["attempt"] = value.get("traj_idx", 0)
    columns["reward"] = value.get("reward")
    yield columns


def _datum_mask(value: Any, tensors: Mapping[str, Any]) -> list[float]:
    """Return which targets were sampled, by the provenance spans of a Datum or else by its mask or
    weights; empty where it has none of these."""
    weights = tensors.get("mask") or tensors.get("weights") or []
    sampled: list[float] = []
    for name in ("model_input_spans", "loss_fn_input_spans"):  # the second is of the targets
        if value.get(name) is not None:
            sampled = []
            for span in value[name]:
                sampled += [span["type"].lower().startswith("sampled")] * span["length"]
            agree(name, sampled, len(tensors["target_tokens"]))
    for index, weight in enumerate(weights):
        if sampled and weight and not sampled[index]:
            raise ValueError(f"target {index} is trained, but its provenance is a prompt")
    return sampled or list(weights)


def tinker_capture(value: Any) -> Iterator[TokenFields]:
    """A line of `capture/sample.jsonl` of tinker-cookbook 0.6: a request and its samples."""
    scope = value.get("scope") or {}
    group = [str(scope.get(name)) for name in ("run_id", "split", "iteration", "group_idx")]
    trajectory = scope.get("traj_idx")
    for sample in value["samples"]:
        call = _call(value["prompt_tokens"], sample["tokens"], logprobs=sample.get("logprobs"))
        call["group_id"] = ":".join(group)
        if trajectory is not None and len(value["samples"]) == 1:
            call["episode_id"] = stable_id("tinker", *group, trajectory)
        yield call


def rllm(value: Any) -> Iterator[TokenFields]:
    """`Episode.to_dict()` of rLLM 0.3; its id is `TASK:ATTEMPT`, and a trajectory is an agent's."""
    group, _, attempt = value["id"].partition(":")
    metrics = (value.get("metrics") or {}).items()
    episode = {
        "episode_id": value["id"],
        "group_id": group,
        "attempt": int(attempt) if attempt.isdigit() else 0,
        "task": value.get("task") or group,
        "metrics": {name: number for name, number in metrics if isinstance(number, int | float)},
        "is_success": bool(value.get("is_correct")),
    }
    for trajectory in value["trajectories"]:
        agent = trajectory.get("name") or "default"
        if trajectory.get("reward") is not None:
            yield {**episode, "rewards": [{"value": trajectory["reward"], "agent": agent}]}
        for step in trajectory["steps"]:
            values = {"logprobs": step.get("logprobs") or None, "advantages": step.get("advantage")}
            call = _call(step["prompt_ids"], step["response_ids"], **values)
            call |= {"agent": agent, "policy_version": step.get("weight_version")}
            call["messages"] = list(step.get("chat_completions") or ())
            if call["messages"] and call["messages"][-1].get("role") == "assistant":
                call["reply"] = call["messages"].pop()
            yield {**episode, **call}


def agent_lightning(event: Any) -> Iterator[TokenFields]:
    """An `Event` of agent-lightning's server 1.0, from `/rollouts/ID/events`, also as triplet."""
    data = event["data"]
    if event["event_type"] == "reward":
        call: TokenFields = {"reward": data.get("value")}
    elif event["event_type"] == "model_request":
        response = data.get("response") or {}
        choice = (response.get("choices") or [{}])[0]  # the one that it trains on
        listed = choice.get("logprobs") or {}
        logprobs = listed.get("token_logprobs")
        if listed.get("content") is not None:
            logprobs = [token["logprob"] for token in listed["content"]]
        prompt_ids = data.get("prompt_token_ids") or response.get("prompt_token_ids")
        call = _call(
            prompt_ids or choice.get("prompt_token_ids"),
            _first(data, "response_token_ids") or choice.get("token_ids"),
            logprobs=_first(data, "response_log_probs") or logprobs,
        )
        call["messages"] = (data.get("request") or {}).get("messages") or []
        call |= {"reply": choice.get("message"), "policy_version": data.get("model_version")}
        call["call_error"] = None if data.get("status", "ok") == "ok" else "the request failed"
    else:
        return
    call["episode_id"] = stable_id("agent-lightning", event["rollout_id"], event["attempt_id"])
    yield {**call, "group_id": event["rollout_id"], "time": event["timestamp"]}


CONVERTERS: dict[str, Converter] = {
    "verifiers": verifiers,
    "trl": trl,
    "tinker": tinker,
    "tinker-capture": tinker_capture,
    "rllm": rllm,
    "agent-lightning": agent_lightning,
}
