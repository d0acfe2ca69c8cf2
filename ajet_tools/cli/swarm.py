"""`ajet swarm`: a training server that agents join from anywhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_sdk.swarm.client import SwarmClient
from ajet_sdk.swarm.core import PATIENCE
from ajet_sdk.swarm.messages import SwarmStatus
from ajet_sdk.swarm_server import SwarmServer, config_for_server, keys_for
from ajet_tools.cli.arguments import Host, Port, Resume
from ajet_tools.cli.options import expand_options
from ajet_tools.cli.result import Result
from ajet_tools.cli.swarm_watch import screen
from ajet_tools.cli.swarm_watch import watch as show
from ajet_tools.cli.train import NO_UPDATE
from ajet_tools.text.tables import console

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def swarm() -> None:
    """Train on the episodes of agents that join from other processes and machines.

    \b
    ajet swarm start job.yaml
    ajet work http://127.0.0.1:10086 agent.py:solve        # here, or on another machine
    ajet swarm watch
    """


@app.command()
def start(
    config: Annotated[Path | None, Argument(show_default=False)] = None,
    overrides: Annotated[list[str] | None, Argument(show_default=False)] = None,
    model: Annotated[str | None, Option(show_default=False)] = None,
    host: Host = "127.0.0.1",
    port: Port = 10086,
    with_ray_cluster: Annotated[str | None, Option(metavar="ADDRESS", show_default=False)] = None,
    resume: Resume = False,
) -> None:
    """Serve a model to agents anywhere, and train it on their episodes, until it is trained.

    Without a config the server waits for its owner's (`ajet train CONFIG --swarm URL`). The owner,
    who may configure, start and stop, has the key AJET_SWARM_OWNER_KEY, and workers join with
    AJET_SWARM_KEY. If other machines can connect, missing keys are made and printed. Exits with 3
    if no update was made.

    Args:
        config: Config file of the training. Its agent and judge are not used: the clients have them.
        overrides: Keys of the config, such as ajet.rollout.num_repeat=8.
        model: Model to train, in place of the config's model.path.
        with_ray_cluster: Ray cluster of backbone trinity: HOST:PORT, or `auto` for the one on this machine. Without it
            Ray is started here.

    \b
    ajet swarm start job.yaml
    ajet swarm start --model ./model
    AJET_SWARM_KEY=... AJET_SWARM_OWNER_KEY=... ajet swarm start job.yaml --host 0.0.0.0
    ajet swarm start job.yaml --resume
    """
    given, all_overrides = config_for_server(config, model, overrides or [])
    if resume and given is None:
        raise ConfigError("--resume needs the config of the training to continue")
    keys = keys_for(host, os.environ.get("AJET_SWARM_OWNER_KEY"), os.environ.get("AJET_SWARM_KEY"))
    server = SwarmServer(
        host=host,
        port=port,
        keys=keys,
        overrides=all_overrides,
        ray=with_ray_cluster,
        say=echo,
    )
    tuned = server.serve(given, resume=resume)
    if tuned is None:
        return
    echo(str(tuned))
    if tuned.is_unchanged:
        raise typer.Exit(NO_UPDATE)


@dataclass(frozen=True)
class StatusResult(Result):
    status: SwarmStatus

    def document(self) -> object:
        return self.status.model_dump()

    def show(self, out: Console) -> None:
        out.print(screen(self.status, out.width))


@app.command()
@expand_options
def watch(
    url: Annotated[str | None, Argument(show_default=False)] = None,
    interval: Annotated[float, Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, Option("--once", help="Print one look, and end.")] = False,
) -> StatusResult:
    """Show who works, what the step has, and what it waits for, until the training is finished.

    Args:
        url: The server. Default: AJET_SWARM_URL, else http://127.0.0.1:10086.

    \b
    ajet swarm watch
    ajet swarm watch http://gpu-box:10086 --once
    ajet swarm watch --once --json
    """
    url = url or os.environ.get("AJET_SWARM_URL") or "http://127.0.0.1:10086"
    with SwarmClient(url, name="watch", patience=0.0 if once else PATIENCE) as client:
        if once:
            return StatusResult(client.status())
        return StatusResult(show(client, interval, console(stderr=True)))
