"""`ajet serve`: a checkpoint as an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ajet_sdk.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    checkpoint: Annotated[str, typer.Argument(help="A Hugging Face checkpoint: a directory or a hub name.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: a free one, which is printed.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name; without it the directory's.")] = None,
    api_key_env: Annotated[
        str, typer.Option(help="The variable with the key that clients must send; needed where others can connect.")
    ] = "AJET_SERVE_KEY",
    trace: Annotated[Path | None, typer.Option(help="Record every call in this trace file.")] = None,
) -> None:
    """Serve a checkpoint as an OpenAI-compatible endpoint, until Ctrl-C.

    \b
    ajet serve CHECKPOINT --trace served.duckdb
    ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --base-url http://127.0.0.1:8000/v1 --model NAME
    """
    from ajet_sdk import run

    try:
        run.serve(checkpoint, host=host, port=port, name=name, trace=trace, api_key=os.environ.get(api_key_env))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
