"""The open episodes of a swarm: their keys, their places at the gateway, and how each of them ends.

An episode is over exactly once: `OpenAttempt.result` is its first end, abort or abandonment, which
all later ones await. The record is in the trace's journal before anyone is told.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ajet_sdk.errors import AjetError, NoReward
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode, SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.judges.rewards import check_names
from ajet_sdk.protocols import Engine
from ajet_sdk.rollout.attempts import Attempt, draw_models, draw_seats, frozen_model, seed_of
from ajet_sdk.rollout.judging import (
    check_of,
    log_replies,
    metrics_of,
    verdict_on_stopped,
    with_rewards_of_replies,
)
from ajet_sdk.rollout.outcomes import fault_of_calls, untrained_entries, write_trajectory
from ajet_sdk.swarm.messages import Abort, Claim, Claimed, End, EpisodeState, Receipt
from ajet_sdk.swarm.pool import AttemptGroup
from ajet_sdk.swarm.receipts import (
    ABANDONED,
    receipt_of,
    rewards_of,
    stored_receipt,
    with_outcomes,
)
from ajet_sdk.swarm.refusals import Refused, ended_otherwise
from ajet_sdk.swarm.splits import Splits
from ajet_sdk.types import Call, Episode, LedgerEntry, Outcome, Reward, Task, now

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.trace.writer import TraceWriter

log = logging.getLogger("ajet")

REMEMBERED = 20_000
"""Episodes that are over and whose receipts are in memory; others are looked up in the trace."""
ON_THE_WAY = 60.0
"""Seconds of an episode's life besides the time limits of agent and judge."""
_SOONEST = 0.02
_LATEST = 1.0
"""Bounds of the seconds between two looks for episodes over their time."""


@dataclass(frozen=True)
class RunSettings:
    """What a training run gives to the episodes that it collects."""

    config: Config
    run_id: str
    engine: Engine
    writer: TraceWriter
    gateway: Gateway
    policy_version: Callable[[], int]
    training: SamplingOverride | None
    """Sampling of training episodes; None: the agent's."""
    validation: Mapping[str, SamplingOverride]
    """Sampling of validation episodes: `sampled`, `greedy`."""
    train_tasks: Sequence[Task]
    """The server's own training tasks."""
    val_tasks: Sequence[Task]
    secret: bytes
    """Signs the keys of episodes, also over a restart."""
    done: int = 0
    total: int = 0
    steps_are_updates: bool = False
    """Whether a validation is of the step whose number is the version that sampled it, which may be
    newer than the last step that the server has heard of."""
    on_claim: Callable[[Episode], object] = lambda _: None
    """Called with each episode before its client hears of it."""
    given_out: Sequence[tuple[Task, str]] = ()
    """Tasks with the split in which they were given out before a restart."""


@dataclass(eq=False)
class OpenAttempt:
    """An open episode."""

    episode: Episode
    opened: OpenEpisode
    claim: Claim
    claimed: Claimed
    group: AttemptGroup | None
    """None: of a validation."""
    seen: float
    """`time.monotonic` of its last request."""
    begun: float
    result: asyncio.Task[Receipt] | None = None
    request: End | Abort | None = None
    """What ended it; None if it was abandoned."""

    @property
    def episode_id(self) -> str:
        return self.episode.episode_id

    def idle(self) -> float:
        """Seconds without a request; 0 while a call is in flight."""
        return 0.0 if self.opened.in_flight else time.monotonic() - self.seen


@dataclass(frozen=True)
class _Over:
    """An episode that is over."""

    state: EpisodeState
    receipt: Receipt
    request: End | Abort | None


class Listener(Protocol):
    """Is told of the episodes that are over (`Collection`)."""

    def placed(self, attempt: OpenAttempt, episode: Episode, counts: bool) -> Episode:
        """The finished episode with its step and group, before it is recorded."""

    def settled(
        self, attempt: OpenAttempt, episode: Episode, state: EpisodeState, counts: bool
    ) -> None:
        """Let an episode count, or free its place; it is recorded."""

    @property
    def splits(self) -> Splits:
        """The tasks of training and validation."""


class Attempts:
    """Opens and ends episodes."""

    def __init__(self, settings: RunSettings, listener: Listener) -> None:
        self.settings = settings
        self.open: dict[str, OpenAttempt] = {}
        self._listener = listener
        self._over: OrderedDict[str, _Over] = OrderedDict()
        self._janitor = asyncio.create_task(self._abandon_late())

    # Keys

    def key_of(self, kind: str, episode_id: str) -> str:
        """A key, `handle`, `capture`, `judge` or `end`, that tells its episode and is signed."""
        name = f"{kind}/{episode_id}"
        digest = hmac.new(self.settings.secret, name.encode(), hashlib.sha256).hexdigest()
        return f"ajet-{kind[0]}{episode_id}-{digest[:40]}"

    def episode_of(self, key: str) -> str | None:
        """The episode for which this run made a key, even before a restart; None for others."""
        marked, _, _ = key.removeprefix("ajet-").rpartition("-")
        episode_id = marked[1:]
        given = key.encode("utf-8", "replace")
        for kind in ("handle", "capture", "judge"):
            if hmac.compare_digest(self.key_of(kind, episode_id).encode("utf-8", "replace"), given):
                return episode_id
        return None

    def may_end(self, key: str, episode_id: str) -> bool:
        """Whether a key gives the episode its reward. That of its calls does not: the agent has it,
        and so has a program that the policy wrote and the agent runs."""
        end_key = self.key_of("end", episode_id).encode()
        return hmac.compare_digest(end_key, key.encode("utf-8", "replace"))

    # Opening

    def begin(
        self,
        claim: Claim,
        task: Task,
        *,
        episode_id: str,
        group: AttemptGroup | None,
        number: int,
        step: int,
    ) -> OpenAttempt:
        """Open an episode; `number` is that of the attempt at its task. Raises ConfigError."""
        settings = self.settings
        config = self.settings.config
        decoding: Literal["sampled", "greedy"] | None = "sampled"
        sampling = settings.training
        if claim.split == "val":
            decoding = claim.decoding or "sampled"
            sampling = settings.validation[decoding]
        elif sampling is None or sampling.temperature is None:
            decoding = None
        # seeds are those of a run that samples the same step by itself
        part: object = step if group is not None else "val"
        if group is not None:
            position = group.position
        else:
            position = seed_of(task.task_id) % 2**31
        seed = config.trainer_common.seed
        attempt = Attempt(
            task=task,
            run_id=settings.run_id,
            group_id=group.group_id if group is not None else f"val-{step}-{task.task_id}",
            attempt=number,
            step=step,
            split=claim.split,
            seed=seed_of(seed, part, position, number),
            group_seed=seed_of(seed, part, position),
        )
        opened = self._open_at_gateway(episode_id, attempt, sampling, claim.trainable_targets)
        episode = Episode(
            episode_id=episode_id,
            run_id=attempt.run_id,
            group_id=attempt.group_id,
            attempt=number,
            step=step,
            split=claim.split,
            decoding=decoding,
            task=task,
            status="aborted",
            client=claim.client_name or claim.client_id,
        )
        settings.on_claim(episode)
        claimed = Claimed(
            episode_id=episode_id,
            base_url=opened.model().base_url,
            api_key=opened.handle_key,
            capture_key=opened.captured_key,
            end_key=self.key_of("end", episode_id),
            model=settings.engine.model,
            task=task,
            group_id=attempt.group_id,
            attempt=number,
            step=step,
            policy_version=settings.policy_version(),
            split=claim.split,
            seed=attempt.seed,
            idle_timeout=claim.idle_timeout,
            expires_in=lifetime_of(config),
        )
        moment = time.monotonic()
        made = OpenAttempt(episode, opened, claim, claimed, group, moment, moment)
        self.open[episode_id] = made
        return made

    def _open_at_gateway(
        self,
        episode_id: str,
        attempt: Attempt,
        sampling: SamplingOverride | None,
        workflow_targets: Sequence[str] | None,
    ) -> OpenEpisode:
        settings = self.settings
        config = self.settings.config
        rollout = config.rollout
        gateway = settings.gateway
        by_name, opponent = draw_models(config, attempt, settings.engine, gateway.frozen)
        targets = draw_seats(rollout, workflow_targets, attempt.group_seed)
        check = check_of(config, settings.engine)

        def after_call(call: Call) -> str | None:
            known = self.open.get(episode_id)
            if known is not None:
                known.seen = time.monotonic()
            return None if check is None else check(call)

        return gateway.open(
            EpisodeSpec(
                episode_id=episode_id,
                engine=settings.engine,
                sampling=sampling,
                policy_models=frozenset(rollout.policy_models),
                trainable_targets=None if targets is None else tuple(targets),
                seed=attempt.seed,
                seed_by_content=rollout.deterministic,
                max_tokens=rollout.max_response_length_in_one_turn,
                debug_models=by_name,
                opponent=opponent,
                open_debug_model=lambda name: frozen_model(
                    name, config, attempt, settings.engine, gateway.frozen
                ),
                call_timeout=rollout.timeout,
                picture_hosts=tuple(rollout.picture_hosts),
                stop_after=after_call,
                make_key=lambda kind: self.key_of(kind, episode_id),
            )
        )

    # Ends

    def asked_for(self, episode_id: str) -> OpenAttempt | None:
        """An open episode, whose client has just sent a request; None if it is over."""
        attempt = self.open.get(episode_id)
        if attempt is not None:
            attempt.seen = time.monotonic()
        return attempt

    async def end(self, episode_id: str, end: End) -> Receipt:
        """End an episode with its reward. Raises Refused, and then the episode stays open."""
        attempt = self.asked_for(episode_id)
        if attempt is None:
            return await self._end_again(episode_id, end)
        if attempt.result is None:
            rewards = self._check_end(attempt, end)
            attempt.request = end
            attempt.result = asyncio.create_task(self._end(attempt, end, rewards))
        elif attempt.request != end:
            raise ended_otherwise(episode_id)
        return await self._result(attempt)

    async def abort(self, episode_id: str, abort: Abort) -> Receipt:
        """End an episode without a result. Raises Refused."""
        attempt = self.asked_for(episode_id)
        if attempt is None:
            return await self._end_again(episode_id, abort)
        if attempt.result is None:
            attempt.request = abort
            attempt.result = asyncio.create_task(self._abort(attempt, abort))
        elif attempt.request != abort:
            raise ended_otherwise(episode_id)
        return await self._result(attempt)

    async def abandon(self, attempt: OpenAttempt, reason: str) -> Receipt:
        """End an episode that nobody ended: its tokens are never trained."""
        if attempt.result is None:
            attempt.result = asyncio.create_task(self._abandon(attempt, reason))
        return await self._result(attempt)

    @staticmethod
    async def _result(attempt: OpenAttempt) -> Receipt:
        """Await an end, which a client that leaves does not cancel."""
        work = attempt.result
        assert work is not None
        try:
            return await asyncio.shield(work)
        except Exception:  # such as a full disk: the next request tries again
            if attempt.result is work and work.done():
                attempt.result = None
            raise

    def _check_end(self, attempt: OpenAttempt, end: End) -> tuple[Reward, ...]:
        """The rewards of an end. Raises Refused."""
        claim = attempt.claim
        claimed_for = attempt.episode.task.task_id
        if claim.task_at_end and claim.split == "train" and end.task is None:
            raise Refused(422, "bad_request", "this episode was claimed without a task: name it")
        if end.task is not None and not claim.task_at_end and end.task.task_id != claimed_for:
            raise Refused(
                422,
                "bad_request",
                f"the episode was claimed for task {claimed_for}, not {end.task.task_id}",
            )
        if end.task is not None and claim.split == "train":
            self._listener.splits.check(end.task, claim.split)
        needs_reward = self.settings.config.trainer_common.algorithm.needs_reward
        if end.reward is None and (needs_reward or claim.split == "val"):
            raise Refused(
                422, "bad_reward", "the episode needs a reward: a number, or abort it with a cause"
            )
        calls = attempt.opened.calls
        if not any(call.phase == "rollout" for call in calls):
            raise Refused(
                422,
                "no_calls",
                "the policy was not called with this episode's key, so there is nothing to train:"
                f" send the calls to {attempt.claimed.base_url}, or abort the episode",
            )
        rewards = rewards_of(end)
        try:
            check_names(rewards, calls, attempt.opened.agents)
        except NoReward as error:
            raise Refused(422, "bad_reward", str(error)) from error
        return rewards

    async def _finish(self, attempt: OpenAttempt, **fields: Any) -> Episode:
        """Revoke the episode's keys and complete its record."""
        calls = await attempt.opened.finish()
        given = fields.pop("metrics", {})
        return attempt.episode.model_copy(
            update={
                "calls": calls,
                "events": tuple(attempt.opened.events),
                "metrics": {**given, **metrics_of(calls)},
                "ended_at": now(),
                **fields,
            }
        )

    async def _end(self, attempt: OpenAttempt, end: End, rewards: tuple[Reward, ...]) -> Receipt:
        opened = attempt.opened
        config = self.settings.config
        engine = self.settings.engine
        task = end.task or attempt.episode.task
        episode = await self._finish(attempt, output=end.output, metrics=end.metrics, task=task)
        if opened.stopped is None:
            fault = fault_of_calls(opened, None)
        else:
            fault = None
        if fault is not None:
            episode = episode.model_copy(update=fault.fields)
        else:
            # a reply that ended the episode has the reward of this config, not of the client's
            mad = verdict_on_stopped(opened.stopped, config)
            rewards = rewards if mad is None else mad.rewards
            scored = {"status": "succeeded", "error": None, "cause": None, "rewards": rewards}
            episode = episode.model_copy(update=scored)
            changed = with_rewards_of_replies(episode, episode.calls, config, engine)
            episode = episode.model_copy(update=changed)
            solved = end.is_success if mad is None else mad.is_success
            if solved is not None:
                episode = episode.model_copy(update={"is_success": solved})
        log_replies(episode.episode_id, episode.calls, config, engine)
        return await self._settle(attempt, episode, "ended" if fault is None else "failed")

    async def _abort(self, attempt: OpenAttempt, abort: Abort) -> Receipt:
        error = abort.error or abort.reason or "the client gave no reason"
        episode = await self._finish(
            attempt,
            status=abort.status,
            error=error if abort.cause in error else f"{abort.cause}: {error}",
            cause=abort.cause,
            infrastructure=abort.infrastructure,
        )
        if abort.status == "failed":
            failed_here = fault_of_calls(attempt.opened, None)
        else:
            failed_here = None
        if failed_here is not None and failed_here.fields["infrastructure"]:
            # the client saw only the consequence
            cause = failed_here.fields["cause"]
            episode = episode.model_copy(update={"infrastructure": True, "cause": cause})
        is_failure = abort.status != "aborted" and not episode.infrastructure
        return await self._settle(attempt, episode, "failed" if is_failure else "aborted")

    async def _abandon(self, attempt: OpenAttempt, reason: str) -> Receipt:
        episode = await self._finish(
            attempt, status="aborted", cause=ABANDONED, error=reason, infrastructure=True
        )
        return await self._settle(attempt, episode, "abandoned")

    async def _settle(self, attempt: OpenAttempt, episode: Episode, state: EpisodeState) -> Receipt:
        """Record the finished episode, and then let it count."""
        writer = self.settings.writer
        counts = state in ("ended", "failed") and not episode.infrastructure
        if state == "failed" and not counts:
            state = "aborted"
        episode = self._listener.placed(attempt, episode, counts)
        writer.put(episode)
        outcome: Outcome | None = None
        if attempt.group is None:
            outcome = "evaluation"
        elif not counts:
            outcome = "abandoned" if state == "abandoned" else "failed"
        if outcome is not None:
            writer.put(*untrained_entries(episode, outcome))
        self.open.pop(episode.episode_id, None)
        receipt = receipt_of(episode, state, outcome or "pending", attempt.claim.client_id)
        self._over[episode.episode_id] = _Over(state, receipt, attempt.request)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._listener.settled(attempt, episode, state, counts)
        if self.settings.config.trainer_common.save_trajectory_as_json_file:
            await asyncio.to_thread(write_trajectory, writer.path.parent, episode)
        return receipt

    async def _end_again(self, episode_id: str, request: End | Abort) -> Receipt:
        """The answer to another end of an episode that is over. Raises Refused."""
        try:
            receipt = await self.receipt(episode_id)
        except Refused as unknown:  # its key is genuine, but it left no call
            raise _over_for_good(episode_id, "the server was restarted") from unknown
        over = self._over.get(episode_id)
        if receipt.state == "abandoned":
            raise _over_for_good(episode_id, receipt.error or "")
        if over is not None:
            is_same = over.request == request
        elif isinstance(request, Abort):
            is_same = receipt.state in ("aborted", "failed")
        else:  # it ended before a restart, or long ago
            total = math.fsum(reward.value * reward.weight for reward in rewards_of(request))
            earned = receipt.reward
            is_same = earned is not None and math.isclose(total, earned, abs_tol=1e-9)
        if not is_same:
            raise ended_otherwise(episode_id)
        return receipt

    async def receipt(self, episode_id: str) -> Receipt:
        """What became of an episode. Raises Refused 404."""
        attempt = self.open.get(episode_id)
        if attempt is not None:
            episode = attempt.episode.model_copy(update={"calls": attempt.opened.calls})
            state: EpisodeState = "judging" if attempt.opened.judged else "open"
            receipt = receipt_of(episode, state, "pending", attempt.claim.client_id)
            return receipt.model_copy(update={"status": None, "cause": None, "error": None})
        over = self._over.get(episode_id)
        if over is not None and "pending" not in over.receipt.tokens:
            return over.receipt
        stored = await asyncio.to_thread(stored_receipt, self.settings.writer, episode_id)
        if over is None:
            if stored is None:
                raise Refused(404, "not_found", f"there is no episode {episode_id}")
            return stored
        if stored is None:
            return over.receipt
        known = {"state": over.state, "client_id": over.receipt.client_id}
        receipt = stored.model_copy(update=known)
        self._over[episode_id] = _Over(over.state, receipt, over.request)
        return receipt

    def book(self, ledger: Iterable[LedgerEntry]) -> None:
        """Note the outcomes of a trained step in the receipts."""
        tokens: dict[str, dict[str, dict[str, int]]] = {}
        for row in ledger:
            calls = tokens.setdefault(row.episode_id, {})
            if row.tokens:
                calls.setdefault(row.call_id, {})[row.outcome] = row.tokens
        for episode_id, calls in tokens.items():
            over = self._over.get(episode_id)
            if over is not None:
                receipt = with_outcomes(over.receipt, calls)
                self._over[episode_id] = _Over(over.state, receipt, over.request)

    # Time limits

    async def _abandon_late(self) -> None:
        """Abandon episodes that are idle or too old. Sleeps until the next one may be."""
        lifetime = lifetime_of(self.settings.config)
        while True:
            await asyncio.sleep(self._next_look(lifetime))
            for attempt in list(self.open.values()):
                if attempt.result is not None:
                    continue
                limit = attempt.claim.idle_timeout
                if attempt.idle() >= limit:
                    reason = f"no request for {limit:g} s (idle_timeout)"
                elif time.monotonic() - attempt.begun >= lifetime:
                    reason = f"not ended after {lifetime:g} s (rollout.timeout, judge_timeout)"
                else:
                    continue
                try:
                    await self.abandon(attempt, reason)
                except AjetError as error:  # a full disk ends the run elsewhere
                    log.warning("Could not abandon episode %s: %s", attempt.episode_id, error)

    def _next_look(self, lifetime: float) -> float:
        moment = time.monotonic()
        left = [
            min(attempt.claim.idle_timeout - attempt.idle(), attempt.begun + lifetime - moment)
            for attempt in self.open.values()
            if attempt.result is None
        ]
        return min(max(min(left, default=_LATEST), _SOONEST), _LATEST)

    async def close(self, reason: str) -> None:
        """Abandon all open episodes."""
        self._janitor.cancel()
        await asyncio.gather(*(self.abandon(a, reason) for a in list(self.open.values())))


def lifetime_of(config: Config) -> float:
    """Seconds that an episode may be open: for its agent, its judge, and the way."""
    return config.rollout.timeout + config.rollout.judge_timeout + ON_THE_WAY


def _over_for_good(episode_id: str, reason: str) -> Refused:
    return Refused(
        410,
        "episode_over",
        f"episode {episode_id} was abandoned: {reason}; its tokens are not trained. Claim a new one",
    )
