r"""Finds the final answer of a text: `\boxed{}`, `<answer>`, `#### 5`, `the answer is 5`, or a last
sentence that states one number.

A sentence is read if it states one number and no word in it denies, bounds, or offers another: of
every other sentence a list of words would have to tell which number is meant, and a policy finds
what such a list lacks. All of it takes time in proportion to the text, which a policy wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ajet_sdk.judges.number import in_ascii, number, trim

_BRACES = re.compile(
    r"(?P<box>\\f?boxed[ \t\n]*\{)|\\\\(?!f?boxed)|\\[{}]|(?P<open>\{)|(?P<close>\})"
)
_MARK = re.compile(r"####|\banswers?[ \t*_]*(?:(?:is|are|was|=|:)[ \t]*)+", re.IGNORECASE)
_LONGEST = 1000
"""Characters of a statement, and at the end of a text without one, that are read."""
_MOST_STATEMENTS = 20
"""Statements that are read, from the last, if later ones give no number."""
_SCOPE = 60
"""Characters before a number or a statement in which it may be denied."""
_PLAIN = r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_TEN = r"10\^(?:\{[-+]?\d{1,3}\}|[-+]?\d{1,3})"
_AMOUNT = re.compile(
    rf"(?<![\w.])(?<!\d,)[-+]?(?:{_TEN}|(?:{_PLAIN})[ ]?(?:\\times|\\cdot|[×·*x])[ ]?{_TEN}|"
    rf"(?:{_PLAIN})(?:[eE][-+]?\d{{1,3}}\b)?(?:[ ]?/[ ]?\d+)?(?:[ ]?\\?%)?)"
)
_POWER_OF_UNIT = re.compile(r"([A-Za-z])\}?\^\{?-?[23]\}?(?!\w)")
_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_EMPHASIS = re.compile(r"\*([^*\s][^*\n]{0,40})\*(?!\w)")
_MARKUP = re.compile(r"</?[A-Za-z][^<>]{0,40}>|<<[^<>]{0,80}>>|[`$*]{2,}|[`$]|\\[()!]")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")
_NEGATIVE = re.compile(r"\b(?:minus|negative)[ ]+(?=\d)", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?])[ ]+|\n")
"""Between two sentences."""
_LEAD = r"\b(?:so|thus|hence|therefore)\b|=>|->|→|⇒|\\Rightarrow\b"
_CLAIM = re.compile(_LEAD, re.IGNORECASE)
"""Before what follows from the rest of a sentence."""
_CLAUSE = re.compile(rf"[.,;:!?\n]|{_LEAD}", re.IGNORECASE)
"""Before a clause."""
_GROUNDS = re.compile(r"[ ,(]+(?:because|since|as)\b", re.IGNORECASE)
_UNCLEAR = re.compile(
    r"\?|\b(?:not|never|cannot|neither|nor|no|nobody|none|except|unlike|unequal|instead|rather|"
    r"wrong|incorrect|false|untrue|impossible|mistake|error|doubt|deny|"
    r"or|else|either|otherwise|alternatively|maybe|perhaps|possibly|unlikely|hardly)\b|"
    r"n['’]t\b|≠|\\neq?(?![A-Za-z])|\\not(?![A-Za-z])|!=|<>|∞|\\infty",
    re.IGNORECASE,
)
"""What denies an answer, leaves it open, or offers another."""
_BEFORE = re.compile(
    r"(?:\b(?:at (?:least|most)|than(?: or equal to)?|up to|between|from|over|under|above|below|"
    r"but|twice|double|triple|half(?: of)?|(?:root|square|cube|power)(?: of)?|"
    r"log|ln|sin|cos|tan|exp)|"
    r"[<>≤≥±√×·÷^/*+]=?|[\w)][ ]?-|\\[A-Za-z]+(?:\[\d+\])?|\(-?)[ ]?[{(]?[ ]*$",
    re.IGNORECASE,
)
"""What makes the number after it a bound, or a part of a formula."""
_AFTER = re.compile(
    r"[ ]?[\\π√²³^+×·÷*/:–~±_<>≤≥]|[,.]\d|[ ](?-i:[xyzni])\b|(?-i:(?![msghL]\b)[A-Za-z]\b)|"
    r"[ ]+(?:squared|cubed|factorial|hundred|thousand|million|billion|trillion|dozen|"
    r"plus|minus|times|divided|to the power|and (?:up|above|over|more|below|under|less))\b",
    re.IGNORECASE,
)
"""What makes the number before it a part of a formula, or of a larger number."""
_DENIED_FORMULA = re.compile(
    r"≠|\\neq?(?![A-Za-z])|\\not(?![A-Za-z])|!=|"
    r"\\(?:text|mathrm)\{[^{}]*(?:\b(?:not|wrong|incorrect|false|hundred|thousand|million|billion|dozen)\b|n't)"
)
_CHOICE = re.compile(
    r"(?:(?i:option|choice|letter|answer) )?(?P<letter>[B-HJ]|[AI](?!['’]|"
    r" (?!because\b|since\b|as\b)[a-z]))"
    r"(?=$|[.,;:]| (?![=+*/^<>-]))"
)
"""An article or a pronoun before a word is no choice."""
_OTHER_CHOICE = re.compile(r"(?<![\w'])(?:[B-HJ]|[AI](?![ '][a-z]))(?![\w'])")
"""A letter of another option; an article or a pronoun is none."""


def final_answer(text: str, *, numeric: bool = False) -> str:
    """Extracts the final answer of a text. `numeric`: it must be a number.

    Empty if a number is expected and the sentence that should state it states none or several,
    denies it, or bounds it.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        start, content = boxed
        if _is_denied(text[max(0, start - _SCOPE) : start]):
            return ""
        return trim(content)
    text = _tagged(text)
    statements = list(_statements(text))
    if not numeric:
        return trim(statements[-1][1] if statements else text)
    if not statements:
        whole = trim(text)
        return whole if number(whole) is not None else _last_number(whole)
    for before, statement in reversed(statements):
        if number(statement) is None and not _AMOUNT.search(statement):
            continue
        return "" if _is_denied(before) else _stated_number(statement)
    return ""


def stated_choice(answer: str) -> str:
    r"""The letter that a final answer chooses: `B`, `(B) Paris`, `\textbf{(B)}\ 12`,
    `option B because ...`.

    Empty if it chooses none, denies its choice, or names another option, too.
    """
    plain = " ".join(
        re.sub(r"\\(?:text|mathrm|textbf|mathbf)\b|\\[ ,;!]|[{}$*()\[\]]", " ", answer).split()
    )
    match = _CHOICE.match(plain)
    if match is None:
        return ""
    rest = plain[match.end() :]
    claim = _GROUNDS.split(_END.split(rest)[0])[0]
    if _UNCLEAR.search(claim) or _OTHER_CHOICE.search(rest):
        return ""
    return match["letter"]


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Position and content of the last complete `\boxed{}`, with nested braces; escaped braces are
    content.
    """
    opened: list[tuple[int, int] | None] = []
    last: tuple[int, int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened.append((match.start(), match.end()))
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened:
            box = opened.pop()
            if box is not None and (last is None or box[0] > last[0]):
                last = (*box, match.start())
    for box in opened:
        if box is not None and (last is None or box[0] > last[0]):
            return box[0], ""
    return None if last is None else (last[0], text[last[1] : last[2]])


def is_denial(answer: str, right: str) -> bool:
    """Whether an answer denies a value or a formula: `x \\neq 5`, where the reference does not."""
    return _DENIED_FORMULA.search(answer) is not None and _DENIED_FORMULA.search(right) is None


def _tagged(text: str) -> str:
    """The content of the last `<answer>` tag, or the text; an unclosed tag has the rest."""
    parts = _TAG.split(text)
    tags = _TAG.findall(text)
    opened = [place for place, tag in enumerate(tags) if not tag.startswith("</")]
    return parts[opened[-1] + 1] if opened else text


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """The clause before each statement of an answer, and the statement: the rest of its line, or
    the next line.
    """
    for match in list(_MARK.finditer(text))[-_MOST_STATEMENTS:]:
        rest = text[match.end() : match.end() + _LONGEST].lstrip(": \t\r\n")
        line = rest.partition("\n")[0]
        if line:
            yield text[max(0, match.start() - _SCOPE) : match.start()], line


def _is_denied(before: str) -> bool:
    """Whether the clause that leads to an answer denies it."""
    return _UNCLEAR.search(_CLAUSE.split(before)[-1]) is not None


def _clean(text: str) -> str:
    """Without markup and with single spaces, so that patterns need not allow for them."""
    text = _EMPHASIS.sub(r"\1", _TEXT.sub(r" \1", _MARKUP.sub(" ", text)))
    text = in_ascii(" ".join(text.split()))
    return _POWER_OF_UNIT.sub(r"\1", _NEGATIVE.sub("-", text))


def _stated_number(statement: str) -> str:
    """The number that the first sentence of a statement gives; empty if none or several."""
    if number(statement) is not None:
        return trim(statement)
    return _only_number(_END.split(_clean(statement))[0])


def _last_number(text: str) -> str:
    """The number that the last sentence with one gives; empty if none or several."""
    lines = text[-_LONGEST:].splitlines()
    sentences = [sentence for line in lines for sentence in _END.split(_clean(line))]
    for sentence in reversed(sentences):
        if _AMOUNT.search(sentence):
            return _only_number(sentence)
    return ""


def _only_number(sentence: str) -> str:
    """The only number of a sentence, or of a side of the equation in it; empty if it is denied,
    bounded, or a part of a formula."""
    claim = _GROUNDS.split(sentence)[0]
    if _UNCLEAR.search(claim):
        return ""
    for side in _sides(claim):
        amounts = list(_AMOUNT.finditer(side))
        if len(amounts) == 1:
            [amount] = amounts
            before = side[: amount.start()]
            after = side[amount.end() :]
            is_part = _BEFORE.search(before[-_SCOPE:]) or _AFTER.match(after)
            return "" if is_part else amount[0].strip()
    return ""


def _sides(claim: str) -> list[str]:
    """What may state the value: the last side of an equation, else the first."""
    first, *others = re.split(r"(?<![<>])=", _CLAIM.split(claim)[-1])
    return [others[-1], first] if others else [first]
