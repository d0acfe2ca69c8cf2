"""`ajet trace branch`: samples a stored episode again from one of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.config.config import Config
from ajet_sdk.errors import ConfigError, QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.types import Json
from ajet_tools.cli.arguments import AgentOptions, split_arguments
from ajet_tools.cli.result import HIDDEN, TextResult
from ajet_tools.text.clean import counted, one_line
from ajet_tools.text.tables import number
from ajet_tools.trace import queries
from ajet_tools.trace.branch import BranchPoint, Fork, branch_point, sample_forks
from ajet_tools.trace.decoding import recorded_config
from ajet_tools.trace.locate import open_named

_ADDRESS = ("path", "base_url", "name", "scripted", "recipe", "api_key_env")
"""Keys of a recorded `model` that identify the model."""
_ID = 12
_UNTRAINED = ("run", "debug")
"""Backbones whose runs leave no checkpoint to name."""


@dataclass(frozen=True)
class ForkRow:
    """A fork of the episode."""

    episode_id: str
    attempt: int
    status: str
    cause: str | None
    error: str | None
    reward: float | None
    not_replayed: str | None
    """Why it does not count: the workflow asked something else before the call."""
    first_difference: str | None


@dataclass(frozen=True)
class BranchResult(TextResult):
    episode_id: str
    reward: float | None
    """Of the original episode."""
    call_id: str
    call: int
    token: int
    run_id: str
    directory: Path
    forks: Sequence[ForkRow]
    counted: int
    mean_reward: float | None
    where: Path = field(metadata=HIDDEN)
    """The trace of the original episode."""

    @property
    def exit_code(self) -> int:
        return 0 if self.counted else 1

    def lines(self) -> Iterator[str]:
        place = f"call {self.call}{f', token {self.token}' if self.token else ''}"
        yield (
            f"{self.episode_id[:_ID]}  reward {number(self.reward):>6}  the original, branched at"
            f" {place}"
        )
        replayed = [fork for fork in self.forks if fork.not_replayed is None]
        for fork in replayed:
            error = "" if fork.status == "succeeded" else f"failed with {fork.cause}; "
            place = "the same to the end"
            if fork.first_difference:
                place = f"parts at {fork.first_difference}"
            yield f"{fork.episode_id[:_ID]}  reward {number(fork.reward):>6}  {error}{place}"
        if self.mean_reward is not None:
            forks = counted(self.counted, "fork")
            yield f"\nMean reward {self.mean_reward:.4g} over {forks}{self._beside_original()}"
        reasons = Counter(fork.not_replayed for fork in self.forks if fork.not_replayed)
        for reason, count in reasons.items():
            yield f"Not counted, {count} × {one_line(reason, 300)}"
        if replayed:
            a = self.episode_id[:_ID]
            b = replayed[0].episode_id[:_ID]
            to = self.directory
            yield f"Forks are stored in {to}: ajet trace compare {a} {b} {self.where} {to}"

    def _beside_original(self) -> str:
        before = self.reward
        if before is None:
            return ""
        rewards = [fork.reward for fork in self.forks if fork.reward is not None]
        above = sum(reward > before + 1e-9 for reward in rewards)
        below = sum(reward < before - 1e-9 for reward in rewards)
        return f": {above} above the original, {below} below"


def branch(
    episode: Annotated[str, Argument(metavar="EPISODE", help="The episode, by its id.")],
    arguments: Annotated[
        list[str] | None, Argument(metavar="[PATH] [AGENT] [KEY=VALUE]...")
    ] = None,
    *,
    at: Annotated[
        str,
        Option(metavar="CALL", help="The first call that is sampled again: its number or its id."),
    ],
    token: Annotated[
        int, Option(min=0, metavar="T", help="Keep the first T tokens of that call's reply.")
    ] = 0,
    answering: AgentOptions,
    k: Annotated[int, Option("--attempts", "-k", min=1, help="How many forks to sample.")] = 8,
) -> BranchResult:
    """Sample an episode again from one of its calls on, and show the forks beside the original.

    The run's workflow is run again for the task: calls before CALL get the recorded replies, the
    others are sampled from the model, and the outcome is judged. A workflow that asks something
    else before CALL (a clock, a random number, a changed database) can't be replayed: such attempts
    are listed with what differs and do not count. Forks are stored as a run of their own.

    Args:
        arguments: The trace (default: the current directory); the agent and overrides, in place of the recorded ones.

    \b
    ajet trace branch 3f2a91 launcher_record/math --at 2 --model launcher_record/math/checkpoint/9d1c…/model
    ajet trace branch 3f2a91 --at 2 --model NAME@http://127.0.0.1:8000/v1 -k 16
    ajet trace branch 3f2a91 agent.py:solve --judge agent.py:exact --at 0 --token 12 --model PATH
    """
    given = arguments or []
    paths = [Path(text) for text in given if Path(text).exists()]
    if len(paths) > 1:
        raise ConfigError(f"give one trace only (got {' and '.join(map(str, paths))})")
    agent, overrides = split_arguments([text for text in given if not Path(text).exists()])
    reader, where, name = open_named(episode, *paths)
    with reader:
        target = queries.find(reader, name or episode)
        if target.kind != "episode":
            raise QueryError(
                f"{episode} is a {target.kind}; name an episode (`ajet trace ls` lists them)"
            )
        point = branch_point(reader, target.id, at, token)
        config = _config(reader, where, point, answering, agent, overrides)
    if k > 1 and config.rollout.temperature == 0:
        raise ConfigError(
            "that call was sampled greedily, so forks would be equal: pass ajet.rollout.temperature=1 or -k 1"
        )
    with ProgressBar("Forks", k) as bar:
        report, forks = sample_forks(config, point, k, lambda episode: bar.advance())
    rewards = [fork.reward for fork in forks if fork.reward is not None]
    return BranchResult(
        episode_id=point.episode.episode_id,
        reward=point.episode.reward,
        call_id=point.call.call_id,
        call=point.call.index,
        token=point.keep,
        run_id=report.run_id,
        directory=report.directory,
        forks=list(map(_row, forks)),
        counted=len(rewards),
        mean_reward=fmean(rewards) if rewards else None,
        where=where,
    )


def _row(fork: Fork) -> ForkRow:
    return ForkRow(
        episode_id=fork.episode.episode_id,
        attempt=fork.episode.attempt,
        status=fork.episode.status,
        cause=fork.episode.cause,
        error=fork.episode.error,
        reward=fork.reward,
        not_replayed=fork.why_not or None,
        first_difference=fork.parts,
    )


def _config(
    reader: TraceReader,
    where: Path,
    point: BranchPoint,
    options: AgentOptions,
    agent: str | None,
    overrides: list[str],
) -> Config:
    """Merges the recorded config, the command line and the call's sampling. Raises ConfigError."""
    run_id = point.episode.run_id
    call = point.call
    recorded = {}
    if options.conf is None:
        recorded = recorded_config(reader, run_id)
    file = recorded.pop("config_file", None)
    recorded.pop("tasks", None)
    job: Json = recorded.setdefault("ajet", {})  # type: ignore[assignment]
    rollout = job.setdefault("rollout", {})
    model = job.setdefault("model", {})
    if options.conf is None and agent is None and not rollout.get("user_workflow"):
        raise ConfigError(
            f"run {run_id[:_ID]} recorded no agent: name it and its judge (agent.py:solve --judge"
            " JUDGE)"
        )
    if options.model:
        job["model"] = {key: value for key, value in model.items() if key not in _ADDRESS}
    elif options.conf is None and queries.overview(reader, run_id)[0]["backbone"] not in _UNTRAINED:
        newest = (where if where.is_dir() else where.parent) / "checkpoint" / run_id / "model"
        path = newest if newest.is_dir() else "CHECKPOINT"
        raise ConfigError(
            f"that run trained: name the model to sample, --model {path} or --model NAME@URL"
        )
    recorded["branch"] = {
        "episode": point.episode.episode_id,
        "call": call.call_id,
        "token": point.keep,
    }
    more = {
        f"rollout.{name}": call.sampling.get(name) for name in ("temperature", "top_p", "top_k")
    }
    name = f"branch-of-{point.episode.episode_id[:_ID]}"
    more |= {"rollout.sampling": "run", "experiment_name": name, "experiment_dir": "auto"}
    beside = Path(file) if isinstance(file, str) else None
    return options.config(agent, overrides, more=more, recorded=recorded, beside=beside)
