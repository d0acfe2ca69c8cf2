"""`ajet tune-prompt`: searches for a better prompt of an agent, and measures its gain."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from ajet_sdk.agent.model import Model
from ajet_sdk.config.api_keys import api_key
from ajet_sdk.config.config import Config
from ajet_sdk.config.objects import load_object
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.paired import Paired
from ajet_tools.cli.arguments import (
    AgentAndOverrides,
    AgentOptions,
    HeldOutTasks,
    Tasks,
    split_arguments,
)
from ajet_tools.cli.options import pick
from ajet_tools.cli.result import HIDDEN, TextResult
from ajet_tools.text.model_name import ModelName
from ajet_tools.tuning import Reflect, tune


@dataclass(frozen=True)
class TuneResult(TextResult):
    directory: str
    prompts: dict[str, str]
    """The best prompt of each name."""
    changed: bool
    candidates: int
    episodes: int
    before: float
    """Held-out reward."""
    after: float
    gain: dict[str, object]
    diff: str
    paired: Paired = field(metadata=HIDDEN)
    written_to: Path | None = field(default=None, metadata=HIDDEN)

    def lines(self) -> Iterator[str]:
        head = f"{self.candidates} prompts tried in {self.episodes} episodes. "
        if not self.changed:
            yield (
                f"{head}None is better than the current prompt (held-out reward {self.before:.3f})."
            )
            return
        rewards = f"Held-out reward {self.before:.3f} before, {self.after:.3f} after"
        yield f"{head}{rewards}: {_gain(self.paired)}.\n\n{self.diff}"
        if self.written_to is None:
            yield "To write it into the file, pass --apply."
        else:
            yield f"Written to {self.written_to}"


def tune_prompt(
    arguments: AgentAndOverrides = None,
    *,
    answering: AgentOptions,
    tasks: Tasks = None,
    val_tasks: HeldOutTasks = None,
    prompt: list[str] | None = None,
    reflect_with: Annotated[str | None, Option(metavar="NAME@URL|FILE:NAME")] = None,
    budget: Annotated[int, Option(min=2, help="Maximum number of episodes for the search.")] = 200,
    apply: Annotated[
        bool, Option("--apply", help="Write the best prompt into the agent's file.")
    ] = False,
) -> TuneResult:
    """Search for a better prompt with GEPA, and measure its gain on held-out tasks.

    Args:
        prompt: Variable of the agent's module that holds the prompt. Default: all that the agent uses.
        reflect_with: Model that writes new prompts: NAME@URL, NAME at the agent's endpoint or OPENAI_BASE_URL, or
            writer.py:function, text in, text out.

    \b
    ajet tune-prompt --conf agent.yaml --reflect-with NAME
    ajet tune-prompt agent.py:solve --judge exact --tasks train.jsonl \\
      --val-tasks val.jsonl --model NAME@URL --reflect-with NAME --apply
    """
    agent, overrides = split_arguments(arguments or [])
    if answering.conf is None and agent is None:
        raise ConfigError(
            "no agent given: name it (agent.py:solve) or pass a config file (--conf FILE)"
        )
    config = answering.config(agent, overrides, tasks=tasks, val_tasks=val_tasks)
    reflect = _reflect(config, reflect_with)
    tuned = tune(config, reflect, names=prompt or (), budget=budget)
    if apply and tuned.changed:
        tuned.prompts.apply(tuned.best)
    return TuneResult(
        directory=str(config.directory),
        prompts=dict(tuned.best),
        changed=tuned.changed,
        candidates=tuned.candidates,
        episodes=tuned.episodes,
        before=tuned.before,
        after=tuned.after,
        gain={**pick(tuned.gain, "mean", "low", "high", "p"), "tasks": tuned.gain.n},
        diff=tuned.prompts.diff(tuned.best),
        paired=tuned.gain,
        written_to=tuned.prompts.path if apply and tuned.changed else None,
    )


def _reflect(config: Config, model: str | None) -> Reflect:
    named = ModelName.parse(model or "")
    if named.scripted is not None:
        function: Reflect = load_object(named.scripted.replace(":", "->"), Path.cwd())
        return function
    base_url = named.base_url or config.model.base_url or os.environ.get("OPENAI_BASE_URL")
    if model is None or base_url is None:
        raise ConfigError(
            "no model to write prompts: pass --reflect-with NAME@URL, or --reflect-with"
            " writer.py:function"
        )
    key = api_key(config.model.api_key_env) or "none"

    async def ask(text: str) -> str:
        reply = await Model(base_url, key, named.name).chat([{"role": "user", "content": text}])
        return str(reply["content"] or "")

    return lambda text: asyncio.run(ask(text))


def _gain(gain: Paired) -> str:
    if gain.low is None or gain.high is None or gain.p is None:
        return f"{gain.mean:+.3f} over {gain.n} tasks, too few to be conclusive"
    return (
        f"{gain.mean:+.3f} (95% interval {gain.low:+.3f} to {gain.high:+.3f}, p = {gain.p:.3g},"
        f" {gain.n} tasks)"
    )
