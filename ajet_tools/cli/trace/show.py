"""`ajet trace show`: shows a run, an episode or a call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Annotated

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from typer import Argument, Option

from ajet_sdk.dialects.message_parts import without_pictures
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_sdk.types import Call
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.trace.options import Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import counted, one_line
from ajet_tools.text.tables import paged
from ajet_tools.trace import queries
from ajet_tools.trace.episode.blocks import (
    Block,
    branch_title,
    call_blocks,
    conversation_blocks,
    overview_blocks,
)
from ajet_tools.trace.episode.overview import read_overview, summarize
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.records import records_of
from ajet_tools.trace.queries.runs import RunOverview

_FIRST, _LAST = 10, 30
"""Calls of a long conversation to show, at its start and end."""
_SPOKEN = ("messages", "input", "prompt", "system", "instructions")
"""Parts of a request that are shown as messages."""
_LONGEST = 4000
"""Maximum characters of a message to show."""


def show(
    id: Annotated[
        str,
        Argument(metavar="ID", help="A run, an episode or a call, by a unique prefix of its id."),
    ],
    path: Where = None,
    full: Annotated[bool, Option("--full", help="Show every call and message in full.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show an episode's conversation, rewards and ledger, a whole call, or a run with its metrics.

    Long episodes show their first and last calls, long messages their beginning; --full shows
    everything.

    \b
    ajet trace show 3f2a91
    ajet trace show 3f2a91 launcher_record/math --json
    ajet trace show 3f2a91 --full | grep calculator
    """
    reader, _, meant = open_named(id, path)
    # The files are closed again before a pager shows what was read.
    with paged() as out, reader, reader.steady():
        target = queries.find(reader, meant or queries.find_run(reader, None))
        if as_json:
            print_json(
                {"run": _run_json, "episode": _episode_json, "call": _call_json}[target.kind](
                    reader, target.id
                )
            )
            return
        show = {"run": _show_run, "episode": _show_episode, "call": _show_call}[target.kind]
        show(reader, target.id, out, full)


def _run_row(reader: TraceReader, run_id: str) -> RunOverview:
    return queries.overview(reader, run_id)[0]


def _run_json(reader: TraceReader, run_id: str) -> Mapping[str, object]:
    reader = reader.of_run(run_id)
    metrics, totals = queries.metrics(reader, run_id), queries.ledger_totals(reader, run_id)
    return {**_run_row(reader, run_id), "metrics": metrics, "ledger": totals}


def _show_run(reader: TraceReader, run_id: str, out: Console, full: bool) -> None:
    reader = reader.of_run(run_id)
    row = _run_row(reader, run_id)
    out.print(
        render.fields(
            (name, value)
            for name, value in row.items()
            if name not in ("causes", "rewards", "reward_of")
        )
    )
    metrics, totals = queries.metrics(reader, run_id), queries.ledger_totals(reader, run_id)
    if metrics:
        out.print(render.table(metrics, out.width, title="\nmetrics, last value"))
    if totals:
        out.print(render.table(totals, out.width, title="\nledger"))


def _episode_json(reader: TraceReader, episode_id: str) -> Mapping[str, object]:
    [record] = records_of(reader, [episode_id], whole=True)
    episode, place = (
        record.episode,
        {call.call_id: i for i, call in enumerate(record.episode.calls)},
    )
    unended = {} if record.ended else {"run_id": "", "status": None, "ended_at": None}
    booked = sorted(
        record.ledger, key=lambda entry: (place.get(entry.call_id, len(place)), entry.outcome)
    )
    ledger = [{"call_id": e.call_id, "outcome": e.outcome, "tokens": e.tokens} for e in booked]
    return {
        **episode.model_dump(mode="json"),
        **unended,
        "reward": episode.reward,
        "ledger": ledger,
    }


def _show_episode(reader: TraceReader, episode_id: str, out: Console, full: bool) -> None:
    """Prints an episode as the viewer does, without repeated messages."""
    overview = read_overview(reader, episode_id)
    out.print(summarize(overview))
    _print_blocks(out, overview_blocks(overview), full)
    printed: set[tuple[str, str]] = set()
    for number, branch in enumerate(overview.tree.branches):
        if len(overview.tree.branches) > 1:
            out.print(Rule(Text(visible(branch_title(branch))), align="left"))
        blocks = list(_new_blocks(conversation_blocks(overview, number), printed))
        printed.update((block.title, block.text) for block in blocks)
        cut = branch.chain[_FIRST:-_LAST] if not full and len(branch.chain) > _FIRST + _LAST else ()
        last = next(
            (n for n, block in enumerate(blocks) if cut and block.call_id in branch.chain[-_LAST:]),
            0,
        )
        _print_blocks(out, (block for block in blocks[:last] if block.call_id not in cut), full)
        if cut:
            out.print(
                f"{counted(len(cut), 'call')} left out here; --full shows all\n", style="yellow"
            )
        _print_blocks(out, blocks[last:], full)


def _new_blocks(blocks: Iterable[Block], printed: Set[tuple[str, str]]) -> Iterator[Block]:
    """Skips messages at the beginning of a conversation that were printed before."""
    begins = True
    for block in blocks:
        begins = (
            begins
            and not block.facts
            and (block.message is None or (block.title, block.text) in printed)
        )
        if block.message is None or not begins:
            yield block


def _print_blocks(out: Console, blocks: Iterable[Block], full: bool) -> None:
    for block in blocks:
        most = None if full else _LONGEST
        out.print(block.render(markdown=False, unfolded=True, most=most, whole="--full shows all"))


def _call_record(reader: TraceReader, call_id: str) -> tuple[Call, list[str]]:
    [record] = records_of(reader, [queries.episode_of_call(reader, call_id)], whole=True)
    [call] = [call for call in record.episode.calls if call.call_id == call_id]
    return call, [
        f"{entry.outcome}: {entry.tokens}" for entry in record.ledger if entry.call_id == call_id
    ]


def _call_json(reader: TraceReader, call_id: str) -> Mapping[str, object]:
    call, booked = _call_record(reader, call_id)
    times = {"started_at": call.started_at, "ended_at": call.ended_at}
    return {**call.model_dump(mode="json"), **times, "ledger": booked or None}


def _show_call(reader: TraceReader, call_id: str, out: Console, full: bool) -> None:
    call, booked = _call_record(reader, call_id)
    sent = {name: value for name, value in call.request.items() if name not in _SPOKEN}
    request = without_pictures(sent)
    logprob = (
        None if call.logprobs is None or not len(call.logprobs) else float(call.logprobs.sum())
    )
    out.print(
        render.fields(
            [
                ("call", call.call_id),
                ("episode", call.episode_id),
                ("extends", call.parent_call_id),
                ("agent", " ".join(filter(None, (call.agent, call.target_tag)))),
                ("phase", call.phase),
                ("trainable", call.trainable),
                ("log-probability", None if logprob is None else f"{logprob:.4f} in all"),
                ("sampling", json.dumps(call.sampling, ensure_ascii=False)),
                (
                    "request",
                    (
                        json.dumps(request, ensure_ascii=False)
                        if full
                        else one_line(request, _LONGEST)
                    ),
                ),
                ("started", call.started_at),
                ("ended", call.ended_at),
                ("ledger", ", ".join(booked)),
            ]
        )
    )
    _print_blocks(out, call_blocks(read_overview(reader, call.episode_id), call_id), full)
