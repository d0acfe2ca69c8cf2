"""`ajet.trace(mask=…)`: what is removed from the texts of a trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.capture.settings import ObservationSettings
from ajet_sdk.errors import ConfigError
from ajet_sdk.trace.encoding import REMOVED


def settings(mask: Any) -> ObservationSettings:
    return ObservationSettings.of(Path("served"), None, None, mask, 1.0, False)


PATTERNS = [
    r"(\d+)-(\d+)",
    r"(['\"]).*?\1",
    r"(?P<mark>[ab])-(?P=mark)",
    r"(?P<mark>1+)",
    r"(?i)A+",
    r"(?x) b  1",
    "a|-",
    "a*",
    r"\bab\b",
]


@given(st.lists(st.sampled_from(PATTERNS), max_size=4), st.text("aAb1-'\" ", max_size=20))
def test_a_list_of_patterns_removes_what_each_removes_alone(patterns: list[str], text: str) -> None:
    matched = {i for pattern in patterns for match in re.finditer(pattern, text) for i in range(*match.span())}
    masked = settings(patterns).clean(text)
    assert masked.replace(REMOVED, "") == "".join(text[i] for i in range(len(text)) if i not in matched)
    assert (REMOVED in masked) == bool(matched)


@pytest.mark.parametrize(
    ("patterns", "text", "masked"),
    [
        ([r"(\d+)-(\d+)", r"(['\"]).*?\1"], "the word 'hunter2' and id 12-34", f"the word {REMOVED} and id {REMOVED}"),
        ([r"sk-proj-\w+", r"(?i)api_key=\S+"], "API_KEY=abc sk-proj-1", f"{REMOVED} {REMOVED}"),
        (["Ada", r"password of Ada: \S+"], "the password of Ada: hunter2", f"the {REMOVED}"),
        ([], "as it is", "as it is"),
    ],
)  # fmt: skip
def test_patterns_do_not_change_each_other(patterns: list[str], text: str, masked: str) -> None:
    assert settings(patterns).clean(text) == masked


def test_the_pattern_that_is_not_valid_is_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("in 'b('")):
        settings(["a", "b("])
