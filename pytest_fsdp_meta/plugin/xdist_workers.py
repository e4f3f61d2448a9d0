"""Under pytest-xdist: the workers of a run lease the devices of their machine, and a crash of one is told once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.plugin._pytest_private import uncaptured
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.worlds import (
    Lease,
    LeaseError,
    Presence,
    Sharing,
    WorldSpec,
    folder_of,
    placed,
    usable_cores,
)

FOLDER = "fsdp_folder"
LONG = 10.0
"""Seconds after which a wait is told in the terminal, which no worker has of its own."""


class Devices:
    """What this process may use of its machine: all of it, or what it leases where it is one worker of several."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._sharing: Sharing | None = None
        self._leases = settings.engine == "local"
        """Whether devices are this machine's; those of a cluster are the cluster's to give."""
        worker: dict[str, Any] = getattr(config, "workerinput", {})
        if worker:
            handed = Path(worker.get(FOLDER, ""))
            # A worker on another machine meets those that are there with it.
            folder = handed if handed.name and handed.parent.is_dir() else folder_of(worker["testrunuid"])
            self._sharing = Sharing(folder, worker["workerid"], settings.slots or usable_cores())

    def count_gpus(self, count: Callable[[], int]) -> int:
        """What ``count`` gives, asked by one worker for all. Raises ValueError where it cannot be known."""
        try:
            return count() if self._sharing is None else self._sharing.count_gpus(count)
        except LeaseError as error:
            raise ValueError(str(error)) from None

    def take(self, spec: WorldSpec, item: pytest.Item, ranks: int = 0) -> tuple[WorldSpec, Lease | None]:
        """The world on devices of its own, and the lease that has to be released; None where there is nobody else.

        Waits until the devices are free. Raises LeaseError after a long time in which nothing moves. ``ranks`` is the
        size of the largest other world that will run on them, one after the other.
        """
        if self._sharing is None or not self._leases:
            return spec, None
        with _ReportedWait(self._config, item) as waiting:
            lease = self._sharing.take(spec, _name(item), ranks, waiting)
        return placed(spec, lease), lease

    def resume(self, lease: Lease, item: pytest.Item) -> None:
        """Takes the devices of a kept world again. Waits, and raises, as ``take`` does."""
        with _ReportedWait(self._config, item) as waiting:
            lease.resume(waiting)

    @contextmanager
    def leased(self, spec: WorldSpec, item: pytest.Item, ranks: int = 0) -> Iterator[WorldSpec]:
        """As ``take``, for a block."""
        there, lease = self.take(spec, item, ranks)
        with lease or nullcontext():
            yield there

    @property
    def wanted(self) -> bool:
        """Whether another worker waits for devices of a kind of which this one holds some."""
        return self._sharing is not None and self._leases and self._sharing.wanted()

    @contextmanager
    def running(self, what: str, item: pytest.Item) -> Iterator[tuple[str, str]]:
        """Within it, a crash of this worker is noted; yields (worker, item) of an earlier crash, or empty ones."""
        before = ""
        with ExitStack() as stack:
            if self._sharing is not None:
                worker: str = self._config.workerinput["workerid"]  # type: ignore[attr-defined]
                with suppress(LeaseError):  # told where a device is taken
                    before = stack.enter_context(self._sharing.running(what, f"{worker} {item.name}"))
            who, _, where = before.partition(" ")
            yield who, where


class Controller:
    """Hooks of the process that starts the workers: it makes the folder in which they meet, and removes it."""

    def __init__(self) -> None:
        self._presence: Presence | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        folder = folder_of(node.workerinput["testrunuid"])
        node.workerinput[FOLDER] = str(folder)
        if self._presence is None:
            with suppress(LeaseError):  # the first test that needs a device there will tell
                self._presence = Presence(folder)

    def pytest_unconfigure(self) -> None:
        if self._presence is not None:
            self._presence.remove()


class _ReportedWait:
    """Tells the wait of an item: in the terminal while it is long, and afterwards with the item."""

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
            self._next = now + (now - self._began)  # ever more seldom
            with uncaptured(self._config):
                worker: str = self._config.workerinput["workerid"]  # type: ignore[attr-defined]
                print(f"\n[{worker}] {_name(self._item)}: {line}", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._line:
            text = f"{self._line}\n(waited {time.monotonic() - self._began:.0f} s)"
            self._item.add_report_section("setup", "devices", text)


def _name(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]
