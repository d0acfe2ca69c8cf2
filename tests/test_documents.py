"""The documentation: the README's first screen runs as printed, links and anchors exist, the site builds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_program_runs_as_printed(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    command = re.search(r"^\$ ajet (run .*)$", README, re.MULTILINE)
    assert program and command
    (tmp_path / "agent.py").write_text(program[1])
    shutil.copy(ROOT / "ajet_tools/cli/starter/replies.py", tmp_path)
    shown = re.findall(r"What is (\d+)\+(\d+)\?", README)
    rows = [{"question": f"What is {a}+{b}?", "answer": str(int(a) + int(b))} for a, b in shown]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "ajet", *shlex.split(command[1])],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert rows[0]["question"] in done.stdout
    assert "To view them: ajet trace ls launcher_record/agent-" in done.stdout
    printed = re.search(r"^Mean reward .*$", README, re.MULTILINE)
    assert printed and printed[0] in done.stdout


def test_there_are_two_setup_commands_and_no_more() -> None:
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert commands == [
        'pip install -e ".[local]" && ajet --conf tutorial/example_math_agent/math_agent.yaml\n',
        'pip install -e ".[dev]" && just test\n',
    ]


def pages() -> dict[Path, str]:
    """Every page of the documentation by its path."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tutorial").rglob("*.md")]
    return {path: path.read_text() for path in found}


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\]\([^)]*\)", "", prose), re.MULTILINE)
    slugs = {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    named = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))  # a name of the Python API
    return {slug for slug in slugs if "--" not in slug} | named  # the site writes one dash for two


def test_links_and_anchors_exist() -> None:
    assert anchors("# A b\n```\n# c\n```\n## `--verify`\n## Why, [then](x.md)?\n::: a.b\n") == {
        "a-b",
        "why-then",
        "a.b",
    }
    dead = []
    for page, text in pages().items():
        links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text)
        assert "](" not in text or links or "://" in text
        for link, anchor in links:
            target = page.parent / link if link else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                dead.append(f"{page.relative_to(ROOT)}: {link}#{anchor}")
    assert dead == []


def test_messages_that_the_pages_quote_are_the_code_s() -> None:
    """Of each fragment of a quoted message (`NameError: … fragment …`), three words in a row are in a string."""
    code = " ".join(path.read_text() for part in ("ajet_sdk", "ajet_tools") for path in (ROOT / part).rglob("*.py"))
    code = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", code))
    strange = []
    for page, text in pages().items():
        for message in re.findall(
            r"`[A-Z]\w+: ([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        ):
            for fragment in message.split("…"):
                words = fragment.split()
                if len(words) > 2 and not any(" ".join(words[i : i + 3]) in code for i in range(len(words) - 2)):
                    strange.append(f"{page.relative_to(ROOT)}: {fragment}")
    assert strange == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r'"([^"]+\.md)"', (ROOT / "zensical.toml").read_text())
    there = {str(path.relative_to(ROOT)) for path in pages()}
    assert len(listed) == len(set(listed))
    assert there - {"SECURITY.md", "AGENTS.md"} == set(listed), "list the page in zensical.toml"
    overview = (ROOT / "tutorial/README.md").read_text()
    examples = {f"]({path.parent.name}/README.md)" for path in ROOT.glob("tutorial/example_*/README.md")}
    assert {link for link in examples if link not in overview} == set(), "list the tutorial in tutorial/README.md"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("zensical"), reason='needs pip install -e ".[docs]"')
def test_the_site_builds_without_a_warning() -> None:
    done = subprocess.run(["just", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    api = (ROOT / "build/site/docs/reference/python-run/index.html").read_text()
    assert 'id="ajet.train"' in api and "Train the model behind a workflow" in api
    assert api.index('id="ajet.workflow"') < api.index('id="ajet.train"') and "<th>Name</th>" in api, (
        "a table of parameters"
    )
