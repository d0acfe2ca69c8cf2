r"""Finds the final answer of a text: `\boxed{}`, `#### 5`, `the answer is 5`, or its last number.

All of it takes time in proportion to the text, which a policy wrote. A number is no answer if the
text denies it, gives it as one of several or as a bound, or goes on with an operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ajet_sdk.judges.number import in_ascii, number, trim

_BRACES = re.compile(
    r"(?P<box>\\f?boxed[ \t\n]*\{)|\\\\(?!f?boxed)|\\[{}]|(?P<open>\{)|(?P<close>\})"
)
_STATEMENT = re.compile(r"####|\banswers?[ \t*_]*(?:(?:is|are|was|=|:)[ \t]*)+", re.IGNORECASE)
_LONGEST_STATEMENT = 1000
"""Characters of a statement that are read."""
_MOST_STATEMENTS = 20
"""Statements that are read, from the last, if later ones give no answer."""
_SCOPE = 60
"""Characters before a number in which it may be denied."""
_PLAIN = r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_TEN = r"10\^(?:\{[-+]?\d{1,3}\}|[-+]?\d{1,3})"
_AMOUNT = re.compile(
    rf"(?<![\w.])(?<!\d,)[-+−]?(?:{_TEN}|(?:{_PLAIN})[ ]?(?:\\times|\\cdot|[×·*x])[ ]?{_TEN}|"
    rf"(?:{_PLAIN})(?:[eE][-+]?\d{{1,3}}\b)?(?:[ ]?/[ ]?\d+)?(?:[ ]?\\?%)?)"
)
_POWER_OF_UNIT = re.compile(
    r"((?<![A-Za-z])(?:[cdkm]?m|s|in|ft|yd|mi|km|inch(?:es)?|feet|yards|miles|met(?:er|re)s|"
    r"units?))\}?\^\{?[-−]?[23]\}?(?!\w)"
)

_NOT = (
    r"(?:\b(?:not|never|cannot|neither|nor|unequal|unlike|except|than|instead of|"
    r"(?:any|no)thing but|all but)|n['’]t|≠|\\neq?\b|\\not[ ]?=|!=|<>)"
)
_FILLER = (
    r"(?:be|been|is|are|equals?|to|of|it|a|an|the|just|only|simply|exactly|really|actually|"
    r"number|value|answer)"
)
_DENIED_BEFORE = re.compile(rf"{_NOT}(?:[ ]+{_FILLER})*[ $(\"'“:]*$", re.IGNORECASE)
_CLAIM_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|doubt|wrong|incorrect|false|nobody|deny|untrue)|n['’]t)"
    r"(?:[ ]+[\w'’]+){0,4}[ ]+$",
    re.IGNORECASE,
)
_CLAIM_AFFIRMED = re.compile(
    r"\b(?:no|without(?: an?y?)?|not only|not in)[ ]+doubt(?:[ ]+\w+){0,3}[ ]+$|"
    r"\bnot (?:hard|difficult) to (?:see|show|check|verify|find)["
    r" ]+$|\b(?:so|hence|thus|therefore)[ ]+$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[ $)\"'”*?]*(?:,?[ ](?:that|which|this)[ ])?"
    r"(?:is|was|are|were|would be|seems|looks|can|could|does|must)?[ ]?"
    r"(?:(?:clearly|certainly|definitely|obviously|also|just|simply|probably)[ ]+)?"
    r"(?:(?:not|n['’]t|cannot)[ ]*(?:be[ ]+|quite[ ]+)?(?:[.,;!]|$|right\b|correct\b|true\b|"
    r"possible\b|valid\b|it\b|(?:the|an|a)[ ]+(?:\w+[ ]+)?(?:answer|solution|result)\b)|"
    r"wrong\b|incorrect\b|false\b|untrue\b|impossible\b|out of the question|"
    r"an?[ ]+(?:wrong|incorrect|mistake|error)|no good|ruled out|no\b[.,;! ]*$)",
    re.IGNORECASE,
)
_BOUND_BEFORE = re.compile(
    r"(?:\bat (?:least|most)|\b(?:more|less|fewer|greater|larger|smaller|higher|lower) than"
    r"(?: or equal to)?|\bup to|\bbetween|\bfrom|\beither|\bover|\bunder|\babove|\bbelow|"
    r"(?<![<>=-])[<>≤≥]=?|\\[lg]eq?\b|\\[lg]t\b|[±]|\\pm)[ $]*$",
    re.IGNORECASE,
)
_BETWEEN = r"(?:or|and/or|to|through)|\.\.+|[–—~±]|\\pm|\\text\{[ ]?or[ ]?\}"
"""What stands between two answers, or the ends of a range."""
_GUESS = r"(?:or|else|otherwise|alternatively|possibly|maybe|perhaps|if not)"
_OTHERS_AFTER = re.compile(
    rf"(?P<unit>[ ]?[A-Za-z%°]+)?[?,;]?[ (]+{_GUESS},?[ ](?:(?:maybe|perhaps|possibly|even)[ ])?"
    rf"[-+−]?(?:{_PLAIN})\b(?(unit)(?:(?P=unit)\b|[ .,)!?]*$))"  # "3 hours or 180 minutes" is one answer
    r"(?![ ]*(?:decimal|significant|digit|place|d\.?p\b|s\.?f\b|or (?:more|less|fewer)))|"
    r"[ ]*\|[ ]?\d|:\d|"
    rf"[ $*]*(?:{_BETWEEN})[ $*]*[-+−]?(?:{_PLAIN})\b"
    r"(?![ ]*(?:decimal|significant|digit|place|d\.?p\b|s\.?f\b))|"
    r"[ ]*or (?:more|less|fewer|so|even|possibly|maybe|perhaps)\b|[ ]?-[ ]?\d",
    re.IGNORECASE,
)
_IN_OTHER_WORDS = re.compile(rf"[ ,(]+or[ ]((?:{_PLAIN})(?:/\d+|%)?)")
_OTHERS_BEFORE = re.compile(
    rf"(?:{_PLAIN})[ $*%]*,?[ ]*(?:{_BETWEEN})[ $*]*$|"
    rf"\b(?:between|from)[ ]+[-+−]?(?:{_PLAIN})[ %]*(?:and|to)[ ]*$",
    re.IGNORECASE,
)
_LIST_AFTER = re.compile(
    rf"[ $*]*(?:,|;|and|&)[ $*]*(?:and[ ]+)?[-+−]?(?:{_PLAIN})[ $*]*(?=$|[.,;!?)]|and\b|or\b)",
    re.IGNORECASE,
)
_LIST_BEFORE = re.compile(
    rf"(?:{_PLAIN})[ $*]*[,;][ $*]*(?:{_PLAIN})[ $*]*(?:,|;|,?[ ]*and)[ $*]*$", re.IGNORECASE
)
_LIST_ONLY = re.compile(r"\b(?:or|and)\b|[\s,;:.|/()\[\]{}-]")
_OPERATOR_AFTER = re.compile(
    r"[ ]?(?:[π√²³]|\\pi\b)|(?:[yznikM]\b|x\b(?![ ]+[A-Za-z]{2}))|"
    r"[ ]?(?:[+×·÷^*x]|\*\*|\\(?:times|cdot|div|pm|sqrt))[ ]?[\d({\\]|"
    r"[ ]?(?:squared|cubed|factorial)\b|"
    r"[ ]+(?:hundred|thousand|million|billion|trillion|dozen)\b|"
    r"[ ]+(?:plus|minus|times|divided by|to the power)\b",
    re.IGNORECASE,
)
_OPERATOR_BEFORE = re.compile(
    r"(?:[+×·÷^/*]|\d[ ]?-|\\(?:times|cdot|div|sqrt)|\b(?:plus|minus|times|divided by|the power(?:"
    r" of)?))"
    r"[ ]?[{(]?$",
    re.IGNORECASE,
)
_WITHIN = re.compile(
    r"(?:√|\\sqrt(?:\[\d+\])?|\\?\b(?:log|ln|sin|cos|tan|exp)\b|\b[a-z][ ]?[-+*/^])[ ]?[{(]?$|"
    r"\b(?:twice|double|triple|half(?: of)?|(?:root|square|cube) of)[ ]$",
    re.IGNORECASE,
)
"""What makes the number after it a part of a formula."""
_GROUNDS = re.compile(r"[.;!?](?:[ ]|$)|[ ,(]+(?:because|since|as)\b", re.IGNORECASE)
_EMPHASIS = re.compile(r"(?<!\w)\*\*(?!\*)|(?<=\w)\*\*(?![\w(*])|[`$]")
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,40}>")
_NEGATIVE = re.compile(r"\b(?:minus|negative)[ ]+(?=\d)", re.IGNORECASE)
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

    Empty if a number is expected and the text denies the numbers that it states, or states several.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        start, content = boxed
        return "" if _is_denied(text[max(0, start - _SCOPE) : start]) else trim(content)
    statements = list(_statements(text))
    if not numeric:
        return trim(statements[-1][1] if statements else text)
    for before, statement in reversed(statements):
        if _is_denied(before) or _claim_is_denied(before):
            continue
        answer = _stated_number(statement)
        if answer is not None:
            return answer
    if statements:
        return ""
    whole = trim(text)
    return whole if number(whole) is not None else _last_number(whole)


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
    if _DENIED_AFTER.match(rest) or _OTHER_CHOICE.search(rest):
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


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """The text before each statement of an answer, and the statement: the rest of its line, or the
    next line.
    """
    for match in list(_STATEMENT.finditer(text))[-_MOST_STATEMENTS:]:
        rest = text[match.end() : match.end() + _LONGEST_STATEMENT].lstrip(": \t\r\n")
        line = rest.partition("\n")[0]
        if line:
            clause = re.split(r"[.,;:!?\n]", text[max(0, match.start() - _SCOPE) : match.start()])[
                -1
            ]
            yield (
                re.sub(
                    r"(?:[ ]*\b(?:the|my|our|its|final|correct|right|that))*[ ]*$",
                    " ",
                    clause,
                    count=1,
                ),
                line,
            )


def _claim_is_denied(before: str) -> bool:
    return bool(_CLAIM_DENIED.search(before)) and not _CLAIM_AFFIRMED.search(before)


def _is_denied(before: str) -> bool:
    return _DENIED_BEFORE.search(before) is not None


def _clean(text: str) -> str:
    """Without tags and emphasis and with single spaces, so that patterns need not allow for
    them."""
    text = _TAG.sub(" ", text)
    text = " ".join(
        _EMPHASIS.sub("", text).replace("\\(", "").replace("\\)", "").replace("\\!", "").split()
    )
    return _POWER_OF_UNIT.sub(r"\1", _NEGATIVE.sub("-", in_ascii(text)))


def _stated_number(statement: str) -> str | None:
    """The number that a statement gives as the answer; None if it gives none or several."""
    if number(statement) is not None:
        return trim(statement)
    text = _equated(_clean(statement))
    for match in _AMOUNT.finditer(text):
        before = text[max(0, match.start() - _SCOPE) : match.start()]
        after = text[match.end() : match.end() + _SCOPE]
        if _is_denied(before) or _DENIED_AFTER.match(after):
            continue
        expression = _OPERATOR_AFTER.match(after) or _WITHIN.search(before)
        return (
            None if _is_one_of_several(match[0], before, after) or expression else match[0].strip()
        )
    return None


def _equated(text: str) -> str:
    """The side of an equation that gives its value, in what a statement says before its grounds."""
    grounds = _GROUNDS.search(text)
    # What begins with no number may lead to its answer in a later sentence.
    end = grounds.start() if grounds and _AMOUNT.match(text.lstrip("€£ ")) else len(text)
    claim, rest = text[:end], text[end:]
    first, *sides = claim.split("=")
    if not sides or not re.search(r"\d", sides[-1]) or re.search(r"!=|≠", claim):
        return text
    is_first = number(first) is not None and number(sides[-1]) is None
    return (first if is_first else sides[-1]) + rest


def _last_number(text: str) -> str:
    """The last number of a text that is not denied; empty if it is one of several."""
    text = _clean(text)
    amounts = list(_AMOUNT.finditer(text))
    if len(amounts) > 1 and not _LIST_ONLY.sub("", _AMOUNT.sub("", text)):
        return ""  # a list of guesses
    for match in reversed(amounts):
        before = text[max(0, match.start() - _SCOPE) : match.start()]
        after = text[match.end() : match.end() + _SCOPE]
        if _is_denied(before) or _DENIED_AFTER.match(after):
            continue
        expression = (
            _OPERATOR_AFTER.match(after)
            or _OPERATOR_BEFORE.search(before)
            or _WITHIN.search(before)
        )
        return "" if _is_one_of_several(match[0], before, after) or expression else match[0].strip()
    return ""


def _is_one_of_several(amount: str, before: str, after: str) -> bool:
    """Whether a number is one of several answers, an end of a range, or a bound."""
    same = _IN_OTHER_WORDS.match(after)
    if same and number(same[1]) is not None and number(same[1]) == number(amount):
        after = after[same.end() :]
    if _BOUND_BEFORE.search(before) or _OTHERS_AFTER.match(after) or _LIST_AFTER.match(after):
        return True
    return bool(_OTHERS_BEFORE.search(before) or _LIST_BEFORE.search(before))
