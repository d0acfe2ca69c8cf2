"""Finds passwords and keys in URLs and DSNs, and removes them from texts.

Connections use addresses unchanged; everything written, logged, raised or exported goes through
`public`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import unquote_plus

_SECRET = re.compile(
    r"(.*_)?(authori[sz]ation|api_?keys?|access_?keys?|account_?keys?|private_?keys?|secret_?keys?|secrets?|passwords?"
    r"|passwd|passphrase|pwd|credentials?|(set_)?cookies?|bearer|(api|auth|access|refresh|session|id|bearer)_?tokens?"
    r"|token)"
)
_VOCABULARY = re.compile(
    r"(.*_)?(bos|eos|pad|unk|sep|cls|mask|stop|start|end|begin|first|last|next|prev|previous|page|special|image|audio"
    r"|tool|think|prompt|output|input|decoder|added|new|max|num|n|per|target|answer|top|by)_token"
)
"""Names of tokens of a tokenizer or of paging."""
_SECRET_PARAMETER = re.compile(
    r"(.*_)?(key|keys|tokens?|sig|sign|signature|hmac|mac|auth|oauth|jwt|pass|pw|psk|pin|otp|code|ticket|sid|session"
    r"|assertion|license|sas|security_token|credential|aws_?access_?key_?id|subscription_key|secret\w*|password\w*)"
)
"""Further names of secrets in URLs, where parameters have short names."""

_KEY = re.compile(
    r"(?:sk|rk|pk|api|key|pplx|nvapi|fw|csk|tgp)[-_](?:[\w-]*_)?[\w-]{16,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}"
    r"|(?:hf|r8|gsk|npm|shpat|dop_v1|xai)_\w{20,}|xai-\w{20,}|xox[abeoprs]-[\w-]{10,}|gl[a-z]*at-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?|(?:bot)?\d{6,}:[\w-]{30,}"
)
"""Keys of known providers, as a segment of a path."""
_WEBHOOK = re.compile(
    r"//hooks\.slack\.com/(?:services|workflows|triggers)/|//(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/"
    r"|//[\w.-]+\.webhook\.office\.com/webhookb2/|//hooks\.zapier\.com/hooks/catch/\d+/|//maker\.ifttt\.com/.*?/key/"
    r"|//[\w.-]+\.infura\.io/v3/|//[\w.-]+\.alchemy\.com/(?:v2|nft/v\d)/|//\w+\.ingest\.[\w.]*sentry\.io/api/\d+/"
)
"""Prefixes of keys in the addresses of known providers."""
_BEGIN = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://"
_ADDRESS = re.compile(rf"(?<![A-Za-z0-9+.-]){_BEGIN}(?:(?!{_BEGIN})[^\s\"'<>`])*")
_PORT = re.compile(r"(?:[^:\[\]]*|\[[^\]]*\])(?::\d*)?")
_PARAMETER = re.compile(r"(?P<name>[^?&;#=]*)=(?P<value>[^&;#]*)|(?P<bare>[^?&;#=]+)")
_WITHOUT_SCHEME = re.compile(
    r"(?<![^\s\"'(=,])(?P<user>[^\s/@:\"'(=,]+:[^\s/@\"']+)@[\w.-]+(?P<port>:\d+)?(?:/\S*)?"
)
_ASSIGNMENT = re.compile(
    r"(?<![\w.-])(?P<name>[A-Za-z][\w .-]{0,40}?)\s*=\s*(?P<value>'[^']*'|\"[^\"]*\"|[^\s;&,\"']+)"
)


def public(text: str, by: str = "***") -> str:
    """The text with the passwords and keys of its addresses replaced by `by`."""
    if "://" in text:
        text = _replaced(text, secrets_in(text), by)
    if "@" in text:
        logins = (
            m.span("user")
            for m in _WITHOUT_SCHEME.finditer(text)
            if m["port"] or m[0] == text.strip()
        )
        text = _replaced(text, logins, by)
    if "=" in text:
        text = _replaced(text, _assigned(text, by), by)
    return text


def is_address(value: str) -> bool:
    """Whether a text as a whole is a URL."""
    return "://" in value and _ADDRESS.fullmatch(value) is not None


def secrets_in(text: str) -> Iterator[tuple[int, int]]:
    """Spans of passwords and keys in a text's URLs: in the user part, queries and fragments."""
    for match in _ADDRESS.finditer(text):
        address = match[0]
        start = match.start()
        authority = address.index("://") + 3
        ends = [at for at in (address.find(c, authority) for c in "/?#\\") if at >= 0]
        end = min(ends, default=len(address))
        at = address.rfind("@", authority, end)
        if at < 0 and not _PORT.fullmatch(
            address, authority, end
        ):  # a password with an unencoded `/` or `#`
            at = address.rfind("@")
        if at > authority:
            yield start + authority, start + at
        first = max(at, authority)
        query = min(
            (i for i in (address.find(c, first) for c in "?#;") if i >= 0), default=len(address)
        )
        yield from (
            (start + begin, start + stop) for begin, stop in _in_path(address, first, query)
        )
        for parameter in _PARAMETER.finditer(address, query):
            name = parameter["name"]
            value = parameter["value"]
            which = "bare" if name is None else "value"
            if looks_random(parameter["bare"]) if name is None else _is_secret(name, value):
                yield start + parameter.start(which), start + parameter.end(which)


def _in_path(address: str, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans of keys in the path of an address: after `key/` or `token/`, in a known webhook, or
    random-looking."""
    webhook = _WEBHOOK.search(address, 0, end)
    if webhook is not None and webhook.end() >= first:
        if address[webhook.end() : end] not in ("", "***"):
            yield webhook.end(), end
        return
    before = ""
    for segment in re.finditer(r"[^/]+", address[:end]):
        if segment.start() <= first:
            continue
        text = unquote_plus(segment[0])
        if _KEY.fullmatch(text) or (names_secret(before) and looks_random(text)):
            yield segment.span()
        before = "token" if text == "key" else text


@lru_cache(maxsize=256)
def below(base: str, route: str) -> str:
    """The address of a route below a base URL, whose query stays behind the path."""
    path, mark, query = base.partition("?")
    return f"{path.rstrip('/')}/{route}{mark}{query}"


def looks_random(text: str) -> bool:
    """Whether a text looks like a key: 16 or more letters and digits with at least 3.3 bits per
    character."""
    mixed = any(c.isdigit() for c in text) and any(c.isalpha() for c in text)
    return mixed and len(text) >= 16 and entropy(text) >= 3.3


def entropy(text: str) -> float:
    """Bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


@lru_cache(maxsize=4096)
def names_secret(name: str) -> bool:
    """Whether a name (`api_key`, `X-Auth-Token`, `dbPassword`) is that of a secret."""
    plain = _plain(name)
    return _SECRET.fullmatch(plain) is not None and _VOCABULARY.fullmatch(plain) is None


def _plain(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", name).lower()


def _is_secret(name: str, value: str) -> bool:
    """Whether a URL parameter is a secret, judging by its name, its value, or an address in the
    value."""
    plain = _plain(unquote_plus(name))
    meant = unquote_plus(value)
    if not value or meant == "***":
        return False
    if _SECRET.fullmatch(plain) or _SECRET_PARAMETER.fullmatch(plain):
        return True
    nested = "://" in meant and meant != value and next(secrets_in(meant), None) is not None
    return nested or (plain.rpartition("_")[2] not in _HARMLESS and looks_random(meant))


_HARMLESS = frozenset(
    ("version", "model", "deployment", "name", "path", "file", "date", "url", "uri")
)
"""Parameters whose values may have letters and digits."""


def _assigned(text: str, by: str) -> Iterator[tuple[int, int]]:
    """Spans of the values of `password=...`, as in database DSNs."""
    for match in _ASSIGNMENT.finditer(text):
        if names_secret(match["name"].strip()) and not text.startswith(by, match.start("value")):
            yield match.span("value")


def _replaced(text: str, spans: Iterator[tuple[int, int]], by: str) -> str:
    parts = list[str]()
    last = 0
    for start, end in spans:
        parts += (text[last:start], by)
        last = end
    return "".join((*parts, text[last:])) if parts else text
