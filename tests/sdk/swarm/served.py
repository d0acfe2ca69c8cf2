"""A real swarm server over a scripted model: HTTP, gateway and trace, without a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk.backbones.shared.steps import samples_of
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.samples.build import balance
from ajet_sdk.swarm.agentjet.routes import agentjet_routes
from ajet_sdk.swarm.attempts import RunSettings
from ajet_sdk.swarm.collection import Collection
from ajet_sdk.swarm.host import SwarmHost
from ajet_sdk.swarm.messages import PREFIX
from ajet_sdk.swarm.routes import Keys, Owner, SwarmRoutes
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Json, Run, Task, new_id

SECRET = b"secret of the tests"


class Offline(Owner):
    """An owner whose server never starts a training."""

    async def configure(self, text: str) -> None:
        self.text = text

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Served:
    """A server, its trace, and the training loop's side of it."""

    def __init__(
        self, host: SwarmHost, writer: TraceWriter, collection: Collection, run_id: str
    ) -> None:
        self.host, self.writer, self.collection = host, writer, collection
        self.run_id = run_id
        self.version = 0
        self.url = host.gateway.url
        self.http = httpx.Client(base_url=self.url + PREFIX, timeout=30.0, trust_env=False)

    # The clients' side

    def post(self, path: str, key: str = "", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.http.post(path, json=body, headers=headers)

    def claim(self, task: Json | str | None = "t", **more: Any) -> httpx.Response:
        given = {"task_id": task, "main_query": f"task {task}"} if isinstance(task, str) else task
        body = {"request_id": new_id(), "client_id": "c", "task": given, "wait": 0.0, **more}
        return self.post("/episodes", body.pop("key", ""), **body)

    def claimed(self, task: Json | str | None = "t", **more: Any) -> Json:
        answer = self.claim(task, **more)
        assert answer.status_code == 201, answer.text
        value: Json = answer.json()
        return value

    def call(
        self, claimed: Json, text: str = "hello", timeout: Any = 30.0, **more: Any
    ) -> httpx.Response:
        """One call of the agent with the episode's key."""
        return httpx.post(
            f"{claimed['base_url']}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": text}], **more},
            headers={"authorization": f"Bearer {claimed['api_key']}"},
            timeout=timeout,
            trust_env=False,
        )

    def end(self, claimed: Json, reward: Any = 1.0, **more: Any) -> httpx.Response:
        path = f"/episodes/{claimed['episode_id']}/end"
        return self.post(path, claimed["end_key"], reward=reward, **more)

    def abort(self, claimed: Json, **body: Any) -> httpx.Response:
        return self.post(f"/episodes/{claimed['episode_id']}/abort", claimed["end_key"], **body)

    def receipt(self, claimed: Json) -> Json:
        path = f"/episodes/{claimed['episode_id']}"
        headers = {"authorization": f"Bearer {claimed['end_key']}"}
        value: Json = self.http.get(path, headers=headers).json()
        return value

    def attempt(self, task: str = "t", reward: float = 1.0, **more: Any) -> Json:
        """A whole attempt: claim, one call, end."""
        claimed = self.claimed(task, **more)
        assert self.call(claimed).status_code == 200
        assert self.end(claimed, reward).status_code == 200
        return claimed

    # The training loop's side

    def begin(self, step: int = 1, tasks: Sequence[Task] = ()) -> Future[list[Episode]]:
        """Begin to collect a step; the result is done when it has enough."""
        self.host.submit(self.collection.collect(step, tasks)).result(10)
        return self.host.submit(self.collection.gathered(lambda: None))

    def train(self, step: int, episodes: Sequence[Episode]) -> dict[str, int]:
        """Book a step as the training loop does; returns its tokens by outcome."""
        collection = self.collection
        batch = samples_of(
            collection.settings.config,
            episodes,
            collection.settings.engine.tokenizer,  # type: ignore[attr-defined]
            policy_version=self.version,
        )
        assert not balance(batch.ledger, [call for e in episodes for call in e.calls])
        self.writer.put(*batch.ledger)
        self.version += 1
        self.host.submit(collection.trained(step, batch.ledger)).result(10)
        tokens: dict[str, int] = {}
        for row in batch.ledger:
            tokens[row.outcome] = tokens.get(row.outcome, 0) + row.tokens
        return tokens

    def ledger(self) -> dict[str, int]:
        """Tokens by outcome in the whole ledger."""
        self.writer.flush()
        rows = self.writer.query("SELECT outcome, sum(tokens) AS n FROM ledger GROUP BY outcome")
        return {row["outcome"]: int(row["n"]) for row in rows.to_pylist()}

    def sampled(self) -> int:
        """Tokens sampled by the policy, as the calls say."""
        self.writer.flush()
        sql = """SELECT coalesce(sum(coalesce(len(output_ids), 0) + coalesce(cut_tokens, 0)), 0) AS n
                 FROM calls WHERE trainable AND phase = 'rollout'"""
        return int(self.writer.query(sql).to_pylist()[0]["n"])


@contextmanager
def serve(
    directory: Path,
    *settings: str,
    replies: Any = None,
    keys: Keys | None = None,
    train: Sequence[Task] = (),
    val: Sequence[Task] = (),
    given_out: Sequence[tuple[Task, str]] = (),
    run_id: str = "run",
) -> Iterator[Served]:
    """A server with two groups of two attempts a step, unless the settings say otherwise."""
    config = load_config(
        overrides=[
            "ajet.experiment_name=swarm",
            f"ajet.experiment_dir={directory}",
            "ajet.data.train_batch_size=2",
            "ajet.rollout.num_repeat=2",
            "ajet.swarm.grace=0",
            *settings,
        ]
    )
    engine = ScriptedEngine(
        replies or (lambda ask: "yes, it is"), logprob=lambda ids: [-0.5] * len(ids)
    )
    routes = SwarmRoutes(keys or Keys(), Offline())
    with (
        TraceWriter(directory / "trace.duckdb", survives="kill") as writer,
        Gateway(routes=[*routes.routes(), *agentjet_routes(routes)]) as gateway,
        gateway.recording(writer),
    ):
        writer.put(Run(run_id=run_id, backbone="local"))
        host = routes.host = SwarmHost(gateway)
        served: list[Served] = []

        async def open_collection() -> Collection:
            made = Collection(
                host.board,
                host.clients,
                RunSettings(
                    config=config,
                    run_id=run_id,
                    engine=engine,
                    writer=writer,
                    gateway=gateway,
                    policy_version=lambda: served[0].version,
                    training=SamplingOverride(temperature=1.0),
                    validation={
                        "sampled": SamplingOverride(temperature=1.0),
                        "greedy": SamplingOverride(greedy=True),
                    },
                    train_tasks=train,
                    val_tasks=val,
                    given_out=given_out,
                    secret=SECRET,
                    total=10,
                ),
            )
            host.collection = made
            gateway.recognize(made.attempts.episode_of)
            return made

        collection = host.submit(open_collection()).result(10)
        made = Served(host, writer, collection, run_id)
        served.append(made)
        try:
            yield made
        finally:
            host.submit(collection.close("the test is over")).result(20)
            asyncio.run(engine.aclose())
