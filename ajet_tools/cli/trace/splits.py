"""`ajet trace splits`: shows where calls did not merge, and the cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from typer import Option

from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.types import Split
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.cli.trace.options import Fitting, Newest, NoPager, OfRun, WhereOrRun
from ajet_tools.text import tables as render
from ajet_tools.text.tables import paged
from ajet_tools.trace import queries
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.splits import by_cause, splits_of

_WORST = 20


def splits(
    path: WhereOrRun = None,
    run: OfRun = None,
    episode: Annotated[
        str | None, Option(metavar="ID", help="Only this episode, by a prefix of its id.")
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
        with ProgressBar("merging episodes", len(ids)) as bar:
            splits, timelines, sampled = splits_of(reader, ids, where, bar.advance)
    causes = by_cause([split for _, split in splits])
    if as_json:
        rows = [
            {"episode_id": episode_id, **split.model_dump(mode="json")}
            for episode_id, split in splits
        ]
        print_json(
            {
                "episodes": len(ids),
                "of": of,
                "timelines": timelines,
                "causes": causes,
                "splits": rows,
            }
        )
        return
    with paged(no_pager) as out:
        counts = (
            (len(ids), "episode"),
            (timelines, "timeline"),
            (sampled, "sampled token"),
            (len(splits), "split"),
        )
        out.print(", ".join(render.counted(count, noun) for count, noun in counts))
        if len(ids) < of:
            out.print(
                f"newest {len(ids):,} of {render.counted(of, 'episode')}; the others were not"
                " examined"
            )
        if causes:
            out.print(render.table(causes, out.width, title="\nby cause"))
            worst = sorted(splits, key=lambda pair: -pair[1].extra_tokens)[:_WORST]
            shown = [_shown(episode_id, split) for episode_id, split in worst]
            of_all = (
                f", {len(shown)} of {len(splits):,}; --json lists all"
                if len(shown) < len(splits)
                else ""
            )
            out.print(render.table(shown, out.width, title=f"\nmost expensive{of_all}"))


def _shown(episode_id: str, split: Split) -> dict[str, object]:
    ids = {
        "episode_id": episode_id,
        "call_id": split.call_id,
        "parent_call_id": split.parent_call_id,
    }
    short = {name: id and id[:12] for name, id in ids.items()}
    return {**short, **pick(split, "at_token", "extra_tokens", "cause", "hint")}
