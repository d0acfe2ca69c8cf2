"""What the guide shows, and what the command says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from tests.tinker.servers import Server

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "trainer-serve.md"


@pytest.mark.slow
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
    ("arguments", "key", "words"),
    [
        (["--host", "0.0.0.0"], "", "SSH tunnel"),
        (["--host", "0.0.0.0"], "tml-a", "SSH tunnel"),
        ([], "a", "begin with tml-"),
    ],
)
def test_what_would_be_open_to_others_is_refused(
    arguments: list[str],
    key: str,
    words: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AJET_TRAINER_KEY", key)
    state = tmp_path / "state"
    done = CliRunner().invoke(
        app, ["trainer", "serve", "--model", str(tiny), "--state", str(state), *arguments]
    )
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert not state.exists()


SAMPLE = """
import sys, tinker
from tinker import types
client = tinker.ServiceClient()
sampler = client.create_sampling_client(base_model=sys.argv[1])
reply = sampler.sample(types.ModelInput.from_ints([41, 71]), 1, types.SamplingParams(max_tokens=3, seed=1)).result()
print(len(reply.sequences[0].tokens))
"""


@pytest.mark.slow
def test_who_has_the_key_is_served(tiny: Path, tmp_path: Path) -> None:
    """By the command, to the SDK in a program of its own; nobody else gets in."""
    environment = {**os.environ, "AJET_TRAINER_KEY": "tml-right"}
    arguments = ["--model", str(tiny), "--state", str(tmp_path / "state"), "--port", "0"]
    command = [sys.executable, "-m", "ajet", "trainer", "serve", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
            assert address is not None

            def sampled(key: str) -> subprocess.CompletedProcess[str]:
                return subprocess.run(
                    [sys.executable, "-c", SAMPLE, str(tiny)],
                    env={**os.environ, "TINKER_BASE_URL": address[0], "TINKER_API_KEY": key},
                    capture_output=True,
                    text=True,
                    timeout=60,
                )

            done = sampled("tml-right")
            assert done.stdout == "3\n", done.stderr
            assert sampled("tml-wrong").returncode == 1
        finally:
            server.terminate()
