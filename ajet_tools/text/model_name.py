"""What `--model` names: an endpoint, a function, or a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENDPOINT = re.compile(r"(.+?)@(https?://.+)")
_FUNCTION = re.compile(r"(.+\.py)((:|->)\w+)?|[\w.]+->\w+")


@dataclass(frozen=True)
class ModelName:
    """A model as `--model` names it; one of the fields besides `name` is set, or none."""

    name: str
    base_url: str | None = None
    scripted: str | None = None
    """FILE.py, FILE.py:NAME or package.module->Name."""

    @classmethod
    def parse(cls, text: str) -> ModelName:
        # as records name a function
        text = text.removeprefix("scripted:")
        if endpoint := _ENDPOINT.fullmatch(text):
            return cls(endpoint[1], base_url=endpoint[2])
        if _FUNCTION.fullmatch(text):
            return cls(text, scripted=text)
        return cls(text)
