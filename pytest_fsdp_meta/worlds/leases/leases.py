"""Leases of devices: GPUs, or rank slots of the CPU, of which the workers of one run use none twice.

Each device is a file lock, which the system frees when its worker ends, however it ends. Who wants several devices
takes them all while holding the queue, and nobody waits while holding a device: so there is no deadlock, and a large
world is not overtaken for ever by small ones. Notes beside the locks say who holds what; they are for messages only.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from pytest_fsdp_meta.text import counted, joined_runs
from pytest_fsdp_meta.worlds.leases.locks import FileLock

POLL = 0.02
"""Seconds between two looks at a lock that somebody else holds, on the average."""
QUIET = 2.0
"""Seconds of waiting that are not worth a word."""
PATIENCE = 3600.0
"""Seconds in which nobody takes or gives back a device, after which nobody is expected to."""
ORPHANS = 2.0
"""Seconds in which the ranks of a worker that was killed end by themselves."""
QUEUE = "queue"
REMEDY = "set TMPDIR to a folder of this machine's own disk"
Waiting: TypeAlias = Callable[[str], None]
"""Takes a line that says what is waited for and who holds it; called every second of a long wait."""


class LeaseError(Exception):
    """The devices cannot be had: one line that says why, and who holds them."""


class Lease:
    """Devices that are this worker's own until ``release``. A context manager.

    Leases of one worker overlap: it runs one world at a time, so the others are idle meanwhile.
    """

    def __init__(self, owner: Leases, devices: tuple[int, ...], what: str) -> None:
        self.devices = devices
        """Fewer than were asked for where there are no more."""
        self.what = what
        self._owner = owner

    def release(self) -> None:
        """Gives them back; safe to call twice."""
        self._owner.give_back(self)

    def resume(self, waiting: Waiting | None = None, patience: float = PATIENCE) -> None:
        """Takes the very same devices again after ``release``, for a world that was kept idle on them."""
        self._owner.take_again(self, waiting, patience)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Leases:
    """The devices of one kind ("slot", "GPU") as one worker sees them. Not for several threads at a time.

    ``folder`` is that of the run, and ``names`` are what the workers agree to call the devices, in the order of their
    indices.
    """

    def __init__(self, folder: Path, kind: str, names: Sequence[str], worker: str) -> None:
        self.kind = kind
        self._folder = folder
        self._names = names
        self._worker = worker
        self._board = _Board(folder, kind)
        self._held: dict[int, FileLock] = {}
        self._lent: list[Lease] = []
        self._settled = 0.0
        """When no orphan uses a device any more, on the machine's monotonic clock."""

    def take(self, count: int, what: str, waiting: Waiting | None = None, patience: float = PATIENCE) -> Lease:
        """Waits for ``count`` devices, or for all where there are fewer. ``what`` is what the others are told.

        While it waits, what this worker holds already is free for the others; it comes back with the new lease.
        Raises LeaseError after ``patience`` seconds in which nothing moves.
        """
        assert count > 0
        count = min(count, len(self._names))
        if count > len(self._held):
            self._acquire(count, frozenset(self._held), what, waiting, patience)
        lease = Lease(self, tuple(sorted(self._held)[:count]), what)
        self._lent.append(lease)
        return lease

    def take_again(self, lease: Lease, waiting: Waiting | None, patience: float) -> None:
        if lease not in self._lent:
            wanted = frozenset(self._held) | frozenset(lease.devices)
            if len(wanted) > len(self._held):
                self._acquire(len(wanted), wanted, lease.what, waiting, patience)
            self._lent.append(lease)

    def give_back(self, lease: Lease) -> None:
        if lease in self._lent:
            self._lent.remove(lease)
        self._free(self._held.keys() - {device for other in self._lent for device in other.devices})

    def wanted(self) -> bool:
        """Whether another worker waits while this one holds devices, so that it should keep none idle."""
        head = self._board.read(QUEUE) if self._held else None
        if head is None:
            return False
        queue = self._lock(QUEUE)
        if queue is not None:  # who left the note has ended
            self._board.clear(QUEUE)
            queue.release()
        return queue is None

    def _acquire(self, count: int, wanted: frozenset[int], what: str, waiting: Waiting | None, patience: float) -> None:
        """Holds ``count`` devices afterwards, among them those that are ``wanted``."""
        self._free(list(self._held))
        mine = _Note(self._worker, what, count, time.monotonic())
        wait = _Wait(lambda: self._board.look(self._names, mine), waiting, patience)
        got: dict[int, FileLock] = {}
        try:
            with self._queued(wait):
                while not self._grab(got, count, wanted) or time.monotonic() < self._settled:
                    self._board.write(QUEUE, mine)
                    wait.pause()
        except BaseException:
            for lock in got.values():
                lock.release()
            raise
        self._held = got
        mine = _Note(self._worker, what, count, time.monotonic())
        for device in got:
            self._board.write(self._names[device], mine)

    @contextmanager
    def _queued(self, wait: _Wait) -> Iterator[None]:
        while (queue := self._lock(QUEUE)) is None:
            wait.pause()
        try:
            yield
        finally:
            self._board.clear(QUEUE)
            queue.release()

    def _grab(self, got: dict[int, FileLock], count: int, wanted: Collection[int]) -> bool:
        """Takes of what is missing what is free; whether nothing is missing any more."""
        for device in sorted(range(len(self._names)), key=lambda one: one not in wanted):
            spare = count - len(got.keys() | wanted)
            if device not in got and (device in wanted or spare > 0):
                lock = self._lock(self._names[device])
                if lock is not None:
                    got[device] = lock
                    if self._board.clear(self._names[device]):
                        # Of a worker that has ended while it held the device, a moment ago perhaps.
                        self._settled = time.monotonic() + ORPHANS
        return len(got) == count

    def _free(self, devices: Collection[int]) -> None:
        for device in devices:
            self._board.clear(self._names[device])
            self._held.pop(device).release()

    def _lock(self, name: str) -> FileLock | None:
        path = self._folder / f"{self.kind}-{name}.lock"
        try:
            return FileLock.attempt(path)
        except OSError as error:
            raise LeaseError(f"devices cannot be leased: {path}: {error.strerror}; {REMEDY}") from error


@dataclass(frozen=True)
class _Note:
    """What a worker leaves beside the devices that it holds, and beside the queue while it waits at its head."""

    who: str
    what: str
    count: int
    since: float
    """The machine's monotonic clock."""


class _Board:
    """The notes of all workers about the devices of one kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind

    def write(self, name: str, note: _Note) -> None:
        with suppress(OSError):  # the disk is full: only messages suffer
            self._path(name).write_text(json.dumps(asdict(note)), "utf-8")

    def clear(self, name: str) -> bool:
        """Whether there was one."""
        try:
            self._path(name).unlink()
        except OSError:
            return False
        return True

    def read(self, name: str) -> _Note | None:
        try:
            return _Note(**json.loads(self._path(name).read_text("utf-8")))
        except (OSError, ValueError, TypeError):  # none, or it is just being written
            return None

    def look(self, names: Sequence[str], mine: _Note) -> tuple[object, str]:
        """What changes when something moves; and "waiting for 4 of 8 slots: gw1 holds 0-3 for test_a, 12 s; ...".

        A device in nobody's hands is told of by nobody: who waits at the head of the queue may have it already.
        """
        holders: dict[_Note, list[int]] = {}
        for device, name in enumerate(names):
            if (note := self.read(name)) is not None:
                holders.setdefault(note, []).append(device)
        now = time.monotonic()
        told = [
            f"{note.who} holds {joined_runs(devices)} for {note.what}, {now - note.since:.0f} s"
            for note, devices in holders.items()
        ]
        head = self.read(QUEUE)
        if head is not None and head.who != mine.who:
            told.append(f"{head.who} comes first, with {head.count} for {head.what}")
        what = f"{mine.count} of {counted(len(names), self._kind)}"
        return (holders, head), f"waiting for {what}: {'; '.join(told)}" if told else f"waiting for {what}"

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._kind}-{name}.note"


class _Wait:
    """A wait that tells why it lasts, and that ends where nothing moves any more."""

    def __init__(self, look: Callable[[], tuple[object, str]], waiting: Waiting | None, patience: float) -> None:
        self._look = look
        self._waiting = waiting
        self._patience = patience
        self._moved = time.monotonic()
        self._next = self._moved + min(QUIET, patience)
        self._before: object = None

    def pause(self) -> None:
        """A moment. Raises LeaseError at the end of the patience."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + min(1.0, self._patience)
            seen, story = self._look()
            if seen != self._before:
                self._before, self._moved = seen, now
            if now - self._moved > self._patience:
                raise LeaseError(f"nothing moved for {self._patience:g} s while {story}")
            if self._waiting is not None:
                self._waiting(story)
        time.sleep(POLL * random.uniform(0.5, 1.5))  # so that no two workers poll in step
