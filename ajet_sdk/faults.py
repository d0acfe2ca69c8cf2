"""Why an episode has no reward: its own code, its judge, its environment, or its calls."""

from __future__ import annotations

from typing import Any

from ajet_sdk.errors import EpisodeTimeout
from ajet_sdk.recorder import OpenEpisode
from ajet_sdk.types import Status
from ajet_sdk.workers import account

__all__ = ["Fault", "fault_of_calls"]


class Fault(Exception):
    """Why an episode has no reward, as fields of the Episode."""

    def __init__(self, error: BaseException, prefix: str = "", *, cause: str | None = None, detail: str = "") -> None:
        super().__init__(str(error))
        status: Status = "timeout" if isinstance(error, EpisodeTimeout) else "failed"
        self.fields: dict[str, Any] = {
            "status": status,
            "error": f"{prefix}{account(error)}{detail}",
            "cause": cause or type(error).__name__,
            "infrastructure": bool(getattr(error, "infrastructure", False)),
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
