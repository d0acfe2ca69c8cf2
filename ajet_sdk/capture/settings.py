"""The arguments of `ajet.trace`: limits of files, masks, the share of episodes to record."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.trace.encoding import REMOVED
from ajet_sdk.trace.limits import Limits

log = logging.getLogger("ajet")

_ROTATE = ("64MB", "1d")
_VALUES = {
    "role", "type", "object", "id", "call_id", "tool_call_id", "tool_use_id", "item_id", "previous_response_id",
    "responseId", "model", "modelVersion", "status", "finish_reason", "finishReason", "stop_reason", "tool_choice",
    "reasoning_effort", "effort", "mode", "service_tier", "system_fingerprint", "mimeType", "mime_type", "media_type",
}  # fmt: skip
"""Keys of values that belong to the protocols of OpenAI, Anthropic and Gemini, in any part of a call."""
_PARTS = {
    "messages", "choices", "message", "delta", "content", "tools", "tool_choice", "tool_calls", "function", "functions",
    "function_call", "input", "output", "reasoning", "summary", "system", "text", "format", "response_format",
    "json_schema", "thinking", "contents", "candidates", "parts", "systemInstruction", "system_instruction",
    "generationConfig", "toolConfig", "functionCallingConfig", "functionCall", "functionResponse",
    "functionDeclarations", "function_declarations",
}  # fmt: skip
"""Keys of the parts themselves. Whatever is under another key, such as a tool's arguments, is the user's."""
_SCHEMAS = {
    "parameters", "schema", "input_schema", "parametersJsonSchema", "responseSchema", "response_schema",
    "responseJsonSchema",
}  # fmt: skip
_SCHEMA_VALUES = frozenset({"type", "required", "$ref"})
_SPELLED = frozenset({"logprobs", "logprobsResult", "prompt_logprobs", "token_ids", "prompt_token_ids"})


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
        path: str | Path,
        rotate: str | Sequence[str] | None,
        keep: str | Sequence[str] | None,
        mask: Sequence[str] | Callable[[str], str] | None,
        sample: float,
        durable: bool,
    ) -> ObservationSettings:
        """Raises ConfigError."""
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise ConfigError(f"ajet.trace takes the path of a .duckdb file or of a directory (got {path!r})")
        path = Path(path)
        if not isinstance(sample, Real) or not 0 <= sample <= 1:
            raise ConfigError(f"sample is a share from 0 to 1 (got {sample!r})")
        single = path.suffix == ".duckdb" and not path.is_dir()
        if single and (rotate or keep):
            raise ConfigError(f"rotate and keep are for a directory of trace files, and {path} is one file")
        begun = Limits() if single else Limits.of(_ROTATE if rotate is None else rotate, "rotate", files=False)
        kept = Limits.of(() if keep is None else keep, "keep")
        return cls(path.absolute(), begun, kept, _masking(mask), sample, durable)

    def clean(self, value: object) -> Any:
        """A value of JSON with its texts masked."""
        if self.mask is None or value is None:
            return value
        return _mapped(value, self.mask)

    def clean_call(self, value: object) -> Any:
        """A request, a reply or an error with its texts masked; values of the protocol, such as roles, stay.

        Log-probabilities and ids of tokens spell the text once more, and are left out where a mask is.
        """
        return value if self.mask is None else _call_mapped(value, self.mask)


def _masking(mask: Sequence[str] | Callable[[str], str] | None) -> Callable[[str], str] | None:
    """A function of a text that never raises. Raises ConfigError."""
    if mask is None:
        return None
    if not callable(mask):
        parts = list(mask) if isinstance(mask, Iterable) and not isinstance(mask, str) else [mask]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"mask takes regular expressions as texts, or a function (got {mask!r})")
        try:
            patterns = [re.compile(part) for part in parts]
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


def _mapped(value: object, text: Callable[[str], str], spared: frozenset[str] = frozenset()) -> object:
    """A value of JSON with this done to each of its texts; keys stay, and the texts at the spared ones."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {
            k: v if k in spared and not isinstance(v, Mapping) else _mapped(v, text, spared) for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(item, text, spared) for item in value]
    return value


def _call_mapped(value: object, text: Callable[[str], str], within: str = "") -> object:
    """A part of a call, the one at the key `within`, with this done to the texts that the protocol does not define."""
    if isinstance(value, (list, tuple)):
        return [_call_mapped(item, text, within) for item in value]
    if not isinstance(value, Mapping):
        return _mapped(value, text)
    kind = f"{within} {value.get('type')} {value.get('role')}".lower()
    of_tool = any(word in kind for word in ("tool", "function", "_call"))
    call: dict[str, object] = {}
    for key, item in value.items():
        is_part = isinstance(item, (Mapping, list, tuple))
        if key in _SPELLED and is_part:
            call[key] = None
        elif (key in _VALUES or (key == "name" and of_tool)) and not is_part:
            call[key] = item
        elif key in _PARTS and not (key == "input" and isinstance(item, Mapping)):  # which are a tool's arguments
            call[key] = _call_mapped(item, text, key)
        else:
            call[key] = _mapped(item, text, _SCHEMA_VALUES if key in _SCHEMAS else frozenset())
    return call
