"""The seams: each protocol here has two or more implementations.

An `Engine` answers requests; a `Sampler` continues token ids and is made an engine by `engines.chat.TokenEngine`;
a `Tokenizer` is what exact ids need of one; a `Client` waits for a reply; a `TraceReader` queries a trace, live or at
rest; a `Judge` scores an output. A backbone runs a `Job`.

Calling off a question to a trace, from another thread than the one that asks it.
"""

from __future__ import annotations

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

from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from ajet_sdk.config.config import Config

__all__ = [
    "Answer",
    "Ask",
    "Choice",
    "Client",
    "Engine",
    "Growth",
    "Job",
    "Judge",
    "Route",
    "Sampled",
    "Sampler",
    "Sampling",
    "Stop",
    "Tokenizer",
    "TraceReader",
]

Route = Literal["chat/completions", "completions"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: the parameters really used, after a run's own have overridden the agent's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    min_p: float = 0.0
    """Tokens below this share of the most likely one's probability cannot be drawn."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a reply beside those that end a turn."""
    ignore_eos: bool = False
    """The ids that end a turn do not end a reply."""
    grammar: str = ""
    """What the reply must be (`tokens.grammars`); an engine makes it of the request, and names it in its `Answer`."""
    top_logprobs: int = 0
    """How many of the most likely tokens are wanted beside each sampled one."""

    @property
    def processed(self) -> bool:
        """Whether the logits are changed otherwise than by temperature and limits (`engines.local.logits`)."""
        return bool(_logits_of(self) != _NO_LOGITS)

    @property
    def plain(self) -> bool:
        """Whether the recorded log-probabilities are the model's alone: at temperature 1, or of a greedy call."""
        limited = self.temperature != 1 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return not self.processed and (self.temperature <= 0 or not limited)

    @lru_cache(maxsize=256)  # noqa: B019  # a value: nearly all calls of a run have the same
    def as_dict(self) -> Mapping[str, object]:
        """As JSON holds it; rarer parameters only where they say something."""
        recorded = dict[str, object]()
        for (name, default), value in zip(_SAMPLING_DEFAULTS.items(), _values_of(self), strict=True):
            if value != default or name in _ALWAYS:
                recorded[name] = list(value) if isinstance(value, tuple) else value
        return recorded

    @staticmethod
    def of(recorded: Mapping[str, object]) -> Sampling:
        """What `as_dict` was made of; parameters that this version does not know are left out."""
        known: dict[str, Any] = {name: value for name, value in recorded.items() if name in _SAMPLING_DEFAULTS}
        for name, value in known.items():
            if isinstance(value, list):
                known[name] = tuple(tuple(item) if isinstance(item, list) else item for item in value)
        return Sampling(**known)


_ALWAYS = ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n")
_PROCESSED = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens",
    "grammar",
)  # fmt: skip
_SAMPLING_DEFAULTS: dict[str, object] = {field_.name: field_.default for field_ in fields(Sampling)}
_values_of = attrgetter(*_SAMPLING_DEFAULTS)
_logits_of = attrgetter(*_PROCESSED)
_NO_LOGITS = _logits_of(Sampling())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to an engine, whatever API its client spoke."""

    sampling: Sampling
    episode_id: str
    agent: str
    messages: Sequence[Any] | None = None
    """The conversation to continue; None where `prompt` is."""
    prompt: object = None
    """Text or token ids to continue."""
    tools: object = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every other parameter by its name in OpenAI's API: tool_choice, logprobs, chat_template_kwargs, …"""
    named: Mapping[str, object] = field(default_factory=dict)
    """Model, streaming and sampling as the client named them. An engine samples by `sampling`."""
    route: Route = "chat/completions"
    """The route of OpenAI's API that it would take."""
    logprobs: bool = False
    """The reply is to say the log-probability of each token."""

    @property
    def body(self) -> dict[str, Any]:
        """The request as JSON of OpenAI's API, for scripted replies that read it."""
        subject = {"prompt": self.prompt} if self.messages is None else {"messages": self.messages}
        tools = {} if self.tools is None else {"tools": self.tools}
        return {**subject, **tools, **self.named, **self.options}

    def digest(self) -> str:
        """Of the conversation and its tools, the same in every process."""
        text = json.dumps([self.messages, self.prompt, self.tools], default=str, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply. `message` for chat, `text` for completions; ids are None where the engine cannot know them."""

    message: dict[str, Any] | None
    text: str | None
    finish_reason: str
    output_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    tokens: Sequence[bytes] | None = None
    """The bytes of each output token, where `logprobs` was asked for."""
    stop: str | None = None
    """The stop string that ended it."""
    of_policy: bool = True
    """Whether `logprobs` are of the distribution sampled from; those of another are sent and never recorded."""
    top: Sequence[Sequence[tuple[bytes, float]]] | None = None
    """The most likely tokens at each place and their log-probabilities, where they were asked for."""
    cut_tokens: int = 0
    """Tokens that were sampled behind `output_ids` and cut off."""
    unread: bool = False
    """A whole reply that begins a tool call which cannot be read."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine says to an `Ask`: `sampling.n` choices over one prompt."""

    choices: tuple[Choice, ...]
    model: str
    prompt_ids: Sequence[int] | None = None
    policy_version: int | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    """prompt_tokens, completion_tokens, total_tokens."""
    new_ids: array[int] | None = None
    """The end of `prompt_ids`, where the engine keeps it for the episode: a recorder keeps the same."""
    grammar: str = ""
    """What it was sampled under, in `Sampling.grammar`'s language; empty where any text would have done."""


class Engine(Protocol):
    """Answers requests, many at once, from any event loop."""

    model: str
    """The name it answers to."""

    async def answer(self, ask: Ask) -> Answer:
        """Raises RequestRefused (400), ContextOverflow, EngineUnavailable. Cancelling frees what the request holds."""
        ...

    async def count(self, ask: Ask) -> int:
        """Tokens of the prompt, as `answer` would make it. Raises as `answer` does."""
        ...

    def forget(self, episode_id: str) -> None:
        """Drop whatever is kept for an episode (ids, KV); the episode is over."""
        ...

    async def aclose(self) -> None:
        """Stop and free everything."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens sampled after a prompt. `output_ids` ends with the end-of-turn token where one was sampled."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int | None
    text: str | None = None
    """Where a stop string cut the text: the text before it. Else None, and the ids say it all."""
    top: Sequence[Sequence[tuple[int, float]]] | None = None
    """The most likely tokens at each place and their log-probabilities, where `top_logprobs` asked for them."""


class Sampler(Protocol):
    """Continues token ids."""

    model: str
    max_model_len: int

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> list[Sampled]:
        """`sampling.n` continuations. Prompts of one `session` tend to extend each other: its KV may be kept."""
        ...

    def forget(self, session: str) -> None: ...

    async def aclose(self) -> None: ...


class Tokenizer(Protocol):
    """What exact ids need of a tokenizer. Encoding adds no special tokens; decoding drops none."""

    chat_template: str | None
    variables: Mapping[str, object]
    """The template's variables beside messages and tools: bos_token, eos_token, ..."""
    eos_ids: frozenset[int]
    """Ids that end a turn."""

    def __len__(self) -> int:
        """The number of ids."""
        ...

    def __hash__(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token."""
        ...


class Client(Protocol):
    """Who asked, as far as it decides whether a reply was delivered. Used in the gateway's event loop."""

    gone: asyncio.Future[None]
    """Done when the client goes away."""
    in_parts: bool
    """It takes a response that is no stream part by part too, and may leave it half read."""

    async def taken(self, whole: bool = False) -> bool:
        """Wait until the client has taken what was sent, with `whole` to the last byte; False where it went away."""
        ...

    def unread(self) -> int:
        """Bytes sent that the client has not taken."""
        ...


class TraceReader(Protocol):
    """Queries a trace, whether its owner is alive or not."""

    @property
    def spent(self) -> float:
        """Processor seconds that live runs have spent on this reader's queries."""
        ...

    def query(self, sql: str, parameters: Sequence[object] = (), stop: Stop | None = None) -> pa.Table:
        """One SELECT or EXPLAIN, read-only, interrupted after 30 s or when `stop` is set. Raises QueryError."""
        ...

    def close(self) -> None: ...


Judge = Callable[..., object]
"""A function, sync or async. Its parameters are filled by name (`output`, `task`, `episode`, `model`, `env`, keys
of the metadata)."""


class Growth(Protocol):
    """Adds tasks to a run as it trains."""

    def due(self, step: int) -> bool:
        """Whether tasks are to be added when so many steps are done."""
        ...

    async def grow(
        self, step: int, attempt: Callable[[Sequence[Any]], Awaitable[list[Episode]]]
    ) -> tuple[str, dict[str, float]]:
        """Add them, or take those that this run added here before it was resumed; returns a line to print, metrics.

        `attempt` makes attempts with the policy as it is.
        """
        ...

    def tasks(self, step: int) -> Sequence[Task]:
        """The added tasks that a step (from 1) has beside those of the start."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a backbone needs, resolved: no class path or file name is left to look up."""

    config: Config
    workflow: Callable[..., object] | None
    """A decorated function or a `Workflow` class."""
    judge: Any | None
    """A decorated function, a `BaseJudge`, or None where the workflow gives its own reward."""
    train: Sequence[Task]
    val: Sequence[Task]
    run_id: str
    directory: Path
    """launcher_record/{experiment_name}"""
    resume: bool = False
    debug_tags: frozenset[str] = frozenset()
    ray: str | None = None
    """The Ray cluster to use: an address, `local` for one that is started here and ended with the run, or None."""
    growth: Growth | None = None


class Stop:
    """Given to `TraceReader.query`; once `set`, the query ends with QueryError, in DuckDB too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._interrupts: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it was called off."""
        return self._set

    def set(self) -> None:
        """Call it off; again does nothing."""
        with self._lock:
            self._set = True
            interrupts, self._interrupts = self._interrupts, []
        for interrupt in interrupts:
            interrupt()

    @contextmanager
    def by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Within the block, `set` calls `interrupt`; at once where it was set before."""
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
