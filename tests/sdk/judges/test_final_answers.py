"""Which number of a text is its final answer, and when two numbers are equal."""

from __future__ import annotations

import time

import pytest

from ajet_sdk.judges.final_answer import final_answer
from ajet_sdk.judges.math import math

DENIED = [
    "The answer is not 5", "isn't 5, it is 7", "The answer isn't 5, it is 7", "5 is wrong", "It is not equal to 5",
    "The answer is not equal to 5", "The answer ≠ 5", "x ≠ 5", r"x \neq 5", r"\boxed{\neq 5}", r"\boxed{x \ne 5}",
    r"\boxed{\text{not }5}", "neither 5 nor 6", "The answer is neither 4 nor 5", "anything but 5", "It can't be 5",
    "The answer can't be 5", "The answer cannot be 5.", "I don't think the answer is 5", "I doubt that the answer is 5",
    "It's not true that the answer is 5", "The wrong answer is 5", r"not \boxed{5}", r"The answer is not $\boxed{5}$",
    "it is 7, not 5", "the answer is not 5 but 7", "5? No.", "The answer is 5 which is wrong", "5 is not the answer",
    "5 isn't correct", "The answer is 5, which is not right", "it was never 5", "The answer is 7 rather than 5",
]  # fmt: skip
SEVERAL = [
    "The answer is 5 or 6", "5 or 6", "4 or 5", "The answer is either 5 or 6", "The answer is 5, 6",
    "The answer is 5 and 6", "answers: 5, 6, 7", "1, 2, 3, 4, 5", r"\boxed{5 \text{ or } 6}", "between 4 and 5",
    "The answer is between 4 and 5",
    "The answer is between 5 and 6", "The answer is 5-6", "The answer is 5–6", "The answer is from 5 to 6", "5 to 6",
    "The answer is at least 5", "The answer is less than 5", "The answer is > 5", "5 or more", "The answer is 5 ± 1",
    "The answer is 5, or 6", "The answer is 5 (or 6)", "The answer is 5, or maybe 6", "The answer is 5 cm or 6 cm",
    "The answer is 5 apples or 6 apples", "The answer is 5; if not, 6", "The answer is 5 | 6 | 7",
    "The answer is 5 else 6", "The answer is 5? or 6?", "The answer is 5, alternatively 6",
    "The answer is 5 possibly 6",
]  # fmt: skip
OTHERS = [
    "The answer is minus 5", "The answer is negative 5", "The answer is 5^2", "The answer is 5 million",
    "The answer is 5 + 3", "The answer is 5 times 2", "The answer is 5 squared", "The answer is 5e3", "2^5",
    "The answer is 5x", "The answer is 5 x 10", "The answer is 5x + 3", "The answer is 5i", "The answer is 5π",
    r"The answer is 5\pi",
    "The answer is 5√2", "The answer is √5", r"The answer is $\sqrt{5}$", r"The answer is \log 5", "The answer is 5²",
    "The answer is x - 5", "The answer is twice 5", "The answer is half of 5", "The answer is 5:3", "The answer is 5M",
    "The answer is –5", r"\boxed{5 \text{ million}}", r"\boxed{5 \text{ is wrong}}",
]  # fmt: skip
GIVEN = [
    (r"It isn't \boxed{5}, it is \boxed{7}", "7"), ("The answer is minus 5", "-5"), ("The answer is −5", "-5"),
    ("The answer is 5. It is not hard to see", "5"), ("The answer is 2 + 3 = 5", "5"), ("**Answer:** 42", "42"),
    ("Answer: $42$", "42"), ("The answer is:\n\n42", "42"), ("####\n42", "42"), ("The answer is **5** apples.", "5"),
    ("The answer is $5.", "5"), ("The answer is 5!", "5"), ("The answer is 1,234,567.", "1234567"),
    ("The answer is 3/4 of it", "0.75"), ("She has 3 boxes with 4 each, so 3*4=12", "12"),
    ("The answer is x = 12", "12"), ("The answer is about 12", "12"), ("3*4=<<3*4=12>>12", "12"),
    ("<answer>12</answer>", "12"), ("<b>12</b> apples", "12"), ("so => 12", "12"), ("The answer is <b>12</b>.", "12"),
    ("x -> 12", "12"), ("The answer is 12 (twelve).", "12"), (r"\(12\)", "12"), ("The answer is 10/2", "5"),
    ("The answer is 1.5 × 10^3", "1500"), ("There are 12 - 5 = 7 left", "7"),
    ("Final answer: 12 apples and a pear", "12"), (r"\[ x = 12 \]", "12"), ("- 3 boxes\n- 12 in all", "12"),
    ("The answer is 15. Check: 15*2 = 30.", "15"), ("The answer is 7 because half of 10 = 5, and 5 + 2 = 7", "7"),
    ("The answer is 20 because 10 + 10 = 20, and 20 + 20 = 40", "20"), ("The answer is 12 = 5 + 7.", "12"),
    ("The answer is 5, since 10/2 = 5 and 5 + 5 = 10", "5"), ("The answer is 48 + 24 = 72 clips.", "72"),
    ("The area is 12 m^2.", "12"), ("The area is $12$ $m^2$.", "12"), ("The volume is 12 cm^{3}.", "12"),
    (r"The area is $12\text{ cm}^2$.", "12"), ("The acceleration is 9.8 m/s^2.", "9.8"), ("The answer is –5.", "-5"),
    (r"The answer is $1.2 \times 10^{3}$ m", "1200"), ("It is 1.2 × 10^3 m", "1200"), ("It is 1.2 × 10³ m", "1200"),
    ("The answer is 1.2 x 10^-3", "0.0012"), ("The answer is 10^6 m", "1000000"), (r"\boxed{\approx 3.14}", "3.14"),
    ("As x cannot be negative, the answer is 7", "7"), ("We cannot divide so the answer is 7", "7"),
    ("The answer is 5 m", "5"), (r"x cannot be negative so \boxed{5}", "5"),
    (r"\boxed{\left\{5\right.} so \boxed{5}", "5"),
]  # fmt: skip
MORE_GIVEN = [
    "So, Natalia sold 5 clips altogether in April and May.",
    "Therefore, Janet makes $5 every day at the farmers' market.", "The answer is *5*.", "<ANSWER> 5 </ANSWER>",
    "<answer>5 apples</answer>", r"<answer>\boxed{5}</answer>", "### Final Answer\n5", "**Final Answer:** $5$",
    "**Answer: 5**", "Answer = 5", r"The final answer is \(5\).", "Thus x=5.", "so the total is $2+3=5$ dollars.",
    "She has 5 more apples than Tom.", "Total: 5", "#### $5", "#### 5 dollars.", "The answers are: 5",
    "The answer is 5.00", "1. Add them.\n2. We get 5.", "The correct answer is: 5", r"\[2 + 3 = 5\]",
    "The answer is 5 km/h.", "the answer is 5 cm^2", "It costs 5 dollars, which is the total.", "We find x ≈ 5",
    "Answer: 5.0 kg (five kilograms)", "No. The answer is 5.", "Not 4. The answer is 5.",
    "It is not 4, so the answer is 5.",
]  # fmt: skip
MORE_UNCLEAR = [
    "The answer is 5,6", "5,5", "The answer is 5.6.7", "The answer is 5_2", "The answer is [5, ∞)",
    "The answer is unlikely 5", "The answer is 5 and up", "The answer is x *5", "5/6/7", "The answer is far from 5",
    "The answer is 5 | 6", "It's not true, the answer is 5 or 7", "Option 5? Not sure.", "<answer>5 or 6</answer>",
    "<answer>not 5</answer>", "<answer>5</answer><answer>6</answer>", "#### not 5", "#### 5 or 6", "#### 5\n#### 6",
    "Answer: 5 x", "The answer is 5 thousand", "The answer is 05:30", "The answer is 5 (wrong)",
    "The answer is 5. No wait, the answer is 6.", "The answer cannot possibly be 5.", "Nobody would say 5.",
    "The answer is less than or equal to 5", "5 < x", "x < 5", "x>5", "log_5", "5^{2}", r"\frac{5}{2} is the answer",
    r"The answer is \frac{5}{2}", "The answer is (5, 6)", "The answer is -(5)", "The answer is 5 %% 3", "5 and 5.5",
    "The answer is 5'4\"",
]  # fmt: skip
UNREAD = [
    "isn't 5, it is 7", "the answer is not 5 but 7", "it is 7, not 5", "There is no doubt that the answer is 7",
    "The answer is 7, which is not prime", "The answer is 7. The answer is not 5.", "I first thought 12, but no: 7",
    "The answer is 7 and the remainder is 2", "It is not hard to see that the answer is 7.",
    "The answer is 7.0 or 14/2", "The answer is 7 hours or 420 minutes.",
    "The answer is 7: 5 from her and 2 from him", "In total, 3 boxes cost $7.", "May 5, 2007",
]  # fmt: skip
"""Right answers in sentences that state several numbers or deny something: they are not read."""
EQUAL = [
    ("0.333333", "1/3"), ("1/3", "0.333333"), ("0.666667", "2/3"), ("3.14159", "3.14159265"), ("3.14159265", "3.14159"),
    ("0.30000000000000004", "0.3"), (r"6.626 \times 10^{-34}", "6.626e-34"), ("6.6260001e-34", "6.626e-34"),
    ("3.0", "3"), ("50%", "0.5"), ("50%", "50"),
]  # fmt: skip
DIFFERENT = [
    ("0", "6.626e-34"), ("5e-7", "1.6e-19"), ("3", "3.0000004"), ("3.0000004", "3"), ("1234568", "1234567.9999"),
    ("0", r"6.626 \times 10^{-34}"), ("0.33333", "1/3"), ("50.00001%", "50"), ("1e-300", "0"), ("1000000.5", "1000000"),
]  # fmt: skip
FORMULAS = [
    (r"\boxed{1.414214}", r"\sqrt2", True), (r"\boxed{1.4142}", r"\sqrt2", False), (r"\boxed{5!}", "120", True),
    (r"\boxed{2\cdot 10^{-20}}", r"\sqrt{9}\cdot 10^{-20}", False), (r"\boxed{3.0000001}", r"\sqrt{9}", False),
    (r"\boxed{0.0}", r"\frac{\sqrt2}{10^{12}}", False), (r"\boxed{(1.0000001, 2)}", "(1,2)", False),
    (r"\boxed{1 + \frac{1}{\mathrm{e}^2}}", r"1 - \frac{1}{e^2}", False), (r"\boxed{4\sqrt(2)}", "4", False),
    (r"\boxed{1:4:9:\ldots}", r"1:2:3", False), (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", False),
    (r"\boxed{D = (0, 1.5)}", "D = (0, 1)", False), (r"\boxed{\pm 2021}", "2021", False),
    (r"\boxed{\text{13}}", "13", True),
    (r"\boxed{\binom{5}{2}}", "10", True), ("10", r"\binom{5}{2}", True), (r"\boxed{\{1, 2\}}", r"\{2,1\}", True),
]  # fmt: skip


@pytest.mark.parametrize("output", [*DENIED, *SEVERAL, *OTHERS, *MORE_UNCLEAR])
def test_a_number_that_the_text_does_not_give_as_its_answer_is_wrong(output: str) -> None:
    assert math(output, "5") is False


@pytest.mark.parametrize(("output", "answer"), GIVEN)
def test_the_number_that_the_text_gives_is_right(output: str, answer: str) -> None:
    assert math(output, answer) is True


@pytest.mark.parametrize("output", MORE_GIVEN)
def test_a_sentence_of_one_number_gives_it(output: str) -> None:
    assert math(output, "5") is True


@pytest.mark.parametrize("output", UNREAD)
def test_a_sentence_that_has_to_be_understood_is_not_read(output: str) -> None:
    """Neither number earns; a box, a tag, `####` or a line of its own states the answer."""
    assert math(output, "7") is False
    assert math(output, "5") is False
    assert math(rf"{output} So \boxed{{7}}", "7") is True
    assert math(f"{output}\n#### 7", "7") is True
    assert math(f"{output} <answer>7</answer>", "7") is True


@pytest.mark.parametrize(("output", "answer"), EQUAL)
def test_equal_numbers(output: str, answer: str) -> None:
    assert math(output, answer) is True


@pytest.mark.parametrize(("output", "answer"), DIFFERENT)
def test_different_numbers(output: str, answer: str) -> None:
    assert math(output, answer) is False


@pytest.mark.parametrize(("output", "answer", "right"), FORMULAS)
def test_formulas_are_as_near_as_numbers(output: str, answer: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    assert math(output, answer) is right


LONG = {
    "boxes": r"\boxed{" * 80_000, "nested boxes": r"\boxed{" * 40_000 + "}" * 40_000, "marks": "####" + "\n" * 300_000,
    "many marks": "####\n" * 60_000, "statements": "answer is " * 60_000, "blanks": "answer" + " " * 300_000,
    "dollars": "$" * 300_000, "stars": "*." * 150_000, "digits": "1" * 300_000, "thousands": "1,111" + ",111" * 80_000,
    "gaps": ("5" + " " * 1000) * 300, "denials": "not " * 80_000 + "5", "alternatives": "5 or " * 60_000 + "5",
    "signs": "minus " * 60_000, "slashes": "1/" * 150_000, "percent": "5" + "%" * 300_000, "lines": "x\n" * 150_000,
    "denied": "answer is not 5\n" * 20_000,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_the_answer_of_a_long_text_is_found_in_time_in_proportion_to_it(name: str) -> None:
    began = time.process_time()
    for numeric in (True, False):
        final_answer(LONG[name], numeric=numeric)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "output",
    [
        "B",
        "(B)",
        r"\boxed{B}",
        r"\boxed{\textbf{(B)}\ 12}",
        r"\boxed{B. 12}",
        "The answer is B because x is even.",
        "Answer: B) Paris",
        "#### (B), since it is even",
        "The answer is option B.",
        "The answer is B. A dog barks.",
    ],
)
def test_an_options_letter_may_have_its_text_and_grounds(output: str) -> None:
    assert math(output, "B")


@pytest.mark.parametrize(
    "output",
    [
        "C",
        "The answer is B or C.",
        "The answer is (A), (B)",
        r"\boxed{A, B}",
        "The answer is B is wrong",
        "B, C, D",
        "The answer is not B.",
        "The answer is Bob",
        r"\boxed{B = 3}",
        "The answer is C because B is odd.",
        "",
    ],
)
def test_another_option_denials_and_hedges_are_no_choice(output: str) -> None:
    assert not math(output, "B")


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("A triangle has three sides.", "A"),
        ("I don't know.", "I"),
        ("I think so", "I"),
        ("The answer is a dog", "A"),
    ],
)
def test_an_article_and_a_pronoun_are_no_choice(output: str, letter: str) -> None:
    assert not math(output, letter)


@pytest.mark.parametrize(
    "output", ["A", "(A) Paris", "The answer is A because it is even.", "A. It is even."]
)
def test_the_letter_of_the_article_is_a_choice_where_it_stands_alone(output: str) -> None:
    assert math(output, "A")
