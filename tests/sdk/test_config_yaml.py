"""YAML of any kind is a config, or an error that says where it is none."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError

FRAGMENTS = [
    "ajet:", "\n", "  ", "- ", "a", "1", ": ", "[", "]", "{", "}", "&a ", "*a", "!!int ", "!!timestamp ", "!!set ", '"',
    "'", "? ", "| ", "<<", "#", "\t", "2024-01-01", "~", ".inf", "---\n", "...\n", "%", "!", "=", ",", "\\U",
]  # fmt: skip
VALUES = [
    "2024-99-99", "!!timestamp x", "!!int ''", "!!int x", "!!float .", "!!bool x", "1" * 5000, "0x" + "f" * 5000,
    "2024-01-01T00:00:00+99:99", '"\\UFFFFFFFF"', '"\\U00110000"', "!!int 0b", "0000-00-00", "'", "&a [*a]",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "text", ["{}", "ajet: {}\n", "ajet:\n  rollout:\n    num_repeat: {}\n", "{}: 1\n"]
)
def test_a_value_that_is_none_is_told(tmp_path: Path, text: str, value: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text.replace("{}", value))
    with pytest.raises(ConfigError):
        load_config(file).dump_yaml()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join).map(str.encode)
    | st.binary(max_size=40)
)
def test_no_content_of_a_file_ends_otherwise(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with suppress(ConfigError):
        load_config(file).dump_yaml()
