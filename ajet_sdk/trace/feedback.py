"""Stores feedback in a trace, through its live owner or directly in the file."""

from __future__ import annotations

from pathlib import Path

import duckdb

from ajet_sdk.errors import QueryError, TraceError, TraceLocked
from ajet_sdk.trace.database import explain, insert, open_to_write
from ajet_sdk.trace.encoding import StoredCalls, encode
from ajet_sdk.trace.live import FEEDBACK_PATH, post, refusal
from ajet_sdk.trace.owner import Owner, retract, settled_owner
from ajet_sdk.trace.reader import open_trace, trace_files
from ajet_sdk.types import Feedback


def give(path: Path, *feedback: Feedback) -> None:
    """Store a person's feedback on episodes or calls; it is in the file when this returns.

    `path` is a file, or a directory with several, where each feedback goes to the file with its
    episode. The feedback for a file is stored completely or not at all. Raises QueryError for an
    unknown episode or call, TraceLocked if another process has the file and takes no feedback,
    TraceError if the file cannot be written.
    """
    for file, mine in _places(Path(path), feedback).items():
        owner = settled_owner(file)
        if owner is None or not _tell(file, owner, mine):
            _write(file, mine)


def _places(path: Path, feedback: tuple[Feedback, ...]) -> dict[Path, list[Feedback]]:
    """Group feedback by the file that has its episode and call."""
    unplaced = list(feedback)
    by_file = dict[Path, list[Feedback]]()
    for file in trace_files(path):
        if not unplaced:
            break
        episodes, calls = _known(file, [entry.episode_id for entry in unplaced])
        for entry in unplaced:
            if entry.episode_id in episodes:
                if entry.call_id and (entry.episode_id, entry.call_id) not in calls:
                    raise QueryError(
                        f"episode {entry.episode_id} has no call {entry.call_id}; nothing was"
                        " stored"
                    )
                by_file.setdefault(file, []).append(entry)
        unplaced = [entry for entry in unplaced if entry.episode_id not in episodes]
    if unplaced:
        raise QueryError(
            f"there is no episode {unplaced[0].episode_id} in {path}; nothing was stored"
        )
    return by_file


def _known(file: Path, episode_ids: list[str]) -> tuple[set[str], set[tuple[str, str]]]:
    """Ids of the given episodes, finished or running, and of their calls in a file."""
    with open_trace(file) as reader:
        ended = reader.query(
            "SELECT episode_id FROM episodes WHERE list_contains(?, episode_id)", [episode_ids]
        )
        table = reader.query(
            "SELECT episode_id, call_id FROM calls WHERE list_contains(?, episode_id)",
            [episode_ids],
        )
    calls = {(row["episode_id"], row["call_id"]) for row in table.to_pylist()}
    return {row["episode_id"] for row in ended.to_pylist()} | {
        episode_id for episode_id, _ in calls
    }, calls


def _tell(file: Path, owner: Owner, feedback: list[Feedback]) -> bool:
    """Send feedback to the live owner; False if it is gone."""
    if not owner.url:
        raise TraceLocked(
            f"{file} is being written by process {owner.pid}, which has no gateway to receive"
            " feedback; send it again after the process has ended, or call put(Feedback(...)) on"
            " its TraceWriter"
        )
    answer = post(owner, FEEDBACK_PATH, [entry.model_dump(mode="json") for entry in feedback])
    if answer is None:
        return False
    if answer.status_code == 404:
        raise TraceLocked(
            f"the run that writes {file} (pid {owner.pid}) uses an older ajet, which takes no"
            " feedback during a run; send it again after the run has ended"
        )
    if answer.status_code != 200:
        raise TraceError(f"the run that writes {file} rejected the feedback: {refusal(answer)}")
    return True


def _write(file: Path, feedback: list[Feedback]) -> None:
    rows = encode(feedback, StoredCalls())
    if len(rows["feedback"]) != len(feedback):
        raise TraceError(f"the feedback could not be stored in {file}; see the log")
    connection = open_to_write(file, brief=True)
    try:
        [row] = connection.execute("SELECT batch FROM meta").fetchall()
        insert(connection, rows, row[0] + 1)
        connection.close()
    except (duckdb.Error, OSError) as error:
        raise explain(file, error) from error
    finally:
        connection.close()
        retract(file, writes=True)
