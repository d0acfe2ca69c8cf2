"""The limits of commands that ask a model."""

from __future__ import annotations

from ajet_sdk.engines.budget import Budget
from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.model.open import ModelSpec

CONCURRENCY = 16
"""Concurrent requests to a model without this setting."""


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
