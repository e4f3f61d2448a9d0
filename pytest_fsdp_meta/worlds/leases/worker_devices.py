"""The devices of one machine as one worker process of a run uses them: GPUs and CPU slots, leased for each world."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from pytest_fsdp_meta.worlds.leases.device_leases import PATIENCE, Lease, LeaseError, Leases, WaitCallback
from pytest_fsdp_meta.worlds.leases.run_folder import Presence, is_occupied, lock_in_run
from pytest_fsdp_meta.worlds.spec import VISIBLE, WorldSpec
from pytest_fsdp_meta.worlds.system import processes

COUNT_TIMEOUT = 300.0
"""Seconds to wait for another worker's GPU count; that worker's own attempt times out earlier."""


def usable_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerDevices:
    """One worker's access to the devices of its machine. At most ``slots`` ranks of the run use the CPU at a time."""

    def __init__(self, folder: Path, worker: str, slots: int) -> None:
        self._folder = folder
        self._worker = worker
        self._slots = slots
        self._parent = os.getppid()
        self._presence: Presence | None = None
        self._leases: dict[tuple[str, tuple[str, ...]], Leases] = {}
        self._gpus: int | None = None

    def count_gpus(self, count: Callable[[], int]) -> int:
        """Return the result of ``count``, which takes seconds: one worker calls it for all that see the same GPUs.

        Raises what ``count`` raises, and LeaseError.
        """
        if self._gpus is None:
            visible = hashlib.sha256(os.environ.get(VISIBLE, "all").encode()).hexdigest()[:16]
            self._gpus = self._call_once(f"gpus-{visible}", count)
        return self._gpus

    def take(self, spec: WorldSpec, purpose: str, ranks: int = 0, waiting: WaitCallback | None = None) -> Lease:
        """Wait for the devices of a world of ``spec``, or of ``ranks`` ranks if that is more.

        Raises LeaseError when no device has changed hands for a long time.
        """
        # A worker releases devices after its own calls to ranks, and each call ends within the timeout.
        patience = max(PATIENCE, 10 * spec.timeout)
        return self._leases_for(spec).take(max(len(spec.ranks), ranks), purpose, waiting, patience)

    def wanted(self) -> bool:
        """Return whether another worker waits for devices of a kind that this one holds."""
        return any(leases.wanted() for leases in self._leases.values())

    @contextmanager
    def running(self, key: str, note: str) -> Iterator[str]:
        """Store ``note`` under ``key`` while the block runs, so that it remains if this worker crashes.

        Yields the note of a worker that crashed in such a block, else "". Raises LeaseError if the run's folder cannot
        be used.
        """
        path = self._run_folder() / f"runs-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        lock = lock_in_run(path)
        if lock is None:
            yield ""  # with --dist=each, another worker is running it at the same time
            return
        before = ""
        try:
            with suppress(OSError):  # the disk is full
                before = path.read_text("utf-8")
            if not before:
                with suppress(OSError):
                    path.write_text(note, "utf-8")
                yield ""
                with suppress(OSError):
                    path.write_text("", "utf-8")
        finally:
            lock.release()
        if before:  # unlocked: with --dist=each, another worker may ask at the same time, and must find the note too
            yield before

    def _leases_for(self, spec: WorldSpec) -> Leases:
        if spec.on_gpus:
            kind, names = "GPU", gpu_names(self._gpus or 0)
        else:
            kind, names = "slot", tuple(map(str, range(self._slots)))
        if (kind, names) not in self._leases:
            self._leases[kind, names] = Leases(self._run_folder(), kind, names, self._worker)
        return self._leases[kind, names]

    def _run_folder(self) -> Path:
        """Return the run's folder, which this worker enters on the first call."""
        if self._presence is None:
            self._presence = Presence(self._folder)
            # Once the controller has ended, nobody reads this worker's results; xdist interrupts it five seconds later.
            # Under nohup SIGINT is ignored, so it needs its default handler.
            if (
                signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(signal.SIGINT, signal.default_int_handler)
            processes.die_with_parent(signal.SIGINT)
            atexit.register(self._leave)
        return self._folder

    def _leave(self) -> None:
        """Leave the run's folder; the last worker removes it if the process that started the workers was killed."""
        if self._presence is not None:
            self._presence.leave()
            if os.getppid() != self._parent and not is_occupied(self._folder):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _call_once(self, name: str, function: Callable[[], int]) -> int:
        """Return the result of ``function``, which the first worker to get here calls and stores in a file."""
        path = self._run_folder() / name
        deadline = time.monotonic() + COUNT_TIMEOUT
        while (lock := lock_in_run(path.with_suffix(".lock"))) is None:
            if time.monotonic() > deadline:
                raise LeaseError(
                    f"another worker has been counting the GPUs for {COUNT_TIMEOUT:g} s; it may be stopped"
                )
            time.sleep(0.05)
        try:
            if path.exists() and (known := path.read_text("utf-8")):
                return int(known)
            result = function()
            with suppress(OSError):  # the disk is full, so the next worker calls it again
                path.write_text(str(result), "utf-8")
            return result
        finally:
            lock.release()


def gpu_names(count: int) -> tuple[str, ...]:
    """Return a machine-wide name for each device index: workers may see different GPUs as device 0."""
    listed = [quote(name.strip(), safe="") for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    visible = tuple(dict.fromkeys(listed))
    return visible[:count] if len(visible) >= count else tuple(map(str, range(count)))


def assign_devices(spec: WorldSpec, lease: Lease) -> WorldSpec:
    """Return the spec with the leased devices assigned to its ranks, which see no others.

    A local rank is then the index of its GPU. If there are fewer GPUs, gloo ranks share them.
    """
    if not spec.on_gpus:
        return spec
    leased = tuple(unquote(lease.names[device]) for device in lease.devices)
    devices = tuple(rank % len(leased) for rank in range(spec.size))
    return replace(spec, devices=devices, visible=leased if len(leased) < len(lease.names) else ())
