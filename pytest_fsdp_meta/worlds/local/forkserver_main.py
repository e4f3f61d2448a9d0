"""What the fork server imports first: this module imports all that the parent asks for.

It is a module of its own, imported by nothing else, so that the package is complete when test modules import it. Parent
and server share a folder: the parent writes its request there, and waits for the report, which says whether the server
may be forked.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.rank.coverage import measuring_imports
from pytest_fsdp_meta.worlds.rank.preload import (
    IMPORTING,
    NVML_CHECK,
    REQUEST,
    ImportWatch,
    has_gpu_files,
    preload,
    preload_early,
    use_sources,
    why_unsafe,
)
from pytest_fsdp_meta.worlds.rank.warnings import enable_all
from pytest_fsdp_meta.worlds.spec import VISIBLE, Sources
from pytest_fsdp_meta.worlds.system import processes

PATIENCE = 0.5
"""Seconds for ranks to end by themselves when the parent has gone."""
PARENT_EXIT = 5.0
"""Seconds for all threads of the parent to end, once one has or its descriptors are closed."""
EARLY_PAUSE = 0.01
"""Seconds between two looks whether the parent has collected its tests."""
MANY_WORLDS = 16
"""Worlds from which on large pages are worth it: they take half a second, and save about 30 ms of each."""
MADV_COLLAPSE = 25
"""The madvise() advice of Linux 6.1 and later, missing in Python's mmap module."""


def _serve(folder: Path) -> None:
    start = json.loads((folder / "start").read_text("utf-8"))
    parent = start["parent"]
    atexit.register(_forget_address, _address(), parent, os.getpid())
    processes.outlive_group()
    with _ending_with(parent, start["leftovers"]) if start["from_main_thread"] else nullcontext():
        failed = _import(start, folder)
    processes.adopt_orphans()
    atexit.register(_end_ranks, os.getpid(), start["leftovers"])
    report = {"objection": why_unsafe(), "failed": failed, "children": sorted(processes.children(os.getpid()))}
    unfinished = folder / "report.part"
    unfinished.write_text(json.dumps(report), "utf-8")
    unfinished.rename(folder / "report")


def _import(start: dict[str, Any], folder: Path) -> dict[str, str]:
    # Thread pools do not survive a fork, so no import may start one.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # Test modules call torch.cuda.is_available(), which without NVML starts so much of CUDA that ranks cannot use it.
    os.environ.setdefault(NVML_CHECK, "1")
    # A machine without a driver lacks NVML, too; there, an empty list of visible devices stops torch from asking CUDA.
    if not has_gpu_files():
        os.environ.setdefault(VISIBLE, "")
    # Ctrl-C is for the parent, which ends the server when it exits.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Modules that print while they are imported do so in the parent as well; once on the terminal is enough.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    gc.disable()  # imports make no garbage, and looking for it takes a seventh of the time
    watch = ImportWatch(folder / IMPORTING)
    if start["early"] is not None:
        use_sources(Sources(start["path"]))
        preload_early(start["early"], watch)
    while not (folder / "request").exists():
        if os.getppid() != start["parent"]:
            sys.exit(1)  # a parent that started this in another thread than its main one sends no signal
        time.sleep(EARLY_PAUSE)
    request = json.loads((folder / "request").read_text("utf-8"))
    use_sources(Sources(request["path"], request["files"], request["before"]))
    enable_all()
    with measuring_imports(request["coverage"]):
        failed = preload(request["modules"], watch)
    gc.enable()
    gc.freeze()  # a rank's first full collection would write to every object, and thereby copy all of them
    if request["worlds"] is None or request["worlds"] >= MANY_WORLDS:
        _use_large_pages()
    signal.signal(signal.SIGINT, before)
    return failed


@contextmanager
def _ending_with(parent: int, leftovers: str) -> Iterator[None]:
    """End this process if its parent ends meanwhile. Imports do not watch the pipe, so the system sends a signal.

    The signal comes when the thread that started this process ends. Of a parent that is killed, that may be the first
    of many threads; until the last has ended, the parent is still this process's parent.
    """
    address = _address()

    def leave(*_: object) -> None:
        if _has_gone(parent):  # otherwise the signal was sent to end a whole job, and the parent decides
            processes.remove_folders(leftovers)
            _forget_address(address, parent, os.getpid())
            os._exit(1)

    before = signal.signal(signal.SIGTERM, leave)
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        leave()  # the parent ended before the signal was requested
    yield
    processes.die_with_parent(0)
    signal.signal(signal.SIGTERM, before)


def _address() -> Path | None:
    """Return the path of the socket at which this server accepts requests for processes."""
    for name in os.listdir("/dev/fd"):
        try:
            one = socket.socket(fileno=int(name))
        except OSError:
            continue  # not a socket, or already closed: the descriptor of this listing
        where = one.getsockname() if one.family == socket.AF_UNIX else b""
        one.detach()
        if "pymp-" in os.fsdecode(where):
            return Path(os.fsdecode(where))
    return None


def _forget_address(address: Path | None, parent: int, server: int) -> None:
    """Remove the folder that the parent's multiprocessing made for the socket, if the parent was killed."""
    if address is not None and os.getpid() == server and _has_gone(parent):
        shutil.rmtree(address.parent, ignore_errors=True)


def _has_gone(parent: int) -> bool:
    deadline = time.monotonic() + PARENT_EXIT
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(processes.PAUSE)
    return os.getppid() != parent


def _end_ranks(server: int, leftovers: str) -> None:
    """End the ranks that do not end by themselves when the parent has gone, and all that ranks have started.

    Otherwise the system would end the ranks with this process, but not their children.
    """
    if os.getpid() != server:
        return
    deadline = time.monotonic() + PATIENCE
    while processes.children(server) and time.monotonic() < deadline:
        time.sleep(processes.PAUSE)
    processes.end_children(server)
    processes.remove_folders(leftovers)


def _use_large_pages() -> None:
    """Make forking and exiting faster.

    A fork copies one table entry per page, and the rank's exit drops it: pages of 2 MiB instead of 4 KiB take a
    fraction of the time. On systems without such pages the call changes nothing.
    """
    if sys.platform != "linux":
        return
    collapse = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        span, access, _, _, _, *name = line.split(maxsplit=5)
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            collapse(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


if REQUEST in os.environ:
    _serve(Path(os.environ.pop(REQUEST)))
