"""Debuggers on a rank, at the terminal that the parent lends: after a failure, and at the user's breakpoints.

``breakpoint()``, ``pdb.set_trace()`` and ``torch.distributed.breakpoint()`` all call ``pdb.Pdb.interaction``, once for
each prompt. The terminal is borrowed for one prompt at a time, so that a user can step several ranks in turns through a
collective that needs all of them. A rank sends BORROWING, gets it back with the reason why there is no terminal, or "",
and sends RETURNING when the prompt is over.
"""

from __future__ import annotations

import os
import pdb
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pkgutil import resolve_name
from typing import Any

from pytest_fsdp_meta.worlds.failures import cause_of
from pytest_fsdp_meta.worlds.rank.channel import Channel

BORROWING, RETURNING = "borrowing the terminal", "returning the terminal"
POST_MORTEM = "post mortem"
"""The kind of the message that asks a rank for a post-mortem debugger, and of its answer when the user has left it."""
TERMINAL = "/dev/tty"
"""The controlling terminal of whichever process opens it."""
_has_terminal = False


def borrow_terminal_through(channel: Channel) -> None:
    """Make every debugger on this rank ask the parent for the terminal before each prompt."""
    usual = pdb.Pdb.interaction

    def interaction(session: pdb.Pdb, *args: Any, **kwargs: Any) -> None:
        if _has_terminal or not channel.is_own:
            usual(session, *args, **kwargs)
            return
        try:
            with _borrowed_terminal(channel):
                session.stdin, session.stdout = sys.stdin, sys.stdout
                usual(session, *args, **kwargs)
        except _NoTerminal as why_not:
            raise RuntimeError(f"a debugger on this rank has no terminal: {why_not}") from None

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign,assignment]


def post_mortem(channel: Channel, error: BaseException, debugger: str) -> None:
    """Open a debugger where the error was raised, and answer whether the user left it with "quit", or why it failed.

    ``debugger`` is a class as "module:name", empty for ``pdb.Pdb``.
    """
    error = cause_of(error)
    quits, why_not = False, ""
    try:
        with _borrowed_terminal(channel), suppress(KeyboardInterrupt):
            session = _class(debugger)()
            session.reset()
            session.interaction(None, error if sys.version_info >= (3, 13) else error.__traceback__)
            quits = bool(session.quitting)
    except _NoTerminal as reason:
        why_not = str(reason)
    channel.send(POST_MORTEM, quits, why_not)


def _class(debugger: str) -> Any:
    if not debugger:
        return pdb.Pdb
    try:
        return resolve_name(debugger)
    except Exception as error:  # importing the module can raise anything
        print(f"--pdbcls={debugger} cannot be imported on this rank ({type(error).__name__}: {error}); using pdb")
        return pdb.Pdb


class _NoTerminal(Exception):
    """The parent has no terminal to lend; the message is its reason."""


@contextmanager
def _borrowed_terminal(channel: Channel) -> Iterator[None]:
    channel.send(BORROWING)
    _, why_not = channel.receive()
    if why_not:
        raise _NoTerminal(why_not)
    try:
        with _at_the_terminal():
            yield
    finally:
        channel.send(RETURNING)


@contextmanager
def _at_the_terminal() -> Iterator[None]:
    """Connect the standard streams to the terminal, for C code as well, because readline reads the keys."""
    global _has_terminal
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            # Ignore Ctrl-Z: the shell waits for pytest, which would wait for a stopped rank for ever.
            stack.callback(signal.signal, signal.SIGTSTP, signal.signal(signal.SIGTSTP, signal.SIG_IGN))
        terminal = os.open(TERMINAL, os.O_RDWR)
        for descriptor in (0, 1, 2):
            original = os.dup(descriptor)
            stack.callback(os.close, original)
            stack.callback(os.dup2, original, descriptor)
            os.dup2(terminal, descriptor)
        os.close(terminal)
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            stack.callback(setattr, sys, name, getattr(sys, name))
            mode = "w" if descriptor else "r"
            stream = open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            if descriptor:
                stack.callback(stream.flush)
        _has_terminal = True
        try:
            yield
        finally:
            _has_terminal = False


class Terminal:
    """The terminal of this process, open until ``close``.

    Raises ValueError, with the reason, if this process has no terminal to lend.
    """

    def __init__(self) -> None:
        if not os.isatty(0):
            raise ValueError("stdin is not a terminal")
        try:
            self._terminal = os.open(TERMINAL, os.O_RDWR | os.O_CLOEXEC)
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
