"""A kind of judge of another package, added as a stranger would: one file and one line of
registration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.call import answer_of, call_judge, workflow_task
from ajet_sdk.judges.load import load_judge, named_judge
from ajet_sdk.types import Episode, Task
from ajet_tools.cli.arguments import JUDGE_HELP

CODE = '''
import ajet


def open_stars(config):
    """The judge `stars`: one star is worth `1 / argument`."""
    options = config.task_judge.options
    if "argument" not in options:
        raise TypeError("stars needs a number")

    @ajet.judge
    def stars(output: str) -> float:
        return output.count("*") / int(options["argument"])

    return stars
'''


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package with a kind of judge."""
    (tmp_path / "star_judge.py").write_text(CODE)
    metadata = tmp_path / "star_judge-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: star-judge\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ajet.judges]\nstars = star_judge:open_stars\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("stranger")
def test_it_is_opened_by_name_and_by_config() -> None:
    config = load_config(values={"task_judge": {"judge_type": "stars", "options": {"argument": 4}}})
    parts = {"judge_type": "combined", "combined": [{"judge": "stars:4", "weight": 1.0}]}
    combined = load_config(values={"task_judge": parts})
    task = Task(main_query="How was it?")
    episode = Episode(task=task, output="**")
    for judge in (load_judge(config), named_judge("stars:4"), load_judge(combined).parts[0].judge):
        call = call_judge(
            judge, task, "**", episode, given={}, attempt=workflow_task(task, episode)
        )
        assert asyncio.run(answer_of(call)) == 0.5


@pytest.mark.usefixtures("stranger")
def test_errors_name_it() -> None:
    with pytest.raises(
        ConfigError, match=r"a judge is one of .*stars\[:ARGUMENT\], exact, .*llm:FILE.*got 'star'"
    ):
        named_judge("star")
    with pytest.raises(ConfigError, match=r"(?s)judge_type.*stars, exact"):
        load_config(values={"task_judge": {"judge_type": "star"}})
    with pytest.raises(
        ConfigError, match=r"judge_type: stars \(star_judge:open_stars\) failed: .*needs a number"
    ):
        named_judge("stars")


def test_the_help_lists_the_kinds_of_the_registry() -> None:
    assert (
        "exact, math, regex:PATTERN, code, llm:FILE, rubric:FILE, combined:FILE, file.py:function"
        in JUDGE_HELP
    )
