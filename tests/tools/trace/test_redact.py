"""Redaction: what is planted does not survive, what is ordinary stays, and the same value keeps its
number."""

from __future__ import annotations

import json
import random
from string import ascii_letters, digits
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_tools.trace.redact import KINDS, Redactor

_ALNUM = st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")


def _random(n: int) -> st.SearchStrategy[str]:
    """Letters and digits, both among them."""
    return st.text(_ALNUM, min_size=n, max_size=n).map(lambda text: f"a7{text[2:-2]}Z3")


def _luhn(body: str) -> str:
    for check in "0123456789":
        own = [int(c) for c in reversed(body + check)]
        if sum(d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(own)) % 10 == 0:
            return body + check
    raise AssertionError


def _iban(body: str) -> str:
    number = int("".join(str(int(c, 36)) for c in f"{body}DE00"))
    return f"DE{98 - number % 97:02d}{body}"


_DIGITS = st.sampled_from("0123456789")


def _number(n: int) -> st.SearchStrategy[str]:
    return st.text(_DIGITS, min_size=n, max_size=n)


SECRETS: dict[str, st.SearchStrategy[str]] = {
    "openai": _random(48).map("sk-proj-{}".format),
    "anthropic": _random(60).map("sk-ant-api03-{}".format),
    "github": _random(36).map("ghp_{}".format),
    "aws": (
        st.text(st.sampled_from("ABCDEFGHIJKLMNOP0123456789"), min_size=14, max_size=14).map(
            "AKIA2B{}".format
        )
    ),
    "google": _random(35).map("AIza{}".format),
    "huggingface": _random(34).map("hf_{}".format),
    "slack": _random(24).map("xoxb-{}".format),
    "stripe": _random(24).map("sk_live_{}".format),
    "jwt": (
        st.tuples(_random(20), _random(40), _random(43)).map(lambda p: f"eyJ{p[0]}.{p[1]}.{p[2]}")
    ),
    "key": (
        _random(200).map(
            "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----".format
        )
    ),
    "email": _random(8).map("{}@example.co.uk".format),
    "card": _number(14).map(lambda body: _luhn(f"4{body}")),
    "iban": _number(18).map(_iban),
    "ip": (
        st.tuples(st.integers(11, 126), st.integers(0, 255), st.integers(1, 254)).map(
            lambda p: f"{p[0]}.{p[1]}.7.{p[2]}"
        )
    ),
    "ip6": (
        st.lists(st.integers(0x1000, 0xFFFF), min_size=8, max_size=8).map(
            lambda groups: ":".join(f"{g:x}" for g in groups)
        )
    ),
    "phone": st.tuples(st.integers(1, 99), _number(9)).map(lambda p: f"+{p[0]} 1{p[1]}"),
    "phone_us": (
        st.tuples(st.integers(200, 999), st.integers(200, 999), _number(4)).map(
            lambda p: f"({p[0]}) {p[1]}-{p[2]}"
        )
    ),
}
_STRONG = st.integers(0, 2**32).map(
    lambda n: "a7" + "".join(random.Random(n).choices(ascii_letters + digits, k=24))
)
_PROSE = st.lists(
    st.sampled_from(
        [
            "the",
            "model",
            "then",
            "asks",
            "because",
            "nobody",
            "knew",
            "so",
            "it",
            "said:",
            "ü",
            "漢字",
            "🙂",
        ]
    ),
    max_size=12,
).map(" ".join)


@pytest.mark.parametrize("name", SECRETS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_planted_value_survives(name: str, data: st.DataObject) -> None:
    secret = data.draw(SECRETS[name])
    before, after = data.draw(_PROSE), data.draw(_PROSE)
    redactor = Redactor()
    redacted = redactor.text(f"{before} {secret} {after}")
    assert secret not in redacted
    assert sum(redactor.counts.values()) == 1
    assert redacted.startswith(before) and redacted.endswith(after)


@settings(max_examples=60, deadline=None)
@given(
    secret=_STRONG,
    key=st.sampled_from(["API_KEY", "openai_api_key", "access-token", "client_secret"]),
)
def test_assignments_of_random_values_lose_the_value_and_keep_the_name(
    secret: str, key: str
) -> None:
    for text in (f"export {key}={secret}", f'{key}: "{secret}"', f'  "{key}": "{secret}",'):
        redacted = Redactor().text(text)
        assert secret not in redacted and key in redacted


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_characters="@+(:/=-_.\\", exclude_categories=["Nd", "Cs"])))
def test_text_without_any_is_unchanged(text: str) -> None:
    redactor = Redactor()
    assert redactor.text(text) == text and not redactor.counts


_OPERAND = st.one_of(
    st.integers(0, 10**12).map(str),
    st.floats(0, 1e9, allow_nan=False).map(lambda x: f"{x:.3f}"),
    st.integers(0, 10**12).map("{:,}".format),
)
_SUM = st.tuples(
    _OPERAND,
    st.lists(
        st.tuples(st.sampled_from(["+", "-", "*", "/", " + ", " - ", " * ", "^"]), _OPERAND),
        min_size=1,
        max_size=4,
    ),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    sum_=_SUM,
    form=st.sampled_from(
        ["What is {}?", "Compute {}.", "{} =", "calc({})", '{{"expression": "{}"}}']
    ),
)
def test_numbers_of_arithmetic_tasks_stay(
    sum_: tuple[str, list[tuple[str, str]]], form: str
) -> None:
    text = form.format(sum_[0] + "".join(operator + operand for operator, operand in sum_[1]))
    redactor = Redactor()
    assert redactor.text(text) == text and not redactor.counts


@pytest.mark.parametrize(
    "text",
    [
        "What is 555-223-4567?",
        "Subtract: 987-654-3210",
        "version 1.2.3.4.5",
        "it took 12:30:45",
        "std::vector::begin",
        "127.0.0.1:8000",
        "::1",
        "pi is 3.14159265358979",
        "id 33442b7a5a414688a0dcdcb75d8cd2b0",
        "max_tokens: 2048",
        "a@b",
        "@user said",
        "the secret: patience",
        "token = next_token_of_the_list",
        "row 4111 of 1111",
        "5 +123456789",
        "2026-11-21 18:57",
        "4111111111111112",
        "GB00 WEST 1234 5698 7654 32",
        "author: Mary",
        "12345678A",
    ],
)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("postgres://app:hunter2@db/x", "password"),
        ("password: hunter22!", "password"),
        ("Authorization: Bearer 9a8b7c6d5e4f3a2b", "bearer token"),
        ("11010519491231002X", "national id"),
        ("12345678Z", "national id"),
        ("529.982.247-25", "national id"),
        ("RSSMRA85T10A562S", "national id"),
        ("255081416802538", "national id"),
        ("tel. 030 1234567", "phone"),
        ("reach me: 415-555-2671.", "phone"),
        ("4111 1111 1111 1111", "card"),
        ("GB82 WEST 1234 5698 7654 32", "iban"),
        ("2001:db8::8a2e:370:7334", "ip"),
    ],
)
def test_each_kind_is_found_and_named(text: str, kind: str) -> None:
    redactor = Redactor()
    assert f"[{kind} 1]" in redactor.text(text)
    assert redactor.counts == {kind: 1} and kind in KINDS


def test_the_same_value_keeps_its_number_wherever_it_stands() -> None:
    redactor = Redactor()
    value: Any = {"a": ["bob@example.com and eve@example.com"], "b": "eve@example.com", "n": 3}
    assert redactor.value(value) == {"a": ["[email 1] and [email 2]"], "b": "[email 2]", "n": 3}
    assert redactor.counts == {"email": 2}
    assert redactor.text("[email 1] wrote") == "[email 1] wrote", (
        "what was redacted is not redacted again"
    )


def test_json_inside_text_stays_json() -> None:
    arguments = '{"to": "x\\nbob@example.com", "password": "hunter2", "n": 5551234567}'
    redacted = json.loads(Redactor().text(arguments))
    assert redacted == {"to": "x\n[email 1]", "password": "[secret 1]", "n": 5551234567}
    untouched = '{"b":1,  "a": "x"}'
    assert Redactor().text(untouched) is untouched


def test_what_has_nothing_to_redact_is_the_same_object() -> None:
    value = {"messages": [{"role": "user", "content": "What is 2+2?"}]}
    assert Redactor().value(value) is value


def test_a_long_text_is_redacted_in_time_proportional_to_it() -> None:
    import time

    text = "The quick brown fox, 12 of them, said: a.b.c-d (e) 1 2 3; x=1 " * 4_000
    started = time.perf_counter()
    assert Redactor().text(text) == text
    assert time.perf_counter() - started < 10
    for evil in (
        "a." * 50_000 + "@",
        "1 " * 50_000,
        ":" * 50_000,
        "A" * 100_000,
        "://" + "a:" * 50_000,
        "+1" * 50_000,
    ):
        started = time.perf_counter()
        Redactor().text(evil)
        assert time.perf_counter() - started < 10, evil[:10]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("token hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh", "hf_AbC"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalr"),
        ("aws: AKIAIOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalr"),
        ("My SSN is 123-45-6789.", "123-45"),
        ("ring 030 1234567", "1234567"),
        ("Tel 06 12 34 56 78", "34 56"),
        ("It is 555 123 4567", "123 4567"),
        ("at 555-123-4567", "123-4567"),
        ("(555) 123-4567", "123-4567"),
        ("020 7946 0958", "7946"),
        ("Cookie: sessionid=abc123def456ghi; theme=dark", "abc123"),
        ("Set-Cookie: sid=deadbeef12345678; Path=/", "deadbeef"),
        ("url?JSESSIONID=0A1B2C3D4E5F67890A1B", "0A1B2C"),
    ],
)
def test_keys_of_letters_cookies_and_numbers_of_people_are_replaced(text: str, secret: str) -> None:
    assert secret not in Redactor().text(text)


@pytest.mark.parametrize(
    "text",
    [
        "hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "What is 123-45-6789?",
        "It was 01-02-2024",
        "a cookie: chocolate",
        "values 012 345 678, 013 222 111",
        "on 2024-01-02 at 03:04",
        "1 + 234 567 8901",
        "the sid of 12",
        "aws commit 0123456789abcdef0123456789abcdef01234567",
        "0.5 1.25 3.5",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert Redactor().text(text) == text
