"""Where the calls of an attempt are answered: by an engine behind the gateway of this process, or
at a swarm's server (`ajet_sdk.swarm.remote`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ajet_sdk.agent.context import HostGuard
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode, SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.gateway.recorder import RunningEpisode
from ajet_sdk.protocols import Engine
from ajet_sdk.rollout.attempts import Attempt, draw_models, frozen_model
from ajet_sdk.rollout.judging import check_of, log_replies, metrics_of, with_rewards_of_replies
from ajet_sdk.types import Call, Episode

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


class Place(Protocol):
    """Where the calls of an attempt are answered."""

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, for judges; None if it is not known here."""

    @property
    def decoding(self) -> Literal["sampled", "greedy"] | None:
        """See `Episode.decoding`."""

    def open(
        self, attempt: Attempt, episode_id: str, targets: Sequence[str] | None, uses_handle: bool
    ) -> RunningEpisode:
        """Open the episode of an attempt. `targets` are trained; None: all."""

    def open_debug_model(self, name: str, attempt: Attempt) -> object:
        """Open a model that the agent's code names. Raises ConfigError if there is none."""

    def with_rewards_of_replies(self, episode: Episode, calls: Sequence[Call]) -> dict[str, object]:
        """See `judging.with_rewards_of_replies`."""

    def metrics(self, episode: Episode, calls: Sequence[Call]) -> dict[str, float]:
        """The metrics of a finished episode's calls, whose faults are logged."""


def guard_of(config: Config) -> HostGuard:
    """The policy for LLM traffic that no hook captures."""
    rollout = config.rollout
    return HostGuard(rollout.on_uncaptured, tuple(rollout.llm_hosts), tuple(rollout.allowed_urls))


@dataclass(frozen=True)
class Here:
    """The gateway of this process."""

    engine: Engine
    gateway: Gateway
    config: Config
    sampling: SamplingOverride | None = None

    @property
    def tokenizer(self) -> Any:
        return getattr(self.engine, "tokenizer", None)

    @property
    def decoding(self) -> Literal["sampled", "greedy"] | None:
        sampling = self.sampling
        if sampling is None or (sampling.temperature is None and not sampling.greedy):
            return None
        if sampling.greedy or sampling.temperature == 0:
            return "greedy"
        return "sampled"

    def open(
        self, attempt: Attempt, episode_id: str, targets: Sequence[str] | None, uses_handle: bool
    ) -> OpenEpisode:
        config = self.config
        rollout = config.rollout
        by_name, opponent = draw_models(config, attempt, self.engine, self.gateway.frozen)
        return self.gateway.open(
            EpisodeSpec(
                episode_id=episode_id,
                engine=self.engine,
                sampling=self.sampling,
                policy_models=frozenset(rollout.policy_models),
                uses_handle=uses_handle,
                trainable_targets=None if targets is None else tuple(targets),
                seed=attempt.seed,
                seed_by_content=rollout.deterministic,
                max_tokens=rollout.max_response_length_in_one_turn,
                debug_models=by_name,
                opponent=opponent,
                open_debug_model=lambda name: self.open_debug_model(name, attempt),
                call_timeout=rollout.timeout,
                picture_hosts=tuple(rollout.picture_hosts),
                stop_after=check_of(config, self.engine),
                guard=guard_of(config),
            )
        )

    def open_debug_model(self, name: str, attempt: Attempt) -> Engine:
        return frozen_model(name, self.config, attempt, self.engine, self.gateway.frozen)

    def with_rewards_of_replies(self, episode: Episode, calls: Sequence[Call]) -> dict[str, object]:
        return with_rewards_of_replies(episode, calls, self.config, self.engine)

    def metrics(self, episode: Episode, calls: Sequence[Call]) -> dict[str, float]:
        log_replies(episode.episode_id, calls, self.config, self.engine)
        return metrics_of(calls)
