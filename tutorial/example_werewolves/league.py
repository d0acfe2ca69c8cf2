"""Play the first model and the checkpoints of a trained run against each other, and print who wins
how often.

    python tutorial/example_werewolves/league.py werewolves_six.yaml checkpoint@0 checkpoint@20 checkpoint@40 --limit 48

Each player is the policy against each player as the opponent, on the validation tasks and with the
same seeds. A game is won if its episode is solved: its reward is at least 1, or the judge says so.
Failed episodes are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import ajet
from ajet_sdk.engines.frozen import source_of
from ajet_sdk.rollout.outcomes import solved
from ajet_sdk.tasks.load import load_tasks


def play(
    config: ajet.Config, players: Sequence[str], limit: int | None = None
) -> dict[tuple[str, str], list[bool]]:
    """Whether each game was won, by player and opponent; every match is a run in `league` of the
    experiment."""
    sources = {name: source_of(name, config) or config.model for name in players}
    sets = load_tasks(config)
    games: dict[tuple[str, str], list[bool]] = {}
    for player in players:
        for opponent in players:
            val = config.rollout.val_kwargs.model_copy(update={"opponent": None})
            rollout = {"opponent": [sources[opponent]], "val_kwargs": val}
            match = {
                "model": sources[player],
                "rollout": config.rollout.model_copy(update=rollout),
                "experiment_dir": str(config.directory / "league"),
                "experiment_name": f"{player} against {opponent}".replace("/", "-"),
            }
            report = ajet.run(
                config.model_copy(update=match), tasks=(sets.val or sets.train)[:limit]
            )
            games[player, opponent] = [
                solved(e) for e in report.episodes if e.status == "succeeded"
            ]
    return games


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("conf", type=Path, help="config of the run")
    parser.add_argument("players", nargs="+", help="names as in rollout.opponent")
    parser.add_argument("--limit", type=int, help="use only this many tasks")
    given = parser.parse_args()
    games = play(ajet.load_config(given.conf), given.players, given.limit)
    print("player", *given.players, "all others", sep="\t")
    for player in given.players:
        others = [
            won
            for (first, second), each in games.items()
            if first == player != second
            for won in each
        ]
        rows = [*(games[player, opponent] for opponent in given.players), others]
        print(player, *(f"{sum(row) / len(row):.2f}" if row else "-" for row in rows), sep="\t")


if __name__ == "__main__":
    main()
