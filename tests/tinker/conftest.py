"""Without the SDK (`pip install "ajet[tinker]"`, Python 3.11 or later) these tests are left out."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["TINKER_API_KEY"] = "tml-tests"

if find_spec("tinker") is None:
    collect_ignore_glob = ["test_*"]
else:
    from tests.tinker.servers import Server
    from tests.tiny_models import VLLMS, save_tiny

    @pytest.fixture(scope="session")
    def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A model of random weights with a tokenizer and a chat template."""
        return save_tiny(tmp_path_factory.mktemp("models") / "tiny", VLLMS)

    @pytest.fixture(scope="module")
    def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        """A server of ours over `tiny`, for all tests of a module."""
        with Server(tiny, tmp_path_factory.mktemp("state")) as running:
            yield running

    @pytest.fixture(scope="module")
    def service(server: Server) -> Iterator[Any]:
        """The SDK's `ServiceClient` of that server."""
        client = server.client()
        yield client
        client.close("success").result()
