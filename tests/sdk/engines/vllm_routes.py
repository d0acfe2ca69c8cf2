"""A server that does over HTTP what vLLM 0.32.0 does with pictures, without vLLM.

The routes, and what they take and return, are those of `vllm/entrypoints/scale_out/
token_in_token_out/` (protocol.py, serving.py, api_router.py), which a server has with
`--enable-scale-out`. As in vLLM's `multimodal/processing`, each placeholder in the ids is replaced
by what the processor makes of the next picture, whatever stands there already. A run starts it by
the name of vLLM's own module.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socketserver
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from ajet_sdk.pictures import Picture, picture_of
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.tiny_vision import plain_logits

FAULT = "TEST_VLLM_FAULT"
"""Environment variable: `size`, the server's processor sees pictures of another size."""
HOLD = "TEST_VLLM_HOLD"
"""Environment variable: the length at which a reply waits until the weights have changed, for which
they wait."""


class Refused(Exception):
    """Status 400."""


class Model:
    def __init__(self, path: str, tokenizer: str) -> None:
        self.tokenizer = HFTokenizer(tokenizer)
        self.version = "default"
        """The label of the weights."""
        self.turn = threading.Lock()
        """Held while a token is sampled, and while sampling is paused."""
        self.held = threading.Event()
        """Set once a reply waits for other weights."""
        self.load(path)

    def load(self, path: str) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path).eval()

    def expand(
        self, ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[dict[str, int]]]:
        """The ids of a prompt, and where its pictures are."""
        shown = self.tokenizer.pictures
        assert shown is not None
        (placeholder,) = self.tokenizer.encode(shown.placeholder)
        expanded: list[int] = []
        spans: list[dict[str, int]] = []
        for token in ids:
            if token != placeholder or len(spans) == len(pictures):
                expanded.append(token)
                continue
            made = shown.whole(shown.placeholder, [pictures[len(spans)]])["input_ids"][0].tolist()
            spans.append({"offset": len(expanded), "length": len(made)})
            expanded += made
        if len(spans) != len(pictures):
            raise Refused(f"{len(pictures)} pictures for {len(spans)} placeholders")
        return expanded, spans

    def choice(
        self, index: int, prompt: list[int], pictures: Sequence[Picture], how: dict[str, Any]
    ) -> dict[str, Any]:
        draw = torch.Generator().manual_seed((how["seed"] + index) % 2**63)
        ids: list[int] = []
        content: list[dict[str, Any]] = []
        versions: list[str] = []
        hold = int(os.environ.get(HOLD, 0))
        reason, stopped = "length", None
        for _ in range(how["max_tokens"]):
            with self.turn:
                logits = plain_logits(self.model, self.tokenizer, prompt + ids, pictures)[-1]
                versions.append(self.version)
            for token, bias in (how.get("logit_bias") or {}).items():
                logits[int(token)] += bias
            logprobs = torch.log_softmax(logits / (how["temperature"] or 1.0), -1)
            if how["temperature"]:
                token_id = int(torch.multinomial(logprobs.exp(), 1, generator=draw))
            else:
                token_id = int(logprobs.argmax())
            ids.append(token_id)
            while len(ids) == hold and versions[-1] == self.version:
                self.held.set()
                time.sleep(0.005)
            likely = logprobs.topk(max(1, how["logprobs"])).indices.tolist()
            named = list(dict.fromkeys([token_id, *likely]))[: max(1, how["logprobs"])]
            top = [{"token_id": i, "logprob": logprobs[i].item(), "rank": None} for i in named]
            content.append(
                {"token_id": token_id, "logprob": logprobs[token_id].item(), "top_logprobs": top}
            )
            stop = next((s for s in how["stop"] if s in self.tokenizer.decode(ids)), None)
            if token_id in how["stop_token_ids"] or stop is not None:
                reason, stopped = "stop", token_id if stop is None else stop
                break
        return {
            "index": index,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": reason,
            "stop_reason": stopped,
            "weight_versions": spans_of(versions),
        }

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """`POST /inference/v1/generate`."""
        pictures = []
        for part in body.get("content_parts") or ():
            if part["type"] != "image_url":
                raise Refused(f"no picture: {part}")
            pictures.append(_seen(part["url"]))
        prompt, spans = self.expand(body["token_ids"], pictures)
        how = body["sampling_params"]
        choices = [self.choice(index, prompt, pictures, how) for index in range(how["n"])]
        reply: dict[str, Any] = {"output_mode": "tokens", "choices": choices}
        if body.get("return_token_ids"):
            reply |= {"prompt_token_ids": prompt, "mm_placeholders": {"image": spans}}
        return reply

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """`POST /v1/completions`, of a prompt of ids."""
        choices = []
        for index in range(body["n"]):
            made = self.choice(index, body["prompt"], (), body)
            logprobs = [token["logprob"] for token in made["logprobs"]["content"]]
            text = self.tokenizer.decode(made["token_ids"])
            choices.append({**made, "text": text, "logprobs": {"token_logprobs": logprobs}})
        return {"choices": choices}


def spans_of(versions: Sequence[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": place})
        spans[-1]["end"] = place + 1
    return spans


def _seen(url: str) -> Picture:
    picture = picture_of(base64.b64decode(url.partition(",")[2]))
    if os.environ.get(FAULT) != "size":
        return picture
    from tests.tiny_vision import png

    return picture_of(png(picture.image().resize((picture.width // 2, picture.height))))


class Handler(BaseHTTPRequestHandler):
    model: Model
    scale_out: bool

    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "unix"

    def answer(self, status: int, value: object) -> None:
        content = json.dumps(value, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        route = self.path.partition("?")[0]
        try:
            if route == "/v1/completions":
                self.answer(200, self.model.complete(body))
            elif route == "/inference/v1/generate" and self.scale_out:
                self.answer(200, self.model.generate(body))
            elif route == "/collective_rpc":
                self.model.load(body["kwargs"]["weights_path"])
                self.answer(200, {})
            elif route == "/update_weight_version":
                self.model.version = body["new_version"]
                self.answer(200, {"success": True})
            elif route == "/pause":
                if HOLD in os.environ:
                    self.model.held.wait()
                self.model.turn.acquire()
                self.answer(200, {"success": True})
            elif route == "/resume":
                self.model.turn.release()
                self.answer(200, {"success": True})
            elif route == "/reset_prefix_cache":
                self.answer(200, {"success": True})
            else:
                self.answer(404, {"detail": "Not Found"})
        except Refused as error:
            self.answer(400, {"error": {"message": str(error)}})


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--enable-scale-out", action="store_true")
    given, _ = parser.parse_known_args()
    Handler.model = Model(given.model, given.tokenizer)
    Handler.scale_out = given.enable_scale_out
    Path(given.uds).unlink(missing_ok=True)
    with UnixServer(given.uds, Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
