"""The terminal that this process was started from, lent to one of its ranks for a while."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATH = "/dev/tty"
"""The controlling terminal of whichever process opens it."""


class Terminal:
    """The terminal of this process, open until ``close``.

    Raises ValueError, with the reason, if this process has no terminal to lend.
    """

    def __init__(self) -> None:
        if not os.isatty(0):
            raise ValueError("stdin is not a terminal")
        try:
            self._terminal = os.open(PATH, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise ValueError("the pytest process has no terminal") from None
        if os.tcgetpgrp(self._terminal) != os.getpgrp():
            self.close()
            raise ValueError("pytest runs in the background of its terminal")

    def close(self) -> None:
        os.close(self._terminal)

    @contextmanager
    def lent_to(self, pid: int) -> Iterator[None]:
        """Send the keyboard, and so Ctrl-C, to this process, which leads a process group of the same session.

        Raises ValueError if the process has ended.
        """
        modes = termios.tcgetattr(self._terminal)
        try:
            os.tcsetpgrp(self._terminal, pid)
        except OSError as error:
            raise ValueError(f"the system refused to lend it to that process ({error})") from error
        try:
            yield
        finally:
            # Taking the terminal back from the background raises SIGTTOU, which would stop this process.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            try:
                with suppress(OSError):  # the terminal was closed meanwhile
                    os.tcsetpgrp(self._terminal, os.getpgrp())
                    termios.tcsetattr(self._terminal, termios.TCSADRAIN, modes)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
