"""The math judge: compares values rather than notation.

Numbers, fractions and percentages are compared exactly here; roots, intervals and symbols by
math-verify, in a process that is killed after two seconds of processor time: an output that takes
longer is a wrong answer.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import MissingExtra, NoReward
from ajet_sdk.judges.final_answer import final_answer as final_answer
from ajet_sdk.judges.final_answer import is_denial, stated_choice
from ajet_sdk.judges.number import LONGEST, same_number, without_spacing
from ajet_sdk.judges.number import number as number
from ajet_sdk.judges.text import text_of
from ajet_sdk.sandbox.limited import TooExpensive, call

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

_COMPARE = "ajet_sdk.judges.formulas:compare"


def require_math() -> None:
    """Raise MissingExtra if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtra("math-verify", "math")


def math(output: object, answer: object) -> bool:
    r"""Whether the final answer in the output equals `answer` in value.

    The final answer is the last `\boxed{}`, else the text after the last `####` or `answer is`,
    else (if a number is expected) the last number, else the whole output. A number that the output
    denies, or gives as one of several, is no answer. If `answer` is the letter of an option (A to
    J), it may be followed by the option's text or by grounds. `answer` may itself be a worked
    solution that ends this way. Raises NoReward if `answer` cannot be parsed: an error of the
    dataset, not of the agent.
    """
    right = final_answer(text_of(answer))
    if not right:
        raise NoReward("the reference answer is empty")
    is_numeric = number(right) is not None
    answer_text = final_answer(text_of(output), numeric=is_numeric)
    if without_spacing(answer_text) == without_spacing(right):
        return True
    if not answer_text or is_denial(answer_text, right):
        return False
    if stated_choice(right) == right and stated_choice(answer_text) == right:
        return True
    if is_numeric and number(answer_text) is not None:
        return same_number(answer_text, right)
    return _verify(answer_text, right)


def _verify(answer_text: str, right: str) -> bool:
    """Compares by math-verify. An unreadable output is wrong; an unreadable reference answer is an
    error.
    """
    require_math()
    if len(right) > LONGEST:
        raise NoReward(f"the reference answer {right[:80]!r} is too long to evaluate")
    if len(answer_text) > LONGEST:
        return False
    try:
        verdict = call(_COMPARE, (answer_text, right))
    except (TooExpensive, ValueError):
        fault = _fault_of_reference(right)
        if fault:
            raise NoReward(
                f"the reference answer {right[:80]!r} cannot be evaluated: {fault}"
            ) from None
        return False
    if verdict == "no reference":
        raise NoReward(
            f"the reference answer {right[:80]!r} is not a mathematical expression; use judge exact"
            " or regex"
        )
    return bool(verdict == "equal")


@functools.lru_cache(maxsize=1024)  # for many replies to one task that take long
def _fault_of_reference(right: str) -> str:
    """Why the reference answer cannot be compared even with itself; empty if it can."""
    try:
        call(_COMPARE, (right, right))
    except (TooExpensive, ValueError) as error:
        return str(error)
    return ""


def open_math(config: Config) -> Any:
    """Opens the judge `math`. Raises MissingExtra without math-verify."""
    require_math()
    return math
