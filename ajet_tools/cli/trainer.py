"""`ajet trainer`: serves the learner to other machines and tools."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ajet_sdk.errors import MissingExtra
from ajet_tools.cli.arguments import Host, Port

app = typer.Typer(no_args_is_help=True, add_completion=False)
_SERVER = "ajet_sdk.trainer_service.server"
"""Imported on use, since it imports torch."""


@app.callback()
def trainer() -> None:
    """Serve the learner to clients of the Tinker API: a laptop, other tools.

    \b
    ajet trainer serve --model ./model
    """


@app.command()
def serve(
    model: Annotated[str, Option(show_default=False)],
    name: str | None = None,
    state: Path = Path("trainer_state"),
    host: Host = "127.0.0.1",
    port: Port = 8900,
    max_model_len: Annotated[int | None, Option(min=2)] = None,
    deterministic: Annotated[bool, Option("--deterministic")] = False,
) -> None:
    """Train and sample a base model for clients of the Tinker API, until Ctrl-C.

    Each training client has its own LoRA adapter on the shared base model. The official SDK,
    tinker-cookbook and other tools for the API work unmodified. Clients must send the key of
    AJET_TRAINER_KEY, if it is set; it begins with tml-. Needs the extras `local` and `tinker`, and
    Python 3.11 or later.

    Args:
        model: The base model: a directory, a short name (ajet model list), or a Hugging Face name.
        name: Name of the model for clients, from which they load its tokenizer. Default: as in --model.
        state: Directory of adapters, optimizers and checkpoints; a new server continues from it.
        max_model_len: Longest sequence in tokens. Default: the model's own.
        deterministic: Sample each call alone, and compute on one thread: the same requests give the same tokens and
            weights, to the bit. Slow.

    \b
    ajet trainer serve --model ./model
    ajet trainer serve --model Qwen/Qwen3-0.6B
    ssh -N -L 8900:127.0.0.1:8900 me@gpu-box                 # on the laptop, then
    TINKER_BASE_URL=http://127.0.0.1:8900 TINKER_API_KEY=tml-any python train.py
    """
    try:
        server = import_module(_SERVER)
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "local") from error
    server.serve_trainer(
        model,
        host,
        port,
        state=state,
        name=name,
        api_key=os.environ.get("AJET_TRAINER_KEY"),
        max_model_len=max_model_len,
        deterministic=deterministic,
    )
