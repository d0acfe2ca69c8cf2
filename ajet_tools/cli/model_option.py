"""The options `--model` and `--budget` of commands that ask a model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from typer import Option

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.engines.budget import Budget, Price
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_tools.cli.model_name import ModelName
from ajet_tools.dataset.model.open import open_endpoint

MODEL_HELP = (
    "NAME@URL (an OpenAI-compatible endpoint; its key is OPENAI_API_KEY), NAME at OPENAI_BASE_URL,"
    " PATH (a checkpoint), or FILE.py:NAME (a function that replies)."
)
ModelNamed = Annotated[
    str | None,
    Option(
        "--model",
        metavar="NAME@URL|PATH|FILE:NAME",
        envvar="OPENAI_MODEL",
        help=MODEL_HELP,
        show_default=False,
    ),
]
_BUDGET_HELP = (
    "Limits of the model's calls: calls=N, tokens=N, cost=X with price=IN/OUT per million tokens,"
    " rpm=N, concurrency=N, retries=N; separated by commas."
)
Budgeted = Annotated[str | None, Option("--budget", metavar="KEY=N,...", help=_BUDGET_HELP)]

_LIMITS = ("calls", "tokens", "cost", "price", "rpm", "concurrency", "retries")


def open_model(model: str | None, budget: str | None, cache: Path) -> ModelClient:
    """Opens the model that `--model` names, with the limits of `--budget`. Raises ConfigError."""
    if not model:
        raise ConfigError("no model given: pass --model NAME@URL, --model PATH or FILE.py:NAME")
    named = ModelName.parse(model)
    is_local = named.scripted is not None or Path(named.name).is_dir()
    base_url = named.base_url or (None if is_local else os.environ.get("OPENAI_BASE_URL"))
    if not is_local and base_url is None:
        raise ConfigError(
            f"--model {model}: there is no directory of that name; for a model behind an endpoint"
            f" write {model}@https://HOST/v1"
        )
    limits = _limits(budget or "")
    price = Price.parse(limits["price"].replace("/", ",")) if "price" in limits else None
    return open_endpoint(
        base_url,
        named.name,
        api_key("OPENAI_API_KEY"),
        scripted=named.scripted,
        concurrency=_integer(limits, "concurrency") or 16,
        per_minute=_number(limits, "rpm"),
        retries=4 if "retries" not in limits else int(limits["retries"]),
        cache=cache,
        budget=Budget(
            calls=_integer(limits, "calls"),
            tokens=_integer(limits, "tokens"),
            money=_number(limits, "cost"),
            price=price,
        ),
    )


def _limits(text: str) -> dict[str, str]:
    limits: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        is_price = key == "price" and re.fullmatch(r"[\d.]+/[\d.]+", value)
        is_number = key != "price" and re.fullmatch(r"\d+(\.\d+)?(e\d+)?", value)
        if key not in _LIMITS or not (is_price or is_number):
            raise ConfigError(
                f"--budget {part}: write KEY=NUMBER, such as calls=500,cost=5,price=0.15/0.60; keys:"
                f" {', '.join(_LIMITS)}"
            )
        limits[key] = value
    return limits


def _number(limits: dict[str, str], key: str) -> float | None:
    return float(limits[key]) if key in limits else None


def _integer(limits: dict[str, str], key: str) -> int | None:
    return int(float(limits[key])) if key in limits else None
