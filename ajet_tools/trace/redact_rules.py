"""The patterns of secrets and personal data, and the checks that confirm them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

from ajet_sdk.addresses import entropy, looks_random

_Check = Callable[[re.Match[str]], bool]


@dataclass(frozen=True)
class Rule:
    """One pattern. The group `value`, or the whole match where there is none, is what is replaced."""

    kind: str
    pattern: re.Pattern[str]
    check: _Check | None = None
    hints: tuple[str, ...] = ()
    """The text, in lower case, must hold one of these before the pattern is tried."""
    digits: bool = False
    """The text must hold seven digits or so in a row."""

    def may_fit(self, lower: str, digits: bool) -> bool:
        if self.digits and not digits:
            return False
        for hint in self.hints:
            if hint in lower:
                return True
        return not self.hints


DIGITS = re.compile(r"\d[\d ().-]{5,}\d")
"""Seven digits or so in a row."""


def _digits(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


def _has_digit(match: re.Match[str]) -> bool:
    return any(c.isdigit() for c in match[0])


def _password(match: re.Match[str]) -> bool:
    value = match["value"]
    return any(c.isalpha() for c in value) and any(not c.isalpha() for c in value)


_OPERATORS = "+*/=^×÷<>%"


def _in_sum(match: re.Match[str]) -> bool:
    """Whether the digits are part of a calculation: an operator stands beside them."""
    text, start, end = match.string, match.start(), match.end()
    before = text[max(0, start - 3) : start].rstrip()
    after = text[end : end + 3].lstrip()
    return (before[-1:] in _OPERATORS and before != "") or (after[:1] in _OPERATORS and after != "")


_ARITHMETIC = re.compile(
    r"(comput|calculat|evaluat|what\s+(is|are)|what's|solve|subtract|minus|plus|times|sum|result|equal|expression|calc)"
    r"\W*(\w+\W+){0,3}$",
    re.I,
)


def _north_american(match: re.Match[str]) -> bool:
    """555-123-4567 is a phone number unless something says that it is a subtraction."""
    text, start, end = match.string, match.start(), match.end()
    around = text[max(0, start - 2) : start] + text[end : end + 2]
    return not (
        _in_sum(match) or re.search(r"[-?)(\d]", around) or _ARITHMETIC.search(text[max(0, start - 60) : start])
    )


def _international(match: re.Match[str]) -> bool:
    """A plus sign and digits that are not added to a number, a bracket or a one-letter variable before them."""
    start, end = match.span()
    before = match.string[max(0, start - 4) : start].rstrip()
    after = match.string[end : end + 2].lstrip()[:1]
    term = re.search(r"[\d)\]^*/=+<>-]$|(?:^|\W)[b-hj-zB-HJ-Z]$", before)
    return 8 <= len(_digits(match[0])) <= 15 and not term and not (after and after in _OPERATORS)


_CARD_RANGES = (
    (re.compile(r"4\d*"), (13, 16, 19)),
    (re.compile(r"(5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720)\d*"), (16,)),
    (re.compile(r"3[47]\d*"), (15,)),
    (re.compile(r"(6011|65|64[4-9])\d*"), (16, 19)),
    (re.compile(r"(36|38|30[0-5])\d*"), (14,)),
    (re.compile(r"35(2[89]|[3-8])\d*"), (16,)),
    (re.compile(r"62\d*"), (16, 17, 18, 19)),
)
"""The issuers' ranges: Visa, Mastercard, American Express, Discover, Diners, JCB, UnionPay."""


def _card(match: re.Match[str]) -> bool:
    number = _digits(match[0])
    issued = any(len(number) in lengths and form.fullmatch(number) for form, lengths in _CARD_RANGES)
    return issued and _luhn(number) and not _in_sum(match)


def _luhn(number: str) -> bool:
    total = 0
    for i, c in enumerate(reversed(number)):
        doubled = int(c) * (1 + i % 2)
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def _iban(match: re.Match[str]) -> bool:
    code = re.sub(r"\s", "", match[0])
    if not 15 <= len(code) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1


def _ipv4(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.IPv4Address(match[0])
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _ipv6(match: re.Match[str]) -> bool:
    text = match[0]
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    groups = [group for group in text.split(":") if group]
    return len(groups) >= 3 and not address.is_loopback


_CN_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def _chinese_id(match: re.Match[str]) -> bool:
    """GB 11643: the check character of 17 digits, mod 11."""
    text = match[0].upper()
    total = sum(int(c) * w for c, w in zip(text, _CN_WEIGHTS, strict=False))
    return "10X98765432"[total % 11] == text[17]


def _spanish_id(match: re.Match[str]) -> bool:
    """DNI and NIE: the letter is the number mod 23."""
    text = match[0].upper()
    number = text[:-1].translate(str.maketrans("XYZ", "012"))
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == text[-1]


def _brazilian_id(match: re.Match[str]) -> bool:
    """CPF: two check digits."""
    number = [int(c) for c in _digits(match[0])]
    if len(set(number)) == 1:
        return False
    for n in (9, 10):
        total = sum(d * w for d, w in zip(number, range(n + 1, 1, -1), strict=False))
        if (total * 10 % 11) % 10 != number[n]:
            return False
    return True


def _french_id(match: re.Match[str]) -> bool:
    """NIR: 97 minus the number mod 97; Corsica's departments 2A and 2B count as 19 and 18."""
    text = re.sub(r"\s", "", match[0]).upper()
    number = text[:13].replace("2A", "19", 1).replace("2B", "18", 1)
    return number.isdigit() and 97 - int(number) % 97 == int(text[13:])


_ODD = dict(
    zip(
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16,
         10, 22, 25, 24, 23), strict=True,
    )
)  # fmt: skip


def _italian_id(match: re.Match[str]) -> bool:
    """Codice fiscale: the sixteenth letter is a weighted sum mod 26."""
    text = match[0].upper()
    even = {c: i if c.isdigit() else i - 10 for i, c in enumerate("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")}
    total = sum(_ODD[c] if i % 2 == 0 else even[c] for i, c in enumerate(text[:15]))
    return chr(ord("A") + total % 26) == text[15]


def _p(text: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(text, flags)


_KEYS = (
    r"sk-(?:ant-|proj-|svcacct-|admin-|or-v1-|lf-)?[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic, OpenRouter, DashScope
    r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,}|glpat-[\w-]{20,}",  # GitHub, GitLab
    r"(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}",  # AWS
    r"AIza[\w-]{35}|ya29\.[\w-]{20,}",  # Google
    r"xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}",  # Slack
    r"hf_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{40,}|r8_[A-Za-z0-9]{30,}",  # Hugging Face, Groq, ...
    r"pplx-[A-Za-z0-9]{40,}|nvapi-[\w-]{40,}|fw_[A-Za-z0-9]{20,}|tvly-[\w-]{20,}",  # Perplexity, NVIDIA, ...
    r"(?:sk|rk|pk|whsec)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"SG\.[\w-]{16,}\.[\w-]{16,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|dop_v1_[a-f0-9]{64}",  # SendGrid, npm, ...
)
_KEY_HINTS = (
    "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "akia", "asia", "aroa", "aida", "aiza",
    "ya29.", "xox", "xapp-", "hf_", "gsk_", "xai-", "r8_", "pplx-", "nvapi-", "fw_", "tvly-", "k_live_", "k_test_",
    "whsec_", "sg.", "npm_", "pypi-", "dop_v1_",
)  # fmt: skip
_PEM = r"PRIVATE KEY(?: BLOCK)?-----"

RULES: tuple[Rule, ...] = (
    Rule(
        "private key",
        _p(rf"-----BEGIN [A-Z0-9 ]*{_PEM}.*?(?:-----END [A-Z0-9 ]*{_PEM}|\Z)", re.S),
        hints=("private key",),
    ),
    Rule("jwt", _p(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"), hints=("eyj",)),
    Rule("api key", _p(rf"(?<![A-Za-z0-9])(?:{'|'.join(_KEYS)})"), hints=_KEY_HINTS, check=_has_digit),
    Rule(
        "bearer token",
        _p(r"(?:\bbearer|authorization\W{1,4}(?:basic|token))\s+(?P<value>[\w.~+/-]{12,}=*)", re.I),
        hints=("bearer", "authorization"),
        check=lambda m: _password(m) and entropy(m["value"]) > 2.5,
    ),
    Rule(
        "password",
        _p(r"(?:password|passwd|passphrase|pwd)[\"']?\s*[:=]\s*[\"']?(?P<value>[^\s\"',;\[\]{}()<>]{6,})", re.I),
        hints=("passw", "passphrase", "pwd"),
        check=_password,
    ),
    Rule(
        "secret",
        _p(
            r"(?:api[_-]?key|secret|token|access[_-]?key|credential|auth)[\w-]{0,20}[\"']?\s*[:=]\s*[\"']?"
            r"(?P<value>[A-Za-z0-9+/_.~=-]{16,})",
            re.I,
        ),
        hints=("key", "secret", "token", "credential", "auth"),
        check=lambda m: looks_random(m["value"]),
    ),
    Rule(
        "email",
        _p(r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.)+[^\W\d_]{2,24}(?![\w-])"),
        hints=("@",),
    ),
    Rule(
        "iban",
        _p(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"),
        check=_iban,
        digits=True,
    ),
    Rule(
        "national id",
        _p(r"(?<![\w.])[1-9]\d{5}(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx](?![\w.]\d)"),
        check=lambda m: _chinese_id(m) and not _in_sum(m),
        digits=True,
    ),
    Rule(
        "national id",
        _p(r"(?<![\w.])[12] ?\d\d ?(?:0[1-9]|1[0-2]) ?(?:\d\d|2[ABab]) ?\d{3} ?\d{3} ?\d\d(?!\w|[.,]\d)"),
        check=lambda m: _french_id(m) and not _in_sum(m),
        digits=True,
    ),
    Rule("national id", _p(r"(?<!\w)\d{3}\.\d{3}\.\d{3}-\d\d(?!\w)"), hints=("-",), check=_brazilian_id, digits=True),
    Rule("national id", _p(r"(?<!\w)(?:\d{8}|[XYZxyz]\d{7})[A-Za-z](?!\w)"), check=_spanish_id, digits=True),
    Rule(
        "national id",
        _p(r"(?<!\w)[A-Za-z]{6}\d\d[A-EHLMPRSTa-ehlmprst]\d\d[A-Za-z]\d{3}[A-Za-z](?!\w)"),
        check=_italian_id,
    ),
    Rule("card", _p(r"(?<![\w.+-])\d(?:[ -]?\d){12,18}(?!\w|[.-]\d)"), check=_card, digits=True),
    Rule(
        "phone",
        _p(r"(?<![\w.])\+[1-9]\d{0,2}[ .-]?(?:\(\d{1,5}\)[ .-]?)?\d(?:[ .-]?\d){5,13}(?!\w|[.,]\d)"),
        hints=("+",),
        check=_international,
        digits=True,
    ),
    Rule(
        "phone",
        _p(r"(?<![\w.])(?:\+?1[ .-]?)?\([2-9]\d\d\) ?[2-9]\d\d[-. ]\d{4}(?!\w)"),
        hints=("(",),
        check=lambda m: not _in_sum(m),
        digits=True,
    ),
    Rule(
        "phone",
        _p(
            r"\b(?:telephone|tel|phone|mobile|cell|fax|whatsapp|call me at|call)(?: (?:no|number|is))*\.?[:#]? {0,2}"
            r"(?P<value>\+?\(?\d(?:[ ().-]{0,2}\d){6,13})(?!\w|[.,]\d)",
            re.I,
        ),
        hints=("tel", "phone", "mobile", "cell", "fax", "whatsapp", "call"),
        check=lambda m: not _in_sum(m),
        digits=True,
    ),
    Rule(
        "phone",
        _p(r"(?<![\w.])(?:1[-.])?[2-9]\d\d([-.])[2-9]\d\d\1\d{4}(?!\w|[.,]\d)"),
        hints=("-", "."),
        check=_north_american,
        digits=True,
    ),
    Rule("ip", _p(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)"), hints=(".",), check=_ipv4, digits=True),
    Rule("ip", _p(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])"), hints=(":",), check=_ipv6),
)

KINDS = tuple(dict.fromkeys(rule.kind for rule in RULES))
