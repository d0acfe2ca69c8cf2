"""The arguments of `ajet.trace`: limits of files, masks, the share of episodes to record."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.trace.encoding import REMOVED
from ajet_sdk.trace.limits import Limits

log = logging.getLogger("ajet")

_ROTATE = ("64MB", "1d")


@dataclass(frozen=True)
class ObservationSettings:
    path: Path
    rotate: Limits
    keep: Limits
    mask: Callable[[str], str] | None
    sample: float
    durable: bool

    @classmethod
    def of(
        cls,
        path: Path,
        rotate: str | Sequence[str] | None,
        keep: str | Sequence[str] | None,
        mask: Sequence[str] | Callable[[str], str] | None,
        sample: float,
        durable: bool,
    ) -> ObservationSettings:
        """Raises ConfigError."""
        if not 0 <= sample <= 1:
            raise ConfigError(f"sample is a share from 0 to 1 (got {sample})")
        single = path.suffix == ".duckdb" and not path.is_dir()
        if single and (rotate or keep):
            raise ConfigError(f"rotate and keep are for a directory of trace files, and {path} is one file")
        begun = Limits() if single else Limits.of(_ROTATE if rotate is None else rotate, "rotate")
        return cls(path.absolute(), begun, Limits.of(keep or (), "keep"), _masking(mask), sample, durable)

    def clean(self, value: object) -> Any:
        """A value of JSON with its texts masked."""
        if self.mask is None or value is None:
            return value
        return _mapped(value, self.mask)


def _masking(mask: Sequence[str] | Callable[[str], str] | None) -> Callable[[str], str] | None:
    """A function of a text that never raises. Raises ConfigError."""
    if mask is None:
        return None
    if not callable(mask):
        try:
            patterns = [re.compile(part) for part in ([mask] if isinstance(mask, str) else mask)]
        except re.error as error:
            raise ConfigError(f"mask takes regular expressions: {error} in {error.pattern!r}") from None
        return lambda text: _without(text, patterns)
    failed: list[str] = []

    def masked(text: str) -> str:
        try:
            return str(mask(text))
        except Exception as error:  # noqa: BLE001  a user's function
            if not failed:
                failed.append(repr(error))
                log.warning(
                    "ajet.trace: mask failed, so that texts are not stored: %s: %s", type(error).__name__, error
                )
            return REMOVED

    return masked


def _without(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """The text without what any of the patterns matches, each alone: one match may contain another's."""
    parts, end = list[str](), 0
    for start, stop in sorted(match.span() for pattern in patterns for match in pattern.finditer(text) if match[0]):
        if start >= end:
            parts += (text[end:start], REMOVED)
        end = max(end, stop)
    return "".join((*parts, text[end:]))


def _mapped(value: object, text: Callable[[str], str]) -> object:
    """A value of JSON with this done to each of its texts; keys stay."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, text) for item in value]
    return value
