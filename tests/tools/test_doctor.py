"""`ajet doctor`: what is installed, and what stops a run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_tools.cli.app import app
from tests.tools.dataset.terminal import at_a_terminal


def doctor(*args: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *args])


@pytest.mark.slow
def test_whether_programs_of_a_model_are_fenced_in_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> dict[str, Any]:
        fence.cache_clear()
        checks = json.loads(doctor(str(tmp_path), "--json").stdout)["checks"]
        return next(check for check in checks if check["name"] == "sandbox for generated programs")

    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    broken = said()
    assert (
        broken["status"] == "miss" and "No permissions to create new namespace" in broken["detail"]
    )
    assert "unfenced=true" in broken["fix"]
    monkeypatch.undo()
    try:
        fence()
    except NoFence:
        assert said()["status"] == "miss"
    else:
        assert said()["status"] == "ok" and "no network" in said()["detail"]


@pytest.mark.slow
def test_at_a_terminal_lines_fit_and_commands_stay_whole(tmp_path: Path) -> None:
    code, shown = at_a_terminal([sys.executable, "-m", "ajet", "doctor"], columns=80, cwd=tmp_path)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    commands = [line for line in lines if re.search(r"^ *(pip|ajet) install", line)]
    assert code == 0 and lines[0].startswith("ok    python   ")
    assert not [line for line in lines if len(line) > 80 and line not in commands]
    assert all(line.count('"') in (0, 2) for line in commands)
