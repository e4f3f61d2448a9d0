"""Run the first batch again after the training, to observe accumulation, gradients that are not clipped, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.checkpoint.observe.round_trip import make_optimizer_state
from pytest_fsdp_meta.checks.memory.facts import StepMemory
from pytest_fsdp_meta.checks.memory.observe import memory_of, observe_step_memory
from pytest_fsdp_meta.checks.training.facts import AFTER, FORWARD, OWN_CHANGES
from pytest_fsdp_meta.checks.training.observe.author_step import describe_cause, on_any_rank
from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.checks.training.observe.gradients import gradients_of, without_gradient
from pytest_fsdp_meta.checks.training.observe.movement import copy_shards
from pytest_fsdp_meta.checks.training.observe.steps import StepObserver, train
from pytest_fsdp_meta.checks.training.observe.trained_buffers import BufferWatch, persistent_buffers
from pytest_fsdp_meta.checks.values.observe import compare_gradients
from pytest_fsdp_meta.evidence import Accumulation, Comparison, splits_model
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.ranks.adapters import megatron_fsdp
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, mesh_facts
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.batches import global_batch, has_rows, loss_of, own_rows, rows_of_step
from pytest_fsdp_meta.ranks.generators import seed_all
from pytest_fsdp_meta.ranks.inventory import drop_gradients, named_tensors, reshard
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer, stepped_tensors, steps_after
from pytest_fsdp_meta.ranks.modes import comparable_modes
from pytest_fsdp_meta.ranks.reference_record import Record
from pytest_fsdp_meta.ranks.torch_private import step_hooks
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import SEED, CallFailed, Rank, doing

SCALING = 16
"""How much smaller the gradients of a second step are, to see that they follow their scale."""


SMALL, SMALLEST = 2.0**-10, 2.0**-30
"""Scales of gradients that are too small to be clipped: powers of two, so that scaling rounds nothing."""


@dataclass
class FirstBatchAgain:
    """Observe the first batch again. ``optimizer`` is None where nothing is trainable."""

    subject: Subject
    rank: Rank
    data_parallel: tuple[int, int]
    records: Mapping[str, Record]
    optimizer: Optimizer | None
    accumulation: Accumulation | None = None
    short: Accumulation | None = None
    unclipped: tuple[Comparison, ...] = ()
    unclipped_refused: str = ""
    memory: StepMemory | None = None

    def observe(self) -> None:
        """Take all. Accumulated gradients, or those of the run for memory, give the saved optimizer its state."""
        if self.optimizer is None:
            self.memory = StepMemory(0)
            return
        self.accumulation = self._accumulate(self.optimizer)
        self.short = self._shorten(self.optimizer)
        self.unclipped = self._leave_unclipped(self.optimizer)
        if self.memory is None:
            rows = rows_of_step(self.subject, 0, self.data_parallel, self.rank.device)
            self.memory = memory_of(self.subject, rows)
            self._use_gradients(self.optimizer, self.memory.kept is not None)

    def _accumulate(self, optimizer: Optimizer) -> Accumulation | None:
        subject = self.subject
        if not self.records or subject.train_step is not None:
            return None
        if problem := indivisible_batch(subject, self.data_parallel[1]):
            return Accumulation(problem=problem)
        if "accumulated" not in self.records:
            return None  # nothing is trainable in the reference
        early = self.run_micro_batches(optimizer)
        if refused := finish_gradients(optimizer):
            accumulated = Accumulation(refused=refused)
        else:
            gradients = gradients_of(subject.model)
            compared = compare_gradients(gradients, self.records["accumulated"])
            accumulated = Accumulation(compared, without_gradient(subject.model, gradients), early)
        self._use_gradients(optimizer)
        return accumulated

    def run_micro_batches(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Accumulate gradients, and count what the backward of the first micro-batch keeps.

        Return the parameters whose gradients were already reduced after it.
        """
        rounds = [[piece] for piece in micro_batches(self.data_parallel)]
        run = partial(accumulate, self.subject, optimizer, self.rank.device, rounds)
        early, self.memory = observe_step_memory(self.subject, run)
        if early is None:  # what refuses to be watched may well run
            self._use_gradients(optimizer, whole=False)
            early = run()
        return early

    def _shorten(self, optimizer: Optimizer) -> Accumulation | None:
        """Let the author's step train on half of the rows, as in the last window of an epoch."""
        subject, rank = self.subject, self.rank
        if subject.train_step is None or not self.records:
            return None
        if problem := indivisible_batch(subject, self.data_parallel[1]):
            return Accumulation(problem=problem)
        if "short" not in self.records:
            return None  # nothing is trainable in the reference
        clips = subject.max_grad_norm is not None
        beside: Beside = rank.state["beside"]

        def run(watching: AbstractContextManager[None]) -> _GradientsOfStep:
            seen = _GradientsOfStep(subject.model, self.records["short"], SMALL if clips else 1.0)
            rows = micro_batches(self.data_parallel)[0]
            with watching:
                train(subject, rank.device, range(1), rows, optimizer, seen, beside)
            # What the step changes first, such as a schedule, has other values than in the last step.
            rank.state[OWN_CHANGES][AFTER, FORWARD] = seen.buffers.moments.get((AFTER, FORWARD), {})
            return seen

        try:
            # Gradients that are not clipped follow: the reference, which makes no short step, has the same weights.
            with beside.kept_schedule(optimizer), _kept_values(subject.model, optimizer if clips else None):
                watched, self.memory = observe_step_memory(subject, run)
                seen = watched or run(nullcontext())
        except (CallFailed, SubjectError) as error:
            return Accumulation(refused=describe_cause(error))
        finally:
            reshard(subject.model)
        return Accumulation(seen.gradients, seen.without_gradient)

    def _leave_unclipped(self, optimizer: Optimizer) -> tuple[Comparison, ...]:
        """Let the author's step train on the batch, so that clipping hides no wrong scale.

        Gradients that are clipped all the same have the scale of a GradScaler, say: then smaller ones are tried.
        """
        subject, rank = self.subject, self.rank
        if subject.train_step is None or subject.max_grad_norm is None or "accumulated" not in self.records:
            return ()
        beside: Beside = rank.state["beside"]
        for scale in (SMALL, SMALLEST):
            seen = _GradientsOfStep(subject.model, self.records["accumulated"], scale)
            # The reference's weights are those before these steps.
            kept = _kept_values(subject.model, optimizer if scale == SMALL else None)
            try:
                with beside.kept_schedule(optimizer), kept:
                    for _ in range(2):
                        train(subject, rank.device, range(1), self.data_parallel, optimizer, seen, beside)
                        seen.gradient_scale /= SCALING
            except (CallFailed, SubjectError) as error:  # a schedule of the author's own may have ended
                self.unclipped_refused = describe_cause(error)
            finally:
                reshard(subject.model)
            if not on_any_rank(len(seen.norms) == 2 and not seen.scaled):
                break
        return seen.gradients if seen.scaled else ()

    def _use_gradients(self, optimizer: Optimizer, whole: bool = True) -> None:
        """Give the optimizer that is saved its state by the gradients, if they are ``whole``, and drop them."""
        if whole:
            make_optimizer_state(self.subject, self.rank)
        optimizer.zero_grad(set_to_none=True)  # model.zero_grad() does not reach gradient buffers of a wrapper
        drop_gradients(self.subject.model)
        reshard(self.subject.model)


@contextmanager
def _kept_values(model: Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Give the persistent buffers their values back at the end, and what the ``optimizer`` steps, if one is given."""
    before = {} if optimizer is None else copy_shards(model)
    before |= {name: local_part(tensor).clone() for name, tensor in persistent_buffers(model)}
    own = {id(parameter) for parameter in model.parameters()}
    stepped = () if optimizer is None else stepped_tensors(optimizer)
    copies = [(tensor, local_part(tensor).to("cpu", copy=True)) for tensor in stepped if id(tensor) not in own]
    try:
        yield
    finally:
        reshard(model)
        parts = parts_of(model)
        with torch.no_grad():
            for name, _, tensor in named_tensors(model):
                if name in before and before[name].shape == local_part(parts.of(name, tensor).local).shape:
                    local_part(parts.of(name, tensor).local).copy_(before[name])
            for tensor, value in copies:
                local_part(tensor).copy_(value)


class _GradientsOfStep(StepObserver):
    """Compare the gradients of a step, which are multiplied by ``scale``, with the reference's."""

    buffers: BufferWatch

    def __init__(self, model: Module, record: Record, scale: float) -> None:
        self.gradient_scale = scale
        self.buffers = BufferWatch(model)
        self._model = model
        self._record = record
        self.gradients: tuple[Comparison, ...] = ()
        self.without_gradient: tuple[str, ...] = ()
        self.norms: list[float] = []

    def during_forwards(self, step: int, rows: dict[str, Any]) -> AbstractContextManager[None]:
        return self.buffers.during(AFTER)

    def after_backward(self, step: int) -> None:
        parts = [(name, replace(part, local=local_part(part.local))) for name, part in gradients_of(self._model)]
        self.norms.append(math.hypot(*(float(part.local.norm()) for _, part in parts)))
        if not self.gradients:
            whole = ((name, replace(part, local=part.local / self.gradient_scale)) for name, part in parts)
            self.gradients = compare_gradients(whole, self._record)
            self.without_gradient = without_gradient(self._model, parts)

    @property
    def scaled(self) -> bool:
        """Whether gradients follow their scale, about as it changed between two steps, and so were not clipped.

        The backward of some fused losses ignores its factor, and other code may compute gradients without a backward.
        """
        return len(self.norms) == 2 and self.norms[1] * SCALING / 2 <= self.norms[0] <= self.norms[1] * SCALING**1.5


MICRO_BATCHES = 2
"""Micro-batches per data-parallel rank."""


def indivisible_batch(subject: Subject, size: int) -> str:
    """Return why the first batch does not split into micro-batches for ``size`` ranks; empty where it does."""
    for key, value in global_batch(subject, 0).items():
        if has_rows(value) and value.shape[0] % (size * MICRO_BATCHES):
            rows = f"{key!r} has {value.shape[0]} rows"
            return f"{rows}, which do not divide into {MICRO_BATCHES} micro-batches for each of {size} ranks"
    return ""


def micro_batches(data_parallel: tuple[int, int]) -> list[tuple[int, int]]:
    """Split a slice (index, size) of the global batch into smaller slices of it."""
    index, size = data_parallel
    return [(index * MICRO_BATCHES + number, size * MICRO_BATCHES) for number in range(MICRO_BATCHES)]


def union_of_ranks(size: int) -> list[list[tuple[int, int]]]:
    """Return, for each round, the micro-batches of all ``size`` ranks: what the ranks see at the same time.

    A loss that is divided by a count over all ranks counts the labels of one round.
    """
    return [list(pieces) for pieces in zip(*(micro_batches((index, size)) for index in range(size)), strict=True)]


def half_of_ranks(size: int) -> list[list[tuple[int, int]]]:
    """Return one round with the first half of each rank's rows, as a window of accumulation that ends early."""
    return union_of_ranks(size)[: MICRO_BATCHES // 2]


def accumulate(
    subject: Subject,
    optimizer: Optimizer,
    device: torch.device,
    rounds: Sequence[Sequence[tuple[int, int]]],
    around_first: AbstractContextManager[None] | None = None,
) -> tuple[str, ...]:
    """Accumulate the mean gradient over the rounds; the caller zeroes the gradients.

    A round is one forward over some slices of the first batch together, and its backward; the first one runs in the
    context ``around_first``. Return the parameters whose gradients were already reduced after it.
    """
    model, early = subject.model, tuple[str, ...]()
    drop_gradients(model)
    with comparable_modes(model):
        batch = global_batch(subject, 0)
        for number, slices in enumerate(rounds):
            first, *others = [own_rows(batch, 0, piece, device) for piece in slices]
            rows = {  # entries without rows are the same in all slices
                key: torch.cat([value, *(own[key] for own in others)]) if has_rows(value) else value
                for key, value in first.items()
            }
            seed_all(SEED)
            doing(f"accumulating gradients, micro-batch {number + 1} of {len(rounds)}")
            last = number == len(rounds) - 1
            around = around_first or nullcontext() if number == 0 else nullcontext()
            with nullcontext() if last else _unsynced(model), around, steps_after(optimizer, drop=True):
                (loss_of(subject, rows) / len(rounds)).backward()
            if number == 0 and not last:
                early = tuple(_already_reduced(model))
    return early


def finish_gradients(optimizer: Optimizer) -> str:
    """Run the hooks of the optimizer's step, which may reduce or scale gradients, without the step itself.

    Return the error that one of them raises, which may expect a step of the training; empty if none does.
    """
    try:
        for part in parts_of_optimizer(optimizer):
            for before, hook in step_hooks(part):
                if before:
                    hook(part, (), {})
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


@contextmanager
def _unsynced(model: Module) -> Iterator[None]:
    """Switch off the reduction of FSDP and DDP.

    FSDP2 reads its switch in the backward and DDP in the forward; FSDP1 has one on the root.
    """
    outermost = list(_outermost(model))  # authors may override the public switch of their outermost modules
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) or (
                module is model and isinstance(module, FullyShardedDataParallel)
            ):
                stack.enter_context(module.no_sync())
            elif megatron_fsdp.is_wrapper(module):
                stack.enter_context(megatron_fsdp.unsynced(module))
        for module in outermost:
            module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for module in outermost:
                module.set_requires_gradient_sync(True)


def _outermost(module: Module) -> Iterator[FSDPModule]:
    """Yield the FSDP2 modules that no other FSDP2 module contains."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _already_reduced(model: Module) -> Iterator[str]:
    """Yield sharded parameters that have a gradient: FSDP2 sets ``grad`` only once it has reduced the gradient."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for name, _, tensor in named_tensors(model):
        if isinstance(tensor, DTensor) and tensor.grad is not None:
            dims = zip(tensor.placements, mesh_facts(tensor).dims, strict=True)
            if any(p.is_shard() and not splits_model(dim) for p, dim in dims):  # so the gradient must be reduced
                yield name
