"""Every error that ajet raises on purpose.

    AjetError
    ├── ConfigError          (ValueError)    a config file, an override or an argument is wrong
    │   └── MissingResource                  a file, a service or a key named in the config does not exist here
    ├── SignatureError       (TypeError)     a decorated function cannot be called with what a run has
    ├── TaskError            (ValueError)    a row of a dataset is wrong; names file and line
    ├── MissingExtra         (ImportError)   an optional dependency is absent; prints the line that installs it
    ├── TraceError           (RuntimeError)  a trace file cannot be opened, read or written
    │   ├── TraceLocked                      another process owns the file
    │   ├── TraceVersionError                the file is newer than this ajet, or not a trace at all
    │   │   └── NotATrace                    a DuckDB file of something else
    │   └── QueryError                       a query is not one SELECT, took too long, or failed
    ├── EngineError          (RuntimeError)  a model could not answer
    │   ├── RequestRefused                   the request itself is wrong (HTTP 400): names the parameter
    │   ├── ContextOverflow                  prompt and reply do not fit the model's length
    │   ├── EngineUnavailable                connection lost, 429 or 5xx after every retry, or an invalid reply
    │   └── EndpointMisconfigured (ConfigError)  an endpoint's key, URL or model is wrong (HTTP 401 to 405, 418, ...)
    ├── EnvironmentUnavailable (RuntimeError)  an environment service did not answer
    ├── EpisodeError         (RuntimeError)  an episode ended without a usable outcome
    │   ├── EpisodeTimeout   (TimeoutError)
    │   ├── ProgramFailed                    an agent that is a program did not start, or ended with an error
    │   ├── UncapturedTraffic                the agent sends requests to a model host that are not recorded
    │   ├── UnattributedCall                 an LLM request came from outside of the episode that it is for
    │   ├── ModelAmbiguous                   the agent names several models and none is set as the policy
    │   ├── NoCalls                          a workflow in training made no LLM call
    │   └── NoReward                         neither workflow nor judge gave a reward
    ├── SwarmError           (RuntimeError)  a swarm's server refused a request
    │   ├── SwarmUnavailable                 it could not be reached, or had no place, within the time limit
    │   │   └── SwarmOffline                 it waits for a config and a start
    │   ├── SwarmKeyRefused                  the key is unknown, or not one for this request
    │   ├── SwarmFinished                    the training is over
    │   ├── HeldOutTask                      a validation task was claimed for training
    │   └── EpisodeOver                      the episode has ended, was idle for too long, or was aborted
    ├── TrainingError        (RuntimeError)  a run stops: too few sound episodes, a ledger that does not balance
    └── CheckpointError      (RuntimeError)  a checkpoint is incomplete or belongs to another config

An infrastructure fault (`infrastructure` is true) is worth another try; a fault of the agent's own
code is data.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ajet_sdk.addresses import public


def first_line(error: BaseException) -> str:
    """The first nonblank line of an error's message, or else the name of its class."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def place_of(error: BaseException) -> str:
    """The location where an exception was raised, as ` (agent.py line 12)`; empty without a
    traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        return f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})"
    return ""


class AjetError(Exception):
    """Base of every error raised on purpose; its message says what, where and what to do next.

    Addresses in a message lose their passwords and keys. `metrics` are recorded with the episode
    that fails.
    """

    infrastructure: ClassVar[bool] = False
    metrics: Mapping[str, float] = {}

    def __init__(self, *args: object) -> None:
        super().__init__(*(public(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(AjetError, ValueError):
    """A config file, an override or an argument is wrong."""


class MissingResource(ConfigError):
    """A file, a service or a key named in the config does not exist here; the config may be right
    elsewhere."""


class SignatureError(AjetError, TypeError):
    """A decorated function has a parameter that nothing can fill."""


class TaskError(AjetError, ValueError):
    """A row of a dataset is wrong; the message names file and line."""


class MissingExtra(AjetError, ImportError):
    """An optional dependency is absent; the message is the line that installs it.

    `extra` is an extra of ajet; those that pip cannot resolve (trinity, verl, vllm) are installed
    by an `ajet` command.
    """

    def __init__(self, package: str, extra: str) -> None:
        stack = _STACKS.get(extra)
        if stack:
            line = f"ajet install {stack}"
        else:
            line = f'pip install "ajet[{extra}]"'
        if package == "torch" and not stack:
            cpu = f"; on Linux without a GPU first: {CPU_TORCH}"
        else:
            cpu = ""
        super().__init__(f"{package} is not installed. Install it with: {line}{cpu}")


CPU_TORCH = 'pip install "torch<2.14" --index-url https://download.pytorch.org/whl/cpu'
"""By default pip installs the CUDA build of several gigabytes."""
_STACKS = {"trinity": "trinity", "verl": "trinity", "vllm": "vllm"}


class PictureError(AjetError, ValueError):
    """A picture is too large, broken, or of an unknown format."""


class TraceError(AjetError, RuntimeError):
    """A trace file cannot be opened, read or written."""


class TraceLocked(TraceError):
    """Another live process owns the trace file."""


class TraceVersionError(TraceError):
    """The file was written by a newer ajet, or is not a trace file."""


class NotATrace(TraceVersionError):
    """A DuckDB file without the tables of a trace."""


class QueryError(TraceError):
    """A query is not exactly one SELECT or EXPLAIN, took too long, or failed."""

    TOO_MUCH: ClassVar[str] = "the query needs more memory than a query may have"
    """Start of the message if a result is too large."""


class EngineError(AjetError, RuntimeError):
    """A model could not answer."""


class RequestRefused(EngineError):
    """The request is invalid (HTTP 400); `parameter` names the unsupported one, and clients read
    `code`."""

    def __init__(
        self, message: str, parameter: str | None = None, *, code: str = "unsupported_parameter"
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class ContextOverflow(EngineError):
    """Prompt and reply do not fit the model's length."""


class EngineUnavailable(EngineError):
    """The engine did not answer: connection lost, 429 or 5xx after every retry, or an invalid
    reply.

    `status` is the HTTP status of the last answer, if any, and `retry_after` its header. `refused`:
    nothing listens at the address. `retryable`: the request may be sent again.
    """

    infrastructure: ClassVar[bool] = True

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: str | None = None,
        refused: bool = False,
        retryable: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.refused = refused
        self.retryable = retryable


class EndpointMisconfigured(EngineError, ConfigError):
    """Key, URL or model of an endpoint is wrong (HTTP 401 to 405, 407, 410, 418, 451), so that all
    requests fail.

    In an episode it ends the run.
    """


class EnvironmentUnavailable(AjetError, RuntimeError):
    """An environment service did not answer, or sent an invalid response; `status` is its HTTP
    status, if any."""

    infrastructure: ClassVar[bool] = True

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EpisodeError(AjetError, RuntimeError):
    """An episode ended without a usable outcome."""


class EpisodeTimeout(EpisodeError, TimeoutError):
    """The workflow or the judge ran past its time limit."""


class ProgramFailed(EpisodeError):
    """A program did not start, or ended with an error; `result` is its output, None if it did not
    start."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class UncapturedTraffic(EpisodeError):
    """The agent calls a known model host on an unsupported route, or through a client that is not
    hooked."""


class UnattributedCall(EpisodeError):
    """An LLM request came from a thread, task or process of which no single episode is known. It
    ends the run."""


class ModelAmbiguous(EpisodeError):
    """The agent names several models and none of them is set as the policy."""


class NoCalls(EpisodeError):
    """A workflow in training ended without an LLM call, so there is nothing to train on its
    reward."""

    infrastructure: ClassVar[bool] = True


class NoReward(EpisodeError):
    """Neither the workflow nor a judge gave a reward."""


class SwarmError(AjetError, RuntimeError):
    """A swarm's server refused a request.

    `code` is the protocol's (`ajet_sdk.swarm.messages.Code`), `status` the HTTP status, if any.
    """

    def __init__(self, message: str, *, code: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class SwarmUnavailable(SwarmError):
    """A swarm's server could not be reached, or had no place for an episode, within the time
    limit."""

    infrastructure: ClassVar[bool] = True


class SwarmOffline(SwarmUnavailable):
    """A swarm's server waits for a config and a start."""


class SwarmKeyRefused(SwarmError):
    """The key is unknown to the swarm's server, or is not one for this request."""


class SwarmFinished(SwarmError):
    """The training of the swarm's server is over, so that there are no further episodes."""


class HeldOutTask(SwarmError):
    """A validation task was claimed for training."""


class EpisodeOver(SwarmError):
    """An episode has ended, was idle for too long, or was aborted; its key is no longer valid."""

    infrastructure: ClassVar[bool] = True


class TrainingError(AjetError, RuntimeError):
    """A run stops; the message carries the first cause."""


class CheckpointError(AjetError, RuntimeError):
    """A checkpoint is incomplete or belongs to another config."""
