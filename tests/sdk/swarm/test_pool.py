"""Laws of the pool: what is ended is trained once, groups are of one task, shares add up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.swarm.messages import StopRule
from ajet_sdk.swarm.pool import AttemptGroup, Goal, Pool
from ajet_sdk.types import Episode, Reward, Task, new_id

Deed = tuple[str, str, float]
deeds = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "end", "end", "lose", "take", "unknown"]),
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from([0.0, 1.0]),
    ),
    max_size=80,
)
rules: list[StopRule] = ["groups", "episodes", "signal", "any_client"]


def ended(episode_id: str, task: str, number: int, reward: float) -> Episode:
    return Episode(
        episode_id=episode_id,
        task=Task(task_id=task),
        attempt=number,
        rewards=(Reward(value=reward),),
    )


@settings(max_examples=200, deadline=None)
@given(deeds, st.sampled_from(rules), st.booleans())
def test_what_ended_is_taken_once_and_in_a_group_of_its_task(
    done: list[Deed], rule: StopRule, partial: bool
) -> None:
    pool = Pool(Goal(rule, groups=2, attempts=2))
    pool.begin()
    open_: dict[str, tuple[AttemptGroup, str, bool]] = {}
    finished: set[str] = set()
    taken: list[str] = []
    for deed, task, reward in done:
        if deed in ("claim", "unknown"):
            unknown = deed == "unknown"
            group = pool.begin_unknown() if unknown else pool.find_place(task)
            if group is None:
                assert unknown or not pool.has_room(task)
                continue
            episode_id = new_id()
            pool.open(group, episode_id)
            open_[episode_id] = (group, task, unknown)
        elif deed in ("end", "lose") and open_:
            episode_id = sorted(open_)[0]
            group, of, unknown = open_.pop(episode_id)
            group = next(g for g in pool.groups if episode_id in g.open)
            if deed == "lose":
                pool.free(group, episode_id)
                continue
            if unknown:
                group = pool.adopt(group, of)
            pool.end(group, ended(episode_id, of, group.open[episode_id], reward))
            finished.add(episode_id)
        elif deed == "take":
            for group in pool.take(partial=partial):
                taken += [episode.episode_id for episode in group.ended]
                assert {episode.task.task_id for episode in group.ended} == {group.task_id}
                assert len(group.ended) <= group.size
                numbers = [episode.attempt for episode in group.ended]
                assert numbers == sorted(set(numbers))
                assert partial or len(numbers) == group.size
        there = [e for g in pool.groups for e in g.open]
        assert sorted(there) == sorted(open_)
    for group in pool.take(partial=True):
        taken += [episode.episode_id for episode in group.ended]
    assert sorted(taken) == sorted(finished)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from("xyz"), st.floats(0.01, 10), min_size=1),
    st.integers(1, 9),
    st.integers(1, 30),
)
def test_shares_of_kinds_hold_over_the_steps(
    shares: dict[str, float], groups: int, steps: int
) -> None:
    pool = Pool(Goal("groups", groups, 1, shares))
    given_: Counter[str] = Counter()
    for _ in range(steps):
        pool.begin()
        assert sum(pool.quotas.values()) == groups
        given_.update(pool.quotas)
    for kind, share in shares.items():
        wanted = steps * groups * share / sum(shares.values())
        assert abs(given_[kind] - wanted) < len(shares)


def test_a_kind_that_has_its_share_waits(tmp_path: object) -> None:
    pool = Pool(Goal("groups", 4, 1, {"math": 0.75, "code": 0.25}))
    pool.begin()
    assert pool.quotas == {"math": 3, "code": 1}
    for number, kind in enumerate(["math", "code", "code", "math", "math", "math", "poem"]):
        group = pool.find_place(f"{kind}{number}", kind)
        if group is not None:
            episode_id = new_id()
            pool.open(group, episode_id)
            pool.end(group, ended(episode_id, group.task_id, 0, 1.0))
    assert Counter(group.kind for group in pool.groups) == {"math": 3, "code": 1}
    assert pool.is_enough()


def test_shares_move_over_the_run() -> None:
    pool = Pool(Goal("groups", 10, 1, {"easy": (1.0, 0.0), "hard": (0.0, 1.0)}))
    seen = []
    for step in range(11):
        pool.begin(progress=step / 10)
        seen.append(pool.quotas["hard"])
    assert seen == list(range(11))


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_that_nobody_works_at_is_replaced(size: int) -> None:
    pool = Pool(Goal("groups", 1, size))
    pool.begin()
    group = pool.find_place("a")
    assert group is not None
    for _ in range(size):
        pool.open(group, new_id())
    assert pool.find_place("b") is None
    for episode_id in list(group.open)[:-1]:
        pool.end(group, ended(episode_id, "a", group.open[episode_id], 1.0))
    pool.free(group, next(iter(group.open)))
    assert pool.find_place("b") is not None, "the client of the last attempt is gone"


def test_the_servers_tasks_of_a_kind_are_found_behind_others() -> None:
    pool = Pool(Goal("groups", 2, 1, {"math": 1.0, "code": 1.0}))
    tasks = [Task(task_id=f"m{i}", metadata={"kind": "math"}) for i in range(3)]
    tasks.append(Task(task_id="c", metadata={"kind": "code"}))
    pool.begin(tasks)

    def kind_of(task: Task) -> str:
        return str(task.metadata["kind"])

    first = pool.find_own_place(kind_of)
    assert first is not None
    pool.open(first, new_id())
    second = pool.find_own_place(kind_of)
    assert second is not None
    assert [first.task_id, second.task_id] == ["m0", "c"]
