"""README and guide, typed block by block in an environment made from the wheel; what is printed is
compared.

A page is read as a person reads it, from the top, in one directory that begins as a clone's
`tutorial/`:

- a `python` block that begins with `# name.py` is written to that file; another is run, after those
  before it, and a `text` block behind it is what it prints;
- a `sh` block is run as it stands; of a `console` block the lines behind `$` are typed, the others
  are what they print.

In a shown output `…` stands for whatever is there, alone on a line for any lines. Ids, times and
spaces may differ. Notes in the source, above a block, change how it is typed:

    <!-- not run: REASON -->        it needs a GPU, a network, a key
    <!-- numbers vary: REASON -->   the numbers are not compared
    <!-- until Ctrl-C -->           a server: it runs on while the rest of the page is typed
    <!-- run before: COMMAND -->    files that the page describes and does not show
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.test_wheel import build_wheel
from tests.waiting import until

ROOT = Path(__file__).parents[1]
FILES = Path(__file__).parent / "page_files"
"""What a page describes and does not show, for `run before`: `$FILES` in a command."""
SESSIONS = [
    ["README.md"],
    ["docs/guide/install.md"],
    [f"docs/{name}.md" for name in ("guide/quickstart", "concepts", "guide/agents", "guide/timelines", "guide/traces")],
    *([f"docs/guide/{path.name}"] for path in sorted((ROOT / "docs/guide").glob("*.md"))
      if path.stem not in ("install", "quickstart", "agents", "timelines", "traces")),
]  # fmt: skip
"""Pages that are typed one after the other in one directory: what the first makes, the next look
at."""
TYPED = ("python", "sh", "bash", "console")
NOTES = ("not run", "numbers vary", "until Ctrl-C", "run before")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    notes: dict[str, str]
    printed: str | None = None
    """What a Python program prints, where the page shows it."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Block] = []
    for match in re.finditer(
        r"((?:^<!-- [^\n]* -->\n)*)^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    ):
        line = text[: match.start(2)].count("\n") + 1
        notes = {}
        for note in re.findall(r"^<!-- (.*) -->$", match[1], re.MULTILINE):
            name, _, value = note.partition(": ")
            assert name in NOTES and (value or name == "until Ctrl-C"), f"{page}:{line}: {note}"
            notes[name] = value
        if (
            match[2] == "text"
            and found
            and found[-1].language == "python"
            and found[-1].printed is None
        ):
            found[-1] = Block(**{**vars(found[-1]), "printed": match[3]})
        elif match[2] in TYPED:
            found.append(Block(page, line, match[2], match[3], notes))
        else:
            found.append(Block(page, line, "", match[3], notes))
    return [block for block in found if block.language]


def commands_of(block: Block) -> Iterator[tuple[str, list[str] | None]]:
    """Each command and the lines that it prints; None where the page shows none."""
    if block.language != "console":
        yield block.text, None
        return
    command, shown = "", list[str]()
    for line in block.text.splitlines():
        if command and is_open(command):
            command += "\n" + line
        elif line.startswith("$ "):
            if command:
                yield command, shown or None
            command, shown = line[2:], []
        else:
            shown.append(line)
    yield command, shown or None


def is_open(command: str) -> bool:
    """Whether the next line goes on with this command."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith("\\")


ANY = "…"
_VOLATILE = [
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b|\b\d{8}-\d{6}\b"), "TIME"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,32}\b"), "ID"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "SECONDS"),
    (re.compile(r"─+"), "─"),
]
_NUMBER = re.compile(r"-?\b\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?%)?")


def plain(line: str, numbers_vary: bool) -> str:
    for pattern, word in _VOLATILE:
        line = pattern.sub(word, line)
    if numbers_vary:
        line = _NUMBER.sub("N", line)
    return " ".join(line.split())


def difference(shown: list[str], printed: list[str], numbers_vary: bool) -> str:
    """The first line of the page that was not printed; empty where all were, in this order."""
    wanted = [line for line in (plain(line, numbers_vary) for line in shown) if line]
    there = [line for line in (plain(line, numbers_vary) for line in printed) if line]
    place, anywhere = 0, False
    for line in wanted:
        if line in (ANY, "..."):
            anywhere = True
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split(ANY))) + "$")
        fits = [i for i in range(place, len(there)) if pattern.match(there[i])]
        if not fits or (fits[0] != place and not anywhere):
            return (
                f"the page shows {line!r}, printed was"
                f" {there[place] if place < len(there) else 'nothing more'!r}"
            )
        place, anywhere = fits[0] + 1, False
    return "" if anywhere or place == len(there) else f"the page does not show {there[place]!r}"


def test_a_difference_is_seen() -> None:
    assert difference(["a 1", "…", "d ab12cd34"], ["a   1", "b", "c", "d 00000001"], False) == ""
    assert difference(["a 1"], ["a 2"], False) != "" and difference(["a 1"], ["a 2"], True) == ""
    assert difference(["a"], ["a", "b"], False) == "the page does not show 'b'"
    assert difference(["a", "b"], ["a"], False).endswith("'nothing more'")
    assert difference(["a", "c"], ["a", "b", "c"], False) != ""
    assert difference(["take… 3"], ["taken: 3"], False) == ""
    assert difference(["in agent-20261123-065722"], ["in agent-20261125-224555"], False) == ""
    [block] = [one for one in blocks_of("README.md") if ".ci/run" in one.notes.get("not run", "")]
    assert "just test" in block.text and ".ci/run" in block.notes["not run"]
    console = Block("p", 1, "console", "$ a 'b\n c'\nd\n$ e \\\n  f\n", {})
    assert list(commands_of(console)) == [("a 'b\n c'", ["d"]), ("e \\\n  f", None)]


class Reader:
    """Types the blocks of pages in a directory; the working directory and the exports of a shell
    last."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.environment = environment
        self.state = directory.parent / "state.sh"
        self.state.write_text(f"cd {shlex.quote(str(directory))}\n")
        self.program = ""
        self.servers: list[subprocess.Popen[bytes]] = []

    @property
    def here(self) -> Path:
        """Where the shell is."""
        return Path(shlex.split(self.state.read_text().splitlines()[-1])[1])

    def type(self, block: Block) -> str:
        """What went otherwise than the page says; empty where nothing did."""
        if "run before" in block.notes:
            code, printed = self.shell(block.notes["run before"])
            assert code == 0, f"{block}: {printed}"
        file = re.match(r"# (\S+\.py)\n", block.text)
        if block.language == "python" and file:
            path = self.here / file[1]
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(block.text.partition("\n")[2])
            return ""
        if block.language == "python":
            self.program += block.text
            (self.here / "block.py").write_text(self.program)
            code, printed = self.shell("python block.py")
            if code != 0:
                return printed
            return difference(
                (block.printed or ANY).splitlines(),
                printed.splitlines(),
                "numbers vary" in block.notes,
            )
        for command, shown in commands_of(block):
            if "until Ctrl-C" in block.notes:
                problem = self.serve(command, shown or [])
            else:
                code, printed = self.shell(command)
                problem = printed if code != 0 and shown is None else ""
                if shown is not None:
                    problem = difference(shown, printed.splitlines(), "numbers vary" in block.notes)
                    problem += f"; all of it:\n{printed}" if problem else ""
            if problem:
                return f"{command}: {problem}"
        return ""

    def shell(self, command: str) -> tuple[int, str]:
        script = (
            f"set -eo pipefail; trap 'declare -px > {self.state}; echo cd $PWD >> {self.state}'"
            f" EXIT\n{command}\n"
        )
        done = subprocess.run(
            ["bash", "-c", f"source {self.state}\n{script}"],
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout

    def serve(self, command: str, shown: list[str]) -> str:
        log = self.state.parent / f"server-{len(self.servers)}.log"
        with log.open("wb") as file:
            server = subprocess.Popen(
                ["bash", "-c", f"source {self.state}; exec {command}"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.servers.append(server)
        until(
            lambda: (
                server.poll() is not None
                or not difference([*shown, ANY], log.read_text().splitlines(), False)
            )
        )
        return log.read_text() if server.poll() is not None else ""

    def leave(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def surroundings(programs: Path) -> dict[str, str]:
    """The environment of a reader without a key, whose `ajet` and `python` are of this
    directory."""
    left_out = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    return environment | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "COLUMNS": "120",
        "FILES": str(FILES),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.slow
def test_the_first_screen_does_what_it_shows(tmp_path: Path) -> None:
    """As the slow test does, from this checkout; the program that the pages show is the
    starter's."""
    (tmp_path / "clone").mkdir()
    reader = Reader(tmp_path / "clone", surroundings(Path(sys.executable).parent))
    program, command, *_ = blocks_of("README.md")
    assert program.language == "python" and command.text.startswith("$ ajet init")
    assert reader.type(command) == ""
    starter = (ROOT / "ajet_tools/cli/starter/agent.py").read_text()
    assert program.text == starter
    assert starter in (ROOT / "docs/guide/quickstart.md").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with ajet from its wheel, which finds the packages that ajet needs in
    this one."""
    folder = tmp_path_factory.mktemp("typed")
    wheel = build_wheel(folder)
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", wheel], check=True)
    [site] = (folder / "venv/lib").glob("python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text(
        "".join(f"{path}\n" for path in packages)
    )  # their own .pth files are not read
    (folder / "venv/bin/pip").write_text(
        "#!/bin/sh\nexit 0\n"
    )  # the environment that a page makes is this one
    (folder / "venv/bin/pip").chmod(0o755)
    where = [python, "-c", "import ajet; print(ajet.__file__)"]
    assert (
        str(folder)
        in subprocess.run(where, cwd=folder, capture_output=True, text=True, check=True).stdout
    )
    return folder / "venv/bin"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(p, marks=[pytest.mark.long] * ("quickstart" in p[0]), id=Path(p[0]).stem)
        for p in SESSIONS
    ],
)
def test_pages_do_what_they_show(pages: list[str], installed: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(
        ROOT / "tutorial",
        clone / "tutorial",
        ignore=shutil.ignore_patterns("launcher_record", "__pycache__", "databases"),
    )
    shutil.copytree(ROOT / "docs", clone / "docs")
    reader = Reader(clone, surroundings(installed))
    problems = []
    try:
        for page in pages:
            reader.program = "from __future__ import annotations\nimport random\nimport ajet\n"
            typed = [block for block in blocks_of(page) if "not run" not in block.notes]
            problems += [
                f"{block}: {problem}" for block in typed if (problem := reader.type(block))
            ]
    finally:
        reader.leave()
    assert not problems, "\n\n".join(problems)


def test_blocks_that_are_not_typed_say_why(record_property: Any) -> None:
    """Each with its reason, listed in the report of the tests (`--junitxml`)."""
    every = [block for pages in SESSIONS for page in pages for block in blocks_of(page)]
    skipped = {str(block): block.notes["not run"] for block in every if "not run" in block.notes}
    for place, reason in skipped.items():
        record_property(place, reason)
        needs = "GPU|network|key|account|terminal|environment|machine|package|server|checkpoints"
        assert re.search(needs, reason), place
