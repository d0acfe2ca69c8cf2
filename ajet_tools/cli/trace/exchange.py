"""`ajet trace export` and `ajet trace import`: convert between traces and other tools' files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, cast

from typer import Argument, Exit, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import ProgressBar, echo, visible
from ajet_tools.cli.options import AsJson, IncludeValidation, print_json
from ajet_tools.cli.trace.options import FROM_HELP, OfRun, WhereOrRun
from ajet_tools.dataset.similarity.held_out import export_rows
from ajet_tools.text.clean import counted
from ajet_tools.trace import queries
from ajet_tools.trace.export import Exported, Format
from ajet_tools.trace.export.collector import Collector
from ajet_tools.trace.imports import Imported, format_of, import_files
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.episodes import exported_ids
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.queries.listing import open_listing


def export(
    path: WhereOrRun = None,
    format: Annotated[Format, Option(help="What is written.")] = "messages",
    out: Annotated[str, Option("--out", "-o", metavar="FILE|URL|-")] = "-",
    filter: Annotated[str | None, Option(metavar="EXPR")] = None,
    run: OfRun = None,
    all_runs: Annotated[bool, Option("--all-runs", help="Export all runs.")] = False,
    episode: Annotated[list[str] | None, Option(metavar="ID")] = None,
    split: Literal["train", "val", "trial"] | None = None,
    include_validation: IncludeValidation = False,
    include_failures: Annotated[bool, Option("--include-failures")] = False,
    margin: Annotated[float, Option(min=0)] = 0.0,
    redact: Annotated[bool, Option("--redact/--no-redact")] = True,
    as_json: AsJson = False,
) -> None:
    """Export episodes as a dataset, a token table, OpenTelemetry, ajet's own JSON lines, or an HTML
    page.

    Secrets and personal data are replaced and counted (--no-redact keeps them). Formats to train on
    leave out validation tasks, and tasks that nearly repeat one, and replies that were cut at their
    limit. messages, sharegpt and trl-prompt, whose replies are imitated, leave out episodes that
    earned nothing: a reward of 0 or less (without any above 0, the lowest), or none in a run that
    has rewards. All are counted. Episodes that a resume rolled back are left out, except in native.
    Files are written whole or not at all.

    Args:
        out: Output file; - is stdout. For otlp also a URL that it is sent to.
        filter: Only episodes that match, as in `ajet trace ls`.
        episode: Only this episode, by a unique prefix of its id; repeatable.
        split: Only these episodes. Default: all but trial.
        include_failures: Also cut replies and episodes that earned nothing, as with --episode.
        margin: trl-preference: minimum difference between the rewards of a pair.
        redact: Replace secrets and personal data with placeholders.

    \b
    ajet trace export --format messages --out chats.jsonl
    ajet trace export launcher_record/math --format trl-preference \\
      --filter "step>10" --margin 0.5 --out pairs.jsonl
    ajet trace export --format tokens --split train --out tokens.parquet
    ajet trace export --format otlp --out http://localhost:6006/v1/traces
    ajet trace export --format html --episode 3f2a91 --out episode.html
    ajet trace export --format native --all-runs --no-redact -o - | gzip > all.jsonl.gz
    """
    if out == "-" and format == "tokens" and sys.stdout.isatty():
        raise ConfigError(
            "tokens is a binary table: write it to a file with --out, or redirect stdout"
        )
    to_server = out.startswith(("http://", "https://"))
    if to_server and format != "otlp":
        raise ConfigError(
            f"only --format otlp is sent to a server (got {format}); name a file with --out"
        )
    target: Path | BinaryIO = sys.stdout.buffer if out == "-" else Path(out)
    if to_server:
        target = cast(BinaryIO, Collector(out))
    reader, where, run = open_named(run, path)
    with reader:
        ids = _chosen_ids(
            reader, run, all_runs, episode or (), split, filter, rolled_back=format == "native"
        )
        if not ids:
            raise ConfigError("no episode of this trace was selected; `ajet trace ls` lists them")
        with ProgressBar("export episodes") as bar:
            done = export_rows(
                reader,
                ids,
                format,
                target,
                None if all_runs or episode else queries.find_run(reader, run),
                include_validation=include_validation or split == "val",
                include_failures=include_failures
                or bool(episode),  # whoever names an episode wants it
                redact=redact,
                margin=margin,
                trace=where,
                progress=bar.update,
            )
    _report_export(done, redact, as_json, to_stdout=out == "-")


def _chosen_ids(
    reader: TraceReader,
    run: str | None,
    all_runs: bool,
    episodes: Sequence[str],
    split: str | None,
    filter: str | None,
    *,
    rolled_back: bool,
) -> list[str]:
    if episodes:
        return [queries.find(reader, prefix, "episode").id for prefix in episodes]
    run_id = None if all_runs else queries.find_run(reader, run)
    ids = exported_ids(reader, run_id, split, rolled_back=rolled_back)
    if filter is None:
        return ids

    fitting = set(open_listing(reader, run_id, parse(filter)).ids())
    return [episode_id for episode_id in ids if episode_id in fitting]


def _report_export(done: Exported, redact: bool, as_json: bool, *, to_stdout: bool) -> None:
    if as_json:
        summary = {**vars(done), "path": str(done.path) if done.path else None}
        print_json(summary, indent=None if to_stdout else 2, err=to_stdout)
        return
    where = f" to {done.path}" if done.path else ""
    echo(
        f"{counted(done.episodes, 'episode')}, {counted(done.rows, 'row')} of {done.format}{where}",
        err=True,
    )
    for reason, count in sorted(done.left_out.items()):
        echo(f"  left out: {count:,} {reason}", err=True)
    note = "Names and other facts in prose are not detected"
    if done.redacted:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(done.redacted.items()))
        echo(f"  redacted: {kinds}. {note}; review before publishing", err=True)
    elif redact:
        echo(f"  redacted: nothing found. {note}", err=True)


def import_(
    files: Annotated[list[str], Argument(metavar="FILE...", help="Files to import; - is stdin.")],
    out: Annotated[Path, Option("--out", "-o", help="The trace (*.duckdb) to create or add to.")],
    source: Annotated[str, Option("--from", metavar="FORMAT", help=FROM_HELP)] = "auto",
    skip_bad_rows: Annotated[
        bool, Option("--skip-bad-rows", help="Skip invalid rows and report how many.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import other tools' traces, or what `ajet trace export` wrote, into a trace file.

    Reads ajet's native, messages and tokens, OpenAI's messages, logs of its chat completions and
    Responses and its batch output, OpenTelemetry with GenAI or OpenInference attributes, AgentScope
    Studio's database, and token ids of verifiers, TRL, Tinker, rLLM and agent-lightning. What is
    not understood is reported and not imported; if that is all, the exit code is 1.
    Fields that a format lacks stay empty. Importing a file twice adds nothing.

    \b
    ajet trace import all.jsonl --out copy.duckdb
    ajet trace import spans.jsonl --from otlp --out traces.duckdb
    ajet trace import ~/AgentScope-Studio/database.sqlite -o studio.duckdb
    gunzip -c chats.jsonl.gz | ajet trace import - --from openai -o chats.duckdb
    """
    format = format_of(source)
    with ProgressBar("import bytes") as bar:
        done = import_files(
            [None if file == "-" else Path(file) for file in files],
            out,
            format,
            skip_bad_rows=skip_bad_rows,
            progress=bar.update,
        )
    if as_json:
        print_json({**vars(done), "path": str(done.path)})
    else:
        _report_import(done)
    if not done.understood:
        raise Exit(1)


def _report_import(done: Imported) -> None:
    echo(f"{counted(done.episodes, 'episode')} with {counted(done.calls, 'call')} into {done.path}")
    for file, format in done.formats.items():
        echo(f"  {visible(file)}: {format}")
    if done.already:
        echo(f"  already there: {counted(done.already, 'episode')}")
    for reason, count in sorted(done.left_out.items()):
        echo(f"  left out: {count:,} {visible(reason)}")
    if done.bad_rows:
        echo(f"  skipped: {counted(done.bad_rows, 'bad row')}, the first:")
    for problem in done.problems:
        echo(f"    {visible(problem)}")
