"""Authenticated connections between the machines of a cluster, which report a lost machine within seconds.

They are not encrypted, and neither is the traffic between ranks: the machines of the network must trust each other.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from multiprocessing.connection import Connection

KEY_BYTES = 32
HANDSHAKE_TIMEOUT = 10.0
"""Seconds to connect and to authenticate."""
STALL_TIMEOUT = 30
"""Seconds that one read or write may block in the middle of a message."""
SILENCE_TIMEOUT = 6
"""Seconds without a TCP acknowledgement after which a machine counts as lost."""
_KEEPALIVE = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 2,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 1000 * SILENCE_TIMEOUT,
}


def authenticate(accepted: socket.socket, key: bytes) -> Connection:
    """Return an accepted connection after the host's side of the handshake. Raises OSError if the keys differ."""
    return _shake_hands(accepted, key, b"host", b"parent")


def connect(address: str, port: int, key: bytes) -> Connection:
    """Connect to a host: the parent's side. Raises OSError if no host listens there, or if the keys differ."""
    return _shake_hands(socket.create_connection((address, port), HANDSHAKE_TIMEOUT), key, b"parent", b"host")


def is_listening(address: str, port: int, seconds: float = 1.0) -> bool:
    """Return whether the address accepts connections on this port."""
    try:
        socket.create_connection((address, port), seconds).close()
    except OSError:
        return False
    return True


def interface_of(address: str) -> str:
    """Return the network interface that has this address; "" if none has."""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, get_address, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _shake_hands(sock: socket.socket, key: bytes, own_role: bytes, other_role: bytes) -> Connection:
    """Prove to each other that both sides have the key.

    A proof contains the role of its sender, so a side cannot be deceived by its own proof sent back to it.
    """
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT)
        mine = secrets.token_bytes(KEY_BYTES)
        sock.sendall(mine)
        theirs = _receive(sock, KEY_BYTES)
        sock.sendall(hmac.digest(key, own_role + theirs + mine, "sha256"))
        if not hmac.compare_digest(_receive(sock, 32), hmac.digest(key, other_role + mine + theirs, "sha256")):
            raise PermissionError("the other side has a different key")
        _set_timeouts(sock)
    except BaseException:
        sock.close()
        raise
    return Connection(sock.detach())


def _set_timeouts(sock: socket.socket) -> None:
    """Have the system notice a lost machine, and bound how long a read or write can block."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_TIMEOUT, 0))
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(sock: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = sock.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        received += part
    return received
