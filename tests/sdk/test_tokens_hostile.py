"""Chat templates that come with a checkpoint and are after the machine: each is stopped, soon and
with one message."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import jinja2.sandbox
import pytest

from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.errors import ConfigError, RequestRefused
from ajet_sdk.tokens import jinja
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.tokens.template import ChatTemplate

ROOT = Path(__file__).parents[2]
# ruff: noqa: E501
HOSTILE = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "large range": "{% for i in range(1000000000) %}x{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "product": "{{ 'x' * 10000000000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling blocks": "{% set s = 'x' %}{% macro d(s, n) %}{% if n %}{{ d(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ d('x', 60) }}",
    "replace": "{% set s = 'x' * 100000 %}{{ s | replace('x', s) }}",
    "join method": "{% set s = 'x' * 100000 %}{{ s.join(s | list) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "format method": "{{ '{:>10000000000}'.format('x') }}",
    "tojson": "{{ [[1]] | tojson(indent=10000000000) }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "lists of itself as JSON": "{% set ns=namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l=[ns.l,ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep ifs": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "deep loops": "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "sandbox": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    "many characters": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
}  # fmt: skip
CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_hostile_template_is_stopped(
    source: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later: in the third message, behind all probes of a template's properties."""
    monkeypatch.setattr(jinja, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(jinja, "PROBE_MEMORY", 128 << 20)
    with pytest.raises((ConfigError, RequestRefused)) as raised:
        template = ChatTemplate(
            f"{{% if messages | length > 4 %}}{source}{{% endif %}}{CHATML}" if later else source,
            {},
        )
        template.render([{"role": "user", "content": "hi"}] * 5)
    assert "chat template" in str(raised.value)


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
