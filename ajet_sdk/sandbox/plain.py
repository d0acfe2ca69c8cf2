"""Plain data: the values that cross between a program and its tests, rebuilt from the receiver's
own types.

A value crosses if its type is exactly one of a list: a subclass could answer for itself. Anything
else becomes a reference, which `peer` turns into a `Remote`. What a program sends is only ever read
as JSON, so that the receiver's types decide what can be built, whatever the sender does.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import itertools
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

SCALARS = (type(None), bool, int, float, str)
LONG = 10_000
"""Bits above which an integer is sent as hexadecimal, since Python limits decimal conversion."""
SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset,
}  # fmt: skip
MAPPINGS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "dict_keys": lambda pairs: dict(pairs).keys(),
    "dict_values": lambda pairs: dict(pairs).values(),
    "dict_items": lambda pairs: dict(pairs).items(),
}
FACTORIES = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""Factories of a defaultdict that cross; any other is left out."""
TYPES: dict[str, type] = {
    **FACTORIES,
    **{kind.__name__: kind for kind in (bytearray, complex, frozenset, object, range)},
    "NoneType": type(None),
}
"""Types that are values themselves, such as the result of `type_of("x")`."""
FROM_FIELDS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16), "bytes": bytes.fromhex, "bytearray": bytearray.fromhex, "complex": complex,
    "range": range, "Decimal": decimal.Decimal, "Fraction": fractions.Fraction, "UUID": uuid.UUID,
    "date": datetime.date.fromisoformat, "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat, "timedelta": datetime.timedelta,
    "PosixPath": pathlib.PosixPath, "PurePosixPath": pathlib.PurePosixPath, "ellipsis": lambda: ...,
}  # fmt: skip
"""Constructors from scalars, by name of type."""
FIELDS: dict[type, Callable[[Any], list[Any]]] = {
    bytes: lambda value: [value.hex()],
    bytearray: lambda value: [value.hex()],
    complex: lambda value: [value.real, value.imag],
    range: lambda value: [value.start, value.stop, value.step],
    decimal.Decimal: lambda value: [str(value)],
    fractions.Fraction: lambda value: [str(value)],
    uuid.UUID: lambda value: [str(value)],
    datetime.date: lambda value: [value.isoformat()],
    datetime.time: lambda value: [value.isoformat()],
    datetime.datetime: lambda value: [value.isoformat()],
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    pathlib.PosixPath: lambda value: [str(value)],
    pathlib.PurePosixPath: lambda value: [str(value)],
    types.EllipsisType: lambda value: [],
}
"""The scalars that `FROM_FIELDS` reads, by type."""
MAPPING_TYPES = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
CHANGEABLE = (list, set, bytearray, collections.deque, *MAPPING_TYPES)
"""Types of plain data that a call may change in place; arrays, too."""
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
ARRAY_KINDS = "biufcSU"
"""numpy's kinds of numbers and text
(https://numpy.org/doc/stable/reference/generated/numpy.dtype.kind.html).
"""


class NotPlain(BaseException):
    """A value is neither plain data nor used as an object of the program.

    No Exception: a test that expects the program to raise a TypeError must not take this for it.
    """


def containers(values: Any) -> list[Any]:
    """The containers within values that a call may change, in an order that is the same on both
    sides."""
    found: list[Any] = []
    waiting = [values]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in CHANGEABLE or _is_array(value):
            found.append(value)
        if kind in (list, collections.deque) or isinstance(value, tuple):
            waiting += value
        elif kind in MAPPING_TYPES:
            waiting += value.values()
        # Members of sets and keys cannot be changed, and have another order on the other side.
    return found


def encode(
    value: Any, refer: Callable[[Any], Any], arguments: Mapping[int, int] = MappingProxyType({})
) -> Any:
    """Writes a value as JSON; `refer` writes what is not plain data.

    `arguments` has the numbers of a call's containers by their ids, so that a result that is one of
    them is sent as such.
    """
    if id(value) in arguments:
        return ["argument", arguments[id(value)], encode(value, refer)]
    kind = type(value)
    if kind is type and value in TYPES.values():
        return ["type", value.__name__]
    if kind is int and value.bit_length() > LONG:
        return ["int", hex(value)]
    if kind in SCALARS:
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(item, refer, arguments) for item in value]]
    if kind in (dict, collections.OrderedDict, collections.Counter):
        return [kind.__name__, _pairs(value.items(), refer, arguments)]
    if kind is collections.defaultdict:
        factory = getattr(value.default_factory, "__name__", None)
        return ["defaultdict", factory, _pairs(value.items(), refer, arguments)]
    if kind in VIEWS:
        return [kind.__name__, _pairs(_items_of_view(value), refer)]
    if kind is collections.deque:
        return ["deque", [encode(item, refer, arguments) for item in value], value.maxlen]
    if kind in FIELDS:
        return [kind.__name__, *FIELDS[kind](value)]
    if (
        kind.__module__ == "numpy"
        and getattr(getattr(value, "dtype", None), "kind", "-") in ARRAY_KINDS
    ):
        is_array = kind.__name__ == "ndarray"
        return [
            "numpy",
            str(value.dtype),
            list(value.shape),
            encode(value.tolist(), refer),
            is_array,
        ]
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        return _encode_table(value, refer)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        items = [encode(item, refer, arguments) for item in tuple.__iter__(value)]
        return ["namedtuple", kind.__name__, list(kind._fields), items]
    if isinstance(value, enum.Enum) and isinstance(
        value, int | str
    ):  # IntEnum and StrEnum are used as values
        return encode(value.value, refer)
    return refer(value)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _pairs(
    items: Iterable[tuple[Any, Any]],
    refer: Callable[[Any], Any],
    arguments: Mapping[int, int] = MappingProxyType({}),
) -> list[Any]:
    return [[encode(key, refer), encode(value, refer, arguments)] for key, value in items]


def _items_of_view(view: Any) -> Iterator[tuple[Any, Any]]:
    name = type(view).__name__
    if name == "dict_items":
        yield from view
    elif name == "dict_keys":
        yield from zip(view, itertools.repeat(None))
    else:
        yield from enumerate(view)


def _encode_table(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A data frame or series, if its columns are numbers, text or other plain data."""
    is_frame = type(value).__name__ == "DataFrame"
    if is_frame:
        columns = [value.iloc[:, place] for place in range(value.shape[1])]
    else:
        columns = [value]
    if any(column.dtype.kind not in "biufcO" for column in columns):
        return refer(value)
    labels = list(value.columns) if is_frame else value.name
    content = [[str(column.dtype), encode(column.tolist(), refer)] for column in columns]
    return ["pandas", is_frame, encode(labels, refer), encode(list(value.index), refer), content]


def decode(content: Any, resolve: Callable[[str, list[Any]], Any]) -> Any:
    """Builds a value from JSON; `resolve` reads references.

    Raises NotPlain; ValueError, TypeError, LookupError, ArithmeticError, AttributeError for invalid
    content.
    """
    if type(content) in SCALARS:
        return content
    kind, *fields = content
    if kind in SEQUENCES:
        return SEQUENCES[kind](_decoded(fields[0], resolve))
    if kind in MAPPINGS:
        return MAPPINGS[kind](map(tuple, [_decoded(pair, resolve) for pair in fields[0]]))
    if kind == "defaultdict":
        values: Any = collections.defaultdict(FACTORIES.get(fields[0]))
        values.update(map(tuple, [_decoded(pair, resolve) for pair in fields[1]]))
        return values
    if kind == "deque":
        return collections.deque(_decoded(fields[0], resolve), fields[1])
    if kind in FROM_FIELDS:
        if not all(type(field) in SCALARS for field in fields):
            raise ValueError(kind)
        return FROM_FIELDS[kind](*fields)
    if kind == "type":
        return TYPES[fields[0]]
    if kind == "namedtuple":
        name, names, values = fields
        return _record(name, names, _decoded(values, resolve))
    if kind == "numpy":
        dtype, shape, items, is_array = fields
        numpy = importlib.import_module("numpy")
        if numpy.dtype(dtype).kind not in ARRAY_KINDS:
            raise ValueError(dtype)
        array = numpy.array(decode(items, resolve), dtype=dtype).reshape(shape)
        return array if is_array else array[()]
    if kind == "pandas":
        return _decode_table(fields, resolve)
    return resolve(kind, fields)


def _decoded(items: Any, resolve: Callable[[str, list[Any]], Any]) -> list[Any]:
    return [decode(item, resolve) for item in items]


def _record(name: Any, names: Any, values: list[Any]) -> Any:
    for field, value in zip(names, values, strict=True):
        if field in names_of_plain_data() and not is_plain(value):
            raise NotPlain(f"the field {field} of a namedtuple is not plain data")
    return collections.namedtuple(str(name), names)(*values)  # type: ignore[misc]


def _decode_table(fields: list[Any], resolve: Callable[[str, list[Any]], Any]) -> Any:
    is_frame, labels, index, content = fields
    pandas: Any = importlib.import_module("pandas")
    columns = []
    for dtype, items in content:
        column = decode(items, resolve)
        if not is_plain(column):
            raise NotPlain("a column of a table is not plain data")
        columns.append(pandas.Series(column, dtype=dtype))
    rows = decode(index, resolve)
    names = decode(labels, resolve)
    if not is_frame:
        return pandas.Series(columns[0].array, index=rows, name=names)
    frame = pandas.DataFrame(dict(enumerate(columns)))
    frame.index = rows
    frame.columns = names
    return frame


def is_plain(value: Any) -> bool:
    """Whether a value was built from plain data alone, also inside."""
    kind = type(value)
    if kind in SCALARS or kind in FIELDS or (kind is type and value in TYPES.values()):
        return True
    if kind in MAPPING_TYPES:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if kind in (list, tuple, set, frozenset, collections.deque, *VIEWS):
        return all(map(is_plain, value))
    if kind.__bases__ == (tuple,):
        return all(map(is_plain, value))
    return kind.__module__.partition(".")[0] in ("numpy", "pandas")


def names_of_plain_data() -> frozenset[str]:
    """Attributes that plain data of some type has: asked of a result, they expect plain data."""
    # Without numpy or pandas, tests expect no array and no table.
    return _names_of_types(("numpy" in sys.modules), ("pandas" in sys.modules))


@functools.cache
def _names_of_types(with_numpy: bool, with_pandas: bool) -> frozenset[str]:
    kinds: list[type] = [*FIELDS, *FACTORIES.values(), frozenset, *VIEWS]
    kinds += [collections.Counter, collections.OrderedDict, collections.deque]
    if with_numpy:
        kinds.append(importlib.import_module("numpy").ndarray)
    if with_pandas:
        pandas = importlib.import_module("pandas")
        kinds += [pandas.DataFrame, pandas.Series]
    return frozenset(name for kind in kinds for name in dir(kind) if not name.startswith("_"))
