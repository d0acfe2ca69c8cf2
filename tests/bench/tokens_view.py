"""The Tokens screen: a timeline of 20,000 tokens shown, scrolled, and jumped about in, in the real
app.

The tokenizer is a byte-level BPE made here from scratch and read from its file, the trace one that
`TraceWriter` wrote. Frames are those that the app really draws; Textual draws 60 a second at most.
The goals are judged in CPU time of this process, for the machine may be shared; the wall-clock
times are printed beside it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ajet_sdk.samples.prefixes import PrefixIndex
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Metric, Reward, Run, Task, Trained
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.tokens import TokensScreen
from ajet_tools.tui.widgets.token_text import TokenText
from tests.bench import Figure

TOKENS, TURNS, FRAMES, OPENINGS = 20_000, 20, 120, 5
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
SENTENCE = (
    "the agent reads a file, calls a tool and says “naïve café” 漢字 👍 in {json: [1, 2, 3]} before"
    " it ends\n"
)


def text(words: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(draw.choice(SENTENCE.split(" "), words).tolist())


def tokenizer(directory: Path) -> Any:
    """A byte-level BPE with a chat's two tags."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([text(2000, 0)], trainer)
    directory.mkdir(parents=True)
    made.save(str(directory / "tokenizer.json"))
    return made


def write(directory: Path) -> None:
    """One episode of a trained group: a conversation of TURNS turns in TOKENS tokens, with all that
    is recorded."""
    encode = tokenizer(directory / "model").encode
    config = {"ajet": {"model": {"path": str(directory / "model")}}}
    each = TOKENS // TURNS
    with TraceWriter(directory / "trace.duckdb") as writer:
        writer.put(
            Run(run_id="run", config=config),
            Metric(run_id="run", step=0, name="train/policy_version", value=3),
        )
        for attempt in range(4):
            name, prompt, asked, index = (
                f"e{attempt}",
                list[int](),
                list[dict[str, Any]](),
                PrefixIndex(),
            )
            for turn in range(TURNS):
                said = [text(each, 100 * attempt + 2 * turn + i) for i in range(2)]
                asked = [*asked, {"role": "user", "content": said[0]}]
                prompt = [*prompt, *encode(said[0]).ids[: each - each // 2]]
                output = encode(said[1]).ids[: each // 2]
                logprobs = (
                    -np.random.default_rng(turn).exponential(0.5, len(output)).astype(np.float32)
                )
                at = BEGAN + timedelta(seconds=turn)
                call = Call(
                    call_id=f"{name}-{turn}",
                    episode_id=name,
                    index=turn,
                    request={"messages": asked},
                    response={"choices": [{"message": {"role": "assistant", "content": said[1]}}]},
                    prompt_ids=prompt,
                    output_ids=output,
                    logprobs=logprobs,
                    policy_version=3,
                    started_at=at,
                    ended_at=at,
                )
                asked = [*asked, {"role": "assistant", "content": said[1]}]
                prompt = [*prompt, *output]
                ids = {"run_id": "run", "step": 1, "episode_id": name, "call_id": call.call_id}
                values = np.full(len(output), attempt - 1.5, np.float32)
                writer.put(
                    index.add(call), LedgerEntry(outcome="trained", tokens=len(output), **ids)
                )
                writer.put(
                    Trained(advantages=values, logprobs=logprobs * 1.01, entropy=-logprobs, **ids)
                )
            writer.put(
                Episode(
                    episode_id=name,
                    run_id="run",
                    group_id="g",
                    attempt=attempt,
                    step=1,
                    task=Task(task_id="t"),
                    rewards=(Reward(value=float(attempt)),),
                )
            )
        writer.put(Run(run_id="run", config=config, status="finished"))


class Watched(TraceApp):
    """The app, which says when it has drawn."""

    drew: asyncio.Event | None = None

    def _display(self, screen: Any, renderable: Any) -> None:
        super()._display(screen, renderable)
        if self.drew is not None:
            self.drew.set()

    async def frame(self) -> None:
        """Wait for the next frame."""
        self.drew = asyncio.Event()
        await self.drew.wait()


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def since(began: tuple[float, float]) -> tuple[float, float]:
    cpu, wall = clocks()
    return cpu - began[0], wall - began[1]


async def measure(directory: Path) -> dict[str, tuple[float, float]]:
    reader = open_trace(directory)
    app = Watched(reader, directory)
    found: dict[str, tuple[float, float]] = {}
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        times = []
        for opening in range(OPENINGS):
            if opening:
                await app.workers.wait_for_complete()
                app.pop_screen()
                await pilot.pause()
            began = clocks()
            app.open_tokens("e0")
            await drawn(app)
            times.append(since(began))
        found |= {
            "first": times[0],
            "typical": (statistics.median(cpu for cpu, _ in times), min(w for _, w in times)),
        }
        words = app.screen.query_one(TokenText)
        assert words.view is not None and abs(len(words.view) - TOKENS) < TURNS
        moves = {"line": partial(words.move_by_lines, 3), "page": partial(words.move_by_pages, 1)}
        for name, move in moves.items():
            words.move(0)
            await app.frame()
            began = clocks()
            for _ in range(FRAMES):
                move()
                await app.frame()
            found[name] = since(began)
        keys = []
        for key in ("m", "l", "x", "v", "v", "v", "v", "v", "v"):
            began = clocks()
            await pilot.press(key)
            keys.append(since(began))
        found["key"] = max(keys)
    return found


async def drawn(app: Watched) -> None:
    """Wait until the screen in front has drawn tokens."""
    while True:
        screen = app.screen
        if (
            isinstance(screen, TokensScreen)
            and screen.is_mounted
            and screen.query(TokenText)
            and screen.view is not None
        ):
            await app.frame()
            return
        await asyncio.sleep(0.005)


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory) / "run")
        found = asyncio.run(measure(Path(directory) / "run"))
    figures = []
    for name, key in (("the first time", "first"), (f"the median of {OPENINGS} times", "typical")):
        cpu, wall = (1e3 * seconds for seconds in found[key])
        figures.append(
            Figure(f"{TOKENS:,} tokens shown, {name}", cpu, "CPU-ms", "under 300", cpu < 300)
        )
        figures.append(
            Figure(
                "  by the clock" if key == "first" else "  the quickest by the clock", wall, "ms"
            )
        )
    for key in ("line", "page"):
        cpu, wall = (FRAMES / seconds for seconds in found[key])
        figures.append(
            Figure(f"scrolled by {key}", cpu, "frames per CPU-s", "30 or more", cpu >= 30)
        )
        figures.append(Figure("  by the clock", wall, "frames/s"))
    return [*figures, Figure("slowest jump or change of colours", 1e3 * found["key"][0], "CPU-ms")]
