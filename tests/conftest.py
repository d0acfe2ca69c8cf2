"""Settings for every test: one thread for torch, no network, hypothesis profiles."""

import atexit
import gc
import os
import signal
import ssl
from collections.abc import Generator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

# httpx gives up after five seconds unless it is told otherwise: on a busy machine a test would fail
# for that alone
for _phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _phase, None)

# each HTTP client reads the system's certificates: 40 ms of processor time, and no test leaves this
# machine
for _reads in ("load_default_certs", "load_verify_locations"):
    setattr(ssl.SSLContext, _reads, lambda *_, **__: None)

# a shell starts what runs in the background with Ctrl-C ignored, and commands that tests start
# would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", max_examples=25, deadline=None, suppress_health_check=_quiet)
settings.register_profile(
    "thorough", max_examples=10_000, deadline=None, suppress_health_check=_quiet
)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of minutes start first; ten thousand examples of a law may take longer than any other
    test."""
    items.sort(key=_time_limit, reverse=True)
    if settings.get_current_profile_name() == "thorough":
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


def _time_limit(item: pytest.Item) -> float:
    """Seconds that a test is given, where it needs more than the others."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None else 0.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector looks neither at what is being imported nor, afterwards, at the
    libraries and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # of 700 it takes a twelfth of the suite's time
        gc.enable()
        atexit.register(gc.unfreeze)  # and no earlier: pytest collects five times when it ends


@pytest.fixture
def audited(tmp_path: Path) -> Generator[None]:
    """After a test, `ajet trace check --deep` of each trace that it left below `tmp_path` finds
    nothing."""
    yield
    from ajet_tools.trace.files.audit import audit
    from ajet_tools.trace.files.check import check

    for file in sorted(tmp_path.rglob("trace.duckdb")):
        assert audit(file.parent).differs == (), file
        assert not check(file.parent), file
