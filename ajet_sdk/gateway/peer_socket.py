"""How much the client of a connection has read: what the system knows of the two sockets.

An acknowledgement means that the client's system has the bytes. Only the socket at the other end
tells whether the client has read them; Linux shows it through `sock_diag(7)`, if the client is on
this machine. A client that closes its end with unread bytes resets the connection.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from array import array
from contextlib import suppress

_HEADER = struct.Struct("=IHHII")
"""`nlmsghdr`: length, type, flags, sequence, port."""
_REQUEST = struct.Struct("=BBBBI")
"""`inet_diag_req_v2` before its `inet_diag_sockid`: family, protocol, extensions, padding,
states."""
_SOCKET = struct.Struct("!HH16s16s")
"""`inet_diag_sockid` before interface and cookie: ports and addresses."""
_ANY_INTERFACE_NO_COOKIE = bytes(4) + b"\xff" * 8
_QUEUE = struct.Struct("=56xI12x")
"""`inet_diag_msg`, of which we read the size of the receive queue; attributes follow."""
_ATTRIBUTE = struct.Struct("=HH")
"""`rtattr`: length, type."""
_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` in `tcp_info`."""
_SOCK_DIAG = 4
_BY_FAMILY = 20
_ALL_STATES = 0xFFFFFFFF
_INFO = 2
"""The attribute with `tcp_info`, and the flag that asks for it."""
_MAPPED = "::ffff:"
_FIN = 1
"""What closing our side adds to the unacknowledged bytes."""


def bytes_read_by_peer(connection: socket.socket) -> int | None:
    """Bytes that the other end has read since the connection was made; None if it is not on this
    machine, is closed, or the system does not tell."""
    try:
        query = _query(connection.getsockname(), connection.getpeername())
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with socket.socket(socket.AF_NETLINK, kind, _SOCK_DIAG) as system:
            system.settimeout(0.1)
            system.send(query)
            reply = system.recv(4096)
    except (OSError, AttributeError):  # AttributeError: no AF_NETLINK outside of Linux
        return None
    if _HEADER.unpack_from(reply)[1] != _BY_FAMILY:
        return None
    queued: int = _QUEUE.unpack_from(reply, _HEADER.size)[0]
    at = _HEADER.size + _QUEUE.size
    while at < len(reply):
        length, attribute = _ATTRIBUTE.unpack_from(reply, at)
        if attribute == _INFO:
            received: int = _RECEIVED.unpack_from(reply, at + _ATTRIBUTE.size)[0]
            return received - queued
        at += (length + 3) & ~3
    return None


def lost_bytes(connection: socket.socket) -> bool:
    """Whether the client, which has closed its end, did not get all bytes.

    The segment that closes it acknowledges what has arrived; what arrives later resets the
    connection.
    """
    if connection.fileno() < 0:
        return False
    unacknowledged = array("i", [0])
    with suppress(OSError):  # not supported by the system
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, unacknowledged)
    is_reset = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
    return unacknowledged[0] > _FIN or is_reset


def _query(server: tuple[str, int], client: tuple[str, int]) -> bytes:
    """A query for the client's socket, whose peer is the server's."""
    family = socket.AF_INET if "." in client[0] else socket.AF_INET6
    ends = [socket.inet_pton(family, host.removeprefix(_MAPPED)) for host in (client[0], server[0])]
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _INFO, 0, _ALL_STATES)
    request += _SOCKET.pack(client[1], server[1], *ends) + _ANY_INTERFACE_NO_COOKIE
    return _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, 1, 1, 0) + request
