"""urllib3, which requests uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ajet_sdk.capture.http_client import read_along
from ajet_sdk.capture.patches import OwnClient, Patches
from ajet_sdk.capture.routing import Fallback, PassThrough, Reroute, active_episode, decide, sending

if TYPE_CHECKING:
    import urllib3


def patch_urllib3(module: Any, patches: Patches, fallback: Fallback) -> None:
    pool = module.connectionpool.HTTPConnectionPool
    original: Callable[..., urllib3.HTTPResponse] = pool.__dict__["urlopen"]

    class Pools(module.PoolManager):  # type: ignore[misc]
        close = module.PoolManager.clear

    client = OwnClient(lambda: Pools(num_pools=4, maxsize=256))

    def urlopen(
        self: urllib3.HTTPConnectionPool,
        method: str,
        url: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *args: object,
        **kwargs: object,
    ) -> urllib3.HTTPResponse:
        active = active_episode(fallback)
        if active is None:
            return original(self, method, url, body, headers, *args, **kwargs)
        sent_headers = {str(name).lower(): str(value) for name, value in (headers or self.headers or {}).items()}
        whole = url if "://" in url else f"{self.scheme}://{self.host}:{self.port or ''}{url}"
        plan = decide(active, method, whole, sent_headers, lambda: body)
        with sending(active, plan):
            if isinstance(plan, Reroute):
                gateway, path = client.get().connection_from_url(plan.url), urlsplit(plan.url).path
                return original(gateway, "POST", path, body, plan.headers(sent_headers), *args, **kwargs)
            response = original(self, method, url, body, headers, *args, **kwargs)
        if plan is not None:
            _observe(plan, response, response.data if kwargs.get("preload_content", True) else None)
        return response

    patches.replace(pool, "urlopen", urlopen)
    patches.at_end(client.close)


def _observe(passing: PassThrough, response: urllib3.HTTPResponse, content: bytes | None) -> None:
    """`content` is the body if it was read already; else it is recorded as it is read."""
    done = passing.ending(response.status, response.headers.get("content-type", ""))
    if content is None:
        read_along(response, passing.feed, done)
    else:
        passing.feed(content)
        done(True)
