"""Chat templates that come with a checkpoint and are after the machine: each is stopped, soon and
with one message."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2.sandbox
import pytest

from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.errors import ConfigError, RequestRefused
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.tokens.template import ChatTemplate

ROOT = Path(__file__).parents[2]
# ruff: noqa: E501
HOSTILE = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "large range": "{% for i in range(1000000000) %}x{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) | map('string') %}{% endfor %}{% endfor %}",
    "while": "{% set ns = namespace(l=range(9999)|list) %}{% for i in range(99999) %}{% for j in ns.l %}{% endfor %}{% endfor %}",
    "product": "{{ 'x' * 10000000000 }}",
    "product of products": "{{ ('x' * 40000000) * 40000000 }}",
    "list": "{{ ([0] * 10000000000) | length }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": "{% set ns = namespace(n=99999) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling blocks": "{% set s = 'x' %}{% macro d(s, n) %}{% if n %}{{ d(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ d('x', 60) }}",
    "replace": "{% set s = 'x' * 100000 %}{{ s | replace('x', s) }}",
    "replace method": "{% set s = 'x' * 100000 %}{{ s.replace('x', s) }}",
    "join": "{% set s = 'x' * 100000 %}{{ s | list | join(s) }}",
    "join method": "{% set s = 'x' * 100000 %}{{ s.join(s | list) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "indent": "{{ 'x\ny' | indent(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "format by *": "{{ '%*d' % (10000000000, 1) }}",
    "format method": "{{ '{:>10000000000}'.format('x') }}",
    "nested format": "{{ '{:>{}}'.format('x', 10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "tojson": "{{ [[1]] | tojson(indent=10000000000) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "lists of itself": "{% set ns=namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l=[ns.l,ns.l] %}{% endfor %}{{ ns.l }}",
    "lists of itself as JSON": "{% set ns=namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l=[ns.l,ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "lists of itself, compared": "{% set ns=namespace(a=[1],b=[1]) %}{% for i in range(60) %}{% set ns.a=[ns.a,ns.a] %}{% set ns.b=[ns.b,ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "lists of itself in a macro": "{% macro f(l, n) %}{% if n %}{{ f([l,l], n-1) }}{% else %}{{ l }}{% endif %}{% endmacro %}{{ f([1], 60) }}",
    "objects of itself": "{% set ns=namespace(l={'a':1}) %}{% for i in range(60) %}{% set ns.l={'a':ns.l,'b':ns.l} %}{% endfor %}{{ ns.l }}",
    "dict of itself": "{% set ns=namespace(l=1) %}{% for i in range(60) %}{% set ns.l=dict(a=ns.l,b=ns.l) %}{% endfor %}{{ ns.l | string }}",
    "namespace of itself": "{% set ns=namespace(l=1) %}{% for i in range(60) %}{% set ns.l=namespace(a=ns.l,b=ns.l) %}{% endfor %}{{ ns.l }}",
    "doubling a list": "{% macro f(l, n) %}{% if n %}{{ f(l + l, n - 1) }}{% endif %}{% endmacro %}{{ f([1], 60) }}",
    "doubling by name": "{% macro f(s, n) %}{% if n %}{{ f(s=s ~ s, n=n - 1) }}{% endif %}{% endmacro %}{{ f(s='x', n=60) }}",
    "recursive loop": "{% for i in range(9) recursive %}{% if loop.depth0 < 5 %}{{ loop(range(9999)) }}{% endif %}{% endfor %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep ifs": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "deep loops": "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "sandbox": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
}  # fmt: skip
BIG = "{% set b = 'x' * 9000000 %}{% set ns = namespace(l=[]) %}"
LOOP = "{% for i in range(99999) %}"
GREEDY = {
    "keep product": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, 'x' * 9000000] %}{% endfor %}",
    "keep product+i": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=ns.l+['x' * (9000000-i)] %}{% endfor %}",
    "drop product": LOOP + "{% set a='x' * 9000000 %}{% endfor %}",
    "concat": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b ~ i] %}{% endfor %}",
    "plus": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b + 'y'] %}{% endfor %}",
    "long concat": BIG + "{% set c = " + " ~ ".join(["b"] * 5000) + " %}",
    "percent": BIG + "{% set c = '" + "%s" * 5000 + "' % (" + ",".join(["b"] * 5000) + ") %}",
    "percent named": BIG + "{% set c = '" + "%(a)s" * 5000 + "' % {'a': b} %}",
    "percent widths2": "{% set t = (1,2,3,4,5,6,7,8,9,0) * 90000 %}{% set c = ('%9999d' * 900000) % t %}",
    "format named": BIG + "{% set c = ('{a}' * 5000).format(a=b) %}",
    "format width": "{% set c = ('{0:9999}' * 100000).format(1) %}",
    "format_map": BIG + "{% set c = ('{a}' * 5000).format_map({'a': b}) %}",
    "format repr": "{% set b = '\\x00' * 9000000 %}{% set c = '{0!r}{0!r}{0!r}{0!r}{0!r}'.format([b,b,b]) %}",
    "join attr": BIG + "{% set c = ([{'x': b}] * 99999) | join(attribute='x') %}",
    "join map": BIG + "{% set c = ([{'x': b}] * 99999) | map(attribute='x') | join %}",
    "join method": BIG + "{% set c = ''.join([b] * 9999) %}",
    "replace empty": BIG + "{% set c = b | replace('', 'yy' * 100) %}",
    "list times": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, [0] * 900000] %}{% endfor %}",
    "slices": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b[1:]] %}{% endfor %}",
    "list slices": "{% set b = [0]*9000000 %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b[1:]] %}{% endfor %}",
    "upper": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b.upper()] %}{% endfor %}",
    "upper filter": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b|upper] %}{% endfor %}",
    "split": "{% set b = 'x ' * 4900000 %}{% set c = b.split() %}{% set d = b.split(' ') %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b.split()] %}{% endfor %}",
    "list": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b|list] %}{% endfor %}",
    "set block": BIG + "{% set c %}" + LOOP + "{{ b }}{% endfor %}{% endset %}",
    "set block lists": "{% set l = ['x' * 1000] * 1000 %}{% set c %}" + LOOP + "{{ l }}{% endfor %}{% endset %}",
    "filter block": BIG + "{% filter upper %}" + LOOP + "{{ b }}{% endfor %}{% endfilter %}",
    "macro": BIG + "{% macro f() %}{{ b }}{{ b }}{% endmacro %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, f()] %}{% endfor %}",
    "caller": BIG + "{% macro f() %}" + LOOP + "{{ caller() }}{% endfor %}{% endmacro %}{% call f() %}{{ b }}{% endcall %}",
    "block": BIG + "{% block a %}{{ 'x' * 9000000 }}{% endblock %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, self.a()] %}{% endfor %}",
    "range list": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, range(99999)|list] %}{% endfor %}",
    "batches": "{% set b=[0]*9000000 %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b|batch(2)|list] %}{% endfor %}",
    "batch lazily": "{% set b=[0]*9000000 %}{% set ns = namespace(l=[]) %}" + LOOP + "{% for k in b|batch(2) %}{% set ns.l=[ns.l,k] %}{% endfor %}{% endfor %}",
    "tojson": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, [b]|tojson] %}{% endfor %}",
    "tojson shared": BIG + "{% set c = ([b] * 9999)|tojson %}",
    "tojson separators": "{% set c = ([1] * 900000)|tojson(separators=('x' * 9000000, ':')) %}",
    "tojson indent": "{% set c = ([1] * 900000)|tojson(indent=9999) %}",
    "tojson nested indent": "{% set c = ([[[[[1]]]]] * 90000)|tojson(indent=999) %}",
    "indent text": "{% set b = '\n' * 9000000 %}{{ b | indent('x' * 9999) }}",
    "center": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, 'x'|center(9999)] %}{% endfor %}",
    "ljust": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, 'x'.ljust(9999)] %}{% endfor %}",
    "expandtabs": "{% set b = '\t' * 9000000 %}{% set c = b.expandtabs(9999) %}",
    "translate": BIG + "{% set c = b.translate({120: b}) %}",
    "encode": "{% set c = 'x'.encode() * 10000000000 %}",
    "to_bytes": "{% set c = (1).to_bytes(10000000000) %}",
    "wordwrap": BIG + "{% set c = b | wordwrap(1, true, 'y' * 9999) %}",
    "sum lists": "{% set c = ([[0]*900000]*9999) | sum(start=[]) %}",
    "escape": "{% set b = '\"' * 9000000 %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b|escape] %}{% endfor %}",
    "markup plus": "{% set b = '\"' * 9000000 %}{% set m = 'x'|safe %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, m + b] %}{% endfor %}",
    "markup join": "{% set b = '\"' * 9000000 %}{% set m = 'x'|safe %}{% set c = m.join([b]*9999) %}",
    "markup percent": "{% set b = '\"' * 9000000 %}{% set m = ('%s' * 5000)|safe %}{% set c = m % (([b]*5000)|list) %}{% set d = ('%(a)s' * 5000)|safe %}{% set e = d % {'a': b} %}",
    "autoescape": "{% autoescape true %}{% set b = '\"' * 9000000 %}" + LOOP + "{{ b }}{% endfor %}{% endautoescape %}",
    "count": BIG + LOOP + "{% for j in range(9999) %}{% if b.count('y') %}{% endif %}{% endfor %}{% endfor %}",
    "in": BIG + LOOP + "{% for j in range(9999) %}{% if 'y' in b %}{% endif %}{% endfor %}{% endfor %}",
    "rfind": "{% set b = 'a' * 9000000 %}{% set c = 'b' ~ 'a' * 4000000 %}{% if b.rfind(c) %}{% endif %}",
    "strip": "{% set b = 'a' * 9000000 %}{% set c = 'b' * 9000000 ~ 'a' %}{% if b.strip(c) %}{% endif %}",
    "trim": "{% set b = 'a' * 9000000 %}{% set c = 'b' * 9000000 ~ 'a' %}{% if b | trim(c) %}{% endif %}",
    "strftime": "{% set c = strftime_now('%c' * 4000000) %}",
    "raise": BIG + "{{ raise_exception([b]*9999) }}",
    "deep tuple hash": "{% set ns=namespace(t=(1,2)) %}{% for i in range(60) %}{% set ns.t=(ns.t,ns.t) %}{% endfor %}{% set d = {ns.t: 1} %}",
    "deep changed": "{% set ns=namespace(a=[1],b=[1]) %}{% for i in range(60) %}{% set ns.a=[ns.a,ns.a] %}{% set ns.b=[ns.b,ns.b] %}{% endfor %}{% for x in [1,2] %}{% if x == 1 %}{% set ns.c = ns.a %}{% else %}{% set ns.c = ns.b %}{% endif %}{{ loop.changed(ns.c) }}{% endfor %}",
    "deep select": "{% set ns=namespace(a=[1],b=[1]) %}{% for i in range(60) %}{% set ns.a=[ns.a,ns.a] %}{% set ns.b=[ns.b,ns.b] %}{% endfor %}{{ [ns.a]|select('equalto', ns.b)|list }}",
    "dict values text": BIG + "{% set d = dict(a=[b]*9999) %}{{ d.values() }}",
    "namespace text": BIG + "{% set ns = namespace(a=[b]*9999) %}{{ ns }}",
    "fromkeys": "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, {}.fromkeys(range(99999))] %}{% endfor %}",
    "out wide": "{% set b = '\ud83d\ude00' * 2400000 %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b + 'a'] %}{% endfor %}",
    "reverse": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b|reverse] %}{% endfor %}",
    "attr": BIG + "{% set ns = namespace(l=[]) %}" + LOOP + "{% set f = b|attr('upper') %}{% set ns.l=[ns.l, f()] %}{% endfor %}",
    "groupby": "{% set b = [{'a': 1}] * 99999 %}{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l=[ns.l, b|groupby('a')] %}{% endfor %}",
}  # fmt: skip
SLOW = {"filtered loops", "recursive loop", "namespace of itself", "objects of itself"}
CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, source in HOSTILE.items()
    ],
)
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_hostile_template_is_stopped(source: str, later: bool) -> None:
    """Later: in the third message, behind all probes."""
    with pytest.raises((ConfigError, RequestRefused)) as raised:
        template = ChatTemplate(
            f"{{% if messages | length > 4 %}}{source}{{% endif %}}{CHATML}" if later else source,
            {},
        )
        template.render([{"role": "user", "content": "hi"}] * 5)
    assert "chat template" in str(raised.value)


@pytest.mark.slow
def test_texts_and_lists_that_a_template_makes_are_bounded_in_all() -> None:
    """Kept or dropped: no template of `GREEDY` takes much more memory than it may make, and each is
    stopped."""
    program = (
        "import json, sys\n"
        "from ajet_sdk.errors import ConfigError\n"
        "from ajet_sdk.tokens.jinja import compile_template, render\n"
        "from datetime import datetime\n"
        "from tests.bench._memory import peak_megabytes\n"
        "variables = {'messages': [], 'strftime_now': datetime(2026, 1, 1).strftime}\n"
        "for name, source in json.load(sys.stdin).items():\n"
        "    try:\n"
        "        render(compile_template(source), variables)\n"
        "        print('RENDERED', name)\n"
        "    except ConfigError: pass\n"
        "print(round(peak_megabytes()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(GREEDY),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0].isdigit() and int(done.stdout) < 1_000, done.stdout


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, tiny_model: Path) -> None:
    """And nobody is asked whether it may; with the key it is run."""
    place, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model, place)
    config = json.loads((place / "config.json").read_text())
    code = f"open({str(ran)!r}, 'w').close()\nraise ImportError('it was run')\n"
    (place / "modeling_own.py").write_text(code)
    names = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    (place / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": names})
    )
    with pytest.raises(ConfigError, match=r"which is not run.*trust_remote_code: true"):
        load_model(place)
    HFTokenizer(str(place))  # its own class is one of transformers
    assert not ran.exists()
    with pytest.raises(ConfigError, match="it was run"):
        load_model(place, trust_remote_code=True)
    assert ran.exists()


def test_whatever_loads_a_checkpoint_says_whether_its_code_may_run() -> None:
    """Else transformers asks on the terminal."""
    for file in (
        path for package in ("ajet_sdk", "ajet_tools") for path in (ROOT / package).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"Auto\w+\.from_pretrained", ast.unparse(node.func)
            ):
                assert "trust_remote_code" in {keyword.arg for keyword in node.keywords}, (
                    file,
                    node.lineno,
                )


def test_what_templates_do_is_not_stopped() -> None:
    source = (
        "{% macro one(m, n) %}{{ '%-10s' % m.role }}{{ '{:>8}'.format(n) }}{% endmacro %}{% set ns"
        " = namespace(s='', n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.s ="
        " ns.s ~ one(m, ns.n) ~ m.content.replace('a', 'bb') ~ ('-' * 20) %}{% if not loop.last"
        " %}{% set ns.s = ns.s + loop.nextitem.role %}{% endif %}{% endfor %}{{ ns.s | indent(4) |"
        " center(30) }}{{ messages | map(attribute='role') | join(', ') }}{{ 7 % 3 }}{{ 2 * 3 }}{%"
        " for k, v in (messages | first).items() recursive %}{{ k }}{{ loop.length }}{% endfor %}{%"
        " set block %}{{ messages | tojson(indent=2) }}{% endset %}{{ block }}"
    )
    messages = [{"role": "user", "content": "banana"}, {"role": "assistant", "content": "a"}] * 200
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    assert ChatTemplate(source, {}).render(messages) == plain.from_string(source).render(
        messages=messages
    )
