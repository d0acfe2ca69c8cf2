"""`ajet trace ls show sql ledger splits`: look into a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ajet_tools.cli.trace.options import AsJson, OfRun, Where, print_json

if TYPE_CHECKING:
    from ajet_sdk.protocols import TraceReader
    from ajet_sdk.timelines import Decode
    from ajet_sdk.types import Episode

__all__ = ["app"]

app = typer.Typer(add_completion=False)


_CHUNK = 100


@app.command()
def ls(
    path: Where = None,
    run: OfRun = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many episodes.")] = 20,
    status: Annotated[
        str | None, typer.Option("--status", help="Only episodes that ended so: succeeded, failed, timeout, aborted.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of a trace and the last episodes of one.

    \b
    ajet trace ls
    ajet trace ls launcher_record/math --status failed -n 50
    """
    from ajet_tools.trace import queries, render
    from ajet_tools.trace.locate import open_located
    from ajet_tools.trace.text import short_ids

    reader, where = open_located(path)
    with closing(reader):
        runs = queries.run_rows(reader)
        chosen = queries.find_run(reader, run) if run or runs else None
        episodes = queries.latest_episodes(reader, chosen, limit=limit, status=status)
    if as_json:
        print_json({"trace": str(where), "runs": runs, "run_id": chosen, "episodes": episodes})
        return
    out = render.console()
    run_ids = short_ids([row["run_id"] for row in runs])
    episode_ids = short_ids([row["episode_id"] for row in episodes])
    out.print(str(where), style="dim", soft_wrap=True)
    out.print(render.table([_row("run", run_ids[r["run_id"]], r, _RUN_COLUMNS) for r in runs], out.width))
    if not episodes:
        out.print("\nNo episode yet.")
        return
    out.print()
    rows = [_row("episode", episode_ids[r["episode_id"]], r, _EPISODE_COLUMNS) for r in episodes]
    last = "the last episode" if len(rows) == 1 else f"the last {len(rows):,} episodes"
    title = f"{last} of {run_ids.get(chosen or '', 'all runs')}"
    out.print(render.table(rows, out.width, title=title))


_RUN_COLUMNS = ("status", "episodes", "unsound", "last_step", "reward", "started_at", "name", "backbone")
_EPISODE_COLUMNS = ("status", "reward", "step", "split", "calls", "tokens", "seconds", "attempt", "task_id", "cause")


def _row(kind: str, short: str, row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {kind: short, **{column: row[column] for column in columns}}


@app.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="A run, an episode or a call, by a unique prefix.")],
    path: Where = None,
    as_json: AsJson = False,
) -> None:
    """Show an episode's conversation, rewards and ledger; or a call whole; or a run with its metrics.

    \b
    ajet trace show 3f2a91
    ajet trace show 3f2a91 launcher_record/math --json
    """
    from ajet_tools.trace import queries
    from ajet_tools.trace.locate import open_located

    reader, _ = open_located(path)
    with closing(reader):
        found = queries.find(reader, id)
        {"run": _show_run, "episode": _show_episode, "call": _show_call}[found.kind](reader, found.id, as_json)


def _show_run(reader: TraceReader, run_id: str, as_json: bool) -> None:
    from ajet_tools.trace import queries, render

    row = next(row for row in queries.run_rows(reader) if row["run_id"] == run_id)
    metrics, totals = queries.metrics(reader, run_id), queries.ledger_totals(reader, run_id)
    if as_json:
        print_json({**row, "metrics": metrics, "ledger": totals})
        return
    out = render.console()
    out.print(render.fields(row.items()))
    for title, rows in (("\nmetrics, last value", metrics), ("\nledger", totals)):
        if rows:
            out.print(render.table(rows, out.width, title=title))


def _show_episode(reader: TraceReader, episode_id: str, as_json: bool) -> None:
    from ajet_sdk.trace.reader import calls_of, episodes
    from ajet_sdk.types import Episode
    from ajet_tools.trace import queries, render

    known = episodes(reader, episode_ids=[episode_id], superseded=True)
    ledger = queries.ledger_of_episode(reader, episode_id)
    if as_json:
        whole = known[0] if known else Episode(episode_id=episode_id, calls=tuple(calls_of(reader, episode_id)))
        ended = {} if known else {"status": None, "ended_at": None}
        print_json({**whole.model_dump(mode="json"), **ended, "reward": whole.reward, "ledger": ledger})
        return
    out = render.console()
    out.print(render.episode_head(known[0] if known else Episode(episode_id=episode_id), ledger, live=not known))
    for part in render.conversation(queries.call_rows(reader, episode_id), ledger):
        out.print(part)


def _show_call(reader: TraceReader, call_id: str, as_json: bool) -> None:
    from ajet_tools.trace import queries, render

    row = queries.call_row(reader, call_id)
    if as_json:
        parsed = {name: json.loads(row[name]) for name in ("request", "response", "sampling")}
        print_json({**{k: v for k, v in row.items() if k != "messages"}, **parsed})
        return
    out = render.console()
    for part in render.call_view(row):
        out.print(part)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT or EXPLAIN.", show_default=False)],
    path: Where = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many rows to print; JSON has all.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Ask a trace one question in SQL (DuckDB's): a SELECT or EXPLAIN, read-only, stopped after 30 s.

    Tables: runs, episodes, calls, rewards, metrics, ledger, feedback. `calls` holds of each prompt what the call's
    parent has not; the view `calls_full` has prompts and requests whole.

    \b
    ajet trace sql "FROM metrics WHERE name = 'train/reward' ORDER BY step"
    ajet trace sql "SELECT agent, count(*) FROM calls GROUP BY agent" run.duckdb
    ajet trace sql "SELECT prompt_ids FROM calls_full LIMIT 1" --json
    """
    from ajet_tools.trace import render
    from ajet_tools.trace.locate import open_located

    reader, _ = open_located(path)
    with closing(reader):
        found = reader.query(query)
    if as_json:
        print_json(_records(found.column_names, found))
        return
    out = render.console()
    if query.lstrip().lower().startswith("explain"):
        for row in found.to_pylist():
            out.print(row["explain_value"], soft_wrap=True)
        return
    out.print(render.table(_records(found.column_names, found.slice(0, limit)), out.width))
    if len(found) > limit:
        out.print(f"{limit:,} of {len(found):,} rows; more with --limit", style="dim")
    elif not len(found):
        out.print("no rows", style="dim")


def _records(names: Sequence[str], table: Any) -> list[dict[str, Any]]:
    """Rows as dicts; a name that comes twice gets a number, so that no column is lost."""
    distinct: list[str] = []
    for name in names:
        times = sum(1 for other in distinct if other == name or other.rpartition(":")[0] == name)
        distinct.append(f"{name}:{times}" if times else name)
    return [_whole(row) for row in table.rename_columns(distinct).to_pylist()]


def _whole(value: Any) -> Any:
    """HUGEINT, which every sum of integers is, comes as a decimal without a fraction: it becomes an int."""
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 else value
    if isinstance(value, dict):
        return {name: _whole(part) for name, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list) else value


@app.command()
def ledger(
    path: Where = None,
    run: OfRun = None,
    by_step: Annotated[bool, typer.Option("--by-step", help="One line for each step and outcome.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what became of every sampled token of a run, and whether the ledger balances.

    Exits with 1 where a run has ended and its ledger does not balance.

    \b
    ajet trace ledger
    ajet trace ledger launcher_record/math --by-step
    """
    from ajet_sdk.trace.reader import ledger_balance
    from ajet_tools.trace import queries, render
    from ajet_tools.trace.locate import open_located
    from ajet_tools.trace.text import visible

    reader, _ = open_located(path)
    with closing(reader):
        run_id = queries.find_run(reader, run)
        status = next(row["status"] for row in queries.run_rows(reader) if row["run_id"] == run_id)
        totals = queries.ledger_totals(reader, run_id, by_step=by_step)
        wrong = ledger_balance(reader, run_id)
    if as_json:
        print_json({"run_id": run_id, "status": status, "balanced": not wrong, "wrong": wrong, "outcomes": totals})
    else:
        out = render.console()
        tokens = sum(row["tokens"] for row in totals) or 1
        rows = [{**row, "share": f"{row['tokens'] / tokens:.1%}"} for row in totals]
        out.print(render.table(rows, out.width, right=["share"]))
        out.print(_verdict(run_id, status, wrong), soft_wrap=True)
        for line in wrong[:20]:
            out.print(f"  {visible(line)}", soft_wrap=True)
    if wrong and status == "finished":
        raise typer.Exit(1)


def _verdict(run_id: str, status: str, wrong: Sequence[str]) -> str:
    from ajet_tools.trace.render import counted

    if not wrong:
        return f"run {run_id} ({status}): the ledger balances"
    if status == "finished":
        return f"run {run_id} ({status}): the ledger does not balance for {counted(len(wrong), 'call')}"
    are = "is" if len(wrong) == 1 else "are"
    return f"run {run_id} ({status}): {counted(len(wrong), 'call')} {are} not booked, or not wholly"


@app.command()
def splits(
    path: Where = None,
    run: OfRun = None,
    episode: Annotated[str | None, typer.Option("--episode", metavar="ID", help="Only this one, by a prefix.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many episodes, newest first.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Say where calls did not merge into one timeline: at which token, why, and what it costs.

    \b
    ajet trace splits
    ajet trace splits --episode 3f2a91
    """
    from ajet_tools.trace import queries, render
    from ajet_tools.trace.locate import open_located

    reader, _ = open_located(path)
    with closing(reader):
        ids: Sequence[str] = (
            [queries.find(reader, episode, "episode").id]
            if episode
            else queries.episode_ids(reader, queries.find_run(reader, run), limit=limit)
        )
        found, timelines, sampled = _merged(reader, ids, _decoders(reader))
    causes = _by_cause(found)
    if as_json:
        print_json({"episodes": len(ids), "timelines": timelines, "causes": causes, "splits": found})
        return
    out = render.console()
    counts = ((len(ids), "episode"), (timelines, "timeline"), (sampled, "sampled token"), (len(found), "split"))
    out.print(", ".join(render.counted(count, noun) for count, noun in counts))
    if causes:
        out.print(render.table(causes, out.width, title="\nby cause"))
        worst = sorted(found, key=lambda row: -row["extra_tokens"])[:20]
        columns = ("episode_id", "call_id", "parent_call_id", "at_token", "extra_tokens", "cause", "hint")
        shown = [{c: _short(row[c]) if c.endswith("_id") else row[c] for c in columns} for row in worst]
        out.print(render.table(shown, out.width, title="\nthose that cost most"))


def _decoders(reader: TraceReader) -> Callable[[str | None], Decode | None]:
    """A run's id -> ids to text; None, once said why on stderr, where the tokenizer is not at hand."""
    from ajet_sdk.errors import ConfigError
    from ajet_tools.trace import queries
    from ajet_tools.trace.decoding import decoder

    @cache
    def find(run_id: str | None) -> Decode | None:
        try:
            return decoder(reader, run_id or queries.find_run(reader, None))
        except ConfigError as error:
            typer.echo(f"Causes that only the text tells are `unknown`: {error}", err=True)
            return None

    return find


def _merged(
    reader: TraceReader, ids: Sequence[str], decoders: Callable[[str | None], Decode | None]
) -> tuple[list[dict[str, Any]], int, int]:
    """The splits of the episodes, and how many timelines and sampled tokens they have."""
    from ajet_sdk.timelines import merge
    from ajet_sdk.trace.reader import calls_of, episodes

    found: list[dict[str, Any]] = []
    timelines = sampled = 0
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        whole: Iterable[Episode] = episodes(reader, episode_ids=chunk, superseded=True)
        known = {e.episode_id: e for e in whole}
        for episode_id in chunk:
            ended = known.get(episode_id)
            calls = ended.calls if ended else calls_of(reader, episode_id)
            merged = merge(calls)
            if any(split.cause == "unknown" for split in merged.splits):
                decode = decoders(ended.run_id if ended else None)
                merged = merge(calls, decode) if decode else merged
            timelines += len(merged.timelines)
            sampled += sum(int(t.loss_mask.sum()) for t in merged.timelines)
            found += [{"episode_id": episode_id, **split.model_dump(mode="json")} for split in merged.splits]
    return found, timelines, sampled


def _by_cause(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    causes: dict[str, dict[str, Any]] = {}
    for row in found:
        entry = causes.setdefault(row["cause"], {"cause": row["cause"], "splits": 0, "extra_tokens": 0, "hint": ""})
        entry["splits"] += 1
        entry["extra_tokens"] += row["extra_tokens"]
        entry["hint"] = entry["hint"] or row["hint"]
    return sorted(causes.values(), key=lambda entry: -entry["extra_tokens"])


def _short(id: str | None) -> str | None:
    return id[:12] if id else id
