"""Reset a rank between the tests of one world, and report what would disturb the next test."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from pytest_fsdp_meta.worlds.diagnosis import flight_recorder
from pytest_fsdp_meta.worlds.rank.main import current
from pytest_fsdp_meta.worlds.rank.rendezvous import seed

COUNTER = "_get_sequence_number_for_group"
"""The private method of a process group that returns how many collectives it has started; no public one does."""
GroupKey: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a process group and its ranks: on a machine with GPUs, a mesh has a second group of all ranks."""
Counts: TypeAlias = Mapping[GroupKey, int]
"""A count for each process group."""


class _StartState:
    def __init__(self) -> None:
        import torch

        self.environ = dict(os.environ)
        self.dtype = torch.get_default_dtype()
        self.groups = _process_groups()


_START: _StartState | None = None


def record_start() -> None:
    """Record the state of this rank before its first test."""
    global _START
    gc.freeze()  # so that end_test() looks only at what tests have made
    _START = _StartState()


def begin_test(changed: Mapping[str, str | None], folder: str) -> None:
    """Restore what the last test changed: environment, folder, seeds, default dtype and device.

    ``changed`` is what has changed in the parent's environment since the rank was started, ``folder`` the parent's.
    """
    import torch

    assert _START is not None, "record_start() comes first"
    os.environ.clear()
    os.environ.update(_START.environ)
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(folder)
    torch.set_default_dtype(_START.dtype)
    forget_default_device()
    seed(current().device.type)


def forget_default_device() -> None:
    """Undo ``torch.set_default_device``, if it was called.

    If it was not, do not set None either: get_default_device() of torch 2.7, which transformers calls, raises then.
    """
    import torch

    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)


def end_test() -> Counts | None:
    """Free what the test has made, and return how many operations this rank has started in each group.

    These are collectives and, with some backends, also sends to and receives from a single rank. None if the rank must
    not be used again: the test has created or destroyed a group of its world, or a group does not count.
    """
    assert _START is not None, "record_start() comes first"
    current().state.clear()
    gc.collect()  # modules sharded by FSDP2 are in cycles, which keep their memory
    if _process_groups() != _START.groups or not all(hasattr(group, COUNTER) for group in _START.groups.values()):
        return None
    return {key: int(getattr(group, COUNTER)()) for key, group in _START.groups.items()}


def _process_groups() -> dict[GroupKey, Any]:
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
