"""Caches replies, so that no request is paid twice, and joins equal requests in flight."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from ajet_sdk.errors import AjetError

T = TypeVar("T")
IN_MEMORY = Path(":memory:")
"""The path of a `ReplyCache` in memory."""


class CacheError(AjetError, RuntimeError):
    """The cache's file cannot be read or written."""


class ReplyCache:
    """Texts of replies by the content of the request: endpoint, model, messages and parameters.

    Replies are on disk before they are used, so a killed process loses none. Several processes may
    share a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                path, timeout=30, isolation_level=None, check_same_thread=False
            )
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS replies(key TEXT PRIMARY KEY, texts TEXT NOT NULL)"
            )

    @staticmethod
    def key(request: Mapping[str, object]) -> str:
        text = json.dumps(request, sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()

    def get(self, key: str) -> list[str] | str | None:
        """The cached texts, or the message of a cached failure as a string; None if the request is
        not cached."""
        with self._explained():
            row = self._file.execute("SELECT texts FROM replies WHERE key = ?", (key,)).fetchone()
        texts = None if row is None else json.loads(row[0])
        return texts if isinstance(texts, list | str) else None

    def put(self, key: str, texts: list[str] | str) -> None:
        with self._explained():
            self._file.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, json.dumps(texts))
            )

    def entries(self, prefix: str) -> list[list[str]]:
        """The texts of all keys that begin with `prefix`, in the order in which they were put."""
        query = "SELECT texts FROM replies WHERE substr(key, 1, ?) = ? ORDER BY rowid"
        with self._explained():
            rows = self._file.execute(query, (len(prefix), prefix)).fetchall()
        return [json.loads(texts) for (texts,) in rows]

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, OSError):
                why = error.strerror or str(error)
            else:
                why = str(error)
            raise CacheError(
                f"cannot store replies in {self.path}: {why}. Earlier replies are intact: free some"
                " disk space and continue with --resume"
            ) from error


class _Abandoned(Exception):
    """The task that sent the request was cancelled; a task that waits for it sends it again."""


class Shared(Generic[T]):
    """Requests in flight by key, shared among the tasks of an event loop; several loops may use
    it."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, str], asyncio.Future[T]] = {}

    async def get(self, key: str, ask: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The result of `ask`, and whether another task asked. Raises the errors of `ask`."""
        loop = asyncio.get_running_loop()
        mine = (id(loop), key)
        while (pending := self._under_way.get(mine)) is not None:
            try:
                return await asyncio.shield(pending), True
            except _Abandoned:
                continue
        future = self._under_way[mine] = loop.create_future()
        try:
            future.set_result(await ask())
            return future.result(), False
        except BaseException as error:
            future.set_exception(
                _Abandoned() if isinstance(error, asyncio.CancelledError) else error
            )
            future.exception()  # marks it as retrieved
            raise
        finally:
            del self._under_way[mine]
