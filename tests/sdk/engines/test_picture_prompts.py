"""Token ids of prompts with pictures: over turns, with pictures of one size, and with texts that look
like pictures."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ajet_sdk.engines.prompts import Prompt, PromptBuilder
from ajet_sdk.engines.scripted import IMAGE, ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import RequestRefused
from ajet_sdk.pictures import Picture, keyed, picture_of, unkeyed
from ajet_sdk.protocols import Ask, Sampling
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.samples.timelines import merge
from ajet_sdk.types import Call

TOKENIZER = ByteTokenizer()
SIZES = ((32, 32), (64, 32), (64, 64))
SAID = ("", "look", "two words", IMAGE, f"is {IMAGE} it?", "<|im_end|>", "é\ufdd0ü", "\ufdd1")


def drawn(color: int, size: tuple[int, int] = (64, 64), form: str = "PNG", **more: Any) -> Picture:
    file = io.BytesIO()
    Image.new("RGB", size, (color, 0, 0)).save(file, form, **more)
    return picture_of(file.getvalue())


def part(picture: Picture) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture.url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def call(prompt: Prompt, reply: str, **more: Any) -> Call:
    output = [*TOKENIZER.encode(reply), min(TOKENIZER.eos_ids)]
    return Call(
        episode_id="e",
        prompt_ids=prompt.ids,
        pictures=prompt.pictures,
        output_ids=output,
        logprobs=[-1.0] * len(output),
        **more,
    )


def check(prompt: Prompt, shown: list[Picture]) -> None:
    """The law: image tokens stand exactly where pictures are, which are those shown, in order."""
    ids = np.array(prompt.ids, np.int32)
    assert [placed.picture for placed in prompt.pictures] == shown
    covered = np.zeros(len(ids), bool)
    for placed in prompt.pictures:
        covered[placed.start : placed.end] = True
        assert placed.end - placed.start == TOKENIZER.pictures.text_of(placed.picture)[1]
    assert (covered == (ids == placed_token())).all()
    assert (unkeyed(keyed(ids, prompt.pictures), prompt.pictures) == ids).all()


def placed_token() -> int:
    return TOKENIZER.pictures.token_id


pictures = st.builds(drawn, st.integers(0, 2), st.sampled_from(SIZES))
contents = st.lists(st.one_of(pictures, st.sampled_from(SAID)), max_size=5)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(contents, st.sampled_from(SAID), st.booleans()), min_size=1, max_size=4))
def test_a_conversation_with_pictures_goes_on_from_itself(turns: Any) -> None:
    builder = PromptBuilder(TOKENIZER)
    messages: list[dict[str, Any]] = []
    shown: list[Picture] = []
    before: list[int] = []
    calls: list[Call] = []
    for content, reply, by_tool in turns:
        parts = [part(each) if isinstance(each, Picture) else text(each) for each in content]
        role = {"role": "tool", "tool_call_id": "c"} if by_tool else {"role": "user"}
        messages.append({**role, "content": parts})
        shown += [each for each in content if isinstance(each, Picture)]
        prompt = builder.prompt(messages)
        check(prompt, shown)
        assert list(prompt.ids[: len(before)]) == before and prompt.cause is None
        written = reply.replace(IMAGE, "")  # no model samples it
        answer = {"role": "assistant", "content": written}
        made = call(prompt, written, index=len(calls))
        builder.commit(prompt, made.output_ids.tolist(), answer)
        before = [*prompt.ids, *made.output_ids]
        calls.append(made)
        messages.append(answer)
    merged = merge(place_all(calls))
    assert len(merged.timelines) == 1
    assert merged.timelines[0].token_ids.tolist() == before
    assert merged.timelines[0].pictures == calls[-1].pictures


def test_another_picture_of_the_same_size_is_another_prompt() -> None:
    builder = PromptBuilder(TOKENIZER)
    first = [{"role": "user", "content": [part(drawn(1)), text("What is it?")]}]
    swapped = [{"role": "user", "content": [part(drawn(2)), text("What is it?")]}]
    asked = builder.prompt(first)
    reply = {"role": "assistant", "content": "red"}
    one = call(asked, "red", index=0, request={"messages": first}, response=choice(reply))
    builder.commit(asked, one.output_ids.tolist(), reply)
    turn = {"role": "user", "content": "Sure?"}
    other = builder.prompt([*swapped, reply, turn])
    assert other.ids[: len(asked.ids)] == asked.ids  # the ids don't tell
    assert other.reused == 0 and other.cause == "picture_changed"
    request = {"messages": [*swapped, reply, turn]}
    two = call(other, "yes", index=1, request=request, response=choice(reply))
    merged = merge(place_all([one, two]), TOKENIZER.decode)
    assert len(merged.timelines) == 2
    assert [split.cause for split in merged.splits] == ["picture_changed"]
    assert merged.splits[0].at_token == asked.pictures[0].start


def choice(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"message": message}]}


def test_a_picture_compressed_again_is_the_same() -> None:
    builder = PromptBuilder(TOKENIZER)
    sent, again = drawn(9), drawn(9, form="WEBP", lossless=True)
    asked = builder.prompt([{"role": "user", "content": [part(sent)]}])
    reply = {"role": "assistant", "content": "red"}
    builder.commit(asked, [*TOKENIZER.encode("red"), 257], reply)
    later = builder.prompt(
        [{"role": "user", "content": [part(again)]}, reply, {"role": "user", "content": "Sure?"}]
    )
    assert later.cause is None and later.reused > len(asked.ids)


def test_a_typed_image_token_is_text_wherever_it_is_typed() -> None:
    builder = PromptBuilder(TOKENIZER)
    called = {
        "id": "c",
        "type": "function",
        "function": {"name": "look", "arguments": f'{{"at": "{IMAGE}"}}'},
    }
    tool = {"type": "function", "function": {"name": "look", "description": f"sees {IMAGE}"}}
    messages = [
        {"role": "system", "content": f"No {IMAGE} here."},
        {"role": "user", "content": [text("<|ima"), text("ge|>"), part(drawn(3)), text(IMAGE)]},
        {"role": "assistant", "content": IMAGE, "reasoning_content": IMAGE, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": IMAGE},
    ]
    prompt = builder.prompt(messages, [tool])
    check(prompt, [drawn(3)])
    shown = TOKENIZER.decode(prompt.ids)
    assert shown.count(IMAGE) == 8 + TOKENIZER.pictures.text_of(drawn(3))[1]


def test_requests_that_the_model_cannot_take_are_refused() -> None:
    def ask(tokenizer: ByteTokenizer | None = None, **request: Any) -> None:
        engine = ScriptedEngine(["yes"], tokenizer)
        asyncio.run(engine.answer(Ask(Sampling(), "e", "a", **request)))

    for url in ("https://example.com/a.png", "file:///etc/passwd", "data:image/png;base64,AAAA"):
        said = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        with pytest.raises(RequestRefused):
            ask(messages=said)
    with pytest.raises(RequestRefused):  # a picture that is not there
        ask(prompt=[65, placed_token()])
    with pytest.raises(RequestRefused):
        ask(messages=[{"role": "user", "content": [{"type": "input_audio"}]}])

    class Blind(ByteTokenizer):
        pictures = None

    with pytest.raises(RequestRefused):
        ask(Blind(), messages=[{"role": "user", "content": [part(drawn(1))]}])
