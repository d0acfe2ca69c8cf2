"""The options of commands that run an agent without training it, and the config that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ajet_sdk.errors import ConfigError
from ajet_tools.cli.arguments import Arguments, use_placeholder_key

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = ["Answering"]


@dataclass(frozen=True)
class Answering:
    """What answers an agent's calls, what judges it, and where its episodes go."""

    conf: Annotated[
        Path | None,
        typer.Option("--conf", "-c", help="A config file with the root `ajet:`; it may name agent, judge and model."),
    ] = None
    judge: Annotated[str | None, typer.Option(help="file.py:function, module->Name, exact, math or regex:PATTERN.")] = (
        None
    )
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint that answers.")] = None
    model: Annotated[
        str | None, typer.Option(help="The model's name there; without --base-url a directory or a hub name.")
    ] = None
    api_key_env: Annotated[str | None, typer.Option(help="The variable that holds the endpoint's key.")] = None
    scripted: Annotated[str | None, typer.Option(help="replies.py:function that answers in place of a model.")] = None
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; without it the agent's own.")
    ] = None
    exp_dir: Annotated[Path | None, typer.Option(help="Where the directory of traces is made.")] = None

    def config(
        self,
        agent: str | None,
        overrides: Sequence[str] = (),
        *,
        tasks: str | None = None,
        skip_bad_rows: bool = False,
        more: Mapping[str, Any],
    ) -> Config:
        """The config of a run of that agent; `more` has further keys. Raises ConfigError, also where nothing answers.

        From then on an agent's module may be imported.
        """
        config = Arguments(
            conf=self.conf,
            overrides=overrides,
            agent=agent,
            judge=self.judge,
            tasks=tasks,
            model=self.model if self.base_url is None else None,
            scripted=self.scripted,
            skip_bad_rows=skip_bad_rows,
            exp_dir=self.exp_dir,
            more={
                "model.base_url": self.base_url,
                "model.name": self.model if self.base_url is not None else None,
                "model.api_key_env": self.api_key_env,
                "rollout.temperature": self.temperature,
                **more,
            },
        ).config()
        if not (config.model.base_url or config.model.path or config.model.scripted):
            raise ConfigError(
                "say what answers: --base-url URL --model NAME (an endpoint), --model PATH (a local model), "
                "or --scripted replies.py:reply"
            )
        use_placeholder_key()
        return config
