"""Renders a conversation from where the last rendering of it stays true.

A template is a program over the whole list of messages, so a later message may change the text of
an earlier one. What a rendering has read of the messages is therefore noted. At the start of each
turn of the loop over them it depends on nothing but the template, the variables, and the messages
read so far. If those are the same objects in the next request, the text up to there is the same, and
so is the state: jinja's scopes end with each turn, and only namespaces outlive it. The next
rendering runs what is before the loop, compares the variables set there, restores the namespaces,
and enters the loop at that turn.

A template that reads the end of the list early (its length, the last message) is rendered whole, as
is one whose loop is in a macro or a block.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import attrgetter, is_not
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.utils import Namespace

from ajet_sdk.types import JsonView

_RUN = "a run"
"""Variable with the `Run`; its name is none that a template can write."""
_END = sys.maxsize
"""What a rendering needs that has read the end of the messages."""
_PLAIN = (str, int, float, bool, Undefined)
State = tuple[object, ...]


def same_start(a: Sequence[object], b: Sequence[object]) -> int:
    """Number of leading items that are the same objects."""
    return next(compress(count(), map(is_not, a, b)), min(len(a), len(b)))


class TooLong(Exception):
    """The text exceeds its limit."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """The start of a turn of the loop."""

    size: int
    """Characters written before, from the start of the loop."""
    needs: int
    """Number of leading messages that were read before; `_END`: also that there are no more."""
    spaces: Sequence[Mapping[str, object]]
    """The attributes of the template's namespaces."""
    changed: object
    """The last value of `loop.changed`."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of a conversation, and the turns of the template's loop from which it can be
    continued."""

    text: str
    given: JsonView
    """The variables besides the messages."""
    messages: Sequence[object]
    loop: int
    """The number of the loop in the template; -1 without one."""
    start: int
    """The message with which the loop starts."""
    begin: int
    """Characters before the loop."""
    entry: State
    """The variables set before the loop."""
    turns: Sequence[_Turn]


class Watched(Sequence[Any]):
    """The messages as a template sees them, from `start`. What it does not support raises TypeError,
    and the template is rendered with a list."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, run: Run, start: int = 0) -> None:
        self._run = run
        self._start = start

    def __len__(self) -> int:
        self._run.needs = _END
        return max(0, len(self._run.messages) - self._start)

    def __bool__(self) -> bool:
        return self._run.has(self._start)

    def __getitem__(self, key: Any) -> Any:
        messages = self._run.messages
        if type(key) is int and key >= 0:
            self._run.has(self._start + key)
            return messages[self._start + key]
        if type(key) is slice and key.stop is None and key.step is None and (key.start or 0) >= 0:
            return Watched(self._run, self._start + (key.start or 0))
        self._run.needs = _END
        return messages[self._start :][key]

    def __iter__(self) -> Iterator[Any]:
        self._run.needs = _END
        return iter(self._run.messages[self._start :])

    def __reversed__(self) -> Iterator[Any]:
        self._run.needs = _END
        return reversed(self._run.messages[self._start :])

    def __eq__(self, other: object) -> bool:
        raise TypeError("compared as a whole")

    def __repr__(self) -> str:
        raise TypeError("written as a whole")

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"{name} is an attribute of lists")


class Run:
    """A rendering under way, which may start from an earlier one."""

    def __init__(
        self, variables: JsonView, last: Rendering | None, longest: int, *, watched: bool
    ) -> None:
        """`watched`: the template sees `Watched` messages, else a list."""
        self.messages: list[object] = list(variables["messages"])
        self.needs = 0
        self._given = {name: value for name, value in variables.items() if name != "messages"}
        self._watched = watched
        continued = last is not None and _same(last.given, self._given)
        self._last = last if continued else None
        self._longest = longest
        self._pieces: list[str] = []
        self._size = 0
        self._loop = -1
        self._start = self._begin = 0
        self._entry: State = ()
        self._spaces: list[Namespace] = []
        self._turns: list[_Turn] = []
        self._resumed: _Turn | None = None
        """The turn at which the loop starts, until it has."""

    def has(self, index: int) -> bool:
        """Whether there is a message with this index."""
        if index >= len(self.messages):
            self.needs = _END
            return False
        self.needs = max(self.needs, index + 1)
        return True

    def render(self, template: jinja2.Template) -> Rendering:
        """Render a compiled template. Raises TooLong, and whatever the template raises."""
        messages = Watched(self) if self._watched else self.messages
        for piece in template.generate({**self._given, "messages": messages, _RUN: self}):
            self._write(piece)
        return Rendering(
            "".join(self._pieces),
            self._given,
            self.messages,
            self._loop,
            self._start,
            self._begin,
            self._entry,
            self._turns,
        )

    def _write(self, piece: str) -> None:
        self._size += len(piece)
        if self._size > self._longest:
            raise TooLong
        self._pieces.append(piece)

    # Called by the template

    def enter(self, loop: int, messages: Watched, variables: Sequence[object]) -> _Items:
        """Start a loop over the messages, from a turn of the earlier rendering if possible."""
        self.needs = 0
        self._loop = loop
        self._start = messages._start
        self._begin = self._size
        self._entry = tuple(map(_state, variables))
        self._spaces = [value for value in variables if isinstance(value, Namespace)]
        self._turns = []
        last = self._last
        if (
            last is not None
            and (last.loop, last.start) == (loop, messages._start)
            and _same(last.entry, self._entry)
        ):
            common = same_start(self.messages, last.messages)
            place = bisect_right(last.turns, common, key=attrgetter("needs")) - 1
            if place > 0:
                self._resume(last, place)
        return _Items(self, self._start + len(self._turns))

    def _resume(self, last: Rendering, place: int) -> None:
        self._resumed = turn = last.turns[place]
        self._turns = list(last.turns[:place])
        self.needs = turn.needs
        self._write(last.text[last.begin : last.begin + turn.size])
        for space, attributes in zip(self._spaces, turn.spaces, strict=True):
            held = _attributes(space)
            held.clear()
            held.update(attributes)

    def begin_turn(self, loop: LoopContext) -> None:
        """Note the start of a turn."""
        if self._resumed is not None:
            loop.index0 = len(self._turns)
            loop._before = self.messages[self._start + loop.index0 - 1]
            loop._last_changed_value = self._resumed.changed
            self._resumed = None
        spaces = tuple(dict(_attributes(space)) for space in self._spaces)
        self._turns.append(
            _Turn(self._size - self._begin, self.needs, spaces, loop._last_changed_value)
        )


class _Items:
    """The messages of the loop, from the turn at which it is entered."""

    def __init__(self, run: Run, index: int) -> None:
        self._run = run
        self._index = index
        self._length = len(run.messages) - run._start

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> object:
        index = self._index
        if not self._run.has(index):
            raise StopIteration
        self._index += 1
        return self._run.messages[index]

    def __len__(self) -> int:
        self._run.needs = _END
        return self._length


def enter(context: Context, loop: int, messages: Any, variables: Sequence[object]) -> Any:
    """Called before a loop of a template."""
    run = context.get(_RUN)
    if isinstance(run, Run) and isinstance(messages, Watched):
        return run.enter(loop, messages, variables)
    return messages


def begin_turn(context: Context, loop: LoopContext) -> None:
    """Called at the start of each turn of such a loop."""
    run = context.get(_RUN)
    if isinstance(run, Run) and isinstance(loop._iterable, _Items):
        run.begin_turn(loop)


def with_turns(environment: jinja2.Environment, source: str) -> nodes.Template:
    """Parse a template, and add the calls of `enter` and `begin_turn` to its outermost loops that
    write text. Raises TemplateSyntaxError."""
    template = environment.parse(source)
    loops = [node for node in _outermost(template.body) if isinstance(node, nodes.For)]
    names = sorted(_set_names(template.body))
    for number, loop in enumerate(loops):
        if loop.test is not None or loop.else_ or loop.recursive or not loop.find(nodes.Output):
            continue
        here = nodes.ContextReference()
        variables = nodes.List([nodes.Name(name, "load") for name in names])
        loop.iter = nodes.Call(
            nodes.ImportedName(f"{__name__}.enter"),
            [here, nodes.Const(number), loop.iter, variables],
            [],
            None,
            None,
        )
        begun = nodes.Call(
            nodes.ImportedName(f"{__name__}.begin_turn"),
            [here, nodes.Name("loop", "load")],
            [],
            None,
            None,
        )
        loop.body.insert(0, nodes.ExprStmt(begun))
        loop.set_lineno(loop.lineno)
        loop.set_environment(environment)
    return template


def _outermost(body: Sequence[nodes.Node]) -> Iterator[nodes.Node]:
    """The statements that are in no other scope than the template's own."""
    for node in body:
        yield node
        if isinstance(node, nodes.If):
            for branch in (node.body, node.elif_, node.else_):
                yield from _outermost(branch)


def _set_names(body: Sequence[nodes.Node]) -> set[str]:
    """The variables that a template sets outside of loops and blocks."""
    names = set[str]()
    for node in _outermost(body):
        if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
            names.update(name.name for name in node.find_all(nodes.Name) if name.ctx == "store")
    return names


def _attributes(space: Namespace) -> dict[str, object]:
    attributes: dict[str, object] = space._Namespace__attrs  # type: ignore[attr-defined]
    return attributes


def _state(value: object) -> object:
    """A variable for comparison with its value in another rendering."""
    if isinstance(value, Namespace):
        return dict(_attributes(value))
    if isinstance(value, Watched):
        return ("messages from", value._start)
    return value


def _same(a: object, b: object) -> bool:
    """Whether two variables are equal, also in the types of numbers and the order of keys. Objects
    of other types are equal to themselves only."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return a == b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return _same(list(a), list(b)) and _same(list(a.values()), list(b.values()))
    return callable(a) and a == b
