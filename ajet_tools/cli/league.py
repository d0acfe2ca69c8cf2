"""`ajet league`: checkpoints against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ajet_sdk.config.config import Config
from ajet_sdk.errors import ConfigError
from ajet_sdk.league import League, Score, draw_league, play_league, saved_players, short_names
from ajet_sdk.reporting.output import echo
from ajet_sdk.reporting.progress_bar import ProgressBar
from ajet_sdk.tasks.load import load_tasks
from ajet_tools.cli.arguments import Arguments, MostTasks, split_arguments
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.text.tables import console, table

app = typer.Typer(add_completion=False)


@app.command()
def league(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of the config, as in `ajet train`.")
    ] = None,
    *,
    conf: Annotated[Path, typer.Option("--conf", "-c", help="Config of the training run.")],
    players: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Players, separated by commas, as in rollout.opponent. Default: checkpoint@0 and all stored "
            "checkpoints of the experiment.",
        ),
    ] = None,
    opponents: Annotated[str | None, typer.Option(metavar="NAMES", help="Opponents. Default: each other.")] = None,
    limit: MostTasks = None,
    k: Annotated[int, typer.Option("--attempts", "-k", min=1, help="Games per task.")] = 1,
    exp_dir: Annotated[Path | None, typer.Option(help="Directory of the experiment.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Plot the win rates into this .svg, .png or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play checkpoints against each other on the validation tasks, and print who wins how often.

    \b
    ajet league --conf werewolves.yaml
    ajet league --conf werewolves.yaml --players checkpoint@0,checkpoint@30 \\
      --limit 64 --picture league.svg
    """
    agent, overrides = split_arguments(arguments or [])
    if agent is not None:
        raise ConfigError(f"the config already names the agent (rollout.user_workflow); remove {agent}")
    config = Arguments(conf=conf, overrides=overrides, exp_dir=exp_dir).config()
    named = _names(players) or saved_players(config)
    if len(named) == 1 and players and not opponents:
        raise ConfigError(
            f"a league needs two players, but --players names only {named[0]}; add another, or --opponents"
        )
    if len(named) < 2 and not opponents:
        raise ConfigError(
            f"a league needs two players, but {config.directory} has no checkpoint yet (trainer_common.save_freq "
            "and keep_checkpoints); name players with --players"
        )
    result = _play(config, named, _names(opponents) or named, limit, k, quiet=as_json)
    if picture is not None:
        draw_league(result, picture)
    if as_json:
        print_json(result.as_json())
    else:
        _print(result)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _play(
    config: Config, players: list[str], opponents: list[str], limit: int | None, k: int, *, quiet: bool
) -> League:
    sets = load_tasks(config)
    tasks = (sets.val or sets.train)[:limit]
    matches = len(players) * len(opponents)
    numbers = iter(range(1, matches + 1))

    def say(player: str, opponent: str, score: Score) -> None:
        won = f"{score.wins} of {score.games} games won" + (f", {score.failed} failed" if score.failed else "")
        echo(f"match {next(numbers)} of {matches}: {player} against {opponent}, {won}", err=True)

    with ProgressBar("Games", matches * len(tasks) * k, quiet=quiet) as bar:
        return play_league(
            config,
            players,
            opponents,
            tasks=tasks,
            k=k,
            on_episode=lambda episode: bar.advance(),
            on_match=None if quiet else say,
        )


def _print(league: League) -> None:
    rows, short = [], short_names(league)
    for player in league.players:
        total = league.score(player)
        low, high = total.interval
        cells = {short[opponent]: _rate(league.score(player, opponent)) for opponent in league.opponents}
        summary = {"all others": _rate(total), "95 %": f"{low:.2f} - {high:.2f}", "games": total.games}
        rows.append({"player": short[player], **cells, **summary})
    out = console()
    out.print(table(rows, out.width))
    failed = sum(score.failed for score in league.scores.values())
    if failed:
        echo(f"{failed} games failed and were not counted")
    echo(f"Traces are in {league.directory}. To view them: ajet trace ls {league.directory}")


def _rate(score: Score) -> str:
    return "-" if score.rate is None else f"{score.rate:.2f}"
