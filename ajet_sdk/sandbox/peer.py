"""The protocol between a program and its tests in separate processes: see `tester`.

Each line is a request or a reply. Plain data is sent by value and rebuilt from the receiver's types. Other objects are
sent as a number and become a `Remote`, which is never equal to plain data: otherwise the program would decide the
comparison, and with it the verdict.
"""

# attributes are checked before use:
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import inspect
import io
import json
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

SCALARS = (type(None), bool, int, float, str)
LONG = 10_000
"""Bits above which an integer is sent as hexadecimal, since Python limits decimal conversion."""
READ: dict[str, Callable[..., object]] = {
    "int": lambda text: int(text, 16),
    "complex": complex, "range": range, "Decimal": decimal.Decimal, "Fraction": fractions.Fraction,
    "bytes": bytes.fromhex, "bytearray": bytearray.fromhex, "list": list, "tuple": tuple, "set": set,
    "frozenset": frozenset, "deque": collections.deque, "timedelta": datetime.timedelta,
    "date": datetime.date.fromisoformat, "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
}  # fmt: skip
"""Decoders by name of type."""
HELD = (list, tuple, set, frozenset, collections.deque)
OPERATIONS: dict[str, Callable[..., object]] = {
    **{f.__name__: f for f in (len, iter, next, bool, str, repr, int, float, abs, reversed, isinstance, issubclass)},
    **{name: getattr(operator, name) for name in ("eq", "getitem", "setitem", "delitem", "neg", "pos", "invert")},
    **{name: getattr(operator, name) for name in ("add", "mul", "sub", "truediv", "floordiv", "mod", "pow", "matmul")},
    **{name: getattr(operator, name) for name in ("and_", "or_", "xor", "lt", "le", "gt", "ge")},
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager, *raised: manager.__exit__(*raised),
}
BETWEEN = ("sub", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lt", "le", "gt", "ge")
"""Operations allowed only between two objects of the program; with plain data the result could be a verdict."""
PREDICATES = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint", "equals")
"""Methods that compare an object with plain data of the tests."""


class Gone(BaseException):
    """The other side has ended, or sent an invalid message."""


class Remote:
    """A proxy of an object on the other side."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name in PREDICATES or (name.startswith("__") and name != "__name__"):
            raise AttributeError(f"{name} is not asked of a program's object")
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.ask("delete", self, name)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._peer.ask("call", self, arguments, named)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Remote) and self._peer.ask("eq", self, other) is True)

    __hash__ = object.__hash__

    def __contains__(self, value: object) -> bool:
        return any(value is item or value == item for item in self)

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = self._peer.ask("iter", self)
        return items

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._peer.ask("isinstance", value, self) is True

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._peer.ask("issubclass", value, self) is True

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    async def _awaited(self) -> Any:
        return self._peer.ask("await", self)


def forward(name: str, *, turned: bool = False) -> Callable[..., object]:
    def operation(self: Remote, *values: object) -> object:
        if name in BETWEEN and not all(isinstance(value, Remote) for value in values):
            raise TypeError(f"{name}: an object of the program is not held against plain data")
        return self._peer.ask(name, *((*values, self) if turned else (self, *values)))

    return operation


for _name in OPERATIONS:
    if f"__{_name.rstrip('_')}__" not in Remote.__dict__ and not _name.startswith("is"):
        setattr(Remote, f"__{_name.rstrip('_')}__", forward(_name))
for _name in ("add", "mul"):
    setattr(Remote, f"__r{_name}__", forward(_name, turned=True))


class Peer:
    """One of the two sides: sends requests, and answers the other's while it waits."""

    def __init__(self, code: str | None = None) -> None:
        """`code` is the program on its side, where any attribute of any object may be requested."""
        self.reader, self.writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)
        self.code, self.gone, self.asked = code, False, 0
        self.module = types.ModuleType("__main__")
        self.turn = threading.RLock()
        """Held by the requesting thread, which may send requests while it answers."""
        self.objects: dict[int, object] = {}
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Any] = {}

    def send(self, *message: object) -> None:
        text = json.dumps(message)
        try:
            self.writer.write(text.encode() + b"\n")
            self.writer.flush()
        except OSError:
            self.gone = True
            raise Gone from None

    def receive(self) -> Any:
        line = self.reader.readline()
        try:
            message = json.loads(line)
            if not isinstance(message, list) or not message:
                raise ValueError("no message")
        except (ValueError, RecursionError):
            self.gone = True
            raise Gone("the program ended while it was tested") from None
        return message

    def ask(self, operation: str, *arguments: object) -> Any:
        """Requests an operation of the other side. Raises what it raises, and Gone."""
        with self.turn:
            return self._ask(operation, arguments)

    def _ask(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        if self.gone:
            raise Gone
        self.asked += 1
        self.send("ask", operation, [self.encode(value) for value in arguments])
        while True:
            kind, *fields = self.receive()
            if kind == "ask":
                self.answer(*fields)
                continue
            try:
                content, printed, after = fields
                result = self.decode(content)
                changed = [self.decode(value) for value in after] if operation == "in place" else []
            except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError):
                self.gone = True
                raise Gone("the program sent something that is not a value") from None
            stream = sys.stdout  # of the tests, never a terminal
            stream.write(str(printed))
            if kind != "raised":
                if changed:
                    restore(list(arguments[1]), changed)
                return result
            if isinstance(result, StopIteration) and operation != "next":  # would end a loop in the tests
                raise RuntimeError("StopIteration")
            raise result if isinstance(result, BaseException) else RuntimeError(str(result))

    def answer(self, operation: str, arguments: list[Any]) -> None:
        printed, before = io.StringIO(), sys.stdout
        if self.code is not None:
            sys.stdout = printed
        values: list[Any] = []
        try:
            values = [self.decode(value) for value in arguments]
            reply = "is", self.encode(self.perform(operation, values))
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001 - the tests may expect any
            reply = "raised", self.encode(error)
        finally:
            sys.stdout = before
        after: list[object] = []
        if operation == "in place":
            after = [self.encode(value) for value in values[1]]
        self.send(*reply, printed.getvalue()[: 1 << 20], after)

    def perform(self, operation: str, values: list[Any]) -> Any:
        if operation in ("call", "in place"):
            function, arguments, named = values
            return function(*arguments, **named)
        if operation in OPERATIONS and (self.code is not None or operation in ("iter", "next", "bool", "len", "eq")):
            return OPERATIONS[operation](*values)
        if operation == "await":
            return importlib.import_module("asyncio").run(values[0])
        if operation == "load" and self.code is not None:
            exec(compile(self.code, "program.py", "exec", dont_inherit=True), vars(self.module))
            return None
        if operation == "name" and not isinstance(vars(self.module)[values[0]], types.ModuleType):
            return vars(self.module)[values[0]]
        if operation in ("get", "set", "delete"):
            if self.code is None and (values[1].startswith("_") or type(values[0]).__module__ != "__main__"):
                raise AttributeError(values[1])
            attribute: dict[str, Callable[..., object]] = {"get": getattr, "set": setattr, "delete": delattr}
            return attribute[operation](*values)
        raise ValueError(operation)

    def encode(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is int and value.bit_length() > LONG:
            return ["int", hex(value)]
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufcSU":
            items = self.encode(value.tolist())
            return ["numpy", str(value.dtype), list(value.shape), items, kind.__name__ == "ndarray"]
        if isinstance(value, SCALARS):  # of enumerations only the value is written, too
            return value
        if kind in (decimal.Decimal, fractions.Fraction):
            return [kind.__name__, str(value)]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if kind in HELD:
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind is dict:
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, Remote):
            return ["yours", value._number]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named", kind.__name__, list(kind._fields), [self.encode(item) for item in tuple.__iter__(value)]]
        if kind.__module__ == "collections" and isinstance(value, dict):
            return self.encode(dict(value))
        if kind is datetime.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if kind in (datetime.date, datetime.time, datetime.datetime):
            return [kind.__name__, value.isoformat()]
        if isinstance(value, BaseException):
            return ["error", self.encode(kind), self.encode(value.args), self.encode(dict(vars(value)))]
        return self.encode_object(value)

    def encode_object(self, value: object) -> list[object]:
        if isinstance(value, type) and issubclass(value, BaseException):
            if value in vars(builtins).values():
                return ["builtin error", value.__name__]
            bases = [self.encode(base) for base in value.__bases__ if issubclass(base, BaseException)]
            return ["error class", self.number(value), value.__name__, bases]
        if inspect.iscoroutine(value):
            return ["coroutine", self.number(value)]
        return ["mine", self.number(value)]

    def number(self, value: object) -> int:
        number = self.numbers.setdefault(id(value), len(self.numbers))
        self.objects[number] = value  # keeps its id unique
        return number

    def decode(self, encoded: Any) -> Any:
        if type(encoded) in SCALARS:
            return encoded
        kind, *fields = encoded
        if kind in ("list", "tuple", "set", "frozenset", "deque"):
            return READ[kind](self.decode(value) for value in fields[0])
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in fields[0]}
        if kind == "yours":
            return self.objects[fields[0]]
        if kind in ("mine", "coroutine"):
            remote = self.remotes.setdefault(int(fields[0]), Remote(self, int(fields[0])))
            return remote._awaited() if kind == "coroutine" else remote
        if kind == "named":
            return collections.namedtuple(fields[0], fields[1])(*map(self.decode, fields[2]))  # type: ignore[misc]
        if kind == "numpy":
            numpy = importlib.import_module("numpy")
            array = numpy.array(self.decode(fields[2]), dtype=fields[0]).reshape(fields[1])
            return array if fields[3] else array[()]
        if kind in ("builtin error", "error class"):
            return self.decode_error_class(kind, *fields)
        if kind == "error":
            error = self.decode(fields[0])
            arguments = self.decode(fields[1])
            try:
                instance = error(*arguments)
            except TypeError:  # skip the constructor
                instance = error.__new__(error)
            instance.args = arguments
            with_names = self.decode(fields[2])
            instance.__dict__.update({str(name): value for name, value in with_names.items()})
            return instance
        return READ[kind](*fields)

    def decode_error_class(self, kind: str, name: Any, called: str = "", bases: Any = ()) -> Any:
        if kind == "builtin error":
            error = getattr(builtins, str(name))
            if not (isinstance(error, type) and issubclass(error, BaseException)):
                raise ValueError(name)
            return error
        if name not in self.remotes:
            self.remotes[name] = type(str(called), tuple(map(self.decode, bases)) or (Exception,), {})
        return self.remotes[name]


def restore(old: Any, new: Any) -> Any:
    """Apply a call's changes of an argument in place."""
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        old[:] = [*map(restore, old, new), *new[len(old) :]]
    elif isinstance(old, dict):
        changed = {key: restore(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(changed)
    elif isinstance(old, set | collections.deque | bytearray):
        old.clear()
        (old.update if isinstance(old, set) else old.extend)(new)
    elif type(old).__name__ == "ndarray" and old.shape == new.shape:
        old[...] = new
    elif isinstance(old, tuple) and len(old) == len(new):
        list(map(restore, old, new))
    else:
        return new
    return old
