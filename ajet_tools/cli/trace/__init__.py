"""The group `ajet trace`; the module of a command is imported when it runs."""

from __future__ import annotations

import typer

from ajet_tools.cli.lazy import LazyGroup
from ajet_tools.cli.pandas_import import leave_pandas_out


class TraceCommands(LazyGroup):
    package = "ajet_tools.cli.trace"
    panels = {
        "Look": {
            "ls": "ls",
            "show": "show",
            "view": "view",
            "ledger": "ledger",
            "receipts": "receipts",
            "check": "files",
        },
        "Ask": {
            "explain": "compare",
            "compare": "compare",
            "sql": "sql",
            "rejudge": "rejudge",
            "branch": "branch",
        },
        "Change": {"prune": "files"},
        "Exchange": {"export": "export", "import": "import_files"},
    }
    moved = {
        "diff": "trace compare A B",
        "audit": "trace check FILE",
        "splits": "trace ledger --splits",
    }


app = typer.Typer(cls=TraceCommands, no_args_is_help=True, add_completion=False)


_OF_USERS_CODE = ("rejudge", "branch")
"""Commands that run a judge or an agent, which may use pandas."""


@app.callback()
def trace(context: typer.Context) -> None:
    """Inspect, compare, convert and export traces.

    \b
    ajet trace ls
    ajet trace show 3f2a91
    ajet trace sql "SELECT status, count(*) FROM episodes GROUP BY status"
    ajet trace ledger launcher_record/math
    ajet trace explain launcher_record/math
    ajet trace compare launcher_record
    ajet trace view launcher_record/math
    ajet trace export --format messages --filter "reward>0.9" --out good.jsonl

    Each command takes a trace file or a directory (with all traces below it), at rest or live.
    Default: the current directory. A run is named by its id, its name or its path.
    """
    if context.invoked_subcommand not in _OF_USERS_CODE:
        leave_pandas_out()
