"""Call the author's save() and resume(), and wait for what they leave running."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from concurrent.futures import Executor
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

import torch.distributed as dist
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import call_field
from pytest_fsdp_meta.ranks.optimizers import handed_over
from pytest_fsdp_meta.worlds import current, doing

LEFT_RUNNING = "left running"
"""The key of the rank's state that has the threads and processes which the author's functions have started."""


def call_author(field: str, subject: Subject, optimizer: Optimizer | None, folder: Path, beside: Beside | None) -> None:
    """Call ``save`` or ``resume``; where only the model is saved, all but model and folder is None."""
    function = getattr(subject, field)
    kept = (beside or Beside()).arguments(subject, function, any_keyword=True)
    before = _running()
    call_field(field, function, subject.model, handed_over(subject, optimizer), folder, **kept)
    current().state.setdefault(LEFT_RUNNING, set()).update(_running() - before)


def still_saving() -> bool:
    """Return whether what ``save`` has started on this rank is still running."""
    left: set[Thread | BaseProcess] = current().state.get(LEFT_RUNNING, set())
    return bool(left & _running())


def wait_for_all_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()


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
