"""The requests to all policies, in the order of their numbers, with replies and weights: what a
server that was killed continues from.

A request is written before it is accepted, and its reply together with the place of the weights
that it led to. After a kill, the requests since those weights are applied again, once each.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.errors import ConfigError

_KEPT = 256
"""Replies kept per policy after its newest weights."""

_SCHEMA = """
    CREATE TABLE IF NOT EXISTS requests (
        policy_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
        body BLOB, reply BLOB, media TEXT,
        weights TEXT,  -- their directory, if the request changed them; empty if it failed to
        PRIMARY KEY (policy_id, seq)
    );
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
            # Takes the lock, and names what the file of another version lacks.
            self._connection.execute("DELETE FROM requests WHERE weights = '' AND seq < 0")
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise ConfigError(
                f"{path} cannot be used ({error}); end the server that has it, or choose another"
                " --state, as for one of another version of ajet"
            ) from error

    def close(self) -> None:
        self._connection.close()

    def policies(self) -> list[tuple[str, int, Path | None]]:
        """Each policy with the number of the last request in its weights, and their directory."""
        found = []
        for (policy_id,) in self._connection.execute(
            "SELECT policy_id FROM requests WHERE seq = 0 ORDER BY rowid"
        ).fetchall():
            changes = self._connection.execute(
                "SELECT seq, weights FROM requests WHERE policy_id = ? AND weights IS NOT NULL"
                " ORDER BY seq DESC",
                (policy_id,),
            ).fetchall()
            places = [Path(weights) for _, weights in changes if weights]
            found.append((policy_id, changes[0][0] if changes else -1, next(iter(places), None)))
        return found

    def add(self, entry: Entry) -> None:
        row = (entry.policy_id, entry.seq, entry.kind, entry.body)
        self._connection.execute(
            "INSERT INTO requests (policy_id, seq, kind, body) VALUES (?, ?, ?, ?)", row
        )

    def entry(self, policy_id: str, seq: int) -> Entry | None:
        """A request; its body is empty once it is in the weights."""
        row = self._connection.execute(
            "SELECT kind, body FROM requests WHERE policy_id = ? AND seq = ?", (policy_id, seq)
        ).fetchone()
        if row is None:
            return None
        return Entry(policy_id, seq, row[0], row[1] or b"")

    def unapplied(self, policy_id: str, applied: int) -> list[tuple[Entry, bool]]:
        """Requests after `applied`, in order, and whether each has a reply."""
        rows = self._connection.execute(
            "SELECT seq, kind, body, reply IS NOT NULL FROM requests"
            " WHERE policy_id = ? AND seq > ? ORDER BY seq",
            (policy_id, applied),
        )
        return [
            (Entry(policy_id, seq, kind, body), bool(replied)) for seq, kind, body, replied in rows
        ]

    def finish(self, entry: Entry, reply: Reply, weights: str | None = None) -> None:
        """Store a reply and, unless None, the directory of the weights with all requests so far."""
        # One statement, so that a kill leaves both or neither.
        self._connection.execute(
            "UPDATE requests SET reply = ?, media = ?, weights = ? WHERE policy_id = ? AND seq = ?",
            (reply.body, reply.media, weights, entry.policy_id, entry.seq),
        )
        if weights is None:
            return
        # The first request says what the policy is.
        self._connection.execute(
            "UPDATE requests SET body = NULL WHERE policy_id = ? AND seq BETWEEN 1 AND ?",
            (entry.policy_id, entry.seq),
        )
        self._connection.execute(
            "UPDATE requests SET reply = NULL WHERE policy_id = ? AND seq < ?",
            (entry.policy_id, entry.seq - _KEPT),
        )

    def reply(self, policy_id: str, seq: int) -> Reply | None:
        row = self._connection.execute(
            "SELECT reply, media FROM requests WHERE policy_id = ? AND seq = ?", (policy_id, seq)
        ).fetchone()
        if row is None or row[0] is None:
            return None
        return Reply(bytes(row[0]), str(row[1]))
