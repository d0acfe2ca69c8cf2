"""`ajet dataset` on a million rows of JSON lines and Parquet: processor time beside polars and
DuckDB, and memory.

Each runs in a process of its own, imports included, three times in turn with the others; the least
time counts, and the most memory. polars and DuckDB read the same file with all columns, infer the
types of JSON from the whole file, do the same choice, count or join on columns, and write the same
format.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench import Figure

ROWS = 1_000_000
TIMES = 3
MOST, MEGABYTES = 1.5, 500
"""Processor time by that of polars, and peak memory: at most."""

COMMANDS = {
    "filter jsonl": (
        "filter {f}.jsonl 'chars<400 metadata.level>=2 not text~\"train 7\"' -o {out}.jsonl"
    ),
    "filter parquet": "filter {f}.parquet 'chars<400 metadata.level>=2' -o {out}.parquet",
    "filter by SQL": (
        "filter {f}.jsonl \"metadata.level IN (2, 3) AND main_query LIKE '%train%'\" -o {out}.jsonl"
    ),
    "split": "split {f}.jsonl -o {out}",
    "split stratified": "split {f}.jsonl --stratify metadata.level -o {out}",
    "check": "check {f}.jsonl --json",
    "export": "export {f}.jsonl -o {out}.jsonl",
    "export messages": "export {f}.jsonl --format messages -o {out}.jsonl",
    "export directory": "export {f}.jsonl -o {out}",
    "export parquet": "export {f}.jsonl -o {out}.parquet",
}
_SCAN = (
    "import polars as pl; r = pl.scan_ndjson('{f}.jsonl', infer_schema_length=None); q ="
    " pl.col('main_query'); "
)
_CHOICE = "(q.str.len_chars() < 400) & (pl.col('metadata').struct.field('level') >= 2)"
POLARS = {
    "filter jsonl": (
        _SCAN + f"r.filter({_CHOICE} & ~q.str.contains('(?i)train 7')).sink_ndjson('{{out}}')"
    ),
    "filter parquet": (
        "import polars as pl; q = pl.col('main_query'); "
        f"pl.scan_parquet('{{f}}.parquet').filter({_CHOICE}).sink_parquet('{{out}}')"
    ),
    "filter by SQL": (
        _SCAN
        + "pl.SQLContext(rows=r).execute('SELECT * FROM rows WHERE metadata.level IN (2, 3) AND "
        "main_query LIKE $$%train%$$'.replace('$$', chr(39))).sink_ndjson('{out}')"
    ),
    "split": (
        _SCAN + "d = r.with_columns(h=q.hash() % 10).collect(); d.filter(pl.col('h') >"
        " 0).write_ndjson('{out}'); d.filter(pl.col('h') == 0).write_ndjson('{out}2')"
    ),
    "split stratified": (
        _SCAN + "n = pl.int_range(pl.len()).over(pl.col('metadata').struct.field('level')); d ="
        " r.with_columns(h=n % 10).collect(); d.filter(pl.col('h') > 0).write_ndjson('{out}');"
        " d.filter(pl.col('h') == 0).write_ndjson('{out}2')"
    ),
    "check": (
        _SCAN + "d = r.unnest('metadata'); k = q.str.len_chars(); "
        "print(d.select(rows=pl.len(), distinct=q.n_unique(), mean=k.mean(), p95=k.quantile(.95), "
        "words=q.str.count_matches(r'\\S+').mean(), levels=pl.col('level').n_unique(), "
        "sources=pl.col('source').n_unique(), answers=pl.col('answer').null_count()).collect(), "
        "d.group_by('level').agg(k.mean()).collect())"
    ),
    "export": _SCAN + "r.sink_ndjson('{out}')",
    "export messages": (
        _SCAN
        + "m = pl.struct(role=pl.lit('user'), content=q); a = pl.struct(role=pl.lit('assistant'), "
        "content=pl.col('metadata').struct.field('answer')); "
        "r.select('metadata', messages=pl.concat_list(m, a)).sink_ndjson('{out}')"
    ),
    "export directory": _SCAN + "r.sink_parquet('{out}')",
    "export parquet": _SCAN + "r.sink_parquet('{out}')",
}
_READ = "read_json('{f}.jsonl', format='newline_delimited', sample_size=-1)"
DUCKDB = {
    "filter jsonl": (
        f"COPY (SELECT * FROM {_READ} WHERE length(main_query) < 400 AND metadata.level >= 2 "
        "AND NOT main_query ILIKE '%train 7%') TO '{out}' (FORMAT json)"
    ),
    "filter parquet": (
        "COPY (SELECT * FROM '{f}.parquet' WHERE length(main_query) < 400 AND metadata.level >= 2) "
        "TO '{out}' (FORMAT parquet, CODEC zstd)"
    ),
    "export directory": f"COPY (SELECT * FROM {_READ}) TO '{{out}}' (FORMAT parquet, CODEC zstd)",
    "check": f"SELECT count(*), count(DISTINCT main_query), avg(length(main_query)) FROM {_READ}",
}


def main() -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_files(folder)
        given = {"f": folder / "rows", "g": folder / "more", "out": folder / "written" / "out"}
        for what, command in COMMANDS.items():
            runs: dict[str, str | list[str]] = {
                "polars": [sys.executable, "-c", POLARS[what].format(**given)],
                "ours": f"exec {sys.executable} -m ajet dataset {command.format(**given)}",
            }
            if what in DUCKDB:
                query = DUCKDB[what].format(**given)
                code = f"import duckdb; duckdb.sql('SET threads=1'); print(duckdb.sql({query!r}))"
                runs["DuckDB"] = [sys.executable, "-c", code]
            measured = [
                {name: _measured(run, given["out"].parent) for name, run in runs.items()}
                for _ in range(TIMES)
            ]
            least = {name: min(one[name][0] for one in measured) for name in runs}
            peak = max(one["ours"][1] for one in measured)
            ratio = least["ours"] / least["polars"]
            figures += [
                Figure(
                    f"{what}: time by polars'",
                    ratio,
                    f"x ({least['ours']:.1f} s of CPU)",
                    f"<= {MOST}",
                    ratio <= MOST,
                ),
                Figure(f"{what}: memory", peak, "MB", f"<= {MEGABYTES}", peak <= MEGABYTES),
            ]
            if "DuckDB" in least:
                figures.append(
                    Figure(f"{what}: time by DuckDB's", least["ours"] / least["DuckDB"], "x")
                )
    return figures


def _write_files(folder: Path) -> None:
    with (folder / "rows.jsonl").open("w") as rows, (folder / "more.jsonl").open("w") as more:
        for number, row in enumerate(_rows(ROWS)):
            line = json.dumps(row) + "\n"
            rows.write(line)
            more.write(
                line
                if number % 20
                else json.dumps({**row, "metadata": {"answer": "other", "level": 9}}) + "\n"
            )
    code = "import polars as pl; pl.scan_ndjson({!r}, infer_schema_length=None).sink_parquet({!r})"
    names = str(folder / "rows.jsonl"), str(folder / "rows.parquet")
    subprocess.run([sys.executable, "-c", code.format(*names)], check=True)


def _rows(count: int) -> Iterator[dict[str, object]]:
    """Questions of a sentence to a paragraph, with metadata whose keys and kinds differ from row to
    row."""
    chance = random.Random(0)
    sentence = (
        "the train leaves with 12 apples at 7 and how many are left in each of the boxes when it"
        " comes"
    )
    words = sentence.split()
    for number in range(count):
        text = " ".join(chance.choices(words, k=chance.randint(8, 80)))
        metadata: dict[str, object] = {
            "answer": str(number) if number % 10 else number,
            "level": number % 5,
        }
        if number % 3:
            metadata["source"] = f"book {number % 17}"
        yield {"main_query": f"{number}: {text}?", "metadata": metadata}


def _measured(command: str | list[str], written: Path) -> tuple[float, float]:
    """Seconds of the processor and peak memory in MB of a process; the exit code of `validate` may
    be 1.

    It writes into an empty folder.
    """
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir()
    code = (
        "import json, resource, subprocess, sys; given = json.loads(sys.argv[1]); done ="
        " subprocess.run(given, shell=isinstance(given, str), capture_output=True, text=True); used"
        " = resource.getrusage(resource.RUSAGE_CHILDREN); print(json.dumps([done.returncode,"
        " done.stderr[-500:], used.ru_utime + used.ru_stime, used.ru_maxrss]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(command)],
        check=True,
        capture_output=True,
        text=True,
    )
    returned, said, seconds, peak = json.loads(done.stdout)
    if returned and (returned > 1 or isinstance(command, list)):
        raise RuntimeError(f"{command} ended with {returned}: {said}")
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return seconds, peak / unit
