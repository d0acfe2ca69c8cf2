"""`ajet trace prune` and `check`: maintain trace files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from typer import Argument, Option

from ajet_sdk.errors import ConfigError, TraceError
from ajet_sdk.reporting import output
from ajet_sdk.reporting.output import echo
from ajet_sdk.trace.limits import age, bytes_of, size
from ajet_sdk.trace.owner import settled_owners
from ajet_sdk.trace.reader import open_trace
from ajet_tools.cli.result import HIDDEN, Result, TextResult
from ajet_tools.cli.trace.options import Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import counted, one_line
from ajet_tools.trace import queries
from ajet_tools.trace.files.audit import Audit, audit
from ajet_tools.trace.files.check import Broken, edited
from ajet_tools.trace.files.check import check as check_trace
from ajet_tools.trace.files.invariants import INVARIANTS
from ajet_tools.trace.files.prune import OnStage, RunSize, beyond_size, refuse_live, run_sizes
from ajet_tools.trace.files.prune import older_than as older
from ajet_tools.trace.files.prune import prune as prune_file
from ajet_tools.trace.imports.audited import Dump, audit_dump
from ajet_tools.trace.locate import located_files
from ajet_tools.trace.queries.base import rows


@dataclass(frozen=True)
class DroppedRun(RunSize):
    """A run to delete, with its file."""

    file: Path


@dataclass(frozen=True)
class PruneResult(Result):
    runs: Sequence[DroppedRun]
    dry_run: bool
    before: int
    """Size of the files in bytes."""
    after: int
    was_asked: bool = field(metadata=HIDDEN)
    """The runs were listed already."""

    def show(self, out: Console) -> None:
        if not self.runs:
            out.print("No runs to delete.")
            return
        if not self.was_asked:
            out.print(_dropped_table(self.runs, out.width))
        if not self.dry_run:
            out.print(f"{decimal(self.before)} -> {decimal(self.after)}")


def prune(
    path: Where = None,
    older_than: Annotated[
        str | None, Option(metavar="AGE", help="Runs that ended longer ago: 30d, 12h, 2w.")
    ] = None,
    run: Annotated[
        list[str] | None, Option(metavar="RUN", help="This run, by its id or name; repeatable.")
    ] = None,
    keep_size: Annotated[
        str | None, Option(metavar="SIZE", help="Oldest runs above this total: 500MB, 2GB.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print what would be deleted, and stop.")
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> PruneResult:
    """Delete whole runs with their episodes, calls, metrics and feedback, after asking.

    Files that are being written are passed over; if all are, that is an error. --keep-size always
    keeps the newest run. Checkpoints and logs are kept.

    \b
    ajet trace prune --older-than 30d --dry-run
    ajet trace prune launcher_record/math --run 3f2a91
    ajet trace prune --keep-size 500MB --yes
    """
    if not (older_than or run or keep_size):
        raise ConfigError("nothing selected: pass --older-than 30d, --run ID or --keep-size 500MB")
    files = list(chain.from_iterable(_traces(path).values()))
    live = settled_owners(files)
    if len(live) == len(files):
        refuse_live(files[0], "prune")
    elif live:
        echo(f"Passed over, because they are being written: {', '.join(map(str, live))}", err=True)
    files = [file for file in files if file not in live]
    alive = set[str]()
    if live:
        with open_trace(*live) as reader:
            alive = {row["run_id"] for row in rows(reader, "SELECT run_id FROM runs")}
    gone = [
        one for one in _chosen(files, older_than, run or (), keep_size) if one.run_id not in alive
    ]
    before = sum(map(bytes_of, files))
    asks = bool(gone) and not dry_run and not yes
    if asks:
        err = render.console(stderr=True)
        err.print(_dropped_table(gone, err.width))
        typer.confirm("Delete them permanently?", abort=True, err=True)
    if not dry_run:
        with _progress() as report:
            for file in dict.fromkeys(one.file for one in gone):
                prune_file(file, [one.run_id for one in gone if one.file == file], report)
    return PruneResult(gone, dry_run, before, sum(map(bytes_of, files)), asks)


def _chosen(
    files: Sequence[Path], older_than: str | None, prefixes: Sequence[str], keep_size: str | None
) -> list[DroppedRun]:
    """Returns the runs to delete, oldest first."""
    limit = age(older_than, "--older-than") if older_than else None
    room = size(keep_size, "--keep-size") if keep_size else None
    runs: list[DroppedRun] = []
    for file in files:
        with open_trace(file) as reader:
            runs += [DroppedRun(**asdict(run), file=file) for run in run_sizes(reader, file)]
    runs.sort(key=lambda run: (run.last, run.run_id))
    chosen: set[str] = set()
    if limit is not None:
        chosen |= {run.run_id for run in older(runs, datetime.now(timezone.utc) - limit)}
    if room is not None:
        chosen |= {run.run_id for run in beyond_size(runs, room)}
    if prefixes:
        with open_trace(*files) as reader:
            chosen |= {queries.find_run(reader, prefix) for prefix in prefixes}
    return [run for run in runs if run.run_id in chosen]


def _dropped_table(runs: Sequence[DroppedRun], width: int) -> RenderableType:
    several = len({run.file for run in runs}) > 1
    table: list[dict[str, object]] = []
    for run in runs:
        row: dict[str, object] = {"file": str(run.file)} if several else {}
        row |= {"run": run.run_id[:12], "name": run.name, "status": run.status, "last": run.last}
        row |= {"episodes": run.episodes, "calls": run.calls, "feedback": run.feedback}
        table.append({**row, "about": decimal(run.bytes)})
    count = "1 run goes" if len(table) == 1 else f"{len(table):,} runs go"
    title = f"{count}, with all that belongs to it"
    return render.table(table, width, title=title, right=["about"])


@dataclass(frozen=True)
class CheckResult(TextResult):
    """Violations and audits by trace."""

    broken: Mapping[Path, Sequence[Broken]]
    audits: Mapping[Path, Audit] | None
    """None without --deep."""

    @property
    def sound(self) -> bool:
        audits = (self.audits or {}).values()
        return not any(self.broken.values()) and not any(entry.differs for entry in audits)

    @property
    def exit_code(self) -> int:
        return 0 if self.sound else 1

    def document(self) -> object:
        broken: list[dict[str, object]] = []
        for where, entries in self.broken.items():
            broken += [{"trace": str(where), **asdict(entry)} for entry in entries]
        document = {"traces": len(self.broken), "sound": self.sound, "broken": broken}
        if self.audits is None:
            return document
        audits = [{"trace": str(where), **asdict(entry)} for where, entry in self.audits.items()]
        return {**document, "audits": audits}

    def lines(self) -> Iterator[str]:
        audits = self.audits or {}
        for where, violations in self.broken.items():
            if not violations and not (where in audits and audits[where].differs):
                yield f"{where}: no violations ({len(INVARIANTS) + 3} invariants hold)"
            for entry in violations:
                prefix = f"{where}: " if len(self.broken) > 1 else ""
                yield f"{prefix}{entry.invariant}: {entry.says} ({entry.count:,})"
                for line in entry.deeds or entry.ids:
                    yield f"  {one_line(line, 200)}"
                if entry.count > len(entry.ids) and not entry.deeds:
                    yield f"  and {entry.count - len(entry.ids):,} more"
            if where in audits:
                yield from _audit_lines(str(where), audits[where])


@dataclass(frozen=True)
class DumpResult(TextResult):
    """The check of other trainers' files."""

    dump: Dump
    files: Sequence[Path]

    @property
    def exit_code(self) -> int:
        return 0 if self.dump.sound else 1

    def document(self) -> object:
        return {"sound": self.dump.sound, **asdict(self.dump)}

    def lines(self) -> Iterator[str]:
        dump = self.dump
        for file, format in dump.formats.items():
            yield f"{file}: {format}"
        yield f"{counted(dump.episodes, 'episode')} with {counted(dump.calls, 'call')}"
        if dump.without_calls:
            without = counted(dump.without_calls, "episode")
            yield f"{without} without a request: a reward alone cannot be audited"
        yield from dump.problems
        if dump.unreadable > len(dump.problems):
            yield f"and {counted(dump.unreadable - len(dump.problems), 'row')} more"
        if dump.calls:
            if dump.unreadable:
                where = "the other rows"
            else:
                where = str(self.files[0])
            yield from _audit_lines(where, dump.audit)
        else:
            yield "nothing was checked: no call could be read"
        for split in dump.splits[:3]:
            yield f"split: {split}"
        if len(dump.splits) > 3:
            yield f"and {counted(len(dump.splits) - 3, 'split')} more"


def check(
    paths: Annotated[list[Path] | None, Argument(metavar="PATH...", show_default=False)] = None,
    deep: Annotated[bool, Option("--deep")] = False,
    weights: Annotated[bool, Option("--weights")] = False,
    tokenizer: Annotated[Path | None, Option(metavar="DIR")] = None,
) -> CheckResult | DumpResult:
    """Check a trace for consistency and list violations with their ids. Exits with 1 if there are
    any.

    Checks columns, duplicate ids, references between tables, prompts, lengths, the ledger's
    balance, statuses and times; and of a file at rest, by a digest of each row, whether a row was
    edited after it was written. Works on live traces.

    --deep computes again what follows from calls, rewards and the recorded config, compares it with
    what is stored, and names the first row that differs. What it cannot compute (a tokenizer that
    is not at hand) is listed as not checked. --weights also loads the run's first model and its
    checkpoints beside the trace, a version at a time, and compares log-probabilities of 32 calls of
    each version with theirs (within 0.001, in 16 bits within 0.25), and the gradient norm of the
    step that began with it. It fails where there are no weights to compare with.

    A file that another trainer wrote of its rollouts, with token ids, is checked for whether it
    trains what was sampled (the formats of `ajet trace import`). Lengths of ids, masks,
    log-probabilities and spans must agree; log-probabilities be finite and at most 0; only sampled
    tokens be trained; no attempt have a lower advantage than one of its group with a lower reward.
    With --tokenizer, sampled ids must be the text of the reply, prompts what the chat template
    renders. Prompts that do not extend an earlier call are listed.

    Args:
        paths: A trace file or a directory; or other trainers' files. Default: the current directory.
        deep: Also recompute prompts, texts, advantages, ledger and metrics of each training.
        weights: --deep, and log-probabilities by the run's model and checkpoints (needs torch).
        tokenizer: Other trainers' files: compare ids with the text.

    \b
    ajet trace check
    ajet trace check launcher_record/math --json
    ajet trace check launcher_record/math --deep
    ajet trace check outputs/gsm8k/traces.jsonl --tokenizer ~/models/Qwen3-0.6B
    ajet trace check datums.jsonl --json
    """
    paths = paths or []
    dumps = [path for path in paths if path.is_file() and not _is_trace(path)]
    if dumps or tokenizer is not None:
        if deep or weights or len(dumps) < len(paths) or not dumps:
            raise ConfigError(
                "check traces (with --deep, --weights) or other trainers' files (with --tokenizer),"
                " not both in one command"
            )
        return DumpResult(audit_dump(dumps, tokenizer), dumps)
    deep = deep or weights
    traces = {} if paths else _traces(None)
    for path in paths:
        traces |= _traces(path)
    broken: dict[Path, list[Broken]] = {}
    audits: dict[Path, Audit] = {}
    with _progress() as report:
        for where, files in traces.items():
            report(f"checking {where}")
            broken[where] = check_trace(*files)
            if deep and not broken[where]:
                audits[where] = audit(*files, weights=weights)
            if not any(entry.invariant == "schema" for entry in broken[where]) and (
                changed := edited(*files)
            ):
                broken[where].insert(0, changed)
    if weights and not any(entry.rows.get("weights") for entry in audits.values()):
        raise TraceError(
            "--weights compared no call; name the directory with the run's checkpoints"
        )
    return CheckResult(broken, audits if deep else None)


def _is_trace(path: Path) -> bool:
    if path.suffix == ".duckdb":
        return True
    try:
        with path.open("rb") as file:
            return file.read(12)[8:] == b"DUCK"
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


def _audit_lines(where: str, audited: Audit) -> Iterator[str]:
    if not audited.differs:
        forward = ""
        if "weights" in audited.rows:
            forward = f", {audited.rows['weights']:,} with the weights"
        calls = counted(audited.rows["calls"], "call")
        yield (
            f"{where}: recomputed, nothing differs ({audited.checks} checks of {calls}{forward})"
        )
    for entry in audited.differs:
        more = f" ({entry.count:,} rows)" if entry.count > 1 else ""
        yield (f"{entry.check} of run {entry.run[:12]}: {one_line(entry.says, 200)}{more}")
        yield (f"  expected {one_line(entry.expected)}")
        yield (f"  stored   {one_line(entry.stored)}")
    unchecked: dict[tuple[str, str], list[str]] = {}
    for why in audited.unchecked:
        unchecked.setdefault((why.check, why.reason), []).append(why.run[:12])
    for (check, reason), runs in unchecked.items():
        more = f" and {len(runs) - 3:,} more" if len(runs) > 3 else ""
        named = ""
        if any(runs):
            named = f", run {', '.join(runs[:3])}{more}"
        yield (f"not checked{named}: {check}: {one_line(reason)}")


def _traces(path: Path | None) -> dict[Path, list[Path]]:
    """Returns the traces in and below a path; the files of a directory are one trace."""
    files = located_files(path)
    traces: dict[Path, list[Path]] = {}
    for file in files:
        traces.setdefault(file.parent, []).append(file)
    return {mine[0] if len(mine) == 1 else folder: mine for folder, mine in traces.items()}


@contextmanager
def _progress() -> Iterator[OnStage]:
    console = output.console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda what: status.update(escape(what))
    else:
        yield lambda _: None
