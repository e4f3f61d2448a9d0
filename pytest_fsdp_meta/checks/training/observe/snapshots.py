"""The moments of a training: the reference is recorded then, and ranks and noise are compared with these records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.checks.training.facts import FIRST_BUFFERS, LAST_BUFFERS
from pytest_fsdp_meta.checks.training.observe.gradients import gradients_of
from pytest_fsdp_meta.checks.training.observe.movement import compare_updates
from pytest_fsdp_meta.checks.training.observe.trained_buffers import compare_buffers, readable_buffers
from pytest_fsdp_meta.checks.values.observe import compare_gradients
from pytest_fsdp_meta.evidence import Comparison
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.reference_record import Record


@dataclass(frozen=True)
class Kind:
    """Tensors of a model that training changes, and how a rank compares its parts with a record.

    A rank needs its shards from before the training, all records, and the name of one. If the tensors have ``values``
    before the training, what counts is how far they are from those.
    """

    of: Callable[[Module], Iterable[tuple[str, Tensor]]]
    compare: Callable[[Module, Mapping[str, Tensor], Mapping[str, Record], str], tuple[Comparison, ...]]
    values: bool = True


@dataclass(frozen=True)
class Snapshot:
    """Tensors at one moment: after a "backward", "update" or "accumulation", a "short" step, or at the "end"."""

    name: str
    """The name of the record, and of the field of ``Noise`` that says how far it moves."""
    kind: Kind
    after: str
    step: int = 0
    """Counted from 0, or from the last step if it is negative."""
    noisy: bool = True
    """False if ``Noise`` has no such field."""


def whole_gradients(model: Module) -> list[tuple[str, Tensor]]:
    """Return the gradients as tensors: in a world of one rank every part is whole."""
    return [(name, part.local) for name, part in gradients_of(model)]


def parameters_of(model: Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, kind, tensor in named_tensors(model) if kind == "parameter")


GRADIENTS = Kind(
    whole_gradients, lambda model, _, records, name: compare_gradients(gradients_of(model), records[name]), values=False
)
PARAMETERS = Kind(parameters_of, compare_updates)
BUFFERS = Kind(readable_buffers, compare_buffers)

SNAPSHOTS = (
    Snapshot("gradients", GRADIENTS, "backward", 0),
    Snapshot("second", GRADIENTS, "backward", 1),
    Snapshot("first_updates", PARAMETERS, "update", 0),
    Snapshot(FIRST_BUFFERS, BUFFERS, "update", 0),
    Snapshot("late", PARAMETERS, "update", -2, noisy=False),
    Snapshot("updates", PARAMETERS, "end"),
    Snapshot(LAST_BUFFERS, BUFFERS, "end"),
    Snapshot("accumulated", GRADIENTS, "accumulation"),
    Snapshot("short", GRADIENTS, "short"),
)


def snapshots_after(event: str, step: int = 0, steps: int = 1) -> list[Snapshot]:
    """Return the snapshots that are due after this event of the ``step`` of so many ``steps``."""
    return [s for s in SNAPSHOTS if s.after == event and step == (s.step + steps if s.step < 0 else s.step)]
