"""Imports token rows of other trainers: Tinker and its cookbook, TRL, rLLM, agent-lightning."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from pydantic import AliasChoices, AliasPath, BaseModel, Field

from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Reward, Task, Trained
from ajet_tools.trace.imports.sampled import agree, each, sampled_call, scored, turns
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, stable_id

Message = dict[str, object]


class _Chunk(BaseModel):
    tokens: list[int]


class _ModelInput(BaseModel):
    chunks: list[_Chunk]


class _Tensor(BaseModel):
    data: list[float]


class _Span(BaseModel):
    type: str
    length: int


class _Datum(BaseModel):
    """`tinker.Datum` (0.38): targets are the input shifted by one; spans mark the sampled ones."""

    model_input: _ModelInput
    loss_fn_inputs: dict[str, _Tensor | list[float]]
    loss_fn_input_spans: list[_Span] | None = None
    model_input_spans: list[_Span] | None = None
    group_idx: int | str = ""
    traj_idx: int = 0
    reward: float | None = None


class _Drawn(BaseModel):
    tokens: list[int]
    logprobs: list[float] | None = None


class _Captured(BaseModel):
    """A line of `capture/sample.jsonl` (tinker-cookbook 0.6): a request and its samples."""

    scope: dict[str, str | int | float | bool | None] = {}
    prompt_tokens: list[int]
    samples: list[_Drawn] = []


def read_tinker(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read an episode per Datum; captured requests of a trajectory are one episode."""
    captured: dict[tuple[object, ...], list[Call]] = defaultdict(list)

    def parse(row: Row) -> Iterator[Parsed]:
        if "samples" not in row.value:
            yield _datum(row, _Datum.model_validate(row.value))
            return
        request = _Captured.model_validate(row.value)
        place = [
            request.scope.get(name)
            for name in ("run_id", "split", "iteration", "group_idx", "traj_idx")
        ]
        for i, drawn in enumerate(request.samples):
            known = place[-1] is not None and len(request.samples) == 1
            key = (*place[:-1], place[-1] if known else f"{row.number}.{i}")
            episode_id = stable_id("tinker", *key, "" if known else row.text)
            call = sampled_call(
                episode_id, len(captured[key]), request.prompt_tokens, drawn.tokens, drawn.logprobs
            )
            captured[key].append(call)

    yield from each(rows, bad, parse)
    for key, calls in captured.items():
        yield _episode(calls[0].episode_id, ":".join(map(str, key[:4])), 0, tuple(calls))


def _datum(row: Row, datum: _Datum) -> Parsed:
    given = {n: v.data if isinstance(v, _Tensor) else v for n, v in datum.loss_fn_inputs.items()}
    inputs = [token for chunk in datum.model_input.chunks for token in chunk.tokens]
    targets = [int(token) for token in given["target_tokens"]]
    agree("target_tokens", targets, len(inputs), "input tokens")
    odd = next(
        (i for i, (a, b) in enumerate(zip(targets, inputs[1:], strict=False)) if a != b), None
    )
    if odd is not None:
        raise ValueError(
            f"target {odd} is {targets[odd]}, but the input goes on with {inputs[odd + 1]}"
        )
    for name in ("logprobs", "advantages", "mask", "weights"):
        agree(name, given.get(name), len(targets), "targets")
    advantages = given.get("advantages")
    mask = given.get("mask") or given.get("weights") or [float(a != 0) for a in advantages or ()]
    if not mask:
        raise ValueError(
            "has neither mask, weights nor advantages: which tokens are trained is not known"
        )
    for name, spans in (
        ("model_input_spans", datum.model_input_spans),
        ("spans", datum.loss_fn_input_spans),
    ):
        if spans is not None and (size := sum(span.length for span in spans)) != len(targets):
            raise ValueError(f"{name} cover {size} of {len(targets)} tokens")
    if datum.loss_fn_input_spans is not None:
        drawn = [
            s.type.lower().startswith("sampled")
            for s in datum.loss_fn_input_spans
            for _ in range(s.length)
        ]
        odd = next((i for i, weight in enumerate(mask) if weight and not drawn[i]), None)
        if odd is not None:
            raise ValueError(f"target {odd} is trained, but its provenance is a prompt")
        mask = [float(sampled) for sampled in drawn]
    episode_id = stable_id("tinker", row.number, row.text)
    before: list[float] = [0.0]
    padded = [None if v is None else before + v for v in (given.get("logprobs"), advantages)]
    calls, trained = turns(episode_id, [inputs[0], *targets], before + mask, *padded)
    result = _episode(
        episode_id, str(datum.group_idx), datum.traj_idx, calls, trained, datum.reward
    )
    known = given.get("mask") or given.get("weights") or datum.loss_fn_input_spans
    return result if known else replace(result, guessed=True)


def _episode(
    episode_id: str,
    group: str,
    attempt: int,
    calls: tuple[Call, ...],
    trained: tuple[Trained, ...] = (),
    reward: float | None = None,
) -> Parsed:
    rewards = () if reward is None else (Reward(value=reward),)
    task = Task(metadata={"group": group}) if group else Task(metadata={"episode": episode_id})
    ended = Episode(
        episode_id=episode_id,
        group_id=group,
        attempt=attempt,
        split="",
        task=task,
        calls=calls,
        rewards=rewards,
        started_at=UNKNOWN_TIME,
        ended_at=UNKNOWN_TIME,
    )
    return Parsed(episode=ended, trained=trained)


class _Rollout(BaseModel):
    """TRL (1.16): a `RolloutSample` of `AsyncGRPOTrainer`, or a row returned by a
    `rollout_func`."""

    prompt: list[Message] | str = []
    completion: list[Message] | str = []
    input_ids: list[int] | None = None
    prompt_ids: list[int] = []
    completion_ids: list[int] = []
    mask: list[float] | None = Field(
        None, validation_alias=AliasChoices("completion_mask", "env_mask", "tool_mask")
    )
    logprobs: list[float] | None = Field(
        None, validation_alias=AliasChoices("logprobs", "old_log_probs")
    )
    advantage: float | list[float] | None = Field(
        None, validation_alias=AliasChoices("advantage", "advantages")
    )
    group_id: int | str = ""
    reward: float | None = Field(
        None, validation_alias=AliasChoices("reward", AliasPath("metrics", "reward"))
    )
    model_version: int | None = None


def read_trl(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read an episode per row; a row may be a batch with lists as columns."""
    attempts: Counter[str] = Counter()

    def parse(row: Row) -> Iterator[Parsed]:
        value = row.value
        completions = value.get("completion_ids")
        if isinstance(completions, list) and completions and isinstance(completions[0], list):
            size = len(completions)
            columns = {name: column for name, column in value.items() if isinstance(column, list)}
            for name, column in columns.items():
                agree(name, column, size, "completions")
            value = [{name: column[i] for name, column in columns.items()} for i in range(size)]
        for i, fields in enumerate(value if isinstance(value, list) else [value]):
            rollout = _Rollout.model_validate(fields)
            group = str(rollout.group_id)
            yield _rollout(stable_id("trl", row.number, i, row.text), rollout, attempts[group])
            attempts[group] += 1

    return each(rows, bad, parse)


def _rollout(episode_id: str, row: _Rollout, attempt: int) -> Parsed:
    if row.input_ids is not None:
        agree("completion_mask", row.mask, len(row.input_ids))
        agree("old_log_probs", row.logprobs, len(row.input_ids))
        tokens, mask, logprobs = row.input_ids, row.mask or [], row.logprobs
        if mask[:1] not in ([], [0.0]):
            raise ValueError("completion_mask is on token 0, which no model sampled")
    else:
        agree("mask", row.mask, len(row.completion_ids), "completion tokens")
        agree("logprobs", row.logprobs, len(row.completion_ids), "completion tokens")
        before = [0.0] * len(row.prompt_ids)
        tokens = row.prompt_ids + row.completion_ids
        mask = before + (row.mask or [1.0] * len(row.completion_ids))
        logprobs = None if row.logprobs is None else before + row.logprobs
    given = row.advantage
    if isinstance(given, list):
        advantages: list[float] | None = [0.0] * (len(tokens) - len(given)) + given
    else:
        advantages = None if given is None else [given if sampled else 0.0 for sampled in mask]
    calls, trained = turns(
        episode_id, tokens, mask, logprobs, advantages, version=row.model_version
    )
    if len(calls) == 1 and calls[0].output_ids is not None and len(row.completion or ()):
        calls = (calls[0].model_copy(update=_spoken(row)),)
    return _episode(episode_id, str(row.group_id), attempt, calls, trained, row.reward)


def _spoken(row: _Rollout) -> dict[str, object]:
    """Return request and response of a single reply."""
    asked: list[Message] = (
        [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    )
    message = (
        {"role": "assistant", "content": row.completion}
        if isinstance(row.completion, str)
        else row.completion[-1]
    )
    return {
        "request": {"messages": asked},
        "response": {"choices": [{"index": 0, "message": message}]},
    }


class _Step(BaseModel):
    prompt_ids: list[int] = []
    response_ids: list[int] = []
    logprobs: list[float] = []
    chat_completions: list[Message] = []
    advantage: float | list[float] | None = None
    weight_version: int | None = None


class _Trajectory(BaseModel):
    name: str = "default"
    steps: list[_Step] = []
    reward: float | None = None


class _RllmEpisode(BaseModel):
    """`Episode.to_dict()` of rLLM (0.3); its id is `TASK:ATTEMPT`."""

    id: str
    task: dict[str, object] | str | None = None
    trajectories: list[_Trajectory] = []
    metrics: dict[str, object] = {}
    is_correct: bool = False


def read_rllm(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read an episode per row; the calls of a trajectory belong to the agent it names."""

    def parse(row: Row) -> Iterator[Parsed]:
        value = _RllmEpisode.model_validate(row.value)
        group, _, attempt = value.id.partition(":")
        calls: list[Call] = []
        trained: list[Trained] = []
        for trajectory in value.trajectories:
            for step in trajectory.steps:
                chat: Sequence[Message] = step.chat_completions
                reply = chat[-1] if chat and chat[-1].get("role") == "assistant" else None
                call = sampled_call(
                    value.id,
                    len(calls),
                    step.prompt_ids,
                    step.response_ids,
                    step.logprobs or None,
                    messages=chat[:-1] if reply else chat,
                    reply=reply,
                    agent=trajectory.name,
                    version=step.weight_version,
                )
                calls.append(call)
                trained += scored(call, 0, step.advantage)
        parsed = _episode(
            value.id, group, int(attempt) if attempt.isdigit() else 0, tuple(calls), tuple(trained)
        )
        rewards = tuple(
            Reward(value=t.reward, agent=t.name) for t in value.trajectories if t.reward is not None
        )
        task = (
            Task(metadata=value.task)
            if isinstance(value.task, dict)
            else Task(main_query=value.task or group)
        )
        numbers = {
            name: number
            for name, number in value.metrics.items()
            if isinstance(number, int | float)
        }
        assert parsed.episode is not None
        update = {
            "rewards": rewards,
            "task": task,
            "metrics": numbers,
            "is_success": value.is_correct,
        }
        yield Parsed(episode=parsed.episode.model_copy(update=update), trained=parsed.trained)

    return each(rows, bad, parse)


class _LightningRequest(BaseModel):
    messages: list[Message] = []


class _LightningLogprob(BaseModel):
    logprob: float


class _LightningLogprobs(BaseModel):
    content: list[_LightningLogprob] | None = None
    token_logprobs: list[float] | None = None


class _LightningChoice(BaseModel):
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: _LightningLogprobs | None = None
    message: Message | None = None


class _LightningResponse(BaseModel):
    prompt_token_ids: list[int] | None = None
    choices: list[_LightningChoice] = []


class _LightningData(BaseModel):
    """Data of a `model_request` (whole or as a triplet) or a `reward`."""

    request: _LightningRequest = _LightningRequest()
    response: _LightningResponse = _LightningResponse()
    model_version: int | None = None
    prompt_token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    response_log_probs: list[float] | None = None
    status: str = "ok"
    value: float | None = None


class _LightningEvent(BaseModel):
    """`Event` of agent-lightning (1.0), from its route `/rollouts/ID/events`, also with
    `format=triplet`."""

    event_type: str
    rollout_id: str
    attempt_id: str
    timestamp: float = Field(ge=0, lt=1e11)
    data: dict[str, object]


def read_lightning(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read an episode per attempt: a call per request, and the last reward, which agent-lightning
    trains on."""
    calls: dict[tuple[str, str], list[Call]] = defaultdict(list)
    rewards: dict[tuple[str, str], float | None] = {}
    places: dict[tuple[str, str], str] = {}

    def parse(row: Row) -> Iterator[Parsed]:
        event = _LightningEvent.model_validate(row.value)
        key = event.rollout_id, event.attempt_id
        if event.event_type in ("reward", "model_request"):
            data = _LightningData.model_validate(event.data)
            if event.event_type == "reward":
                rewards[key] = data.value
            else:
                episode_id = stable_id("agent-lightning", *key)
                calls[key].append(
                    _lightning_call(episode_id, len(calls[key]), data, event.timestamp)
                )
            places.setdefault(key, row.where)
        return iter(())

    yield from each(rows, bad, parse)
    for key, where in places.items():
        episode_id = stable_id("agent-lightning", *key)
        yield replace(
            _episode(episode_id, key[0], 0, tuple(calls[key]), reward=rewards.get(key)), where=where
        )


def _lightning_call(episode_id: str, index: int, data: _LightningData, at: float) -> Call:
    """Convert a request with its first choice, which agent-lightning trains on."""
    choice = data.response.choices[0] if data.response.choices else _LightningChoice()
    logprobs = choice.logprobs or _LightningLogprobs()
    listed = (
        logprobs.token_logprobs
        if logprobs.content is None
        else [token.logprob for token in logprobs.content]
    )
    call = sampled_call(
        episode_id,
        index,
        data.prompt_token_ids or data.response.prompt_token_ids or choice.prompt_token_ids,
        data.response_token_ids if data.response_token_ids is not None else choice.token_ids,
        data.response_log_probs if data.response_log_probs is not None else listed,
        messages=data.request.messages,
        reply=choice.message,
        version=data.model_version,
        at=datetime.fromtimestamp(at, timezone.utc),
    )
    return call if data.status == "ok" else call.model_copy(update={"error": "the request failed"})
