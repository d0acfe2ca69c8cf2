"""What a call costs as its conversation grows: an episode of 300 turns over HTTP, with a sampler
that costs nothing.

Each turn is a tool's result of some 90 tokens, answered by a call of the tool. A call is measured
in processor time of this process without the client's thread, which writes its requests as an agent
does. Whatever is proportional to the whole prompt makes the last turns dearer than the first.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.recipe import CHAT_TEMPLATE
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.writer import TraceWriter
from tests.bench import Figure
from tests.bench._lake import TOOLS

TURNS, COMPARED, EPISODES = 300, 50, 3
SHORT, LONG = 1_000, 32_000
TEXT = "the tool has found a file of the project and reads its next lines as they are"


def main() -> list[Figure]:
    takes, lengths = measured(EPISODES, TURNS)
    first = statistics.median(takes[:COMPARED])
    last = statistics.median(takes[-COMPARED:])
    short, long = at_length(takes, lengths, SHORT), at_length(takes, lengths, LONG)
    return [
        Figure(f"tokens of the prompt of turn {TURNS}", lengths[-1], ""),
        Figure(f"a call, median of the first {COMPARED} turns", first * 1000, "processor ms"),
        Figure(f"the last {COMPARED} of {TURNS} turns", last * 1000, "processor ms"),
        Figure("last over first", last / first, "x", "<= 2", last <= 2 * first),
        Figure(f"a call at {LONG:,} tokens over one at {SHORT:,}", long / short, "x", "<= 2", long <= 2 * short),
    ]  # fmt: skip


class FreeSampler:
    """Answers every prompt with the same tokens."""

    model = "free"
    max_model_len = 1 << 20
    takes_pictures = False

    def __init__(self, reply: list[int]) -> None:
        self._sampled = Sampled(reply, [-0.5] * len(reply), "stop", 0)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        return [self._sampled]

    def forget(self, session: str) -> None: ...

    async def aclose(self) -> None: ...


def tokenizer() -> HFTokenizer:
    """Byte-level BPE with some four characters a token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2_000,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (Path(__file__).parents[2] / "docs").glob("*.md")
    inner.train([str(path) for path in sorted(texts)], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    whole.chat_template = CHAT_TEMPLATE
    return HFTokenizer(whole)


def measured(episodes: int, turns: int) -> tuple[list[float], list[int]]:
    """Processor seconds of each turn, the least of several episodes, and the prompt's length."""
    tok = tokenizer()
    call = '<tool_call>\n{"name": "move", "arguments": {"direction": "down"}}\n</tool_call>'
    engine = TokenEngine(FreeSampler(tok.encode(f"{call}<|im_end|>")), tok)
    takes: list[list[float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        TraceWriter(Path(folder) / "t.duckdb") as writer,
        Gateway(writer) as gateway,
    ):
        for number in range(-1, episodes):
            episode = gateway.open(EpisodeSpec(f"episode{number}", engine))
            taken = _played(episode, writer, 20 if number < 0 else turns)
            if number >= 0:
                takes.append(taken)
                lengths = [len(c.prompt_ids) for c in episode.calls if c.prompt_ids is not None]
                assert len(lengths) == turns
            engine.forget(episode.episode_id)
    return [min(of_turn) for of_turn in zip(*takes, strict=True)], lengths


def _played(episode: OpenEpisode, writer: TraceWriter, turns: int) -> list[float]:
    takes: list[float] = []
    thread = threading.Thread(target=_play, args=(episode, writer, turns, takes))
    thread.start()
    thread.join()
    return takes


def _play(episode: OpenEpisode, writer: TraceWriter, turns: int, takes: list[float]) -> None:
    url = urlsplit(f"{episode.model().base_url}/chat/completions")
    client = http.client.HTTPConnection(url.netloc)
    headers = {"authorization": f"Bearer {episode.handle_key}", "content-type": "application/json"}
    messages: list[Any] = [
        {"role": "system", "content": "Find the file."},
        {"role": "user", "content": "Which one is it?"},
    ]
    for turn in range(turns):
        began, own = time.process_time(), time.thread_time()
        body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
        client.request("POST", url.path, body, headers)
        reply = json.loads(client.getresponse().read())
        takes.append(time.process_time() - began - (time.thread_time() - own))
        writer.flush()  # what it writes is the new part alone, and would strike any turn
        message = reply["choices"][0]["message"]
        words = TEXT.split()
        text = " ".join(words[(turn + n * n) % len(words)] for n in range(60))
        called = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": called, "content": f"{turn} {text}"}]
    client.close()


def at_length(takes: list[float], lengths: list[int], length: int) -> float:
    """The median of the calls whose prompts have about so many tokens."""
    near = sorted(range(len(takes)), key=lambda turn: abs(lengths[turn] - length))[:10]
    return statistics.median(takes[turn] for turn in near)


if __name__ == "__main__":
    print(main())
