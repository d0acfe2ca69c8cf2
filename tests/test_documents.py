"""The documentation: links and anchors exist, the site builds."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.bench._record import PAGES, filled_in

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_there_are_two_setup_commands_and_no_more() -> None:
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert commands == [
        'pip install -e ".[local]" && ajet --conf tutorial/example_math_agent/math_agent.yaml\n',
        'pip install -e ".[dev]" && just test\n',
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_tables_are_what_the_records_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- figures: " in text and filled_in(text) == text


def typed_tables(text: str) -> list[str]:
    """The tables of a page that no record makes, with the paragraph before and that behind each."""
    text = re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", text, flags=re.DOTALL)
    parts = re.split(r"\n{2,}", text)
    tables = [at for at, part in enumerate(parts) if part.startswith("|")]
    return ["\n".join(parts[max(0, at - 1) : at + 2]) for at in tables]


DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def test_a_table_of_figures_that_no_record_makes_says_when_it_was_measured() -> None:
    """A figure without a date is never seen to be old."""
    tables = typed_tables((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    assert tables
    for table in tables:
        rows = table.splitlines()
        commands = [row for row in rows if "`just bench " in row and row.startswith("|")]
        undated = [row for row in commands if not DATE.search(row)]
        assert undated == [], "record it (`just bench NAME --write`), or say when it was measured"
        assert DATE.search(table), f"no date beside this table: {table}"


def pages() -> dict[Path, str]:
    """Every page of the documentation by its path."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tutorial").rglob("*.md")]
    written = {"runs", "launcher_record"}  # by a run: a checkpoint has a README.md
    return {
        path: path.read_text() for path in found if not written & {*path.relative_to(ROOT).parts}
    }


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
    """Of each fragment of a quoted message (`NameError: … fragment …`), three words in a row are in
    a string."""
    code = " ".join(
        path.read_text()
        for part in ("ajet_sdk", "ajet_tools")
        for path in (ROOT / part).rglob("*.py")
    )
    code = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", code))
    strange = []
    for page, text in pages().items():
        for message in re.findall(
            r"`[A-Z]\w+: ([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        ):
            for fragment in message.split("…"):
                words = fragment.split()
                if len(words) > 2 and not any(
                    " ".join(words[i : i + 3]) in code for i in range(len(words) - 2)
                ):
                    strange.append(f"{page.relative_to(ROOT)}: {fragment}")
    assert strange == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r'"([^"]+\.md)"', (ROOT / "zensical.toml").read_text())
    there = {str(path.relative_to(ROOT)) for path in pages()}
    assert len(listed) == len(set(listed))
    assert there - {"SECURITY.md", "AGENTS.md"} == set(listed), "list the page in zensical.toml"
    overview = (ROOT / "tutorial/README.md").read_text()
    examples = {
        f"]({path.parent.name}/README.md)" for path in ROOT.glob("tutorial/example_*/README.md")
    }
    assert {link for link in examples if link not in overview} == set(), (
        "list the tutorial in tutorial/README.md"
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("zensical"), reason='needs pip install -e ".[docs]"')
def test_the_site_builds_without_a_warning() -> None:
    done = subprocess.run(["just", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    api = (ROOT / "build/site/docs/reference/python-run/index.html").read_text()
    assert 'id="ajet.train"' in api and "Train the model behind a workflow" in api
    search = (ROOT / "build/site/search.json").read_text()
    assert (
        '"title":"Install"' in search.replace('": "', '":"')
        and "download.pytorch.org/whl/cpu" in search
    )
    assert (
        api.index('id="ajet.workflow"') < api.index('id="ajet.train"') and "<th>Name</th>" in api
    ), "a table of parameters"
