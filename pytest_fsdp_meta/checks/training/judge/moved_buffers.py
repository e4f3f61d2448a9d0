"""Find the buffers that training changed, and those that have moved otherwise than the reference's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pytest_fsdp_meta.judging.causes import Cases
from pytest_fsdp_meta.judging.limits import limits_of
from pytest_fsdp_meta.judging.view import View


def changed_buffers(view: View) -> set[str]:
    """Return the persistent buffers that the training changed on any rank or in the reference.

    Those that DDP overwrites with one rank's before each forward are left out: between forwards they may be anything.
    """
    runs, reference = view.evidence.training or (), view.evidence.reference
    pairs = [(rank, run.after) for rank, run in zip(view.evidence.inventory, runs, strict=True)]
    if reference is not None:
        pairs.append((reference.inventory, reference.after))
    changed = {
        tensor.name
        for before, after in pairs
        for tensor in (after.tensors if after is not None else ())
        if tensor.kind == "buffer" and tensor.persistent and tensor.name in before.by_name
        if tensor.digest != before.by_name[tensor.name].digest
    }
    return changed.difference(*(run.buffers.broadcast for run in runs))


def comparable_buffers(view: View) -> bool:
    """Return whether the buffers were compared with those of a reference that was trained."""
    return view.evidence.reference is not None and view.evidence.reference.after is not None


def moved_otherwise(view: View, names: Collection[str], when: str) -> dict[str, Cases]:
    """Return the ranks whose buffers have moved otherwise than the reference's.

    ``when`` is FIRST_BUFFERS or LAST_BUFFERS.
    """
    found: dict[str, Cases] = {}
    runs = view.evidence.training or ()
    limits = replace(limits_of(view, when), roundings=2 * len(view.reference.losses or ()))
    exact = replace(limits, relative=0.0)
    for name, cases in view.comparisons(tuple(run.compared[when] for run in runs), names).items():
        apart = [
            (rank, c)
            for rank, c in cases
            if c.measure is not None and (limits if c.measure.grain else exact).too_far(rank, c)
        ]
        if apart:
            found[name] = apart
    return found
