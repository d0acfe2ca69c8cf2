"""A small file is there whole, or as it was before: on a full disk too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ajet_sdk.whole_file import write_whole

NO_ROOM = """
import resource, sys
from pathlib import Path
from ajet_sdk.trace.owner import announce
from ajet_sdk.whole_file import write_whole

resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
for attempt in (lambda: write_whole(Path(sys.argv[1]), "new" * 100), lambda: announce(Path(sys.argv[2]), writes=True)):
    try:
        attempt()
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.slow
def test_without_room_the_old_file_stays_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("old")
    command = [sys.executable, "-c", NO_ROOM, str(file), str(tmp_path / "trace.duckdb")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large", "File too large"]
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("private", [False, True])
def test_it_takes_the_place_of_what_was_there(tmp_path: Path, private: bool) -> None:
    file = tmp_path / "file.json"
    for content in ("first and longer", "zweite: ü", b"\xff"):
        write_whole(file, content, private=private)
        assert file.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [file]
    assert not private or file.stat().st_mode & 0o777 == 0o600
