"""A league: each player as the policy against each as the opponent, over the same tasks with the same seeds."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.config.model_source import checkpoint_base, steps_of_experiment
from ajet_sdk.engines.frozen import source_of
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.judges.agreement import wilson
from ajet_sdk.rollout.outcomes import solved
from ajet_sdk.run import run
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ajet_sdk.agent.workflow import BaseJudge
    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Judge

log = logging.getLogger("ajet.league")

_SHOWN = 20
"""Characters of a player's name in a table or a picture."""


@dataclass(frozen=True)
class Score:
    """Wins and games of a player; failed games are not counted in `games`."""

    games: int
    wins: int
    failed: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.games + other.games, self.wins + other.wins, self.failed + other.failed)

    @property
    def rate(self) -> float | None:
        """Wins over games; None without a game."""
        return self.wins / self.games if self.games else None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the rate (Wilson 1927); 0 and 1 without a game."""
        return wilson(self.rate or 0.0, self.games)


@dataclass(frozen=True)
class League:
    """Every score by player and opponent."""

    scores: Mapping[tuple[str, str], Score]
    directory: Path
    """Where the traces are."""

    @property
    def players(self) -> tuple[str, ...]:
        """The players, in order."""
        return tuple(dict.fromkeys(player for player, _ in self.scores))

    @property
    def opponents(self) -> tuple[str, ...]:
        """The opponents, in order."""
        return tuple(dict.fromkeys(opponent for _, opponent in self.scores))

    def score(self, player: str, opponent: str | None = None) -> Score:
        """A player's score against one opponent, or against all others."""
        if opponent is not None:
            return self.scores[player, opponent]
        mine = [score for (first, second), score in self.scores.items() if first == player and second != player]
        return sum(mine, Score(0, 0))

    def as_json(self) -> dict[str, object]:
        def row(player: str, opponent: str | None) -> dict[str, object]:
            score = self.score(player, opponent)
            return {
                "player": player, "opponent": opponent, **asdict(score), "rate": score.rate,
                "interval": list(score.interval),
            }  # fmt: skip

        return {
            "directory": str(self.directory),
            "players": [row(player, None) for player in self.players],
            "matches": [row(*pair) for pair in self.scores],
        }


def saved_players(config: Config) -> list[str]:
    """The experiment's first model and its saved checkpoints, as names of players."""
    steps = steps_of_experiment(checkpoint_base(config))
    return [f"checkpoint@{step}" for step in (0, *steps)]


def play_league(
    config: Config,
    players: Sequence[str],
    opponents: Sequence[str] | None = None,
    *,
    workflow: Callable[..., object] | None = None,
    judge: Judge | BaseJudge | str | None = None,
    tasks: Sequence[Task | Mapping[str, object]] | None = None,
    k: int = 1,
    on_episode: Callable[[Episode], None] | None = None,
    on_match: Callable[[str, str, Score], None] | None = None,
) -> League:
    """Play each player as the policy against each opponent, k times on every task.

    Roles and random draws are as in training; a game is won if the policy's episode is solved. Each match is a run of
    its own under `league` in the experiment's directory.

    Args:
        config: the settings, as of a training.
        players: names as in `rollout.opponent`.
        opponents: names as well; None: the players.
        workflow: as in `run`; `judge` and `tasks` too.
        judge: as in `run`.
        tasks: as in `run`.
        k: the games of each pair on each task.
        on_episode: called with each episode when it has ended.
        on_match: called with player, opponent and score after each pair.

    Returns:
        The table of scores.

    Raises:
        ConfigError: a player does not exist, or is no model that can be asked; and as `run`.
    """
    opponents = opponents or players
    if len({*players}) < len(players) or len({*opponents}) < len(opponents):
        raise ConfigError(f"a player stands twice in the league: {', '.join(players)}")
    sources = {name: source_of(name, config) or config.model for name in dict.fromkeys([*players, *opponents])}
    directory = config.directory / "league"
    scores = {}
    below = Counter[bool]()
    for player, opponent in _matches(players, opponents):
        val = config.rollout.val_kwargs.model_copy(update={"opponent": None})
        rollout = config.rollout.model_copy(update={"opponent": [sources[opponent]], "val_kwargs": val})
        match = config.model_copy(
            update={
                "model": sources[player],
                "rollout": rollout,
                "experiment_dir": str(directory),
                "experiment_name": f"{player} against {opponent}".replace("/", "-").lstrip("."),
            }
        )
        report = run(match, workflow=workflow, judge=judge, tasks=tasks, k=k, on_episode=on_episode)
        sound = [episode for episode in report.episodes if episode.status == "succeeded"]
        score = Score(len(sound), sum(map(solved, sound)), len(report.episodes) - len(sound))
        scores[player, opponent] = score
        below.update(
            (episode.reward or 0) > 0 and not solved(episode) and episode.is_success is None for episode in sound
        )
        if on_match is not None:
            on_match(player, opponent, score)
    if below[True]:
        log.warning(
            "%d of %d games have a reward above 0 and below 1 and count as not won: a game is won where the judge says "
            "so (is_success) or its reward is at least 1",
            below[True],
            below.total(),
        )
    return League(scores, directory)


def _matches(players: Iterable[str], opponents: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((player, opponent) for player in players for opponent in opponents)


def short_names(league: League) -> dict[str, str]:
    """Short names for tables and plots: `@40` for `checkpoint@40`, and the differing parts of paths."""
    names = list(dict.fromkeys([*league.players, *league.opponents]))
    parts = [name.removeprefix("checkpoint").split("/") for name in names]
    for end, tail in ((0, slice(1, None)), (-1, slice(None, -1))):
        while min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1:
            parts = [part[tail] for part in parts]
    short = ["/".join(part) for part in parts]
    return dict(zip(names, [name if len(name) <= _SHOWN else "…" + name[1 - _SHOWN :] for name in short], strict=True))


def draw_league(league: League, path: Path) -> None:
    """Draw the win rates: each match, and each player's against all others with its interval.

    `path` ends in .svg, .png or .pdf. Raises ConfigError for another end, MissingExtra without matplotlib.
    """
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"a picture ends in .svg, .png or .pdf (got {path.name})")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "local") from None
    players, opponents, short = league.players, league.opponents, short_names(league)
    with matplotlib.rc_context({"svg.hashsalt": "ajet", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(4 + 0.8 * len(opponents), 1.6 + 0.5 * len(players)), layout="constrained")
        FigureCanvasAgg(figure)
        matches, overall = figure.subplots(1, 2, width_ratios=(len(opponents), 3))
        rates = [[league.score(player, opponent).rate for opponent in opponents] for player in players]
        matches.imshow(
            [[math.nan if rate is None else rate for rate in row] for row in rates],
            vmin=0, vmax=1, cmap="RdYlGn", aspect="auto",
        )  # fmt: skip
        for y, row in enumerate(rates):
            for x, rate in enumerate(row):
                matches.text(x, y, "-" if rate is None else f"{rate:.2f}", ha="center", va="center")
        matches.set_xticks(range(len(opponents)), [short[name] for name in opponents], rotation=30, ha="right")
        matches.set_yticks(range(len(players)), [short[name] for name in players])
        matches.set_xlabel("opponent")
        matches.set_title("win rate of a match", fontsize=9)
        for y, player in enumerate(players):
            score = league.score(player)
            low, high = score.interval
            overall.plot([low, high], [y, y], color="tab:blue")
            if score.rate is not None:
                overall.plot([score.rate], [y], "o", color="tab:blue")
        overall.set_ylim(len(players) - 0.5, -0.5)
        overall.set_xlim(0, 1)
        overall.set_yticks([])
        overall.grid(alpha=0.3, axis="x")
        overall.set_title("against all others, 95 %", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
