"""Imported by the fork server and by nobody else: imports what the parent asks for.

A module of its own, so that our package is complete when the test modules import it. Parent and server share a folder:
the parent leaves its request there, and finds a report when all is imported: whether the server may be forked.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.rank.coverage import preloading
from pytest_fsdp_meta.worlds.rank.preload import REQUEST, preload, share, why_unsafe
from pytest_fsdp_meta.worlds.rank.warnings import hear_all
from pytest_fsdp_meta.worlds.spec import Sources
from pytest_fsdp_meta.worlds.system import processes, temp_folders

PATIENCE = 0.5
"""Seconds for ranks to end by themselves."""
MADV_COLLAPSE = 25
"""Of Linux 6.1 and later; the mmap module does not name it."""


def _serve(folder: Path) -> None:
    request = json.loads((folder / "request").read_text("utf-8"))
    atexit.register(_forget_address, _address(), os.getppid(), os.getpid())
    processes.outlive_group()
    with _ending_with(request["parent"], request["leftovers"]):
        failed = _import(request)
    processes.adopt_orphans()
    atexit.register(_end_ranks, os.getpid(), request["leftovers"])
    told = {"objection": why_unsafe(), "failed": failed, "children": sorted(processes.children(os.getpid()))}
    unfinished = folder / "report.part"
    unfinished.write_text(json.dumps(told), "utf-8")
    unfinished.rename(folder / "report")


def _import(request: dict[str, Any]) -> dict[str, str]:
    # Thread pools do not survive a fork, so none may be opened while importing.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # Test modules ask torch.cuda.is_available(), which otherwise starts as much of CUDA as keeps ranks from using it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Ctrl-C is for the parent, whose end ends the server too.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What modules print while they are imported is not for the terminal: the parent imports them too, and shows it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    share(Sources(request["path"], request["files"], request["before"]))
    hear_all()
    gc.disable()  # while modules are made nothing becomes garbage, and to look for some takes a seventh of the time
    with preloading(request["measuring"]):
        failed = preload(request["modules"])
    gc.enable()
    _make_cheap_to_fork()
    signal.signal(signal.SIGINT, before)
    return failed


@contextmanager
def _ending_with(parent: int | None, leftovers: str) -> Iterator[None]:
    """While it imports, this process does not see that its parent has gone: the system tells it by a signal.

    ``parent`` is None where a thread of it has started this process, whose end would be taken for the parent's.
    """
    if parent is None:
        yield
        return

    address = _address()

    def leave(*_: object) -> None:
        temp_folders.remove(leftovers)
        _forget_address(address, parent, os.getpid())
        os._exit(1)

    before = signal.signal(signal.SIGTERM, leave)
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        leave()  # it had gone before
    yield
    processes.die_with_parent(0)
    signal.signal(signal.SIGTERM, before)


def _address() -> Path | None:
    """The socket at which this server is asked for processes."""
    for name in os.listdir("/dev/fd"):
        try:
            one = socket.socket(fileno=int(name))
        except OSError:
            continue  # it is none, or that of the list itself
        where = one.getsockname() if one.family == socket.AF_UNIX else b""
        one.detach()
        if "pymp-" in os.fsdecode(where):
            return Path(os.fsdecode(where))
    return None


def _forget_address(address: Path | None, parent: int | None, server: int) -> None:
    """When the parent was killed: nobody else removes the folder that its multiprocessing has made for the socket."""
    if address is not None and os.getpid() == server and os.getppid() != parent:
        shutil.rmtree(address.parent, ignore_errors=True)


def _end_ranks(server: int, leftovers: str) -> None:
    """When the parent has gone, ranks end by themselves; those that cannot are ended here, and what they have started.

    The system would end the ranks with this process, and nothing else.
    """
    if os.getpid() != server:
        return
    deadline = time.monotonic() + PATIENCE
    while processes.children(server) and time.monotonic() < deadline:
        time.sleep(processes.PAUSE)
    processes.end_children(server)
    temp_folders.remove(leftovers)


def _make_cheap_to_fork() -> None:
    """What has been imported stays as it is, so ranks need neither scan it nor have it page by page.

    A rank's first full garbage collection would write to every object, and thereby copy all of them. And the system
    copies one entry for each page at a fork, and drops it when the rank ends: with pages of 2 MiB instead of 4 KiB both
    take a fraction. Where the system has no such pages, it leaves things as they are.
    """
    gc.freeze()
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
