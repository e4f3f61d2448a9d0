"""Make the output of some ranks NaN for one step of the author's, and see which ranks make the step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.checks.materialisation.observe import resharded_subject
from pytest_fsdp_meta.checks.training.facts import StepNotFinite
from pytest_fsdp_meta.checks.training.observe.author_step import call_author_step, on_any_rank
from pytest_fsdp_meta.checks.training.observe.beside import last_beside, last_optimizer
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import batch_slice, rows_of_step
from pytest_fsdp_meta.ranks.inventory import reshard, take_inventory
from pytest_fsdp_meta.ranks.modes import with_dropout
from pytest_fsdp_meta.ranks.module_watch import tensors_in
from pytest_fsdp_meta.worlds import Rank, current, doing


def observe_not_finite() -> StepNotFinite:
    """Run the author's step with NaN in what the model returns on the ranks of the first slice of the batch.

    If that leaves all ranks as they were, run it again, with NaN on those of the last slice; and, if that does as well,
    once as it is. The model may be of no use afterwards.
    """
    rank, subject = current(), resharded_subject()
    data_parallel = batch_slice(subject, rank)
    rows = rows_of_step(subject, 0, data_parallel, rank.device)
    steps: list[bool | None] = []
    for bad in dict.fromkeys((0, data_parallel[1] - 1)):
        # Where one rank does not call the model, none may wait for another step of it.
        if steps and on_any_rank(steps[0] is not False):
            break
        steps.append(_moves(subject, rank, rows, data_parallel[0] == bad))
    kept: tuple[str, ...] = ()
    if not on_any_rank(any(step is not False for step in steps)):
        _moves(subject, rank, rows, spoiling=False)
        tensors = take_inventory(subject.model, rank.rank, str(rank.device)).tensors
        kept = tuple(tensor.name for tensor in tensors if tensor.requires_grad and tensor.nan)
    moved = tuple(step for step in steps if step is not None)
    return StepNotFinite(data_parallel, moved if len(moved) == len(steps) else (), kept)


def _moves(subject: Subject, rank: Rank, rows: dict[str, Any], spoiling: bool) -> bool | None:
    """Return whether a step changes this rank's parameters; None if it calls no model, or that returns no numbers."""
    doing("a step that is not finite")
    before, called = _digests(subject, rank), False
    optimizer = last_optimizer(subject, rank)
    assert optimizer is not None, "something is trainable"

    def spoil(module: Module, args: Any, output: Any) -> Any:
        nonlocal called
        called |= any(tensor.is_floating_point() for _, tensor in tensors_in(output))
        return _with_nan(output) if spoiling else None

    hook = subject.model.register_forward_hook(spoil)
    try:
        # Not run_author_step(): here a step may well leave the optimizer alone.
        beside = last_beside(subject, rank, optimizer)
        with beside.kept_schedule(optimizer), with_dropout(subject.model, rank.device):
            call_author_step(subject, optimizer, rows, beside)
    finally:
        hook.remove()
    reshard(subject.model)
    return _digests(subject, rank) != before if called else None


def _digests(subject: Subject, rank: Rank) -> Mapping[str, str | None]:
    tensors = take_inventory(subject.model, rank.rank, str(rank.device)).tensors
    return {tensor.name: tensor.digest for tensor in tensors if tensor.requires_grad}


def _with_nan(value: Any) -> Any:
    """Return the value with NaN in all its floating tensors, which ``tensors_in`` finds."""
    if isinstance(value, Tensor):
        return value * float("nan") if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(_with_nan, value))
    if isinstance(value, tuple):  # a named one takes its parts one by one
        return type(value)(*map(_with_nan, value))
    spoiled: Any
    if isinstance(value, Mapping):  # before dataclasses: the outputs of transformers are both
        spoiled = copy.copy(value)
        for key, part in value.items():
            spoiled[key] = _with_nan(part)
        return spoiled
    if is_dataclass(value) and not isinstance(value, type):
        spoiled = copy.copy(value)
        for field in fields(value):
            object.__setattr__(spoiled, field.name, _with_nan(getattr(value, field.name)))
        return spoiled
    return value
