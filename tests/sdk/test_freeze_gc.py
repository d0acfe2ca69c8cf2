"""What was there before a run is no concern of garbage collection during it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ajet_sdk.backbones.shared.garbage import FROZEN, freeze_gc


class Node:
    """Part of a circle, which only a collection frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def thawed() -> Iterator[None]:
    """`conftest.py` has frozen what the tests import."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("thawed")
def test_what_was_there_is_left_out_of_collections_and_what_is_new_is_not() -> None:
    old = Node()
    seen = weakref.ref(old)
    with freeze_gc():
        del old
        new = weakref.ref(Node())
        gc.collect()
        assert seen() is not None
        assert new() is None
    gc.collect()
    assert seen() is None


@pytest.mark.slow
@pytest.mark.usefixtures("thawed")
def test_a_run_that_fails_gives_everything_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError), freeze_gc():
        assert gc.get_threshold()[0] > before[0]
        raise ValueError
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_a_program_without_collections_gets_none() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with freeze_gc():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_what_a_program_has_frozen_itself_stays_frozen() -> None:
    gc.freeze()
    with freeze_gc():
        pass
    assert gc.get_freeze_count() > FROZEN  # a few are freed meanwhile, frozen or not
