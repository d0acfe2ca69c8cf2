"""`@workflow` and `@judge`, which tag a function; it can still be called directly.

A run fills the function's parameters by name:

    task      the Task (annotated `str`: its main_query)
    model     a Model handle for the policy (annotated `str`: the policy's name, or the parameter's default)
    env       the environment of the task
    episode   the Episode: its ids; for a judge also its output and calls
    output    the workflow's return value (judges only)
    episodes  the episodes of a group, in the order of their attempts (judges with `group=True` only)

Any other name is a key of the task's metadata, else a field of the Task, else the parameter keeps
its default. A single remaining parameter gets `main_query`: in a workflow if it is a string, in a
judge if it has a usual name (`question`, `query`, `prompt`, `problem`, `instruction`). A parameter
without a value is a SignatureError before the first episode.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, aclosing, closing, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_origin, overload

from ajet_sdk.agent.context import current_episode, observer
from ajet_sdk.errors import SignatureError
from ajet_sdk.tasks.row_names import QUERY_COLUMNS
from ajet_sdk.types import Task

Kind = Literal["workflow", "judge"]
F = TypeVar("F", bound=Callable[..., Any])

WORKFLOW_NAMES = frozenset({"task", "model", "env", "episode"})
JUDGE_NAMES = WORKFLOW_NAMES | {"output"}
GROUP_NAMES = frozenset({"task", "model", "episodes"})
TUNER_NAMES = frozenset({"task", "model", "auxiliary_models", "logger", "response"})
_TASK_FIELDS = ("main_query", "task_id", "init_messages", "env_type", "metadata")
_MAY_BE_EMPTY = ("init_messages", "metadata")
_STRINGS = (str, "str", str | None, "str | None", "Optional[str]", inspect.Parameter.empty)


@dataclass(frozen=True)
class Spec:
    """A decorated function with its parameters and the decorator's arguments."""

    kind: Kind
    name: str
    function: Callable[..., object]
    parameters: Mapping[str, inspect.Parameter] = field(repr=False)
    """With resolved annotations, where possible."""
    timeout: float | None = None
    """Seconds; None: the limit of the run."""
    trainable_targets: tuple[str, ...] | None = None
    group: bool = False
    """A judge of the whole group at once."""

    @property
    def uses_handle(self) -> bool:
        """Whether it takes a Model handle: then the policy answers only calls made through the
        handle."""
        return "model" in self.parameters and not _wants_text(self.parameters["model"])

    @property
    def tuner_names(self) -> frozenset[str]:
        """AgentScope Tuner's argument names, if the function has its signature: `auxiliary_models`,
        or a task dict."""
        task = self.parameters.get("task")
        row = task is not None and (get_origin(task.annotation) or task.annotation) is dict
        if row or "auxiliary_models" in self.parameters:
            return TUNER_NAMES
        return frozenset()


@dataclass(frozen=True)
class _Tag:
    kind: Kind
    name: str | None
    timeout: float | None
    trainable_targets: tuple[str, ...] | None
    group: bool = False


@overload
def workflow(function: F, /) -> F: ...
@overload
def workflow(
    *,
    name: str | None = None,
    timeout: float | None = None,
    trainable_targets: Collection[str] | None = None,
) -> Callable[[F], F]: ...
def workflow(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    trainable_targets: Collection[str] | None = None,
) -> F | Callable[[F], F]:
    """Mark a function, sync or async, as the agent to trace and train.

    Its result is the output that judges see; if it is a `Reward` or a list of them, judges are
    skipped. A generator's result is its return value, else the text that it yields, else the list
    of what it yields. A parameter gets the value of the task's column of the same name.

    Args:
        function: the agent; None if the decorator has arguments.
        name: the name in traces; None: the function's name.
        timeout: seconds after which an episode ends with status `timeout`; None: `rollout.timeout` of the config.
        trainable_targets: target tags of the calls to train; None: all.

    Returns:
        The function, unchanged.

    Raises:
        SignatureError: a parameter cannot be passed by name.
    """
    targets = _check_targets(trainable_targets)
    decorated: F | Callable[[F], F] = _tag(
        function, _Tag("workflow", name, _check_timeout(timeout), targets)
    )
    return decorated


@overload
def judge(function: F, /) -> F: ...
@overload
def judge(
    *, name: str | None = None, timeout: float | None = None, group: bool = False
) -> Callable[[F], F]: ...
def judge(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    group: bool = False,
) -> F | Callable[[F], F]:
    """Mark a function, sync or async, as the judge of an output.

    It returns a number, a bool, a `Reward`, a list of `Reward`s, or `(reward, is_success)`. Any
    other value, including None and NaN, fails the episode instead of becoming a reward of 0.

    Args:
        function: the judge; None if the decorator has arguments.
        name: the reward's name in traces; None: the function's name.
        timeout: seconds after which the judge fails; None: `rollout.judge_timeout` of the config.
        group: call it once for all attempts at a task, after the last. The function gets `episodes`, those with an
            output, and returns a list of verdicts in the same order.

    Returns:
        The function, unchanged.

    Raises:
        SignatureError: a parameter cannot be passed by name.
    """
    tag = _Tag("judge", name, _check_timeout(timeout), None, group)
    decorated: F | Callable[[F], F] = _tag(function, tag)
    return decorated


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is not None and not timeout > 0:
        raise SignatureError(f"timeout must be a positive number of seconds (got {timeout!r})")
    return timeout


def _check_targets(names: Collection[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise SignatureError(
            f'trainable_targets is a list of target tags: ["{names}"], not "{names}"'
        )
    if not names:
        raise SignatureError(
            "trainable_targets=[] would train no agent; name at least one target tag, or omit it"
        )
    return tuple(names)


def _tag(function: Any, tag: _Tag) -> Any:
    if function is None:
        return lambda inner: _tag(inner, tag)
    if inspect.isclass(function) or not callable(function):
        raise SignatureError(
            f"@{tag.kind} decorates functions, not {function!r}; to write a class, derive from"
            " ajet.Workflow or ajet.BaseJudge"
        )
    if tag.kind == "judge" and _is_stream(function):
        raise SignatureError(
            f"@judge {_name_of(function)} is a generator; return the result instead of yielding it"
        )
    _parameters(function, tag.kind, tag.name or _name_of(function))
    if _is_stream(function):
        wrapper = _stream_wrapper(function)
    else:
        wrapper = _wrapper(function)
    wrapper.__ajet__ = tag
    return wrapper


def _wrapper(function: Any) -> Any:
    """The function, whose calls are episodes under `ajet.trace`."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: object, **kwargs: object) -> object:
            with _observe(call_async, args, kwargs) as seen:
                seen.output = await function(*args, **kwargs)
                return seen.output

        return call_async

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        with _observe(call, args, kwargs) as seen:
            seen.output = function(*args, **kwargs)
            return seen.output

    return call


def _is_stream(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _stream_wrapper(function: Any) -> Any:
    """As `_wrapper`, for a generator function. The episode goes on from the first part to the last.

    Between two parts the context is the caller's, whose own requests are not the agent's.
    """
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def stream_async(*args: object, **kwargs: object) -> AsyncIterator[object]:
            outside = current_episode.get()
            parts = list[object]()
            with _observe(stream_async, args, kwargs) as seen:
                inside = current_episode.get()
                async with aclosing(function(*args, **kwargs)) as inner:
                    async for part in inner:
                        parts.append(part)
                        current_episode.set(outside)
                        try:
                            yield part
                        finally:
                            current_episode.set(inside)
                seen.output = _joined(parts)

        return stream_async

    @functools.wraps(function)
    def stream(*args: object, **kwargs: object) -> Generator[object, object, object]:
        outside = current_episode.get()
        parts = list[object]()
        with _observe(stream, args, kwargs) as seen, closing(function(*args, **kwargs)) as inner:
            inside = current_episode.get()
            sent: object = None
            while True:
                try:
                    part = inner.send(sent)
                except StopIteration as end:
                    if end.value is None:
                        seen.output = _joined(parts)
                    else:
                        seen.output = end.value
                    return end.value
                parts.append(part)
                current_episode.set(outside)
                try:
                    sent = yield part
                finally:
                    current_episode.set(inside)

    return stream


def _joined(parts: list[object]) -> object:
    """The output of a stream: its text, or the list of its parts."""
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else parts


def collected(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns the output of a generator function; any other function as it is."""
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def collect_async(*args: object, **kwargs: object) -> object:
            return _joined([part async for part in function(*args, **kwargs)])

        return collect_async
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def collect(*args: object, **kwargs: object) -> object:
            parts = list[object]()
            stream = function(*args, **kwargs)
            while True:
                try:
                    parts.append(next(stream))
                except StopIteration as end:
                    return _joined(parts) if end.value is None else end.value

        return collect
    return function


def _observe(
    wrapper: Any, args: tuple[object, ...], kwargs: dict[str, object]
) -> AbstractContextManager[Any]:
    """An observed episode under `ajet.trace`; otherwise nothing, as a nested workflow of a run
    joins the outer one."""
    watching = observer.get()
    tag = wrapper.__ajet__
    if watching is None or current_episode.get() is not None or tag.kind != "workflow":
        return nullcontext(SimpleNamespace())
    try:
        arguments = inspect.signature(wrapper).bind(*args, **kwargs).arguments
    except TypeError:  # the call raises it again
        arguments = dict(kwargs)
    return watching.episode(tag.name or _name_of(wrapper), arguments)


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _parameters(
    function: Callable[..., object], kind: Kind, name: str
) -> dict[str, inspect.Parameter]:
    hints = _hints(function)
    parameters = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise SignatureError(
                f"{kind} {name}: parameter `{parameter.name}` is positional-only, but a run passes"
                f" arguments by name ({_names(kind)}, or a key of the task's metadata); remove"
                " the `/`"
            )
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise SignatureError(
                f"{kind} {name}: parameter `{stars}{parameter.name}` is variadic, but a run passes"
                f" arguments by name; list the parameters it needs ({_names(kind)}, or keys of the"
                " task's metadata)"
            )
        parameters[parameter.name] = parameter.replace(
            annotation=hints.get(parameter.name, parameter.annotation)
        )
    return parameters


def _hints(function: Any) -> dict[str, object]:
    target = inspect.unwrap(getattr(function, "func", function))
    try:
        target = target if inspect.isroutine(target) else type(target).__call__
        return inspect.get_annotations(
            target, eval_str=True
        )  # get_type_hints differs on Python 3.10
    except Exception:  # noqa: BLE001  a name imported only for type checkers: the annotation stays a string
        return {}


def _names(kind: Kind) -> str:
    return ", ".join(sorted(WORKFLOW_NAMES if kind == "workflow" else JUDGE_NAMES))


def spec_of(function: object, kind: Kind) -> Spec:
    """Return the `Spec` of a function, which need not be decorated. Raises SignatureError."""
    return (_cached if inspect.isfunction(function) else _spec_of)(function, kind)


def _spec_of(function: Any, kind: Kind) -> Spec:
    tag = getattr(function, "__ajet__", None)
    if tag is not None and tag.kind != kind:
        raise SignatureError(
            f"{_name_of(function)} is decorated with @ajet.{tag.kind}, but a {kind} is needed here"
        )
    if tag is None:
        tag = _tag(function, _Tag(kind, None, None, None)).__ajet__
    name = tag.name or _name_of(function)
    parameters = _parameters(function, kind, name)
    return Spec(kind, name, function, parameters, tag.timeout, tag.trainable_targets, tag.group)


_cached = functools.lru_cache(maxsize=64)(_spec_of)
"""Each episode needs the spec; resolving annotations takes a tenth of a short episode."""


def _wants_text(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in _STRINGS[:-1] or isinstance(parameter.default, str)


def bind(spec: Spec, task: Task, reserved: Mapping[str, object]) -> dict[str, object]:
    """Return the keyword arguments of a call; `reserved` has the values of the reserved names.

    Raises SignatureError that names the parameters without a value, and the available names.
    """
    arguments: dict[str, object] = {}
    missing = [p for p in spec.parameters.values() if not _fill(p, task, reserved, arguments)]
    texts = [p for p in missing if p.annotation in _STRINGS]
    if spec.kind == "workflow":
        candidates = texts
    else:
        candidates = [p for p in missing if p.name in QUERY_COLUMNS]
    if task.main_query and len(missing) == len(candidates) == 1:
        arguments[missing[0].name] = task.main_query
        missing = []
    if missing:
        raise SignatureError(_explain_missing(spec, task, reserved, missing))
    return arguments


def _fill(
    parameter: inspect.Parameter, task: Task, reserved: Mapping[str, Any], into: dict[str, object]
) -> bool:
    name = parameter.name
    default = parameter.default
    if name == "task" and parameter.annotation in (str, "str"):
        into[name] = task.main_query
    elif name == "model" and name in reserved and _wants_text(parameter):
        into[name] = reserved[name].name if default is parameter.empty else default
    elif name in reserved:
        into[name] = reserved[name]
    elif name in task.metadata:
        into[name] = task.metadata[name]
    elif name in _TASK_FIELDS and (
        getattr(task, name) or (name in _MAY_BE_EMPTY and default is parameter.empty)
    ):
        into[name] = getattr(task, name)
    else:
        return default is not parameter.empty
    return True


def _explain_missing(
    spec: Spec, task: Task, reserved: Mapping[str, object], missing: list[inspect.Parameter]
) -> str:
    names = ", ".join(f"`{p.name}`" for p in missing)
    keys = ", ".join(sorted(map(str, task.metadata))) or "none"
    several = spec.kind == "workflow" and len(missing) > 1 and bool(task.main_query)
    if task.main_query:
        query = "a main_query (passed to a single string parameter)"
    else:
        query = "no main_query"
    available = f"{', '.join(sorted(reserved))} by name; metadata keys: {keys}"
    if spec.kind == "workflow":
        available += f"; {query}"
    hint = "Only one parameter can receive main_query. " if several else ""
    for parameter in missing:
        near = difflib.get_close_matches(
            parameter.name, [*reserved, *map(str, task.metadata)], n=1, cutoff=0.7
        )
        if near:
            hint += f"Did you mean `{near[0]}` by `{parameter.name}`? "
    return (
        f"{spec.kind} {spec.name}: no value for {'parameters' if len(missing) > 1 else 'parameter'}"
        f" {names} in task {task.task_id}. Available: {available}. {hint}Rename the parameter, give"
        " it a default, or add the key to the task's metadata"
    )
