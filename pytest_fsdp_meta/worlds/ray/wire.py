"""Connections between the machines of a cluster: authenticated, and known to be broken soon after they are.

Nothing is encrypted, as nothing is between ranks: this is for a network whose machines trust each other.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from multiprocessing.connection import Connection

KEY_BYTES = 32
HANDSHAKE = 10.0
"""Seconds that it may take to connect and to prove who one is."""
STALL = 30
"""Seconds that the middle of a message may be on its way."""
SILENCE = 6
"""Seconds after which a machine that does not even acknowledge is taken for lost."""
_KEEPALIVE = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 2,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 1000 * SILENCE,
}


class Gate:
    """Where a host is reached. Bound to one address of this machine, on a port that the system picks."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), family=_family(address), backlog=128)
        self.port = int(self._socket.getsockname()[1])

    def wait(self) -> socket.socket:
        """The next that knocks, whoever it is."""
        return self._socket.accept()[0]

    def close(self) -> None:
        self._socket.close()


def admit(knocking: socket.socket, key: bytes) -> Connection:
    """The host's side of the handshake. Raises OSError, also where the other has another key."""
    return _shake_hands(knocking, key, b"host", b"parent")


def connect(address: str, port: int, key: bytes) -> Connection:
    """The parent's side. Raises OSError where nobody is there, or somebody who has another key."""
    return _shake_hands(socket.create_connection((address, port), HANDSHAKE), key, b"parent", b"host")


def answers(address: str, port: int, seconds: float = 1.0) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((address, port), seconds).close()
    except OSError:
        return False
    return True


def interface_of(address: str) -> str:
    """The network interface that has this address, empty where none has."""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(asking, get_address, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    return ""


def _shake_hands(sock: socket.socket, key: bytes, me: bytes, other: bytes) -> Connection:
    """Each proves that it has the key, and by its role, so that no answer can be played back to who gave it."""
    try:
        sock.settimeout(HANDSHAKE)
        mine = secrets.token_bytes(KEY_BYTES)
        sock.sendall(mine)
        theirs = _receive(sock, KEY_BYTES)
        sock.sendall(hmac.digest(key, me + theirs + mine, "sha256"))
        if not hmac.compare_digest(_receive(sock, 32), hmac.digest(key, other + mine + theirs, "sha256")):
            raise PermissionError("the other side has another key")
        _settle(sock)
    except BaseException:
        sock.close()
        raise
    return Connection(sock.detach())


def _settle(sock: socket.socket) -> None:
    """A machine that is gone is noticed by the system, and no read or write of a message can last for ever."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL, 0))
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(sock: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = sock.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the other side hung up")
        received += part
    return received


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
