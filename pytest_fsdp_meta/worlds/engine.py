"""The seam between a world and the machines that its ranks run on: who starts them, and how one is spoken to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pytest_fsdp_meta.worlds.failures import RankFailure
from pytest_fsdp_meta.worlds.spec import Sources, WorldSpec
from pytest_fsdp_meta.worlds.system.output import Written


class Member(Protocol):
    """One rank as its world sees it. No method waits for the rank longer than it is told to."""

    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int | None:
        """Where a debugger of this machine can look at it; None where the rank is on another."""

    @property
    def handles(self) -> Sequence[Any]:
        """For ``multiprocessing.connection.wait``: one is ready when there is something to hear, or the rank ended."""

    @property
    def has_ended(self) -> bool: ...

    @property
    def has_news(self) -> bool:
        """Whether there is something to hear of which no handle may tell."""

    def send(self, note: bytes) -> None:
        """``note`` is a message as ``post.pack`` made it."""

    def hear(self) -> tuple[Any, ...] | None:
        """The message that has arrived, None where none will."""

    def ending(self) -> RankFailure:
        """How the rank ended, of which no message told."""

    def kill(self) -> None:
        """At once, with what it has started. Safe to call twice, and after its end."""

    def join(self, seconds: float) -> None: ...

    def release(self) -> None:
        """Nobody will ask anything again."""

    def written(self) -> Written:
        """What it has written to stdout and stderr so far."""

    def read(self, at: int) -> bytes:
        """What it has written after the first ``at`` bytes, or the beginning of that; empty where there is none."""

    def ask_stack(self) -> None:
        """Makes it write down where it stands."""

    def stack(self, deadline: float) -> str:
        """What it has written down since it was asked, on the clock of ``time.monotonic``."""


class Engine(Protocol):
    """Starts ranks. One per pytest session, which sets what ranks find imported."""

    sources: Sources
    modules: Sequence[str]
    """Modules of ours and of downstream's that every rank needs, by name."""
    test_modules: Sequence[str]

    def start(self) -> None:
        """Begins what worlds would wait for."""

    def count_gpus(self) -> int:
        """Return the number of GPUs that worlds of this engine can use. Raises ValueError where it cannot be known."""

    def launch(self, spec: WorldSpec, folder: Path, leftovers: Sequence[str]) -> Iterator[Member]:
        """The ranks in their order, each as soon as it is started. ``folder`` is for the world's own messages.

        ``leftovers`` are the folders that go when this process is killed. Raises ValueError where such a world cannot
        be had.
        """

    def close(self) -> None:
        """The end of the session; what was started and is no world is ended."""
