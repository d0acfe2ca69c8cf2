"""Why an episode has no reward: its own code, its judge, its environment, or its calls."""

from __future__ import annotations

from collections.abc import Iterator
from traceback import walk_tb
from typing import Any

from ajet_sdk.environment import GymEnv
from ajet_sdk.errors import AjetError, EpisodeTimeout
from ajet_sdk.recorder import OpenEpisode
from ajet_sdk.types import Status
from ajet_sdk.workers import account

__all__ = ["Fault", "fault_of_calls", "of_infrastructure"]


def of_infrastructure(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, began in the infrastructure, whoever raised it last.

    That is an error of ours that says so, and whatever was raised in a method of a `GymEnv` or of a subclass of it.
    """
    return any(
        bool(getattr(one, "infrastructure", False)) or (not isinstance(one, AjetError) and _of_environment(one))
        for one in _origins(error, set())
    )


def _origins(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """The exception, those that a group holds, and what each was raised from."""
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for one in (*getattr(error, "exceptions", ()), cause):
        if isinstance(one, BaseException):
            yield from _origins(one, seen)


def _of_environment(error: BaseException) -> bool:
    return any(isinstance(frame.f_locals.get("self"), GymEnv) for frame, _ in walk_tb(error.__traceback__))


class Fault(Exception):
    """Why an episode has no reward, as fields of the Episode."""

    def __init__(self, error: BaseException, prefix: str = "", *, cause: str | None = None, detail: str = "") -> None:
        super().__init__(str(error))
        status: Status = "timeout" if isinstance(error, EpisodeTimeout) else "failed"
        self.fields: dict[str, Any] = {
            "status": status,
            "error": f"{prefix}{account(error)}{detail}",
            "cause": cause or type(error).__name__,
            "infrastructure": of_infrastructure(error),
            "rewards": (),
        }


def fault_of_calls(opened: OpenEpisode, error: BaseException | None) -> Fault | None:
    """The fault of an episode whose workflow is over: of its calls where they are to blame, else of its own code.

    An engine that failed is to blame where the workflow raised, or made do with what it had after a last failed call.
    """
    if isinstance(error, EpisodeTimeout):
        return Fault(error)
    of_calls = opened.error
    if of_calls is not None:
        mine = [call for call in opened.calls if call.trainable and call.phase == "rollout"]
        lost = error is not None or not mine or mine[-1].error is not None
        if lost or not of_calls.infrastructure:
            return Fault(of_calls, detail="" if error is None else f"\n\nIn the workflow: {account(error)}")
    if error is None:
        return None
    return Fault(error, cause="ContextOverflow" if opened.context_overflow else None)
