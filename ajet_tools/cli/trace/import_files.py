"""`ajet trace import`: other tools' traces as a trace of ajet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.result import TextResult
from ajet_tools.cli.trace.options import FROM_HELP
from ajet_tools.text.clean import counted
from ajet_tools.trace.imports import Imported, format_of, import_files


@dataclass(frozen=True)
class ImportResult(TextResult):
    done: Imported

    @property
    def exit_code(self) -> int:
        return 0 if self.done.understood else 1

    def document(self) -> object:
        return vars(self.done)

    def lines(self) -> Iterator[str]:
        return _lines(self.done)


def _lines(done: Imported) -> Iterator[str]:
    yield (
        f"{counted(done.episodes, 'episode')} with {counted(done.calls, 'call')} into {done.path}"
    )
    for file, format in done.formats.items():
        yield f"  {file}: {format}"
    if done.already:
        yield f"  already there: {counted(done.already, 'episode')}"
    for reason, count in sorted(done.left_out.items()):
        yield f"  left out: {count:,} {reason}"
    if done.bad_rows:
        yield f"  skipped: {counted(done.bad_rows, 'bad row')}, the first:"
    for problem in done.problems:
        yield f"    {problem}"


def import_(
    files: Annotated[list[str], Argument(metavar="FILE...", help="Files to import; - is stdin.")],
    out: Annotated[Path, Option("--out", "-o", help="The trace (*.duckdb) to create or add to.")],
    source: Annotated[str, Option("--from", metavar="FORMAT", help=FROM_HELP)] = "auto",
    skip_bad_rows: Annotated[
        bool, Option("--skip-bad-rows", help="Skip invalid rows and report how many.")
    ] = False,
) -> ImportResult:
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
    return ImportResult(done)
