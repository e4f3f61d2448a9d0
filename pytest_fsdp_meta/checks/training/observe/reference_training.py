"""Train the reference in its world of one rank, and record the moments that ranks are compared with.

It trains a second time only if the ranks differ from it: losses that differ between two trainings from the same weights
cannot serve as a reference; the facts say so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.memory.facts import StepMemory
from pytest_fsdp_meta.checks.memory.observe import memory_of, return_freed_memory
from pytest_fsdp_meta.checks.random_numbers.observe import watching_draws
from pytest_fsdp_meta.checks.training.facts import AFTER, FORWARD, GIVEN_BUFFERS
from pytest_fsdp_meta.checks.training.observe.beside import Beside, make_beside
from pytest_fsdp_meta.checks.training.observe.first_batch_again import (
    accumulate,
    finish_gradients,
    half_of_ranks,
    indivisible_batch,
    micro_batches,
    union_of_ranks,
)
from pytest_fsdp_meta.checks.training.observe.gradients import ReferenceClipping, gradient_norm
from pytest_fsdp_meta.checks.training.observe.movement import (
    BUFFERS,
    gradient_noise,
    parameters_of,
    root_mean_square,
    snapshots_after,
    whole_gradients,
)
from pytest_fsdp_meta.checks.training.observe.reference import declared_subject, give_buffers, restore, set_values
from pytest_fsdp_meta.checks.training.observe.steps import StepObserver, train
from pytest_fsdp_meta.checks.training.observe.trained_buffers import changed_since
from pytest_fsdp_meta.evidence import ReferenceFacts
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import global_batch, loss_of, own_rows, rows_of_step, scalar
from pytest_fsdp_meta.ranks.generators import seed_all
from pytest_fsdp_meta.ranks.inventory import drop_gradients, named_tensors, take_inventory
from pytest_fsdp_meta.ranks.modes import (
    EVALUATING,
    IN_EVALUATION,
    batch_norms,
    comparable_modes,
    dropout_fractions,
    kept_in_evaluation,
)
from pytest_fsdp_meta.ranks.optimizers import hooks_left_out, make_optimizer, settings_of
from pytest_fsdp_meta.ranks.reference_record import Record, RecordWriter, record_at
from pytest_fsdp_meta.ranks.watching import takes_hooks
from pytest_fsdp_meta.text import first_line, first_of
from pytest_fsdp_meta.worlds import SEED, CallFailed, cause_of, current

TRIES = 5
"""Seeds with which forwards are compared: by chance, two may skip the same layers."""


def train_reference(
    recipe: Mapping[str, bytes],
    steps: int,
    folder: str,
    data_parallel_size: int,
    facts: ReferenceFacts,
    evaluating: Collection[str] = (),
    compiled: bool = False,
    short: bool = False,
) -> ReferenceFacts:
    """Train the reference from the recorded values; return the facts with the results added.

    Record in ``folder`` what ``SNAPSHOTS`` lists, and what is beside the model. Gradients are accumulated over the
    rounds of micro-batches of ``data_parallel_size`` ranks; with ``short``, those of half of each rank's rows as well.
    The modules ``evaluating`` on the ranks are in ``eval()`` here, too. Where trainings in ``train()`` cannot be
    compared, as those of some models that are ``compiled`` on the ranks, this one and all that follow in this world are
    in ``eval()``; if that raises, the facts have only the reason.
    """
    rank = current()
    rank.state[EVALUATING] = tuple(evaluating)
    model = rank.state["reference"]
    if GIVEN_BUFFERS in rank.state:  # it has trained without these before
        restore(model, Record(record_at(folder, "values")))
    facts = replace(facts, batch_norms=tuple(batch_norms(model)), dropouts=dropout_fractions(model))
    facts = replace(facts, in_eval=kept_in_evaluation(model))

    def train_once(evaluated: str, may_draw: bool) -> ReferenceFacts:
        if evaluated:
            rank.state[IN_EVALUATION] = True
        known = replace(facts, evaluated=evaluated)
        with RecordWriter() as writer:
            return _train_and_record(recipe, steps, folder, data_parallel_size, short, known, writer, may_draw)

    trained: ReferenceFacts | None = None
    if compiled and facts.batch_norms:
        why = f"torch.compile has compiled the model, with {first_of(facts.batch_norms)} in train()"
        trained = train_once(why, may_draw=True)
    else:
        with suppress(_DrawsInTraining):
            trained = train_once("", may_draw=False)
    if trained is None:
        values = Record(record_at(folder, "values"))
        why = _describe_draws(recipe, values)
        problem = _describe_evaluation(recipe, values, data_parallel_size) if why else ""
        trained = replace(facts, evaluated=f"{why}, {problem}") if problem else train_once(why, may_draw=True)
    return_freed_memory(rank.device)  # this world waits while others train
    return trained


def _describe_evaluation(recipe: Mapping[str, bytes], values: Record, data_parallel_size: int) -> str:
    """Return why ranks and reference cannot be compared in ``eval()`` either, or empty."""
    rank = current()
    rank.state[IN_EVALUATION] = True
    try:
        # Ranks with the same rows draw the same numbers there.
        draws = _describe_draws(recipe, values) if data_parallel_size > 1 else ""
        return "in eval() as well; take noise from batch(step), which ranks and reference share" if draws else ""
    except CallFailed as error:  # detection models, for example, have a loss in train() only
        cause = cause_of(error)
        return f"and {error.where} raises {type(cause).__name__} in eval(): {first_line(cause)}"
    finally:
        del rank.state[IN_EVALUATION]


def _describe_draws(recipe: Mapping[str, bytes], values: Record) -> str:
    """Return which modules draw random numbers although dropout is off, if these change the loss.

    Layers that are skipped with probability zero draw numbers that change nothing.
    """
    subject, device = declared_subject(current().state["reference"], recipe), current().device
    rows = rows_of_step(subject, 0, (0, 1), device)
    losses, drawing = set[float](), dict[str, None]()
    for seed in range(SEED, SEED + TRIES):
        restore(subject.model, values)
        with comparable_modes(subject.model), watching_draws(subject.model, device) as watch, torch.no_grad():
            seed_all(seed)
            losses.add(scalar(loss_of(subject, rows)))
        drawing |= dict.fromkeys(draw.module or "the model itself" for draw in watch.draws)
    restore(subject.model, values)
    if len(losses) == 1:
        return ""
    return f"{first_of(list(drawing) or ['the model itself'])} draws random numbers in train() that change the loss"


def depends_on(recipe: Mapping[str, bytes], names: Collection[str], folder: str) -> tuple[str, ...]:
    """Return the tensors of these on which the reference's loss depends."""
    if not names:
        return ()
    subject, values = declared_subject(current().state["reference"], recipe), Record(record_at(folder, "values"))
    rows = rows_of_step(subject, 0, (0, 1), current().device)

    def loss(changed: Mapping[str, Tensor]) -> Tensor | float:
        restore(subject.model, values)
        set_values(subject.model, changed)
        seed_all(SEED)
        with torch.no_grad(), comparable_modes(subject.model), suppress(CallFailed):
            return loss_of(subject, rows)
        return math.nan  # which equals nothing: a loss that cannot be computed may depend on any

    expected, found = loss({}), []
    for name, tensor in ((name, tensor) for name, _, tensor in named_tensors(subject.model) if name in names):
        # NaN shows also where a choice of experts hides a small change.
        other = ~tensor if tensor.dtype == torch.bool else tensor + 1
        other = torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else other
        found += [] if loss({name: other}) == expected else [name]
    return tuple(found)


def _train_and_record(
    recipe: Mapping[str, bytes],
    steps: int,
    folder: str,
    data_parallel_size: int,
    short: bool,
    facts: ReferenceFacts,
    writer: RecordWriter,
    may_draw: bool,
) -> ReferenceFacts:
    """Raise _DrawsInTraining if the first forward draws random numbers, unless it ``may_draw`` them."""
    rank = current()
    subject = declared_subject(rank.state["reference"], recipe)
    model, optimizer = subject.model, make_optimizer(subject)
    clipping = ReferenceClipping(recipe.get("clip_grad_norm"), model, optimizer)
    subject.clip_grad_norm = clipping.clip
    settings = {} if optimizer is None else settings_of(optimizer, model)
    beside = make_beside(subject, optimizer)
    first = _RecordedSteps(model, steps, folder, clipping, writer, may_draw)
    first.record_beside("beside", beside)
    # Where nothing is trainable there is no backward, but the ranks need empty records.
    first.after_backward(0)
    run = train(subject, rank.device, range(steps), (0, 1), optimizer, first, beside)
    first.record_beside("updated_beside", beside)
    after = take_inventory(model, 0, str(rank.device))
    first.take("end")
    if optimizer is not None and (
        subject.max_grad_norm is not None or not indivisible_batch(subject, data_parallel_size)
    ):
        accumulate_as_ranks(subject, optimizer, data_parallel_size)
        first.take("accumulation")
    if optimizer is not None and short and not indivisible_batch(subject, data_parallel_size):
        give_buffers(model, AFTER, FORWARD)
        accumulate(subject, optimizer, rank.device, half_of_ranks(data_parallel_size))
        first.take("short")
    left_out = hooks_left_out(subject)
    memory = () if optimizer is None else memory_by_slice(subject, data_parallel_size)
    drop_gradients(model)
    return replace(
        facts,
        losses=tuple(run.losses),
        batches=tuple(run.batches),
        gradients=first.sizes,
        noise=first.noise,
        norm=first.norm,
        norm_before_clipping=clipping.norm_before,
        own_clipping=clipping.own,
        clip_problem=clipping.problem,
        after=after,
        hooks_left_out=left_out,
        settings=settings,
        steered_by_forward=depends_on(recipe, first.changed_by_forward, folder),
        reached_later=tuple(first.reached_later),
        idle=first.idle or (),
        used=first.used,
        rates=tuple(run.rates),
        autocast=run.autocast,
        memory=memory,
    )


def train_reference_again(recipe: Mapping[str, bytes], steps: int, folder: str) -> tuple[float, ...]:
    """Train the reference once more from the recorded values; return the losses."""
    rank = current()
    subject = declared_subject(rank.state["reference"], recipe)
    restore(subject.model, Record(record_at(folder, "values")))
    optimizer = make_optimizer(subject)
    subject.clip_grad_norm = ReferenceClipping(recipe.get("clip_grad_norm"), subject.model, optimizer).clip
    losses = train(subject, rank.device, range(steps), (0, 1), optimizer).losses
    del optimizer, subject
    return_freed_memory(rank.device)
    return tuple(losses)


def accumulate_as_ranks(subject: Subject, optimizer: Optimizer, data_parallel_size: int) -> None:
    """Accumulate the mean gradient of the first batch: over micro-batches, unless the author's step has its own."""
    if subject.max_grad_norm is not None:
        accumulate(subject, optimizer, current().device, [[(0, 1)]])
        return
    accumulate(subject, optimizer, current().device, union_of_ranks(data_parallel_size))
    finish_gradients(optimizer)  # the ranks call the same hooks, and report that they raise


def memory_by_slice(subject: Subject, size: int) -> tuple[StepMemory, ...]:
    """Observe the memory of a forward and a backward of the first micro-batch of each of ``size`` data-parallel ranks.

    The ranks observe the same rows when they accumulate gradients.
    """
    if indivisible_batch(subject, size):
        return ()  # the ranks say so
    batch, device, found = global_batch(subject, 0), current().device, []
    for index in range(size):
        drop_gradients(subject.model)
        rows = own_rows(batch, 0, micro_batches((index, size))[0], device)
        found.append(memory_of(subject, rows))
    return tuple(found)


class _DrawsInTraining(Exception):
    """Raised by the first forward of a training that draws random numbers although dropout is off."""


@dataclass
class _RecordedSteps(StepObserver):
    """Record the snapshots, with the sizes and the norm of the first gradients, which are clipped too."""

    model: Module
    steps: int
    folder: str
    clipping: ReferenceClipping
    writer: RecordWriter
    may_draw: bool
    sizes: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    norm: float | None = None
    reached_later: dict[str, None] = field(default_factory=dict)
    idle: tuple[str, ...] | None = None
    """The parameters of modules that did not run in the first step."""
    used: tuple[str, ...] = ()
    """The others, in the order of first use."""
    changed_by_forward: tuple[str, ...] = ()

    def loss_of(self, subject: Subject, rows: dict[str, Any]) -> Tensor:
        if self.idle is not None:
            return super().loss_of(subject, rows)
        used: dict[int, int] = {}
        """Identity of a parameter -> its place in the order of first use."""

        def note(module: Module, _: Any) -> None:
            if torch.compiler.is_compiling():
                return
            # What takes no hooks counts as used with the module around it.
            inside = (child.parameters() for child in module.children() if not takes_hooks(child))
            for parameter in chain(module.parameters(recurse=False), *inside):
                used.setdefault(id(parameter), len(used))

        with ExitStack() as hooks:
            for module in filter(takes_hooks, self.model.modules()):
                hooks.callback(module.register_forward_pre_hook(note).remove)
            if self.may_draw:
                loss = super().loss_of(subject, rows)
            else:
                with watching_draws(self.model, current().device) as watch:
                    loss = super().loss_of(subject, rows)
                if watch.draws or watch.hidden:
                    raise _DrawsInTraining
        untrained = ((name, t) for name, _, t in named_tensors(self.model) if not t.requires_grad)
        changed = changed_since(Record(record_at(self.folder, "values")), untrained)
        self.changed_by_forward = tuple(name for name, _ in changed)
        named = list(parameters_of(self.model))
        self.idle = tuple(name for name, tensor in named if id(tensor) not in used)
        places = {name: used[id(tensor)] for name, tensor in named if id(tensor) in used}
        self.used = tuple(sorted(places, key=places.__getitem__))
        return loss

    def record(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.writer.write(record_at(self.folder, name), tensors)

    def take(self, event: str, step: int = 0) -> None:
        for snapshot in snapshots_after(event, step, self.steps):
            tensors = snapshot.kind.of(self.model)
            if snapshot.kind is BUFFERS:
                tensors = changed_since(Record(record_at(self.folder, "values")), tensors)
            self.record(snapshot.name, tensors)

    def record_beside(self, name: str, beside: Beside) -> None:
        if beside.compared:
            self.record(name, ((entry, part.local) for entry, part in beside.tensors()))

    def after_backward(self, step: int) -> None:
        gradients = whole_gradients(self.model)
        self.take("backward", step)
        if step == 0:
            self.sizes = {name: root_mean_square(gradient) for name, gradient in gradients}
            self.noise = gradient_noise(self.model)
            self.norm, _ = gradient_norm(self.model, None)
            self.clipping.observe(self.norm, self.folder)
        else:
            unreached = [(name, gradient) for name, gradient in gradients if not self.sizes.get(name)]
            self.reached_later |= {name: None for name, gradient in unreached if gradient.any()}
