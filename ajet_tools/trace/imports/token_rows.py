"""Imports rows of token ids: one sequence of tokens a row, which names the episode it belongs to.

The columns are those of `ajet trace export --format tokens`, with the messages where a source has
them. `ajet_tools/trace/imports/converters.py` turns rows of other trainers into this form.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Reward, Status, Task, Trained
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, first_error, stable_id, task_of
from ajet_tools.trace.imports.spool import Spool

Converter = Callable[[Any], Iterable[Mapping[str, object]]]


class TokenRow(BaseModel):
    """A sequence of T tokens: each run of tokens in the loss mask is a call, with all tokens before
    it as its prompt."""

    model_config = ConfigDict(extra="ignore")  # the export has columns that follow from others

    episode_id: str = ""
    """Empty: an episode of its own."""
    run_id: str = ""
    group_id: str = ""
    task_id: str = ""
    task: dict[str, object] | str | None = None
    """The question, or the fields of the task."""
    attempt: int | None = None
    """None: the number of episodes of the group before this one."""
    step: int = 0
    split: Literal["train", "val", "trial", ""] = ""
    agent: str = "default"
    trainable: bool = True
    policy_version: int | None = None
    policy_versions: list[int] | None = None
    """Of each sampled token, in place of the sequence's; -1: unknown."""
    token_ids: list[int] | None = None
    """None: a call whose ids are unknown, or a row with a reward alone."""
    loss_mask: list[float] = []
    logprobs: list[float] | None = None
    advantages: list[float] | float | None = None
    trainer_logprobs: list[float] | None = None
    entropies: list[float] | None = None
    messages: list[dict[str, object]] = []
    reply: dict[str, object] | None = None
    """Messages and reply of a row with one call."""
    time: float | None = None
    """Seconds since 1970."""
    call_error: str | None = None
    reward: float | None = None
    rewards: list[Reward] = []
    metrics: dict[str, float | None] = {}
    status: Status = "succeeded"
    is_success: bool | None = None
    error: str | None = None
    cause: str | None = None
    mask_guessed: bool = False
    """The source has no mask: tokens with an advantage count as sampled."""

    def checked(self) -> TokenRow:
        """Raise ValueError for values of unequal length, and for a prompt token with an
        advantage."""
        if not (self.token_ids or self.messages or self.reply or self.episode_id):
            raise ValueError("has neither token_ids nor messages nor the id of an episode")
        size = len(self.token_ids or ())
        columns = {
            "mask": self.loss_mask,
            "logprobs": self.logprobs,
            "advantages": self.advantages,
            "trainer_logprobs": self.trainer_logprobs,
            "entropies": self.entropies,
            "policy_versions": self.policy_versions,
        }
        for name, values in columns.items():
            if isinstance(values, list):
                agree(name, values, size)
        for token in self.token_ids or ():
            if not 0 <= token < 2**31:
                raise ValueError(f"{token} is no token id")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError("the mask is on token 0, which no model sampled")
        versions = self.policy_versions or []
        for index, (before, after) in enumerate(pairwise(versions), start=1):
            if after < before and self.loss_mask[index - 1] and self.loss_mask[index]:
                raise ValueError(
                    f"token {index} is of policy version {after}, the one before it of {before}"
                )
        if self.advantages is not None and not np.isfinite(self.advantages).all():
            raise ValueError("an advantage is not a finite number")
        if isinstance(self.advantages, list):
            for index, advantage in enumerate(self.advantages):
                if advantage and not self.loss_mask[index]:
                    raise ValueError(
                        f"token {index} was not sampled and has the advantage {advantage:g}"
                    )
        return self


def agree(name: str, values: Sequence[object] | None, size: int, unit: str = "tokens") -> None:
    """Raise ValueError unless there are as many values as tokens; None is unknown."""
    if values is not None and len(values) != size:
        raise ValueError(f"{name} for {len(values)} of {size} {unit}")


def read(rows: Iterable[Row], bad: BadRows, convert: Converter | None = None) -> Iterator[Parsed]:
    """Read an episode per `episode_id`; its rows may be anywhere in the file."""
    attempts: Counter[str] = Counter()
    with Spool() as spool:
        for row in rows:
            try:
                values = convert(row.value) if convert else [row.value]
                token_rows = [TokenRow.model_validate(value).checked() for value in values]
                for index, token_row in enumerate(token_rows):
                    key = token_row.episode_id or stable_id("row", row.number, index, row.text)
                    stored = {**token_row.model_dump(), "episode_id": key}
                    spool.add(key, json.dumps([row.where, stored]))
            except ValidationError as error:
                bad.add(row.where, first_error(error))
            except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                bad.add(row.where, f"{type(error).__name__} {error}".removeprefix("ValueError "))
        for _, texts in spool.groups():
            pairs = [json.loads(text) for text in texts]
            token_rows = [TokenRow.model_validate(value) for _, value in pairs]
            yield _episode(token_rows, attempts, where=pairs[0][0])


def _episode(rows: Sequence[TokenRow], attempts: Counter[str], where: str) -> Parsed:
    first = rows[0]
    calls: list[Call] = []
    trained: list[Trained] = []
    rewards: list[Reward] = []
    for row in rows:
        for call, values in _calls(row, len(calls)):
            calls.append(call)
            trained += values
        rewards += row.rewards
    single = [row.reward for row in rows if row.reward is not None]
    if single:
        rewards.append(Reward(value=single[-1]))  # trainers use the last one
    attempt = first.attempt
    if attempt is None:
        attempt = attempts[first.group_id] if first.group_id else 0
        attempts[first.group_id] += 1
    times = [call.started_at for call in calls]
    episode = Episode(
        episode_id=first.episode_id,
        run_id=first.run_id,
        group_id=first.group_id,
        attempt=attempt,
        step=first.step,
        split=first.split,
        task=_task(first),
        calls=tuple(calls),
        rewards=tuple(rewards),
        metrics={name: value for name, value in first.metrics.items() if value is not None},
        status=first.status,
        is_success=first.is_success,
        error=first.error,
        cause=first.cause,
        started_at=min(times, default=UNKNOWN_TIME),
        ended_at=max(times, default=UNKNOWN_TIME),
    )
    guessed = any(row.mask_guessed for row in rows)
    return Parsed(episode=episode, trained=tuple(trained), where=where, guessed=guessed)


def _task(row: TokenRow) -> Task:
    fields = {"task_id": row.task_id} if row.task_id else {}
    if isinstance(row.task, str):
        return Task.model_validate({"main_query": row.task, **fields})
    if row.group_id:
        metadata = row.task or {"group": row.group_id}
    else:
        metadata = row.task or {}
    return task_of(row.messages, metadata, row.episode_id, fields)


def _calls(row: TokenRow, start: int) -> Iterator[tuple[Call, tuple[Trained, ...]]]:
    """Split a row into calls, each with the trainer's values; numbered from `start`."""
    if row.token_ids is None:
        if row.messages or row.reply is not None or row.call_error:
            yield _call(row, start, None, None), ()
        return
    spans = []
    for is_sampled, run in groupby(range(len(row.token_ids)), lambda i: bool(row.loss_mask[i])):
        indices = list(run)
        if is_sampled:
            spans.append((indices[0], indices[-1] + 1))
    for number, (first, end) in enumerate(spans):
        call = _call(row, start + number, first, end)
        if len(spans) > 1:  # messages and reply are known of a single call only
            call = call.model_copy(update={"request": {}, "response": {}})
        yield call, _trained(row, call, first, end)


def _call(row: TokenRow, index: int, first: int | None, end: int | None) -> Call:
    ids = row.token_ids
    at = UNKNOWN_TIME
    if row.time is not None:
        at = datetime.fromtimestamp(row.time, timezone.utc)
    prompt_ids = output_ids = logprobs = None
    version = row.policy_version
    updates = tuple[int, ...]()
    if row.policy_versions is not None and first is not None:
        version, updates = _versions(row.policy_versions[first:end])
    if ids is not None:
        prompt_ids = np.asarray(ids[:first], np.int32)
        output_ids = np.asarray(ids[first:end], np.int32)
    if ids is not None and row.logprobs is not None:
        logprobs = _floats(row.logprobs, first, end)
    return Call(
        call_id=stable_id("call", row.episode_id, index),
        episode_id=row.episode_id,
        index=index,
        agent=row.agent,
        trainable=row.trainable,
        policy_version=version,
        weight_updates=updates,
        request={"messages": row.messages} if row.messages else {},
        response={"choices": [{"index": 0, "message": row.reply}]} if row.reply else {},
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        started_at=at,
        ended_at=at,
        error=row.call_error,
    )


def _versions(versions: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
    """The version of a call's first token, and the places of the updates after it."""
    if min(versions) < 0:
        return None, ()
    updates = list[int]()
    for place, (before, after) in enumerate(pairwise(versions), start=1):
        updates += [place] * (after - before)
    return versions[0], tuple(updates)


def _trained(row: TokenRow, call: Call, first: int, end: int) -> tuple[Trained, ...]:
    if row.advantages is None:
        return ()
    advantages = row.advantages
    if not isinstance(advantages, list):
        advantages = [advantages] * len(row.loss_mask)
    values = Trained(
        run_id=row.run_id,
        step=row.step,
        episode_id=row.episode_id,
        call_id=call.call_id,
        advantages=_floats(advantages, first, end),
        logprobs=_floats(row.trainer_logprobs, first, end),
        entropy=_floats(row.entropies, first, end),
    )
    return (values,)


def _floats(
    values: Sequence[float] | None, first: int | None, end: int | None
) -> npt.NDArray[np.float32]:
    """Return the values of a call's sampled tokens; NaN where a source has none."""
    if values is None:
        return np.full((end or 0) - (first or 0), np.nan, np.float32)
    return np.asarray(values[first:end], np.float32)
