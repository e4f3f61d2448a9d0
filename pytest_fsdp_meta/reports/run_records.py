"""The records of a run: its header, and what its loaders report.

The header has command, versions, hardware and commit; the first line that pytest prints has some of them. Results of
loaders are accumulated as pytest's reports of their items arrive, from any process.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.reports.schema import PASSED, CatalogueRecord, CheckRecord, Header, LoaderRecord
from pytest_fsdp_meta.text import counted

PACKAGE = "pytest-fsdp-meta"
PACKAGES = (
    *(PACKAGE, "torch", "transformers", "pytest", "pytest-xdist", "safetensors", "accelerate", "peft", "hypothesis"),
    *("ray", "numpy"),
)
NCCL = re.compile(r"nvidia[-_]nccl[-_]cu\d+")
PLACES = {"local": "on this machine", "ray": "on a Ray cluster"}
"""Engine -> where it runs ranks."""
GIT_TIMEOUT = 10.0
"""Time (s) that git is given to answer."""


@dataclass(frozen=True)
class ItemContext:
    """One item of a loader, as it reports itself: plain data, which xdist passes on from a worker."""

    key: str
    """Identifies one loader in one world: all its items have this key, and no other item has it."""
    loader: LoaderRecord
    """Without checks."""
    check: CheckRecord
    offered: tuple[str, ...] | None = None
    """The checks that the marker leaves to pytest to select; None where they are not known."""
    describes_loader: bool = False
    """Whether ``loader`` has more than world and loads: the first item that knows the rest reports it for all."""


class RunRecords:
    """The records of one run. Items may report several times (phases, reruns), from several processes, or never."""

    def __init__(self) -> None:
        self._loaders: dict[str, ItemContext] = {}
        """Key -> the latest item of the loader, with the fields that its items have in common."""
        self._checks: dict[str, dict[str, CheckRecord]] = {}
        """Key -> check -> its record."""
        self._planned: dict[str, tuple[str, str]] = {}
        """Node id -> key, and check."""
        self._forgotten: set[str] = set()

    def plan(self, item: ItemContext) -> None:
        """Record a selected item as not run yet."""
        if item.key in self._forgotten:
            return
        self._loaders.setdefault(item.key, item)
        self._checks.setdefault(item.key, {}).setdefault(item.check.check, item.check)
        self._planned[item.check.nodeid] = item.key, item.check.check

    def add(self, item: ItemContext) -> None:
        """Record what an item reports."""
        latest = self._loaders.get(item.key)
        if latest is not None and not item.describes_loader:
            known = replace(latest.loader, world=item.loader.world, loads=item.loader.loads)
            item = replace(item, loader=known)
        self._loaders[item.key] = item
        checks = self._checks.setdefault(item.key, {})
        check = item.check.check
        checks[check] = replace(item.check, seconds=checks[check].seconds if check in checks else 0.0)

    def key_of(self, nodeid: str) -> str:
        """Return the key of a planned item's loader; "" for any other item."""
        return self._planned.get(nodeid, ("", ""))[0]

    def add_crash(self, nodeid: str, error: str) -> str:
        """Record that the process of an item crashed. Return the item's status; "" if it was not planned."""
        return self._change(nodeid, lambda check: with_later_error(check, error))

    def add_seconds(self, nodeid: str, seconds: float) -> None:
        """Add the duration of one phase of an item."""
        self._change(nodeid, lambda check: replace(check, seconds=check.seconds + seconds))

    def _change(self, nodeid: str, change: Callable[[CheckRecord], CheckRecord]) -> str:
        if nodeid not in self._planned:
            return ""
        key, check = self._planned[nodeid]
        changed = self._checks[key][check] = change(self._checks[key][check])
        return changed.status

    def forget_loader(self, nodeid: str) -> None:
        """Drop the loader of an item that turns out to be an ordinary test, named like one of a loader."""
        key = self.key_of(nodeid)
        if key:
            self._forgotten.add(key)
            self._planned = {known: place for known, place in self._planned.items() if place[0] != key}
            del self._loaders[key], self._checks[key]

    def loaders(self, catalogue: Catalogue) -> tuple[LoaderRecord, ...]:
        """Return a record of each loader, in the order of planning, with every check for worlds of its kind."""
        return tuple(
            replace(item.loader, checks=tuple(self._check_records(key, item, catalogue)))
            for key, item in self._loaders.items()
        )

    def _check_records(self, key: str, item: ItemContext, catalogue: Catalogue) -> Iterator[CheckRecord]:
        """Yield the checks for worlds of this kind, and those that the marker asks for."""
        of_world, checks = catalogue.ids_for(bool(item.loader.world.simulated)), self._checks[key]
        for id_ in catalogue.ids():
            if id_ in of_world or id_ in (item.offered or ()):
                offered = item.offered is None or id_ in item.offered
                not_reported = CheckRecord(id_, "skipped", skip="not selected" if offered else "left out")
                yield checks.get(id_, not_reported)


def with_later_error(check: CheckRecord, error: str) -> CheckRecord:
    """Return the record of a check after an error in a later phase of its item, such as a fixture's teardown.

    Only a pass or a difference becomes an error: findings and reasons that are already known stay.
    """
    status = "error" if check.status in (*PASSED, "differs", "not run") else check.status
    return replace(check, status=status, reason="; and then ".join(filter(None, [check.reason, error])))


# The header.


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the system and of installed packages, without importing them.

    The version of NCCL is that of the package which torch from PyPI depends on.
    """
    found = {"system": platform.platform(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
            if name == "torch" and (package := NCCL.search(" ".join(requires(name) or ()))):
                found["nccl"] = version(package[0])
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """Return facts about this machine, without importing torch."""
    found = {"machine": platform.machine(), "cpu": _cpu(), "cores": str(os.cpu_count())}
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return found
    return {**found, "memory": f"{memory / 2**30:.0f} GiB"}


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def commit(folder: Path) -> str:
    """Return the commit of the repository around the folder, with "+" if tracked files have changes; "" without one."""
    if shutil.which("git") is None:
        return ""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return f"{head}+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    finished = subprocess.run(command, capture_output=True, check=True, timeout=GIT_TIMEOUT, env=environ)
    return finished.stdout.decode(errors="replace").strip()


def read_header(
    root: Path, command: Sequence[str], engine: str, catalogue: Catalogue, settings: Mapping[str, str]
) -> Header:
    """Return the header of a run that starts now."""
    return Header(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        project=root.name,
        command=tuple(command),
        versions=versions(),
        hardware=hardware(),
        engine=engine,
        commit=commit(root),
        catalogue=tuple(
            CatalogueRecord(check.id, check.family, check.promise, check.since, not check.built_in)
            for check in catalogue
        ),
        settings=settings,
    )


def describe_run(
    engine: str, device: str, backend: str, sizes: Iterable[int], catalogue: Catalogue, simulated: bool
) -> str:
    """Return the line about this package that pytest prints in its header."""
    known = versions()
    libraries = [f"{name} {known[name]}" for name in ("torch", "transformers") if name in known]
    *others, last = map(str, sizes)
    ranks = f"{', '.join(others)} and {last} ranks" if others else counted(int(last), "rank")
    own = sum(not check.built_in for check in catalogue)
    parts = [
        f"{ranks} by default, {PLACES[engine]}",
        f"device {device}",
        _backend(backend, device, known),
        *libraries,
        counted(len(catalogue.ids_for(simulated)), "check") + (f" ({own} of your own)" if own else ""),
    ]
    return f"fsdp: {', '.join(parts)}"


def _backend(backend: str, device: str, known: Mapping[str, str]) -> str:
    nccl = f"NCCL {known['nccl']}" if "nccl" in known else "NCCL"
    if backend == "auto" and device != "cpu" and "+cpu" not in known.get("torch", ""):
        return f"{nccl} (gloo where GPUs are too few)" if device == "auto" else nccl
    return nccl if backend == "nccl" else "gloo"
