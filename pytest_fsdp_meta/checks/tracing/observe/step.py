"""Trace one more step: what every module gets and returns on a rank, beside the same of the reference.

The reference spills what it sees to disk, and each rank compares its own part with it as the step runs, so that nothing
is gathered and no copy of an activation is kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.memory.observe import return_freed_memory
from pytest_fsdp_meta.checks.tracing.facts import DEPARTS, ModuleFacts, OtherSetting, RankTrace
from pytest_fsdp_meta.checks.tracing.observe.comparison import Spill, TraceComparison, TracedReference
from pytest_fsdp_meta.checks.tracing.observe.matching import Layout
from pytest_fsdp_meta.checks.training.facts import FIRST_BACKWARD, Objective
from pytest_fsdp_meta.checks.training.observe.author_step import describe_cause
from pytest_fsdp_meta.checks.training.observe.noise import coarsest_unit
from pytest_fsdp_meta.checks.training.observe.reference import declared_subject, restore
from pytest_fsdp_meta.checks.training.observe.step_watches import BackwardWatch
from pytest_fsdp_meta.checks.values.observe import read_part
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.batches import batch_slice, has_rows, loss_of, model_splits, rows_of_step, scalar
from pytest_fsdp_meta.ranks.generators import seed_all
from pytest_fsdp_meta.ranks.inventory import drop_gradients, named_tensors, reshard
from pytest_fsdp_meta.ranks.modes import comparable_modes, train_model
from pytest_fsdp_meta.ranks.module_watch import ModuleWatch, Watcher, describe_modules
from pytest_fsdp_meta.ranks.nudges import Nudges
from pytest_fsdp_meta.ranks.reference_record import Record, record_at
from pytest_fsdp_meta.ranks.watching import takes_hooks
from pytest_fsdp_meta.worlds import SEED, CallFailed, current, doing


class NotTraceable(Exception):
    """The step of a rank fails where it is watched."""


def trace_reference(
    recipe: Mapping[str, bytes],
    folder: str,
    data_parallel_size: int,
    computing: Collection[str],
    step: int,
    backward: bool,
) -> TracedReference:
    """Record what every module of the reference gets and returns in a step, and how much noise that has.

    ``computing`` are the dtypes in which the loader computes. The author's code may refuse hooks: then ``problem`` says
    why nothing is recorded.
    """
    rank = current()
    model, unit = rank.state["reference"], max(coarsest_unit(computing), torch.finfo(torch.float64).eps)
    empty = TracedReference(str(Path(folder, "trace")), unit, step, backward)
    try:
        restore(model, Record(record_at(folder, "values")))
        subject = declared_subject(model, recipe)
        doing("tracing the reference")
        spill = Spill(Path(empty.folder))
        draws = _run_watched(subject, empty, (0, 1), spill)
        spill.flush()
        traced = replace(
            empty,
            norms=spill.norms,
            sources=spill.sources,
            arguments=spill.arguments,
            draws=draws,
            first_gradient=spill.first_gradient,
        )
        slices = dict.fromkeys([(0, data_parallel_size), (data_parallel_size - 1, data_parallel_size)])
        noise: dict[str, float] = {}
        for number, rows in enumerate([(0, 1), *slices]):
            nudges = Nudges(model, unit, 0.0, SEED + number)
            moved = _distances(subject, replace(traced, noise=noise), rows, nudges)
            noise = _with_distances(noise, moved, unit) if number else _known(moved)
        return replace(traced, noise=noise, modules=describe_modules(model))
    except Exception as error:
        return replace(empty, problem=describe_cause(error))
    finally:
        drop_gradients(model)
        return_freed_memory(rank.device)


def trace_rank(traced: TracedReference, trained: Collection[str], folder: str) -> RankTrace:
    """Run the step once more on this rank, and compare every module with the reference's.

    The tensors that were ``trained`` since loading have their loaded values during the step. Afterwards the model is
    as it was before. Raises NotTraceable if the step fails: ranks that do not fail wait for this one in vain.
    """
    rank = current()
    subject = loaded_subject(rank)
    rows = batch_slice(subject, rank)
    layout = Layout(rows, model_splits(subject.model, rank))
    doing("tracing the modules")
    try:
        compared = TraceComparison(traced, layout)
        with _loaded_values(subject.model, trained, Record(record_at(folder, "values"))):
            drawing = _run_watched(subject, traced, rows, compared)
    except Exception as error:
        raise NotTraceable(describe_cause(error)) from error
    finally:
        drop_gradients(subject.model)
        reshard(subject.model)
    ours, theirs = compared.entered, traced.arguments
    if [call for call in theirs if call in ours] != [call for call in ours if call in theirs]:
        return RankTrace(rows, step=traced.step, problem="modules run in another order than in the reference")
    described = describe_modules(subject.model)
    modules = {name: _compare_with(traced.modules.get(name), own) for name, own in described.items()}
    forward, backward = compared.calls()
    draws = tuple(name for name in drawing if name not in traced.draws)
    return RankTrace(rows, forward, backward, modules, draws=draws, handed=traced.hands_over, step=traced.step)


def observe_objective(trained: Collection[str], folder: str) -> Objective:
    """Run ``Subject(loss=...)`` on the first micro-batch of the author's first step and on all rows, as loaded."""
    rank = current()
    subject, (author, samples, modes) = loaded_subject(rank), rank.state[FIRST_BACKWARD]
    rows = rows_of_step(subject, 0, batch_slice(subject, rank), rank.device)
    piece = {key: value[slice(*author.pieces[0])] if has_rows(value) else value for key, value in rows.items()}
    watches = [BackwardWatch(subject.model, part) for part in (piece, rows)]
    losses: list[float] = []
    doing("running Subject(loss=...) on rows of the first step")
    now = [(module, module.training) for module, _ in modes]
    try:
        for module, training in modes:  # the step may leave others behind
            module.training = training
        loaded = _loaded_values(subject.model, trained, Record(record_at(folder, "values")))
        with loaded, comparable_modes(subject.model):
            for part, watch in zip((piece, rows), watches, strict=True):
                drop_gradients(subject.model)
                seed_all(SEED)
                with watch.watching():
                    loss = loss_of(subject, part)
                    loss.backward()
                watch.note_gradients()
                losses.append(scalar(loss))
    except Exception as error:
        raise NotTraceable(describe_cause(error)) from error
    finally:
        drop_gradients(subject.model)
        reshard(subject.model)
        for module, training in now:
            module.training = training
    norm, _ = watches[1].observed().norms[0]
    return Objective(losses[0], *_multiple(samples, watches[0].samples), (losses[1], norm))


def _multiple(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the factor between vectors of the same names, and how far ours are from that multiple."""
    common = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    if not common:
        return math.nan, math.nan
    own, whole = (torch.cat([vectors[name] for name in common]) for vectors in (ours, theirs))
    factor = float(own @ whole / whole.square().sum())
    return factor, float((own - factor * whole).norm() / own.norm())


def _compare_with(reference: ModuleFacts | None, own: ModuleFacts) -> ModuleFacts:
    """Return the facts, with the reference's class or settings where they differ."""
    bare = replace(own, settings={})
    if reference is None:
        return bare
    if reference.kind != own.kind:
        return replace(bare, reference=reference.kind)
    differing = [
        OtherSetting(name, value, theirs, _is_number(value) and _is_number(theirs))
        for name, value in own.settings.items()
        if (theirs := reference.settings.get(name, value)) != value and not (_by_rank(value) and _by_rank(theirs))
    ]
    # A flag or a name is more often without effect.
    return replace(bare, otherwise=tuple(sorted(differing, key=lambda setting: not setting.number)))


def _is_number(value: str) -> bool:
    return value.lstrip("-")[:1].isdigit()


def _by_rank(value: str) -> bool:
    """Return whether each rank may have its own value: an integer (an index, a size of its part) or a device."""
    return value.lstrip("-").isdigit() or value.startswith(("'cuda", "'cpu"))


def _run_watched(subject: Subject, traced: TracedReference, rows: tuple[int, int], watcher: Watcher) -> tuple[str, ...]:
    """Run forward and backward of the step as the training does; return the modules that draw random numbers.

    Raises what the watching raised. The loss of an author's own step may need what only that step puts together, such
    as the parts of a vocabulary: if only the forward is looked at, the loss may raise after it.
    """
    model, device = subject.model, current().device
    watch, returned = ModuleWatch(model, watcher, device), list[None]()
    drop_gradients(model)
    if subject.train_step is None:
        train_model(model)
    with comparable_modes(model), watch.watching():
        batch = rows_of_step(subject, traced.step, rows, device)
        seed_all(SEED + traced.step)
        backward = traced.backward and any(parameter.requires_grad for parameter in model.parameters())
        hook = model.register_forward_hook(lambda *_: returned.append(None)) if takes_hooks(model) else nullcontext()
        with torch.set_grad_enabled(backward), hook:
            try:
                loss = loss_of(subject, batch)
            except CallFailed:
                if traced.backward or not returned:
                    raise
        if backward:
            loss.backward()
    if watch.problem:
        raise RuntimeError(watch.problem)
    return tuple(watch.draws)


@contextmanager
def _loaded_values(model: Module, trained: Collection[str], values: Record) -> Iterator[None]:
    """Give the tensors the reference's values in the block, which those of the loader equal, and then their own.

    A parameter may hold its whole beside this rank's part, as small ones of ZeRO-3 do between steps.
    """
    parts = parts_of(model)
    changed = []
    for name, _, tensor in named_tensors(model):
        part = parts.of(name, tensor)
        if name in trained and name in values and values.shape(name) == part.shape:
            local = local_part(part.local)
            changed.append((name, part, local))
            if part.by and tensor.shape == part.shape and tensor.data_ptr() != local.data_ptr():
                whole = tensor.detach()
                changed.append((name, Part.block(whole, part.shape, (0,) * whole.ndim, by=part.by), whole))
    before = [(local, local.to("cpu", copy=True)) for _, _, local in changed]
    try:
        with torch.no_grad():
            for name, part, local in changed:
                local.copy_(read_part(part, values, name).reshape(local.shape))
        yield
    finally:
        with torch.no_grad():
            for local, own in before:
                local.copy_(own)


def _distances(
    subject: Subject, traced: TracedReference, rows: tuple[int, int], nudges: Nudges
) -> dict[str, float | None]:
    """Return how far each tensor of these rows moves under nudges; None where its part is not known."""
    compared = TraceComparison(traced, Layout(rows))
    with nudges.outputs(), nudges.weights():
        _run_watched(subject, traced, rows, compared)
    return {key: result.distance for key, result in compared.results.items()}


def _known(distances: Mapping[str, float | None]) -> dict[str, float]:
    return {key: distance for key, distance in distances.items() if distance is not None and math.isfinite(distance)}


def _with_distances(noise: Mapping[str, float], distances: Mapping[str, float | None], unit: float) -> dict[str, float]:
    """Return the noise of what can be compared, by what the rows of one rank alone move under other nudges.

    A single run under nudges may by chance keep a tensor as it was. The rows of the first and of the last rank show
    which tensors have their rows in order: the rows of a batch normalisation depend on all others, packed tokens and
    those of an expert need not lie in the order of the rows, and a module that gets them piece by piece gets other
    pieces.
    """
    moved = _known(distances)
    alike = {key: known for key, known in noise.items() if key in moved and moved[key] <= DEPARTS * max(known, unit)}
    return {key: max(known, moved[key]) for key, known in alike.items()}
