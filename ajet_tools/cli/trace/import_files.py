"""`ajet trace import`: other tools' traces as a trace of ajet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from ajet_sdk.reporting.output import ProgressBar, echo, visible
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.trace.options import FROM_HELP
from ajet_tools.text.clean import counted
from ajet_tools.trace.imports import Imported, format_of, import_files


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
