"""What the viewer remembers of its user."""

from __future__ import annotations

import pytest

from ajet_sdk.errors import ConfigError
from ajet_tools.tui.settings import Settings

pytestmark = pytest.mark.usefixtures("own_home")


def test_nothing_then_what_was_remembered() -> None:
    assert Settings.load() == Settings()
    kept = Settings(export_format="messages").with_filter("a=1").with_filter("b=字").with_filter("a=1").with_search("x")
    kept.save()
    assert Settings.load() == kept and kept.filters == ("b=字", "a=1"), "what is used again is the newest"


def test_history_is_bounded_and_nothing_is_no_entry() -> None:
    kept = Settings().with_filter("")
    for i in range(200):
        kept = kept.with_filter(str(i))
    assert len(kept.filters) == 50 and kept.filters[-1] == "199"


@pytest.mark.parametrize("content", ["{", "[]", '{"filters": "x"}', '{"filters": [1]}', '{"export_format": 3}', "\xff"])
def test_a_file_that_is_not_ours_is_named(content: str) -> None:
    file = Settings.file()
    file.parent.mkdir(parents=True)
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"view\.json"):
        Settings.load()
