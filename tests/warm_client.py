"""Request a pytest run from the warm process of ``tests.warm_runs``: ``python -IS warm_client.py ARGS``.

Only the standard library is imported, so that this script starts fast.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

ADDRESS = "WARM_RUNS"
"""The environment variable with the path of the socket."""


def run_pytest(address: str, args: Sequence[str], descriptors: Sequence[int], timeout: float | None = None) -> int:
    """Run ``pytest ARGS`` in this folder and environment with these three standard streams; return its exit status.

    Raises TimeoutError, and kills the run, after ``timeout`` seconds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        send(connection, {"args": list(args), "cwd": os.getcwd(), "environ": dict(os.environ)}, descriptors)
        connection.settimeout(timeout)
        with connection.makefile("r") as answers:
            pid = int(answers.readline())
            try:
                for one in (signal.SIGINT, signal.SIGTERM) if __name__ == "__main__" else ():
                    signal.signal(one, lambda number, _: os.kill(pid, number))
                return os.waitstatus_to_exitcode(int(answers.readline()))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise


def send(connection: socket.socket, request: object, descriptors: Sequence[int]) -> None:
    """Send a request and copies of these descriptors."""
    text = json.dumps(request).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([len(text).to_bytes(8, "little")], [rights])
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Return the request and the descriptors that ``send`` has sent. Raises EOFError if the other side has closed."""
    header, rights, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(16 * array.array("i").itemsize))
    if not header:
        raise EOFError
    text = b""
    while len(text) < int.from_bytes(header, "little"):
        text += connection.recv(2**16)
    return json.loads(text), array.array("i", rights[0][2]).tolist()


if __name__ == "__main__":
    status = run_pytest(os.environ[ADDRESS], sys.argv[1:], (0, 1, 2))
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)
