"""Compare the buffers that training changes with those of the reference after its own training.

Non-persistent buffers are scratch memory of each rank, such as caches: they are compared as causes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta.checks.training.facts import BETWEEN, END, FORWARD, UPDATE
from pytest_fsdp_meta.checks.values.observe import all_equal, comparable, compare, length, measure, read_part
from pytest_fsdp_meta.evidence import Comparison, Measure
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_memory
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.inventory import named_tensors, non_persistent, unwrapped
from pytest_fsdp_meta.ranks.reference_record import Record, is_array
from pytest_fsdp_meta.ranks.torch_private import is_replicated, write_count
from pytest_fsdp_meta.ranks.watching import takes_hooks


class BufferWatch:
    """Counts the forwards of the author's steps, and finds what the steps change by themselves.

    Of buffers it is the values, of parameters, which are too large for copies, that they are written to.

    Forwards, backwards and steps of the optimizer run in the reference as well, with the optimizer's hooks; what
    changes between them changes on the ranks only, and so does what an evaluation within the step changes.
    """

    def __init__(self, model: Module) -> None:
        self.forwards = 0
        """Those that train: each updates statistics, and the reference runs one in a step."""
        self.moments: dict[tuple[int, str], dict[str, Tensor]] = {}
        """(Step, event before which the step has changed them) -> its buffers, with their values at that moment."""
        self.by_evaluation: dict[str, None] = {}
        self.written_parameters: dict[str, None] = {}
        self._model = model
        self._whole = unwrapped(model)  # a trainer may call its wrapper or, as model.module, the model itself
        self._step = 0
        self._begun = False
        """Whether a forward, a backward or a step of the optimizer has begun in this step."""
        self._running = 0
        """How many forwards, backwards and steps of the optimizer are running, one within another."""
        self._kept: dict[str, Tensor] = {}
        """Copies from when the last of them ended, or the evaluation began."""
        self._parameters: list[tuple[str, Tensor]] = []
        self._writes: list[int] = []
        """How often each has been written to when the last of them ended."""

    @property
    def by_step(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for changed in self.moments.values() for name in changed))

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Look at one step of the author's, whose backwards and optimizer call ``begin`` and ``end``."""
        self._step, self._running, self._begun = step, 0, False
        named = named_tensors(self._model)  # FSDP2 may give the modules others while they are gathered
        self._parameters = [(name, tensor) for name, kind, tensor in named if kind == "parameter"]
        self._keep()
        with ExitStack() as hooks:
            # Of each, because a step may call parts of the model one after another; the module's own hooks are within.
            for module in filter(takes_hooks, self._model.modules()):
                hooks.callback(module.register_forward_pre_hook(self._before_forward, prepend=True).remove)
                hooks.callback(module.register_forward_hook(self._after_forward, always_call=True).remove)
            yield
            self.begin(END)
        self._kept.clear()
        self._parameters.clear()

    def begin(self, event: str) -> None:
        """Look for changes since the last event, if this one is not within another."""
        self._running += 1
        if self._running == 1:
            # The reference runs one forward and one backward for all micro-batches.
            moment = event if event in (UPDATE, END) or not self._begun else BETWEEN
            self._begun = True
            if changed := self._changed():
                self.moments.setdefault((self._step, moment), {}).update(changed)
            pairs = zip(self._parameters, self._count_writes(), self._writes, strict=True)
            self.written_parameters |= {name: None for (name, _), now, kept in pairs if now != kept}

    def end(self) -> None:
        if self._running == 1:
            self._keep()
        self._running = max(self._running - 1, 0)  # ZeRO-3 steps its parts one after another, and begins with the last

    def _before_forward(self, module: Module, _: object) -> None:
        if torch.compiler.is_compiling():
            return
        self.forwards += module is self._whole and not _evaluates(module)
        self.begin(FORWARD)
        if self._running == 1 and _evaluates(module):
            self._keep()

    def _after_forward(self, module: Module, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._running == 1 and _evaluates(module):
            persistent = {name for name, _ in persistent_buffers(self._model)}
            self.by_evaluation |= {name: None for name in self._changed() if name in persistent}
        self.end()

    def __deepcopy__(self, _: object) -> BufferWatch:
        return self  # a step may copy a module with its hooks

    def _keep(self) -> None:
        self._writes = self._count_writes()
        self._kept = {name: tensor.clone() for name, tensor in self._values()}

    def _count_writes(self) -> list[int]:
        # Those to a DTensor are not counted by its part, and the other way round.
        return [write_count(tensor) + write_count(own_memory(tensor)) for _, tensor in self._parameters]

    def _changed(self) -> dict[str, Tensor]:
        """Return copies of the buffers that differ from those that were kept."""
        pairs = ((name, tensor, self._kept.get(name)) for name, tensor in self._values())
        return {name: now.clone() for name, now, kept in pairs if kept is not None and not all_equal(now, kept)}

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, local_part(tensor).detach()) for name, tensor in readable_buffers(self._model))


def _evaluates(module: Module) -> bool:
    """Return whether a forward of the module that runs now is not part of the training."""
    return not module.training and not torch.is_grad_enabled()


def persistent_buffers(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the buffers that a checkpoint contains."""
    transient = non_persistent(model)
    return ((name, tensor) for name, tensor in readable_buffers(model) if name not in transient)


def readable_buffers(model: Module) -> Iterator[tuple[str, Tensor]]:
    for name, kind, tensor in named_tensors(model):
        if kind == "buffer" and not tensor.is_meta and is_array(tensor):
            yield name, tensor


def changed_since(values: Record, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the tensors of the reference that differ from its recorded ``values``."""
    return [
        (name, tensor)
        for name, tensor in tensors
        if name in values and not all_equal(local_part(tensor).cpu(), values.read_whole(name))
    ]


def compare_buffers(
    model: Module, _: Mapping[str, Tensor], records: Mapping[str, Record], after: str
) -> tuple[Comparison, ...]:
    """Compare those that changed here or in the reference; the measure is of how far each moved.

    ``after`` is the record that the reference wrote at the same time, of those that it changed.
    """
    parts, values, updated = parts_of(model), records["values"], records[after]
    found = []
    for name, tensor in readable_buffers(model):
        source = updated if name in updated else values
        if name not in values:
            continue
        part = parts.of(name, tensor)
        comparison = compare(name, part, source, name)
        if comparison.problem is None and (source is updated or not comparison.equal):
            found.append(replace(comparison, measure=_measure_movement(part, values, source, name)))
    return tuple(found)


def _measure_movement(part: Part, values: Record, updated: Record, name: str) -> Measure | None:
    now = local_part(part.local).cpu()
    old, new = (comparable(read_part(part, record, name)) for record in (values, updated))
    ours = comparable(now)
    if not now.numel() or not old.shape == new.shape == ours.shape:
        return None
    exact = not (now.dtype.is_floating_point or now.dtype.is_complex)
    grain = 0.0 if exact else torch.finfo(now.dtype).eps * max(length(old), length(new))
    return measure(ours, new, grain, elements=now.numel(), since=(old, old))


def broadcast_buffers(model: Module) -> tuple[str, ...]:
    """Return the buffers that DDP overwrites with those of one rank before each forward.

    ``replicate()`` does so where it is DDP without a wrapper; where it is FSDP2, it does not.
    """
    held = set[int]()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            sent = module.module.named_buffers() if module.broadcast_buffers else ()
            held |= {id(buffer) for name, buffer in sent if name not in module.parameters_to_ignore}
        elif is_replicated(module) and not isinstance(module, FSDPModule):
            held |= {id(buffer) for buffer in module.buffers()}
    return tuple(name for name, kind, tensor in named_tensors(model) if kind == "buffer" and id(tensor) in held)
