"""urllib3 and requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ajet_sdk.capture.http_client import read_along
from ajet_sdk.capture.patches import OwnClient, Patches
from ajet_sdk.capture.routing import Fallback, PassThrough, Reroute, active_episode, decide, sending

if TYPE_CHECKING:
    import requests
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
            preloaded = bool(kwargs.get("preload_content", True))
            _observe(plan, response, response.status, response.data if preloaded else None, response)
        return response

    patches.replace(pool, "urlopen", urlopen)
    patches.at_end(client.close)


def patch_requests(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    original = module.Session.__dict__["send"]

    def session() -> requests.Session:
        requests_session = module.Session()
        requests_session.trust_env = False
        requests_session.mount("http://", module.adapters.HTTPAdapter(pool_connections=4, pool_maxsize=256))
        return requests_session

    client = OwnClient(session)

    def send(self: requests.Session, request: requests.PreparedRequest, **kwargs: object) -> requests.Response:
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


def _to_gateway(module: ModuleType, plan: Reroute, request: requests.PreparedRequest) -> requests.PreparedRequest:
    copy, body = request.copy(), request.body
    copy.url = plan.url
    copy.body = body.encode() if isinstance(body, str) else body
    copy.headers = module.structures.CaseInsensitiveDict(plan.headers(request.headers))
    copy.headers["content-length"] = str(len(copy.body))
    return copy


def _observe(
    passing: PassThrough,
    response: urllib3.HTTPResponse | requests.Response,
    status: int,
    content: bytes | None,
    unread: urllib3.HTTPResponse,
) -> None:
    """`content` is the body if it was read already; else it is recorded as `unread` is read."""
    done = passing.ending(status, response.headers.get("content-type", ""))
    if content is None:
        read_along(unread, passing.feed, done)
    else:
        passing.feed(content)
        done(True)
