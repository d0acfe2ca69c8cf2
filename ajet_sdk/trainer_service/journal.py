"""Persistent state of a server: requests, replies, checkpoints of policies, sampling sessions.

A request is written before it is accepted, and its reply in a transaction with the path of the
resulting weights. After a kill, the requests since those weights are applied again in order, once
each.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.errors import ConfigError

_KEPT = 256
"""Replies kept per policy after its newest step."""

_SCHEMA = """
    CREATE TABLE IF NOT EXISTS policies (
        policy_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, about TEXT NOT NULL, applied INTEGER NOT NULL, place TEXT
    );
    CREATE TABLE IF NOT EXISTS requests (
        policy_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB, reply BLOB, media TEXT,
        PRIMARY KEY (policy_id, seq)
    );
    CREATE TABLE IF NOT EXISTS samplers (sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, path TEXT);
    CREATE TABLE IF NOT EXISTS ended (session_id TEXT PRIMARY KEY);
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request to a policy; `seq` is its number."""

    policy_id: str
    seq: int
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request."""

    body: bytes
    media: str = "application/json"

    @classmethod
    def json(cls, **value: object) -> Reply:
        return cls(json.dumps(value).encode())

    @classmethod
    def error(cls, message: str, category: str) -> Reply:
        """A failure that the SDK raises; `category` is `user` or `server`."""
        return cls.json(error=message, category=category)


class Journal:
    """An SQLite file, for use in one thread."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if another server has the file open."""
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=1.0)
        try:
            self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.executescript(_SCHEMA)
            with self._transaction() as cursor:
                cursor.execute("DELETE FROM samplers WHERE sampler_id = ''")  # takes the lock
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise ConfigError(
                f"{path} cannot be used ({error}); end the server that has it, or choose another"
                " --state"
            ) from error

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    # Policies and their requests

    def add_policy(self, policy_id: str, session_id: str, about: Mapping[str, object]) -> None:
        """Add a policy, whose first request has number 0."""
        row = (policy_id, session_id, json.dumps(about))
        self._connection.execute("INSERT OR IGNORE INTO policies VALUES (?, ?, ?, -1, NULL)", row)

    def policies(self) -> dict[str, tuple[str, dict[str, object], int, Path | None]]:
        """By policy: session, metadata, number of the last request in the saved weights, and their
        path."""
        rows = self._connection.execute("SELECT * FROM policies ORDER BY rowid").fetchall()
        return {
            id_: (session, json.loads(about), seq, path and Path(path))
            for id_, session, about, seq, path in rows
        }

    def add(self, entry: Entry) -> None:
        row = (entry.policy_id, entry.seq, entry.kind, entry.body)
        self._connection.execute("INSERT INTO requests VALUES (?, ?, ?, ?, NULL, NULL)", row)

    def kind(self, policy_id: str, seq: int) -> str | None:
        row = self._connection.execute(
            "SELECT kind FROM requests WHERE policy_id = ? AND seq = ?", (policy_id, seq)
        ).fetchone()
        return None if row is None else str(row[0])

    def unapplied(self) -> list[tuple[Entry, bool]]:
        """Requests after the saved weights, in order, and whether each has a reply."""
        rows = self._connection.execute(
            "SELECT r.policy_id, r.seq, r.kind, r.body, r.reply IS NOT NULL FROM requests r "
            "JOIN policies p USING (policy_id) WHERE r.seq > p.applied ORDER BY r.policy_id, r.seq"
        )
        return [
            (Entry(id_, seq, kind, body), bool(replied)) for id_, seq, kind, body, replied in rows
        ]

    def finish(
        self, entry: Entry, reply: Reply, checkpoint: Path | None = None, *, applied: bool = False
    ) -> None:
        """Store a reply; `applied` if the weights of `checkpoint` include all requests up to this
        one."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE requests SET reply = ?, media = ? WHERE policy_id = ? AND seq = ?",
                (reply.body, reply.media, entry.policy_id, entry.seq),
            )
            if not applied:
                return
            connection.execute(
                "UPDATE policies SET applied = ?, place = coalesce(?, place) WHERE policy_id = ?",
                (entry.seq, None if checkpoint is None else str(checkpoint), entry.policy_id),
            )
            connection.execute(
                "UPDATE requests SET body = NULL WHERE policy_id = ? AND seq <= ?",
                (entry.policy_id, entry.seq),
            )
            connection.execute(
                "DELETE FROM requests WHERE policy_id = ? AND seq < ?",
                (entry.policy_id, entry.seq - _KEPT),
            )

    def reply(self, policy_id: str, seq: int) -> Reply | None:
        row = self._connection.execute(
            "SELECT reply, media FROM requests WHERE policy_id = ? AND seq = ?", (policy_id, seq)
        ).fetchone()
        return None if row is None or row[0] is None else Reply(bytes(row[0]), str(row[1]))

    # Sessions

    def end(self, session_id: str) -> None:
        self._connection.execute("INSERT OR IGNORE INTO ended VALUES (?)", (session_id,))

    def ended(self) -> set[str]:
        """Ids of the sessions that were finished."""
        return {str(id_) for (id_,) in self._connection.execute("SELECT session_id FROM ended")}

    def add_sampler(self, sampler_id: str, session_id: str, path: str | None) -> None:
        """Add a sampling session over a tinker:// path, or the base model (None)."""
        self._connection.execute(
            "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", (sampler_id, session_id, path)
        )

    def samplers(self) -> dict[str, tuple[str, str | None]]:
        """Each sampling session's session and path, oldest first."""
        rows = self._connection.execute("SELECT * FROM samplers ORDER BY rowid").fetchall()
        return {id_: (session, path) for id_, session, path in rows}
