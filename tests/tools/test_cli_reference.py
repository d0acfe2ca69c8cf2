"""The reference: complete, and current."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import ajet
from ajet_sdk.config.config import keys
from ajet_tools.cli.config import describe_keys
from tests.reference import API, commands, main, options, pages

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.slow
def test_the_pages_are_current() -> None:
    written, current = (
        {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.iterdir()},
        pages(),
    )
    assert set(written) == set(current)
    assert {name for name, text in current.items() if text != written[name]} == set(), (
        "run `python -m tests.reference docs/reference`"
    )


def test_every_public_name_has_one_place_in_the_api_pages() -> None:
    names = [name for _, page in API.values() for name in page]
    assert sorted(names) == ajet.__all__
    assert names[:4] == ["workflow", "judge", "train", "run"]


@pytest.mark.parametrize(
    "name", [name for name in ajet.__all__ if inspect.isfunction(getattr(ajet, name))]
)
def test_every_parameter_of_a_public_function_is_described(name: str) -> None:
    function = getattr(ajet, name)
    _, _, described = (inspect.getdoc(function) or "").partition("Args:\n")
    parameters = [
        at
        for at, p in inspect.signature(function).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    ]
    assert [at for at in parameters if f"    {at}: " not in described] == []


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
    leaves = {
        key for key in everything if not any(other.startswith(f"{key}.") for other in everything)
    }
    assert described == leaves
    for key in leaves:
        assert f"\n### {key}\n" in text


@pytest.mark.slow
def test_the_pages_are_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    (tmp_path / "config.md").write_text("old")
    (tmp_path / "commands.md").unlink()
    assert main([str(tmp_path), "--check"]) == 1
    assert "out of date: commands.md, config.md; run `just docs`" in capsys.readouterr().err
