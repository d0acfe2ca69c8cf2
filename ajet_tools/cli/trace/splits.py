"""`ajet trace splits`: where calls did not merge, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import echo
from ajet_sdk.reporting.progress_bar import ProgressBar
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Episode, Split
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.cli.trace.options import Fitting, Newest, NoPager, OfRun, WhereOrRun
from ajet_tools.text import tables as render
from ajet_tools.text.tables import paged
from ajet_tools.trace import queries
from ajet_tools.trace.decoding import Vocabulary, vocabulary
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.filters import parse

app = typer.Typer(add_completion=False)

_CHUNK = 100
_WORST = 20


@app.command()
def splits(
    path: WhereOrRun = None,
    run: OfRun = None,
    episode: Annotated[
        str | None, typer.Option("--episode", metavar="ID", help="Only this episode, by a unique prefix of its id.")
    ] = None,
    filter: Fitting = None,
    limit: Newest = None,
    no_pager: NoPager = False,
    as_json: AsJson = False,
) -> None:
    """Show where calls did not merge into one timeline: the token, the cause and the cost.

    \b
    ajet trace splits
    ajet trace splits --episode 3f2a91
    ajet trace splits -f 'agent=werewolf step>10'
    """
    fits = parse(filter) if filter else None
    reader, where, run = open_named(run, path)
    with reader:
        ids: Sequence[str] = (
            [queries.find(reader, episode, "episode").id]
            if episode
            else queries.episode_ids(reader, queries.find_run(reader, run), filter=fits)
        )
        ids, of = ids[:limit], len(ids)
        splits, timelines, sampled = _merged(reader, ids, _readings(reader, where))
    causes = _by_cause([split for _, split in splits])
    if as_json:
        rows = [{"episode_id": episode_id, **split.model_dump(mode="json")} for episode_id, split in splits]
        print_json({"episodes": len(ids), "of": of, "timelines": timelines, "causes": causes, "splits": rows})
        return
    with paged(no_pager) as out:
        counts = ((len(ids), "episode"), (timelines, "timeline"), (sampled, "sampled token"), (len(splits), "split"))
        out.print(", ".join(render.counted(count, noun) for count, noun in counts))
        if len(ids) < of:
            out.print(f"newest {len(ids):,} of {render.counted(of, 'episode')}; the others were not examined")
        if causes:
            out.print(render.table(causes, out.width, title="\nby cause"))
            worst = sorted(splits, key=lambda pair: -pair[1].extra_tokens)[:_WORST]
            shown = [_shown(episode_id, split) for episode_id, split in worst]
            of_all = f", {len(shown)} of {len(splits):,}; --json lists all" if len(shown) < len(splits) else ""
            out.print(render.table(shown, out.width, title=f"\nmost expensive{of_all}"))


def _shown(episode_id: str, split: Split) -> dict[str, object]:
    ids = {"episode_id": episode_id, "call_id": split.call_id, "parent_call_id": split.parent_call_id}
    short = {name: id and id[:12] for name, id in ids.items()}
    return {**short, **pick(split, "at_token", "extra_tokens", "cause", "hint")}


def _readings(reader: TraceReader, trace: Path) -> Callable[[str | None], Vocabulary | None]:
    """Maps a run's id to its tokenizer; None, with one warning on stderr, if that can't be loaded."""

    @cache
    def find(run_id: str | None) -> Vocabulary | None:
        try:
            return vocabulary(reader, run_id or queries.find_run(reader, None), trace=trace)
        except ConfigError as error:
            echo(f"Causes are guessed from what changed in the requests, else `unknown`: {error}", err=True)
            return None

    return find


def _merged(
    reader: TraceReader, ids: Sequence[str], readings: Callable[[str | None], Vocabulary | None]
) -> tuple[list[tuple[str, Split]], int, int]:
    """The splits by episode, and how many timelines and sampled tokens these have."""
    splits: list[tuple[str, Split]] = []
    timelines = sampled = 0
    with ProgressBar("merging episodes", len(ids)) as bar:
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            whole: Iterable[Episode] = episodes(reader, episode_ids=chunk, superseded=True)
            known = {e.episode_id: e for e in whole}
            for episode_id in chunk:
                ended = known.get(episode_id)
                calls = ended.calls if ended else calls_of(reader, episode_id)
                merged = merge(calls)
                if merged.splits:
                    reading = readings(ended.run_id if ended else None)
                    merged = merge(calls, reading.decode, reading.template) if reading else merged
                timelines += len(merged.timelines)
                sampled += sum(int(t.loss_mask.sum()) for t in merged.timelines)
                splits += [(episode_id, split) for split in merged.splits]
            bar.advance(len(chunk))
    return splits, timelines, sampled


class _Cause(TypedDict):
    cause: str
    splits: int
    extra_tokens: int
    hint: str


def _by_cause(splits: Sequence[Split]) -> list[_Cause]:
    """Totals by cause and hint: the causes `several` and `unknown` are told apart by their hints."""
    causes: dict[tuple[str, str], _Cause] = {}
    for split in splits:
        initial = _Cause(cause=split.cause, splits=0, extra_tokens=0, hint=split.hint)
        entry = causes.setdefault((split.cause, split.hint), initial)
        entry["splits"] += 1
        entry["extra_tokens"] += split.extra_tokens
    return sorted(causes.values(), key=lambda entry: -entry["extra_tokens"])
