"""A Ray that is started and ended, or joined."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import psutil

from ajet_sdk.cluster.code import CodePackage
from ajet_sdk.cluster.ray import cluster
from ajet_sdk.errors import ConfigError, MissingExtra

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "OPENAI_API_KEY": "sk",
}

REPLIES = "def reply(ask):\n    return 'ok'\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "replies.py").write_text(REPLIES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "address", ["ray://127.0.0.1:10001", "somewhere", "http://127.0.0.1:6379", "host:port"]
)
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="takes the HOST:PORT"), cluster(address):
        pass


def test_a_cluster_that_is_not_there_is_told_in_seconds() -> None:
    started, report = time.monotonic(), r"no Ray cluster answers at 127\.0\.0\.1:9.*--with-ray"
    with pytest.raises(ConfigError, match=report), cluster("127.0.0.1:9"):
        pass
    assert time.monotonic() - started < 10


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r'pip install "ajet\[ray\]"'), cluster("local"):
        pass


def test_a_ray_of_our_own_carries_code_to_a_subprocess_and_ends(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-carried")
    monkeypatch.setenv("NOT_CARRIED", "1")
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    code = (
        "import ray; ray.init(logging_level='ERROR')\n"
        "@ray.remote\n"
        "def there():\n"
        "    import replies, os\n"
        "    return [replies.__file__, os.environ.get('OPENAI_API_KEY')]\n"
        "print(*ray.get(there.remote()))"
    )
    with cluster("local", package=CodePackage((project,), (project,)), num_cpus=1) as joined:
        assert joined.started
        assert [node.cpus for node in joined.nodes()] == [1]
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd="/",
            env={**ENVIRONMENT, **joined.environment()},
            capture_output=True,
            text=True,
            timeout=300,
        )
        ours = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert done.returncode == 0, done.stderr
    file, key = done.stdout.split()
    assert not Path(file).is_relative_to(project)
    assert key == "sk-carried"
    assert ours
    assert psutil.wait_procs(ours, timeout=300)[1] == []
