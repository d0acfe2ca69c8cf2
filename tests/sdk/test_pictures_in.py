"""Pictures in requests, as the vendors' SDKs send them; limits, and links to the network."""

from __future__ import annotations

import asyncio
import base64
import pickle
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from ajet_sdk import pictures
from ajet_sdk.engines.scripted import ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import PictureError
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.gateway.pictures import fetch
from ajet_sdk.pictures import Picture, picture_at, picture_of
from tests.drawings import Seeing, drawn, file_of, part, png, text, url_of

Opener = Callable[..., OpenEpisode]


@pytest.fixture
def episode(gateway: Gateway) -> OpenEpisode:
    return gateway.open(EpisodeSpec("one", Seeing(), picture_hosts=("localhost",)))


def sent(episode: OpenEpisode) -> list[list[Picture]]:
    """The pictures of each message of the last call, as it was recorded."""
    messages = episode.calls[-1].request["messages"]
    return [
        [picture_at(p["image_url"]["url"]) for p in message["content"] if p["type"] == "image_url"]
        for message in messages
        if isinstance(message.get("content"), list)
    ]


A, B = png(1), png(2)
EXPECTED = [[picture_of(A), picture_of(B)], [picture_of(B), picture_of(A)]]


def by_chat(episode: OpenEpisode, stream: bool) -> None:
    called = {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": [text("Look."), part(A, detail="low"), part(B)]},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "t", "content": [part(B), text("and"), part(A)]},
    ]
    client = episode.model().openai()
    reply = client.chat.completions.create(model="m", messages=messages, stream=stream)
    list(reply)


def by_responses(episode: OpenEpisode, stream: bool) -> None:
    def image(data: bytes) -> dict[str, Any]:
        return {"type": "input_image", "image_url": url_of(data), "detail": "auto"}

    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}, image(A), image(B)]},
        {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": [image(B), image(A)]},
    ]
    list(episode.model().openai().responses.create(model="m", input=items, stream=stream))


def by_messages(episode: OpenEpisode, stream: bool) -> None:
    def image(data: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        return {"type": "image", "source": source}

    result = {"type": "tool_result", "tool_use_id": "t", "content": [image(B), image(A)]}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Look."}, image(A), image(B)]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
        },
        {"role": "user", "content": [result]},
    ]
    model = episode.model()
    base = str(model.base_url).removesuffix("/v1")
    client = anthropic.Anthropic(api_key=model.api_key, base_url=base, max_retries=0)
    reply = client.messages.create(model="m", messages=messages, max_tokens=9, stream=stream)
    list(reply)


def by_gemini(episode: OpenEpisode, stream: bool) -> None:
    model = episode.model()
    base = str(model.base_url).removesuffix("/v1")
    client = genai.Client(
        api_key=model.api_key, http_options=types.HttpOptions(base_url=base, api_version="v1beta")
    )
    call = types.FunctionCall(id="t", name="look", args={})
    blobs = [
        types.FunctionResponsePart(
            inline_data=types.FunctionResponseBlob(mime_type="image/png", data=data)
        )
        for data in (B, A)
    ]
    answered = types.FunctionResponse(id="t", name="look", response={"result": "9"}, parts=blobs)
    contents: Any = [
        types.Content(
            role="user",
            parts=[
                types.Part(text="Look."),
                types.Part.from_bytes(data=A, mime_type="image/png"),
                types.Part.from_bytes(data=B, mime_type="image/png"),
            ],
        ),
        types.Content(role="model", parts=[types.Part(function_call=call)]),
        types.Content(role="user", parts=[types.Part(function_response=answered)]),
    ]
    if stream:
        list(client.models.generate_content_stream(model="m", contents=contents))
    else:
        client.models.generate_content(model="m", contents=contents)


DIALECTS = [by_chat, by_responses, by_messages, by_gemini]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", DIALECTS)
def test_pictures_of_every_sdk_arrive_in_messages_and_results(
    episode: OpenEpisode, send: Callable[[OpenEpisode, bool], None], stream: bool
) -> None:
    send(episode, stream)
    assert sent(episode) == EXPECTED


def post(episode: OpenEpisode, body: dict[str, Any], route: str = "v1/chat/completions") -> Any:
    model = episode.model()
    base = str(model.base_url).removesuffix("/v1")
    headers = {"authorization": f"Bearer {model.api_key}", "x-goog-api-key": model.api_key}
    return httpx.post(f"{base}/{route}", json=body, headers=headers, timeout=300)


def asking(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}


def header_of(width: int, height: int) -> bytes:
    """A PNG file that has only the size of a picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'
REFUSED = {
    "bomb": url_of(header_of(60_000, 60_000)),
    "bomb within the limit of Pillow": url_of(header_of(8_000, 8_000)),
    "truncated": url_of(png(1, 64, 64)[:2000]),
    "corrupt": url_of(png(1)[:40] + b"corrupt" * 30),
    "empty": url_of(b""),
    "text": url_of(b"no picture"),
    "svg": url_of(SVG, "image/svg+xml"),
    "bmp": url_of(file_of(drawn(), "BMP"), "image/bmp"),
    "tiff": url_of(file_of(drawn(), "TIFF"), "image/tiff"),
    "pdf": url_of(file_of(drawn(), "PDF"), "application/pdf"),
    "not base64": "data:image/png;base64,€€€",
    "not encoded": "data:image/png,abc",
    "no data": "data:image/png;base64",
    "http": "http://example.org/a.png",
    "another host": "https://example.org/a.png",
    "loopback": "https://localhost/a.png",
    "file": "file:///etc/passwd",
    "ftp": "ftp://localhost/a.png",
    "path": "/etc/passwd",
    "reference": "ajet-picture:" + picture_of(A).digest,
    "nothing": "",
}


@pytest.mark.parametrize("url", REFUSED.values(), ids=REFUSED)
def test_what_is_no_picture_is_refused_before_the_policy_sees_it(
    episode: OpenEpisode, url: str
) -> None:
    refused = post(episode, asking(part(A), part(url)))
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "invalid_image"
    assert refused.json()["error"]["param"] == "messages"
    [call] = episode.calls
    assert call.error and call.output_ids is None
    assert episode.errors == []


ROUTES = {
    "chat": ("v1/chat/completions", asking(part(SVG))),
    "responses": (
        "v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": url_of(SVG)}],
                }
            ]
        },
    ),
    "messages": (
        "v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": "https://a.example/b"}}
                    ],
                }
            ],
        },
    ),
    "gemini": (
        "v1beta/models/m:generateContent",
        {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]}]},
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_refusal_has_the_form_of_its_dialect(episode: OpenEpisode, route: str) -> None:
    path, body = ROUTES[route]
    refused = post(episode, body, path)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert "picture 1 of 1" in error["message"]
    if route == "messages":
        assert refused.json()["type"] == "error" and error["type"] == "invalid_request_error"
    if route == "gemini":
        assert error["code"] == 400 and error["status"] == "INVALID_ARGUMENT"


def test_the_number_of_pictures_is_limited(
    episode: OpenEpisode, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert post(episode, asking(*[part(A)] * pictures.MAX_PICTURES)).status_code == 200
    refused = post(episode, asking(*[part(A)] * (pictures.MAX_PICTURES + 1)))
    assert refused.status_code == 400 and str(pictures.MAX_PICTURES) in refused.text


@pytest.mark.slow
def test_a_request_may_have_some_of_the_largest_pictures_but_no_text_of_their_size(
    episode: OpenEpisode,
) -> None:
    image = drawn(1, 2500, 2500)
    large = file_of(image, compress_level=0)
    assert 18_000_000 < len(large) < pictures.MAX_BYTES
    assert post(episode, asking(*[part(large)] * 3)).status_code == 200
    too_large = file_of(drawn(1, 2700, 2700), compress_level=0)
    assert len(too_large) > pictures.MAX_BYTES
    assert post(episode, asking(part(too_large))).status_code == 400
    assert post(episode, asking(text("x" * 20_000_000))).status_code == 413
    many = {"messages": [{"role": "user", "content": "x"}], "tools": [[0] * 9_000_000]}
    assert post(episode, many).status_code == 413


def test_a_conversation_of_many_pictures_is_decoded_once(episode: OpenEpisode) -> None:
    screenshots = [png(seed, 200, 200) for seed in range(40)]
    messages: list[dict[str, Any]] = []
    for data in screenshots:
        messages.append({"role": "user", "content": [part(data)]})
        assert post(episode, {"messages": messages}).status_code == 200
        messages.append({"role": "assistant", "content": "left"})
    started = time.process_time()
    for data in screenshots:
        picture_at(url_of(data))
    assert time.process_time() - started < 0.2
    assert len(sent(episode)) == 40


ENCODED = base64.b64encode(A).decode()
ACCEPTED = {
    "upper case": "DATA:IMAGE/PNG;BASE64," + ENCODED,
    "parameter": "data:image/png;charset=utf-8;base64," + ENCODED,
    "another type": "data:image/jpeg;base64," + ENCODED,
    "no subtype known": "data:application/octet-stream;base64," + ENCODED,
    "lines": "data:image/png;base64," + base64.encodebytes(A).decode(),
    "space": "data:image/png;base64, " + ENCODED,
    "url-safe": "data:image/png;base64," + base64.urlsafe_b64encode(A).decode(),
    "no padding": "data:image/png;base64," + ENCODED.rstrip("="),
    "percent signs": "data:image/png;base64,"
    + ENCODED.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
}


@pytest.mark.parametrize("url", ACCEPTED.values(), ids=ACCEPTED)
def test_spellings_of_data_urls(episode: OpenEpisode, url: str) -> None:
    assert post(episode, asking(part(url))).status_code == 200
    assert sent(episode) == [[picture_of(A)]]
    [message] = episode.calls[-1].request["messages"]
    assert message["content"][0]["image_url"]["url"] == url


# Links


async def _public(host: str) -> list[str]:
    return ["93.184.216.34"]


def served(**answers: httpx.Response) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.scheme == "https" and request.url.host == "93.184.216.34"
        assert request.extensions["sni_hostname"] == request.headers["host"].partition(":")[0]
        return answers[request.url.path.strip("/")]

    return httpx.MockTransport(answer)


HOSTS = ("pictures.example", "other.example")


def load(url: str, resolve: Any = _public, **answers: httpx.Response) -> str:
    return asyncio.run(fetch(url, HOSTS, resolve=resolve, transport=served(**answers)))


def test_a_link_to_an_allowed_host_is_loaded_at_its_address() -> None:
    picture = httpx.Response(200, content=A)
    assert load("https://pictures.example/a", a=picture) == url_of(A)
    assert load("https://PICTURES.example.:443/a?x=1", a=picture) == url_of(A)
    moved = httpx.Response(302, headers={"location": "https://other.example/a"})
    assert load("https://pictures.example/b", a=picture, b=moved) == url_of(A)


LOCATIONS = [
    "https://third.example/a",
    "http://pictures.example/a",
    "file:///etc/passwd",
    "/b",
    "//127.0.0.1/a",
    "https://user:password@pictures.example/a",
    "gopher://pictures.example/a",
]


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_redirect_must_be_allowed_too(location: str) -> None:
    moved = httpx.Response(302, headers={"location": location})
    with pytest.raises(PictureError):
        load("https://pictures.example/b", b=moved, a=httpx.Response(200, content=A))


PRIVATE = [
    "127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
    "::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "224.0.0.1", "ff02::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_a_host_with_a_private_address_is_not_asked(address: str) -> None:
    async def private(host: str) -> list[str]:
        return ["93.184.216.34", address]

    with pytest.raises(PictureError, match="not public"):
        load("https://pictures.example/a", private, a=httpx.Response(200, content=A))


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, content=b"<html>"),
        httpx.Response(404, content=A),
        httpx.Response(200, content=b"\0" * (pictures.MAX_BYTES + 1)),
    ],
    ids=["html", "missing", "too large"],
)
def test_what_is_loaded_must_be_a_picture(response: httpx.Response) -> None:
    with pytest.raises(PictureError):
        load("https://pictures.example/a", a=response)


def test_a_client_reads_the_refusal(episode: OpenEpisode) -> None:
    client = episode.model().openai()
    messages: Any = asking(part("https://example.org/a.png"))["messages"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=messages)
    assert refused.value.code == "invalid_image"
    assert "rollout.picture_hosts" in refused.value.message


# Files


def turned(orientation: int) -> bytes:
    image = drawn(1, 12, 7)
    exif = image.getexif()
    exif[0x0112] = orientation
    return file_of(image, "JPEG", exif=exif, quality=95)


def frames(kind: str) -> bytes:
    rest = [drawn(seed, 16, 16) for seed in range(2, 40)]
    return file_of(drawn(1, 16, 16), kind, save_all=True, append_images=rest, lossless=True)


FILES = {
    "one pixel": (png(1, 1, 1), (1, 1)),
    "wide": (png(1, 10_000, 1), (10_000, 1)),
    "high": (png(1, 1, 10_000), (1, 10_000)),
    "black": (file_of(drawn().point(lambda _: 0)), (8, 8)),
    "palette": (file_of(drawn(1, 64, 64).quantize(16)), (64, 64)),
    "grey": (file_of(drawn().convert("L")), (8, 8)),
    "two colours": (file_of(drawn().convert("1")), (8, 8)),
    "grey and alpha": (file_of(drawn().convert("LA")), (8, 8)),
    "alpha": (file_of(drawn().convert("RGBA")), (8, 8)),
    "alpha of a palette": (file_of(drawn().convert("P"), transparency=0), (8, 8)),
    "cmyk": (file_of(drawn().convert("CMYK"), "JPEG"), (8, 8)),
    "progressive": (file_of(drawn(1, 64, 64), "JPEG", progressive=True), (64, 64)),
    "webp": (file_of(drawn(), "WEBP"), (8, 8)),
    "gif": (file_of(drawn(), "GIF"), (8, 8)),
    "interlaced gif": (file_of(drawn(), "GIF", interlace=1), (8, 8)),
    "animated gif": (frames("GIF"), (16, 16)),
    "animated webp": (frames("WEBP"), (16, 16)),
    "animated png": (frames("PNG"), (16, 16)),
    "several jpegs": (frames("MPO"), (16, 16)),
    "turned": (turned(6), (7, 12)),
    "upside down": (turned(3), (12, 7)),
    "with another file behind": (png(1) + b"PK\x03\x04<script>alert(1)</script>", (8, 8)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_a_viewer_shows_it(name: str) -> None:
    data, size = FILES[name]
    picture = picture_of(data)
    assert (picture.width, picture.height) == size
    assert picture.image().size == size and picture.image().mode == "RGB"
    assert picture_at(picture.url) == picture and picture.data == data
    assert picture.url.startswith(f"data:{picture.media_type};base64,")


def test_of_an_animation_the_first_frame_counts() -> None:
    assert picture_of(frames("WEBP")) == picture_of(file_of(drawn(1, 16, 16)))
    assert picture_of(frames("PNG")) == picture_of(file_of(drawn(1, 16, 16)))


def test_pictures_are_told_by_size_and_pixels() -> None:
    black = [file_of(drawn(0, *size).point(lambda _: 0)) for size in ((8, 2), (2, 8), (4, 4))]
    assert len(set(map(picture_of, black))) == 3
    assert picture_of(png(1)) != picture_of(png(2))
    image = drawn(1, 32, 32)
    assert picture_of(file_of(image)) == picture_of(file_of(image, "WEBP", lossless=True))
    clear = image.convert("RGBA")
    clear.putalpha(0)
    assert picture_of(file_of(clear)) != picture_of(file_of(image))


def test_a_key_is_that_of_the_pixels_in_this_process() -> None:
    image = drawn(1, 32, 32)
    first, second = picture_of(file_of(image)), picture_of(file_of(image, compress_level=0))
    assert first.data != second.data and first.key == second.key < 0
    assert pickle.loads(pickle.dumps(first)).key == first.key
    assert len({picture_of(png(seed)).key for seed in range(1)} | {first.key}) == 2


@pytest.mark.parametrize("url", [url_of(A), url_of(b"broken"), "https://example.org/a.png"])
@pytest.mark.parametrize("route", ["chat/completions", "count"])
def test_a_model_of_texts_says_that_it_takes_no_pictures(
    gateway: Gateway, url: str, route: str
) -> None:
    """Whatever they are: the agent is to leave them out, not to mend them."""
    tokenizer = ByteTokenizer()
    tokenizer.pictures = None
    episode = gateway.open(EpisodeSpec("one", ScriptedEngine(["hi"], tokenizer)))
    if route == "count":
        body = {"model": "m", "messages": [{"role": "user", "content": [_source(url)]}]}
        refused = post(episode, body, "v1/messages/count_tokens")
    else:
        refused = post(episode, asking(part(url)))
    assert refused.status_code == 400
    assert "takes only text" in refused.text


def _source(url: str) -> dict[str, Any]:
    """A picture in the form of Anthropic."""
    if url.startswith("https:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    data = url.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_pictures_that_are_in_use_are_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are remembered, such as the screenshots of some episodes at a time."""
    monkeypatch.setattr(pictures, "_REMEMBERED_BYTES", 1)
    urls = [url_of(png(seed)) for seed in range(100, 110)]
    in_use = [picture_at(url) for url in urls]
    assert all(picture_at(url) is picture for url, picture in zip(urls, in_use, strict=True))
