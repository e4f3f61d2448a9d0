"""What multiprocessing's fork servers lack public names for: their process, the pipe that keeps it alive, a second one.

tests/worlds/test_multiprocessing_private.py fails when one of the private names moves.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from typing import Any


class ForkServer(forkserver.ForkServer):
    """A fork server besides the global one."""

    _forkserver_pid: int | None
    _forkserver_alive_fd: int
    _stop: Any

    @property
    def pid(self) -> int | None:
        """The number of its process; None once that has ended, because another process may get the number then."""
        if self._forkserver_pid is not None:
            try:
                ended = os.waitpid(self._forkserver_pid, os.WNOHANG)[0]
            except ChildProcessError:  # other code has waited for it
                ended = self._forkserver_pid
            if ended:
                self._forkserver_pid = None
                os.close(self._forkserver_alive_fd)
        return self._forkserver_pid

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let multiprocessing fork from this server instead of its global one."""
        before = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = self.connect_to_new_process
        try:
            yield
        finally:
            forkserver.connect_to_new_process = before

    def kill(self) -> None:
        """End the process without waiting for its imports to finish."""
        with suppress(OSError):
            if (pid := self.pid) is not None:
                os.kill(pid, signal.SIGKILL)
            self._stop()


def leave_server_alone() -> None:
    """Close this rank's copy of the descriptor that keeps the fork server alive, so that it ends with the parent.

    The system kills ranks when the fork server ends: the last resort for a rank whose threads are all stuck.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
