"""The options `--model` and `--budget` of commands that ask a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Option

from ajet_sdk.engines.budget import Budget
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.model.open import ModelSpec

CONCURRENCY = 16
"""Concurrent requests to a model without this setting."""
MODEL_HELP = (
    "NAME@URL (an OpenAI-compatible endpoint; its key is OPENAI_API_KEY), NAME at OPENAI_BASE_URL,"
    " PATH (a checkpoint), or FILE.py:NAME (a function that replies); after commas price=IN/OUT of a"
    " million tokens, key=VARIABLE, concurrency=N, rpm=N, retries=N."
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
Budgeted = Annotated[
    str | None,
    Option(
        "--budget",
        metavar="KEY=N,...",
        help="Stop before more than this is spent: calls=500,tokens=2000000,usd=5.",
    ),
]


def open_model(model: str | None, budget: str | None, cache: Path) -> ModelClient:
    """Opens the model that `--model` names, with the limits of `--budget`. Raises ConfigError."""
    if not model:
        raise ConfigError("no model given: pass --model NAME@URL, --model PATH or FILE.py:NAME")
    spec = ModelSpec.parse(model, "--model")
    return spec.open(
        os.environ.get("OPENAI_BASE_URL", ""),
        concurrency=CONCURRENCY,
        cache=cache,
        budget=parse_budget(budget, spec),
    )


def parse_budget(text: str | None, spec: ModelSpec) -> Budget:
    """Parses `calls=500,tokens=2000000,usd=5`. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, number = part.strip().partition("=")
        try:
            limits[name] = float(number.replace("_", ""))
        except ValueError:
            limits[name] = -1.0
        if name not in ("calls", "tokens", "usd") or limits[name] < 0:
            raise ConfigError(f"--budget {part}: write calls=500, tokens=2000000 or usd=5")
    if "usd" in limits and spec.price is None:
        raise ConfigError(
            "--budget usd=... needs the price of a million tokens: --model NAME@URL,price=IN/OUT"
        )
    calls = limits.get("calls")
    tokens = limits.get("tokens")
    return Budget(
        None if calls is None else int(calls),
        None if tokens is None else int(tokens),
        limits.get("usd"),
        spec.price,
    )
