"""On a rank that is kept for another test: what a test left behind is put back, and what cannot be is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_fsdp_meta.worlds.diagnosis import flight_recorder
from pytest_fsdp_meta.worlds.rank.main import current
from pytest_fsdp_meta.worlds.rank.rendezvous import seed
from pytest_fsdp_meta.worlds.system import processes

if TYPE_CHECKING:
    import torch

DESCRIPTORS = 256
"""More open files than this above those at the beginning are a leak that would end in an error of some later test."""
Counts: TypeAlias = Mapping[tuple[int, ...], int]
"""By the ranks of a group."""


@dataclass(frozen=True)
class Left:
    """What a test has left on a rank. ``stays`` names what cannot be put back, so that the rank is of no more use.

    ``begun`` counts what the rank began in each group that the next test meets again: collectives, and with some
    backends also what it sent to a single rank or received.
    """

    begun: Counts
    stays: tuple[str, ...]


@dataclass(frozen=True)
class _Beginning:
    environ: Mapping[str, str]
    folder: str
    threads: frozenset[int | None]
    children: frozenset[int]
    descriptors: int
    groups: Mapping[tuple[int, ...], Any]
    python: _Python
    torch: _Torch


@dataclass(frozen=True)
class _Python:
    """What a test may change of the interpreter."""

    path: tuple[str, ...]
    streams: tuple[Any, Any]
    filters: tuple[Any, ...]
    show: Any

    @classmethod
    def now(cls) -> _Python:
        return cls(tuple(sys.path), (sys.stdout, sys.stderr), tuple(warnings.filters), warnings.showwarning)

    def put_back(self) -> None:
        sys.path[:] = self.path
        sys.stdout, sys.stderr = self.streams
        warnings.filters[:] = self.filters  # type: ignore[index]
        warnings.showwarning = self.show
        signal.alarm(0)


@dataclass(frozen=True)
class _Torch:
    """What a test may change of torch: its modes that have a public way to be read and set."""

    dtype: torch.dtype
    threads: int
    anomaly: bool
    deterministic: tuple[bool, bool, bool]

    @classmethod
    def now(cls) -> _Torch:
        import torch

        return cls(
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_anomaly_enabled(),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,
            ),
        )

    def put_back(self) -> None:
        import torch

        torch.set_default_dtype(self.dtype)
        forget_default_device()
        torch.set_grad_enabled(True)
        torch.set_num_threads(self.threads)
        torch.autograd.set_detect_anomaly(self.anomaly)
        mode, warn_only, torch.utils.deterministic.fill_uninitialized_memory = self.deterministic
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def forget_default_device() -> None:
    """Takes back what ``torch.set_default_device`` did, if anything.

    Where nothing did, None is not set either: in torch 2.7 get_default_device(), which transformers calls, raises then.
    """
    import torch

    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)


_BEGINNING: _Beginning | None = None


def remember() -> None:
    """Notes how this rank is before its first test."""
    global _BEGINNING
    _BEGINNING = _Beginning(
        environ=dict(os.environ),
        folder=os.getcwd(),
        threads=_threads(),
        children=_children(),
        descriptors=_descriptors(),
        groups=_groups(),
        python=_Python.now(),
        torch=_Torch.now(),
    )


def follow(changed: Mapping[str, str | None], folder: str | None) -> None:
    """Before a test: its environment and its folder, where the parent's are not as they were when the rank began."""
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if folder is not None:
        os.chdir(folder)


def tidy() -> Left:
    """Puts back environment, folder, state, seeds and modes; calls no collective."""
    import torch

    before = _BEGINNING
    assert before is not None, "remember() comes first"
    if os.environ != before.environ:
        os.environ.clear()
        os.environ.update(before.environ)
    try:
        os.chdir(before.folder)
        lost = False
    except OSError:  # that of a test that has removed it
        lost = True
    current().state.clear()
    before.python.put_back()
    before.torch.put_back()
    seed(current().device.type)
    stays = {
        "threads": not _threads() <= before.threads,
        "processes": not _children() <= before.children,
        "other process groups": _groups() != before.groups,
        "no folder": lost,
        "inference mode": torch.is_inference_mode_enabled(),
        "open files": _descriptors() > before.descriptors + DESCRIPTORS,
    }
    return Left(_begun(before.groups), tuple(name for name, stayed in stays.items() if stayed))


def _threads() -> frozenset[int | None]:
    return frozenset(thread.ident for thread in threading.enumerate())


def _children() -> frozenset[int]:
    return frozenset(processes.children(os.getpid()))


def _descriptors() -> int:
    listed = Path("/proc/self/fd")
    return len(os.listdir(listed)) if listed.exists() else 0


def _groups() -> dict[tuple[int, ...], Any]:
    """The default group and those of the mesh, by their ranks; none where the test has destroyed one."""
    import torch.distributed as dist

    me = current()
    try:
        groups = [dist.group.WORLD, *(me.mesh.get_all_groups() if me.has_mesh else ())]
        return {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    except (KeyError, ValueError, RuntimeError):
        return {}


def _begun(groups: Mapping[tuple[int, ...], Any]) -> Counts:
    """Every backend counts, and torch has no public name for it."""
    return {ranks: int(group._get_sequence_number_for_group()) for ranks, group in groups.items()}


def collectives() -> Counts:
    """How many collectives alone this rank has begun in each group, as far as torch's flight recorder knows."""
    assert _BEGINNING is not None
    recent = flight_recorder.read().collectives
    numbers = {
        ranks: [one.number for one in recent if one.group == group.group_name]
        for ranks, group in _BEGINNING.groups.items()
    }
    return {ranks: max(seen, default=0) for ranks, seen in numbers.items()}
