"""Leases of devices: GPUs, or CPU slots. No two worker processes of a run use the same device.

Each device is a locked file, which the operating system unlocks when the worker ends, for whatever reason. A worker
holds the lock of the queue while it collects devices, and holds no device before that. So workers cannot deadlock, and
small worlds cannot overtake a large one forever.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

from filelock import BaseFileLock, FileLock, Timeout

from pytest_fsdp_meta.text import counted, joined_runs
from pytest_fsdp_meta.worlds.spec import VISIBLE, WorldSpec

POLL_INTERVAL = 0.02
"""Mean seconds between two attempts to lock a file that another worker holds."""
QUIET = 2.0
"""Seconds of waiting before the first message."""
PATIENCE = 3600.0
"""Seconds without a change of devices or queue after which a wait fails."""
ORPHAN_GRACE = 2.0
"""Seconds within which the ranks of a killed worker end by themselves."""
QUEUE = "queue"
WaitCallback: TypeAlias = Callable[[str], None]
"""Called every second of a long wait with a line that says what is waited for and who holds it."""


class LeaseError(Exception):
    """Devices cannot be leased. The message is one line that gives the reason and the holders."""


def sharing_error(path: Path, error: OSError) -> LeaseError:
    return LeaseError(
        f"cannot share devices between workers: {path}: {error.strerror}; set TMPDIR to a folder on a local disk"
    )


class LockedFile:
    """A file that this process holds locked until ``release``, with a note for others to read.

    Forked children do not hold the lock and cannot release it.
    """

    def __init__(self, path: Path, lock: BaseFileLock) -> None:
        self._note, self._lock = self.note(path), lock
        self.left = self._note.read_text("utf-8", "replace") if self._note.exists() else ""
        """The note of the last holder: empty unless it ended without ``release``, or kept one."""

    @staticmethod
    def note(path: Path) -> Path:
        """Return the file of the note: one of its own, because filelock before 4.2 empties the file that it locks."""
        return path.with_name(f"{path.name}.note")

    @classmethod
    def attempt(cls, path: Path) -> LockedFile | None:
        """Return the locked file, or None if another holder has it. Raises LeaseError if it cannot be opened."""
        lock = FileLock(path, mode=0o600, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
            return cls(path, lock)
        except Timeout:
            return None
        except OSError as error:
            raise sharing_error(path, error) from error

    def write(self, note: str) -> None:
        if self._lock.is_locked:
            with suppress(OSError):  # the disk is full: only messages suffer
                if note:
                    self._note.write_text(note, "utf-8")
                else:
                    self._note.unlink(missing_ok=True)

    def release(self, keep: str = "") -> None:
        """Replace the note by ``keep`` and unlock the file; safe to call twice."""
        self.write(keep)
        self._lock.release()


class _Note(NamedTuple):
    """What a worker writes into each file that it has locked. Only messages depend on notes."""

    worker: str
    purpose: str
    size: int
    since: float
    """Time on the machine's monotonic clock."""


class Lease:
    """Devices of one kind ("slot", "GPU") that only this worker uses between ``acquire`` and ``release``.

    A context manager, which releases. ``folder`` is the run's; ``names`` are those of all devices of the kind, the same
    for all workers of the run. A worker holds one lease at a time.
    """

    def __init__(
        self, folder: Path, worker: str, kind: str, names: Sequence[str], count: int, purpose: str, patience: float
    ) -> None:
        self.names = names
        self.devices: tuple[int, ...] = ()
        """Indices of the devices, which every later ``acquire`` waits for; fewer than wanted if there are fewer."""
        self._folder = folder
        self._worker = worker
        self._kind = kind
        self._count = min(count, len(names))
        self._purpose = purpose
        self._patience = patience
        self._locks: dict[int, LockedFile] = {}
        self._orphans_gone_at = 0.0
        """When the ranks of killed workers have ended, on the machine's monotonic clock."""

    def acquire(self, waiting: WaitCallback | None = None) -> None:
        """Wait for the devices. Raises LeaseError if no device changes hands for as long as the patience lasts."""
        if self._locks:
            return
        wait = _Wait(self._describe_wait, waiting, self._patience)
        try:
            while (queue := LockedFile.attempt(self._path(QUEUE))) is None:
                wait.pause()
            try:
                if not self._lock_devices():
                    queue.write(self._note())
                    while not self._lock_devices():
                        wait.pause()
            finally:
                queue.release()
        except BaseException:
            self.release()
            raise
        self.devices = tuple(sorted(self._locks))
        note = self._note()
        for lock in self._locks.values():
            lock.write(note)

    def release(self) -> None:
        """Release the devices; safe to call twice."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def wanted(self) -> bool:
        """Return whether another worker waits for devices of this kind, so that this one should keep none idle."""
        if self._read_note(QUEUE) is None:
            return False
        queue = LockedFile.attempt(self._path(QUEUE))
        if queue is not None:  # the worker that wrote the note has ended
            queue.release()
        return queue is None

    def _lock_devices(self) -> bool:
        """Lock the missing devices that are free; return whether none is missing and no orphan uses one."""
        for device in self.devices or range(len(self.names)):
            if len(self._locks) < self._count and device not in self._locks:
                lock = LockedFile.attempt(self._path(self.names[device]))
                if lock is not None:
                    self._locks[device] = lock
                    if lock.left:  # its holder was killed, perhaps just now, so its ranks may still run
                        self._orphans_gone_at = time.monotonic() + ORPHAN_GRACE
        return len(self._locks) == self._count and time.monotonic() >= self._orphans_gone_at

    def _describe_wait(self) -> tuple[object, str]:
        """Return a state that differs whenever a device or the queue changes hands, and a line for the user.

        The line is "waiting for 4 of 8 GPUs to be free: gw1 uses 0-3 for test_a (12 s); ...". Slots are alike, so of
        these it has the number. It leaves out devices without a note, which the worker that is first in the queue may
        have locked already.
        """
        holders: dict[_Note, list[int]] = {}
        for device, name in enumerate(self.names):
            if device not in self._locks and (note := self._read_note(name)) is not None:
                holders.setdefault(note, []).append(device)
        is_slot = self._kind == "slot"
        reasons = [
            f"{note.worker} uses {len(devices) if is_slot else joined_runs(devices)} for {note.purpose} "
            f"({time.monotonic() - note.since:.0f} s)"
            for note, devices in holders.items()
        ]
        head = self._read_note(QUEUE)
        if head is not None and head.worker != self._worker:
            reasons.append(f"{head.worker} is next and needs {head.size} for {head.purpose}")
        slots = f"{len(self.names)} CPU slots (one per rank, --fsdp-slots)"
        line = f"waiting for {self._count} of {slots if is_slot else counted(len(self.names), self._kind)} to be free"
        return (holders, head), f"{line}: {'; '.join(reasons)}" if reasons else line

    def _note(self) -> str:
        return json.dumps(_Note(self._worker, self._purpose, self._count, time.monotonic()))

    def _read_note(self, name: str) -> _Note | None:
        try:
            return _Note(*json.loads(LockedFile.note(self._path(name)).read_text("utf-8")))
        except (OSError, ValueError, TypeError):  # there is none, or it is being written
            return None

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._kind}-{quote(name, safe='')}.lock"

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


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


def gpu_names(count: int) -> tuple[str, ...]:
    """Return a machine-wide name for each device index: workers may see different GPUs as device 0."""
    visible = tuple(dict.fromkeys(name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()))
    return visible[:count] if len(visible) >= count else tuple(map(str, range(count)))


def assign_devices(spec: WorldSpec, lease: Lease) -> WorldSpec:
    """Return the spec with the leased devices assigned to its ranks, which see no others.

    A local rank is then the index of its GPU. If there are fewer GPUs, gloo ranks share them.
    """
    if not spec.on_gpus:
        return spec
    leased = tuple(lease.names[device] for device in lease.devices)
    devices = tuple(rank % len(leased) for rank in range(spec.size))
    return replace(spec, devices=devices, visible=leased if len(leased) < len(lease.names) else ())
