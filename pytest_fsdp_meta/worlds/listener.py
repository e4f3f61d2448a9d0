"""What a world tells while it works, beside what its calls return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.worlds.rank.warnings import Warned, raise_again

if TYPE_CHECKING:
    from pytest_fsdp_meta.worlds.failures import WorldError
    from pytest_fsdp_meta.worlds.system.terminal import Terminal
    from pytest_fsdp_meta.worlds.world import World


class Listener:
    """Hears what happens in worlds. By itself it only raises again what ranks warn of: override what is to be heard.

    All is called in the thread that called the world, but ``wrote``.
    """

    live = False
    """Whether to call ``wrote``."""

    def waits(self, world: World, doing: str) -> None:
        """The world begins to wait for its ranks, which are doing this: "starting", "running load"."""

    def noted(self, world: World, rank: int, kind: str, what: Any) -> None:
        """A rank has called ``note(kind, what)``."""
        if isinstance(what, Warned):
            raise_again(what, f"on rank {rank}")

    def failed(self, world: World, error: WorldError, keep: Callable[[], World]) -> None:
        """The world is going to end with this error. ``keep()`` gives its ranks as they are, to be closed later."""

    @contextmanager
    def terminal(self, world: World, rank: int) -> Iterator[Terminal]:
        """A debugger on this rank asks for the terminal. Raises ValueError, with the reason, where there is none."""
        raise ValueError("nobody lends one")
        yield

    def wrote(self, world: World, rank: int, lines: Sequence[str]) -> None:
        """A rank has written these lines. From another thread, while the world runs and until it is closed."""
