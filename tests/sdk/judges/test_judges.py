"""The built-in judges, and how a config names one."""

from __future__ import annotations

import threading
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, MissingExtra, NoReward
from ajet_sdk.judges.load import load_judge
from ajet_sdk.judges.math import final_answer, math, number
from ajet_sdk.judges.text import exact
from ajet_sdk.types import Task


def judge(**task_judge: Any) -> Any:
    return load_judge(load_config(values={"task_judge": task_judge}))


def test_exact_compares_text() -> None:
    assert exact(" 42\n", 42)
    assert exact("yes", "yes")
    assert not exact("42.0", "42")
    assert exact(SimpleNamespace(metadata={"output": "42"}), "42")
    assert exact(SimpleNamespace(metadata={"final_answer": "42", "output": "a whole essay"}), "42")


@pytest.mark.parametrize("compare", [exact, math])
@pytest.mark.parametrize("output", [None, {}, [], SimpleNamespace(metadata={})])
def test_nothing_to_judge_is_no_reward_and_not_zero(compare: Any, output: Any) -> None:
    with pytest.raises(NoReward, match="return a string"):
        compare(output, "5")


RIGHT = [
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{1} no, \boxed{2}", "2"),
    ("The answer is 1,234.", "1234"),
    ("The final answer is: **42**.", "42"),
    ("It is 7.\n#### 42", "3 * 14 = 42\n#### 42"),
    ("I get 12", "12"),
    ("the answer is 5 because 2+3=5", "5"),
    (r"\boxed{50\%}", "50"),
    ("50%", "0.5"),
    ("$3/4$", r"\frac{3}{4}"),
    ("-0.5", r"-\frac12"),
    ("0.333333", "1/3"),
    ("2.50 dollars", "2.5"),
    ("1e3", "1000"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{\text{Paris}}", "Paris"),
]
WRONG = [
    ("43", "42"),
    ("", "42"),
    ("no idea", "42"),
    ("-42", "42"),
    ("0.33", "1/3"),
    ("0.3333", "1/3"),
    (r"\boxed{41} although 42", "42"),
    (r"\boxed{41", "42"),
    ("1/0", "0"),
    ("1e400", "5"),
    (r"\boxed{\sqrt{7}}", r"2\sqrt{2}"),
]


@pytest.mark.parametrize(("output", "answer"), RIGHT)
def test_the_same_value_is_right(output: str, answer: str) -> None:
    assert math(output, answer) is True


@pytest.mark.parametrize(("output", "answer"), WRONG)
def test_another_value_is_wrong(output: str, answer: str) -> None:
    assert math(output, answer) is False


@given(st.fractions(), st.fractions())
def test_fractions_are_compared_by_value(a: Fraction, b: Fraction) -> None:
    written = (
        rf"hence \boxed{{{'-' if a < 0 else ''}\frac{{{abs(a.numerator)}}}{{{a.denominator}}}}}"
    )
    assert math(written, f"{b.numerator * 3}/{b.denominator * 3}") == (a == b)
    assert math(written, str(a)) is True


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9
    )
)
def test_a_decimal_has_the_value_it_shows(value: Any) -> None:
    assert number(f"{value:,f}") == Fraction(value)
    assert math(f"The answer is {value:f}", f"{value:f}00") is True


@given(st.text(max_size=60), st.integers(-(10**6), 10**6))
def test_any_output_is_judged(output: str, answer: int) -> None:
    assert math(output, answer) in (True, False)
    assert math(f"{output}\nThe answer is {answer}", answer) is True
    assert math(rf"{output} \boxed{{{answer}}}", str(answer)) is True


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        *(
            "9^{9^{9^9}}",
            "9**9**9**9",
            "(10!)!",
            "2^{99999999}",
            "x^" * 100,
            r"\frac{" * 200,
            "7" * 400,
        ),
        "(1+x)^{999}(1+y)^{999}",
    ],
)
def test_an_output_cannot_hold_the_judge_for_ever(bomb: str) -> None:
    assert math(rf"\boxed{{{bomb}}}", r"\sqrt{2}") is False


def test_the_judge_works_in_a_thread() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(math(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")))
    thread.start()
    thread.join()
    assert found == [True]


def test_an_answer_that_cannot_be_read_is_the_data_s_fault() -> None:
    for answer in ("", "9^{9^{9^9}}", "x" * 400):
        with pytest.raises(NoReward, match="the reference answer"):
            math("5", answer)


def test_math_without_its_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'pip install "ajet\[math\]"'):
        judge(judge_type="math")


def test_final_answers() -> None:
    assert final_answer(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert final_answer("so it is 5 or 6", numeric=True) == ""
    assert final_answer("so it is 5, no, 6", numeric=True) == ""
    assert final_answer("so it is 5 or 6") == "so it is 5 or 6"


TASK = Task(main_query="q", metadata={"answer": "42", "target": "7"})


def test_a_config_names_a_judge() -> None:
    assert judge() is None
    assert judge(judge_type="exact") is exact
    assert judge(judge_type="math") is math


def test_a_pattern_finds_the_answer() -> None:
    grouped = judge(judge_type="regex", pattern=r"^Answer: (.*)$")
    assert grouped("Answer: 41\nAnswer: 42 ", TASK) is True
    assert grouped("Answer: 42\nAnswer: 41", TASK) is False
    assert grouped("42", TASK) is False
    plain = judge(judge_type="regex", pattern="goal reached")
    assert plain("the goal reached at last", Task(main_query="q")) is True
    assert plain("no", Task(main_query="q")) is False
    with pytest.raises(ConfigError, match="is not a valid regular expression: missing"):
        judge(judge_type="regex", pattern="(")


def test_a_class_path_names_a_function_or_a_class(tmp_path: Path) -> None:
    path = tmp_path / "my_judges_a.py"
    path.write_text(
        "def score(output): return 1.0\n"
        "class Good:\n"
        "    def __init__(self, config): self.config = config\n"
        "    def compute_reward(self, workflow_task, workflow_output): return 1.0, True\n"
        "class Bad: ...\n"
        "class Broken(Good):\n"
        "    def __init__(self, config): raise KeyError('url')\n"
        "value = 3\n"
    )
    assert judge(judge_protocol=f"{path}->score")("x") == 1.0
    made = judge(judge_protocol=f"{path}->Good")
    assert made.compute_reward(None, None) == (1.0, True)
    assert made.config.task_judge.judge_protocol.endswith("Good")
    for name, expected in (
        ("Bad", "has no compute_reward"),
        ("Broken", "failed: KeyError"),
        ("value", "is a int"),
    ):
        with pytest.raises(ConfigError, match=expected):
            judge(judge_protocol=f"{path}->{name}")


def test_the_rubric_grader_needs_scored_examples() -> None:
    with pytest.raises(ConfigError, match="JSON lines with a question"):
        judge(judge_type="rubrics_auto_grader")
