"""`@workflow` and `@judge`: the function stays as it was, and its parameters are filled by name."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ajet
from ajet_sdk.agent.decorators import JUDGE_NAMES, WORKFLOW_NAMES, bind, spec_of
from ajet_sdk.agent.model import Model
from ajet_sdk.errors import SignatureError
from ajet_sdk.types import Task
from tests.sdk.episodes import episode_of_workflow

MODEL = Model("http://127.0.0.1:1/v1", "key", "policy")


@ajet.workflow
async def answer(question: str, hint: str = "none") -> str:
    """Answer a question."""
    return f"{question} ({hint})"


@ajet.workflow(name="named", timeout=3, trainable_targets=["wolf"])
def plain(question: str) -> str:
    return question.upper()


@ajet.judge
def exact(output: str, answer: str) -> float:
    """Equal or not."""
    return float(output == answer)


def bound(function: Any, kind: Any = "workflow", **fields: Any) -> dict[str, Any]:
    names = WORKFLOW_NAMES if kind == "workflow" else JUDGE_NAMES
    return bind(
        spec_of(function, kind), Task(**fields), {**dict.fromkeys(names, "given"), "model": MODEL}
    )


def test_the_function_is_called_as_before() -> None:
    assert asyncio.run(answer("why")) == "why (none)"
    assert plain("why") == "WHY"
    assert exact("1", answer="1") == 1.0


def test_signature_name_and_docstring_stay() -> None:
    assert str(inspect.signature(answer)) == "(question: 'str', hint: 'str' = 'none') -> 'str'"
    assert (answer.__name__, answer.__doc__, exact.__doc__) == (
        "answer",
        "Answer a question.",
        "Equal or not.",
    )
    assert inspect.iscoroutinefunction(answer) and not inspect.iscoroutinefunction(plain)


@pytest.mark.parametrize("function", [answer, plain, exact])
def test_it_pickles_by_name(function: Any) -> None:
    assert pickle.loads(pickle.dumps(function)) is function


def test_arguments_of_the_decorator_are_kept() -> None:
    spec = spec_of(plain, "workflow")
    assert (spec.name, spec.timeout, spec.trainable_targets) == ("named", 3, ("wolf",))
    assert spec_of(answer, "workflow").name == "answer"


def test_a_plain_function_is_taken_as_if_decorated() -> None:
    def bare(question: str) -> str:
        return question

    assert bound(bare, main_query="why") == {"question": "why"}


def test_reserved_names_metadata_defaults_and_the_main_query() -> None:
    def solve(
        task: Any, model: Any, env: Any, episode: Any, level: int, question: str, hint: str = "none"
    ) -> None: ...

    found = bound(ajet.workflow(solve), main_query="why", metadata={"level": 3, "unused": 1})
    expected = {
        "task": "given",
        "model": MODEL,
        "env": "given",
        "episode": "given",
        "level": 3,
        "question": "why",
    }
    assert found == expected


def test_metadata_stands_before_a_default_and_before_the_main_query() -> None:
    def solve(question: str, hint: str = "none") -> None: ...

    found = bound(solve, main_query="why", metadata={"question": "how", "hint": "think"})
    assert found == {"question": "how", "hint": "think"}


def test_fields_of_the_task_by_name() -> None:
    def solve(
        main_query: str, task_id: str, metadata: dict[str, Any], init_messages: list[Any]
    ) -> None: ...

    found = bound(solve, main_query="why", task_id="t", metadata={"a": 1})
    assert found == {"main_query": "why", "task_id": "t", "metadata": {"a": 1}, "init_messages": []}


@pytest.mark.parametrize("annotation", ["str", str, "str | None", inspect.Parameter.empty])
def test_the_single_string_parameter_may_be_unannotated(annotation: Any) -> None:
    def solve(question):  # type: ignore[no-untyped-def]
        return question

    if annotation is not inspect.Parameter.empty:
        solve.__annotations__["question"] = annotation
    assert bound(solve, main_query="why") == {"question": "why"}


def test_a_number_does_not_get_the_main_query() -> None:
    def solve(count: int) -> None: ...

    with pytest.raises(SignatureError, match="`count`"):
        bound(solve, main_query="why")


def test_an_untouched_agent_keeps_its_own_model_name() -> None:
    def with_default(question: str, model: str = "gpt-4o-mini") -> None: ...
    def without(question: str, model: str) -> None: ...
    def optional(question: str, model: str | None = None) -> None: ...
    def handle(question: str, model: Any = None) -> None: ...

    assert bound(with_default, main_query="why")["model"] == "gpt-4o-mini"
    assert bound(without, main_query="why")["model"] == "policy"
    assert bound(optional, main_query="why").get("model") is None
    assert bound(handle, main_query="why")["model"] is MODEL
    assert [spec_of(f, "workflow").uses_handle for f in (with_default, without, optional, handle)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_a_task_that_is_a_string_is_its_main_query() -> None:
    def solve(task: str) -> None: ...

    assert bound(solve, main_query="why") == {"task": "why"}


def test_a_default_of_none_changes_no_annotation() -> None:
    """`get_type_hints` makes `str | None` of it on Python 3.10."""

    def solve(task: str = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    assert bound(solve, main_query="why") == {"task": "why"}


def test_judges_get_the_output_and_never_the_main_query_unasked() -> None:
    assert bound(exact, "judge", metadata={"answer": "42"}) == {"output": "given", "answer": "42"}
    with pytest.raises(
        SignatureError, match=r"judge exact: no value for parameter `answer`.*metadata keys: level"
    ):
        bound(exact, "judge", main_query="why", metadata={"level": 1})


def test_a_judge_gets_the_main_query_by_a_usual_name_of_it() -> None:
    """Generated tasks hold what is asked as `main_query` alone, also where the seeds' column was
    called `question`."""

    @ajet.judge
    def about(question: str, output: str) -> float:
        return 0.0

    assert bound(about, "judge", main_query="why") == {"question": "why", "output": "given"}
    assert (
        bound(about, "judge", main_query="why", metadata={"question": "how"})["question"] == "how"
    )


def test_what_nothing_fills_is_named_with_what_there_is() -> None:
    def solve(question: str, context: str) -> None: ...

    with pytest.raises(SignatureError) as raised:
        bound(solve, main_query="why", metadata={"level": 3})
    text = str(raised.value)
    assert (
        "`question`, `context`" in text
        and "level" in text
        and "model" in text
        and "main_query" in text
    )


def test_a_misspelt_parameter_is_told_the_column() -> None:
    def solve(question: str, solutoin: str) -> None: ...

    with pytest.raises(SignatureError, match="Did you mean `solution` by `solutoin`"):
        bound(solve, main_query="why", metadata={"solution": 3, "level": 1})


def test_a_task_without_a_main_query_fills_no_string() -> None:
    def solve(question: str) -> None: ...

    with pytest.raises(SignatureError, match="no main_query"):
        bound(solve, metadata={"prompt": "why"})


def positional(question: str, /) -> None: ...
def variadic(*args: str) -> None: ...
def keywords(question: str, **more: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (positional, "`question` is positional-only"),
        (variadic, r"`\*args` is variadic"),
        (keywords, r"`\*\*more`"),
    ],
)
@pytest.mark.parametrize("decorator", [ajet.workflow, ajet.judge, ajet.workflow(name="x")])
def test_parameters_without_a_name_fail_at_decoration(
    function: Any, words: str, decorator: Any
) -> None:
    with pytest.raises(SignatureError, match=words) as raised:
        decorator(function)
    assert "model" in str(raised.value) and "metadata" in str(raised.value)


def test_what_is_no_function_fails_at_decoration() -> None:
    class Agent: ...

    for thing, words in ((Agent, "derive from"), (3, "decorates functions")):
        with pytest.raises(SignatureError, match=words):
            ajet.workflow(thing)


def letters() -> Iterator[str]:
    yield "a"
    yield "b"


def result() -> Generator[str, None, int]:
    yield "working"
    return 42


async def numbers() -> AsyncIterator[int]:
    yield 1
    yield 2


@pytest.mark.parametrize(("stream", "output"), [(letters, "ab"), (result, 42), (numbers, [1, 2])])
def test_the_output_of_a_generator_is_what_it_returns_or_yields(
    stream: Any, output: object
) -> None:
    assert episode_of_workflow(ajet.workflow(stream)).output == output
    with pytest.raises(SignatureError, match="generator"):
        ajet.judge(stream)


def test_a_decorated_generator_goes_on_as_before() -> None:
    echo = list[object]()

    @ajet.workflow
    def talk() -> Generator[int, int, str]:
        echo.append((yield 1))
        return "end"

    talking = talk()
    assert next(talking) == 1
    with pytest.raises(StopIteration) as stopped:
        talking.send(2)
    assert (stopped.value.value, echo) == ("end", [2])


@pytest.mark.parametrize(
    "arguments", [{"trainable_targets": []}, {"trainable_targets": "wolf"}, {"timeout": 0}]
)
def test_wrong_arguments_of_the_decorator(arguments: Any) -> None:
    with pytest.raises(SignatureError):
        ajet.workflow(**arguments)


def test_a_judge_is_no_workflow() -> None:
    with pytest.raises(SignatureError, match=r"decorated with @ajet\.judge"):
        spec_of(exact, "workflow")


class Agent:
    def __init__(self, name: str) -> None:
        self.name = name

    @ajet.workflow
    async def solve(self, question: str) -> str:
        return f"{self.name}: {question}"


def test_a_bound_method_is_a_workflow() -> None:
    method = Agent("a").solve
    assert bound(method, main_query="why") == {"question": "why"}
    assert asyncio.run(method("why")) == "a: why"


def test_under_other_decorators() -> None:
    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) * 2

        return inner

    @ajet.workflow
    @twice
    def solve(question: str) -> str:
        return question

    assert solve("ab") == "abab"
    assert bound(solve, main_query="why") == {"question": "why"}
    assert bound(functools.partial(solve.__wrapped__, question="x"), main_query="why") == {}


names = st.sampled_from(
    ["question", "answer", "level", "hint", "task", "model", "env", "episode", "main_query"]
)


@given(
    parameters=st.dictionaries(names, st.booleans(), max_size=6),
    metadata=st.dictionaries(names, st.text(max_size=3), max_size=6),
    query=st.sampled_from(["", "why"]),
)
def test_every_parameter_is_filled_or_named(
    parameters: dict[str, bool], metadata: dict[str, str], query: str
) -> None:
    """Bound arguments always make a call that succeeds; else the error names each parameter that is
    left."""
    ordered = sorted(parameters.items(), key=lambda item: item[1])
    source = ", ".join(f"{name}=None" if default else name for name, default in ordered)
    space: dict[str, Any] = {}
    exec(f"def solve({source}):\n    return dict(locals())", space)
    solve = space["solve"]
    task = Task(main_query=query, metadata=metadata)
    there = {
        **({"main_query": query} if query else {}),
        **metadata,
        **dict.fromkeys(WORKFLOW_NAMES, "given"),
    }
    unfilled = [name for name, default in parameters.items() if not default and name not in there]
    try:
        seen = solve(
            **bind(spec_of(solve, "workflow"), task, dict.fromkeys(WORKFLOW_NAMES, "given"))
        )
    except SignatureError as error:
        assert unfilled and (len(unfilled) > 1 or not query)
        assert all(f"`{name}`" in str(error) for name in unfilled)
        return
    assert len(unfilled) <= bool(query)
    for name, value in seen.items():
        assert value == (query if name in unfilled else there.get(name))
