"""The options of every command that asks a model, and the endpoint and budget that they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_tools.dataset.endpoint import Endpoint

__all__ = ["Asking"]


@dataclass(frozen=True)
class Asking:
    """Which model is asked, how fast, and up to what it may cost."""

    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", envvar="OPENAI_BASE_URL", help="An OpenAI-compatible endpoint.", show_default=False
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            envvar="OPENAI_MODEL",
            help="The model's name there; without --base-url a checkpoint's directory, which is loaded here.",
            show_default=False,
        ),
    ] = None
    api_key_env: Annotated[str, typer.Option(metavar="NAME", help="The variable that holds the endpoint's key.")] = (
        "OPENAI_API_KEY"
    )
    scripted: Annotated[
        str | None, typer.Option(metavar="FILE:NAME", help="replies.py:function that answers in place of a model.")
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 16
    rpm: Annotated[float | None, typer.Option("--rpm", min=0.1, help="At most so many requests a minute.")] = None
    retries: Annotated[int, typer.Option(min=0, help="Further attempts after a 5xx or a lost connection.")] = 4
    price: Annotated[
        str | None,
        typer.Option("--price", metavar="IN,OUT", help="Of a million tokens read and written, such as 0.15,0.60."),
    ] = None
    max_calls: Annotated[int | None, typer.Option(min=1, help="Stop cleanly before a call beyond so many.")] = None
    max_total_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop cleanly before going past so many tokens.")
    ] = None
    max_cost: Annotated[
        float | None, typer.Option(min=0, help="Stop cleanly before going past so much money; needs --price.")
    ] = None
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where replies are kept, so that none is paid for twice.",
            show_default="in or beside --out",
        ),
    ] = None

    def endpoint(self, cache: Path) -> Endpoint:
        """What answers: a scripted function, an endpoint, or a checkpoint in this process. Raises ConfigError.

        `cache` is where replies are kept, where the option does not say.
        """
        from ajet_tools.dataset.budget import Budget, Price
        from ajet_tools.dataset.endpoint import Endpoint, require_endpoint

        price = Price.parse(self.price) if self.price is not None else None
        budget = Budget(self.max_calls, self.max_total_tokens, self.max_cost, price)
        cache, at_once = self.cache or cache, self.concurrency
        if self.scripted is not None:
            return Endpoint.scripted(self.scripted, concurrency=at_once, cache=cache, budget=budget)
        if self.model is not None and Path(self.model).is_dir() and not self.base_url:
            return Endpoint.local(Path(self.model), concurrency=at_once, cache=cache, budget=budget)
        base_url, model = require_endpoint(self.base_url, self.model)
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url begins with http:// or https:// (got {base_url!r})")
        return Endpoint(
            base_url,
            model,
            os.environ.get(self.api_key_env),
            concurrency=at_once,
            per_minute=self.rpm,
            retries=self.retries,
            cache=cache,
            budget=budget,
        )
