"""The `ajet` command: what it prints, what it refuses, how it exits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_tools.cli.app import app
from ajet_tools.cli.arguments import AgentOptions, JobOptions, split_arguments
from ajet_tools.cli.machine import EXTRAS, required
from ajet_tools.cli.train import newest_experiment
from tests.serving import answering, replying, serving

ROOT = Path(__file__).parents[2]
SCRIPTED = ["--judge", "agent.py:exact", "--tasks", "tasks.jsonl", "--model", "replies.py:reply"]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory of its own, and no module of one test left for the next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def ajet_(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def refused(*args: str, code: int = 2) -> str:
    done = ajet_(*args)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return str(done.stderr)


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert ajet_("init", "demo").exit_code == 0
    monkeypatch.chdir(tmp_path / "demo")
    return tmp_path / "demo"


def process(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("OPENAI_API_KEY", None)
    command = [sys.executable, "-m", "ajet", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=env, check=False, **more
    )


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, ajet_tools.cli.app as a; sys.argv = ['ajet', '--help']\ntry: a.main()\nexcept"
        " SystemExit: pass\n"
    )
    code += (
        "print([m for m in ('pydantic', 'duckdb', 'torch', 'openai', 'starlette', 'numpy') if m in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip().endswith("[]")


def test_every_command_is_there_without_any_extra() -> None:
    code = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(("torch", "transformers", "peft", "ray", "trinity", "vllm", "verl", "tinker", "textual"))
import ajet_tools.cli
for module in pkgutil.walk_packages(ajet_tools.cli.__path__, "ajet_tools.cli."):
    importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("filter {0} chars<9 -o {1}", []),
        ("export {0} -o {1}", []),
        ("check {0}", ["rich"]),
    ],
)
def test_commands_of_rows_load_nothing_that_they_do_not_need(
    tmp_path: Path, command: str, needed: list[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"main_query": "x"}\n')
    args = ["ajet", "dataset", *command.format(rows, tmp_path / "out.jsonl").split()]
    code = (
        f"import sys, ajet_tools.cli.app as a; sys.argv = {args}\ntry: a.main()\nexcept SystemExit:"
        " pass\n"
    )
    code += (
        "print([m for m in ('rich', 'asyncio', 'ajet_sdk.types', 'ajet_tools.trace', 'jinja2') if m"
        " in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip().endswith(str(needed))


PARAMETERS = """
import inspect, json, sys, typing
import typer.main
from ajet_tools.cli.app import app

def parameters(command, path):
    yield path, [[type(p).__name__, p.name, p.opts, p.nargs, p.required] for p in command.params]
    for name, below in getattr(command, "commands", {}).items():
        yield from parameters(below, f"{path} {name}")

print(json.dumps([*parameters(typer.main.get_command(app), "ajet")]))
"""
AS_ON_PYTHON_310 = """
import inspect, typing
resolved = typing.get_type_hints

def get_type_hints(of, *args, **more):
    hints = resolved(of, *args, **more)
    if inspect.isclass(of):
        return {n: typing.Optional[h] if getattr(of, n, 0) is None else h for n, h in hints.items()}
    defaults = {p.name for p in inspect.signature(of).parameters.values() if p.default is None}
    return {name: typing.Optional[hint] if name in defaults else hint for name, hint in hints.items()}

typing.get_type_hints = get_type_hints
"""


@pytest.mark.slow
def test_every_command_has_the_same_parameters_where_type_hints_are_resolved_as_on_python_310(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python 3.10 wraps the hint of a parameter whose default is None, `Annotated` and all, in
    `Optional`."""
    exec(PARAMETERS, {})
    here = capsys.readouterr().out
    command = [sys.executable, "-c", AS_ON_PYTHON_310 + PARAMETERS]
    there = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert len(json.loads(here)) > 40
    assert json.loads(here) == json.loads(there)


def test_the_short_help_is_that_of_the_command() -> None:
    root: Any = typer.main.get_command(app)
    for group in (root, root.commands["trace"], root.commands["dataset"]):
        for name in group.modules:
            assert (
                group.commands[name].help.split("\n\n")[0].replace("\n", " ")
                == group.summary_of(name)
                != ""
            ), name


def test_version_and_no_arguments() -> None:
    assert ajet_("--version").stdout.strip() == f"ajet {ajet.__version__}"
    assert "Usage: ajet" in ajet_().output
    assert "Did you mean 'train'?" in refused("trian")
    assert "ajet trace check FILE" in refused("trace", "audit")
    assert "ajet dataset dedup --against" in refused("dataset", "decontaminate")


@pytest.mark.slow
def test_the_starter_runs_at_once(starter: Path) -> None:
    done = ajet_("run", "agent.py:solve", *SCRIPTED, "-k", "2", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["reward"] == 0.75
    assert report["pass_at"] == {"1": 0.75, "2": 0.75}
    assert [len(task["episodes"]) for task in report["tasks"]] == [2] * 8
    assert (starter / report["directory"] / "trace.duckdb").is_file()
    shown = ajet_("trace", "ls", report["directory"], "--json")
    assert shown.exit_code == 0, shown.output
    assert report["run_id"] in shown.stdout


@pytest.mark.slow
def test_the_starter_s_readme_is_true(starter: Path) -> None:
    text = (starter / "README.md").read_text()
    assert text.startswith("# demo\n")
    assert "    ajet run agent.py:solve " + " ".join(SCRIPTED) + "\n" in text
    debug = next(line for line in text.splitlines() if "--backbone debug" in line).split()[1:]
    assert ajet_(*[arg.strip('"') for arg in debug]).exit_code == 0
    checked = ajet_("config", "check", "config.yaml")
    assert checked.exit_code == 0, checked.output
    assert (
        "schema: ok\nimports: ok (workflow: agent.py->solve; judge: exact)\nresources: ok (tasks: 8"
        " to train on, 4 to" in (checked.stdout)
    )
    assert checked.stdout.endswith("config.yaml is fine\n") and checked.stderr == ""


def test_init_never_overwrites(starter: Path) -> None:
    (starter / "agent.py").write_text("mine")
    assert "already contains README.md, agent.py, " in refused("init", ".")
    assert (starter / "agent.py").read_text() == "mine"
    assert "a project's name" in refused("init", "bad name!")


@pytest.mark.slow
def test_what_is_logged_is_shown_once(starter: Path) -> None:
    """INFO lines too, on stderr, whatever the agent makes of the root logger; an error that stops a
    run as itself."""
    text = (starter / "agent.py").read_text()
    logs = "import logging\n\nlogging.basicConfig(level=0, format='root %(message)s')\n"
    logs += "logging.getLogger('ajet').info('recipe 3/40')\n"
    (starter / "agent.py").write_text(text.replace("import ajet\n", f"import ajet\n{logs}"))
    done = process(*DEBUG)
    assert done.returncode == 0 and "recipe" not in done.stdout
    assert [line for line in done.stderr.splitlines() if "recipe" in line] == ["recipe 3/40"]
    (starter / "agent.py").write_text(
        text.replace("    reply = client", '    raise KeyError("lost")\n    reply = client')
    )
    done = process(*DEBUG)
    assert done.returncode == 1 and done.stderr.count("only 0 of 2 episodes succeeded") == 1


@pytest.mark.slow
def test_the_account_of_a_debug_run_fits_a_terminal(
    starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    head, *rows = ajet_(*DEBUG).stdout.splitlines()
    columns = ["task", "status", "reward", "calls", "timelines", "tokens", "seconds", "output"]
    assert head.split() == columns and len(head) <= 80
    assert "What is 17 + 25?" in rows[0]
    assert re.fullmatch(r"Traces are in (\S+)\. To view them: ajet trace ls \1", rows[-1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["trace", "export", "--format", "mesages"],
            ["'mesages'", "choose one of tasks, messages", "did you mean messages?"],
        ),
        (["run", "agent.py:solve", "-k", "0"], ["must be at least 1"]),
        (["run", "agent.py:solve", "-k", "x"], ["must be an integer"]),
    ],
)
def test_a_wrong_value_of_an_option_is_told_in_plain_words(
    starter: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    done = ajet_(*arguments)
    assert done.exit_code == 2
    for word in words:
        assert word in done.stderr
    assert "Input should" not in done.stderr and "Value error" not in done.stderr


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_directory_that_cannot_be_written_is_a_usage_error(starter: Path, place: str) -> None:
    (starter / "file").touch()
    done = ajet_("run", "agent.py:solve", *SCRIPTED, "--limit", "1", "--exp-dir", place)
    assert done.exit_code == 2 and place in done.stderr and "--exp-dir" in done.stderr


def test_an_empty_file_of_tasks_is_named(starter: Path) -> None:
    (starter / "empty.jsonl").touch()
    done = ajet_(
        "run",
        "agent.py:solve",
        "--judge",
        "agent.py:exact",
        "--tasks",
        "empty.jsonl",
        "--model",
        "replies.py:reply",
    )
    assert done.exit_code == 2 and "empty.jsonl" in done.stderr


def test_a_failing_agent_is_reported_by_cause(starter: Path) -> None:
    text = (
        (starter / "agent.py")
        .read_text()
        .replace("    reply = client", '    raise KeyError("lost")\n    reply = client')
    )
    (starter / "agent.py").write_text(text)
    done = ajet_("run", "agent.py:solve", *SCRIPTED, "--limit", "2")
    assert done.exit_code == 1
    assert "No episode has a reward: 2 episodes of 2 tasks" in done.stdout
    assert "2 × KeyError" in done.stdout
    assert "failed" in done.stdout


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run"], "no agent given"),
        (["run", "agent.py:solve"], "no tasks given: pass --tasks"),
        (
            ["run", "agent.py:solve", "--tasks", "tasks.jsonl"],
            "no model given: pass --model NAME@URL",
        ),
        (["run", "agent.py:solv", *SCRIPTED], "did you mean solve?"),
        (["run", "agent.py", *SCRIPTED], "an agent is file.py:function"),
        (["run", "agent.py:solve", "b.py:solve", *SCRIPTED], "give one agent only"),
        (["run", "agent.py:solve", *SCRIPTED, "--judge", "exakt"], "a judge is one of exact"),
        (
            ["run", "agent.py:solve", *SCRIPTED, "--tasks", "none.jsonl"],
            "there is no file none.jsonl",
        ),
        (["run", "agent.py:solve", *SCRIPTED, "-k", "2", "ajet.rollout.temperature=0"], "pass@2"),
        (
            ["run", "agent.py:solve", *SCRIPTED, "ajet.rollout.num_repeats=3"],
            "did you mean rollout.num_repeat?",
        ),
        (["run", "--conf", "confg.yaml"], "did you mean config.yaml?"),
        (["train"], "nothing to train"),
        pytest.param(
            ["train", "--conf", "config.yaml", "--backbone", "trinity"],
            "ajet install trinity",
            marks=pytest.mark.skipif(
                find_spec("trinity") is not None, reason="Trinity is installed"
            ),
        ),
        (["train", "--conf", "config.yaml", "--backbone", "trnity"], "did you mean trinity?"),
        (
            ["--conf", "config.yaml", "ajet.rollout.num_repeat=1"],
            "with one attempt per task every advantage is 0",
        ),
        (["--conf", "config.yaml", "--with-appworld"], "--with-appworld is not implemented"),
        (["--conf", "config.yaml", "--resume"], "nothing to resume"),
        (
            ["config", "show", "--conf", "config.yaml", "rollout.num_repeat=1"],
            "an override starts with its top-level key",
        ),
        (["config", "schema", "rolout"], "there is no section 'rolout'"),
        (["--cnof", "x"], "No such option"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(
    starter: Path, args: list[str], expected: str
) -> None:
    said = refused(*args)
    assert expected in " ".join(said.replace("│", " ").split())


@pytest.mark.slow
def test_a_bad_row_is_named(starter: Path) -> None:
    with (starter / "tasks.jsonl").open("a") as file:
        file.write("oops\n")
    assert "TaskError: tasks.jsonl line 9 is not JSON" in refused(
        "run", "agent.py:solve", *SCRIPTED
    )


def test_traceback_shows_where_an_error_was_raised(starter: Path) -> None:
    done = ajet_("run", "agent.py:nothing", *SCRIPTED, "--traceback")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
    assert "load_object" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("who", ["agent", pytest.param("reply", marks=pytest.mark.slow)])
def test_ctrl_c_is_130(starter: Path, who: str) -> None:
    """At once, also where the scripted reply is what waits."""
    if who == "agent":
        waits = "    print('asked', flush=True)\n    await asyncio.sleep(3600)\n    reply = client"
        text = (
            (starter / "agent.py")
            .read_text()
            .replace("    reply = client", waits)
            .replace("def solve", "async def solve")
        )
        (starter / "agent.py").write_text(
            text.replace("import ajet", "import asyncio\n\nimport ajet")
        )
    else:
        waits = (
            "    import time\n\n    print('asked', flush=True)\n    time.sleep(3600)\n    numbers ="
        )
        (starter / "replies.py").write_text(
            (starter / "replies.py").read_text().replace("    numbers =", waits)
        )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ajet", "run", "agent.py:solve", *SCRIPTED, "--limit", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "asked\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=300)
    assert child.returncode == 130
    assert errors.splitlines()[-1] == "Interrupted: records already written are kept"
    assert "Traceback" not in errors


DEBUG = [
    "--conf",
    "config.yaml",
    "--backbone",
    "debug",
    "ajet.model.scripted=replies.py:reply",
    "ajet.rollout.num_repeat=5",
]


def effective(directory: Path) -> dict[str, Any]:
    """The config of the one experiment in there."""
    (experiment,) = directory.iterdir()
    values = yaml.safe_load((experiment / "config.yaml").read_text())["ajet"]
    assert values.pop("experiment_name") == experiment.name
    assert Path(values.pop("experiment_dir")).name == experiment.name
    return dict(values)


@pytest.mark.slow
def test_conf_alone_is_train(starter: Path) -> None:
    swapped = [*DEBUG[4:], *DEBUG[2:4], *DEBUG[:2]]
    for name, args in {
        "a": DEBUG,
        "b": ["train", *DEBUG],
        "c": ["train", *swapped],
        "d": ["--traceback", *DEBUG],
    }.items():
        done = ajet_(*args, "--exp-dir", name)
        assert done.exit_code == 0, done.output
    first, *others = (effective(starter / name) for name in "abcd")
    assert all(other == first for other in others)
    assert (first["backbone"], first["rollout"]["num_repeat"]) == ("debug", 5)


@pytest.mark.slow
def test_compatible_flags_are_accepted_with_a_word(starter: Path) -> None:
    done = ajet_(*DEBUG, "--skip-check-avail-gpu", "--prefix", "x")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("has no effect") == 1


@pytest.mark.slow
def test_ray_is_refused_where_nothing_would_run_on_it(starter: Path) -> None:
    for flags in (["--with-ray"], ["--with-ray-cluster"], ["--with-ray-cluster", "127.0.0.1:6379"]):
        done = ajet_(*DEBUG, *flags)
        assert done.exit_code == 2, done.output
        assert "ajet work" in done.stderr
    both = ajet_(*DEBUG, "--with-ray", "--with-ray-cluster", "auto")
    assert both.exit_code == 2
    assert "give only one of them" in both.stderr


@pytest.mark.slow
def test_debug_names_breakpoints(starter: Path) -> None:
    """A tag that is named stops in the debugger, which ends at once without a terminal; another
    does not."""
    text = (
        (starter / "agent.py")
        .read_text()
        .replace("    reply = client", '    ajet.bp("LOOK")\n    reply = client')
    )
    (starter / "agent.py").write_text(text)
    assert "bp(" not in process(*DEBUG, "--debug", "A|B", input="").stdout
    assert "agent.py" in process(*DEBUG, "--debug", "A|LOOK", input="").stdout


def test_resume_finds_the_newest_experiment(tmp_path: Path) -> None:
    def config(**values: Any) -> Config:
        return load_config(values={"experiment_name": "math-20260301-000000", **values})

    for name in (
        "math-20260101-000000",
        "math-20260102-000000",
        "math-other",
        "other-20260105-000000",
    ):
        (tmp_path / "launcher_record" / name).mkdir(parents=True)
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert newest_experiment(config(), None).directory == Path(
        "launcher_record/math-20260102-000000"
    )
    moved = config().model_copy(update={"experiment_dir": "runs/math-20260301-000000"})
    assert newest_experiment(moved, Path("runs")).directory == Path("runs/math-20260102-000000")
    named = config(experiment_name="math-other")
    assert newest_experiment(named, None) == named
    fixed = config(experiment_dir="anywhere")
    assert newest_experiment(fixed, None) == fixed


def test_training_needs_no_file(starter: Path) -> None:
    job = JobOptions(judge="regex:=(.*)", model="m/n")
    config = job.config("agent.py:solve", tasks="tasks.jsonl", val_tasks="val.jsonl")
    assert config.experiment_name.startswith("agent-20")
    assert config.rollout.user_workflow == f"{starter / 'agent.py'}:solve"
    assert (config.task_judge.judge_type, config.task_judge.pattern) == ("regex", "=(.*)")
    assert config.task_reader.jsonl_dataset_file.validation.file_path == str(starter / "val.jsonl")
    assert config.model.path == "m/n"
    assert JobOptions(Path("config.yaml"), "exact").config(None).task_judge.judge_type == "exact"


ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "name": "old"}
NO_MODEL = {"path": None, "base_url": None, "name": None, "scripted": None}


@pytest.mark.parametrize("configured", [ENDPOINT, {"scripted": "old.py->reply"}, {"path": "old"}])
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("qwen2.5:7b@http://h/v1", {"base_url": "http://h/v1", "name": "qwen2.5:7b"}),
        ("@cf/llama@https://h/v1", {"base_url": "https://h/v1", "name": "@cf/llama"}),
        ("owner/name", {"path": "owner/name"}),
        ("package.module->reply", {"scripted": "package.module->reply"}),
    ],
)
def test_the_option_model_takes_the_place_of_all_that_names_one_in_a_config(
    starter: Path, configured: dict[str, str], option: str, expected: dict[str, str]
) -> None:
    document = {"ajet": {"model": {**configured, "dtype": "float32"}}}
    (starter / "job.yaml").write_text(json.dumps(document))
    model = AgentOptions(conf=Path("job.yaml"), model=option).config("agent.py:solve").model
    assert {name: getattr(model, name) for name in NO_MODEL} == {**NO_MODEL, **expected}
    assert model.dtype == "float32"


def test_tasks_are_a_file_a_directory_or_a_hub_name(starter: Path) -> None:
    (starter / "data").mkdir()
    reader = JobOptions().config(None, tasks="data").task_reader
    assert (reader.type, reader.huggingface_dat_repo.dataset_path) == (
        "huggingface_dat_repo",
        str(starter / "data"),
    )
    assert (
        JobOptions()
        .config(None, tasks="openai/gsm8k")
        .task_reader.huggingface_dat_repo.dataset_path
        == "openai/gsm8k"
    )
    assert JobOptions().config(None, tasks="tasks.jsonl").task_reader.type == "jsonl_dataset_file"


def test_arguments_are_an_agent_and_overrides() -> None:
    assert split_arguments(["a.py:f", "ajet.x=1"]) == ("a.py:f", ["ajet.x=1"])
    assert split_arguments(["ajet.model.scripted=replies.py:reply"]) == (
        None,
        ["ajet.model.scripted=replies.py:reply"],
    )
    assert split_arguments([]) == (None, [])


def test_config_show_says_where_values_came_from(starter: Path) -> None:
    done = ajet_("config", "show", "--conf", "config.yaml", "--set", "ajet.rollout.top_p=0.5")
    assert re.search(r"rollout\.num_repeat +8  \(in config\.yaml line 8\)", done.stdout)
    assert re.search(r"rollout\.top_p +0\.5  \(on the command line\)", done.stdout)
    assert "gamma" not in done.stdout
    rows = json.loads(ajet_("config", "show", "--json").stdout)["ajet"]
    assert {"key": "rollout.gamma", "value": 1.0, "from": "default"} in rows


def test_config_schema_is_a_json_schema_of_the_file(starter: Path) -> None:
    schema = json.loads(ajet_("config", "schema", "--json").stdout)
    assert schema["properties"]["ajet"]["properties"]["rollout"]
    assert "#/$defs/Rollout" in json.dumps(schema)
    assert "Rollout" in schema["$defs"]
    text = ajet_("config", "schema", "rollout").stdout
    assert "rollout.num_repeat  integer, ≥ 1  [4]" in text
    assert "data.train_batch_size" not in text


def test_config_check_says_everything_that_is_wrong(starter: Path) -> None:
    overrides = [
        "ajet.rollout.user_workflow=agent.py->no",
        "ajet.task_judge.judge_protocol=none.py->x",
    ]
    done = ajet_("config", "check", "config.yaml", "ajet.task_reader.type=env_service", *overrides)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 3
    sound = json.loads(ajet_("config", "check", "config.yaml", "--json").stdout)
    assert (
        sound["resources"]
        .pop("model")
        .startswith("Qwen/Qwen2.5-0.5B-Instruct of the Hugging Face hub, ")
    )
    assert sound == {
        "file": "config.yaml",
        "notices": [],
        "schema": {"checked": True, "problems": []},
        "imports": {
            "checked": True,
            "problems": [],
            "workflow": "agent.py->solve",
            "judge": "exact",
        },
        "resources": {
            "checked": True,
            "problems": [],
            "tasks": {"train": 8, "val": 4},
        },
    }


AGENTJET = Path(__file__).parents[1] / "sdk" / "agentjet"
LACKING = {
    "appworld.yaml": ["the environment service at"],
    "learn2ask.yaml": [
        "task_reader.jsonl_dataset_file.training.file_path: there is no file train.jsonl"
    ],
    "math_http.yaml": ["there is no file train.jsonl", "model.path: there is no directory"],
}


@pytest.mark.parametrize("name", LACKING)
def test_a_config_that_only_lacks_its_data_is_sound(name: str) -> None:
    done = ajet_("config", "check", str(AGENTJET / name))
    assert done.exit_code == 0, done.output
    assert "schema: ok\nimports: ok (workflow: plain.py->" in done.stdout
    assert f"{name} has no problem and {len(LACKING[name])} missing resource(s)" in done.stdout
    told = json.loads(ajet_("config", "check", str(AGENTJET / name), "--json").stdout)
    assert told["schema"]["problems"] == told["imports"]["problems"] == []
    for problem, start in zip(told["resources"]["problems"], LACKING[name], strict=True):
        assert start in problem


def test_what_is_wrong_in_each_part_is_told_apart(
    starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    done = ajet_("config", "check", "config.yaml", "ajet.rollout.num_repeat=none", "--json")
    told = json.loads(done.stdout)
    assert (
        done.exit_code == 2
        and len(told["schema"]["problems"]) == 1
        and not told["imports"]["checked"]
    )
    (starter / "agent.py").write_text("import a_package_that_is_not_here\n")
    (starter / "tasks.jsonl").unlink()
    overrides = ["ajet.model.base_url=http://models.invalid:1/v1", "ajet.model.name=m"]
    done = ajet_("config", "check", "config.yaml", *overrides, "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 2 and told["schema"]["problems"] == []
    assert "a_package_that_is_not_here" in told["imports"]["problems"][0]
    file, service, key = told["resources"]["problems"]
    assert (
        "there is no file tasks.jsonl" in file and "models.invalid:1 cannot be reached" in service
    )
    assert "OPENAI_API_KEY is not set" in key


@pytest.mark.parametrize("learns", [["adv_estimator=sft"], ["replay=4"]])
def test_conversations_to_learn_from_are_a_resource(starter: Path, learns: list[str]) -> None:
    given = [f"ajet.trainer_common.algorithm.{value}" for value in (*learns, "data=expert.jsonl")]
    done = ajet_("config", "check", "config.yaml", *given)
    assert (
        "trainer_common.algorithm.data: there is no file or directory expert.jsonl" in done.stderr
    ), done.output
    (starter / "expert.jsonl").write_text("")
    assert "expert.jsonl" not in ajet_("config", "check", "config.yaml", *given).output


def test_a_row_that_is_no_task_is_no_missing_resource(starter: Path) -> None:
    (starter / "tasks.jsonl").write_text("[1]\n")
    done = ajet_("config", "check", "config.yaml")
    assert (
        done.exit_code == 2 and "resources: " in done.stderr and "has 1 problem(s)\n" in done.stdout
    )


def test_config_check_takes_several_files(starter: Path) -> None:
    (starter / "other.yaml").write_text("ajet: {rollout: {no_key: 1}}\n")
    done = ajet_("config", "check", "config.yaml", "other.yaml", "ajet.backbone=debug")
    assert (
        done.exit_code == 2
        and "config.yaml is fine" in done.stdout
        and "no_key is not a known key" in done.stderr
    )
    assert "other.yaml has 1 problem(s)" in done.stdout
    assert ajet_("config", "check", "config.yaml", "config.yaml").exit_code == 0
    assert "name a config file" in refused("config", "check")


def test_config_check_tries_the_workflow_on_a_task(starter: Path) -> None:
    text = (starter / "agent.py").read_text()
    (starter / "agent.py").write_text(
        text.replace("(question: str)", "(question: str, hint: str, more: str)")
    )
    assert "no value for parameters `hint`, `more`" in refused("config", "check", "config.yaml")


@pytest.mark.slow
def test_doctor_says_what_is_here(tmp_path: Path) -> None:
    done = ajet_("doctor", "--json")
    assert done.exit_code == 0
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["loopback"]["status"] == found["core"]["status"] == "ok"
    assert str(tmp_path.resolve()) in found["write access"]["detail"]
    assert "duckdb" in ajet_("doctor").stdout


@pytest.mark.slow
def test_doctor_fails_where_a_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ajet_("doctor", str(tmp_path / "none"))
    assert done.exit_code == 1
    assert re.search(
        r"fail +write access +.*No such file or directory; choose another directory", done.stdout
    )
    monkeypatch.setattr(
        "ajet_tools.cli.doctor.installed_version",
        lambda name: None if name == "textual-plotext" else "1",
    )
    checks = json.loads(ajet_("doctor", "--json").stdout)["checks"]
    (tools,) = (check for check in checks if check["name"] == "extra tools")
    assert tools["status"] == "miss" and tools["fix"] == 'pip install "ajet[tools]"'
    missing, present = re.fullmatch(r"missing (.+) \(has (.+)\)", tools["detail"]).groups()
    assert missing == "textual-plotext"
    assert {"textual 1", "textual-serve 1"} <= set(present.split(", "))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("health", "status", "said"),
    [
        (
            {"env_type": "Lake", "running": 2, "limit": 8, "created": 9, "lost": 1},
            "ok",
            "2 of 8 instances in use",
        ),
        (
            {"env_type": "Lake", "running": 8, "limit": 8, "created": 9, "lost": 1},
            "miss",
            "raise --instances",
        ),
        ("OK", "ok", "answers"),  # a service that is not ours
    ],
)
def test_doctor_asks_an_environment_service(health: Any, status: str, said: str) -> None:
    with serving(answering(health)) as url:
        done = ajet_("doctor", "--environment", url)
    (line,) = (line for line in done.stdout.splitlines() if f"environment {url}" in line)
    assert line.startswith(status) and said in line
    assert ajet_("doctor", "--environment", "http://127.0.0.1:9").exit_code == 1


def test_doctor_knows_the_packages_of_the_project() -> None:
    assert {"pydantic", "duckdb", "openai"} <= set(required()) and "torch" not in required()
    assert (
        {"torch", "peft"} <= set(required("local"))
        and "verl" not in required("verl")
        and all(required(extra) for extra in EXTRAS)
    )


@pytest.mark.slow
def test_a_model_that_is_not_here_is_one_message_and_the_hub_is_asked_once_at_most(
    starter: Path,
) -> None:
    asked = []

    def hub(path: str, headers: object, body: object) -> tuple[int, Any]:
        asked.append(path)
        return 404, {}

    with serving(replying(hub)) as url:
        here = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(starter)}
        code = (
            "import sys\nfrom ajet_sdk.config import load_config\nfrom ajet_sdk.engines.open import"
            " open_engine\nfor path in sys.argv[1:]:\n    try:"
            " open_engine(load_config(values={'model': {'path': path}}))\n    except ValueError as"
            " error: print(error)\n"
        )
        models = {
            "gpt-4o-mini": "--model NAME@URL",
            "a/b/c": "no directory a/b/c",
            "./owner/there": "no directory ./owner/there",
            "tasks.jsonl": "is a file",
            "owner/name": "cannot be loaded from the Hugging Face hub",
        }
        env = {**os.environ, "PYTHONPATH": str(ROOT), **here}
        command = [sys.executable, "-c", code, *models]
        done = subprocess.run(
            command, cwd=starter, env=env, capture_output=True, text=True, check=True
        )
        for words, line in zip(models.values(), done.stdout.splitlines(), strict=True):
            assert line.startswith("model.path: ") and words in line
        assert [
            path for path in asked if path.startswith("/api/models") or "/resolve/" in path
        ] == ["/api/models/owner/name"]


@pytest.mark.slow
def test_without_the_extra_a_local_model_prints_the_line_that_installs_it(starter: Path) -> None:
    without = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'huggingface_hub'))"
    )
    run = ["run", "agent.py:solve", *SCRIPTED[:4], "--model", "."]
    each = f"""
from ajet_tools.cli.app import main
for arguments in {[run, ["train", *run[1:]], ["serve", "."], ["serve", "owner/name"], [*run[:-1], "gpt-4o-mini"]]}:
    sys.argv = ["ajet", *arguments]
    try:
        main()
    except SystemExit as left:
        print("=====", left.code, file=sys.stderr)
"""
    command = [sys.executable, "-c", f"{without}\n{each}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=starter, env=env, capture_output=True, text=True, check=False
    )
    said = done.stderr.split("===== 2\n")
    assert len(said) == 6 and said.pop() == "", done.stderr
    assert all('pip install "ajet[local]"' in one for one in said[:-1]), done.stderr
    assert "OPENAI_BASE_URL" in said[-1] and "--model NAME@URL" in said[-1], done.stderr
    assert "Traceback" not in done.stderr


ALIASES = "ajet:\n  project_name: &a0 [1]\n" + "".join(
    f"  k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
TROUBLE = {
    "a NUL": ("ajet: {project_name: 'a\0b'}", "nul.yaml is not valid YAML"),
    "depth": ("ajet: " + "[" * 20_000 + "]" * 20_000, "levels deep"),
    "a bomb": (ALIASES, "aliases expand to more than"),
    "a ring": ("ajet: {project_name: &a [*a]}", "aliases expand to more than"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TROUBLE)
def test_a_file_that_no_config_can_be_is_one_message(name: str, tmp_path: Path) -> None:
    text, words = TROUBLE[name]
    (tmp_path / "nul.yaml").write_text(text)
    for command in (["train", "--conf", "nul.yaml"], ["config", "check", "nul.yaml"]):
        said = refused(*command)
        assert words in said and len(said) < 500
    if name != "a bomb":
        assert words.removeprefix("nul.yaml ") in refused(
            "run", "a.py:b", "--tasks", ".", text.replace("ajet: ", "ajet.x=", 1)
        )


def test_a_value_of_any_size_makes_a_short_message(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_text("ajet:\n  rollout:\n    num_repeat: " + "x" * 1_000_000)
    said = refused("train", "--conf", "big.yaml")
    assert "rollout.num_repeat must be a whole number" in said and len(said) < 1000


@pytest.mark.slow
def test_whatever_ends_a_command_is_one_message_and_traceback_shows_the_rest(starter: Path) -> None:
    (starter / "afile").touch()
    said = refused("run", "agent.py:solve", *SCRIPTED, "--exp-dir", "afile/x")
    assert said.count("\n") == 1 and "afile/x" in said and "Not a directory" in said
    (starter / "odd.py").write_text(
        "class Odd:\n    def __getattr__(self, name):\n        raise"
        " ZeroDivisionError('odd')\nreply = Odd()\n"
    )
    odd = ["run", "agent.py:solve", *SCRIPTED[:4], "--model", "odd.py:reply"]
    said = refused(*odd, code=1)
    assert (
        said.count("\n") == 1
        and "ZeroDivisionError: odd (odd.py line 3)" in said
        and "--traceback" in said
    )
    assert "Traceback" in ajet_(*odd, "--traceback").stderr
    (starter / "failing.py").write_text("def reply(ask):\n    return {}['nothing']\n")
    done = ajet_(*odd[:-1], "failing.py:reply")
    assert done.exit_code == 1 and "KeyError: 'nothing' (failing.py line 2)" in " ".join(
        done.output.split()
    )
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_a_full_disk_is_a_few_lines(starter: Path) -> None:
    """A limit on the size of files fails each write beyond it, of the trace, the log and the
    rest."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); "
    main = "from ajet_tools.cli.app import main; import sys; sys.argv[0] = 'ajet'; main()"
    command = [sys.executable, "-c", limit + main, "run", "agent.py:solve", *SCRIPTED, "-k", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=starter, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "trace.duckdb" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_an_agent_leaves_running_does_not_hold_up_the_end(
    starter: Path, fails: bool, daemon: bool
) -> None:
    """Also where the command fails, with an exit code of its own."""
    agent = (starter / "agent.py").read_text()
    poll = (
        "import threading, time\n\ndef poll():\n    while True:\n       "
        " time.sleep(0.1)\n\n@ajet.workflow"
    )
    agent = agent.replace("@ajet.workflow", poll, 1)
    start = (
        f"    threading.Thread(target=poll, name='poller', daemon={daemon}).start()\n    reply = "
    )
    agent = agent.replace("    reply = ", start)
    (starter / "agent.py").write_text(
        agent.replace("    return reply", "    1 / 0\n    return reply") if fails else agent
    )
    done = process("run", "agent.py:solve", *SCRIPTED, "--limit", "1")
    assert done.returncode == (1 if fails else 0), done.stderr
    assert (
        "exited while 1 thread was still running: poller, in poll (" in done.stderr
    ) is not daemon
    assert (f"{starter / 'agent.py'}:" in done.stderr) is not daemon
    assert "leaked" not in done.stderr, "and no library has anything to say"


@pytest.mark.slow
def test_a_thread_that_ends_by_itself_is_waited_for(starter: Path) -> None:
    """Also the idle ones of an executor that nobody shut down."""
    agent = (starter / "agent.py").read_text()
    leaves = (
        "    from concurrent.futures import ThreadPoolExecutor\n\n    pool ="
        " ThreadPoolExecutor(2)\n    pool.submit(print, 'from the pool').result()\n    reply ="
        " client"
    )
    (starter / "agent.py").write_text(agent.replace("    reply = client", leaves))
    done = process("run", "agent.py:solve", *SCRIPTED, "--limit", "1")
    assert (
        done.returncode == 0
        and "from the pool" in done.stdout
        and "still running" not in done.stderr
    ), done.stderr


@pytest.mark.parametrize("command", [
    ("trace", "import", "rows.jsonl", "--from", "openai", "--out", "file/x.duckdb"),
    ("trace", "sql", "SELECT 1", "trace.duckdb", "--out", "file/x.csv"),
    ("dataset", "filter", "rows.jsonl", "true", "--out", "file/x.jsonl"),
    ("dataset", "export", "rows.jsonl", "--out", "file/x.parquet"),
    ("dataset", "dedup", "rows.jsonl", "--out", "file/x.csv"),
    ("dataset", "split", "rows.jsonl", "--fractions", "a=0.5,b=0.5", "--out", "file/x"),
])  # fmt: skip
def test_an_output_below_a_file_is_refused_in_a_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    Path("file").write_text("mine")
    Path("rows.jsonl").write_text('{"main_query": "What is 1 + 1?", "metadata": {"answer": "2"}}\n')
    with ajet.trace("trace.duckdb"):
        pass
    done = ajet_(*command)
    assert done.exit_code in (1, 2) and "file/x" in done.stderr, done.output
    assert "Traceback" not in done.output and len(done.stderr.splitlines()) == 1
    assert Path("file").read_text() == "mine"
