"""`ajet trace view`: browses a trace in the terminal or in a browser."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import typer
from typer import Argument, Option

from ajet_sdk.errors import ConfigError, TraceError, TraceVersionError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.trace.options import RUN_HELP
from ajet_tools.cli.viewer import check_terminal, load_viewer
from ajet_tools.trace import queries
from ajet_tools.trace.locate import Named, open_named

_PATIENCE = 60.0
_PLAIN = "+:.,=<>!~()'*"
"""Characters not to percent-encode in a screen's address."""


def view(
    target: Annotated[
        str | None, Argument(metavar="PATH", help=RUN_HELP, show_default=False)
    ] = None,
    run: Annotated[
        str | None, Option(metavar="RUN", help="Start with this run, by its id or name.")
    ] = None,
    tokenizer: Annotated[Path | None, Option(metavar="PATH")] = None,
    web: Annotated[
        bool, Option("--web", help="Serve the viewer to a browser on this machine, until Ctrl-C.")
    ] = False,
    port: Annotated[int, Option(min=0, max=65535, help="Port of --web; 0 takes a free one.")] = 0,
    tokens: Annotated[Path | None, Option(metavar="FILE")] = None,
    url: Annotated[str | None, Option(metavar="URL")] = None,
    served: Annotated[bool, Option("--served", hidden=True)] = False,
    at: Annotated[str | None, Option(hidden=True)] = None,
    read_only: Annotated[bool, Option("--read-only", hidden=True)] = False,
    until_eof: Annotated[bool, Option("--until-eof", hidden=True)] = False,
) -> None:
    """Browse a trace in the terminal: runs, curves, episodes, tokens, SQL; also during a run.

    Press ? for a screen's keys, escape to go back, ctrl+p for commands. `--web` prints a URL that
    holds a token: whoever has it can read the trace. On another machine, forward the port: ssh -L
    8000:127.0.0.1:8000 HOST.

    Args:
        tokenizer: Tokenizer directory for showing tokens. Default: that of the run's model.
        tokens: With --web: who may look, and only read: a line `name token` for each person, gone to lock out.
        url: With --web: the address of a proxy in front, https://HOST.

    \b
    ajet trace view
    ajet trace view launcher_record/math
    ajet trace view 3f2a91
    ajet trace view launcher_record/math --web --port 8000
    """
    if web:
        chosen = [
            *(["--run", run] if run else []),
            *(["--tokenizer", str(tokenizer.absolute())] if tokenizer else []),
        ]
        _serve(target, run, chosen, port, until_eof, tokens, url)
        return
    if tokens or url:
        raise ConfigError("--tokens and --url are for a viewer in a browser; add --web")
    if not served:
        check_terminal(
            "ajet trace view",
            "use `ajet trace ls` and `ajet trace show`, or open it in a browser with `ajet trace"
            " view --web`",
        )
    app_module = load_viewer("trace.app")

    reader, where, meant = _when_there(target, read_only) if served else open_named(target)
    with reader:
        wanted = run or meant
        run_id = None if wanted is None else queries.find_run(reader, wanted)
        viewer = app_module.TraceApp(reader, where, run_id)
        viewer.tokenizer = tokenizer
        viewer.first_address, viewer.read_only = at, read_only
        if served:
            viewer.set_address = lambda address: viewer.open_url(
                f"#{quote(address, safe=_PLAIN)}", new_tab=False
            )
            threading.Thread(
                target=_exit_with, args=(os.getppid(), viewer.exit), daemon=True
            ).start()
        viewer.run()
    raise typer.Exit(viewer.return_code or 0)


def _exit_with(server: int, leave: Callable[[], None]) -> None:
    """Ends the viewer when its server is gone; Textual doesn't end with its input."""
    while os.getppid() == server:
        time.sleep(1)
    leave()


def _when_there(target: str | None, read_only: bool) -> Named:
    """Opens the trace, and waits for a run that has not written yet."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return open_named(target, read_only=read_only)
        except TraceVersionError:
            raise
        except TraceError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _serve(
    target: str | None,
    run: str | None,
    chosen: list[str],
    port: int,
    until_eof: bool,
    tokens: Path | None,
    url: str | None,
) -> None:
    serve = load_viewer("web").serve
    if url is not None:
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.netloc
            or parts.path.strip("/")
            or "@" in parts.netloc
        ):
            raise ConfigError(
                f"--url {url} must be https://HOST without a path: the viewer uses the root of the"
                " host"
            )
        url = f"{parts.scheme}://{parts.netloc}"
    if not until_eof:  # a run starts the viewer before it writes its trace
        reader, _, meant = open_named(target)
        with reader:
            if run or meant:
                queries.find_run(reader, run or meant)
    arguments = ["trace", "view", "--served", *chosen, *(["--", target] if target else [])]
    if until_eof:
        serve(arguments, port, echo, until_eof=True)
        return
    who = f", read-only, with a token of {tokens}," if tokens else ""
    serve(
        arguments,
        port,
        lambda at: echo(f"Serving the trace{who} at {at}\nPress Ctrl-C to stop."),
        tokens=tokens,
        url=url,
    )
