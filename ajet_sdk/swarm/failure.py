"""Why an episode of a client has no result, as a message to the server.

Failures keep the meaning that they have in a run on one machine: see `ajet_sdk.rollout.outcomes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ajet_sdk import errors
from ajet_sdk.errors import AjetError, EngineError, EpisodeError, first_line
from ajet_sdk.rollout.outcomes import EpisodeFault, fault_of_calls, origins
from ajet_sdk.swarm.messages import LONGEST_NAME, Abort, CallFault, EpisodeCalls
from ajet_sdk.types import Call, Episode


@dataclass
class ServerRecord:
    """The calls of an episode that the server has recorded, as `outcomes.RecordedCalls`."""

    calls: tuple[Call, ...] = ()
    errors: list[AjetError] = field(default_factory=list)
    context_overflow: bool = False
    is_cut_off: bool = False


def error_of_call(fault: CallFault) -> AjetError:
    """The exception of a failed call, of the class that it had at the server."""
    kind = getattr(errors, fault.kind, None)
    if not isinstance(kind, type) or not issubclass(kind, EngineError | EpisodeError):
        kind = type(fault.kind, (AjetError,), {"infrastructure": fault.infrastructure})
    error: AjetError = kind(fault.message)
    return error


def abort_of(error: BaseException, reply: EpisodeCalls, gateway_url: str) -> Abort:
    """The abort of an episode whose block was left by an exception.

    A failed call of the model is the cause if it explains the exception. A lost connection to the
    server is no failure of the agent; an interruption is no failure at all.
    """
    if not isinstance(error, Exception):
        return Abort(reason=f"stopped by {type(error).__name__}", error=type(error).__name__)
    failed = [error_of_call(fault) for fault in reply.errors]
    record = ServerRecord(reply.calls, failed, reply.context_overflow)
    fault = fault_of_calls(record, error) or EpisodeFault(error)
    fields = fault.fields
    return Abort(
        reason=first_line(error)[:LONGEST_NAME],
        cause=str(fields["cause"])[:LONGEST_NAME],
        infrastructure=bool(fields["infrastructure"]) or lost_connection(error, gateway_url),
        status=fields["status"],
        error=str(fields["error"]),
    )


def abort_of_episode(episode: Episode) -> Abort:
    """The abort of an episode that our runner has run without a result."""
    return Abort(
        reason=(episode.error or "").partition("\n")[0][:LONGEST_NAME],
        cause=(episode.cause or "Aborted")[:LONGEST_NAME],
        infrastructure=episode.infrastructure,
        status="failed" if episode.status == "succeeded" else episode.status,
        error=episode.error or "",
    )


def lost_connection(error: BaseException, url: str) -> bool:
    """Whether an exception, or one of its causes, is a failed connection to a server."""
    return any(
        _is_request_to(origin, url) and is_connection_error(origin) for origin in origins(error)
    )


def _is_request_to(error: BaseException, url: str) -> bool:
    """Whether an error of an HTTP library has no response and names the server."""
    try:
        request = getattr(error, "request", None)
    except RuntimeError:  # httpx: it was not set
        return False
    if request is None or getattr(error, "response", None) is not None:
        return False
    return str(getattr(request, "url", "")).startswith(url + "/")


def is_connection_error(error: BaseException) -> bool:
    """Whether an error of an HTTP library says that a request got no answer.

    A time-out while waiting for the answer is the agent's own, and the server knows the request.
    """
    waited = isinstance(error, TimeoutError) or type(error).__name__ == "ReadTimeout"
    return isinstance(error, Exception) and not waited
