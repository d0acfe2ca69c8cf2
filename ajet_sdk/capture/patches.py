"""Attributes that were replaced, and how to put them back; our own clients in their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_INHERITED = object()


class Patches:
    """Replaced attributes, undone in reverse order.

    What another library has wrapped meanwhile (an instrumentation that the agent switched on) stays wrapped: our
    replacement is then below theirs, cannot be taken out, and serves again when the attribute is next to be replaced.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._below: dict[tuple[Any, str], tuple[Any, Any]] = {}
        """Replacement and original of each attribute that another library wrapped."""

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Set `owner.name`, keeping what was there; an inherited one is inherited again in the end."""
        original = vars(owner).get(name, _INHERITED)
        below = self._below.pop((owner, name), None)
        if below is not None and original is not below[1]:
            replacement, original = below
        else:
            setattr(owner, name, replacement)
        self._undo.append(lambda: self._restore(owner, name, replacement, original))

    def _restore(self, owner: Any, name: str, replacement: Any, original: Any) -> None:
        if vars(owner).get(name) is not replacement:
            self._below[owner, name] = replacement, original
        elif original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    def at_end(self, action: Callable[[], None]) -> None:
        """Do this too when everything is undone."""
        self._undo.append(action)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()


class OwnClient:
    """Our client for what goes to the gateway, one for each process: connections must not be shared across a fork."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: dict[int, Any] = {}

    def get(self) -> Any:
        """That of this process."""
        pid = os.getpid()
        if pid not in self._made:
            self._made[pid] = self._make()
        return self._made[pid]

    def close(self) -> None:
        """Close that of this process."""
        client = self._made.pop(os.getpid(), None)
        if client is not None:
            client.close()
