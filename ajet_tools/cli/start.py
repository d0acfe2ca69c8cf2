"""`ajet demo` trains a small model to use a calculator; `ajet init` writes a starter project or a
tutorial."""

from __future__ import annotations

import difflib
import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import ajet_tools
from ajet_sdk import run
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.reporting.output import echo
from ajet_sdk.reporting.paired import paired
from ajet_sdk.reporting.results import view_command
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_tools.cli.from_agent import Agent, job_files, read_agent
from ajet_tools.text.tables import console, table

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.reporting.results import TunedModel


DEMO = "math_agent"
PRETRAINED = "pretrained"
_SHORTER = (
    "ajet.experiment_name=demo",
    "ajet.data.train_batch_size=8",
    "ajet.trainer_common.total_steps=18",
    "ajet.trainer_common.test_freq=18",
    "ajet.trainer_common.save_freq=18",
    "ajet.trainer_common.val_tasks=64",
)
"""Overrides that shorten the tutorial's run to a minute."""
_SHORTER_PRETRAINED = ("ajet.experiment_name=demo", "ajet.trainer_common.val_tasks=32")
_REPLIES = 8
"""Number of held-out questions whose replies are printed."""


def _examples() -> dict[str, Path]:
    """Returns the tutorials by name, in the installed package or the checkout."""
    package = Path(ajet_tools.__file__).parent
    folder = next(
        place for place in (package / "tutorial", package.parent / "tutorial") if place.is_dir()
    )
    return {
        p.name.removeprefix("example_"): p for p in sorted(folder.glob("example_*")) if p.is_dir()
    }


def _example_names(incomplete: str) -> list[str]:
    return [name for name in _examples() if name.startswith(incomplete)]


def init(
    name: Annotated[Path | None, Argument(show_default=False)] = None,
    example: Annotated[str | None, Option(autocompletion=_example_names)] = None,
    agent: Annotated[str | None, Option("--from", metavar="FILE.py[:FUNCTION]")] = None,
    tasks: Annotated[
        Path | None,
        Option(metavar="FILE|TRACE", help="--from: a few tasks as JSON lines, or recorded calls."),
    ] = None,
) -> None:
    """Write a starter project that runs at once, one of the tutorials, or a job around an agent of
    yours.

    Args:
        name: Directory to create; `.` for the current one.
        example: Write this tutorial instead, such as math_agent; `list` prints their names.
        agent: Write a job around this agent instead: judge, tasks, config. The file is read and not changed.

    \b
    ajet init demo
    cd demo
    ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --model replies.py:reply
    ajet init --example frozenlake
    ajet init --from agent.py --tasks examples.jsonl job
    """
    if agent is not None:
        if example is not None:
            raise ConfigError("give either --from or --example")
        _init_job(read_agent(agent), tasks, name)
        return
    if tasks is not None:
        raise ConfigError("--tasks belongs to --from FILE.py")
    if example is not None:
        _init_example(example, name)
        return
    if name is None:
        raise ConfigError(
            "name a directory to create: `ajet init NAME`, or `ajet init --example math_agent`"
        )
    title = name.resolve().name
    if not re.fullmatch(r"[\w.-]+", title):
        raise ConfigError(
            "a project's name may contain letters, digits, dots, dashes and underscores (got"
            f" {title!r})"
        )
    source = resources.files("ajet_tools.cli") / "starter"
    files = {item.name: item.read_bytes() for item in source.iterdir() if item.is_file()}
    files["README.md"] = re.sub(rb"\bNAME\b(?!-)", title.encode(), files["README.md"])
    _write(name, files)
    for file in sorted(files):
        echo(f"  {name / file}")
    echo(
        f"Now run it, without a model:\n{_enter(name)}  ajet run agent.py:solve --judge"
        " agent.py:exact --tasks tasks.jsonl --model replies.py:reply"
    )


def _init_job(agent: Agent, tasks: Path | None, name: Path | None) -> None:
    name = name or Path(f"{agent.file.stem}-job")
    texts = job_files(agent, tasks, folder=name)
    files = {file: text.encode() for file, text in texts.items()}
    _write(name, files)
    for file in files:
        echo(f"  {name / file}")
    if b"NotImplementedError" in files["job.py"]:
        judge = "Write the judge in job.py"
    else:
        judge = "Look at the judge in job.py"
    echo(
        f"The agent is {agent.file.name}:{agent.name}, which is unchanged. {judge}, then measure a"
        f" baseline, and train:\n{_enter(name)}  ajet run --conf config.yaml --advise\n  ajet train"
        " --conf config.yaml"
    )


def _init_example(example: str, name: Path | None) -> None:
    known = _examples()
    if example == "list":
        for known_name, folder in known.items():
            title = (
                (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            )
            echo(f"  {known_name:<20}{title}")
        return
    if example not in known:
        near = difflib.get_close_matches(example, known, n=1, cutoff=0.5)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"there are {', '.join(known)}"
        raise ConfigError(f"there is no example {example!r}; {hint}")
    name = name or Path(f"example_{example}")
    files = _files(known[example])
    _write(name, files)
    for file in sorted(files):
        echo(f"  {name / file}")
    code = [content for file, content in files.items() if not file.endswith(".md")]
    for other_name in known:
        beside = (
            name.resolve().parent / f"example_{other_name}"
        )  # where its files refer to those of another example
        if (
            other_name != example
            and any(beside.name.encode() in content for content in code)
            and not beside.exists()
        ):
            echo(
                "It uses files of another example. Write that too: ajet init --example"
                f" {other_name} {beside}"
            )
    readme = "\n".join(files["README.md"].decode().splitlines())
    block = re.search(
        r"^```(?:sh|bash|console)\n(.*?)^```", readme, re.M | re.S
    )  # the first shell block
    lines = [] if block is None else block[1].splitlines()
    typed = [
        line.removeprefix("$ ")
        for line in lines
        if block and (line.startswith("$ ") or "$ " not in block[1])
    ]
    command = "\n".join(f"  {line}" for line in typed)
    echo(f"See {name / 'README.md'}. First command:\n{_enter(name)}{command}")


def _files(folder: Path) -> dict[str, bytes]:
    """Returns a tutorial's files, with paths in their text relative to its directory."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        generated = {"launcher_record", "__pycache__"} & {*relative.parts} or path.suffix in (
            ".duckdb",
            ".pyc",
            ".wal",
        )
        if path.is_file() and not generated and not path.name.startswith("."):
            content = path.read_bytes()
            # a picture may hold the bytes of such a path
            if b"\0" not in content:
                content = content.replace(f"tutorial/{folder.name}/".encode(), b"")
                content = content.replace(b"tutorial/example_", b"../example_")
            contents[str(relative)] = content
    return contents


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Writes a project's files. Raises ConfigError if one exists, or the directory can't be
    created."""
    taken = [file for file in sorted(files) if (folder / file).exists()]
    if taken:
        raise ConfigError(
            f"{folder} already contains {', '.join(taken)}; nothing was written. Choose another"
            " name"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; nothing was written")
    try:
        for file, content in sorted(files.items()):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error


def _enter(folder: Path) -> str:
    if folder.resolve() == Path.cwd():
        return ""
    return f"  cd {folder}\n"


def demo(
    directory: Annotated[
        Path | None, Argument(help="Output directory [ajet-demo].", show_default=False)
    ] = None,
    pretrained: Annotated[
        bool, Option("--pretrained", help="Train SmolLM2-135M-Instruct (downloads 93 MB).")
    ] = False,
) -> None:
    """Train a small model to use a calculator, on this machine's CPU, in about a minute and without
    a network.

    With --pretrained a pretrained model learns to answer with a number and nothing else, and its
    replies to held-out questions are printed, before and after. The agent, its judge and its tasks
    are written to the directory, to be read and changed.

    \b
    ajet demo
    ajet demo --pretrained
    """
    for package in (
        "torch",
        "transformers",
        "safetensors",
        *(("peft", "gguf") if pretrained else ()),
    ):
        if find_spec(package) is None:  # check before writing files
            raise MissingExtra(package, "local")
    name = PRETRAINED if pretrained else DEMO
    directory = directory or Path("ajet-demo-pretrained" if pretrained else "ajet-demo")
    if not (directory / f"{name}.yaml").exists():
        _write(directory, _files(_examples()[name]))
    record = directory / "launcher_record"
    values: dict[str, object] = {"experiment_dir": str(record / "demo")}
    if not pretrained:
        values["model"] = {"path": str((record / "model").resolve())}
    config = load_config(
        directory / f"{name}.yaml", _SHORTER_PRETRAINED if pretrained else _SHORTER, values
    )
    echo(f"The agent is {directory / 'agent.py'}: the OpenAI SDK and two decorators.")
    if pretrained:
        echo(
            f"{config.model.path} answers held-out questions first, and is then trained on the"
            " judge's rewards:"
        )
    else:
        echo("Its model is created from scratch, then trained on the judge's rewards:")
    tuned = run.train(config)
    echo(f"\n{tuned}")
    if pretrained:
        _print_replies(config, tuned)
    echo(f"""
What to look at:
  {view_command(config.directory)}    # every episode, call and token, and why each was trained
  ajet trace ls {config.directory}      # the episodes in a table
  ajet trace ledger {config.directory}  # what became of every sampled token
Then change {directory / "agent.py"}, and run the whole job, which takes a few minutes:
  cd {directory}
  ajet --conf {name}.yaml""")


def _print_replies(config: Config, tuned: TunedModel) -> None:
    """Prints replies to held-out questions before and after training, and the paired difference of
    rewards."""
    with open_trace(config.directory) as reader:
        sampled = [
            e
            for e in episodes(reader, run_id=tuned.run_id)
            if e.split == "val" and e.decoding == "sampled"
        ]
    last = max(episode.step for episode in sampled)
    before = {episode.task.task_id: episode for episode in sampled if episode.step == 0}
    after = {episode.task.task_id: episode for episode in sampled if episode.step == last}
    tasks = [
        task for task in load_tasks(config).val if task.task_id in before.keys() & after.keys()
    ]
    shown = []
    for task in tasks[:_REPLIES]:
        quoted = re.search('"(.+)"', task.main_query)
        replies = {
            name: str(of[task.task_id].output)
            for name, of in (("before", before), ("after", after))
        }
        shown.append({"held-out question": quoted[1] if quoted else task.main_query, **replies})
    out = console()
    out.print(table(shown, out.width))
    rewards = [(before[task.task_id].reward, after[task.task_id].reward) for task in tasks]
    pairs = [(first, then) for first, then in rewards if first is not None and then is not None]
    means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
    gain = paired([then - first for first, then in pairs])
    interval = ""
    if gain.low is not None:
        interval = f" [{gain.low:+.2f}, {gain.high:+.2f}]"
    change = f"{means[0]:.2f} → {means[1]:.2f}, paired difference {gain.mean:+.2f}{interval}"
    echo(f"Reward on {len(pairs)} held-out questions: {change}")
