"""What the workers of one run share on one machine: a folder, in which they lease its devices.

The folder lies under the system's folder for temporary files and belongs to one user. Whoever is present in it holds a
lock there, so that a later run can tell and remove what a run that was killed has left.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from pytest_fsdp_meta.worlds.leases.leases import PATIENCE, REMEDY, Lease, LeaseError, Leases, Waiting
from pytest_fsdp_meta.worlds.leases.locks import FileLock
from pytest_fsdp_meta.worlds.spec import WorldSpec
from pytest_fsdp_meta.worlds.system import processes

PREFIX = "fsdp-run-"
ASKING = 300.0
"""Seconds for another worker to count the GPUs, who gives up before."""
STALE = 60.0
"""Seconds for which nothing has happened in the folder of a run that nobody is present in any more."""


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def folder_of(run: str) -> Path:
    """Where the workers of a run meet; ``run`` may be any text."""
    name = hashlib.sha256(run.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"{PREFIX}{os.getuid()}-{name}")


class Presence:
    """One process' stay in the folder of its run. Raises LeaseError where there can be no such folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._lock = self._enter()
        except OSError as error:
            raise LeaseError(f"devices cannot be shared: {folder}: {error.strerror}; {REMEDY}") from error

    def _enter(self) -> FileLock:
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
            _sweep(self.folder.parent)
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():
            raise LeaseError(f"devices cannot be shared: {self.folder} belongs to somebody else; remove it")
        path = self.folder / f"{secrets.token_hex(8)}.present"
        while (lock := FileLock.attempt(path)) is None:
            time.sleep(0.01)  # a later run looks whether anybody is here
        return lock

    def leave(self) -> None:
        self._lock.release()

    def remove(self) -> None:
        """At the end of the run, when everybody else has left."""
        self.leave()
        shutil.rmtree(self.folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Removes what runs of this user have left that were killed."""
    for folder in parent.glob(f"{PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE and not _somebody_in(folder):
                shutil.rmtree(folder)


def _somebody_in(folder: Path) -> bool:
    locks = [FileLock.attempt(path) for path in folder.glob("*.present")]
    for lock in locks:
        if lock is not None:
            lock.release()
    return None in locks


class Sharing:
    """One worker's share of the machine. ``slots`` is how many ranks may run on the CPU at a time."""

    def __init__(self, folder: Path, worker: str, slots: int) -> None:
        self._folder = folder
        self._worker = worker
        self._slots = slots
        self._parent = os.getppid()
        self._presence: Presence | None = None
        self._leases: dict[tuple[str, tuple[str, ...]], Leases] = {}
        self._gpus: int | None = None

    def count_gpus(self, count: Callable[[], int]) -> int:
        """What ``count`` gives, or raises: it takes seconds, so one worker asks it for all. Raises LeaseError too."""
        if self._gpus is None:
            visible = hashlib.sha256(os.environ.get(VISIBLE, "all").encode()).hexdigest()[:16]
            self._gpus = self._once(f"gpus-{visible}", count)
        return self._gpus

    def take(self, spec: WorldSpec, what: str, ranks: int = 0, waiting: Waiting | None = None) -> Lease:
        """Devices for worlds of ``spec``, and for others with as many as ``ranks``; waits until they are free.

        Raises LeaseError after a long time in which nothing moves.
        """
        # A worker gives devices back after its own calls to ranks, each of which ends within the timeout.
        patience = max(PATIENCE, 10 * spec.timeout)
        return self._leases_for(spec).take(max(spec.size, ranks), what, waiting, patience)

    def wanted(self) -> bool:
        """Whether another worker waits for devices of a kind of which this one holds some."""
        return any(leases.wanted() for leases in self._leases.values())

    @contextmanager
    def running(self, what: str, note: str) -> Iterator[str]:
        """Leaves the note while the block runs; yields that of a worker that ended in its own block, or nothing.

        Raises LeaseError where nothing can be noted.
        """
        path = self._here() / f"runs-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        lock = _attempt(path)
        if lock is None:
            yield ""  # with --dist=each another worker runs it at the same time
            return
        before = ""
        try:
            with suppress(OSError):  # the disk is full
                before = path.read_text("utf-8")
                path.write_text(before or note, "utf-8")
            yield before
            with suppress(OSError):
                path.write_text(before, "utf-8")
        finally:
            lock.release()

    def _leases_for(self, spec: WorldSpec) -> Leases:
        if spec.device_type == "cpu":
            kind, names = "slot", tuple(map(str, range(self._slots)))
        else:
            kind, names = "GPU", gpu_names(self._gpus or 0)
        if (kind, names) not in self._leases:
            self._leases[kind, names] = Leases(self._here(), kind, names, self._worker)
        return self._leases[kind, names]

    def _here(self) -> Path:
        if self._presence is None:
            self._presence = Presence(self._folder)
            # Nobody asks for its results any more, then; by itself xdist interrupts it five seconds later.
            if (
                signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup it would come to nothing
            processes.die_with_parent(signal.SIGINT)
            atexit.register(self._leave)
        return self._folder

    def _leave(self) -> None:
        """At the end of this worker. Where the process that started it was killed, the last one removes the folder."""
        if self._presence is not None:
            self._presence.leave()
            if os.getppid() != self._parent and not _somebody_in(self._folder):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _once(self, name: str, ask: Callable[[], int]) -> int:
        path = self._here() / name
        deadline = time.monotonic() + ASKING
        while (lock := _attempt(path.with_suffix(".lock"))) is None:
            if time.monotonic() > deadline:
                raise LeaseError(f"another worker has counted the GPUs for {ASKING:g} s; is it stopped?")
            time.sleep(0.05)
        try:
            if path.exists() and (known := path.read_text("utf-8")):
                return int(known)
            answer = ask()
            with suppress(OSError):  # the disk is full, so the next worker asks again
                path.write_text(str(answer), "utf-8")
            return answer
        finally:
            lock.release()


def _attempt(path: Path) -> FileLock | None:
    try:
        return FileLock.attempt(path)
    except OSError as error:
        raise LeaseError(f"devices cannot be shared: {path}: {error.strerror}; {REMEDY}") from error


VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_names(count: int) -> tuple[str, ...]:
    """What each device index stands for on this machine: workers may each see other GPUs, as device 0 and so on."""
    words = [quote(name.strip(), safe="") for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    visible = tuple(dict.fromkeys(words))
    return visible[:count] if len(visible) >= count else tuple(map(str, range(count)))


def placed(spec: WorldSpec, lease: Lease) -> WorldSpec:
    """The world on the leased devices. Ranks of gloo share GPUs where there are fewer of them."""
    if spec.device_type == "cpu":
        return spec
    devices = tuple(lease.devices[rank % len(lease.devices)] for rank in range(spec.size))
    return replace(spec, devices=devices)
