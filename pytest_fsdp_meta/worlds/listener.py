"""The interface through which a world reports progress, notes, failures and output while a call runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pytest_fsdp_meta.worlds.failures import WorldError
from pytest_fsdp_meta.worlds.rank.warnings import RankWarning, reissue
from pytest_fsdp_meta.worlds.spec import WorldSpec


class ObservedWorld(Protocol):
    """The part of a ``World`` that its listener may use."""

    @property
    def label(self) -> str: ...

    @property
    def spec(self) -> WorldSpec: ...

    def can_debug(self, rank: int) -> bool:
        """Return whether ``post_mortem`` is possible on the rank."""

    def post_mortem(self, rank: int, debugger: str) -> bool:
        """Open a debugger where the last call failed on the rank; return whether the user typed "quit".

        It borrows the terminal from the listener. Raises ValueError, with the reason, if it got none.
        """

    def close(self) -> None:
        """End every rank."""


class Listener:
    """Receives the reports of one or more worlds. Override what you need; the default only reissues warnings of ranks.

    Every method but ``wrote`` is called in the thread that called the world.
    """

    live = False
    """Whether ``wrote`` is called."""

    def on_wait(self, world: ObservedWorld, doing: str) -> None:
        """Handle that the world starts to wait for its ranks, which are now ``doing``: "starting", "running load"."""

    def on_note(self, world: ObservedWorld, rank: int, kind: str, what: Any) -> None:
        """Handle a rank's call of ``note(kind, what)``."""
        if isinstance(what, RankWarning):
            reissue(what, f"on rank {rank}")

    def failed(self, world: ObservedWorld, error: WorldError, keep: Callable[[], ObservedWorld]) -> None:
        """Handle that a call failed; the world ends afterwards.

        ``keep()`` takes the ranks out of this world and returns them, still running, as a world that the listener has
        to close.
        """

    def interrupted(self, world: ObservedWorld, error: BaseException, describe: Callable[[str], WorldError]) -> None:
        """Handle that an exception ended the wait for the ranks, such as that of a time limit; the world ends now.

        ``describe(cause)`` asks the ranks where they are.
        """

    @contextmanager
    def lend_terminal(self, world: ObservedWorld, rank: int, pid: int) -> Iterator[None]:
        """Lend the rank's process the terminal for one prompt of a debugger. Raise ValueError with a reason if not."""
        raise ValueError("this world has no listener that provides one")
        yield

    def on_output(self, world: ObservedWorld, rank: int, lines: Sequence[str]) -> None:
        """Handle lines that the rank has written. Called from another thread until the world is closed."""
