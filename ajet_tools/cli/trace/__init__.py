"""`ajet trace`: the table of its commands; the module of a command is imported when it runs."""

from __future__ import annotations

import typer

from ajet_tools.cli.lazy import LazyGroup

__all__ = ["app"]


class TraceCommands(LazyGroup):
    package = "ajet_tools.cli.trace"
    table = {
        "ls": ("show", "List the runs of a trace and the episodes of one: filtered, sorted, page by page."),
        "show": (
            "show",
            "Show an episode's conversation, rewards and ledger; or a call whole; or a run with its metrics.",
        ),
        "ledger": ("show", "Say what became of every sampled token of a run, and whether the ledger balances."),
        "sql": (
            "sql",
            "Ask a trace one question in SQL (DuckDB's): a SELECT or EXPLAIN, read-only, stopped after 30 s.",
        ),
        "splits": (
            "splits",
            "Say where calls did not merge into one timeline: at which token, why, and what it costs.",
        ),
        "pack": ("files", "Rewrite a trace so that it takes less room, and replace it once the copy is proven equal."),
        "merge-files": ("files", "Write several trace files (of several nodes, or processes) as one; the files stay."),
        "prune": (
            "files",
            "Drop whole runs with their episodes, calls, metrics and feedback; say which, and ask first.",
        ),
        "check": (
            "files",
            "Check what must hold in a trace, and list what does not, with ids. Exits with 1 where anything is broken.",
        ),
        "view": ("view", "Look through a trace: runs, curves, episodes, every token, SQL; also while the run goes on."),
        "replay": (
            "rerun",
            "Run an episode's workflow again with the recorded completions: does it make the same calls?",
        ),
        "rejudge": (
            "rerun",
            "Put stored episodes before another judge: what would change in rewards, groups and advantages.",
        ),
        "remerge": (
            "remerge",
            "Build a run's samples anew under another policy or tokenizer, beside what the run did with its episodes.",
        ),
        "preflight": (
            "remerge",
            "Put your own traces through a model's chat template: how well would its calls merge, "
            "and what is in the way?",
        ),
        "diff": (
            "diff",
            "Compare two episodes message by message, or two runs by the rewards of the tasks that they share.",
        ),
        "export": (
            "exchange",
            "Write episodes as a dataset, a token table, OpenTelemetry, ajet's own JSON lines, or a page to look at.",
        ),
        "import": ("exchange", "Read other tools' traces, or what `ajet trace export` wrote, into a trace file."),
    }
    panels = {
        "Look": ("ls", "show", "view", "splits", "ledger"),
        "Ask": ("sql", "diff", "preflight", "remerge", "rejudge", "replay"),
        "Change": ("check", "pack", "merge-files", "prune"),
        "Exchange": ("export", "import"),
    }


app = typer.Typer(cls=TraceCommands, no_args_is_help=True, add_completion=False)


@app.callback()
def trace() -> None:
    """Look into a trace: episodes, calls, rewards, the ledger.

    \b
    ajet trace ls
    ajet trace show 3f2a91
    ajet trace sql "SELECT status, count(*) FROM episodes GROUP BY status"
    ajet trace ledger launcher_record/math
    ajet trace view launcher_record/math
    ajet trace export --format messages --filter "reward>0.9" --out good.jsonl
    ajet trace replay 3f2a91 --workflow agent.py:solve
    ajet trace preflight models/qwen3

    Each command takes a trace file, a directory with all traces below it, or a live run; with none, all below here.
    A run is named by its id, its name or its path.
    """
