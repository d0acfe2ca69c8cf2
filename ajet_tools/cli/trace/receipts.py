"""`ajet trace receipts`: what became of the tokens of each client of a swarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.cli.result import HIDDEN, Result
from ajet_tools.cli.trace.options import OfRun
from ajet_tools.text import tables as render
from ajet_tools.trace import queries
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.receipts import (
    TokenReceipt,
    by_call,
    by_client,
    by_episode,
    client_rows,
    part_rows,
)


@dataclass(frozen=True)
class ReceiptsResult(Result):
    run_id: str
    receipts: Sequence[TokenReceipt]
    of_clients: bool = field(default=True, metadata=HIDDEN)

    paged = True

    def show(self, out: Console) -> None:
        if self.of_clients:
            rows = client_rows(self.receipts)
        else:
            rows = part_rows(self.receipts)
        out.print(render.table(rows, out.width) if rows else "no tokens were sampled")


def receipts(
    of: Annotated[
        str | None,
        Argument(metavar="CLIENT|EPISODE", show_default=False, help="Default: all clients."),
    ] = None,
    run: OfRun = None,
) -> ReceiptsResult:
    """Show what became of each client's tokens: trained, stale, abandoned, or why else not.

    The sums over the clients are the run's ledger. `pending`: the step is not trained yet.

    \b
    ajet trace receipts
    ajet trace receipts "laptop of Ada"
    ajet trace receipts 3f2a91 --json
    """
    if of is not None and run is None and Path(of).exists():  # the run alone
        run = of
        of = None
    reader, _, named = open_named(run)
    with reader, reader.steady():
        run_id = queries.find_run(reader, named)
        of_run = reader.of_run(run_id)
        clients = by_client(of_run, run_id)
        shown = clients
        if of is not None and of in {client.name for client in clients}:
            shown = by_episode(of_run, run_id, of)
        elif of is not None:
            shown = by_call(of_run, run_id, _episode(of_run, of, clients))
    return ReceiptsResult(run_id, shown, of_clients=shown is clients)


def _episode(reader: TraceReader, of: str, clients: Sequence[TokenReceipt]) -> str:
    try:
        return queries.find(reader, of, "episode").id
    except QueryError as error:
        names = ", ".join(client.name for client in clients) or "none"
        raise QueryError(f"{of!r} is neither a client ({names}) nor an episode") from error
