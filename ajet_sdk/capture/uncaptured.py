"""Fails an episode before it sends LLM traffic that is not captured.

Uncaptured are: a request to a known model host that the policy does not answer, unless it runs no
model; a connection to such a host from a client without hooks; a call over gRPC. A model server on
this machine is recognized by its default port and the path.

Host names are checked where Python resolves them. Clients that resolve names in C (curl, uvloop's
transports) or that use a proxy are not detected.
"""

from __future__ import annotations

import functools
import importlib
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ajet_sdk.agent.context import ActiveEpisode, HostGuard, current_episode
from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.processes import in_this_process
from ajet_sdk.engines.http import is_loopback
from ajet_sdk.errors import MissingResource

LLM_HOSTS = tuple(Path(__file__).with_name("model_hosts.txt").read_text().split())
"""Each includes its subdomains, and `us-central1-aiplatform.googleapis.com` for Vertex AI."""
AWS = re.compile(
    r"(?:[\w-]+\.)?(?:bedrock(?:-agent)?-runtime|bedrock-mantle|runtime(?:-fips)?\.sagemaker)[\w.-]*"
    r"\.(?:amazonaws\.com(?:\.cn)?|api\.aws)"
)

TELEMETRY = "/traces/ingest"
"""The URL of the OpenAI Agents SDK's spans."""
NO_INFERENCE = re.compile(
    r"""
    (?:^|/)(?:
        [\w-]*embed(?:dings?)?s?|embed-jobs|feature-extraction|sentence-similarity  # embeddings
        |(?:text-)?reranks?|knowledgebases/[^/]+/retrieve                           # retrieval
        |moderations?|classify|classifications|guardrail/[^/]+/version/[^/]+/apply  # moderation
        |count[_-]tokens|input_tokens|(?:de)?tokenizer?                             # tokens
        |traces/ingest
    )$
    |:(?:embedContent|(?:asyncB|b)atchEmbedContents?|countTokens|computeTokens)$
    |/models?/[^/:]*(?:embed|rerank)[^/]*(?:/invoke|:predict)$                      # of Bedrock and of Vertex AI
    |/(?:v\d\w*|openai|api)/(?:files|uploads?|vector_stores)(?:/(?!ocr|parser)|:register$|$)      # files
    |/api/(?:show|pull|push|copy|create|blobs/[^/]+)$                               # the models of Ollama
    """,
    re.VERBOSE,
)
"""Paths of model hosts that run no model."""
NO_INFERENCE_RPC = re.compile(
    r"(?:Batch)?Embed\w*|(?:Count|Compute)Tokens|TokenizeText|(?:Async)?RetrieveContexts"
    r"|(?:List|Get)\w*Models?|(?:Upload|List|Retrieve|Delete)Files?(?:Content)?"
)
"""gRPC methods that run no model."""
READS = frozenset(("GET", "HEAD", "OPTIONS", "DELETE", "CONNECT"))

LOCAL_PORTS = frozenset((11434, 8000, 30000, 1234, 8080))
"""Default ports of Ollama, vLLM, SGLang, LM Studio and llama.cpp."""
LOCAL_INFERENCE = re.compile(
    r"/(?:api/(?:chat|generate|v1/(?:chat|generate))|generate(?:_stream)?|completion|infill|invocations|llm|realtime)$"
)
"""Paths of these servers that belong to no dialect. Other applications may have the same paths, so
the body counts."""
LOCAL_SUBJECTS = frozenset(
    ("messages", "prompt", "inputs", "input_ids", "sampling_params", "input_prefix")
)


def patch_sockets(patches: Patches) -> None:
    """Wrap the functions that resolve host names, and `socket.connect`, which accepts names."""

    def checking(original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def lookup(host: object, *args: object, **kwargs: object) -> object:
            _check(host)
            return original(host, *args, **kwargs)

        return lookup

    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        patches.replace(socket, name, checking(getattr(socket, name)))
    connect = socket.socket.connect

    def checked(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple):
            _check(address[0])
        connect(self, address)

    patches.replace(socket.socket, "connect", checked)


def _check(host: object) -> None:
    """Raise UncapturedTraffic for a model host; it fails the episode even if the agent catches
    it."""
    active = current_episode.get()
    if active is None or active.in_client or host is None:
        return
    if isinstance(host, (bytes, bytearray)):
        name = host.decode("ascii", "replace")
    else:
        name = str(host)
    active.note(f"a connection to {name}")
    if active.guard is None:
        return
    if watches(active.guard, name) and not any(
        urlsplit(url).hostname == name for url in active.guard.allowed
    ):
        in_this_process(active).refuse(
            f"connected to {name} through a client that ajet does not capture", name
        )


def watches(guard: HostGuard | None, host: str) -> bool:
    """Whether a host is a known or configured model host."""
    host = host.lower().rstrip(".")
    if AWS.fullmatch(host):
        return True
    added = guard.hosts if guard is not None else ()
    return any(
        host == known or host.endswith(("." + known, "-" + known)) for known in (*LLM_HOSTS, *added)
    )


def is_local_inference(url: str) -> bool:
    """Whether a URL is a local model server's, by default port and path."""
    parts = urlsplit(url)
    return (
        parts.port in LOCAL_PORTS
        and LOCAL_INFERENCE.search(parts.path) is not None
        and is_loopback(url)
    )


def refuse_inference(
    active: ActiveEpisode, method: str, url: str, headers: Mapping[str, str], body: object
) -> None:
    """Raise UncapturedTraffic if a model other than the policy may answer a request; `body` is its
    JSON."""
    active.note(f"{method} {_place(url)}")
    guard = active.guard
    parts = urlsplit(url)
    websocket = (headers.get("upgrade") or "").lower() == "websocket"
    if guard is None or (method in READS and not websocket):
        return
    if watches(guard, parts.hostname or ""):
        inference = websocket or NO_INFERENCE.search(parts.path.rstrip("/")) is None
    else:
        subject = websocket or (isinstance(body, dict) and not LOCAL_SUBJECTS.isdisjoint(body))
        inference = subject and is_local_inference(url)
    if inference and not is_allowed(guard, url):
        action = "opened a websocket to" if websocket else f"sent {method}"
        active.refuse(f"{action} {_place(url)}, which is not an API that ajet answers", _place(url))


def refuse_unread(active: ActiveEpisode, method: str, url: str) -> None:
    """As `refuse_inference`, for a request whose body is unknown."""
    refuse_inference(in_this_process(active), method, url, {}, None)


def is_allowed(guard: HostGuard, url: str) -> bool:
    """Whether the config allows a URL or one of its parents."""
    place = _place(url)
    return any(
        place == prefix or place.startswith(prefix.rstrip("/") + "/")
        for prefix in map(_place, guard.allowed)
    )


def _place(url: str) -> str:
    """The URL without user, query, fragment and default port."""
    parts = urlsplit(url)
    scheme = {"wss": "https", "ws": "http"}.get(parts.scheme, parts.scheme)
    if parts.port and parts.port != {"https": 443, "http": 80}.get(scheme):
        port = f":{parts.port}"
    else:
        port = ""
    return f"{scheme}://{parts.hostname or ''}{port}{parts.path}"


def unset_key(
    active: ActiveEpisode, method: str, url: str, variable: str
) -> MissingResource | None:
    """The error of a request that would send a placeholder to a model host, or None."""
    if not watches(active.guard, urlsplit(url).hostname or ""):
        return None
    return MissingResource(
        f"the agent sent {method} {_place(url)}, which the policy does not answer, and {variable}"
        " is not set: the client had ajet's placeholder for a key. Nothing was sent. Set"
        f" {variable} to your key, or leave the call out"
    )


def patch_grpc(module: object, patches: Patches, fallback: object) -> None:
    """Check each call over a gRPC channel, including those of stubs that were created before the
    episode."""
    for package in ("grpc._channel", "grpc.aio._channel"):
        for name, kind in list(vars(importlib.import_module(package)).items()):
            if isinstance(kind, type) and name.endswith("MultiCallable"):
                for method in {"__call__", "with_call", "future"} & vars(kind).keys():
                    patches.replace(kind, method, _checked_call(vars(kind)[method]))


def _checked_call(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def call(self: Any, *args: object, **kwargs: object) -> object:
        active = current_episode.get()
        if active is not None and active.guard is not None and hasattr(self, "_method"):
            target: Any = self._channel.target  # a method; with asyncio a value
            if callable(target):
                target = target()
            target = _text(target)
            path = _text(self._method)
            host = target.rpartition("/")[2].partition(":")[0]
            url = f"https://{host}{path}"
            known = watches(active.guard, host) and not NO_INFERENCE_RPC.fullmatch(
                path.rpartition("/")[2]
            )
            if known and not is_allowed(active.guard, url):
                in_this_process(active).refuse(
                    f"called {url} over gRPC, which ajet does not capture", url
                )
        return original(self, *args, **kwargs)

    return call


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
