"""`ajet model`: fetches models as local checkpoints, and lists models with a short name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ajet_sdk.config.model_source import NAMED_MODELS
from ajet_sdk.engines.fetch import fetch_model, fetched
from ajet_sdk.reporting.output import ProgressBar, echo
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.text.tables import console, table

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def model() -> None:
    """Fetch models to train.

    \b
    ajet model list
    ajet model fetch smollm2-135m
    """


@app.command()
def fetch(
    source: Annotated[str, Argument(metavar="NAME|FILE|DIRECTORY")],
    out: Annotated[
        Path | None, Option("--out", "-o", help="Directory to create. Default: in the cache.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model and print its checkpoint directory; a model that exists is not fetched again.

    A GGUF file is converted to float32 weights, and its tokenizer and chat template to files of
    transformers. Downloads are verified by their checksum. `ajet train --model NAME` fetches
    automatically.

    Args:
        source: A name of `ajet model list`, a Hugging Face name (owner/name), a GGUF file, or a directory.

    \b
    ajet model fetch smollm2-135m
    ajet model fetch Qwen/Qwen2.5-0.5B-Instruct
    ajet model fetch ./model.Q4_K_M.gguf --out ./model
    """
    with ProgressBar("Fetching", quiet=as_json, lines=True) as bar:
        place = fetch_model(source, out, bar.show)
    if as_json:
        print_json({"model": source, "path": str(place)})
    else:
        echo(str(place))


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List models with a short name, and their local directories.

    \b
    ajet model list
    ajet model list --json
    """
    rows = [
        {
            **pick(model, "name", "licence"),
            "parameters": f"{model.parameters:,}M",
            "download": f"{model.megabytes:,} MB",
            "source": model.source,
            "fetched": str(fetched(model) or ""),
        }
        for model in NAMED_MODELS.values()
    ]
    if as_json:
        whole = ("name", "licence", "parameters", "megabytes", "source")
        print_json([{**pick(m, *whole), "fetched": fetched(m)} for m in NAMED_MODELS.values()])
    else:
        out = console()
        out.print(table(rows, out.width))
