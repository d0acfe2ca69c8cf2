"""Validates the arguments of `ajet.trace`: limits of files, masks, the fraction of episodes to
record."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from ajet_sdk.dialects.call_texts import map_call, map_texts
from ajet_sdk.errors import ConfigError
from ajet_sdk.trace.encoding import REMOVED
from ajet_sdk.trace.limits import Limits

log = logging.getLogger("ajet")

_ROTATE = ("64MB", "1d")
_ESCAPES = re.compile(r"(?:\\+u(?!00[0-7])[0-9a-fA-F]{4})+")
"""Non-ASCII characters as escaped by JSON, or by JSON nested in JSON texts."""


class ObservationSettings:
    """The validated arguments. Raises ConfigError."""

    def __init__(
        self,
        path: str | Path,
        rotate: str | Sequence[str] | None,
        keep: str | Sequence[str] | None,
        mask: Sequence[str] | Callable[[str], str] | None,
        sample: float,
        durable: bool,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise ConfigError(
                f"ajet.trace takes the path of a .duckdb file or of a directory (got {path!r})"
            )
        path = Path(path)
        if not isinstance(sample, Real) or not 0 <= sample <= 1:
            raise ConfigError(f"sample is a share from 0 to 1 (got {sample!r})")
        if not isinstance(durable, bool):
            raise ConfigError(f"durable is True or False (got {durable!r})")
        single = path.suffix == ".duckdb" and not path.is_dir()
        if single and (rotate or keep):
            raise ConfigError(
                f"rotate and keep are for a directory of trace files, and {path} is one file"
            )
        self.path: Path = path.absolute()
        self.sample: float = sample
        self.durable: bool = durable
        self.rotate: Limits = (
            Limits()
            if single
            else Limits.of(_ROTATE if rotate is None else rotate, "rotate", files=False)
        )
        self.keep: Limits = Limits.of(() if keep is None else keep, "keep")
        self.mask: Callable[[str], str] | None = _masking(mask)

    def clean(self, value: object) -> Any:
        """Mask the texts of a JSON value."""
        return value if self.mask is None else map_texts(value, self.mask)

    def clean_call(self, value: object) -> Any:
        """Mask the texts of a request, a reply or an error, except for values of the protocol, such
        as roles."""
        return value if self.mask is None else map_call(value, self.mask)


def _masking(mask: Sequence[str] | Callable[[str], str] | None) -> Callable[[str], str] | None:
    """Return a function that masks a text and never raises. Raises ConfigError."""
    if mask is None:
        return None
    if not callable(mask):
        if isinstance(mask, Iterable) and not isinstance(mask, str):
            parts = list(mask)
        else:
            parts = [mask]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError(
                f"mask takes regular expressions as texts, or a function (got {mask!r})"
            )
        try:
            patterns = [re.compile(part) for part in parts]
        except re.error as error:
            raise ConfigError(
                f"mask takes regular expressions: {error} in {error.pattern!r}"
            ) from None
        return lambda text: _without(_unescaped(text), patterns)
    failed: list[str] = []

    def masked(text: str) -> str:
        try:
            return str(mask(_unescaped(text)))
        except Exception as error:  # noqa: BLE001  a user's function
            if not failed:
                failed.append(repr(error))
                log.warning(
                    "ajet.trace: mask failed, so that texts are not stored: %s: %s",
                    type(error).__name__,
                    error,
                )
            return REMOVED

    return masked


def _unescaped(text: str) -> str:
    def slashes(
        run: re.Match[str],
    ) -> str:  # an escape has a power of two, the text before it a multiple
        return "\\" * (2 * (len(run[0]) & len(run[0]) - 1) + 1)

    def spelled(escapes: re.Match[str]) -> str:
        units = re.sub(r"\\+", slashes, escapes[0]).encode().decode("unicode_escape")
        return units.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    return _ESCAPES.sub(spelled, text) if "\\u" in text else text


def _without(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """Replace the matches of all patterns in a text; matches may overlap."""
    parts = list[str]()
    end = 0
    for start, stop in sorted(
        match.span() for pattern in patterns for match in pattern.finditer(text) if match[0]
    ):
        if start >= end:
            parts += (text[end:start], REMOVED)
        end = max(end, stop)
    return "".join((*parts, text[end:]))
