"""Files that are no YAML, JSON or pickle, or a malicious one, given to every command that reads
such a file."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_sdk.errors import AjetError
from ajet_tools.cli.app import app

pytestmark = pytest.mark.slow

FILES = {
    "empty": b"",
    "zeros": b"\0" * 64,
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "deep list": b"[" * 5000 + b"]" * 5000,
    "deep object": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "number": b"1",
    "text": b'"x"',
    "null": b"null",
    "list": b"[1, [2]]",
    "NaN": b'{"question": NaN, "answer": Infinity}',
    "1e400": b'{"a": 1e400}',
    "large integer": b'{"a": ' + b"9" * 5000 + b"}",
    "half a pair": b'{"question": "\\ud800"}',
    "cut off": b'{"a": ',
    "second line": b'{"a":1}\n[\n',
    "gzip cut off": gzip.compress(b'{"a":1}\n' * 100)[:-9],
    "alias of itself": b"a: &a [*a]\n",
    "no anchor": b"a: *x\n",
    "Python object": b'!!python/object/apply:os.system ["true"]\n',
    "billion laughs": b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (to, to, b",".join([b"*%c" % (to - 1)] * 8)) for to in b"bcdefgh"),
    "tabs": b"\ta:\n\t- b\n",
    "control": b"a: \x07\n",
    "date": b"a: 2024-99-99\n",
    "list as key": b"? [a]\n: b\n",
    "job of other types": b"ajet: {model: {path: {a: 1}}, rollout: 5, trainer_common: []}\n",
    "job is a list": b"ajet: [1]\n",
    "pickle": pickle.dumps({"a": 1}),
    "pickle that runs": b"cos\nsystem\n(S'touch ran'\ntR.",
    "records": b'{"tasks": {"a": [1]}, "records": [{"task": 1}]}',
    "messages": b'{"messages": [{"role": 5, "content": {"a": 1}}], "output": {}, "score": "nan"}',
}  # fmt: skip
COMMANDS = [
    "config check FILE.yaml", "judge eval judge.py:ok --labels FILE.jsonl",
    "judge eval --conf FILE.yaml --labels seeds.jsonl",
    "judge eval llm:FILE.yaml --labels seeds.jsonl", "judge attack judge.py:ok --tasks FILE.jsonl -n 1",
    "judge attack combined:FILE.yaml", "judge attack rubric:FILE.yaml",
    "run agent.py:solve --judge judge.py:ok --tasks FILE.jsonl --model replies.py:reply -n 1",
    "run agent.py:solve --judge judge.py:ok --tasks seeds.jsonl --model FOLDER",
    "dataset expand seeds.jsonl --cells topic=FILE.yaml --model replies.py:reply --dry-run --out o",
    "dataset check FILE.json",
    "trace import FILE.json --from openai --out t.duckdb", "trace check FILE.json", "tune-prompt --conf FILE.yaml",
]  # fmt: skip
IN_FOLDER = ("config.json", "tokenizer.json", "tokenizer_config.json", "trainer.pt", "run.json")


@pytest.mark.parametrize("name", FILES)
def test_each_ends_with_a_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text("import ajet\n@ajet.judge\ndef ok(output): return 1.0\n")
    Path("agent.py").write_text("import ajet\n@ajet.workflow\ndef solve(question): return 'x'\n")
    Path("replies.py").write_text("def reply(ask): return '[]'\n")
    Path("seeds.jsonl").write_text('{"question": "a?", "answer": "b", "output": "b", "score": 1}\n')
    Path("FOLDER").mkdir()
    for file in ("FILE.yaml", "FILE.json", "FILE.jsonl", *(f"FOLDER/{one}" for one in IN_FOLDER)):
        Path(file).write_bytes(FILES[name])
    before = set(sys.modules)
    for command in COMMANDS:
        raised = CliRunner().invoke(app, command.split(), input="").exception
        assert raised is None or isinstance(raised, SystemExit | AjetError), (
            f"{command}: {raised!r}"
        )
    for loaded in (set(sys.modules) - before) & {"agent", "judge", "replies"}:
        del sys.modules[loaded]  # another test imports its own by these names
    assert not Path("ran").exists()
