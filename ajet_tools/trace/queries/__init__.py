"""Every SQL statement that the tools ask of a trace, as functions of a reader."""

from ajet_tools.trace.queries.calls import call_row, call_rows, ledger_of_episode
from ajet_tools.trace.queries.episodes import episode_ids, latest_episodes
from ajet_tools.trace.queries.ids import Found, find, find_run
from ajet_tools.trace.queries.runs import ledger_totals, metrics, run_rows

__all__ = [
    "Found",
    "call_row",
    "call_rows",
    "episode_ids",
    "find",
    "find_run",
    "latest_episodes",
    "ledger_of_episode",
    "ledger_totals",
    "metrics",
    "run_rows",
]
