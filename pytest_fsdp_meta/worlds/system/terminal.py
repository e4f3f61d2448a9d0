"""The terminal that this process was started from, lent to one of its ranks for a while."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATH = "/dev/tty"
"""Whichever terminal a process has, under the same name."""


class Terminal:
    """Raises ValueError, with the reason, where this process cannot give away a terminal."""

    def __init__(self) -> None:
        if not os.isatty(0):
            raise ValueError("stdin is no terminal")
        try:
            self._terminal = os.open(PATH, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise ValueError("there is no terminal") from None
        if os.tcgetpgrp(self._terminal) != os.getpgrp():
            self.close()
            raise ValueError("pytest runs in the background of its terminal")

    def close(self) -> None:
        os.close(self._terminal)

    @contextmanager
    def lent_to(self, pid: int) -> Iterator[None]:
        """Keys, and with them Ctrl-C, go to this process, which leads a process group of the same session.

        Raises ValueError where it has ended.
        """
        modes = termios.tcgetattr(self._terminal)
        try:
            os.tcsetpgrp(self._terminal, pid)
        except OSError as error:
            raise ValueError(f"the system does not give it to that process ({error})") from error
        try:
            yield
        finally:
            # The system stops who takes a terminal back from the background, unless it does not listen.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            try:
                with suppress(OSError):  # it was closed meanwhile
                    os.tcsetpgrp(self._terminal, os.getpgrp())
                    termios.tcsetattr(self._terminal, termios.TCSADRAIN, modes)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
