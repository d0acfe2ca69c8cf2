"""Proxies of objects on the other side of the fence, and what may be asked of them: see `peer`."""

# attributes are checked before use:
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ajet_sdk.sandbox.plain import NotPlain, is_plain, names_of_plain_data

ONE_OBJECT: dict[str, Callable[..., object]] = {
    **{f.__name__: f for f in (iter, next, bool, str, repr, hash, int, float, abs, reversed)},
    **{f.__name__: f for f in (isinstance, issubclass, copy.copy, copy.deepcopy, type)},
    **{f.__name__: f for f in (math.floor, math.ceil, math.trunc)},
    **{name: getattr(operator, name) for name in ("eq", "neg", "pos", "invert", "index")},
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager, *raised: manager.__exit__(*raised),
}
"""Operations that any object may be asked for: they see no plain data of the tests."""
ARITHMETIC = (
    *("add", "mul", "sub", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
    *("lshift", "rshift"),
)
WITH_DATA: dict[str, Callable[..., object]] = {
    **{name: getattr(operator, name) for name in ARITHMETIC},
    **{f"i{name.rstrip('_')}": getattr(operator, f"i{name.rstrip('_')}") for name in ARITHMETIC},
    **{
        name: getattr(operator, name)
        for name in ("lt", "le", "gt", "ge", "getitem", "setitem", "delitem", "contains")
    },
    **{f.__name__: f for f in (len, round, divmod)},
}
"""Operations that see plain data of the tests, as a key or an operand, or tell how many items there
are."""
OPERATIONS = ONE_OBJECT | WITH_DATA
REFLECTED = (*ARITHMETIC, "divmod")
NAMING = ("__name__", "__doc__", "__qualname__", "__annotations__", "__wrapped__")
"""Special attributes that tests may ask for: they say what an object is called."""


class NoAttribute(NotPlain, AttributeError):
    """An attribute of plain data, asked of a result that is none."""


class NoLength(NotPlain, TypeError):
    """The length of a result that is no plain data; `list()` then goes on without it."""


class Grade(enum.IntEnum):
    """What tests may ask of an object of the program."""

    RESULT = 0
    """A result, which tests may expect to be plain data."""
    OBJECT = 1
    """Constructed by the tests."""
    CLASS = 2
    """Constructs objects."""


class OtherSide(Protocol):
    """What a proxy needs of its side's `Peer`."""

    refused: str
    cannot: str
    interface: set[str]
    with_assertions: set[int]
    read: dict[int, ItemsRead]

    def ask(self, operation: str, *arguments: object, grade: Grade = Grade.RESULT) -> Any:
        """Requests an operation of the other side."""

    def grade_of(self, name: str) -> Grade:
        """The grade of a name, or of a method, whose name begins with a dot."""

    def refuse(self, remote: Remote, operation: str) -> None:
        """Records that an object stands where the tests ask for plain data."""


class Remote:
    """A proxy of an object on the other side."""

    __doc__ = property(lambda self: self.__getattr__("__doc__"))  # of the object, not of its proxy

    def __init__(self, peer: OtherSide, number: int, called: str, grade: Grade) -> None:
        self.__dict__.update(_peer=peer, _number=number, _called=called, _grade=grade)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in NAMING:
            raise AttributeError(f"{name} is not asked of a program's object")
        value = self._peer.ask("get", self, name, grade=self._peer.grade_of(f".{name}"))
        if self._grade > Grade.RESULT:
            self._peer.interface.add(name)
        elif (
            name not in self._peer.interface
            and name in names_of_plain_data()
            and not is_plain(value)
        ):
            self._peer.refuse(self, name)
            raise NoAttribute(f"{name}: {self._peer.refused}")
        return value

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.ask("delete", self, name)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._peer.ask("call", self, arguments, named, grade=self._grade_of_calls())

    def _grade_of_calls(self) -> Grade:
        return Grade.OBJECT if self._grade == Grade.CLASS else Grade.RESULT

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            self._peer.refuse(self, "==")
            return False
        return self._number == other._number or self._peer.ask("eq", self, other) is True

    def __hash__(self) -> int:
        value = self._peer.ask("hash", self)
        return value if type(value) is int else object.__hash__(self)

    def __copy__(self) -> Any:
        return self._peer.ask("copy", self, grade=min(self._grade, Grade.OBJECT))

    def __deepcopy__(self, _copied: object) -> Any:
        return self._peer.ask("deepcopy", self, grade=min(self._grade, Grade.OBJECT))

    def __contains__(self, value: object) -> bool:
        if self._grade > Grade.RESULT:
            return self._peer.ask("contains", self, value) is True
        return any(value is item or value == item for item in self)

    def __iter__(self) -> Iterator[Any]:
        items = self._peer.ask("iter", self)
        if self._grade > Grade.RESULT or not isinstance(items, Remote):
            iterator: Iterator[Any] = items
            return iterator
        if self._number not in self._peer.read:
            self._peer.read[self._number] = ItemsRead(items)
        read: ItemsRead = self._peer.read[self._number]
        return read.rest() if items._number == self._number else read.all()

    def __aiter__(self) -> Any:
        return self._peer.ask("aiter", self)

    async def __anext__(self) -> Any:
        return self._peer.ask("anext", self)

    async def __aenter__(self) -> Any:
        return self._peer.ask("aenter", self, grade=self._grade)

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:
        result = self._peer.ask("aexit", self, kind, error, None)
        return bool(result) and self._may_suppress(error, trace, sys._getframe(1))

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._peer.ask("isinstance", value, self) is True

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._peer.ask("issubclass", value, self) is True

    def __enter__(self) -> Any:
        return self._peer.ask("enter", self, grade=self._grade)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        result = self._peer.ask("exit", self, kind, error, None)
        return bool(result) and self._may_suppress(error, trace, sys._getframe(1))

    def _may_suppress(self, error: Any, trace: Any, frame: Any) -> bool:
        """Whether a manager may suppress an error: the program must not suppress what makes a test
        fail, nor leave out assertions. It may suppress what the statement's own body raises, if
        there is no assertion in it."""
        if error is None or isinstance(error, AssertionError | NotPlain):
            return False
        is_of_body = trace is not None and trace.tb_frame is frame and trace.tb_next is None
        return is_of_body and frame.f_lineno not in self._peer.with_assertions

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        self._peer.cannot = (
            f"its tests derive a class from the program's {self._called}, which cannot be done"
            " across processes: leave the task out"
        )
        raise NotPlain(self._peer.cannot)

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    async def _awaited(self, grade: Grade) -> Any:
        return self._peer.ask("await", self, grade=grade)


class ItemsRead:
    """The items of a result that were read: they are the same each time, as those of plain data
    are."""

    def __init__(self, source: Remote) -> None:
        self.source = source
        self.items: list[Any] = []
        self.is_over = False

    def all(self) -> Iterator[Any]:
        """All items, for an object that can be iterated over several times."""
        place = 0
        while place < len(self.items) or self._read_one():
            yield self.items[place]
            place += 1

    def rest(self) -> Iterator[Any]:
        """The items that were not read yet, for an iterator."""
        while self._read_one():
            yield self.items[-1]

    def _read_one(self) -> bool:
        if not self.is_over:
            try:
                self.items.append(next(self.source))  # type: ignore[call-overload]
            except StopIteration:
                self.is_over = True
        return not self.is_over


class RemoteRecord(Remote):
    """A proxy of an instance of a dataclass, which is equal to another if their fields are."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            if not isinstance(other, Remote):
                return super().__eq__(other)
            return False
        fields = [field.name for field in dataclasses.fields(self) if field.compare]  # type: ignore[arg-type]
        return all(getattr(self, name) == getattr(other, name) for name in fields)

    __hash__ = Remote.__hash__


@functools.cache
def record_class(name: str, fields: tuple[tuple[str, bool], ...]) -> type[Remote]:
    """A proxy's class with the fields of a dataclass, for functions such as `dataclasses.asdict`.

    `fields`: their names, and whether they count for equality.
    """
    described = [
        (str(field), object, dataclasses.field(compare=bool(compare))) for field, compare in fields
    ]
    model = dataclasses.make_dataclass(name, described)
    return type(
        name, (RemoteRecord,), {"__dataclass_fields__": vars(model)["__dataclass_fields__"]}
    )


def forward(name: str, *, reflected: bool = False) -> Callable[..., object]:
    """A special method that asks the other side for an operation."""

    def operation(self: Remote, *values: object) -> object:
        is_with_data = name == "len" or not all(isinstance(value, Remote) for value in values)
        if name in WITH_DATA and is_with_data:
            if self._grade > Grade.RESULT:
                self._peer.interface.add(name)
            elif name not in self._peer.interface:
                self._peer.refuse(self, name)
                refused = NoLength if name == "len" else NotPlain
                raise refused(f"{name}: {self._peer.refused}")
        operands = (*values, self) if reflected else (self, *values)
        # A sum of two vectors that the tests construct is as good as one of these.
        grade = max(operand._grade for operand in operands if isinstance(operand, Remote))
        if name == "abs":  # a size, which tests may expect to be below a bound
            grade = Grade.RESULT
        return self._peer.ask(name, *operands, grade=min(grade, Grade.OBJECT))

    return operation


for _name in OPERATIONS:
    if f"__{_name.rstrip('_')}__" not in Remote.__dict__ and not _name.startswith("is"):
        setattr(Remote, f"__{_name.rstrip('_')}__", forward(_name))
for _name in REFLECTED:
    setattr(Remote, f"__r{_name.rstrip('_')}__", forward(_name, reflected=True))
