"""Leases of devices: GPUs, or CPU slots. No two workers of a run hold the same device.

Each device is a file lock, which the operating system releases when the worker ends, for whatever reason. A worker that
wants several devices holds the queue lock while it collects them, and releases the devices that it has before it waits
for the queue. So workers cannot deadlock, and small worlds cannot overtake a large one forever. Notes next to the locks
record who holds what; only messages depend on them.
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
from pytest_fsdp_meta.worlds.leases.file_lock import FileLock

POLL_INTERVAL = 0.02
"""Mean seconds between two attempts to take a lock that another worker holds."""
QUIET = 2.0
"""Seconds of waiting before the first message."""
PATIENCE = 3600.0
"""Seconds without a change of devices or queue after which a wait fails."""
ORPHAN_GRACE = 2.0
"""Seconds within which the ranks of a killed worker end by themselves."""
QUEUE = "queue"
REMEDY = "set TMPDIR to a folder on a local disk"
WaitCallback: TypeAlias = Callable[[str], None]
"""Called every second of a long wait with a line that says what is waited for and who holds it."""


class LeaseError(Exception):
    """Devices cannot be leased. The message is one line that gives the reason and the holders."""


class Lease:
    """Devices that only this worker uses until ``release``. A context manager.

    Leases of one worker may overlap: it runs one world at a time, and the other worlds are idle meanwhile.
    """

    def __init__(self, owner: Leases, devices: tuple[int, ...], purpose: str) -> None:
        self.devices = devices
        """Device indices; fewer than requested if the machine has fewer."""
        self.purpose = purpose
        self._owner = owner

    @property
    def names(self) -> Sequence[str]:
        """The names of all devices of the kind, by device index, as file names have them."""
        return self._owner.names

    def release(self) -> None:
        """Release the devices; safe to call twice."""
        self._owner.release(self)

    def resume(self, waiting: WaitCallback | None = None, patience: float = PATIENCE) -> None:
        """Take the same devices again after ``release``, for an idle world that was started on them."""
        self._owner.resume(self, waiting, patience)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Leases:
    """The devices of one kind ("slot", "GPU"), as one worker sees them. Not thread-safe.

    ``folder`` is the run's folder. ``names`` are the names by device index; all workers of the run use the same name
    for the same device.
    """

    def __init__(self, folder: Path, kind: str, names: Sequence[str], worker: str) -> None:
        self.kind = kind
        self.names = names
        self._folder = folder
        self._worker = worker
        self._notes = _Notes(folder, kind)
        self._held: dict[int, FileLock] = {}
        self._active: list[Lease] = []
        self._orphans_gone_at = 0.0
        """When the ranks of killed workers have ended, on the machine's monotonic clock."""

    def take(self, count: int, purpose: str, waiting: WaitCallback | None = None, patience: float = PATIENCE) -> Lease:
        """Wait for ``count`` devices, or for all if there are fewer. Other workers' messages name the ``purpose``.

        While this worker waits, other workers may use the devices that it already holds; it gets them back together
        with the new ones. Raises LeaseError after ``patience`` seconds in which no device changes hands.
        """
        assert count > 0
        count = min(count, len(self.names))
        if count > len(self._held):
            self._acquire(count, frozenset(self._held), purpose, waiting, patience)
        lease = Lease(self, tuple(sorted(self._held)[:count]), purpose)
        self._active.append(lease)
        return lease

    def resume(self, lease: Lease, waiting: WaitCallback | None, patience: float) -> None:
        """Take the devices of a released lease again; does nothing if the lease is active."""
        if lease not in self._active:
            required = frozenset(self._held) | frozenset(lease.devices)
            if len(required) > len(self._held):
                self._acquire(len(required), required, lease.purpose, waiting, patience)
            self._active.append(lease)

    def release(self, lease: Lease) -> None:
        """Release the devices that no other active lease of this worker includes."""
        if lease in self._active:
            self._active.remove(lease)
        self._unlock(self._held.keys() - {device for other in self._active for device in other.devices})

    def wanted(self) -> bool:
        """Return whether another worker is queued while this one holds devices, so that it should keep none idle."""
        head = self._notes.read(QUEUE) if self._held else None
        if head is None:
            return False
        queue = self._try_lock(QUEUE)
        if queue is not None:  # the worker that wrote the note has ended
            self._notes.remove(QUEUE)
            queue.release()
        return queue is None

    def _acquire(
        self, count: int, required: frozenset[int], purpose: str, waiting: WaitCallback | None, patience: float
    ) -> None:
        """Replace the held devices by ``count`` devices that include the ``required`` ones."""
        self._unlock(list(self._held))
        mine = _Note(self._worker, purpose, count, time.monotonic())
        wait = _Wait(lambda: self._notes.describe_wait(self.names, mine), waiting, patience)
        locks: dict[int, FileLock] = {}
        try:
            with self._queued(wait):
                while not self._try_devices(locks, count, required) or time.monotonic() < self._orphans_gone_at:
                    self._notes.write(QUEUE, mine)
                    wait.pause()
        except BaseException:
            for lock in locks.values():
                lock.release()
            raise
        self._held = locks
        mine = _Note(self._worker, purpose, count, time.monotonic())
        for device in locks:
            self._notes.write(self.names[device], mine)

    @contextmanager
    def _queued(self, wait: _Wait) -> Iterator[None]:
        while (queue := self._try_lock(QUEUE)) is None:
            wait.pause()
        try:
            yield
        finally:
            self._notes.remove(QUEUE)
            queue.release()

    def _try_devices(self, locks: dict[int, FileLock], count: int, required: Collection[int]) -> bool:
        """Lock the missing devices that are free and add them to ``locks``; return whether none is missing."""
        for device in sorted(range(len(self.names)), key=lambda index: index not in required):
            spare = count - len(locks.keys() | required)
            if device not in locks and (device in required or spare > 0):
                lock = self._try_lock(self.names[device])
                if lock is not None:
                    locks[device] = lock
                    if self._notes.remove(self.names[device]):
                        # Its holder ended without releasing it, perhaps just now, so its ranks may still run.
                        self._orphans_gone_at = time.monotonic() + ORPHAN_GRACE
        return len(locks) == count

    def _unlock(self, devices: Collection[int]) -> None:
        for device in devices:
            self._notes.remove(self.names[device])
            self._held.pop(device).release()

    def _try_lock(self, name: str) -> FileLock | None:
        path = self._folder / f"{self.kind}-{name}.lock"
        try:
            return FileLock.attempt(path)
        except OSError as error:
            raise LeaseError(f"cannot lease devices: {path}: {error.strerror}; {REMEDY}") from error


@dataclass(frozen=True)
class _Note:
    """What a worker writes next to each lock that it holds: those of its devices, and the queue lock."""

    worker: str
    purpose: str
    count: int
    since: float
    """Time on the machine's monotonic clock."""


class _Notes:
    """The notes of all workers about the devices of one kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind

    def write(self, name: str, note: _Note) -> None:
        with suppress(OSError):  # the disk is full: only messages suffer
            self._path(name).write_text(json.dumps(asdict(note)), "utf-8")

    def remove(self, name: str) -> bool:
        """Remove the note and return whether there was one."""
        try:
            self._path(name).unlink()
        except OSError:
            return False
        return True

    def read(self, name: str) -> _Note | None:
        try:
            return _Note(**json.loads(self._path(name).read_text("utf-8")))
        except (OSError, ValueError, TypeError):  # there is none, or it is being written
            return None

    def describe_wait(self, names: Sequence[str], mine: _Note) -> tuple[object, str]:
        """Return a state that differs whenever a device or the queue changes hands, and a line for the user.

        The line is "waiting for 4 of 8 slots: gw1 holds 0-3 for test_a (12 s); ...". It leaves out devices without a
        note: the worker that is first in the queue may have locked them already.
        """
        holders: dict[_Note, list[int]] = {}
        for device, name in enumerate(names):
            if (note := self.read(name)) is not None:
                holders.setdefault(note, []).append(device)
        now = time.monotonic()
        reasons = [
            f"{note.worker} holds {joined_runs(devices)} for {note.purpose} ({now - note.since:.0f} s)"
            for note, devices in holders.items()
        ]
        head = self.read(QUEUE)
        if head is not None and head.worker != mine.worker:
            reasons.append(f"{head.worker} is next in the queue: {head.count} for {head.purpose}")
        line = f"waiting for {mine.count} of {counted(len(names), self._kind)}"
        return (holders, head), f"{line}: {'; '.join(reasons)}" if reasons else line

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._kind}-{name}.note"


class _Wait:
    """A wait that reports its reason every second, and fails when no device changes hands for too long."""

    def __init__(
        self, describe: Callable[[], tuple[object, str]], waiting: WaitCallback | None, patience: float
    ) -> None:
        self._describe = describe
        self._waiting = waiting
        self._patience = patience
        self._changed_at = time.monotonic()
        self._report_at = self._changed_at + min(QUIET, patience)
        self._state: object = None

    def pause(self) -> None:
        """Sleep for one poll interval. Raises LeaseError when the patience is exhausted."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + min(1.0, self._patience)
            state, line = self._describe()
            if state != self._state:
                self._state, self._changed_at = state, now
            if now - self._changed_at > self._patience:
                raise LeaseError(f"gave up after {self._patience:g} s without a change while {line}")
            if self._waiting is not None:
                self._waiting(line)
        time.sleep(POLL_INTERVAL * random.uniform(0.5, 1.5))  # random, so that workers do not poll in step
