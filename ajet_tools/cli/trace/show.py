"""`ajet trace show`: shows a run, an episode or a call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from typer import Argument, Option

from ajet_sdk.dialects.message_parts import without_pictures
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_sdk.types import Call
from ajet_tools.cli.options import pick
from ajet_tools.cli.result import Result
from ajet_tools.cli.trace.options import Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import counted, one_line
from ajet_tools.trace import queries
from ajet_tools.trace.episode.blocks import (
    Block,
    branch_title,
    call_blocks,
    conversation_blocks,
    overview_blocks,
)
from ajet_tools.trace.episode.overview import EpisodeOverview, read_overview, summarize
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.records import Record, records_of
from ajet_tools.trace.queries.runs import RunOverview

_FIRST = 10
_LAST = 30
"""Calls of a long conversation to show, at its start and end."""
_SPOKEN = ("messages", "input", "prompt", "system", "instructions")
"""Parts of a request that are shown as messages."""
_LONGEST = 4000
"""Maximum characters of a message to show."""


@dataclass(frozen=True)
class RunResult(Result):
    run: RunOverview
    metrics: Sequence[Mapping[str, Any]]
    """The last value of each."""
    ledger: Sequence[Mapping[str, Any]]

    paged = True

    def document(self) -> object:
        return {**self.run, "metrics": self.metrics, "ledger": self.ledger}

    def show(self, out: Console) -> None:
        curves = ("causes", "rewards", "reward_of")
        out.print(render.fields((n, value) for n, value in self.run.items() if n not in curves))
        if self.metrics:
            out.print(render.table(self.metrics, out.width, title="\nmetrics, last value"))
        if self.ledger:
            out.print(render.table(self.ledger, out.width, title="\nledger"))


@dataclass(frozen=True)
class EpisodeResult(Result):
    record: Record
    overview: EpisodeOverview
    full: bool

    paged = True

    def document(self) -> object:
        episode = self.record.episode
        place = {call.call_id: number for number, call in enumerate(episode.calls)}
        entries = sorted(
            self.record.ledger,
            key=lambda entry: (place.get(entry.call_id, len(place)), entry.outcome),
        )
        ledger = [pick(entry, "call_id", "outcome", "tokens") for entry in entries]
        document = episode.model_dump(mode="json") | {"reward": episode.reward, "ledger": ledger}
        if not self.record.ended:
            document |= {"run_id": "", "status": None, "ended_at": None}
        return document

    def show(self, out: Console) -> None:
        _print_episode(self.overview, out, self.full)


@dataclass(frozen=True)
class CallResult(Result):
    call: Call
    outcomes: Sequence[str]
    """Outcomes of its tokens in the ledger, with their numbers."""
    overview: EpisodeOverview
    full: bool

    paged = True

    def document(self) -> object:
        times = pick(self.call, "started_at", "ended_at")
        return {**self.call.model_dump(mode="json"), **times, "ledger": self.outcomes or None}

    def show(self, out: Console) -> None:
        _print_call(self.call, self.outcomes, out, self.full)
        _print_blocks(out, call_blocks(self.overview, self.call.call_id), self.full)


def show(
    id: Annotated[
        str,
        Argument(metavar="ID", help="A run, an episode or a call, by a unique prefix of its id."),
    ],
    path: Where = None,
    full: Annotated[bool, Option("--full", help="Show every call and message in full.")] = False,
) -> RunResult | EpisodeResult | CallResult:
    """Show an episode's conversation, rewards and ledger, a whole call, or a run with its metrics.

    Long episodes show their first and last calls, long messages their beginning; --full shows
    everything.

    \b
    ajet trace show 3f2a91
    ajet trace show 3f2a91 launcher_record/math --json
    ajet trace show 3f2a91 --full | grep calculator
    """
    reader, _, meant = open_named(id, path)
    with reader, reader.steady():
        target = queries.find(reader, meant or queries.find_run(reader, None))
        if target.kind == "run":
            return _run(reader.of_run(target.id), target.id)
        if target.kind == "episode":
            [record] = records_of(reader, [target.id], whole=True)
            return EpisodeResult(record, read_overview(reader, target.id), full)
        return _call(reader, target.id, full)


def _run(reader: TraceReader, run_id: str) -> RunResult:
    [run] = queries.overview(reader, run_id)
    metrics = queries.metrics(reader, run_id)
    return RunResult(run, metrics, queries.ledger_totals(reader, run_id))


def _call(reader: TraceReader, call_id: str, full: bool) -> CallResult:
    episode_id = queries.episode_of_call(reader, call_id)
    [record] = records_of(reader, [episode_id], whole=True)
    [call] = [call for call in record.episode.calls if call.call_id == call_id]
    entries = [entry for entry in record.ledger if entry.call_id == call_id]
    outcomes = [f"{entry.outcome}: {entry.tokens}" for entry in entries]
    return CallResult(call, outcomes, read_overview(reader, episode_id), full)


def _print_episode(overview: EpisodeOverview, out: Console, full: bool) -> None:
    """Prints an episode as the viewer does, without repeated messages."""
    out.print(summarize(overview))
    _print_blocks(out, overview_blocks(overview), full)
    printed: set[tuple[str, str]] = set()
    for number, branch in enumerate(overview.tree.branches):
        if len(overview.tree.branches) > 1:
            out.print(Rule(Text(visible(branch_title(branch))), align="left"))
        blocks = list(_new_blocks(conversation_blocks(overview, number), printed))
        printed.update((block.title, block.text) for block in blocks)
        cut: Sequence[str] = ()
        if not full and len(branch.chain) > _FIRST + _LAST:
            cut = branch.chain[_FIRST:-_LAST]
        last = next(
            (n for n, block in enumerate(blocks) if cut and block.call_id in branch.chain[-_LAST:]),
            0,
        )
        # what the first calls have of the cut ones, such as forks, stays
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


def _print_call(call: Call, outcomes: Sequence[str], out: Console, full: bool) -> None:
    sent = {name: value for name, value in call.request.items() if name not in _SPOKEN}
    request = without_pictures(sent)
    if call.logprobs is None or not len(call.logprobs):
        logprob = None
    else:
        logprob = float(call.logprobs.sum())
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
                ("ledger", ", ".join(outcomes)),
            ]
        )
    )
