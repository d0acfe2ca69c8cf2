"""Opens traces of any origin as one reader; other tools' files are imported first."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import open_trace
from ajet_tools.dataset.files.sources import is_duckdb
from ajet_tools.trace.imports import import_files
from ajet_tools.trace.locate import located_files, open_located
from ajet_tools.trace.queries.base import rows

if TYPE_CHECKING:
    from ajet_tools.trace.imports import Imported, SourceFormat


@dataclass(frozen=True)
class Sources:
    reader: TraceReader
    names: tuple[str, ...]
    path: Path | None = None
    """The trace, from which the tokenizer of a run is looked for."""
    foreign_runs: frozenset[str] = frozenset()
    """Runs recorded by other tools; their tasks come from the conversations, their metadata from
    the log."""
    imported: Imported | None = None
    formats: dict[str, str] = field(default_factory=dict)
    """Detected format of each imported file."""


@contextmanager
def opened_sources(
    paths: Sequence[str | Path], format: SourceFormat | None = None, *, skip_bad_rows: bool = False
) -> Iterator[Sources]:
    """Opens traces (files, directories, also live) and other tools' files (`-` is stdin) as one
    trace.

    Without paths, opens the newest trace below the current directory. Other tools' files are
    imported into a temporary trace (`ajet_tools.trace.imports`). Raises TraceError, TaskError for a
    bad row, ConfigError for an unknown file or an episode that occurs in two sources.
    """
    traces: list[Path] = []
    foreign: list[Path | None] = []
    for name in map(str, paths):
        path = _studio_in(Path(name))
        if name == "-":
            foreign.append(None)
        elif _is_trace(path):
            traces.append(path)
        else:
            foreign.append(path)
    with ExitStack() as stack:
        if not foreign and len(traces) < 2:
            reader, path_of_trace = open_located(traces[0] if traces else None)
            yield Sources(
                stack.enter_context(closing(reader)), (str(path_of_trace),), path_of_trace
            )
            return
        files: list[Path] = []
        for path in traces:
            files += located_files(path)
        names = tuple(map(str, paths))
        if not foreign:
            reader = stack.enter_context(closing(open_trace(*files)))
            _refuse_twice(reader)
            yield Sources(reader, names)
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-from-traces-"))
        imported_file = Path(folder, "imported.duckdb")
        done = import_files(foreign, imported_file, format, skip_bad_rows=skip_bad_rows)
        runs: frozenset[str] = frozenset()
        if any(kind != "native" for kind in done.formats.values()):
            with closing(open_trace(imported_file)) as imported:
                runs = frozenset(row["run_id"] for row in rows(imported, "SELECT run_id FROM runs"))
        reader = stack.enter_context(closing(open_trace(imported_file, *files)))
        if traces:
            _refuse_twice(reader)
        yield Sources(reader, names, foreign_runs=runs, imported=done, formats=done.formats)


def _studio_in(path: Path) -> Path:
    database = path / "database.sqlite"
    if database.is_file() and not any(path.glob("*.duckdb")):
        return database
    return path


def _is_trace(path: Path) -> bool:
    """Whether the path is a directory, a DuckDB file, or has the suffix of one."""
    if path.is_dir() or path.suffix == ".duckdb":
        return True
    if not path.is_file():
        raise ConfigError(f"there is no file or directory {path}")
    return is_duckdb(path)


def _refuse_twice(reader: TraceReader) -> None:
    """Raises ConfigError for an episode in two sources, which would be read with every call
    twice."""
    sql = "SELECT episode_id FROM episodes GROUP BY episode_id HAVING count(*) > 1 LIMIT 1"
    for row in rows(reader, sql):
        raise ConfigError(
            f"episode {row['episode_id']} is in two of the sources; name only one of them, or"
            " import what `ajet trace export --format native` writes of each into one file, which"
            " removes the copy"
        )
