"""Ids: never one twice, whatever the process, and whatever a program does with `random`."""

from __future__ import annotations

import os
import random
import re

from ajet_sdk.types import new_id


def test_ids_are_hexadecimal_and_a_programs_seed_does_not_repeat_them() -> None:
    ids = []
    for _ in range(2):
        random.seed(0)
        ids += [new_id() for _ in range(1000)]
    assert len(set(ids)) == 2000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_a_forked_process_has_ids_of_its_own() -> None:
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 32).decode() not in {new_id() for _ in range(10)}
