"""Whether a request to a server of ours may come from a web page that has no business with it.

A page in a browser on this machine can reach every server that listens here. It can't hide its `Origin`, and where it
had its own name point to 127.0.0.1 (DNS rebinding), the name stands in `Host`.
"""

from __future__ import annotations

import socket
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

__all__ = ["foreign", "is_loopback"]

_UNASKED = ("text/plain", "application/x-www-form-urlencoded")
"""Types of content that a page may send elsewhere without asking first; none of our servers wants them."""


def foreign(host: str, origin: str | None, content_type: str | None, own_name: str = "") -> tuple[int, str] | None:
    """The status and the reason with which a request is refused, from its headers; None where it is let through.

    It is let through where it names the server by an address, `localhost`, this machine's name or `own_name`.
    """
    if not _ours(host, own_name):
        return 403, f"this server does not answer to the name {host[:100]!r}; ask it by its address or as localhost"
    if origin is not None and urlsplit(origin).netloc != host:
        return 403, f"a page of {origin[:100]!r} may not ask this server"
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind in _UNASKED:
        return 415, f"the content is JSON and its type application/json, not {kind}"
    return None


@lru_cache(maxsize=256)
def _ours(host: str, own_name: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", own_name.lower(), socket.gethostname().lower(), socket.getfqdn().lower()):
        return True
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach a bound socket, however its address was spelt."""
    address = ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
