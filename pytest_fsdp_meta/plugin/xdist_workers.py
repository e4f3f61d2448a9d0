"""pytest-xdist's workers: how they lease the devices of their machine, and what they report to the controller."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.plugin._pytest_private import uncaptured
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.worlds import (
    Engine,
    Lease,
    LeaseError,
    Presence,
    WorkerDevices,
    WorldSpec,
    assign_devices,
    run_folder_of,
    usable_cores,
)

FOLDER = "fsdp_folder"
"""Key of ``workerinput``: the folder in which the workers of one machine share its devices."""
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
        self._sharing: WorkerDevices | None = None
        self._is_local = settings.engine == "local"
        """Whether devices are this machine's; a cluster shares out its own."""
        self._gpus: int | None = None
        worker: dict[str, Any] = getattr(config, "workerinput", {})
        if worker:
            given = Path(worker.get(FOLDER, ""))
            # A worker on another machine than the controller shares devices with the workers there.
            folder = given if given.name and given.parent.is_dir() else run_folder_of(worker["testrunuid"])
            self._sharing = WorkerDevices(folder, worker["workerid"], settings.slots or usable_cores())

    def count_gpus(self) -> int:
        """Return the GPUs that worlds can use, counted once; one worker counts for all of its machine.

        Raises ValueError if they cannot be counted or if there is no such cluster.
        """
        if self._gpus is None:
            self._gpus = self._count_gpus()
        return self._gpus

    def _count_gpus(self) -> int:
        if not self._is_local:
            return self._engine.count_gpus()  # connects also for --fsdp-device=cpu, so a missing cluster is reported
        if self._settings.device in ("cpu", standin.NAME):
            return 0  # counting takes seconds on a machine with GPUs
        if self._sharing is None:
            return self._engine.count_gpus()
        try:
            return self._sharing.count_gpus(self._engine.count_gpus)
        except LeaseError as error:
            raise ValueError(str(error)) from None

    def take(self, spec: WorldSpec, item: pytest.Item, ranks: int = 0) -> tuple[WorldSpec, Lease | None]:
        """Return the world placed on devices of its own, and the lease to release; no lease where nothing is shared.

        Waits until the devices are free. Raises LeaseError after a long time in which nothing moves. ``ranks`` is the
        size of the largest other world that will run on the same devices, one after the other.
        """
        if self._sharing is None or not self._is_local:
            return spec, None
        with _ReportedWait(self._config, item) as waiting:
            lease = self._sharing.take(spec, _name_without_parameters(item), ranks, waiting)
        return assign_devices(spec, lease), lease

    def resume(self, lease: Lease, item: pytest.Item) -> None:
        """Take the devices of a reused world again. Waits, and raises, as ``take`` does."""
        with _ReportedWait(self._config, item) as waiting:
            lease.resume(waiting)

    @contextmanager
    def leased(self, spec: WorldSpec, item: pytest.Item, ranks: int = 0) -> Iterator[WorldSpec]:
        """Yield the world that ``take`` returns, and release its devices afterwards."""
        placed_spec, lease = self.take(spec, item, ranks)
        with lease or nullcontext():
            yield placed_spec

    @property
    def wanted(self) -> bool:
        """Whether another worker waits for devices of a kind that this one holds."""
        return self._sharing is not None and self._is_local and self._sharing.wanted()

    @contextmanager
    def running(self, key: str, item: pytest.Item) -> Iterator[tuple[str, str]]:
        """Yield the worker that crashed while it ran the same ``key``, and its item; two empty strings if none did.

        While the block runs, a crash of this worker is recorded in the same way.
        """
        note = ""
        with ExitStack() as stack:
            if self._sharing is not None:
                worker: str = self._config.workerinput["workerid"]  # type: ignore[attr-defined]
                with suppress(LeaseError):  # reported when a device is leased
                    note = stack.enter_context(self._sharing.running(key, f"{worker} {item.name}"))
            crashed_worker, _, crashed_item = note.partition(" ")
            yield crashed_worker, crashed_item


def send_usage_error(config: pytest.Config, message: str) -> None:
    """On a worker: make the controller raise this usage error."""
    config.workeroutput[USAGE_ERROR] = message  # type: ignore[attr-defined]


class Controller:
    """Hooks of the process that starts the workers: it makes and removes the folder in which they share devices."""

    def __init__(self) -> None:
        self._presence: Presence | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        folder = run_folder_of(node.workerinput["testrunuid"])
        node.workerinput[FOLDER] = str(folder)
        if self._presence is None:
            with suppress(LeaseError):  # reported by the first worker that leases a device
                self._presence = Presence(folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        message = getattr(node, "workeroutput", {}).get(USAGE_ERROR)
        if message:
            raise pytest.UsageError(message)

    def pytest_unconfigure(self) -> None:
        if self._presence is not None:
            self._presence.remove()


def register(config: pytest.Config) -> None:
    """Register the controller's hooks; on a worker they are never called."""
    config.pluginmanager.register(Controller(), "fsdp_controller")


class _ReportedWait:
    """Reports how long an item waits for devices: in the terminal during a long wait, and in the item's report."""

    def __init__(self, config: pytest.Config, item: pytest.Item) -> None:
        self._config = config
        self._item = item
        self._began = time.monotonic()
        self._next = self._began + LONG
        self._line = ""

    def __enter__(self) -> _ReportedWait:
        return self

    def __call__(self, line: str) -> None:
        self._line = line
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (now - self._began)  # the interval doubles
            with uncaptured(self._config):
                worker: str = self._config.workerinput["workerid"]  # type: ignore[attr-defined]
                name = _name_without_parameters(self._item)
                print(f"\n[{worker}] {name}: {line}", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._line:
            text = f"{self._line}\n(waited {time.monotonic() - self._began:.0f} s)"
            self._item.add_report_section("setup", "devices", text)


def _name_without_parameters(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
