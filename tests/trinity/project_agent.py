"""The agent of the projects that the suite trains: what a question begins with says how it goes
about it."""

import asyncio
import base64
import io
import itertools
import random
from pathlib import Path

import ajet

_turns = itertools.count()


@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    kind = question.partition(" ")[0]
    if kind == "broken":
        raise RuntimeError("this agent is broken")
    if kind == "slow":
        await asyncio.sleep(4)
    said = [{"role": "user", "content": question}]
    first = await model.chat(said)
    text = first["content"] or ""
    if kind == "late":
        while not Path(question.split()[1]).exists():
            await asyncio.sleep(0.1)
    if kind == "half" and next(_turns) % 2:
        raise RuntimeError("every other attempt breaks")
    if kind == "turns":
        for _ in range(2):
            said += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
            text = (await model.chat(said))["content"] or ""
    if kind == "fork":
        for way in ("left", "right"):
            branch = [
                *said,
                {"role": "assistant", "content": text},
                {"role": "user", "content": way},
            ]
            await model.chat(branch)
        await model.chat([{"role": "user", "content": "Something else."}])
    if kind == "team":
        critic = model.agent("critic")
        opinion = await critic.chat([{"role": "user", "content": f"Is this good? {text}"}])
        said += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": opinion["content"] or "-"},
        ]
        text = (await model.chat(said))["content"] or ""
    return text


@ajet.workflow
async def look(question: str, model: ajet.Model) -> str:
    """Two turns with a new picture in each, of a seed that the question has."""
    from PIL import Image

    draw = random.Random(question)
    said: list[dict[str, object]] = []
    text = ""
    for _ in range(2):
        pixels = Image.frombytes("RGB", (64, 64), draw.randbytes(64 * 64 * 3))
        file = io.BytesIO()
        pixels.save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        said.append({"role": "user", "content": [part, {"type": "text", "text": question}]})
        reply = await model.chat(said)
        text = reply["content"] or ""
        said.append({"role": "assistant", "content": text})
    return text


@ajet.judge
def length(output: str) -> float:
    """Something in which attempts of an untrained model differ."""
    return len(output) / 10
