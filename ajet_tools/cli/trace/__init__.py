"""`ajet trace`: the table of its commands; the module of a command is imported when it runs."""

from __future__ import annotations

import typer

from ajet_tools.cli.lazy import LazyGroup


class TraceCommands(LazyGroup):
    package = "ajet_tools.cli.trace"
    table = {
        "ls": ("show", "List runs, and the episodes of one: filtered, sorted, in pages."),
        "show": (
            "show",
            "Show an episode's conversation, rewards and ledger, a whole call, or a run with its metrics.",
        ),
        "ledger": ("show", "Show what became of every sampled token of a run, and whether the ledger balances."),
        "sql": ("sql", "Query a trace in SQL (DuckDB's dialect): one SELECT or EXPLAIN, read-only, at most 30 s."),
        "splits": ("splits", "Show where calls did not merge into one timeline: the token, the cause and the cost."),
        "prune": ("files", "Delete whole runs with their episodes, calls, metrics and feedback, after asking."),
        "check": (
            "files",
            "Check a trace for consistency and list violations with their ids. Exits with 1 if there are any.",
        ),
        "audit": (
            "files",
            "Audit another trainer's rollouts with token ids: does it train what was sampled? Exits with 1 if not.",
        ),
        "view": ("view", "Browse a trace in the terminal: runs, curves, episodes, tokens, SQL; also during a run."),
        "rejudge": (
            "rejudge",
            "Re-score recorded episodes with another judge, and show how rewards, groups and advantages change.",
        ),
        "branch": (
            "branch",
            "Sample an episode again from one of its calls on, and show the forks beside the original.",
        ),
        "diff": (
            "diff",
            "Compare two episodes message by message, or two runs or steps by their rewards on shared tasks.",
        ),
        "compare": (
            "compare",
            "Compare the runs in and below a directory: what differs in their configs, and how they did.",
        ),
        "explain": (
            "explain",
            "Say what changed at a step of a run, against the step or validation before, with the episodes behind it.",
        ),
        "export": (
            "exchange",
            "Export episodes as a dataset, a token table, OpenTelemetry, ajet's own JSON lines, or an HTML page.",
        ),
        "import": ("exchange", "Import other tools' traces, or what `ajet trace export` wrote, into a trace file."),
    }
    panels = {
        "Look": ("ls", "show", "view", "splits", "ledger", "check", "audit"),
        "Ask": ("explain", "diff", "compare", "sql", "rejudge", "branch"),
        "Change": ("prune",),
        "Exchange": ("export", "import"),
    }


app = typer.Typer(cls=TraceCommands, no_args_is_help=True, add_completion=False)


@app.callback()
def trace() -> None:
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

    Each command takes a trace file or a directory (with all traces below it), at rest or live. Default: the current
    directory. A run is named by its id, its name or its path.
    """
