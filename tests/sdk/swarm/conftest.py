"""A swarm server for the tests of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sdk.swarm.scripted_server import ScriptedSwarm


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedSwarm]:
    with ScriptedSwarm(tmp_path) as server:
        yield server


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[ScriptedSwarm]:
    """A server whose step takes as many attempts as a test makes."""
    with ScriptedSwarm(tmp_path, groups=50) as server:
        yield server
