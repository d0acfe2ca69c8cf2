"""What a call changes in its arguments, which are copies on the other side: see `peer`."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from ajet_sdk.sandbox.plain import containers
from ajet_sdk.sandbox.remote import Remote


class Sent:
    """The arguments of a call, to which the changes that the other side made to them are applied
    later.

    What a call changes must not change what its result is compared with: `f(xs) == sorted(xs)`
    would hold if `f` emptied the list.
    """

    def __init__(self, arguments: tuple[Any, ...], number: int = 0) -> None:
        self.arguments = arguments
        self.number = number
        """Of the request, among all."""
        self.containers = containers(arguments)
        self.remotes = {part._number: part for part in _remotes_in(arguments)}
        """Proxies among the arguments by their numbers: those that come back are the same."""
        self.changed: list[Any] | None = None

    def apply(self) -> None:
        if self.changed is not None:
            restore(self.arguments, tuple(self.changed))

    def shares(self, parts: Iterable[object]) -> bool:
        """Whether one of these containers is among the arguments."""
        own = {id(part) for part in self.containers}
        return any(id(part) in own for part in parts)


def _remotes_in(arguments: object) -> Iterator[Remote]:
    waiting: list[Any] = [arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Remote):
            yield value
        elif type(value) in (list, tuple, collections.deque):
            waiting += value
        elif type(value) is dict:
            waiting += value.values()


def restore(old: Any, new: Any) -> Any:
    """Apply a call's changes of an argument in place."""
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        old[:] = [*map(restore, old, new), *new[len(old) :]]
    elif isinstance(old, dict):
        changed = {
            key: restore(old[key], value) if key in old else value for key, value in new.items()
        }
        old.clear()
        old.update(changed)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif type(old).__name__ in ("deque", "bytearray"):
        old.clear()
        old.extend(new)
    elif type(old).__name__ == "ndarray" and old.shape == new.shape:
        old[...] = new
    elif isinstance(old, tuple) and len(old) == len(new):
        for place, item in enumerate(old):
            restore(item, new[place])
    else:
        return new
    return old
