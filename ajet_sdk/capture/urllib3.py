"""urllib3, used directly, and requests, which is caught above it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ajet_sdk.capture.http_client import read_along
from ajet_sdk.capture.patches import OwnClient, Patches
from ajet_sdk.capture.routing import Fallback, PassThrough, Reroute, active_episode, decide, sending


def patch_urllib3(module: Any, patches: Patches, fallback: Fallback) -> None:
    pool = module.connectionpool.HTTPConnectionPool
    original = pool.__dict__["urlopen"]

    class Pools(module.PoolManager):  # type: ignore[misc]
        close = module.PoolManager.clear

    client = OwnClient(lambda: Pools(num_pools=4, maxsize=256))

    def urlopen(
        self: Any, method: str, url: str, body: Any = None, headers: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
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
            preloaded = bool(kwargs.get("preload_content", True))
            _observe(plan, response, response.status, response.data if preloaded else None, response)
        return response

    patches.replace(pool, "urlopen", urlopen)
    patches.at_end(client.close)


def patch_requests(module: Any, patches: Patches, fallback: Fallback) -> None:
    original = module.Session.__dict__["send"]

    def session() -> Any:
        requests_session = module.Session()
        requests_session.trust_env = False
        requests_session.mount("http://", module.adapters.HTTPAdapter(pool_connections=4, pool_maxsize=256))
        return requests_session

    client = OwnClient(session)

    def send(self: Any, request: Any, **kwargs: Any) -> Any:
        active = active_episode(fallback)
        if active is None:
            return original(self, request, **kwargs)
        plan = decide(active, request.method, str(request.url), request.headers, lambda: request.body)
        with sending(active, plan):
            if isinstance(plan, Reroute):
                options = {key: kwargs[key] for key in ("stream", "timeout") if key in kwargs}
                copy = _to_gateway(module, plan, request)
                return original(client.get(), copy, **options, allow_redirects=False, proxies={})
            response = original(self, request, **kwargs)
        if plan is not None:
            stream = bool(kwargs.get("stream", self.stream))
            _observe(plan, response, response.status_code, None if stream else response.content, response.raw)
        return response

    patches.replace(module.Session, "send", send)
    patches.at_end(client.close)


def _to_gateway(module: Any, plan: Reroute, request: Any) -> Any:
    copy, body = request.copy(), request.body
    copy.url = plan.url
    copy.body = body.encode() if isinstance(body, str) else body
    copy.headers = module.structures.CaseInsensitiveDict(plan.headers(request.headers))
    copy.headers["content-length"] = str(len(copy.body))
    return copy


def _observe(passing: PassThrough, response: Any, status: int, content: bytes | None, unread: Any) -> None:
    """`content` is the body where it is here already; else `unread` is read along."""
    done = passing.ending(status, response.headers.get("content-type", ""))
    if content is None:
        read_along(unread, passing.feed, done)
    else:
        passing.feed(content)
        done(True)
