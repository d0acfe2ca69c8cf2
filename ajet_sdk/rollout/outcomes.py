"""The outcome of a batch of episodes: failures by cause, pass@k, and whether enough of it is sound.

Why an episode has no reward: its own code, its judge, its environment, or its calls.

Episodes as JSON files, beside the trace: for programs that were written for them.
"""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from ajet_sdk.environments.client import GymEnv
from ajet_sdk.errors import AjetError, EndpointMisconfigured, EpisodeTimeout, TrainingError
from ajet_sdk.gateway.episode import OpenEpisode
from ajet_sdk.rollout.threads import is_library_code
from ajet_sdk.samples.draft import sampled_tokens
from ajet_sdk.types import Episode, LedgerEntry, Outcome, Phase, Status

log = logging.getLogger("ajet")

WITHOUT_CALLS = (
    "Likely causes: the agent's framework caught an exception and returned anyway (see the episode's output and the "
    "framework's log), the workflow returned before its first call, or its client is one that ajet does not capture "
    "(give the function a parameter `model` and use `model.base_url` and `model.api_key`)"
)

_WARN_SHARE = 0.1
"""Share of failed episodes above which a notice is logged."""

_LONGEST = 8000
"""Maximum characters of a message and of a traceback."""


def solved(episode: Episode) -> bool:
    """Whether the episode solved its task: by its judge, else by a reward of at least 1."""
    if episode.is_success is not None:
        return episode.is_success
    return episode.reward is not None and episode.reward >= 1 - 1e-9


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """The unbiased estimate of solving a task in k attempts: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, equation 1. Raises ValueError where there are fewer than k attempts.
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(
            f"pass@{k} cannot be computed from {attempts} attempts ({successes} successes): it needs at least k"
        )
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def failures_by_cause(episodes: Iterable[Episode]) -> list[str]:
    """A line per cause of failure, most frequent first, with the count and the first message."""
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.status != "succeeded":
            groups[episode.cause or episode.status].append(episode)
    return [
        f"{len(group)} × {cause}: {_first_line(group[0])} "
        f"(episode {group[0].episode_id[:8]}, task {group[0].task.task_id[:12]})"
        for cause, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def failure_messages(episodes: Sequence[Episode], *, cause: bool = True) -> list[str]:
    """Messages about failures in a batch that the run survives.

    `cause` adds why most of the failed episodes failed; no need where `failures_by_cause` is shown too.
    """
    messages = []
    failed = [e for e in episodes if e.status != "succeeded"]
    if episodes and len(failed) / len(episodes) > _WARN_SHARE:
        why = f"; most frequent cause: {failures_by_cause(failed)[0]}" if cause else ""
        messages.append(f"{len(failed)} of {len(episodes)} episodes failed{why}")
    silent = [e for e in episodes if e.status == "succeeded" and not any(c.phase == "rollout" for c in e.calls)]
    if silent:
        messages.append(
            f"{len(silent)} of {len(episodes)} episodes never called a model, so there is nothing to train. "
            + WITHOUT_CALLS
        )
    untrained = [e for e in episodes if e.status == "succeeded" and e.calls and not any(c.trainable for c in e.calls)]
    if untrained:
        messages.append(
            f"{len(untrained)} of {len(episodes)} episodes only called models that are not the policy "
            f"({', '.join(sorted({c.model for e in untrained for c in e.calls if c.phase == 'rollout'}))}); call "
            "the policy through the function's `model` or tuner if it has one, else add the name to "
            "rollout.policy_models"
        )
    return messages


def check_sound(episodes: Sequence[Episode], share: float) -> None:
    """Raise TrainingError with the causes if less than `share` of a batch succeeded."""
    sound = sum(e.status == "succeeded" for e in episodes)
    if episodes and sound < share * len(episodes):
        causes = "\n  ".join(failures_by_cause(episodes))
        raise TrainingError(
            f"only {sound} of {len(episodes)} episodes succeeded, less than rollout.min_sound_share "
            f"({share:g}):\n  {causes}\nTo view one: ajet trace show EPISODE"
        )


def untrained_entries(episode: Episode, outcome: Outcome = "evaluation") -> list[LedgerEntry]:
    """The ledger of an episode without trained tokens."""
    return [
        LedgerEntry(
            run_id=episode.run_id,
            step=episode.step,
            episode_id=episode.episode_id,
            call_id=call.call_id,
            outcome=outcome,
            tokens=sampled_tokens(call),
        )
        for call in episode.calls
        if call.trainable and (call.output_ids is not None or call.cut_tokens)
    ]


def _first_line(episode: Episode) -> str:
    """The first line of the error, without the name of its class."""
    line = (episode.error or "no message").strip().splitlines()[0]
    return re.sub(rf"^[\w.]*\b{re.escape(episode.cause or episode.status)}: ", "", line)[:300]


def is_infrastructure_error(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, began in the infrastructure, whoever raised it last.

    That is an error of ours that says so, and whatever was raised in a method of a `GymEnv` or of a subclass of it.
    """
    return any(
        bool(getattr(origin, "infrastructure", False))
        or (not isinstance(origin, AjetError) and _is_from_environment(origin))
        for origin in _origins(error, set())
    )


def _origins(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """The exception, the members of an exception group, and their causes."""
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for origin in (*getattr(error, "exceptions", ()), cause):
        if isinstance(origin, BaseException):
            yield from _origins(origin, seen)


def _is_from_environment(error: BaseException) -> bool:
    return any(isinstance(frame.f_locals.get("self"), GymEnv) for frame, _ in traceback.walk_tb(error.__traceback__))


class UserError(Exception):
    """An exception of another process. Its class has the name of the original."""

    def __init__(self, message: str, description: str, infrastructure: bool) -> None:
        super().__init__(message)
        self.description = description
        """The description from the process where it was raised."""
        self.infrastructure = infrastructure


def describe_error(error: BaseException) -> str:
    """One line that says what, then where in the user's code, then the causes: no frames of libraries or of ours.

    What UTF-8 cannot hold (half of a pair that a model sampled, say) becomes `?`: episodes travel as JSON.
    """
    if isinstance(error, UserError):
        return error.description
    first = "".join(traceback.format_exception_only(type(error), error)).strip()[:_LONGEST]
    if isinstance(error, AjetError):
        return first
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library_code(f.filename)]
    where = "".join(traceback.format_list(frames)).rstrip()[-_LONGEST:]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = [first, where, f"caused by {describe_error(cause)}" if cause is not None else ""]
    return "\n".join(part for part in parts if part).encode("utf-8", "replace").decode()


class EpisodeFault(Exception):
    """Why an episode has no reward, as fields of `Episode`."""

    def __init__(self, error: BaseException, prefix: str = "", *, cause: str | None = None, detail: str = "") -> None:
        super().__init__(str(error))
        status: Status = "timeout" if isinstance(error, EpisodeTimeout) else "failed"
        self.fields: dict[str, Any] = {
            "status": status,
            "error": f"{prefix}{describe_error(error)}{detail}",
            "cause": cause or type(error).__name__,
            "infrastructure": is_infrastructure_error(error),
            "rewards": (),
        }
        self.metrics = error.metrics if isinstance(error, AjetError) else {}
        self.__cause__ = error
        self.misconfigured = next(
            (origin for origin in _origins(error, set()) if isinstance(origin, EndpointMisconfigured)), None
        )
        """The error that ends the run."""


def fault_of_calls(opened: OpenEpisode, error: BaseException | None) -> EpisodeFault | None:
    """The fault of an episode whose workflow is over: of its calls where they are to blame, else of its own code.

    An engine that failed is to blame where the workflow raised, or made do with what it had after a last failed call.
    """
    if isinstance(error, EpisodeTimeout):
        return EpisodeFault(error)
    of_calls = next((fault for fault in opened.errors if not fault.infrastructure), None)
    if of_calls is None and opened.errors and (error is not None or is_last_call_lost(opened, "rollout")):
        of_calls = opened.errors[-1]
    if of_calls is not None:
        return EpisodeFault(of_calls, detail="" if error is None else f"\n\nIn the workflow: {describe_error(error)}")
    if error is None:
        return None
    return EpisodeFault(error, cause="ContextOverflow" if opened.context_overflow else None)


def is_last_call_lost(opened: OpenEpisode, phase: Phase) -> bool:
    """Whether the last call to the policy failed in a phase, or the last to another model: who made do with it lost it.

    An agent that asks once more, or another model in place of one that failed, has its reply.
    """
    calls = [call for call in opened.calls if call.phase == phase]
    policy_error, other_error = (
        next((call.error for call in reversed(calls) if call.trainable is trainable), None)
        for trainable in (True, False)
    )
    return not calls or policy_error is not None or bool(other_error and not other_error.startswith("undelivered"))


def write_trajectory(directory: Path, episode: Episode) -> None:
    """Write `trajectory/{split}-{step}/{episode_id}.json`.

    An output that JSON does not know is written as its `str`. A file that cannot be written is a warning, for the trace
    has the episode too.
    """
    place = directory / "trajectory" / f"{episode.split}-{episode.step}" / f"{episode.episode_id}.json"
    try:
        output = to_jsonable_python(episode.output, fallback=str)
        text = episode.model_copy(update={"output": output}).model_dump_json()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a lone surrogate, say
        log.warning("trainer_common.save_trajectory_as_json_file: could not write %s: %s", place, error)
