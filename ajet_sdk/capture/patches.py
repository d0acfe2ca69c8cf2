"""Replaces and restores attributes of other libraries; clients for requests to the gateway."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_INHERITED = object()


class Patches:
    """Replaced attributes, undone in reverse order.

    If another library, such as an instrumentation, has wrapped a replacement meanwhile, the
    replacement stays and is used again when the attribute is replaced next.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._below: dict[tuple[object, str], tuple[object, object]] = {}
        """Replacement and original of each attribute that another library wrapped."""

    def replace(self, owner: object, name: str, replacement: object) -> None:
        """Set `owner.name` and remember the original. An inherited attribute is inherited again
        after `undo`."""
        original = vars(owner).get(name, _INHERITED)
        below = self._below.pop((owner, name), None)
        if below is not None and original is not below[1]:
            replacement, original = below
        else:
            setattr(owner, name, replacement)
        self._undo.append(lambda: self._restore(owner, name, replacement, original))

    def _restore(self, owner: object, name: str, replacement: object, original: object) -> None:
        if vars(owner).get(name) is not replacement:
            self._below[owner, name] = replacement, original
        elif original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` on `undo`."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore every attribute."""
        while self._undo:
            self._undo.pop()()


class _Client(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Client)


class OwnClient(Generic[C]):
    """A client for requests to the gateway, one per process, as connections must not be shared
    across a fork."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._made: dict[int, C] = {}

    def get(self) -> C:
        """The client of this process, created on first use."""
        pid = os.getpid()
        if pid not in self._made:
            self._made[pid] = self._make()
        return self._made[pid]

    def close(self) -> None:
        client = self._made.pop(os.getpid(), None)
        if client is not None:
            client.close()
