"""Reset a rank between the tests of one world: restore what a test changed, and report what cannot be restored."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pytest_fsdp_meta.worlds.diagnosis import flight_recorder
from pytest_fsdp_meta.worlds.rank.main import current
from pytest_fsdp_meta.worlds.rank.rendezvous import seed
from pytest_fsdp_meta.worlds.system import processes

COUNTER = "_get_sequence_number_for_group"
"""The private method of a process group that returns how many collectives it has started; no public one does."""
LEAKED_DESCRIPTORS = 256
"""How many more open files than at the start count as a leak, which would make a later test fail."""
Group: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a process group and its ranks: on a machine with GPUs, a mesh has a second group of all ranks."""
Counts: TypeAlias = Mapping[Group, int]
"""A count for each process group."""


@dataclass(frozen=True)
class ResetReport:
    """What a test has left on a rank. If anything is ``not_restored``, the rank must not be used again.

    ``started`` counts the operations that the rank has started in each group that the next test uses as well:
    collectives, and with some backends also sends to and receives from a single rank.
    """

    started: Counts
    not_restored: tuple[str, ...]


class _StartState:
    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.folder = os.getcwd()
        self.threads = _thread_ids()
        self.children = _child_pids()
        self.descriptors = _count_descriptors()
        self.groups = _process_groups()
        self.python = _PythonState()
        self.torch = _TorchState()


class _PythonState:
    """State of the interpreter that a test may change."""

    def __init__(self) -> None:
        self.path = tuple(sys.path)
        self.streams = sys.stdout, sys.stderr
        # Its exit also lets Python forget which warnings were shown: they are kept by module until the filters change.
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()

    def restore(self) -> None:
        sys.path[:] = self.path
        sys.stdout, sys.stderr = self.streams
        self.warnings.__exit__(None, None, None)
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        signal.alarm(0)


class _TorchState:
    """Modes of torch that a test may change and that public functions can read and set."""

    def __init__(self) -> None:
        import torch

        self.dtype = torch.get_default_dtype()
        self.threads = torch.get_num_threads()
        self.anomaly = torch.is_anomaly_enabled()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self.fill = torch.utils.deterministic.fill_uninitialized_memory

    def restore(self) -> None:
        import torch

        torch.set_default_dtype(self.dtype)
        forget_default_device()
        torch.set_grad_enabled(True)
        torch.set_num_threads(self.threads)
        torch.autograd.set_detect_anomaly(self.anomaly)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill


def forget_default_device() -> None:
    """Undo ``torch.set_default_device``, if it was called.

    If it was not, do not set None either: get_default_device() of torch 2.7, which transformers calls, raises then.
    """
    import torch

    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)


_START: _StartState | None = None


def record_start() -> None:
    """Record the state of this rank before its first test."""
    global _START
    gc.freeze()  # so that restore_start() looks only at what tests have made
    _START = _StartState()


def follow_parent(changed: Mapping[str, str | None], folder: str | None) -> None:
    """Take over, before a test, what has changed in the parent's environment and folder since the rank was started."""
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if folder is not None:
        os.chdir(folder)


def restore_start() -> ResetReport:
    """Restore environment, folder, state, seeds and modes, without calling a collective."""
    import torch

    before = _START
    assert before is not None, "record_start() comes first"
    if os.environ != before.environ:
        os.environ.clear()
        os.environ.update(before.environ)
    try:
        os.chdir(before.folder)
        lost = False
    except OSError:  # the test has removed it
        lost = True
    current().state.clear()
    gc.collect()  # modules sharded by FSDP2 are in cycles, which keep their memory
    before.python.restore()
    before.torch.restore()
    seed(current().device.type)
    not_restored = {
        "threads": not _thread_ids() <= before.threads,
        "processes": not _child_pids() <= before.children,
        "other process groups": _process_groups() != before.groups,
        "no folder": lost,
        "inference mode": torch.is_inference_mode_enabled(),
        "open files": _count_descriptors() > before.descriptors + LEAKED_DESCRIPTORS,
        "collectives that nothing counts": not all(hasattr(group, COUNTER) for group in before.groups.values()),
    }
    started = {key: int(getattr(group, COUNTER)()) for key, group in before.groups.items() if hasattr(group, COUNTER)}
    return ResetReport(started, tuple(name for name, found in not_restored.items() if found))


def _thread_ids() -> frozenset[int | None]:
    return frozenset(thread.ident for thread in threading.enumerate())


def _child_pids() -> frozenset[int]:
    return frozenset(processes.children(os.getpid()))


def _count_descriptors() -> int:
    listed = Path("/proc/self/fd")
    return len(os.listdir(listed)) if listed.exists() else 0


def _process_groups() -> dict[Group, Any]:
    """Return the default group and those of the mesh, or none if the test has destroyed one."""
    import torch.distributed as dist

    me = current()
    if not dist.is_initialized():
        return {}
    try:
        groups = [dist.group.WORLD, *(me.mesh.get_all_groups() if me.has_mesh else ())]
        return {(group.group_name, tuple(dist.get_process_group_ranks(group))): group for group in groups}
    except (KeyError, ValueError, RuntimeError):
        return {}


def count_collectives() -> Counts:
    """Return how many collectives this rank has started in each group, according to torch's flight recorder."""
    assert _START is not None
    recent = flight_recorder.read().collectives
    numbers = {
        key: [one.number for one in recent if one.group == group.group_name] for key, group in _START.groups.items()
    }
    return {key: max(seen, default=0) for key, seen in numbers.items()}
