"""Call the author's save() and resume(); find what loading left untouched, and what saving changed."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.checkpoint.facts import RankSaved
from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import call_field
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.optimizers import handed_over
from pytest_fsdp_meta.worlds import current, doing

LEFT_RUNNING = "left running"
"""The key of the rank's state that has the threads and processes which the author's functions have started."""


def call_author(field: str, subject: Subject, optimizer: Optimizer | None, folder: Path, beside: Beside | None) -> Any:
    """Call ``save`` or ``resume``; where only the model is saved, all but model and folder is None."""
    function = getattr(subject, field)
    kept = (beside or Beside()).arguments(subject, function, any_keyword=True)
    before = _running()
    returned = call_field(field, function, subject.model, handed_over(subject, optimizer), folder, **kept)
    current().state.setdefault(LEFT_RUNNING, set()).update(_running() - before)
    return returned


def still_saving() -> bool:
    """Return whether what ``save`` has started on this rank is still running."""
    left: set[Thread | BaseProcess] = current().state.get(LEFT_RUNNING, set())
    return bool(left & _running())


def finish_saving() -> None:
    """Wait for the threads, futures and processes that ``save`` has left running, as a process does that exits."""
    doing("waiting for what save() left running")
    left: set[Thread | BaseProcess] = current().state.get(LEFT_RUNNING, set()) & _running()
    # Idle workers of an executor that somebody still holds end only when it is shut down, as at the interpreter's exit.
    # The type, because isinstance() asks a dead weakref.proxy for its class, which raises.
    for executor in [one for one in gc.get_objects() if issubclass(type(one), Executor)] if left else []:
        executor.shutdown()
    for one in left:
        one.join()


def _running() -> set[Thread | BaseProcess]:
    """Return the threads and processes that the interpreter waits for when it ends."""
    every: list[Thread | BaseProcess] = [*threading.enumerate(), *multiprocessing.active_children()]
    return {one for one in every if not one.daemon}


MARK = -0.0123456789
"""The value that fills floating-point tensors; no weight has it by chance, let alone all elements of a tensor."""
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch cannot invert the bits of these unsigned integers."""

ROUNDING = 4
"""Units in the last place of the largest element by which save() may change a tensor: there and back, each rounded."""


def overwrite(local: Tensor) -> None:
    """Replace all values: by ``MARK`` where the dtype can hold it, else by their bits inverted."""
    if _can_hold_mark(local):
        local.fill_(MARK)
    elif local.is_floating_point():
        local.view(torch.uint8).bitwise_not_()
    else:
        local.view(SIGNED.get(local.dtype, local.dtype)).bitwise_not_()


def is_untouched(local: Tensor) -> bool:
    """Return whether every element is ``MARK``; False if bits were inverted, which leaves no mark."""
    if not local.numel() or local.is_meta or not _can_hold_mark(local):
        return False
    mark = torch.full((), MARK, dtype=local.dtype, device=local.device)
    return bool(torch.eq(local, mark).all())


def _can_hold_mark(local: Tensor) -> bool:
    return bool(local.is_complex() or (local.is_floating_point() and local.element_size() > 1))


def with_changes(
    held: RankSaved,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    parameters: Collection[str],
    frozen: Collection[str],
) -> RankSaved:
    """Add what save() changed. An optimizer may average the weights to save them, and then take that back.

    That rounds them. Weights that train on may be rounded; frozen ones have to stay as they are.
    """
    digests = {name: digest(local) for name, local in after.items() if name in before}
    changed = [name for name, found in digests.items() if found != held.tensors[name]]
    rounded = tuple(name for name in changed if name not in frozen and _is_rounding(before[name], after[name]))
    tensors = {**held.tensors, **{name: digests[name] for name in rounded}}
    moved = tuple(name for name in changed if name in parameters and name not in rounded)
    return replace(held, tensors=tensors, moved=moved, rounded=rounded)


def _is_rounding(before: Tensor, after: Tensor) -> bool:
    if not after.is_floating_point() or (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    apart, largest = (after.double() - before.double()).abs().max(), before.double().abs().max()
    return bool(apart <= ROUNDING * torch.finfo(after.dtype).eps * largest)
