"""What the guide shows, and what the command says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from tests.tinker.servers import Server

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "trainer-serve.md"


def test_the_guides_program_learns(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    exec(found[1].replace("Qwen/Qwen3-0.6B", str(server.model)), {})
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[:10]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "SSH tunnel"),
        (["--host", "0.0.0.0", "--key-env", "A_KEY"], "SSH tunnel"),
        (["--key-env", "NO_KEY"], "the environment has no NO_KEY"),
        (["--key-env", "SHORT_KEY"], "begin with tml-"),
        (["--tls-cert", "cert.pem"], "belong together"),
    ],
)
def test_what_would_be_open_to_others_is_refused(
    arguments: list[str], words: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "tml-a")
    monkeypatch.setenv("SHORT_KEY", "a")
    state = tmp_path / "state"
    done = CliRunner().invoke(app, ["trainer", "serve", "--model", str(tiny), "--state", str(state), *arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert not state.exists()
