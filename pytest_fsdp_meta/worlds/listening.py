"""What a world tells while it works, beside what its calls return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fsdp_meta.worlds.world import World

DOING = "doing"
"""The kind of the notes that say what a rank does: "training step 2 of 3"."""


class Listener:
    """Hears what happens in worlds. Does nothing by itself: override what is to be heard.

    All is called in the thread that called the world, but ``wrote``.
    """

    live = False
    """Whether to call ``wrote``."""

    def waits(self, world: World, doing: str) -> None:
        """The world begins to wait for its ranks, which are doing this: "starting", "running load"."""

    def noted(self, world: World, rank: int, kind: str, what: Any) -> None:
        """A rank has called ``note(kind, what)``."""

    def wrote(self, world: World, rank: int, lines: Sequence[str]) -> None:
        """A rank has written these lines. From another thread, while the world runs and until it is closed."""
