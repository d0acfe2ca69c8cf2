"""Protocols with two or more implementations, and the data that they exchange.

An `Engine` answers requests; a `Sampler` continues token ids (`engines.chat.TokenEngine` makes it
an engine); a `Tokenizer` encodes and decodes exactly; a `Client` waits for a reply; a `TraceReader`
queries a trace; a `Judge` scores an output. A backbone runs a `Job`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ajet_sdk.pictures import Picture, PlacedPicture
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    import pyarrow as pa

    from ajet_sdk.config.config import Config

Route = Literal["chat/completions", "completions"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters in effect: those of the run override the agent's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely token."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a reply, in addition to the end-of-turn ids."""
    ignore_eos: bool = False
    """End-of-turn ids do not end the reply."""
    grammar: str = ""
    """Grammar of the reply (`tokens.grammars`), which the engine derives from the request and
    returns in its `Answer`."""
    top_logprobs: int = 0
    """Number of most likely tokens to return for each sampled token."""

    @property
    def processed(self) -> bool:
        """Whether logits are processed beyond temperature and limits (`engines.local.logits`)."""
        return bool(_logits_of(self) != _NO_LOGITS)

    @property
    def plain(self) -> bool:
        """Whether the recorded log-probabilities are those of the plain model: at temperature 1, or
        greedy."""
        limited = self.temperature != 1 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return not self.processed and (self.temperature <= 0 or not limited)

    @lru_cache(maxsize=256)  # noqa: B019  # a value: nearly all calls of a run have the same
    def as_dict(self) -> Mapping[str, object]:
        """The parameters as JSON; rare ones only if they are set."""
        recorded = dict[str, object]()
        for (name, default), value in zip(
            _SAMPLING_DEFAULTS.items(), _values_of(self), strict=True
        ):
            if value != default or name in _ALWAYS:
                recorded[name] = list(value) if isinstance(value, tuple) else value
        return recorded

    @staticmethod
    def of(recorded: Mapping[str, object]) -> Sampling:
        """The inverse of `as_dict`; unknown parameters are left out."""
        known: dict[str, Any] = {
            name: value for name, value in recorded.items() if name in _SAMPLING_DEFAULTS
        }
        for name, value in known.items():
            if isinstance(value, list):
                known[name] = tuple(
                    tuple(item) if isinstance(item, list) else item for item in value
                )
        return Sampling(**known)


_ALWAYS = ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n")
_PROCESSED = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "grammar",
)
_SAMPLING_DEFAULTS: dict[str, object] = {field_.name: field_.default for field_ in fields(Sampling)}
_values_of = attrgetter(*_SAMPLING_DEFAULTS)
_logits_of = attrgetter(*_PROCESSED)
_NO_LOGITS = _logits_of(Sampling())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to an engine, independent of the client's API."""

    sampling: Sampling
    episode_id: str
    agent: str
    messages: Sequence[Any] | None = None
    """The conversation to continue; None if `prompt` is set."""
    prompt: object = None
    """Text or token ids to continue."""
    tools: object = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """All other parameters by their names in OpenAI's API: tool_choice, logprobs,
    chat_template_kwargs, …"""
    named: Mapping[str, object] = field(default_factory=dict)
    """Model, streaming and sampling parameters as the client sent them; engines use `sampling`."""
    route: Route = "chat/completions"
    """The equivalent route of OpenAI's API."""
    logprobs: bool = False
    """Whether to return the log-probability of each token."""
    target: str = ""
    """The target tag, or else the agent: what a model is trained for."""

    @property
    def body(self) -> dict[str, Any]:
        """The request as JSON of OpenAI's API, for scripted replies."""
        if self.messages is None:
            subject = {"prompt": self.prompt}
        else:
            subject = {"messages": self.messages}
        tools = {} if self.tools is None else {"tools": self.tools}
        return {**subject, **tools, **self.named, **self.options}

    def digest(self) -> str:
        """Hash of the conversation and its tools, the same in every process."""
        text = json.dumps(
            [self.messages, self.prompt, self.tools], default=str, separators=(",", ":")
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Choice:
    """A reply: `message` for chat, `text` for completions. Ids are None if the engine doesn't know
    them."""

    message: dict[str, Any] | None
    text: str | None
    finish_reason: str
    output_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    tokens: Sequence[bytes] | None = None
    """The bytes of each output token, if log-probabilities were requested."""
    stop: str | None = None
    """The stop string that ended it."""
    of_policy: bool = True
    """Whether `logprobs` are those of the distribution sampled from; others are sent to the client
    but not recorded."""
    top: Sequence[Sequence[tuple[bytes, float]]] | None = None
    """The most likely tokens at each position and their log-probabilities, if requested."""
    cut_tokens: int = 0
    """Tokens sampled after `output_ids` and cut off."""
    unread: bool = False
    """Whether it contains an unparsable tool call: an invalid or a truncated one (see
    `finish_reason`)."""
    policy_version: int | None = None
    weight_updates: Sequence[int] = ()
    """Both as in `Call`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's response to an `Ask`: `sampling.n` choices for one prompt."""

    choices: tuple[Choice, ...]
    model: str
    prompt_ids: Sequence[int] | None = None
    usage: Mapping[str, int | float] = field(default_factory=dict)
    """prompt_tokens, completion_tokens, total_tokens; `cost` in money, of a provider that reports
    it."""
    pictures: tuple[PlacedPicture, ...] = ()
    """The pictures in `prompt_ids`."""
    new_ids: array[int] | None = None
    """The new part of `prompt_ids`, shared with the engine's cache to save memory."""
    grammar: str = ""
    """The grammar in effect, as in `Sampling.grammar`; empty if there was none."""


class Engine(Protocol):
    """Answers requests, many at once, from any event loop."""

    model: str
    """The model's name in requests."""

    @property
    def takes_pictures(self) -> bool | None:
        """Whether the model takes pictures; None if only its server knows."""

    async def answer(self, ask: Ask) -> Answer:
        """Answer a request. Raises RequestRefused (400), ContextOverflow, EngineUnavailable.
        Cancelling frees its resources, and raises SamplingCancelled if the number of sampled tokens
        is known."""

    async def count(self, ask: Ask) -> int:
        """Number of prompt tokens. Raises as `answer`."""

    def forget(self, episode_id: str) -> None:
        """Free what is cached for a finished episode (ids, KV)."""

    async def aclose(self) -> None:
        """Stop and free everything."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens sampled after a prompt. `output_ids` ends with the end-of-turn token if it was
    sampled."""

    output_ids: Sequence[int]
    logprobs: Sequence[float] | None
    """None if nobody measured them, as of a scripted reply."""
    finish_reason: Literal["stop", "length"]
    policy_version: int | None
    text: str | None = None
    """The text before the stop string, if one ended the reply."""
    top: Sequence[Sequence[tuple[int, float]]] | None = None
    """The most likely tokens at each position and their log-probabilities, if `top_logprobs`
    requests them."""
    weight_updates: Sequence[int] = ()
    """As in `Call`."""


class SamplingCancelled(asyncio.CancelledError):
    """Sampling was cancelled after `tokens` tokens in all continuations together."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens were drawn")
        self.tokens = tokens


class Sampler(Protocol):
    """Continues token ids."""

    model: str
    max_model_len: int
    takes_pictures: bool

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """Sample `sampling.n` continuations of a prompt, with its pictures. Prompts of a `session`
        tend to extend each other: its KV may be cached.

        A cancellation raises SamplingCancelled if the number of sampled tokens is known.
        """

    def forget(self, session: str) -> None: ...

    async def aclose(self) -> None: ...


class PictureFormat(Protocol):
    """How pictures stand in the prompts of a model (`tokens.pictures`)."""

    token_id: int
    """The image token."""
    placeholder: str
    """What the chat template writes for a picture."""
    never_sampled: tuple[int, ...]
    """Tokens that stand for media: sampled, they would be pictures that are not there."""
    marks: tuple[str, ...]
    """Their texts, which in a message are only text."""

    def text_of(self, picture: Picture) -> tuple[str, int]:
        """The text in place of the placeholder, and the number of its image tokens. Raises
        RequestRefused."""


class Tokenizer(Protocol):
    """A tokenizer whose encoding adds no special tokens and whose decoding drops none."""

    chat_template: str | None
    variables: Mapping[str, object]
    """Template variables besides messages and tools: bos_token, eos_token, ..."""
    eos_ids: frozenset[int]
    """Ids that end a turn."""

    @property
    def pictures(self) -> PictureFormat | None:
        """None if the model takes no pictures."""

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token."""


class Client(Protocol):
    """The client of a request, to decide whether its reply was delivered. Used in the gateway's
    event loop."""

    gone: asyncio.Future[None]
    """Done when the client goes away."""
    in_parts: bool
    """Whether it reads even a response that is not a stream in parts, and may stop halfway."""

    async def drain(self) -> None:
        """Wait until the client has read what was sent, or has disconnected."""

    def has_unread(self) -> bool:
        """Whether the client has not read all that was sent."""


class TraceReader(Protocol):
    """Queries a trace, live or at rest."""

    @property
    def spent(self) -> float:
        """CPU seconds that live runs have spent on this reader's queries."""

    def query(
        self, sql: str, parameters: Sequence[object] = (), stop: Stop | None = None
    ) -> pa.Table:
        """One SELECT or EXPLAIN, read-only, interrupted after 30 s or when `stop` is set. Raises
        QueryError."""

    def of_run(self, run_id: str) -> TraceReader:
        """A reader of the files of one run, if the trace has many files; otherwise this one. It has
        nothing to close."""

    def close(self) -> None: ...


Judge = Callable[..., object]
"""A function, sync or async. Its parameters are filled by name (`output`, `task`, `episode`,
`model`, `env`, keys of the metadata)."""


class Growth(Protocol):
    """Adds tasks to a run as it trains."""

    def due(self, step: int) -> bool:
        """Whether to add tasks after this step."""

    async def grow(
        self, step: int, attempt: Callable[[Sequence[Any]], Awaitable[list[Episode]]]
    ) -> tuple[str, dict[str, float]]:
        """Add tasks, or restore those that the run added here before it was resumed. Returns a log
        line and metrics.

        `attempt` runs attempts with the current policy.
        """

    def tasks(self, step: int) -> Sequence[Task]:
        """The added tasks in effect at a step (from 1)."""


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a backbone needs, with class paths and files resolved."""

    config: Config
    workflow: Callable[..., object] | None
    """A decorated function or a `Workflow` class."""
    judge: Any | None
    """A decorated function, a `BaseJudge`, or None if the workflow gives its own reward."""
    train: Sequence[Task]
    val: Sequence[Task]
    run_id: str
    directory: Path
    """launcher_record/{experiment_name}"""
    resume: bool = False
    debug_tags: frozenset[str] = frozenset()
    ray: str | None = None
    """Address of the Ray cluster; `local` starts one here for the run."""
    growth: Growth | None = None
    swarm: Any | None = None
    """The `SwarmHost` whose clients run the episodes; None: they run here."""


class Stop:
    """Cancels `TraceReader.query` from another thread: once `set`, the query ends with
    QueryError."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._interrupts: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Cancel; idempotent."""
        with self._lock:
            self._set = True
            interrupts = self._interrupts
            self._interrupts = []
        for interrupt in interrupts:
            interrupt()

    @contextmanager
    def by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Within the block, `set` calls `interrupt`; immediately if already set."""
        with self._lock:
            late = self._set
            if not late:
                self._interrupts.append(interrupt)
        if late:
            interrupt()
        try:
            yield
        finally:
            with self._lock:
                if interrupt in self._interrupts:
                    self._interrupts.remove(interrupt)
