"""Replaces secrets and personal data in text by placeholders.

A value becomes `[kind n]`; within an episode equal values get the same number, so that a
conversation can still be followed. Patterns that ordinary numbers also match are confirmed by a
checksum (cards: Luhn, ISO/IEC 7812; IBAN: mod 97, ISO 13616; national ids: their own) or by the
text around them.

Not detected: names, addresses, dates of birth and other personal facts in prose; secrets without a
known format (a password in a sentence); encoded data (base64, ROT13); JSON numbers. Nobody reads
what a picture shows: pictures are replaced, too, unless they are to be kept.
Review what you publish.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ajet_sdk.addresses import entropy, looks_random, secrets_in
from ajet_sdk.dialects.message_parts import picture_url
from ajet_sdk.pictures import is_data_url
from ajet_sdk.secret_keys import is_secret

_Check = Callable[[re.Match[str]], bool]


@dataclass(frozen=True)
class Rule:
    """A pattern; its group `value`, or else the whole match, is replaced."""

    kind: str
    pattern: re.Pattern[str]
    check: _Check | None = None
    hints: tuple[str, ...] = ()
    """The pattern is only tried if the text, in lower case, contains one of these."""
    digits: bool = False
    """The pattern is only tried if the text contains `_DIGITS`."""

    def may_match(self, lower: str, digits: bool) -> bool:
        if self.digits and not digits:
            return False
        for hint in self.hints:  # much faster than any() here
            if hint in lower:
                return True
        return not self.hints


_DIGITS = re.compile(r"\d[\d ().-]{5,}\d")
"""About seven digits in a row."""


def _digits(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


def _password(match: re.Match[str]) -> bool:
    value = match["value"]
    return any(c.isalpha() for c in value) and any(not c.isalpha() for c in value)


_OPERATORS = "+*/=^×÷<>%"


def _in_sum(match: re.Match[str]) -> bool:
    """Whether the digits are next to an arithmetic operator."""
    text = match.string
    start = match.start()
    end = match.end()
    before = text[max(0, start - 3) : start].rstrip()
    after = text[end : end + 3].lstrip()
    return (before[-1:] in _OPERATORS and before != "") or (after[:1] in _OPERATORS and after != "")


_ARITHMETIC = re.compile(
    r"(comput|calculat|evaluat|what\s+(is|are)|what's|solve|subtract|minus|plus|times|sum|result|equal|expression|calc)"
    r"\W*(\w+\W+){0,3}$",
    re.I,
)


def _north_american(match: re.Match[str]) -> bool:
    """Accept 555-123-4567 as a phone number, unless the text around it suggests a subtraction."""
    text = match.string
    start = match.start()
    end = match.end()
    around = text[max(0, start - 2) : start] + text[end : end + 2]
    return not (
        _in_sum(match)
        or re.search(r"[-?)(\d]", around)
        or _ARITHMETIC.search(text[max(0, start - 60) : start])
    )


def _international(match: re.Match[str]) -> bool:
    """Accept a plus sign with digits, unless it follows a number, a bracket or a one-letter
    variable to add to."""
    start, end = match.span()
    before = match.string[max(0, start - 4) : start].rstrip()
    after = match.string[end : end + 2].lstrip()[:1]
    term = re.search(r"[\d)\]^*/=+<>-]$|(?:^|\W)[b-hj-zB-HJ-Z]$", before)
    return 8 <= len(_digits(match[0])) <= 15 and not term and not (after and after in _OPERATORS)


def _national(match: re.Match[str]) -> bool:
    """Accept 030 1234567 or 06 12 34 56 78 as a phone number, and no date, clock time or sum."""
    text = match.string
    start = match.start()
    end = match.end()
    is_date = re.fullmatch(r"0\d[-/ ]\d\d[-/ ]\d{4}", match[0]) is not None
    asked = _ARITHMETIC.search(text[max(0, start - 60) : start])
    listed = re.search(r"\d[, ]+$", text[max(0, start - 4) : start]) or re.match(
        r"[, ]+\d", text[end : end + 4]
    )
    return 9 <= len(_digits(match[0])) <= 12 and not (is_date or asked or listed or _in_sum(match))


_CARD_RANGES = (
    (re.compile(r"4\d*"), (13, 16, 19)),
    (re.compile(r"(5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720)\d*"), (16,)),
    (re.compile(r"3[47]\d*"), (15,)),
    (re.compile(r"(6011|65|64[4-9])\d*"), (16, 19)),
    (re.compile(r"(36|38|30[0-5])\d*"), (14,)),
    (re.compile(r"35(2[89]|[3-8])\d*"), (16,)),
    (re.compile(r"62\d*"), (16, 17, 18, 19)),
)
"""Issuer ranges: Visa, Mastercard, American Express, Discover, Diners, JCB, UnionPay."""


def _card(match: re.Match[str]) -> bool:
    number = _digits(match[0])
    issued = any(
        len(number) in lengths and form.fullmatch(number) for form, lengths in _CARD_RANGES
    )
    luhn = sum(sum(divmod(int(c) * (1 + i % 2), 10)) for i, c in enumerate(reversed(number)))
    return issued and luhn % 10 == 0 and not _in_sum(match)


def _iban(match: re.Match[str]) -> bool:
    code = re.sub(r"\s", "", match[0])
    if not 15 <= len(code) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1


def _ip(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return False
    groups = [group for group in match[0].split(":") if group]
    return not (address.is_loopback or address.is_unspecified) and (
        address.version == 4 or len(groups) >= 3
    )


_CN_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def _chinese_id(match: re.Match[str]) -> bool:
    """GB 11643: check character over 17 digits, mod 11."""
    text = match[0].upper()
    total = sum(int(c) * w for c, w in zip(text, _CN_WEIGHTS, strict=False))
    return "10X98765432"[total % 11] == text[17]


def _spanish_id(match: re.Match[str]) -> bool:
    """DNI and NIE: letter of the number mod 23."""
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


_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ODD = (
    "1 0 5 7 9 13 15 17 19 21 1 0 5 7 9 13 15 17 19 21 2 4 18 20 11 3 6 8 12 14 16 10 22 25 24 23"
)
"""Weights of the letters at odd places of a codice fiscale."""


def _italian_id(match: re.Match[str]) -> bool:
    """Codice fiscale: 16th letter from a weighted sum mod 26."""
    text = match[0].upper()
    weights = [int(weight) for weight in _ODD.split()]
    total = 0
    for place, letter in enumerate(text[:15]):
        value = _LETTERS.index(letter)
        if place % 2 == 0:
            total += weights[value]
        else:
            total += value if value < 10 else value - 10
    return chr(ord("A") + total % 26) == text[15]


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
    "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-",
    "akia", "asia", "aroa", "aida", "aiza", "ya29.", "xox", "xapp-",
    "hf_", "gsk_", "xai-", "r8_", "pplx-", "nvapi-", "fw_", "tvly-",
    "k_live_", "k_test_", "whsec_", "sg.", "npm_", "pypi-", "dop_v1_",
)  # fmt: skip
_RANDOM = 3.5
"""Bits per character of a key of letters only; `hf_xxxxxxxxxxxxxxxx` in an example has fewer."""
_PEM = r"PRIVATE KEY(?: BLOCK)?-----"

_p = re.compile

RULES: tuple[Rule, ...] = (
    Rule(
        "private key",
        _p(rf"-----BEGIN [A-Z0-9 ]*{_PEM}.*?(?:-----END [A-Z0-9 ]*{_PEM}|\Z)", re.S),
        hints=("private key",),
    ),
    Rule("jwt", _p(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"), hints=("eyj",)),
    Rule(
        "api key",
        _p(rf"(?<![A-Za-z0-9])(?:{'|'.join(_KEYS)})"),
        hints=_KEY_HINTS,
        check=lambda m: bool(_digits(m[0])) or entropy(m[0]) > _RANDOM,
    ),
    Rule(
        "aws secret",
        _p(r"(?<![A-Za-z0-9/+=_-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=_-])"),
        hints=("aws", "akia", "asia", "secret"),
        check=lambda m: (
            looks_random(m[0])
            and not m[0].islower()
            and not m[0].isupper()
            and entropy(m[0]) > _RANDOM
        ),
    ),
    Rule(
        "cookie",
        _p(r"\b(?:set-)?cookie[\"']?\s*[:=]\s*[\"']?(?P<value>[\w.-]+=[^\r\n\"']{4,})", re.I),
        hints=("cookie",),
    ),
    Rule(
        "cookie",
        _p(
            r"\b(?:session(?:_?id)?|sess|sid|j?sessionid|phpsessid|connect\.sid|csrf_?token|xsrf-token)\s*=\s*"
            r"(?P<value>[\w%.~+/:-]{12,}=*)",
            re.I,
        ),
        hints=("sess", "sid", "csrf", "xsrf"),
        check=lambda m: entropy(m["value"]) > 2.5 and bool(_digits(m["value"])),
    ),
    Rule(
        "bearer token",
        _p(r"(?:\bbearer|authorization\W{1,4}(?:basic|token))\s+(?P<value>[\w.~+/-]{12,}=*)", re.I),
        hints=("bearer", "authorization"),
        check=lambda m: _password(m) and entropy(m["value"]) > 2.5,
    ),
    Rule(
        "password",
        _p(
            r"(?:password|passwd|passphrase|pwd)[\"']?\s*[:=]\s*[\"']?(?P<value>[^\s\"',;\[\]{}()<>]{6,})",
            re.I,
        ),
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
        _p(
            r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.)+[^\W\d_]{2,24}(?![\w-])"
        ),
        hints=("@",),
    ),
    Rule(
        "iban",
        _p(
            r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?:"
            r" ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"
        ),
        check=_iban,
        digits=True,
    ),
    Rule(
        "national id",
        _p(
            r"(?<![\w.])[1-9]\d{5}(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx](?![\w.]\d)"
        ),
        check=lambda m: _chinese_id(m) and not _in_sum(m),
        digits=True,
    ),
    Rule(
        "national id",
        _p(
            r"(?<![\w.])[12] ?\d\d ?(?:0[1-9]|1[0-2]) ?(?:\d\d|2[ABab]) ?\d{3} ?\d{3}"
            r" ?\d\d(?!\w|[.,]\d)"
        ),
        check=lambda m: _french_id(m) and not _in_sum(m),
        digits=True,
    ),
    Rule(
        "national id",
        _p(r"(?<!\w)\d{3}\.\d{3}\.\d{3}-\d\d(?!\w)"),
        hints=("-",),
        check=_brazilian_id,
        digits=True,
    ),
    Rule(
        "national id",
        _p(
            r"(?<![\w.-])(?!000|666|9\d\d)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\w-]|\.\d)"
        ),  # US social security
        check=lambda m: (
            not _in_sum(m) and not _ARITHMETIC.search(m.string[max(0, m.start() - 60) : m.start()])
        ),
        digits=True,
    ),
    Rule(
        "national id",
        _p(r"(?<!\w)(?:\d{8}|[XYZxyz]\d{7})[A-Za-z](?!\w)"),
        check=_spanish_id,
        digits=True,
    ),
    Rule(
        "national id",
        _p(r"(?<!\w)[A-Za-z]{6}\d\d[A-EHLMPRSTa-ehlmprst]\d\d[A-Za-z]\d{3}[A-Za-z](?!\w)"),
        check=_italian_id,
    ),
    Rule("card", _p(r"(?<![\w.+-])\d(?:[ -]?\d){12,18}(?!\w|[.-]\d)"), check=_card, digits=True),
    Rule(
        "phone",
        _p(
            r"(?<![\w.])\+[1-9]\d{0,2}[ .-]?(?:\(\d{1,5}\)[ .-]?)?\d(?:[ .-]?\d){5,13}(?!\w|[.,]\d)"
        ),
        hints=("+",),
        check=_international,
        digits=True,
    ),
    Rule(
        "phone",
        _p(r"(?<![\w.])(?:\+?1[ .-]?)?\([2-9]\d\d\) ?\d{3}[-. ]\d{4}(?!\w)"),
        hints=("(",),
        check=lambda m: not _in_sum(m),
        digits=True,
    ),
    Rule(
        "phone",
        _p(
            r"\b(?:telephone|tel|phone|mobile|cell|fax|whatsapp|call me at|call)(?:"
            r" (?:no|number|is))*\.?[:#]? {0,2}"
            r"(?P<value>\+?\(?\d(?:[ ().-]{0,2}\d){6,13})(?!\w|[.,]\d)",
            re.I,
        ),
        hints=("tel", "phone", "mobile", "cell", "fax", "whatsapp", "call"),
        check=lambda m: not _in_sum(m),
        digits=True,
    ),
    Rule(
        "phone",
        _p(
            r"(?<![\w.])(?:1[-. ])?(?:[2-9]\d\d([-.])\d{3}\1\d{4}|(?:[2-9]\d\d [2-9]\d\d|555 \d{3})"
            r" \d{4})(?!\w|[.,]\d)"
        ),
        hints=("-", ".", " "),
        check=_north_american,
        digits=True,
    ),
    Rule(
        "phone",
        _p(
            r"(?<![\w.,/+-])\(?0[1-9]\d{0,4}\)?(?:[ /-]\d{2,8}){1,5}(?!\w|[.,/-]\d)"
        ),  # Europe, with the 0 of a trunk
        check=_national,
        digits=True,
    ),
    Rule(
        "ip",
        _p(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)"),
        hints=(".",),
        check=_ip,
        digits=True,
    ),
    Rule(
        "ip",
        _p(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])"),
        hints=(":",),
        check=_ip,
    ),
)

PICTURE = "picture"
KINDS = (*dict.fromkeys(rule.kind for rule in RULES), PICTURE)
_BODY = r"[\w+/=%-]+(?:\s+[\w+/=%-]{20,})*"
"""Base64, also in lines."""
_PICTURES = re.compile(
    r"(?i:data:\s*(?:image/[\w.+-]+|application/octet-stream)?(?:;[\w=.+-]+)*;base64,)\s*"
    + _BODY
    + r"|(?<![\w+/])(?:iVBORw0KGgo|/9j/|R0lGOD[dl]h|UklGR)(?=[\w+/]{40})"
    + _BODY
)
"""Pictures within a text: data URLs, as Markdown has them, and base64 that begins as a PNG, JPEG, GIF
or WebP does."""
_PLACED = re.compile(rf"\[(?:{'|'.join(KINDS)}) \d+\]|\[removed by ajet\]")


class Redactor:
    """Replaces values in the texts of one episode, and counts them by kind."""

    def __init__(self, *, keep_pictures: bool = False) -> None:
        self._keeps_pictures = keep_pictures
        self.counts: Counter[str] = Counter()
        self._numbers: dict[tuple[str, str], int] = {}
        self._known: dict[str, str] = {}
        self._objects: dict[int, tuple[object, object]] = {}
        """By identity: calls of an episode share their repeated messages."""

    def text(self, text: str) -> str:
        """Redact a text; JSON stays valid."""
        if len(text) < 6:
            return text
        if is_data_url(text) and _PICTURES.match(text):
            return self._picture(text)
        redacted = self._known.get(text)
        if redacted is None:
            redacted = self._known[text] = self._json(text)
        return redacted

    def value(self, value: object) -> object:
        """Redact the texts in a JSON value; returns the value itself if nothing changes."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            known = self._objects.get(id(value))
            if known is None:
                known = self._objects[id(value)] = (value, self._object(value))
            return known[1]
        if isinstance(value, list | tuple):
            items = [self.value(v) for v in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                return items
            return value
        return value

    def _object(self, value: Mapping[object, object]) -> object:
        url = picture_url(value)
        if url is not None:
            if self._keeps_pictures:
                return value
            # a text, since whoever reads the file would refuse a picture without data
            return {"type": "text", "text": self._placeholder(PICTURE, url)}
        pairs = {
            k: self._secret(v) if is_secret(k, value) else self.value(v) for k, v in value.items()
        }
        if any(pairs[k] is not value[k] for k in pairs):
            return pairs
        return value

    def _json(self, text: str) -> str:
        """Redact a text; if it is JSON itself (arguments of a tool call), redact its values and
        keep it parseable."""
        if text[0] in "{[" and text[-1] in "}]":
            try:
                parsed = json.loads(text)
            except (ValueError, RecursionError):
                return self._plain(text)
            changed = self.value(parsed)
            if changed is parsed:
                return text
            return json.dumps(changed, ensure_ascii=False)
        return self._plain(text)

    def _plain(self, text: str) -> str:
        pieces: list[str] = []
        end = 0
        for match in _PICTURES.finditer(text):
            pieces += (self._prose(text[end : match.start()]), self._picture(match[0]))
            end = match.end()
        return "".join([*pieces, self._prose(text[end:])])

    def _picture(self, text: str) -> str:
        if self._keeps_pictures:
            return text
        return self._placeholder(PICTURE, text)

    def _prose(self, text: str) -> str:
        if "://" in text:
            parts = list[str]()
            last = 0
            for start, end in secrets_in(text):
                value = text[start:end]
                parts += (
                    text[last:start],
                    value if _PLACED.search(value) else self._placeholder("password", value),
                )
                last = end
            text = "".join((*parts, text[last:]))
        lower = text.lower()
        digits = _DIGITS.search(text) is not None
        for rule in RULES:
            if rule.may_match(lower, digits):
                text = rule.pattern.sub(lambda match, rule=rule: self._replaced(rule, match), text)  # type: ignore[misc]
        return text

    def _replaced(self, rule: Rule, match: re.Match[str]) -> str:
        group = "value" if "value" in rule.pattern.groupindex else 0
        value = match[group]
        if _PLACED.search(value) or (rule.check and not rule.check(match)):
            return match[0]
        start = match.start(group) - match.start()
        end = match.end(group) - match.start()
        return match[0][:start] + self._placeholder(rule.kind, value) + match[0][end:]

    def _secret(self, value: object) -> object:
        """Redact the value of a key that names a secret."""
        if isinstance(value, str):
            if value and not _PLACED.fullmatch(value):
                return self._placeholder("secret", value)
            return value
        if isinstance(value, list | tuple):
            return [self._secret(item) for item in value] or value
        return self.value(value)

    def _placeholder(self, kind: str, value: str) -> str:
        number = self._numbers.get((kind, value))
        if number is None:
            self.counts[kind] += 1
            number = self._numbers[kind, value] = self.counts[kind]
        return f"[{kind} {number}]"
