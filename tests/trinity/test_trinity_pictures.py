"""Pictures with Trinity on a CPU: what its Tinker trainer sends, and a run of two steps."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import numpy as np
from tinker import types
from trinity.common.experience import Experience

from ajet_sdk.backbones.trinity.pictures import with_pictures
from ajet_sdk.backbones.trinity.workflow import to_experience
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import Episode
from tests.programs import running
from tests.tiny_vision import (
    conversation,
    image_part,
    picture,
    plain_pass,
    sample_of,
    save_tiny_vision,
    text_part,
)

from .experiments import Experiment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("qwen3_vl", tmp_path_factory.mktemp("seeing") / "model")


def test_the_trainer_sends_pictures_in_place_of_their_tokens(seeing: Path) -> None:
    tokenizer = HFTokenizer(seeing)
    sampler = LocalSampler(load_model(seeing), tokenizer, model_name="m", max_model_len=500)
    engine = TokenEngine(sampler, tokenizer)
    turns = [[image_part(picture(1)), text_part("up")], [text_part("or"), image_part(picture(2))]]

    async def run() -> Any:
        try:
            return await conversation(engine, *turns)
        finally:
            await engine.aclose()

    calls = asyncio.run(run())
    sample = sample_of(calls)
    episode = Episode(episode_id="e", calls=tuple(calls))
    made = to_experience(sample, episode, 0, tokenizer)
    (read,) = Experience.deserialize_many(Experience.serialize_many([made]))
    (datum,), (whole,), _ = with_pictures([read], logging.getLogger())
    ids = sample.timeline.token_ids.tolist()
    for given, length in ((datum.model_input, len(ids) - 1), (whole, len(ids))):
        assert given.length == length
        sent = [chunk for chunk in given.chunks if isinstance(chunk, types.ImageChunk)]
        assert [chunk.data for chunk in sent] == [picture(1).data, picture(2).data]
    shown = tokenizer.pictures
    assert shown is not None
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    assert shown.token_id not in targets
    at = np.flatnonzero(sample.timeline.loss_mask)
    np.testing.assert_array_equal(targets[at - 1], sample.timeline.token_ids[at])
    np.testing.assert_array_equal(
        np.flatnonzero(datum.loss_fn_inputs["weights"].to_numpy()), at - 1
    )


def test_a_run_learns_from_pictures(seeing: Path, tmp_path: Path) -> None:
    one = Experiment(
        tmp_path / "project",
        seeing,
        ["a", "b"],
        {"rollout": {"user_workflow": "agent.py->look"}},
    )
    one.start("--with-ray")
    try:
        assert one.wait() == 0, one.output()
    finally:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
    check_pictures_were_learned_from(one, seeing)


def test_a_swarm_learns_from_pictures_of_its_clients(seeing: Path, tmp_path: Path) -> None:
    one = Experiment(
        tmp_path / "project",
        seeing,
        ["a", "b"],
        {"rollout": {"user_workflow": "agent.py->look"}},
    )
    one.folder.mkdir()
    one.write()
    with running(one.folder) as start:
        server = start("swarm", "start", "job.yaml", "--port", "0")
        client = start("train", "job.yaml", "--swarm", server.url())
        assert client.wait_beside(server) == 0, client.output + server.output
        assert server.wait() == 0, server.output
    check_pictures_were_learned_from(one, seeing)


def check_pictures_were_learned_from(one: Experiment, seeing: Path) -> None:
    """Each call has its pictures, the server sampled as a plain pass does, and the trainer saw the
    same."""
    tokenizer, model = HFTokenizer(seeing), load_model(seeing)
    apart: dict[int, list[float]] = {}
    with open_trace(one.directory) as trace:
        calls = [call for episode in episodes(trace) for call in episode.calls]
    assert {len(call.pictures) for call in calls} == {1, 2}
    for call in calls:
        expected = plain_pass(model, tokenizer, call)[:, 0].numpy()
        assert call.policy_version is not None
        gap = float(np.abs(expected - call.logprobs).max())
        apart.setdefault(call.policy_version, []).append(gap)
    assert max(apart[0]) < 1e-5
    assert np.mean(apart[1]) > 1e-3, "the weights have changed"
    rows = one.query("SELECT step, value FROM metrics WHERE name = 'actor/ppo_kl'")
    assert {row["step"] for row in rows} == {1, 2}
    assert max(abs(row["value"]) for row in rows) < 1e-5, "the trainer sees the same pictures"
