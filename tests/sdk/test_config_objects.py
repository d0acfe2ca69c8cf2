"""Class paths: how an object is found, and what is said where it is not."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.config.objects import load_object
from ajet_sdk.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "modules", sys.modules)
    yield
    for name in [name for name in sys.modules if name not in before]:
        del sys.modules[name]


def agent(
    folder: Path,
    text: str = "def solve(): return 1\nclass Judge:\n    def score(self): ...\n",
    name: str = "my_agent_a.py",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_every_form_names_the_same_object(tmp_path: Path) -> None:
    path = agent(tmp_path)
    solve = load_object("my_agent_a.py->solve")
    for form in (
        "my_agent_a.py:solve",
        f"{path}->solve",
        f"{path}:solve",
        "./my_agent_a.py->solve",
        "my_agent_a->solve",
        "my_agent_a:solve",
    ):
        assert load_object(form) is solve
    assert load_object("my_agent_a.py->Judge.score") is load_object("my_agent_a.py->Judge").score
    assert load_object("os.path->join").__name__ == "join"


def test_functions_of_a_file_can_be_pickled(tmp_path: Path) -> None:
    agent(tmp_path)
    solve = load_object("my_agent_a.py->solve")
    assert pickle.loads(pickle.dumps(solve)) is solve


def test_a_file_beside_another_jobs_file_of_that_name_is_not_taken_for_it(tmp_path: Path) -> None:
    for job in ("first", "second"):
        agent(tmp_path / job, f"who = {job!r}", "helper_of_jobs.py")
        agent(
            tmp_path / job,
            "import json\nfrom helper_of_jobs import who\ndef solve(): return who\n",
            "solver.py",
        )
    assert load_object("first/solver.py->solve")() == "first"
    agent(tmp_path / "first", "def twice(n): return 2 * n\n", "helper_not_imported_yet.py")
    agent(
        tmp_path / "first",
        "from helper_not_imported_yet import twice\ndef score(): return twice(2)\n",
        "scorer.py",
    )
    assert load_object("first/scorer.py->score")() == 4
    with pytest.raises(
        ConfigError,
        match=r"solver.py imports helper_of_jobs, and .*first/helper_of_jobs.py.*of its own",
    ):
        load_object("second/solver.py->solve")
    agent(tmp_path / "second", "import helper_of_jobs\n", "third.py")
    with pytest.raises(ConfigError, match="imports helper_of_jobs"):
        load_object("second/third.py->solve")


def test_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    agent(tmp_path / "one", "value = 1\n")
    agent(tmp_path / "two", "value = 2\n")
    assert load_object("one/my_agent_a.py->value") == 1
    assert load_object("two/my_agent_a.py->value") == 2


def test_a_file_named_like_a_library_does_not_hide_it(tmp_path: Path) -> None:
    agent(tmp_path, "value = 1\n", "json.py")
    assert load_object("json.py->value") == 1
    import json

    assert json.dumps(1) == "1"


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    agent(tmp_path / "deep", "value = 7\n", "my_neighbour_a.py")
    agent(tmp_path / "deep", "from my_neighbour_a import value\n")
    assert load_object("deep/my_agent_a.py->value") == 7


def test_the_config_file_s_folder_comes_first(tmp_path: Path) -> None:
    agent(tmp_path, "value = 'here'\n")
    agent(tmp_path / "there", "value = 'there'\n")
    (tmp_path / "there" / "c.yaml").write_text("ajet: {}\n")
    assert load_config(tmp_path / "there" / "c.yaml").load("my_agent_a.py->value") == "there"


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("x = 1\n", "my_agent_a.py->solv", "there is no 'solv' in it; it has x"),
        ("def solve(): ...\n", "my_agent_a.py->solv", "did you mean solve?"),
        ("x = 1\n", "agnt.py->solve", "there is no file agnt.py in"),
        (
            "x = 1\n",
            "no.such.module->solve",
            "no module named 'no' in this directory or among the installed packages",
        ),
        ("x = 1\n", "solve", "a class path is package.module->Name"),
        ("x = 1\n", "my_agent_a.py->", "a class path is package.module->Name"),
        ("def solve(:\n", "my_agent_a.py->solve", "cannot be imported: SyntaxError"),
        (
            "\n1 / 0\n",
            "my_agent_a.py->solve",
            "ZeroDivisionError: division by zero (my_agent_a.py line 2)",
        ),
        (
            "import no_such_thing\n",
            "my_agent_a.py->x",
            "No module named 'no_such_thing' (my_agent_a.py line 1)",
        ),
        ("import no_such_thing\n", "my_agent_a->x", "No module named 'no_such_thing'"),
        (
            "raise SystemExit(3)\n",
            "my_agent_a.py->x",
            "cannot be imported: SystemExit: 3 (my_agent_a.py line 1)",
        ),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, text: str, path: str, expected: str) -> None:
    agent(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_object(path)
    assert expected in str(caught.value)


def test_a_failed_import_is_tried_again(tmp_path: Path) -> None:
    agent(tmp_path, "1 / 0\n")
    with pytest.raises(ConfigError):
        load_object("my_agent_a.py->value")
    agent(tmp_path, "value = 22222\n")
    assert load_object("my_agent_a.py->value") == 22222


@pytest.mark.slow
def test_the_config_loads_no_heavy_package() -> None:
    heavy = ("torch", "transformers", "duckdb", "pyarrow", "openai", "datasets", "sympy", "rich")
    ours = "ajet_sdk.config, ajet_sdk.tasks.load, ajet_sdk.judges.load"
    code = f"import sys, {ours}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"


def test_threads_that_load_a_file_at_once_get_its_names(tmp_path: Path) -> None:
    """And it is imported once; Python's own import of a name waits in the same way."""
    (tmp_path / "together.py").write_text("import time\ntime.sleep(0.05)\nanswer = object()\n")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: load_object("together.py:answer", tmp_path), range(4)))
    assert len(set(answers)) == 1
