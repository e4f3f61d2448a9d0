"""The header of a report (command, versions, hardware, commit) and the first line that pytest prints."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.reports.schema import CatalogueRecord, Header
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
