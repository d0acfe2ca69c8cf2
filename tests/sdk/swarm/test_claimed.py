"""What a server remembers of claimed episodes over a kill."""

from __future__ import annotations

from pathlib import Path

from ajet_sdk.swarm.claimed import ClaimedEpisodes
from ajet_sdk.types import Episode, Task


def test_episodes_come_back_with_their_clients_and_tasks_and_each_task_is_stored_once(
    tmp_path: Path,
) -> None:
    picture = "data:image/png;base64," + "A" * 10_000
    task = Task(task_id="t", main_query="what\u2028is it?", metadata={"image": picture})
    episodes = [
        Episode(episode_id=f"e{n}", run_id="r", task=task, client=f"client {n}", split="val")
        for n in range(20)
    ]
    file = ClaimedEpisodes(tmp_path / "claimed.jsonl")
    for episode in episodes:
        file.add(episode)
    size = (tmp_path / "claimed.jsonl").stat().st_size
    assert size < 2 * len(picture)
    with (tmp_path / "claimed.jsonl").open("a") as stream:
        stream.write('{"episode": {"episode_id": "cut')  # the kill came in the middle of it
    again = ClaimedEpisodes(tmp_path / "claimed.jsonl")
    assert again.read() == {e.episode_id: e for e in episodes}
    later = Episode(episode_id="later", run_id="r", task=task, client="ada")
    again.add(later)
    assert again.read() == {e.episode_id: e for e in [*episodes, later]}, "and all earlier ones"
    again.clear()
    assert again.read() == {}
