"""Settings behind a value, as options write them: `NAME@URL,price=1/2,rpm=60`."""

from __future__ import annotations

import re
from collections.abc import Collection


def split_settings(text: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Splits `VALUE,name=value,...` at the first comma that one of the names follows."""
    pattern = rf",\s*(?=(?:{'|'.join(names)})=)"
    value, *settings = re.split(pattern, text.strip())
    pairs = (setting.partition("=") for setting in settings)
    return value, {name: setting.strip() for name, _, setting in pairs}
