"""The options of every command that asks a model, and the endpoint and budget that they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_tools.dataset.budget import Budget
    from ajet_tools.dataset.endpoint import Endpoint

__all__ = [
    "ApiKeyEnv",
    "BaseUrl",
    "Concurrency",
    "MaxCalls",
    "MaxCost",
    "MaxTokens",
    "Model",
    "PerMinute",
    "PriceOf",
    "Retries",
    "Scripted",
    "budget_of",
    "endpoint_of",
]

BaseUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", envvar="OPENAI_BASE_URL", help="An OpenAI-compatible endpoint.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        envvar="OPENAI_MODEL",
        help="The model's name there; without --base-url a checkpoint's directory, which is loaded here.",
        show_default=False,
    ),
]
ApiKeyEnv = Annotated[str, typer.Option(metavar="NAME", help="The variable that holds the endpoint's key.")]
Scripted = Annotated[
    str | None, typer.Option(metavar="FILE:NAME", help="replies.py:function that answers in place of a model.")
]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests under way at once.")]
PerMinute = Annotated[float | None, typer.Option("--rpm", min=0.1, help="At most so many requests a minute.")]
Retries = Annotated[int, typer.Option(min=0, help="Further attempts after a 5xx or a lost connection.")]
MaxCalls = Annotated[int | None, typer.Option(min=1, help="Stop cleanly before a call beyond so many.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-total-tokens", min=1, help="Stop cleanly before going past so many tokens.")
]
MaxCost = Annotated[
    float | None, typer.Option(min=0, help="Stop cleanly before going past so much money; needs --price.")
]
PriceOf = Annotated[
    str | None,
    typer.Option("--price", metavar="IN,OUT", help="Of a million tokens read and written, such as 0.15,0.60."),
]


def budget_of(calls: int | None, tokens: int | None, money: float | None, price: str | None) -> Budget:
    """The limits that the options name. Raises ConfigError."""
    from ajet_tools.dataset.budget import Budget, Price

    return Budget(calls, tokens, money, Price.parse(price) if price is not None else None)


def endpoint_of(
    *,
    base_url: str | None,
    model: str | None,
    scripted: str | None,
    api_key_env: str = "OPENAI_API_KEY",
    concurrency: int = 16,
    per_minute: float | None = None,
    retries: int = 4,
    cache: Path | None = None,
    budget: Budget | None = None,
) -> Endpoint:
    """What answers: a scripted function, an endpoint, or a checkpoint in this process. Raises ConfigError."""
    from ajet_tools.dataset.endpoint import Endpoint, require_endpoint

    if scripted is not None:
        return Endpoint.scripted(scripted, concurrency=concurrency, cache=cache, budget=budget)
    if model is not None and Path(model).is_dir() and not base_url:
        return Endpoint.local(Path(model), concurrency=concurrency, cache=cache, budget=budget)
    base_url, model = require_endpoint(base_url, model)
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url begins with http:// or https:// (got {base_url!r})")
    return Endpoint(
        base_url,
        model,
        os.environ.get(api_key_env),
        concurrency=concurrency,
        per_minute=per_minute,
        retries=retries,
        cache=cache,
        budget=budget,
    )
