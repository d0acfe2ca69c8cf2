"""The protocol between a program and its tests in separate processes: see `tester`.

Each line is a request or a reply. Plain data is sent by value (`plain`). Other objects are sent as
a number and become a `Remote`, whose answers are the program's own. Tests may ask an object that
they construct themselves for anything but to be equal to plain data. A result that is no plain data
has no method or operator of plain data: otherwise the program would decide the comparison, and with
it the verdict.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import importlib
import inspect
import io
import json
import os
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any

from ajet_sdk.sandbox.changes import Sent
from ajet_sdk.sandbox.plain import NotPlain, containers, decode, encode, is_plain
from ajet_sdk.sandbox.remote import NAMING, OPERATIONS, Grade, ItemsRead, Remote, record_class

OF_TESTS = ("iter", "next", "bool", "len", "eq", "hash", "copy", "deepcopy")
"""Operations that a program may request of the tests' objects."""


class Gone(BaseException):
    """The other side has ended, or sent an invalid message."""


class Peer:
    """One of the two sides: sends requests, and answers the other's while it waits."""

    def __init__(self, code: str | None = None) -> None:
        """`code` is the program on its side, where any attribute of any object may be requested."""
        self.reader = os.fdopen(os.dup(0), "rb")
        self.writer = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)
        self.code = code
        self.gone = False
        self.asked = 0
        self.refused = ""
        """Why a result is not what the tests asked for: it is no plain data."""
        self.interface: set[str] = set()
        """Attributes and operations that tests use on objects they construct, and therefore may use
        on results.
        """
        self.makers: set[str] = set()
        """Names and methods from which the tests get objects, by how they use them."""
        self.with_assertions: set[int] = set()
        """Lines of the tests' `with` statements that contain assertions."""
        self.module = types.ModuleType("__main__")
        self.turn = threading.RLock()
        """Held by the requesting thread, which may send requests while it answers."""
        self.objects: dict[int, object] = {}
        self.numbers: dict[int, int] = {}
        self.remotes: dict[tuple[int, Grade], Remote] = {}
        self.read: dict[int, ItemsRead] = {}
        self.errors: dict[int, type[BaseException]] = {}
        self.loop: Any = None
        self.begun = 0
        """Number of requests when the expression began that the tests evaluate now."""
        self.unsettled: list[Sent] = []
        """Calls whose changes of their arguments are not applied yet."""
        self.coroutines: dict[int, Sent] = {}
        """Calls that returned a coroutine of the other side, by its number: it has their arguments."""
        self.given: dict[int, tuple[list[Any], list[Any]]] = {}
        """Arguments of calls that returned a coroutine, by its id: values, and how they were sent."""
        self.originals: dict[int, tuple[object, object]] = {}
        """Copies that stand for an argument of their call, by their ids, and that argument."""
        self.tokens: dict[int, object] = {}
        """What stands for an object of the other side, whatever its grade, where `is` compares."""
        self.cannot = ""
        """Why no program can be judged by these tests."""

    def refuse(self, remote: Remote, operation: str) -> None:
        """Record that an object stands where the tests ask for plain data."""
        if self.code is None:
            self.refused = (
                self.refused or f"{operation} of an object of class {remote._called}, no plain data"
            )

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

    def ask(self, operation: str, *arguments: object, grade: Grade = Grade.RESULT) -> Any:
        """Requests an operation of the other side; `grade` is that of a result. Raises what it
        raises, and Gone.
        """
        with self.turn:
            return self._ask(operation, arguments, grade)

    def grade_of(self, name: str) -> Grade:
        """The grade of a name of the program, or of a method, whose name begins with a dot."""
        return Grade.CLASS if name in self.makers else Grade.RESULT

    def _ask(self, operation: str, arguments: tuple[Any, ...], grade: Grade) -> Any:
        if self.gone:
            raise Gone
        self.asked += 1
        sent = self._sent(operation, arguments)
        for earlier in self.unsettled_since(self.begun):
            if earlier.shares(sent.containers):
                self.unsettled.remove(earlier)
                earlier.apply()
        self.send("ask", operation, [self.encode(value) for value in arguments])
        while True:
            kind, *fields = self.receive()
            if kind == "ask":
                self.answer(*fields)
                continue
            try:
                content, printed, after = fields
                result = self.decode(content, grade, sent)
                if after is not None and sent.arguments:
                    sent.changed = [self.decode_changed(value, sent) for value in after]
                    self.unsettled.append(sent)
            except NotPlain as error:
                self.refused = self.refused or str(error)
                raise
            except (
                ValueError,
                TypeError,
                LookupError,
                ArithmeticError,
                AttributeError,
                RecursionError,
            ):
                self.gone = True
                raise Gone("the program sent something that is not a value") from None
            stream = sys.stdout  # of the tests, never a terminal
            stream.write(str(printed))
            # A program sees what the tests' functions change at once; and an exception ends what the
            # changes could be compared with.
            if sent in self.unsettled and (self.code is not None or kind == "raised"):
                self.unsettled.remove(sent)
                sent.apply()
            if self.code is not None:
                result = self.original(result)
            if kind == "raised":
                raise self.raised(operation, result)
            return result

    def _sent(self, operation: str, arguments: tuple[Any, ...]) -> Sent:
        """The arguments that the other side may change during a request."""
        if operation == "call":
            return Sent(arguments[1:], self.asked)
        if operation == "await" and arguments[0]._number in self.coroutines:
            sent = self.coroutines.pop(arguments[0]._number)
            sent.number = self.asked
            return sent
        return Sent((), self.asked)

    def begin(self) -> tuple[int, int]:
        """Begin an expression of the tests, which `settled` ends."""
        before = self.begun
        self.begun = self.asked
        return before, self.begun

    def settled(self, began: tuple[int, int], value: Any) -> Any:
        """Apply what the calls of an expression changed in their arguments; returns its value, or
        the argument that it stands for.

        Calls of an expression around it, of which this is a part by way of a helper, wait for its
        end.
        """
        with self.turn:
            self.begun, start = began
            for call in self.unsettled_since(start):
                self.unsettled.remove(call)
                call.apply()
        return self.original(value)

    def unsettled_since(self, start: int) -> list[Sent]:
        return [call for call in self.unsettled if call.number > start]

    def original(self, value: Any) -> Any:
        if id(value) in self.originals:
            return self.originals[id(value)][1]
        return value

    def identity(self, value: Any) -> Any:
        """What `is` compares in place of a value."""
        if isinstance(value, Remote):
            return self.tokens.setdefault(value._number, object())
        return self.original(value)

    def raised(self, operation: str, error: object) -> BaseException:
        """The exception to raise for a request that failed."""
        is_end = isinstance(error, StopIteration | StopAsyncIteration)
        if is_end and operation not in ("next", "anext"):
            return RuntimeError(type(error).__name__)  # as it is, it would end a loop in the tests
        if isinstance(error, BaseException):
            return error
        return RuntimeError(str(error))

    def answer(self, operation: str, arguments: list[Any]) -> None:
        printed = io.StringIO()
        before = sys.stdout
        if self.code is not None:
            sys.stdout = printed
        given: tuple[list[Any], list[Any]] = [], []
        parts: list[Any] = []
        try:
            values = [self.decode(value) for value in arguments]
            if operation == "call":
                given = values[1:], arguments[1:]
            elif operation == "await":
                given = self.given.pop(id(values[0]), given)
            parts = containers(tuple(given[0]))
            result = self.perform(operation, values)
            if inspect.iscoroutine(result):
                self.given[id(result)] = given
            reply = "is", self.encode(result, {id(part): at for at, part in enumerate(parts)})
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001 - the tests may expect any
            reply = "raised", self.encode(error)
        finally:
            sys.stdout = before
        after: list[Any] | None = None
        if parts:
            after = [self.encode(value) for value in given[0]]
            if after == given[1]:
                after = None
        self.send(*reply, printed.getvalue()[: 1 << 20], after)

    def perform(self, operation: str, values: list[Any]) -> Any:
        if operation == "call":
            function, arguments, named = values
            return function(*arguments, **named)
        if operation in OPERATIONS and (self.code is not None or operation in OF_TESTS):
            return OPERATIONS[operation](*values)
        if operation == "await":
            return self.awaited(values[0])
        if operation in ASYNC_OPERATIONS and self.code is not None:
            return self.awaited(ASYNC_OPERATIONS[operation](*values))
        if operation == "aiter" and self.code is not None:
            return aiter(values[0])
        if operation == "seed" and self.code is not None:
            module, arguments, named = values
            importlib.import_module(module).seed(*arguments, **named)
            return None
        if operation == "load" and self.code is not None:
            exec(compile(self.code, "program.py", "exec", dont_inherit=True), vars(self.module))
            return None
        if operation == "name" and not isinstance(vars(self.module)[values[0]], types.ModuleType):
            return vars(self.module)[values[0]]
        if operation in ("get", "set", "delete"):
            if self.code is None and not self.may_access(operation, values[0], values[1]):
                raise AttributeError(values[1])
            attribute: dict[str, Callable[..., object]] = {
                "get": getattr,
                "set": setattr,
                "delete": delattr,
            }
            return attribute[operation](*values)
        raise ValueError(operation)

    def awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine. All of them run in one event loop, in which an asynchronous
        generator goes on from item to item."""
        if self.loop is None:
            self.loop = importlib.import_module("asyncio").new_event_loop()
        return self.loop.run_until_complete(coroutine)

    def may_access(self, operation: str, value: object, name: str) -> bool:
        """Whether a program may read or change an attribute of an object of the tests."""
        if name in NAMING and isinstance(value, types.FunctionType):
            return operation == "get"  # for functools.wraps
        if name.startswith("_"):
            return False
        if type(value) in (io.StringIO, io.BytesIO):
            return operation == "get"
        # A program must not replace a method that the tests compare with.
        is_method = callable(getattr(type(value), name, None))
        return type(value).__module__ == "__main__" and (operation == "get" or not is_method)

    def encode(self, value: Any, arguments: Mapping[int, int] = MappingProxyType({})) -> Any:
        return encode(value, self.refer, arguments)

    def refer(self, value: Any) -> list[Any]:
        """Writes a value that is not plain data."""
        if isinstance(value, Remote):
            return ["yours", value._number]
        if isinstance(value, BaseException):
            return [
                "error",
                self.encode(type(value)),
                self.encode(value.args),
                self.encode(dict(vars(value))),
            ]
        if isinstance(value, type) and issubclass(value, BaseException):
            if value in vars(builtins).values():
                return ["builtin error", value.__name__]
            bases = [
                self.encode(base) for base in value.__bases__ if issubclass(base, BaseException)
            ]
            return ["error class", self.number(value), value.__name__, bases]
        if inspect.iscoroutine(value):
            return ["coroutine", self.number(value)]
        if isinstance(value, enum.Enum):
            return ["member", self.number(value), type(value).__name__]
        fields: list[tuple[str, bool]] = []
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [
                (field.name, field.compare is not False) for field in dataclasses.fields(value)
            ]
        return ["mine", self.number(value), type(value).__name__, fields]

    def number(self, value: object) -> int:
        number = self.numbers.setdefault(id(value), len(self.numbers))
        self.objects[number] = value  # keeps its id unique
        return number

    def decode(self, content: Any, grade: Grade = Grade.RESULT, sent: Sent | None = None) -> Any:
        """Read what the other side sent; `sent` is the call that it answers."""
        return decode(content, lambda kind, fields: self.resolve(kind, fields, grade, sent))

    def decode_changed(self, content: Any, sent: Sent) -> Any:
        """Read an argument as it is after a call; objects that were among the arguments stay."""

        def resolve(kind: str, fields: list[Any]) -> Any:
            if kind == "mine" and fields[0] in sent.remotes:
                return sent.remotes[fields[0]]
            return self.resolve(kind, fields, Grade.RESULT, sent)

        return decode(content, resolve)

    def resolve(self, kind: str, fields: list[Any], grade: Grade, sent: Sent | None) -> Any:
        """Reads a value that is not plain data; `grade` is that of an object."""
        if kind == "yours":
            return self.objects[fields[0]]
        if kind == "argument" and sent is not None:
            at, content = fields
            copied = self.decode(content, grade, sent)
            self.originals[id(copied)] = copied, sent.containers[at]
            return copied
        if kind == "mine":
            number, called, described = fields
            names = tuple((str(name), bool(flag)) for name, flag in described)
            return self.remote(int(number), str(called), names, grade)
        if kind == "member":
            # There is one proxy of each, since tests compare them with `is`.
            return self.remote(int(fields[0]), str(fields[1]), (), Grade.RESULT)
        if kind == "coroutine":
            coroutine = self.remote(int(fields[0]), "coroutine", (), Grade.RESULT)
            if sent is not None:
                self.coroutines[coroutine._number] = sent
            return coroutine._awaited(grade)
        if kind == "builtin error":
            error = getattr(builtins, str(fields[0]))
            if not (isinstance(error, type) and issubclass(error, BaseException)):
                raise ValueError(fields[0])
            return error
        if kind == "error class":
            number, called, bases = fields
            if number not in self.errors:
                classes = tuple(self.decode(base) for base in bases) or (Exception,)
                self.errors[number] = type(str(called), classes, {})
            return self.errors[number]
        if kind == "error":
            return self.error(*fields)
        raise ValueError(kind)

    def remote(
        self, number: int, called: str, fields: tuple[tuple[str, bool], ...], grade: Grade
    ) -> Remote:
        """The proxy of an object: one for each grade, since a method may return the object it was
        called on."""
        if self.code is not None:
            grade = Grade.OBJECT  # a program may use the tests' objects as it likes
        if (number, grade) not in self.remotes:
            kind = record_class(called, fields) if fields else Remote
            self.remotes[number, grade] = kind(self, number, called, grade)
        return self.remotes[number, grade]

    def error(self, kind: Any, arguments: Any, attributes: Any) -> BaseException:
        error = self.decode(kind)
        if not (isinstance(error, type) and issubclass(error, BaseException)):
            raise ValueError(kind)
        decoded = self.decode(arguments)
        try:
            instance: BaseException = error(*decoded)
        except TypeError:  # skip the constructor
            instance = error.__new__(error)
        instance.args = decoded
        for name, value in self.decode(attributes).items():
            if is_plain(
                value
            ):  # an exception can be a result, too: no method of the program comes with it
                instance.__dict__[str(name)] = value
        return instance


async def _next_of(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator)


async def _entered(manager: AbstractAsyncContextManager[Any]) -> Any:
    return await manager.__aenter__()


async def _exited(manager: AbstractAsyncContextManager[Any], *raised: Any) -> Any:
    return await manager.__aexit__(*raised)


ASYNC_OPERATIONS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "anext": _next_of,
    "aenter": _entered,
    "aexit": _exited,
}
"""Operations that wait, which tests may ask for of a program's objects."""
