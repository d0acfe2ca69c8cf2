"""`ajet trace view`: browses a trace in the terminal or in a browser."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ajet_sdk.errors import TraceError, TraceVersionError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.trace.options import OfRun, Where
from ajet_tools.cli.viewer import check_terminal, load_viewer
from ajet_tools.trace import queries
from ajet_tools.trace.locate import Named, open_named

_PATIENCE = 60.0


def view(
    run: OfRun = None,
    path: Where = None,
    tokenizer: Annotated[Path | None, Option(metavar="PATH")] = None,
    web: Annotated[
        bool, Option("--web", help="Serve the viewer to a browser on this machine, until Ctrl-C.")
    ] = False,
    port: Annotated[int, Option(min=0, max=65535, help="Port of --web; 0 takes a free one.")] = 0,
    until_eof: Annotated[bool, Option("--until-eof", hidden=True)] = False,
) -> None:
    """Browse a trace in the terminal: runs, curves, episodes, tokens; also during a run.

    Press ? for a screen's keys, escape to go back, ctrl+p for commands. `--web` prints a URL that
    holds a token: whoever has it can read the trace. On another machine, forward the port: ssh -L
    8000:127.0.0.1:8000 HOST.

    Args:
        tokenizer: Tokenizer directory for showing tokens. Default: that of the run's model.

    \b
    ajet trace view
    ajet trace view launcher_record/math
    ajet trace view 3f2a91
    ajet trace view launcher_record/math --web --port 8000
    """
    if web:
        _serve(run, path, tokenizer, port, until_eof)
        return
    served = "TEXTUAL_DRIVER" in os.environ  # as textual-serve sets it
    if not served:
        check_terminal(
            "ajet trace view",
            "use `ajet trace ls` and `ajet trace show`, or open it in a browser with `ajet trace"
            " view --web`",
        )
    app_module = load_viewer("trace.app")
    reader, where, named = _when_there(run, path) if served else open_named(run, path)
    with reader:
        run_id = None if named is None else queries.find_run(reader, named)
        viewer = app_module.TraceApp(reader, where, run_id)
        viewer.tokenizer = tokenizer
        if served:
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


def _when_there(run: str | None, path: Path | None) -> Named:
    """Opens the trace, and waits for a run that has not written yet."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return open_named(run, path)
        except TraceVersionError:
            raise
        except TraceError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _serve(
    run: str | None, path: Path | None, tokenizer: Path | None, port: int, until_eof: bool
) -> None:
    serve = load_viewer("web").serve
    arguments = ["trace", "view"]
    if tokenizer:
        arguments += ["--tokenizer", str(tokenizer.absolute())]
    if run:
        arguments += ["--", run, *([] if path is None else [str(path)])]
    if until_eof:  # a run starts the viewer before it writes its trace
        serve(arguments, port, echo, until_eof=True)
        return
    reader, _, named = open_named(run, path)
    with reader:
        if named:
            queries.find_run(reader, named)
    serve(
        arguments,
        port,
        lambda url: echo(f"Serving the trace at {url}\nPress Ctrl-C to stop."),
    )
