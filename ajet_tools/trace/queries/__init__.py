"""SQL queries of the tools over a trace, as functions of its reader."""

from ajet_tools.trace.queries.base import Found, episode_of_call, find, find_run
from ajet_tools.trace.queries.episodes import episode_ids
from ajet_tools.trace.queries.runs import failures, ledger_totals, metrics, overview

__all__ = [
    "Found",
    "episode_ids",
    "episode_of_call",
    "failures",
    "find",
    "find_run",
    "ledger_totals",
    "metrics",
    "overview",
]
