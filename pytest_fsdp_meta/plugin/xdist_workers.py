"""pytest-xdist's workers: how they lease the devices of their machine, and what they report to the controller."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import quote

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.plugin._pytest_private import uncaptured
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.worlds import Engine, Lease, LeaseError, WorldSpec
from pytest_fsdp_meta.worlds.leases import PATIENCE, LockedFile, assign_devices, gpu_names, sharing_error
from pytest_fsdp_meta.worlds.spec import VISIBLE
from pytest_fsdp_meta.worlds.system import processes

USAGE_ERROR = "fsdp_usage_error"
"""Key of ``workeroutput``: a usage error that the controller raises for a worker."""
LONG = 10.0
"""Seconds after which a wait is reported in the controller's terminal; a worker has none of its own."""


class Devices:
    """The devices that this process may use: all of its machine, or what it leases as one of several workers."""

    def __init__(self, config: pytest.Config, settings: Settings, engine: Engine) -> None:
        self._config = config
        self._settings = settings
        self._engine = engine
        worker: dict[str, str] = getattr(config, "workerinput", {})
        self._worker = worker.get("workerid", "")
        """Empty without pytest-xdist."""
        self._shares = bool(worker) and settings.engine == "local"
        """Whether this worker leases devices; a cluster shares out its own."""
        self._folder: Path | None = None
        self._gpus: int | None = None

    def count_gpus(self) -> int:
        """Return the GPUs that worlds can use, counted once; one worker counts for all of its machine.

        Raises ValueError if they cannot be counted or if there is no such cluster.
        """
        if self._gpus is None:
            self._gpus = self._count_gpus()
        return self._gpus

    def _count_gpus(self) -> int:
        if self._settings.engine == "local" and self._settings.device in ("cpu", standin.NAME):
            return 0  # counting takes seconds on a machine with GPUs; a cluster is asked, so a missing one is reported
        if not self._shares:
            return self._engine.count_gpus()
        try:
            path = self._path("gpus", os.environ.get(VISIBLE, "all"))
            while (file := LockedFile.attempt(path)) is None:
                time.sleep(0.05)  # another worker counts; its attempt has a time limit
        except LeaseError as error:
            raise ValueError(str(error)) from None
        count = file.left
        try:
            count = count or str(self._engine.count_gpus())
            return int(count)
        finally:
            file.release(keep=count)

    def take(self, spec: WorldSpec, item: pytest.Item, ranks: int = 0) -> tuple[WorldSpec, Lease | None]:
        """Return the world placed on devices of its own, and the lease to release; no lease where nothing is shared.

        Waits until the devices are free. Raises LeaseError after a long time in which nothing moves. ``ranks`` is the
        size of the largest other world that will run on the same devices, one after the other.
        """
        if not self._shares:
            return spec, None
        if spec.on_gpus:
            kind, names = "GPU", gpu_names(self._gpus or 0)
        else:
            kind, names = "slot", tuple(map(str, range(self._settings.slots or usable_cores())))
        # A worker releases devices after its own calls to ranks, and each call ends within the timeout.
        patience = max(PATIENCE, 10 * spec.timeout)
        size, purpose = max(len(spec.ranks), ranks), _name_without_parameters(item)
        lease = Lease(self._run_folder(), self._worker, kind, names, size, purpose, patience)
        self.resume(lease, item)
        return assign_devices(spec, lease), lease

    def resume(self, lease: Lease, item: pytest.Item) -> None:
        """Take the devices of a reused world again. Waits, and raises, as ``take`` does.

        A wait is shown in the item's report, and a long one in the terminal at once.
        """
        began = time.monotonic()
        last, report_after = "", LONG

        def report(line: str) -> None:
            nonlocal last, report_after
            last, seconds = line, time.monotonic() - began
            if seconds >= report_after:
                report_after = 2 * seconds
                with uncaptured(self._config):
                    text = f"\n[{self._worker}] {_name_without_parameters(item)}: {line}"
                    print(text, file=sys.stderr, flush=True)

        try:
            lease.acquire(report)
        finally:
            if last:
                waited = f"(waited {time.monotonic() - began:.0f} s)"
                item.add_report_section("setup", "devices", f"{last}\n{waited}")

    @contextmanager
    def leased(self, spec: WorldSpec, item: pytest.Item, ranks: int = 0) -> Iterator[WorldSpec]:
        """Yield the world that ``take`` returns, and release its devices afterwards."""
        placed_spec, lease = self.take(spec, item, ranks)
        with lease or nullcontext():
            yield placed_spec

    @contextmanager
    def running(self, key: str, item: pytest.Item) -> Iterator[tuple[str, str]]:
        """Yield the worker that crashed while it ran the same ``key``, and its item; two empty strings if none did.

        While the block runs, a crash of this worker is recorded in the same way.
        """
        try:
            file = LockedFile.attempt(self._path("runs", key)) if self._worker else None
        except LeaseError:  # reported when a device is leased
            file = None
        if file is None:  # with --dist=each, another worker is running it at the same time
            yield "", ""
        elif file.left:
            worker, _, crashed_item = file.left.partition(" ")
            file.release(keep=file.left)  # first: with --dist=each, another worker may ask, and must find the note too
            yield worker, crashed_item
        else:
            file.write(f"{self._worker} {item.name}")
            try:
                yield "", ""
            finally:
                file.release()

    def _path(self, kind: str, key: str) -> Path:
        return self._run_folder() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def _run_folder(self) -> Path:
        """Return the folder that the workers of this machine share, created on the first call. Raises LeaseError."""
        if self._folder is None:
            # xdist gives local workers folders below the controller's, which pytest removes after later runs.
            given = self._config.getoption("basetemp", None)
            parent = Path(given).parent if given else Path(tempfile.gettempdir())
            run: str = self._config.workerinput["testrunuid"]  # type: ignore[attr-defined]
            folder = parent / f"fsdp-run-{os.getuid()}-{quote(run, safe='')}"
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.lstat().st_uid != os.getuid():  # also of a link
                    raise PermissionError(errno.EPERM, "it belongs to another user")
            except OSError as error:
                raise sharing_error(folder, error) from error
            # End at once if the controller ends: xdist interrupts a worker five seconds later. Under nohup SIGINT is
            # ignored, so it needs its default handler.
            on_main = threading.current_thread() is threading.main_thread()
            if on_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            processes.die_with_parent(signal.SIGINT)
            self._folder = folder
        return self._folder


def usable_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _name_without_parameters(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
