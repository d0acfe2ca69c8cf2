"""Reads the state of a connection's other end from Linux's `sock_diag(7)`, if it is a socket of
this machine.

An acknowledgement means that the client's system has the bytes. Only the socket at the other end
tells whether the client has read them, and whether it has closed the socket or only its sending
side.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import NamedTuple

_HEADER = struct.Struct("=IHHII")
"""`nlmsghdr`: length, type, flags, sequence, port."""
_REQUEST = struct.Struct("=BBBBI")
"""`inet_diag_req_v2` before its `inet_diag_sockid`: family, protocol, extensions, padding,
states."""
_ADDRESSES = struct.Struct("!HH16s16s")
_COUNTS = struct.Struct("=IIIII")
"""`inet_diag_msg` behind its `inet_diag_sockid`: expires, receive queue, send queue, user,
inode."""
_SOCKID = 48
_SOCK_DIAG, _BY_FAMILY, _ERROR = 4, 20, 2


class PeerSocket(NamedTuple):
    """The client's end of a connection."""

    unread: int
    """Bytes in its receive queue."""
    closed: bool
    """Whether no process has it open."""


class PeerSockets:
    """Queries the system, from one thread; without support (another system, no permission) the
    state is unknown."""

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None
        self._tried = False

    def look(self, connection: socket.socket) -> PeerSocket | None:
        """The other end of a TCP connection; None if it is not on this machine or the system does
        not tell."""
        netlink = self._open()
        if netlink is None:
            return None
        try:
            here, there = connection.getsockname(), connection.getpeername()
            request = _request(here, there)
            netlink.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, 1, 1, 0) + request)
            reply = netlink.recv(4096)
        except (OSError, ValueError):
            return None
        counts = _HEADER.size + 4 + _SOCKID
        if _HEADER.unpack_from(reply)[1] == _ERROR or len(reply) < counts + _COUNTS.size:
            return None
        _, unread, _, _, inode = _COUNTS.unpack_from(reply, counts)
        return PeerSocket(unread, inode == 0)

    def _open(self) -> socket.socket | None:
        if not self._tried:
            self._tried = True
            with suppress(
                OSError, AttributeError
            ):  # AttributeError: no AF_NETLINK outside of Linux
                self._netlink = socket.socket(
                    socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG
                )
                self._netlink.settimeout(0.1)
        return self._netlink

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()
        self._netlink, self._tried = None, True


def _request(here: tuple[str, int], there: tuple[str, int]) -> bytes:
    """A query for the socket with address `there` and peer `here`."""
    (host, port), (peer, peer_port) = here[:2], there[:2]
    mapped = "::ffff:"
    if host.startswith(mapped) and peer.startswith(mapped):
        host, peer = host[len(mapped) :], peer[len(mapped) :]
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    ends = (
        socket.inet_pton(family, peer).ljust(16, b"\0"),
        socket.inet_pton(family, host).ljust(16, b"\0"),
    )
    sockid = (
        _ADDRESSES.pack(peer_port, port, *ends) + bytes(4) + b"\xff" * 8
    )  # any interface, no cookie
    return _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + sockid
