"""The `ajet` command. Modules of commands are imported when they run, so `ajet --help` is fast."""

from __future__ import annotations

import atexit
import difflib
import logging
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

try:
    import ajet
except ImportError as refused:  # on Windows
    raise SystemExit(f"Error: {refused}") from None
import ajet_sdk
from ajet_sdk.addresses import public
from ajet_sdk.errors import (
    AjetError,
    ConfigError,
    MissingExtra,
    QueryError,
    SignatureError,
    TaskError,
    place_of,
)
from ajet_sdk.reporting.output import echo, style
from ajet_tools.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from typer._click import Context

USAGE_ERRORS = (ConfigError, SignatureError, TaskError, MissingExtra, QueryError)
_LONGEST = 4000
"""Maximum characters of a message."""
_PATIENCE = 5.0
"""Seconds to wait for threads after a command ended."""
READER_LEFT = 141
"""Exit code if the reader of stdout closed it early, as after SIGPIPE."""
_OF_A_JOB = ("train", "run", "plan", "rehearse", "work")
"""Commands whose first argument may be the config file."""
ROOT_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")


class _Root(LazyGroup):
    """The root group. Prints an error that ends a command as a single message."""

    package = "ajet_tools.cli"
    panels = {
        "Start": {
            "demo": "start",
            "init": "start",
            "run": "run",
            "train": "train",
            "swarm": "swarm",
            "work": "work",
            "serve": "train",
        },
        "Look": {"trace": "trace", "dataset": "dataset"},
        "Compare": {"judge": "judge", "tune-prompt": "tune_prompt"},
        "Set up": {
            "model": "model",
            "config": "config",
            "plan": "plan",
            "rehearse": "train",
            "trainer": "trainer",
            "env": "env",
            "install": "install",
            "doctor": "doctor",
        },
    }

    moved = {"baseline": "run --advise"}

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """`ajet --conf FILE …` means `ajet train --conf FILE …`, and so does `ajet train FILE.yaml`;
        `--traceback` is allowed anywhere.

        `--with-ray-cluster` without an address means the cluster of this machine.
        """
        ajet_args = args[: args.index("--")] if "--" in args else args
        ctx.meta["ajet.traceback"] = "--traceback" in ajet_args
        args = [arg for arg in ajet_args if arg != "--traceback"] + args[len(ajet_args) :]
        for place, arg in reversed([*enumerate(args)]):
            if arg == "--with-ray-cluster" and (args[place + 1 :] or ["-"])[0].startswith("-"):
                args.insert(place + 1, "auto")
        if args and args[0].startswith("-") and args[0] not in ROOT_OPTIONS:
            args = ["train", *args]
        if len(args) > 1 and args[0] in _OF_A_JOB and args[1].endswith((".yaml", ".yml")):
            args.insert(1, "--conf")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> object:
        stdout = _stdout()
        try:
            with _log_shown():
                done = super().invoke(ctx)
            _flush_stdout()
            return done
        except KeyboardInterrupt:
            raise _interrupted(ctx) from None
        except (
            BrokenPipeError,
            SystemExit,
        ) as ended:  # Rich replaces a closed pipe by /dev/null, and exits
            if isinstance(ended, SystemExit) and ended.code == 128 + signal.SIGTERM:
                raise _interrupted(ctx, ended.code) from None
            if not _is_left() and _stdout() == stdout:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(READER_LEFT) from None
        except Exception as error:  # the boundary: any error becomes a message
            if (
                isinstance(error, RuntimeError) and str(error) == "Query interrupted"
            ):  # DuckDB's error on Ctrl-C
                raise _interrupted(ctx) from None
            if isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "show"):  # of Typer
                if hasattr(error, "message"):
                    error.message = in_plain_words(error.message)
                raise
            if ctx.meta["ajet.traceback"]:
                traceback.print_exception(error)
            _print_message(*_message(error))
            code = 2 if isinstance(error, USAGE_ERRORS) else 1
            traceback.clear_frames(error.__traceback__)
        except BaseException as error:
            if (
                type(error).__name__ != "PanicException"
            ):  # a panic of polars (Rust) is not an Exception
                raise
            if "KeyboardInterrupt" in str(error) or "SystemExit" in str(error):
                raise _interrupted(ctx) from None
            _print_message(*_message(error))
            code = 1
        raise typer.Exit(code)


_UNKNOWN_CHOICE = re.compile(r"Value error, ('.*') is not one of (.+)\.")
_LIMIT = re.compile(r"Input should be (greater|less) than (or equal to )?(\S+)")
_LIMITS = {
    ("greater", True): "must be at least",
    ("less", True): "must be at most",
    ("greater", False): "must be more than",
    ("less", False): "must be less than",
}
_KIND = re.compile(r"Input should be a valid (\w+).*")


def in_plain_words(message: str) -> str:
    """The message of an option's wrong value, for which Typer has pydantic's sentences."""
    if unknown := _UNKNOWN_CHOICE.fullmatch(message):
        given = unknown[1].strip("'")
        known = re.findall(r"'([^']*)'", unknown[2])
        near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
        return f"there is no {given!r}; choose one of {', '.join(known)}" + (
            f"; did you mean {near[0]}?" if near else ""
        )
    if limit := _LIMIT.fullmatch(message):
        return f"{_LIMITS[limit[1], limit[2] is not None]} {limit[3]}"
    if kind := _KIND.fullmatch(message):
        return f"must be {'an integer' if kind[1] == 'integer' else f'a {kind[1]}'}"
    return message.removeprefix("Value error, ")


def _flush_stdout() -> None:
    if sys.stdout is not None and not sys.stdout.closed:  # closed by users' code
        sys.stdout.flush()


def _stdout() -> tuple[int, int] | None:
    """Returns device and inode of stdout, or None if it is closed."""
    try:
        about = os.fstat(1)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _is_left() -> bool:
    """Whether the reader of stdout, a pipe, has gone."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _interrupted(ctx: Context, code: int = 128 + signal.SIGINT) -> typer.Exit:
    messages = {
        "train": (
            "records already written are kept; `ajet train … --resume` continues from the last"
            " checkpoint"
        ),
        "work": "open episodes were aborted; the training at the server goes on",
        "dataset": "files are written whole or not at all",
    }
    _print_message(
        "Interrupted",
        messages.get(ctx.invoked_subcommand or "", "records already written are kept"),
    )
    return typer.Exit(128 + signal.SIGTERM if "ajet.ended" in ctx.meta else code)


def _message(error: BaseException) -> tuple[str, str]:
    if isinstance(error, AjetError):
        return type(error).__name__, str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return "Error", f"{error.filename}: {(error.strerror or str(error)).lower()}"
    return (
        "Error",
        (
            f"{type(error).__name__}: {error}{place_of(error)}. This is unexpected; run again with"
            " --traceback to see where it was raised. If that is not in your own code, it is a bug"
            " in ajet: please report it"
        ),
    )


class _Console(logging.Handler):
    """Prints log records as plain lines to the current stderr, which a progress bar replaces while
    it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "raised", False):  # will be printed as the command's error
            return
        text = public(record.getMessage())
        echo(style(text, fg="yellow") if record.levelno >= logging.WARNING else text, err=True)


@contextmanager
def _log_shown() -> Iterator[None]:
    """Shows ajet's log from level INFO while a command runs, each record once."""
    log = logging.getLogger("ajet")
    console = _Console()
    level = log.level
    propagate = log.propagate
    log.addHandler(console)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(console)
        log.setLevel(level)
        log.propagate = propagate


def _print_message(kind: str, message: str) -> None:
    _flush_stdout()
    message = public(message)
    cut = ""
    if len(message) > _LONGEST:
        cut = f" … ({len(message) - _LONGEST:,} more characters)"
    echo(f"{style(kind, fg='red', bold=True)}: {message[:_LONGEST]}{cut}", err=True)


app = typer.Typer(
    name="ajet",
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"ajet {ajet.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, Option("--traceback", help="Show where an error was raised; allowed anywhere.")
    ] = False,
) -> None:
    """Train the model behind your agent: decorate, run, look, train.

    \b
    ajet demo
    ajet init demo
    ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --model NAME@http://127.0.0.1:8000/v1
    ajet train agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --model PATH
    ajet --conf math.yaml ajet.rollout.num_repeat=8
    ajet trace show ID

    Exit codes: 0 success, 1 a run failed, 2 invalid command, config or data, 3 a training run made
    no update, 130 interrupted, 141 stdout was closed (`| head`), 143 ended by SIGTERM.
    """


def main() -> None:
    """The entry point of the `ajet` command and of `python -m ajet`."""
    codes = [1]
    atexit.register(lambda: _end(codes[0]))  # registered first, so called last
    try:
        app(prog_name="ajet")
    except SystemExit as ended:
        codes[0] = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        threads = [
            t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon
        ]
        if threads or _children():  # Python would wait for them, possibly forever
            threading.Thread(target=_end_without, args=(threads, codes[0]), daemon=True).start()
        raise


def _end(code: int) -> None:
    """Ends the process without finalizing modules, which daemon threads may still use."""
    _flush_stdout()
    sys.stderr.flush()
    os._exit(code)


def _end_without(threads: Sequence[threading.Thread], code: int) -> None:
    """Ends the process despite running threads and processes of the user, and prints them."""
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for child in _children():
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            _print_message(
                "Warning",
                f"killed the process {child.name} (pid {child.pid}), which was still running."
                " Join it",
            )
            child.terminate()
    named = [f"{t.name}{_began_at(t)}" for t in threads if t.is_alive()]
    if not named:
        return
    _print_message(
        "Warning",
        f"exited while {len(named)} {'thread was' if len(named) == 1 else 'threads were'} still"
        f" running: {'; '.join(named[:5])}{'; …' if len(named) > 5 else ''}. Join such threads, or"
        " make them daemon threads",
    )
    # Python would call exit handlers only after these threads end.
    last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    last.start()
    last.join(_PATIENCE)
    _end(code)


def _children() -> list[BaseProcess]:
    """Returns the child processes that Python waits for."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing:
        return [child for child in multiprocessing.active_children() if not child.daemon]
    return []


def _began_at(thread: threading.Thread) -> str:
    """Returns where a thread's code starts, as a suffix of its name."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls = [] if frame is None else traceback.extract_stack(frame)
    ours = (threading.__file__, str(Path(ajet_sdk.__file__).parent))
    user_call = next((call for call in calls if not call.filename.startswith(ours)), None)
    if user_call is None:
        return ""
    return f", in {user_call.name} ({user_call.filename}:{user_call.lineno})"


if __name__ == "__main__":
    main()
