"""The vocabulary of the package: task, call, episode, timeline, sample and more.

All models are frozen and reject unknown fields. Token ids are read-only int32 arrays and
log-probabilities read-only float32 arrays; any sequence is accepted and converted once. Shapes: T
is the number of tokens of a timeline.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from ajet_sdk.picture_files import files_by_pixels
from ajet_sdk.pictures import Picture, PlacedPicture, picture_at

Phase = Literal["rollout", "judge"]
Status = Literal["succeeded", "failed", "timeout", "aborted"]
Outcome = Literal[
    "superseded", "evaluation", "untrainable", "cancelled", "undelivered", "failed", "abandoned", "stale", "unmaskable",
    "zero_advantage", "overlong", "cut", "truncated", "trained",
]  # fmt: skip
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Json = dict[str, Any]


class FixedMessages(list[Any]):
    """Messages of a request that nobody changes: one that comes again is the same object."""


"""A JSON object, such as a message, a request or the row of a table."""
JsonView = Mapping[str, Any]
"""A read-only JSON object."""


_draw = (
    random.Random()
)  # the system's entropy once per process: reading it each time would release the GIL
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_draw.seed)


def new_id() -> str:
    """Generates an opaque 128-bit id, which isn't secret."""
    return f"{_draw.getrandbits(128):032x}"


def now() -> datetime:
    """The current time, UTC and aware."""
    return datetime.now(timezone.utc)


def _read_only(dtype: type[np.generic]) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype == dtype and not value.flags.writeable:
            return value
        array = np.array(value, dtype=dtype)
        if array.ndim != 1:
            raise ValueError(f"expected one dimension, got {array.ndim}")
        array.flags.writeable = False
        return array

    return BeforeValidator(convert)


_as_list = PlainSerializer(lambda array: array.tolist(), when_used="json")


def _list_of(kind: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "items": {"type": kind}})


Ids = Annotated[npt.NDArray[np.int32], _read_only(np.int32), _as_list, _list_of("integer")]
Floats = Annotated[npt.NDArray[np.float32], _read_only(np.float32), _as_list, _list_of("number")]
Bools = Annotated[npt.NDArray[np.bool_], _read_only(np.bool_), _as_list, _list_of("boolean")]


def _placed(value: Any) -> Any:
    if isinstance(value, PlacedPicture):
        return value
    return PlacedPicture(
        start=value["start"],
        end=value["end"],
        picture=_picture(value["picture"]),
        token_id=value["token_id"],
    )


def _picture(value: Any) -> Picture:
    if isinstance(value, Mapping):  # it was removed from a trace
        return Picture(data=b"", **value)
    return picture_at(value)


def _picture_as_json(picture: Picture) -> str | dict[str, str | int]:
    if picture.data:
        return picture.url
    names = ("media_type", "digest", "width", "height")
    return {name: getattr(picture, name) for name in names}


def _pictures_as_json(pictures: Sequence[PlacedPicture]) -> list[dict[str, Any]]:
    return [
        {
            "start": placed.start,
            "end": placed.end,
            "picture": _picture_as_json(placed.picture),
            "token_id": placed.token_id,
        }
        for placed in pictures
    ]


Pictures = Annotated[
    tuple[Any, ...],
    BeforeValidator(lambda values: tuple(map(_placed, values))),
    PlainSerializer(_pictures_as_json),
    _list_of("object"),
]
"""Of `PlacedPicture`, in order."""


WeightUpdates = Annotated[tuple[int, ...], BeforeValidator(lambda stored: tuple(stored or ()))]
"""Places in the ids of a reply, in order."""


class _Frozen(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True
    )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(
            _same(getattr(self, name), getattr(other, name)) for name in type(self).model_fields
        )

    __hash__ = None  # type: ignore[assignment]  # arrays and dicts inside: compare, do not hash


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and bool(a == b)


class Task(_Frozen):
    """One problem for the agent. `task_id` defaults to a stable hash of the content."""

    main_query: str = ""
    init_messages: list[dict[str, Any]] = Field(default_factory=list)
    task_id: str = ""
    env_type: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _identify(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and not data.get("task_id"):
            content = {
                k: data.get(k)
                for k in ("main_query", "init_messages", "env_type", "metadata")
                if data.get(k)
            }
            compared = files_by_pixels(content)
            text = json.dumps(compared, sort_keys=True, ensure_ascii=False, default=str)
            return {**data, "task_id": hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}
        return data


UNTAGGED = "default_target_tag"
"""The target tag of an agent that names none."""


class Call(_Frozen):
    """One choice of one LLM request. Ids and log-probabilities are None if the engine does not know
    them."""

    call_id: str = Field(default_factory=new_id)
    episode_id: str
    index: int = 0
    """Order of completion within the episode."""
    agent: str = "default"
    target_tag: str | None = None
    trainable: bool = True
    model: str = ""
    policy_version: int | None = None
    """Number of optimizer updates of the model that sampled the first token; None for models other
    than the policy."""
    weight_updates: WeightUpdates = ()
    """The places in `output_ids`, in order, from which on the weights had one update more: of a
    reply that was being sampled while the weights changed. See `versions`."""
    request: dict[str, Any] = Field(default_factory=dict)
    """The request in the format of OpenAI's API (messages, tools, ...), whatever the client's
    API."""
    response: dict[str, Any] = Field(default_factory=dict)
    """The response in the same format, with this choice only and the id that the client
    received."""
    prompt_ids: Ids | None = None
    pictures: Pictures = ()
    """The pictures in the prompt, by their places in `prompt_ids`."""
    output_ids: Ids | None = None
    logprobs: Floats | None = None
    """Log-probability of each output id under the distribution sampled from."""
    cut_tokens: Annotated[int, BeforeValidator(lambda stored: stored or 0)] = 0
    """Tokens sampled after `output_ids` and cut off (`parallel_tool_calls: false`), or before a
    call was cancelled."""
    finish_reason: str | None = None
    started_at: datetime = Field(default_factory=now)
    ended_at: datetime = Field(default_factory=now)
    error: str | None = None
    """The engine's error; or `undelivered`, with what was read, if the client disconnected before
    the last byte."""
    request_id: str = ""
    """Shared by the `n` choices of one request."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """The sampling parameters in effect."""
    phase: Phase = "rollout"
    extends_call_id: str | None = None
    """The longest earlier call of the agent and phase whose prompt and output are a prefix of this
    prompt. It and the next three are computed when the call is recorded (`samples.prefixes`), else
    None."""
    parent_call_id: str | None = None
    """The earlier call of the episode with the longest common prefix."""
    prefix_len: int = 0
    """Number of leading prompt ids shared with the parent's prompt and output."""
    prefix_messages: int = 0
    """Number of leading messages shared with the parent."""

    @model_validator(mode="after")
    def _lengths(self) -> Call:
        if self.logprobs is not None and (
            self.output_ids is None or len(self.logprobs) != len(self.output_ids)
        ):
            n = None if self.output_ids is None else len(self.output_ids)
            raise ValueError(
                f"call {self.call_id}: {len(self.logprobs)} logprobs for {n} output ids"
            )
        return self

    @property
    def last_version(self) -> int | None:
        """The policy version that sampled the last token."""
        if self.policy_version is None:
            return None
        return self.policy_version + len(self.weight_updates)

    @property
    def versions(self) -> npt.NDArray[np.int32] | None:
        """The policy version that sampled each output id, `[T]`; None if none is known."""
        if self.policy_version is None or self.output_ids is None:
            return None
        places_T = np.arange(len(self.output_ids), dtype=np.int32)
        later_T = np.searchsorted(self.weight_updates, places_T, side="right")
        return (self.policy_version + later_T).astype(np.int32)


class Reward(_Frozen):
    """A reward for one call, for one agent's calls, or (if neither is named) for the whole
    episode."""

    name: str = "reward"
    value: float = Field(allow_inf_nan=False)
    weight: float = Field(default=1.0, allow_inf_nan=False)
    reason: str | None = None
    agent: str | None = None
    call_id: str | None = None


class Event(_Frozen):
    """A tool call over MCP, or a tool call or retrieval from an OpenTelemetry span."""

    kind: Literal["mcp", "tool", "retrieval"] = "mcp"
    name: str
    """Name of the tool."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    result: Any = None
    """The result as in the protocol (content, structuredContent, isError), if any."""
    error: str | None = None
    started_at: datetime = Field(default_factory=now)
    ended_at: datetime = Field(default_factory=now)
    trace_id: str | None = None
    """Id of the call's OpenTelemetry span, in hexadecimal, if any; so is `span_id`."""
    span_id: str | None = None


_PAGE = "ajet_tools.trace.export.html"
"""Loaded by name in notebooks, since it is in a higher package."""


class Episode(_Frozen):
    """One finished attempt at a task: its calls, rewards and outcome."""

    episode_id: str = Field(default_factory=new_id)
    run_id: str = ""
    group_id: str = ""
    """Shared by the attempts at one position of a batch."""
    attempt: int = 0
    step: int = 0
    split: Literal["train", "val", "trial", ""] = "train"
    """`trial`: a candidate task of `task_reader.type: growing`. Empty: imported, without a run."""
    task: Task = Field(default_factory=Task)
    output: Any = None
    calls: tuple[Call, ...] = ()
    events: tuple[Event, ...] = ()
    """In order of completion."""
    rewards: tuple[Reward, ...] = ()
    status: Status = "succeeded"
    error: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    is_success: bool | None = None
    started_at: datetime = Field(default_factory=now)
    ended_at: datetime = Field(default_factory=now)
    cause: str | None = None
    """The error's class name, by which failures are summarized."""
    infrastructure: bool = False
    """The failure was not caused by the agent, so the attempt may be repeated."""
    decoding: Literal["sampled", "greedy"] | None = None
    """Decoding set by the run, by which means are separated. None: chosen by the agent, or
    unknown."""
    client: str = ""
    """The client of a swarm server that ran it; empty: the run itself."""
    _directory: Path | None = PrivateAttr(default=None)

    def is_traced_in(self, directory: Path) -> None:
        """Set the directory of the episode's trace, with which notebooks show its tokens as
        text."""
        self._directory = directory

    def _repr_html_(self) -> str:
        """Shows the episode in a notebook cell: messages, rewards, and colored tokens."""
        page: str = import_module(_PAGE).cell(self, self._directory)
        return page

    def value(self, agent: str | None = None, call_id: str | None = None) -> float | None:
        """Weighted sum of `rewards_for`; None without any."""
        mine = self.rewards_for(agent, call_id)
        return sum(r.value * r.weight for r in mine) if mine else None

    def rewards_for(self, agent: str | None, call_id: str | None) -> tuple[Reward, ...]:
        """The rewards for a call's tokens: those that name the call, its agent, or neither."""
        return tuple(
            r for r in self.rewards if r.call_id in (None, call_id) and r.agent in (None, agent)
        )

    @property
    def reward(self) -> float | None:
        """Weighted sum of all rewards; None without any. For display and metrics."""
        if self.rewards:
            return sum(r.value * r.weight for r in self.rewards)
        return None


class Span(_Frozen):
    """The position of a call's sampled tokens in a timeline: token_ids[start:end], all masked
    in."""

    call_id: str
    start: int
    end: int


class Timeline(_Frozen):
    """A token sequence with the tokens to train on masked in. All arrays have length T."""

    agent: str
    token_ids: Ids
    loss_mask: Bools
    logprobs: Floats
    """The sampler's log-probability where masked in, else 0."""
    call_ids: tuple[str, ...]
    """The calls whose prompt or output is in this timeline, in order."""
    policy_version: int | None = None
    """The oldest version among the masked-in calls."""
    spans: tuple[Span, ...] = ()
    """The spans of masked-in calls, in order; together they are exactly `loss_mask`."""
    pictures: Pictures = ()
    """By their places in `token_ids`."""


class Split(_Frozen):
    """Why a call did not extend an earlier timeline."""

    call_id: str
    parent_call_id: str | None
    """The call that it should have extended."""
    at_token: int
    """Position of the first token that differs."""
    cause: str
    extra_tokens: int
    """Tokens processed again because of the split (the unmasked prefix of the new timeline)."""
    hint: str = ""


class Sample(_Frozen):
    """One training sequence. `advantages` has length T and is 0 where masked."""

    timeline: Timeline
    episode_id: str
    group_id: str
    reward: float
    advantages: Floats
    target: str = ""
    """The target tag of its calls, or else their agent; empty for a stored conversation."""


class LedgerEntry(_Frozen):
    """The outcome of `tokens` sampled tokens of a trainable call."""

    run_id: str
    step: int
    episode_id: str
    call_id: str
    outcome: Outcome
    tokens: int


class Trained(_Frozen):
    """Scores of a call's sampled tokens in one training step.

    Arrays are as long as the call's `output_ids`; NaN for tokens that were not trained (cut off)
    and for values that the trainer does not know.
    """

    run_id: str
    step: int
    episode_id: str
    call_id: str
    advantages: Floats
    logprobs: Floats
    """The trainer's log-probabilities before the step's first update; beside `Call.logprobs`, the
    sampler's."""
    entropy: Floats
    """The trainer's entropy, in nats, of the distribution of the token."""

    @model_validator(mode="after")
    def _lengths(self) -> Trained:
        lengths = {len(self.advantages), len(self.logprobs), len(self.entropy)}
        if len(lengths) > 1:
            raise ValueError(f"call {self.call_id}: arrays of different lengths: {sorted(lengths)}")
        return self


class Metric(_Frozen):
    """One number of a run at a step."""

    run_id: str
    step: int
    name: str
    value: float
    at: datetime = Field(default_factory=now)


class Feedback(_Frozen):
    """A person's feedback on an episode or a call."""

    feedback_id: str = Field(default_factory=new_id)
    episode_id: str
    call_id: str | None = None
    author: str = ""
    score: float | None = None
    comment: str | None = None
    correction: str | None = None
    at: datetime = Field(default_factory=now)


class Run(_Frozen):
    """One execution of a job."""

    run_id: str = Field(default_factory=new_id)
    name: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    backbone: str = ""
    status: Literal["running", "finished", "failed", "interrupted"] = "running"
    started_at: datetime = Field(default_factory=now)
    ended_at: datetime | None = None
    error: str | None = None
