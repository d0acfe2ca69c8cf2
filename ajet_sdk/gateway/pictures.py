"""Checks the pictures of a request before the policy sees them, and loads links to allowed hosts.

A link is fetched by this process, so that a policy's text could make it send requests to any place
that the machine can reach. Only hosts that the job names are asked, and only at public addresses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from ajet_sdk.addresses import public
from ajet_sdk.errors import PictureError, RequestRefused
from ajet_sdk.pictures import MAX_BYTES, MAX_PICTURES, is_data_url, picture_at, picture_of, url_in
from ajet_sdk.protocols import Ask

if TYPE_CHECKING:
    import httpx

_SECONDS = 20.0
"""Time limit of a link, with its redirects."""
_REDIRECTS = 3

Resolve = Callable[[str], Awaitable[list[str]]]


def _picture_parts(messages: object) -> Iterator[Mapping[str, object]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield part


async def checked(ask: Ask, hosts: Collection[str], loaded: dict[str, str]) -> Ask:
    """The request with its pictures decoded once, and with data in place of links to `hosts`.

    `loaded` has the data URLs of links of earlier requests, and gets new ones: a link stands for
    one picture during an episode. Raises RequestRefused.
    """
    parts = list(_picture_parts(ask.messages))
    if len(parts) > MAX_PICTURES:
        raise _refused(f"the request has {len(parts)} pictures; at most {MAX_PICTURES} are read")
    links = {}
    for number, part in enumerate(parts, 1):
        try:
            url = url_in(part)
            if is_data_url(url):
                # decoding a large one takes a tenth of a second; later it is known
                await asyncio.to_thread(picture_at, url)
                continue
            if url not in loaded:
                loaded[url] = await fetch(url, hosts)
            links[url] = loaded[url]
        except PictureError as error:
            raise _refused(f"picture {number} of {len(parts)}: {error}") from error
    if not links or ask.messages is None:
        return ask
    return replace(ask, messages=[_with_data(message, links) for message in ask.messages])


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, "messages", code="invalid_image")


def _with_data(message: object, links: Mapping[str, str]) -> object:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    content = []
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") == "image_url":
            image = part["image_url"]
            options = image if isinstance(image, dict) else {}
            url = url_in(part)
            part = {**part, "image_url": {**options, "url": links.get(url, url)}}
        content.append(part)
    return {**message, "content": content}


async def _addresses(host: str) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def fetch(
    url: str,
    hosts: Collection[str],
    *,
    resolve: Resolve = _addresses,
    transport: httpx.AsyncBaseTransport | None = None,
) -> str:
    """Load a picture from one of the hosts; returns it as a data URL. Raises PictureError."""
    import httpx  # a gateway that loads no links needs no HTTP client

    try:
        return await asyncio.wait_for(_fetch(url, hosts, resolve, transport), _SECONDS)
    except asyncio.TimeoutError as error:
        raise PictureError(f"{public(url)} did not answer within {_SECONDS:.0f} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise PictureError(f"{public(url)} cannot be loaded: {error}") from error


async def _fetch(
    url: str,
    hosts: Collection[str],
    resolve: Resolve,
    transport: httpx.AsyncBaseTransport | None,
) -> str:
    import httpx

    # no proxy: it would resolve the name again, possibly to another address
    async with httpx.AsyncClient(trust_env=False, transport=transport, timeout=_SECONDS) as client:
        for _ in range(_REDIRECTS + 1):
            host, port = _allowed(url, hosts)
            address = await _public_address(host, resolve)
            pinned = httpx.URL(url).copy_with(host=address)
            request = client.build_request(
                "GET",
                pinned,
                headers={"host": host if port == 443 else f"{host}:{port}"},
                extensions={"sni_hostname": host},  # whose certificate is checked
            )
            response = await client.send(request, stream=True)
            try:
                if response.is_redirect:
                    url = urljoin(url, response.headers["location"])
                    continue
                if response.status_code != 200:
                    raise PictureError(f"{public(url)} answered {response.status_code}")
                return picture_of(await _body(response, url)).url
            finally:
                await response.aclose()
    raise PictureError(f"{public(url)} redirects more than {_REDIRECTS} times")


async def _body(response: httpx.Response, url: str) -> bytes:
    parts = []
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_BYTES:
            limit = f"{MAX_BYTES / 1e6:.0f} MB"
            raise PictureError(f"{public(url)} has more than {limit}, the limit of a picture")
        parts.append(part)
    return b"".join(parts)


def _allowed(url: str, hosts: Collection[str]) -> tuple[str, int]:
    """Host and port of a link. Raises PictureError unless it may be loaded."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".").lower()
        port = parts.port or 443
    except ValueError as error:
        raise PictureError(f"{url[:80]!r} is no link: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise PictureError(
            "a picture must be sent in the request, as a data URL (data:image/png;base64,…);"
            f" {public(url[:80])!r} is not loaded"
        )
    if host not in {name.lower() for name in hosts}:
        raise PictureError(
            f"pictures are not loaded from {host}: send the picture in the request, as a data URL"
            f" (data:image/png;base64,…), or allow the host: rollout.picture_hosts: [{host}]"
        )
    if parts.scheme != "https" or parts.username is not None or parts.password is not None:
        raise PictureError(f"pictures are loaded by https, without a password: {public(url)!r}")
    return host, port


async def _public_address(host: str, resolve: Resolve) -> str:
    """An address of a host, to which to connect. Raises PictureError if one of them is not
    public."""
    addresses = await resolve(host)
    for address in addresses:
        number = ipaddress.ip_address(address.partition("%")[0])
        inner = getattr(number, "ipv4_mapped", None) or number
        if not inner.is_global or inner.is_multicast:
            raise PictureError(f"pictures are not loaded from {host}: {address} is not public")
    if not addresses:
        raise PictureError(f"{host} has no address")
    return addresses[0]
