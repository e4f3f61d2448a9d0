"""A few training steps, with what a rank sees of them: losses, gradients of the first step, what they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pytest_fsdp_meta.evidence import Accumulation, Comparison, Movement, RankTraining
from pytest_fsdp_meta.evidence.collectives import Collective, FsdpGroup
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.observers.accumulation import accumulate, micro_batches, not_shared
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.batches import (
    batch_digest,
    counted_labels,
    global_batch,
    loss_of,
    own_rows,
    own_share,
    scalar,
)
from pytest_fsdp_meta.observers.collectives import Recorder
from pytest_fsdp_meta.observers.gradients import gradient_norm, gradients_of, without_gradient
from pytest_fsdp_meta.observers.inventory import named_tensors, reshard, take_inventory
from pytest_fsdp_meta.observers.loading import loaded_subject
from pytest_fsdp_meta.observers.movement import compare_updates, due_as_in, due_by, movements, noise, shards
from pytest_fsdp_meta.observers.optimizers import make_optimizer, optimizer_facts
from pytest_fsdp_meta.observers.support.poison import deterministic
from pytest_fsdp_meta.observers.support.reference_record import RECORDS, Record, record_at
from pytest_fsdp_meta.observers.support.torch_private import ManagedGroup, fsdp_groups
from pytest_fsdp_meta.observers.support.watching import watching
from pytest_fsdp_meta.observers.values import compare_gradients
from pytest_fsdp_meta.worlds import SEED, Rank, current, doing


@dataclass
class Run:
    """What ``train`` saw, step by step; one entry per step."""

    losses: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    labels: list[tuple[int, int]] = field(default_factory=list)


def observe_training(steps: int, truth: str | None = None, floor: float = 0.0) -> RankTraining:
    """Trains this rank's subject.

    ``truth`` is the folder of the records of the reference's own training, and ``floor`` what is rounding among its
    gradients; None where no reference can be trained. The "optimizer" is left in the rank's state, for those that
    go on training.
    """
    me = current()
    subject = loaded_subject(me)
    share = own_share(subject, me)
    before = shards(subject.model)
    optimizer = make_optimizer(subject)
    first = _First(subject, _records(truth))
    held = None if optimizer is None else optimizer_facts(optimizer, subject.model)
    watched = partial(watching_step, me, subject.model, steps)
    run = train(subject, me.device, range(steps), share, optimizer, first.look, watched)
    reshard(subject.model)
    me.state["optimizer"] = optimizer
    after = take_inventory(subject.model, me.rank, str(me.device))
    return RankTraining(
        losses=tuple(run.losses),
        batches=tuple(run.batches),
        data_parallel=share,
        gradients=first.gradients,
        parameters=_updates(subject.model, before, first.records),
        unreduced=_unreduced(subject.model),
        labels=tuple(run.labels),
        without_gradient=first.without_gradient,
        norm=first.norm,
        norm_problem=first.norm_problem,
        after=after,
        optimizer=held,
        movements=first.movements(before, optimizer, floor),
        accumulation=_accumulation(subject, me, share, first.records, optimizer),
    )


def train(
    subject: Subject,
    device: torch.device,
    steps: range,
    share: tuple[int, int],
    optimizer: Optimizer | None,
    after_first_backward: Callable[[], None] = lambda: None,
    watched: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
) -> Run:
    """The ``steps``, with dropout off, deterministic, seeded by the step; ``share`` is the slice of each batch.

    ``after_first_backward`` is called before the optimizer's first step, and ``watched`` is around each step. Without
    an optimizer, because nothing is trainable, the losses of the forward are all there is.
    """
    model, run = subject.model, Run()
    model.eval()  # dropout off, functional dropout too
    model.zero_grad(set_to_none=True)  # a loader may have run a backward to warm up
    with deterministic():
        for step in steps:
            doing(f"training step {step - steps.start + 1} of {len(steps)}")
            batch = global_batch(subject, step)
            run.batches.append(batch_digest(batch))
            rows = own_rows(batch, step, share, device)
            run.labels.append(counted_labels(rows))
            torch.manual_seed(SEED + step)
            with watched(step):
                with torch.set_grad_enabled(optimizer is not None):
                    loss = loss_of(subject, rows)
                run.losses.append(scalar(loss))
                if optimizer is not None:
                    loss.backward()
                    if step == steps.start:
                        after_first_backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
    return run


class _First:
    """What there is to see between the first backward and the first optimizer step."""

    def __init__(self, subject: Subject, records: Mapping[str, Record]) -> None:
        self.records = records
        self.gradients: tuple[Comparison, ...] = ()
        self.without_gradient: tuple[str, ...] = ()
        self.norm: float | None = None
        self.norm_problem = ""
        self._subject = subject
        self._kept: dict[str, Tensor] = {}
        self._noise = 0.0

    def look(self) -> None:
        model = self._subject.model
        seen = gradients_of(model)
        self.without_gradient = without_gradient(model, seen)
        self.norm, self.norm_problem = gradient_norm(model, self._subject.clip_grad_norm)
        if self.records:
            self.gradients = compare_gradients(seen, self.records["gradients"])
        else:
            self._kept = {name: local_part(gradient.local).to("cpu", copy=True) for name, gradient in seen}
            self._noise = noise(model)

    def movements(
        self, before: Mapping[str, Tensor], optimizer: Optimizer | None, floor: float
    ) -> tuple[Movement, ...]:
        if optimizer is None:
            return ()
        model = self._subject.model
        if self.records:
            return movements(model, before, due_as_in(self.records, floor))
        return movements(model, before, due_by(self._kept, optimizer, self._noise))


def _records(folder: str | None) -> dict[str, Record]:
    if folder is None:
        return {}
    files = {name: record_at(folder, name) for name in RECORDS}
    return {name: Record(file) for name, file in files.items() if file.exists()}


def _updates(model: Module, before: Mapping[str, Tensor], records: Mapping[str, Record]) -> tuple[Comparison, ...]:
    return compare_updates(model, before, records["values"], records["updated"]) if records else ()


def _accumulation(
    subject: Subject, me: Rank, share: tuple[int, int], records: Mapping[str, Record], optimizer: Optimizer | None
) -> Accumulation | None:
    """After the steps, where what goes wrong can disturb nothing that is judged by itself."""
    if optimizer is None or not records:
        return None
    if problem := not_shared(subject, share[1]):
        return Accumulation(problem=problem)
    early = accumulate(subject, me.device, micro_batches(share))
    seen = gradients_of(subject.model)
    missing = without_gradient(subject.model, seen)
    accumulated = Accumulation(compare_gradients(seen, records["accumulated"]), missing, early)
    optimizer.zero_grad(set_to_none=True)  # buffers of a wrapper's own, which zero_grad() of the model does not reach
    subject.model.zero_grad(set_to_none=True)
    reshard(subject.model)
    return accumulated


def _unreduced(model: Module) -> bool:
    held = parts_of(model)
    plain = not any(isinstance(p, DTensor) or held.of(name, p).by for name, _, p in named_tensors(model))
    return plain and not any(isinstance(module, DistributedDataParallel) for module in model.modules())


def watching_step(me: Rank, model: Module, steps: int, step: int) -> AbstractContextManager[None]:
    """Around one of ``steps`` training steps: notes the collectives of the second, if anybody asked for them.

    FSDP2 sets itself up in the first, and DDP orders its buckets.
    """
    asked = "collectives" in me.state["watch"] and step == min(1, steps - 1)
    return _watching(me, model) if asked else nullcontext()


@contextmanager
def _watching(me: Rank, model: Module) -> Iterator[None]:
    groups = list(fsdp_groups(model))
    forwards: Counter[int] = Counter()
    parameters = {name: tensor for name, kind, tensor in named_tensors(model) if kind == "parameter"}
    recorder = Recorder(known=parameters)

    def ran(index: int, *_: Any) -> None:
        forwards[index] += 1

    with ExitStack() as hooks:
        for index, group in enumerate(groups):
            # Only the first of modules that fully_shard took together gathers them, in whichever order they run.
            hooks.callback(group.modules[0].register_forward_pre_hook(partial(ran, index)).remove)
        with recorder.noting_optimizers(), watching(recorder):
            yield
    names: dict[int, list[str]] = {}
    for name, _, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    facts = tuple(_facts(group, names, forwards[index]) for index, group in enumerate(groups))
    me.state["step"] = recorder.told(model), facts


def observe_step() -> tuple[tuple[Collective, ...], tuple[FsdpGroup, ...]] | None:
    """What was noted of this rank's step; None where none was watched to its end."""
    step: tuple[tuple[Collective, ...], tuple[FsdpGroup, ...]] | None = current().state.get("step")
    return step


def _facts(group: ManagedGroup, names: Mapping[int, Sequence[str]], forwards: int) -> FsdpGroup:
    """``names`` are those of each tensor of the model, by identity."""
    return FsdpGroup(
        parameters=tuple(name for parameter in group.parameters for name in names.get(id(parameter), ())),
        forwards=forwards,
        reshards=group.reshards,
        trainable=any(parameter.requires_grad for parameter in group.parameters),
        replicates=group.replicates,
    )
