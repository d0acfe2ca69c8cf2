"""The `debug` backbone: a few episodes in one process, with breakpoints and a summary, without
training."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.steps import training_sampling
from ajet_sdk.engines.open import at_endpoint, open_engine, ready
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.recipe import with_model
from ajet_sdk.reporting import output
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.outcomes import (
    check_sound,
    failure_messages,
    failures_by_cause,
    untrained_entries,
)
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Episode, new_id

if TYPE_CHECKING:
    from ajet_sdk.protocols import Engine, Job
    from ajet_sdk.trace.writer import TraceWriter

_A_WEEK = 7 * 24 * 3600.0
_tags: ContextVar[frozenset[str]] = ContextVar("ajet_debug_tags", default=frozenset())


def bp(tag: str) -> None:
    """Stop in the debugger if the run was started with this tag:
    `--backbone debug --debug "TAG1|TAG2"`.

    Otherwise it has no effect, so it can stay in the code.

    Args:
        tag: the name of this breakpoint.
    """
    if tag not in _tags.get():
        return
    if sys.breakpointhook is sys.__breakpointhook__:
        import pdb

        pdb.Pdb().set_trace(sys._getframe().f_back)
    else:  # an IDE's debugger
        sys.breakpointhook()


@contextmanager
def stop_at_tags(tags: Iterable[str]) -> Iterator[None]:
    """Let `bp` stop at these tags within the block."""
    token = _tags.set(frozenset(tags))
    try:
        yield
    finally:
        _tags.reset(token)


async def debug(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Run the first tasks once each, print a summary, and return the episodes, without training.

    With debug tags, episodes run one by one and without a time limit, for breakpoints.

    Raises TrainingError if fewer than `rollout.min_sound_share` of the episodes are sound.
    """
    changed: dict[str, object] = {"max_env_worker": job.config.debug.debug_max_parallel}
    if job.debug_tags:  # one debugger, without a time limit
        changed = {"max_env_worker": 1, "timeout": _A_WEEK, "judge_timeout": _A_WEEK}
    config = job.config.model_copy(
        update={"rollout": job.config.rollout.model_copy(update=changed)}
    )
    config = await with_model(at_endpoint(config), (job.workflow, job.judge, job.train))
    engine = open_engine(config)
    try:
        await ready(engine)
        with stop_at_tags(job.debug_tags):
            episodes = await run_batch(
                job.workflow,
                job.judge,
                _attempts(job),
                engine=engine,
                gateway=gateway,
                config=config,
                writer=writer,
                sampling=training_sampling(config),
            )
    finally:
        await engine.aclose()
    for episode in episodes:
        writer.put(*untrained_entries(episode))
    _print(episodes, engine)
    output.echo(f"Traces are in {job.directory}. To view them: ajet trace ls {job.directory}")
    check_sound(episodes, config.rollout.min_sound_share)
    rewards = [e.reward for e in episodes if e.reward is not None]
    metrics = {"debug/reward": sum(rewards) / len(rewards)} if rewards else {}
    return TunedModel(None, metrics, job.run_id, episodes, directory=job.directory)


def _attempts(job: Job) -> list[Attempt]:
    tasks = list(job.train[: job.config.debug.debug_first_n_tasks])
    seeds = (f"{job.config.debug.debug_vllm_seed}/{position}" for position in range(len(tasks)))
    return [
        Attempt(
            task=task,
            run_id=job.run_id,
            group_id=new_id(),
            seed=_seed(text),
            group_seed=_seed(text),
        )
        for task, text in zip(tasks, seeds, strict=True)
    ]


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def _print(episodes: Sequence[Episode], engine: Engine) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = output.console()
    table = Table("task", "status", box=None, header_style="bold")
    for name in ("reward", "calls", "timelines", "tokens", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("output")
    tokenizer = getattr(engine, "tokenizer", None)
    if tokenizer is not None:
        reading = (tokenizer.decode, ChatTemplate.known(tokenizer))
    else:
        reading = (None, None)
    splits = []
    for episode in episodes:
        merged = merge(episode.calls, *reading)
        splits += [(episode, split) for split in merged.splits]
        table.add_row(
            escape(_short(episode.task.main_query or episode.task.task_id, 40)),
            (
                episode.status
                if episode.status == "succeeded"
                else f"{episode.status}: {escape(episode.cause or '')}"
            ),
            "" if episode.reward is None else f"{episode.reward:.3g}",
            str(sum(call.phase == "rollout" for call in episode.calls)),
            str(len(merged.timelines)),
            str(sum(int(timeline.loss_mask.sum()) for timeline in merged.timelines)),
            f"{(episode.ended_at - episode.started_at).total_seconds():.2f}",
            "" if episode.output is None else escape(_short(str(episode.output), 40)),
        )
    console.print(table)
    lines = [
        f"Split in episode {episode.episode_id}: {split.cause} at token {split.at_token}; "
        f"{split.extra_tokens} additional tokens to train. {split.hint}"
        for episode, split in splits
    ]
    for failed in (episode for episode in episodes if episode.status != "succeeded"):
        lines.append(f"\nEpisode {failed.episode_id}, task {failed.task.task_id}: {failed.error}")
    for line in [*lines, *failures_by_cause(episodes), *failure_messages(episodes, cause=False)]:
        console.print(line, markup=False, soft_wrap=True)


def _short(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
