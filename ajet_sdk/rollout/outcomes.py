"""Outcomes of episodes: the cause of a missing reward, failures of a batch, pass@k, and JSON files
of episodes."""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic_core import to_jsonable_python

from ajet_sdk.environments.client import GymEnv
from ajet_sdk.errors import AjetError, EndpointMisconfigured, EpisodeTimeout, TrainingError
from ajet_sdk.rollout.threads import is_library_code
from ajet_sdk.samples.draft import ledger_entry, sampled_tokens
from ajet_sdk.types import Call, Episode, LedgerEntry, Outcome, Phase, Status

log = logging.getLogger("ajet")

WITHOUT_CALLS = (
    "Likely causes: the agent's framework caught an exception and returned anyway (see the"
    " episode's output and the framework's log), the workflow returned before its first call, or"
    " its client is one that ajet does not capture (give the function a parameter `model` and use"
    " `model.base_url` and `model.api_key`)"
)

RETRY = "retry"
"""Metric of an episode that repeats an attempt: the number of earlier tries, each with an episode
of its own."""

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
    """Unbiased estimate of solving a task in k attempts: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, equation 1. Raises ValueError for fewer than k attempts.
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(
            f"pass@{k} cannot be computed from {attempts} attempts ({successes} successes): it"
            " needs at least k"
        )
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def failures_by_cause(episodes: Iterable[Episode]) -> list[str]:
    """Lists causes of failure, most frequent first, with count and first message."""
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
    """Messages about non-fatal failures in a batch.

    `cause` adds the most frequent cause; redundant with `failures_by_cause`.
    """
    messages = []
    failed = [e for e in episodes if e.status != "succeeded"]
    if episodes and len(failed) / len(episodes) > _WARN_SHARE:
        if cause:
            why = f"; most frequent cause: {failures_by_cause(failed)[0]}"
        else:
            why = ""
        messages.append(f"{len(failed)} of {len(episodes)} episodes failed{why}")
    repeated = [e for e in episodes if e.metrics.get(RETRY)]
    if repeated:
        tries = sum(int(e.metrics[RETRY]) for e in repeated)
        messages.append(
            f"{len(repeated)} of {len(episodes)} attempts were repeated after faults of the"
            f" infrastructure; the trace also has their {tries} failed tries"
        )
    silent = [
        e
        for e in episodes
        if e.status == "succeeded" and not any(c.phase == "rollout" for c in e.calls)
    ]
    if silent:
        messages.append(
            f"{len(silent)} of {len(episodes)} episodes never called a model, so there is nothing"
            " to train. " + WITHOUT_CALLS
        )
    untrained = [
        e
        for e in episodes
        if e.status == "succeeded" and e.calls and not any(c.trainable for c in e.calls)
    ]
    if untrained:
        messages.append(
            f"{len(untrained)} of {len(episodes)} episodes only called models that are not the"
            " policy"
            f" ({', '.join(sorted({c.model for e in untrained for c in e.calls if c.phase == 'rollout'}))});"
            " call the policy through the function's `model` or tuner if it has one, else add the"
            " name to rollout.policy_models"
        )
    return messages


def check_sound(episodes: Sequence[Episode], share: float) -> None:
    """Raise TrainingError with the causes if less than `share` of a batch succeeded."""
    sound = sum(e.status == "succeeded" for e in episodes)
    if episodes and sound < share * len(episodes):
        causes = "\n  ".join(failures_by_cause(episodes))
        raise TrainingError(
            f"only {sound} of {len(episodes)} episodes succeeded, less than rollout.min_sound_share"
            f" ({share:g}):\n  {causes}\nTo view one: ajet trace show EPISODE"
        )


def untrained_entries(episode: Episode, outcome: Outcome = "evaluation") -> list[LedgerEntry]:
    """Ledger entries of an episode without trained tokens."""
    return [
        ledger_entry(episode, call, outcome, sampled_tokens(call))
        for call in episode.calls
        if call.trainable and (call.output_ids is not None or call.cut_tokens)
    ]


def _first_line(episode: Episode) -> str:
    """The first line of the error, without the name of its class."""
    line = (episode.error or "no message").strip().splitlines()[0]
    return re.sub(rf"^[\w.]*\b{re.escape(episode.cause or episode.status)}: ", "", line)[:300]


def is_infrastructure_error(error: BaseException) -> bool:
    """Whether an exception, or one of its causes, comes from the infrastructure.

    Those are errors of ours with `infrastructure` set, and any exception from a method of a
    `GymEnv` or subclass.
    """
    for origin in origins(error):
        if getattr(origin, "infrastructure", False):
            return True
        if isinstance(origin, AjetError):
            continue
        for frame, _ in traceback.walk_tb(origin.__traceback__):
            if isinstance(frame.f_locals.get("self"), GymEnv):
                return True
    return False


def origins(error: BaseException, seen: set[int] | None = None) -> Iterator[BaseException]:
    """Yields the exception, members of an exception group, and their causes."""
    seen = set() if seen is None else seen
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for origin in (*getattr(error, "exceptions", ()), cause):
        if isinstance(origin, BaseException):
            yield from origins(origin, seen)


def describe_error(error: BaseException) -> str:
    """Describes an error: its message, the frames of the user's code, then the causes.

    Characters outside of UTF-8, such as a sampled lone surrogate, become `?`, since episodes are
    sent as JSON.
    """
    first = "".join(traceback.format_exception_only(type(error), error)).strip()[:_LONGEST]
    if isinstance(error, AjetError):
        return first
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not is_library_code(f.filename)
    ]
    where = "".join(traceback.format_list(frames)).rstrip()[-_LONGEST:]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = [first, where, f"caused by {describe_error(cause)}" if cause is not None else ""]
    return "\n".join(part for part in parts if part).encode("utf-8", "replace").decode()


class EpisodeFault(Exception):
    """The cause of a missing reward, as fields of `Episode`."""

    def __init__(
        self, error: BaseException, prefix: str = "", *, cause: str | None = None, detail: str = ""
    ) -> None:
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
            (origin for origin in origins(error) if isinstance(origin, EndpointMisconfigured)),
            None,
        )
        """The error that ends the run."""


class RecordedCalls(Protocol):
    """What a gateway, here or elsewhere, has recorded of an episode."""

    @property
    def calls(self) -> Sequence[Call]: ...

    @property
    def errors(self) -> Sequence[AjetError]:
        """The calls that failed for a reason that fails the episode."""

    @property
    def context_overflow(self) -> bool: ...

    @property
    def is_cut_off(self) -> bool:
        """Whether the last request did not reach the gateway."""


def fault_of_calls(opened: RecordedCalls, error: BaseException | None) -> EpisodeFault | None:
    """The fault of an episode after its workflow: of its calls if they caused it, else of its own
    code.

    A failed engine is the cause if the workflow raised, or returned after a failed last call.
    """
    if isinstance(error, EpisodeTimeout):
        return EpisodeFault(error)
    of_calls = next((fault for fault in opened.errors if not fault.infrastructure), None)
    if (
        of_calls is None
        and opened.errors
        and (error is not None or is_last_call_lost(opened, "rollout"))
    ):
        of_calls = opened.errors[-1]
    if of_calls is not None:
        return EpisodeFault(
            of_calls,
            detail="" if error is None else f"\n\nIn the workflow: {describe_error(error)}",
        )
    if error is None:
        return None
    return EpisodeFault(error, cause="ContextOverflow" if opened.context_overflow else None)


def _last_error(calls: Sequence[Call], *, trainable: bool) -> str | None:
    """The error of the last call to the policy, or to other models; None without one."""
    for call in reversed(calls):
        if call.trainable is trainable:
            return call.error
    return None


def is_last_call_lost(opened: RecordedCalls, phase: Phase) -> bool:
    """Whether the last call of a phase to the policy failed, or the last one to other models.

    It is not lost if the agent repeats it, or asks another model after a failed one.
    """
    calls = [call for call in opened.calls if call.phase == phase]
    policy_error = _last_error(calls, trainable=True)
    other_error = _last_error(calls, trainable=False)
    return (
        not calls
        or opened.is_cut_off
        or policy_error is not None
        or bool(other_error and not other_error.startswith("undelivered"))
    )


def write_trajectory(directory: Path, episode: Episode) -> None:
    """Write `trajectory/{split}-{step}/{episode_id}.json`.

    An output that is no JSON is written as its `str`. A failure only logs a warning, since the
    trace has the episode.
    """
    place = (
        directory / "trajectory" / f"{episode.split}-{episode.step}" / f"{episode.episode_id}.json"
    )
    try:
        output = to_jsonable_python(episode.output, fallback=str)
        text = episode.model_copy(update={"output": output}).model_dump_json()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a lone surrogate, say
        log.warning(
            "trainer_common.save_trajectory_as_json_file: could not write %s: %s", place, error
        )
