"""Cells of a real notebook: the agent is defined in one, and run, trained and written in others.
And the tutorial's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.slow

CELLS = [
    """
import ajet

@ajet.workflow
async def solve(question: str, model: ajet.Model) -> str:
    return (await model.chat([{"role": "user", "content": question}]))["content"]

@ajet.judge
def exact(output: str) -> float:
    return float(output == "42")
""",
    """
job = ajet.AjetJob(model="some/model", backbone="debug").set_workflow(solve).set_judge(exact)
job.set_data(type="random_dummy").set("model.scripted", "replies.py->reply").set("experiment_dir", "out")
[episode.reward for episode in job.tune().episodes]
""",
    "ajet.run(job.config, workflow=solve, judge=exact).reward",
    "[episode.status for episode in ajet.train(job.config, workflow=solve, judge=exact).episodes]",
    """
try:
    job.dump_job_as_yaml("job.yaml")
except ValueError as error:
    print(error)
""",
    """
import asyncio
await asyncio.sleep(0)  # the cell runs in the kernel's loop
ajet.run(job.config, workflow=solve, judge=exact).reward
""",
]


def execute(notebook: Any, folder: Path) -> Any:
    """The notebook with what its cells showed."""
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


@pytest.mark.long
def test_the_tutorial_trains_what_its_cells_define(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    tutorial = Path(__file__).parents[2] / "tutorial/example_notebook"
    folder = tmp_path / "notebook"
    shutil.copytree(
        tutorial, folder, ignore=shutil.ignore_patterns("launcher_record", "__pycache__")
    )
    done = execute(nbformat.read(folder / "sums.ipynb", 4), folder)
    shown = {i: "".join(str(out.get("data", {}).get("text/html", "")) for out in c.get("outputs", []))
             for i, c in enumerate(done.cells)}  # fmt: skip
    pages = list(shown.values())
    assert any("<progress" in page and "80/80 episodes" in page for page in pages)
    assert any("<table>" in page and "Mean reward" in page for page in pages)
    assert any("<iframe" in page and "class=&quot;m&quot;" in page for page in pages)
    assert any("<polyline" in page and "val/reward" in page for page in pages)
    said = "".join(out.get("text", "") for out in done.cells[-1].outputs)
    before, after = map(float, re.findall(r"[\d.]+", said)[:2])
    assert after > before + 0.1


def test_the_readme_s_agent_is_pasted_and_run_without_a_key_and_its_report_shows_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    root = Path(__file__).parents[2]
    program = re.search(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert program
    for name in ("tasks.jsonl", "replies.py"):
        shutil.copy(root / "ajet_tools/cli/starter" / name, tmp_path)
    run = "config = ajet.Config(model={'scripted': 'replies.py->reply'})\n"
    run += "report = ajet.run(config, workflow=solve, judge=exact, tasks='tasks.jsonl')"
    cells = [
        nbformat.v4.new_code_cell(text) for text in (program[1], run, "report", "print(report)")
    ]
    done = execute(nbformat.v4.new_notebook(cells=cells), tmp_path)
    [shown], [printed] = (cell.outputs for cell in done.cells[2:])
    assert (
        shown["data"]["text/html"].count("What is 17 + 25?") == 1
        and "Mean reward 0.75" in shown["data"]["text/html"]
    )
    assert (
        shown["data"]["text/plain"].count("What is 17 + 25?")
        == 1
        == printed["text"].count("What is 17 + 25?")
    )


def test_an_agent_of_a_notebook_is_run_trained_and_not_written_under_another_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "replies.py").write_text("def reply(ask):\n    return '42'\n")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS]
    )
    notebook = execute(notebook, tmp_path)
    results = [
        [
            out["data"]["text/plain"]
            for out in cell.outputs
            if out["output_type"] == "execute_result"
        ]
        for cell in notebook.cells
    ]
    assert [found for found in results if found] == [
        ["[1.0, 1.0]"],
        ["1.0"],
        ["['succeeded', 'succeeded']"],
        ["1.0"],
    ]
    printed = "".join(out.get("text", "") for out in notebook.cells[4].outputs)
    assert "the workflow 'solve' has no name" in printed and not (tmp_path / "job.yaml").exists()
