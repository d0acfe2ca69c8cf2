"""`ajet-swarm`: AgentJet's command, in the terms of `ajet swarm`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli import app

READY = "Interchange server is running in blocking mode"
"""What AgentJet's clients wait for in the output of a server that they start."""
_URL = "http://localhost:10086"


def main() -> None:
    """The entry point of `ajet-swarm`."""
    sys.argv = ["ajet", *translated(sys.argv[1:])]
    app.main()


def translated(arguments: Sequence[str]) -> list[str]:
    """The arguments of `ajet` that do what these do of `ajet-swarm`."""
    given = _parser().parse_args(arguments)
    if given.command != "start":
        interval = str(given.refresh_interval)
        return ["swarm", "watch", given.swarm_url, "--interval", interval]
    options = ["swarm", "start"]
    if given.conf is not None:
        options.append(str(given.conf))
    if given.exp_dir is not None:
        options += _directory(given.conf, given.exp_dir)
    echo(READY)
    return [*options, "--port", str(given.swarm_port)]


def _directory(conf: Path | None, exp_dir: Path) -> list[str]:
    """The override that puts the experiment below a directory."""
    if conf is None:
        echo("--exp-dir has no effect without --conf: the client's config names the directory")
        return []
    try:
        name = load_config(conf).experiment_name
    except ConfigError:
        return []  # `ajet swarm start` reports it
    return [f"ajet.experiment_dir={exp_dir / name}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ajet-swarm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start a server on this machine")
    start.add_argument("--swarm-port", type=int, default=10086)
    start.add_argument("--conf", type=Path)
    start.add_argument("--exp-dir", type=Path)
    for name in ("overwatch", "top"):
        watch = commands.add_parser(name, help="watch a server")
        watch.add_argument("--swarm-url", default=_URL)
        watch.add_argument("--refresh-interval", type=float, default=2.0)
    return parser
