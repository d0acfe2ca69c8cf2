"""Runs agents that are programs within an episode, and provides their environment variables.

@ajet.workflow(timeout=600)
async def fix(issue: str) -> str:
    done = await ajet.run_program(["mini", "--yolo", "--task", issue], cwd=checkout, timeout=300)
    return done.stdout
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryFile
from typing import IO, Protocol

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.processes import endpoint_variables
from ajet_sdk.config.api_keys import without_placeholders
from ajet_sdk.errors import ConfigError, EpisodeError, EpisodeTimeout, ProgramFailed

_TAIL = 2000
"""Characters of a program's output that an error quotes."""


class PolicyEndpoint(Protocol):
    """The interface that `child_env` needs: a `Model` handle, or the result of
    `tuner.as_oai_baseurl_apikey()`."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ProgramResult:
    command: tuple[str, ...]
    returncode: int
    """The exit status; negative for a signal."""
    stdout: str
    stderr: str
    seconds: float


def child_env(model: PolicyEndpoint | None = None) -> dict[str, str]:
    """Return the current environment with the active episode's policy as the endpoint of every
    vendor's client.

    An agent that is only observed (`ajet.trace`) gets the environment unchanged.

    Args:
        model: a handle; the program is its agent, and the policy answers every model name. None:
            `rollout.policy_models` selects the calls that the policy answers, as for captured calls.

    Returns:
        Variables by name, to pass to a child process.

    Raises:
        EpisodeError: no episode is active, or the workflow takes a handle that was not passed here.
    """
    active = current_episode.get()
    if model is not None:
        return without_placeholders(os.environ) | endpoint_variables(model.base_url, model.api_key)
    if active is None:
        raise EpisodeError(
            "ajet.child_env() needs an active episode: call it in a workflow that ajet.run or"
            " ajet.train runs, or pass a model: ajet.child_env(model)"
        )
    if active.observed:  # nothing is rerouted
        return dict(os.environ)
    if not active.reroutes:
        if active.phase == "judge":
            who = "requests of a judge are"
        else:
            who = (
                "if a workflow has a parameter `model`, only the calls of that model are the"
                " policy's; others are"
            )
        raise EpisodeError(
            f"ajet.child_env() needs the model: {who} not the policy's; use ajet.child_env(model)"
        )
    return without_placeholders(os.environ) | endpoint_variables(active.base_url, active.api_key)


async def run_program(
    command: Sequence[str | os.PathLike[str]],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    input: str = "",
    check: bool = True,
) -> ProgramResult:
    """Run a program without a shell and return its output.

    The program has its own process group. When it ends, exceeds `timeout`, or the episode ends or
    is cancelled, every process of the group is killed. Output is read as UTF-8.

    Args:
        command: the program and its arguments.
        cwd: the working directory; None: the current one.
        env: the whole environment; None: `child_env()`.
        timeout: seconds; None: no limit.
        input: the standard input.
        check: raise if the exit status is not 0.

    Returns:
        Exit status, standard output and standard error.

    Raises:
        ProgramFailed: it could not be started, or `check` is set and its exit status is not 0. Quotes the end of its
            output.
        EpisodeTimeout: it exceeded `timeout`; the episode ends with status `timeout`.
    """
    if isinstance(command, (str, bytes)) or not command:
        raise ConfigError(
            'the command must be a list that starts with the program, such as ["aider", "--yes"]'
            f" (got {command!r})"
        )
    words = tuple(os.fspath(word) for word in command)
    environment = child_env() if env is None else env
    place = Path(cwd) if cwd is not None else Path.cwd()
    name = f"program {words[0]!r} (in {place})"
    if not place.is_dir():
        raise ProgramFailed(
            f"program {words[0]!r} could not be started: its working directory {place} does not"
            " exist"
        )
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(input.encode())
        stdin.seek(0)
        started = time.monotonic()
        try:
            process = Popen(  # noqa: ASYNC220  takes milliseconds, and must not be cancelled before the block
                words,
                cwd=place,
                env=environment,
                start_new_session=True,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError as error:
            raise ProgramFailed(
                f"program {words[0]!r} could not be started: {error.strerror or error}"
            ) from error
        with _ended_with_the_block(process.pid):
            try:
                code = await asyncio.wait_for(asyncio.to_thread(process.wait), timeout)
            except asyncio.TimeoutError:
                late = (
                    f"{name} did not finish within {timeout:.3g}"
                    f" s{_tail(_text(stdout), _text(stderr))}"
                )
                raise EpisodeTimeout(late) from None
        seconds = time.monotonic() - started
        result = ProgramResult(words, code, _text(stdout), _text(stderr), seconds)
    if check and code != 0:
        if code > 0:
            how = f"exited with status {code}"
        else:
            how = f"was killed by {signal.Signals(-code).name}"
        raise ProgramFailed(
            f"{name} {how} after {seconds:.1f} s{_tail(result.stdout, result.stderr)}", result
        )
    return result


@contextmanager
def _ended_with_the_block(group: int) -> Iterator[None]:
    active = current_episode.get()
    groups = set() if active is None else active.process_groups
    groups.add(group)
    try:
        yield
    finally:
        groups.discard(group)
        _kill(group)


def end_programs() -> None:
    """Kill the running programs of the active episode."""
    active = current_episode.get()
    for group in () if active is None else tuple(active.process_groups):
        _kill(group)


def _kill(group: int) -> None:
    """Kill the remaining processes of a group."""
    with suppress(
        ProcessLookupError, PermissionError
    ):  # no process is left; macOS raises the second
        os.killpg(group, signal.SIGKILL)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _tail(stdout: str, stderr: str) -> str:
    """The end of a program's stderr, or of its stdout if that is empty."""
    name, text = ("stderr", stderr.strip()) if stderr.strip() else ("stdout", stdout.strip())
    if text:
        return f"; the end of its {name}:\n{text[-_TAIL:]}"
    return "; it printed nothing"
