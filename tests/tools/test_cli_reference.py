"""The reference: complete, and current."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet_sdk.config.config import keys
from ajet_tools.cli.config import describe_keys
from ajet_tools.cli.reference import commands, main, options, pages

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", ["commands.md", "config.md", "python.md", "requests.md"])
def test_the_pages_are_current(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == pages()[name], "run `just docs`"


def test_every_command_and_option_is_in_the_reference() -> None:
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    for title, command in commands().items():
        _, _, rest = text.partition(f"\n## {title}\n")
        part = rest.partition("\n## ")[0]
        assert part, title
        for option in options(command):
            assert all(f"`{flag}`" in part for flag in option.opts), (title, option.opts)


def test_every_config_key_is_in_the_reference() -> None:
    text = (REFERENCE / "config.md").read_text(encoding="utf-8")
    described = {row["key"] for row in describe_keys()}
    everything = list(keys())
    leaves = {key for key in everything if not any(other.startswith(f"{key}.") for other in everything)}
    assert described == leaves
    for key in leaves:
        assert f"| `{key}` |" in text


def test_the_pages_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--check"]) == 1
    assert "out of date: commands.md, config.md, requests.md, python.md; run `just docs`" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    (tmp_path / "config.md").write_text("old")
    assert main([str(tmp_path), "--check"]) == 1
