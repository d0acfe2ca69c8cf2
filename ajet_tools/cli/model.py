"""`ajet model`: fetches models as local checkpoints, and lists models with a short name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from ajet_sdk.config.model_source import NAMED_MODELS
from ajet_sdk.engines.fetch import fetch_model, fetched
from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.options import expand_options
from ajet_tools.cli.result import Result, TextResult
from ajet_tools.text.tables import table

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def model() -> None:
    """Fetch models to train.

    \b
    ajet model list
    ajet model fetch smollm2-135m
    """


@dataclass(frozen=True)
class FetchedModel(TextResult):
    model: str
    path: Path

    def lines(self) -> list[str]:
        return [str(self.path)]


@dataclass(frozen=True)
class ListedModel:
    name: str
    licence: str
    parameters: int
    """In millions."""
    megabytes: int
    source: str
    fetched: Path | None


@dataclass(frozen=True)
class ModelList(Result):
    models: list[ListedModel]

    def document(self) -> object:
        return self.models

    def show(self, out: Console) -> None:
        rows: list[dict[str, object]] = []
        for model in self.models:
            row: dict[str, object] = {"name": model.name, "licence": model.licence}
            row["parameters"] = f"{model.parameters:,}M"
            row["download"] = f"{model.megabytes:,} MB"
            row |= {"source": model.source, "fetched": str(model.fetched or "")}
            rows.append(row)
        out.print(table(rows, out.width))


@app.command()
@expand_options
def fetch(
    source: Annotated[str, Argument(metavar="NAME|FILE|DIRECTORY")],
    out: Annotated[
        Path | None, Option("--out", "-o", help="Directory to create. Default: in the cache.")
    ] = None,
) -> FetchedModel:
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
    with ProgressBar("Fetching", lines=True) as bar:
        return FetchedModel(source, fetch_model(source, out, bar.show))


@app.command("list")
@expand_options
def list_models() -> ModelList:
    """List models with a short name, and their local directories.

    \b
    ajet model list
    ajet model list --json
    """
    models: list[ListedModel] = []
    for model in NAMED_MODELS.values():
        listed = ListedModel(
            name=model.name,
            licence=model.licence,
            parameters=model.parameters,
            megabytes=model.megabytes,
            source=model.source,
            fetched=fetched(model),
        )
        models.append(listed)
    return ModelList(models)
