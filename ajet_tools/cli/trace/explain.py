"""`ajet trace explain`: what changed at a step of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from typer import Argument, Option

from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.trace.options import NoPager, Where
from ajet_tools.text.tables import paged
from ajet_tools.trace import queries
from ajet_tools.trace.compare.explain import explain, lines_of
from ajet_tools.trace.locate import open_named

app = typer.Typer(add_completion=False)


@app.command(name="explain")
def explain_(
    run: Annotated[str, Argument(metavar="RUN", help="A run, by its id, name or path.")],
    path: Where = None,
    step: Annotated[
        int | None, Option(min=0, help="Default: the step with the largest change of reward.", show_default=False)
    ] = None,
    no_pager: NoPager = False,
    as_json: AsJson = False,
) -> None:
    """Say what changed at a step of a run, against the step or validation before, with the episodes behind it.

    Tasks that fell and rose, and where their attempts part; groups without signal, failures, splits, length, tool
    calls, entropy, KL, signs that the judge is gamed, what the advantages pushed up and down. What did not change is
    left out.

    \b
    ajet trace explain launcher_record/math
    ajet trace explain launcher_record/math --step 20
    ajet trace explain 9d1c launcher_record --json
    """
    reader, where, meant = open_named(run, path)
    with reader:
        explanation = explain(reader, queries.find_run(reader, meant), step, where)
    if as_json:
        print_json(asdict(explanation))
        return
    with paged(no_pager) as out:
        for line in lines_of(explanation):
            out.print(line, soft_wrap=True)
