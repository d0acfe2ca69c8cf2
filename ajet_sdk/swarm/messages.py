"""The messages between a swarm's server and its clients: JSON under `/swarm/v1`.

Both sides share these models. What a client sends is strict: an unknown field, a text in place of a
number, NaN and infinity are refused, since a guess would be trained. What a server sends may have
more fields than a client knows, so that an older client can talk to a newer server.

Every error is `{"error": {"code", "message", "retry_after", ...}}`, here `Refusal`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ajet_sdk.types import Call, Status, Task

PREFIX = "/swarm/v1"
"""Path of all routes of this protocol."""

EpisodeSplit = Literal["train", "val"]
EpisodeState = Literal["open", "judging", "ended", "failed", "aborted", "abandoned"]
ServerState = Literal[
    "offline", "booting", "collecting", "closing", "updating", "saving", "finished"
]
"""`closing`: the step has enough, and open episodes get a last moment."""
StopRule = Literal["groups", "episodes", "signal", "any_client", "all_clients"]
"""What ends the collection of a step; `signal`: groups whose rewards are not all equal."""
EventKind = Literal[
    "state", "step", "claimed", "ended", "aborted", "abandoned", "trained", "message"
]
Code = Literal[
    "unknown_key",  # 401
    "forbidden",  # 403: a worker's key at an owner's route
    "not_found",  # 404
    "already_ended",  # 409: another end than the one that was recorded
    "finished",  # 409: the training is over
    "held_out",  # 409: a claim for training names a validation task
    "not_offline",  # 409
    "episode_over",  # 410
    "too_large",  # 413
    "bad_request",  # 422
    "bad_reward",  # 422
    "no_calls",  # 422
    "config",  # 422
    "too_many_clients",  # 429
    "offline",  # 503 from here on: `retry_after` says when to ask again
    "booting",
    "updating",
    "closing",
    "full",
    "group_full",
    "kind_full",
]
"""Codes of errors. A client treats an unknown one by its HTTP status."""

LONGEST_ID = 200
LONGEST_NAME = 500
LARGEST_REWARD = 1e9
"""Bound of a reward and of its weight: the square of their product still fits a float32."""

Id = Annotated[str, Field(min_length=1, max_length=LONGEST_ID, pattern=r"^[!-~]+$")]
"""Printable ASCII without spaces: it stands in addresses and logs."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number; neither a bool nor a text."""
RewardNumber = Annotated[
    float, Field(strict=True, allow_inf_nan=False, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, max_length=LONGEST_NAME)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0)]


class Sent(BaseModel):
    """What a client sends. Unknown fields are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Reply(BaseModel):
    """What a server sends. Fields that a client doesn't know are ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")


ReplyModel = TypeVar("ReplyModel", bound=Reply)


# Requests


class Claim(Sent):
    """`POST /episodes`: ask for an attempt at a task."""

    request_id: Id
    """Chosen by the client. A claim that is repeated or duplicated gets the same episode."""
    client_id: Id
    client_name: Name = ""
    """Who and where, for people."""
    task: Task | None = None
    """None: the server chooses the next attempt at one of its own tasks."""
    task_at_end: Flag = False
    """The task is named by `End.task`, for clients that know it only then."""
    split: EpisodeSplit = "train"
    idle_timeout: Seconds = 240.0
    """Seconds without a call or another request of the episode, after which it is abandoned."""
    wait: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 25.0
    """Seconds that the server may hold the claim until there is a place."""
    decoding: Literal["sampled", "greedy"] | None = None
    """For `split: val`; None: as the config says."""
    attempt: Count | None = None
    """For `split: val`: the number of the attempt at its task."""
    trainable_targets: list[Name] | None = None
    """The targets that the workflow's decorator names; those of the server's config go first."""


class RewardItem(Sent):
    """A reward for one call, for one agent's calls, or for the whole episode."""

    name: Name = "reward"
    value: RewardNumber
    weight: RewardNumber = 1.0
    reason: str | None = None
    agent: str | None = None
    call_id: str | None = None


class End(Sent):
    """`POST /episodes/{id}/end`: the result of an attempt."""

    reward: (
        RewardNumber
        | Annotated[list[RewardNumber], Field(min_length=1)]
        | Annotated[dict[str, RewardNumber], Field(min_length=1)]
        | Annotated[list[RewardItem], Field(min_length=1)]
        | None
    ) = None
    """A number, several that are added, one for each agent, or detailed ones; None is only for
    `split: val`."""
    is_success: Flag | None = None
    metrics: dict[str, Number] = Field(default_factory=dict)
    output: Any = None
    """The agent's answer, as JSON, for people and for judges of other runs."""
    task: Task | None = None
    """The task of a claim with `task_at_end`."""


class Abort(Sent):
    """`POST /episodes/{id}/abort`: an attempt without a result.

    A failure of the agent (`failed` or `timeout` without `infrastructure`) counts as a failed
    attempt. With `infrastructure`, and for `aborted`, the place is free for another attempt.
    """

    reason: str = ""
    """One line for people."""
    cause: Name = "Aborted"
    """The error's class name, by which failures are summarized."""
    infrastructure: Flag = False
    status: Literal["failed", "timeout", "aborted"] = "aborted"
    error: str = ""
    """The whole description: message, and lines of the agent's code."""


class Agree(Sent):
    """`POST /agree`: the client has enough, under the stop rules `any_client` and `all_clients`."""

    client_id: Id


class ConfigText(Sent):
    """`PUT /config`: the config of the training, as YAML."""

    yaml: Annotated[str, Field(strict=True)]


# Replies


class Claimed(Reply):
    """A new episode, with a key of its own."""

    episode_id: str
    base_url: str
    """Ends in `/v1`; clients of OpenAI's API use it with `api_key`."""
    api_key: str
    capture_key: str
    """Key of captured requests, and of reports about requests that passed through."""
    end_key: str
    """Key of the episode's end, abort, calls and receipt; never given to the agent."""
    model: str
    task: Task = Field(default_factory=Task)
    group_id: str = ""
    attempt: int = 0
    step: int = 0
    policy_version: int = 0
    split: EpisodeSplit = "train"
    seed: int | None = None
    idle_timeout: float = 240.0
    expires_in: float | None = None
    """Seconds after which the episode is abandoned, even with calls; None: never."""


class CallTokens(Reply):
    """What became of a call's sampled tokens."""

    call_id: str
    policy_version: int | None = None
    tokens: dict[str, int] = Field(default_factory=dict)


class Receipt(Reply):
    """What became of an episode, and of each token that it sampled."""

    episode_id: str
    state: EpisodeState
    status: Status | None = None
    """None while the episode is open."""
    cause: str | None = None
    error: str | None = None
    task_id: str = ""
    group_id: str = ""
    step: int | None = None
    """The step that trains or has trained the episode."""
    split: EpisodeSplit = "train"
    reward: float | None = None
    tokens: dict[str, int] = Field(default_factory=dict)
    """Numbers of sampled tokens by outcome: the ledger's outcomes, and `pending` until the step is
    trained."""
    calls: tuple[CallTokens, ...] = ()
    client_id: str = ""

    @property
    def pending(self) -> int:
        """Number of tokens whose outcome is not known yet."""
        return self.tokens.get("pending", 0)

    @property
    def trained(self) -> int:
        """Number of tokens that were trained."""
        return self.tokens.get("trained", 0)

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended in any way."""
        return self.state not in ("open", "judging")


class CallFault(Reply):
    """A call that failed for a reason that fails the episode."""

    kind: str
    """The error's class name."""
    message: str
    infrastructure: bool = False


class EpisodeCalls(Reply):
    """`GET /episodes/{id}/calls`: the calls that the server has recorded so far."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="ignore", arbitrary_types_allowed=True
    )

    calls: tuple[Call, ...] = ()
    errors: tuple[CallFault, ...] = ()
    context_overflow: bool = False
    stopped: str | None = None
    """Why the server refuses further calls of the workflow, such as a rule for repetition."""


class Judging(Reply):
    """`POST /episodes/{id}/judging`: the workflow is over."""

    judge_key: str


class Target(Reply):
    """What the step waits for."""

    rule: StopRule | str = "groups"
    groups: int = 0
    attempts: int = 0
    """Attempts of a group."""


class Group(Reply):
    """The attempts at one task in the step."""

    group_id: str
    task_id: str = ""
    kind: str = ""
    ended: int = 0
    open: int = 0
    size: int = 0
    rewards: tuple[float | None, ...] = ()


class OpenInfo(Reply):
    """An open episode, without its key."""

    episode_id: str
    client_id: str = ""
    task_id: str = ""
    split: EpisodeSplit = "train"
    calls: int = 0
    idle: float = 0.0
    """Seconds since its last request."""
    idle_timeout: float = 0.0
    age: float = 0.0
    policy_version: int = 0


class ClientInfo(Reply):
    """A client and what became of its episodes."""

    client_id: str
    client_name: str = ""
    address: str = ""
    open: int = 0
    ended: int = 0
    failed: int = 0
    abandoned: int = 0
    last_seen: float = 0.0
    """Seconds since its last request."""


class SwarmStatus(Reply):
    """`GET /status`: one look at the server, the step and its clients."""

    state: ServerState
    run_id: str = ""
    name: str = ""
    directory: str = ""
    step: int = 0
    """The step that is being collected."""
    total_steps: int | None = None
    policy_version: int = 0
    target: Target = Field(default_factory=Target)
    groups: tuple[Group, ...] = ()
    open: tuple[OpenInfo, ...] = ()
    clients: tuple[ClientInfo, ...] = ()
    waiting: str = ""
    """One sentence: what the step waits for."""
    failure: str = ""
    """Why the last run failed, of a server that is offline."""
    ages: dict[str, int] = Field(default_factory=dict)
    """Collected tokens by how many versions they are behind the policy."""


class Agreed(Reply):
    """Whether the server takes the client's consent now."""

    accepted: bool
    reason: str = ""


class State(Reply):
    """The server's state after `POST /start` and `POST /stop`."""

    state: ServerState


class SwarmEvent(Reply):
    """An event of `GET /events`."""

    id: int
    kind: EventKind | str
    data: dict[str, Any] = Field(default_factory=dict)


class Fault(Reply):
    """Why a request was refused."""

    code: Code | str
    message: str
    retry_after: float | None = None
    """Seconds after which to ask again; None: never."""


class Refusal(Reply):
    """The body of every error."""

    error: Fault
