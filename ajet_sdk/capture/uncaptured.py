"""LLM traffic that is not captured ends the episode before a byte of it is sent.

That is a connection to a known LLM host from beneath no hook, or a conversation on a route that no dialect has.

Names are watched where Python resolves them. A client in C resolves its own (curl, gRPC, uvloop's transports), and one
behind a proxy asks the proxy: those are not seen.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from ajet_sdk.agent.context import ActiveEpisode, HostGuard, current_episode
from ajet_sdk.capture.patches import Patches

__all__ = ["LLM_HOSTS", "is_watched", "patch_sockets", "refuse_unknown", "watches"]

LLM_HOSTS = (
    "api.openai.com", "openai.azure.com", "services.ai.azure.com", "models.inference.ai.azure.com",
    "api.anthropic.com", "generativelanguage.googleapis.com", "aiplatform.googleapis.com",
    "api.mistral.ai", "codestral.mistral.ai", "api.groq.com", "api.x.ai", "api.deepseek.com", "api.perplexity.ai",
    "api.cohere.com", "api.cohere.ai", "api.ai21.com", "openrouter.ai", "api.together.xyz", "api.together.ai",
    "api.fireworks.ai", "api.deepinfra.com", "api.cerebras.ai", "api.sambanova.ai", "api.hyperbolic.xyz",
    "api.novita.ai", "api.replicate.com", "integrate.api.nvidia.com", "models.github.ai", "router.huggingface.co",
    "dashscope.aliyuncs.com", "dashscope-intl.aliyuncs.com", "api.moonshot.cn", "api.moonshot.ai", "open.bigmodel.cn",
    "api.z.ai", "volces.com", "api.siliconflow.cn", "api.siliconflow.com", "api.minimax.chat", "api.minimax.io",
    "api.minimaxi.com", "api.lingyiwanwu.com", "api.stepfun.com", "qianfan.baidubce.com", "hunyuan.tencentcloudapi.com",
)  # fmt: skip
"""Each stands for its subdomains too, and for Vertex AI's `us-central1-aiplatform.googleapis.com`."""
BEDROCK = "bedrock-runtime"
LOOKUPS = ("getaddrinfo", "gethostbyname", "gethostbyname_ex")
CONVERSATIONS = frozenset(("messages", "contents"))


def patch_sockets(patches: Patches) -> None:
    """Wrap the functions that resolve a name, and `socket.connect`, which may be given one."""
    for name in LOOKUPS:
        patches.replace(socket, name, _lookup(getattr(socket, name)))
    connect = socket.socket.connect

    def checked(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple):
            _check(address[0])
        connect(self, address)

    patches.replace(socket.socket, "connect", checked)


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        _check(host)
        return original(host, *args, **kwargs)

    return lookup


def _check(host: Any) -> None:
    """Raise UncapturedTraffic, which becomes the episode's fault too where the agent catches it."""
    active = current_episode.get()
    if active is None or active.in_client or active.guard is None or host is None:
        return
    name = host.decode("ascii", "replace") if isinstance(host, (bytes, bytearray)) else str(host)
    if watches(active.guard, name):
        active.refuse(f"connected to {name} through a client that ajet does not capture")


def watches(guard: HostGuard, host: str) -> bool:
    """Whether a host is one that the guard watches."""
    host = host.lower().rstrip(".")
    if host.startswith(BEDROCK) and host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return True
    return any(host == one or host.endswith(("." + one, "-" + one)) for one in (*LLM_HOSTS, *guard.hosts))


def is_watched(active: ActiveEpisode, url: str) -> bool:
    """Whether a URL is of a host that the episode's guard watches."""
    return active.guard is not None and watches(active.guard, urlsplit(url).hostname or "")


def refuse_unknown(active: ActiveEpisode, url: str, body: Any) -> None:
    """A POST to a watched host, on a route of no dialect. Raises UncapturedTraffic where it holds a conversation."""
    nested = body.get("input") if isinstance(body, dict) else None
    if any(isinstance(one, dict) and not CONVERSATIONS.isdisjoint(one) for one in (body, nested)):
        active.refuse(f"posted a conversation to {url.split('?')[0]}, a route that ajet does not recognize")
