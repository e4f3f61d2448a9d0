"""Measure how far the reference's training moves if it rounds as the loader does: the noise of each comparison."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.memory.observe import return_freed_memory
from pytest_fsdp_meta.checks.training.facts import AFTER, FORWARD
from pytest_fsdp_meta.checks.training.observe.author_step import describe_cause
from pytest_fsdp_meta.checks.training.observe.first_batch_again import accumulate, half_of_ranks
from pytest_fsdp_meta.checks.training.observe.gradients import ReferenceClipping, gradient_norm
from pytest_fsdp_meta.checks.training.observe.movement import SNAPSHOTS, Snapshot, snapshots_after
from pytest_fsdp_meta.checks.training.observe.reference import declared_subject, give_buffers, restore
from pytest_fsdp_meta.checks.training.observe.reference_training import accumulate_as_ranks
from pytest_fsdp_meta.checks.training.observe.steps import StepObserver, train
from pytest_fsdp_meta.checks.values.observe import comparable, read_part
from pytest_fsdp_meta.evidence import Noise, ReferenceFacts, TensorNoise
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.bits import COMPUTED
from pytest_fsdp_meta.ranks.inventory import drop_gradients, named_tensors
from pytest_fsdp_meta.ranks.nudges import Nudges
from pytest_fsdp_meta.ranks.optimizers import make_optimizer
from pytest_fsdp_meta.ranks.reference_record import Record, noise_of, record_at, write_record
from pytest_fsdp_meta.worlds import SEED, current

NOISY = tuple(snapshot for snapshot in SNAPSHOTS if snapshot.noisy)
OTHER_SEEDS = 1000
"""The distance between the seeds of two trainings; the steps of one use consecutive seeds."""


def train_nudged(
    number: int,
    recipe: Mapping[str, bytes],
    folder: str,
    data_parallel_size: int,
    computing: Collection[str],
    reducing: Collection[str],
    facts: ReferenceFacts,
) -> Noise:
    """Train the reference once more, under the nudges that ``number`` seeds; keep how far each record moves.

    ``computing`` and ``reducing`` are the dtypes in which the loader computes and reduces gradients. Return the noise
    of the losses and of the norms, or the reason why it cannot be measured, such as a model that refuses the hooks that
    nudge it.
    """
    state, losses = current().state, facts.losses or ()
    if "noise" not in state:
        state["noise"] = _NoisySteps(state["reference"], len(losses), folder)
    noisy: _NoisySteps = state["noise"]
    try:
        subject = declared_subject(noisy.model, recipe)
        restore(noisy.model, noisy.records["values"])
        optimizer = make_optimizer(subject)
        units = coarsest_unit(computing), coarsest_unit(reducing)
        if noisy.addends is None:
            needed = optimizer if units[1] > units[0] else None
            noisy.addends = {} if needed is None else _addends(subject, needed, data_parallel_size)
            restore(noisy.model, noisy.records["values"])  # a forward may change buffers
        noisy.nudges = Nudges(noisy.model, *units, SEED + number, noisy.addends)
        clips = subject.max_grad_norm is not None and not facts.clip_problem
        own = recipe.get("clip_grad_norm") if facts.own_clipping or clips else None
        noisy.clipping = ReferenceClipping(own, noisy.model, optimizer)
        subject.clip_grad_norm = noisy.clipping.clip
        noisy.seed = SEED + OTHER_SEEDS * (1 + number)
        run = train(subject, current().device, range(len(losses)), (0, 1), optimizer, noisy)
        if optimizer is not None:
            noisy.take("end")
        if optimizer is not None and "accumulated" in noisy.records:
            with noisy.nudged():
                accumulate_as_ranks(subject, optimizer, data_parallel_size)
            noisy.take("accumulation")
        if optimizer is not None and "short" in noisy.records:
            give_buffers(noisy.model, AFTER, FORWARD)
            with noisy.nudged():
                accumulate(subject, optimizer, current().device, half_of_ranks(data_parallel_size))
            noisy.take("short")
    except Exception as error:
        state.pop("noise")
        return Noise(problem=describe_cause(error))
    apart = tuple(abs(a - b) for a, b in zip(run.losses, losses, strict=True))
    norm = abs((noisy.norm or 0.0) - (facts.norm or 0.0))
    own_norm = abs(noisy.own_norm - facts.own_clipping.norm) if facts.own_clipping and noisy.own_norm else norm
    if not all(map(math.isfinite, (*apart, norm, own_norm))):
        return Noise(problem="its training diverges if it rounds otherwise")
    return Noise(losses=apart, norm=norm, own_norm=own_norm)


def _addends(subject: Subject, optimizer: Optimizer, size: int) -> dict[Tensor, Tensor]:
    """Return the size of the gradients that ``size`` ranks average (or add up), by element, for the first batch.

    It is unknown for an author's step beside which no loss is declared: the size of the sum stands in for it.
    """
    sizes: dict[Tensor, Any] = {}
    parts = 1 if subject.loss_over_ranks == "sum" else size
    if subject.train_step is None or subject.loss is not None:
        for index in range(size):
            accumulate(subject, optimizer, current().device, [[(index, size)]])
            for parameter in (p for p in subject.model.parameters() if p.grad is not None):
                sizes[parameter] = sizes.get(parameter, 0.0) + parameter.grad.float().abs() / parts
    drop_gradients(subject.model)
    return sizes


Factors = dict[str, dict[str, float]]
"""For each record and tensor, the relative change of its length along its own direction."""


def record_noise(folder: str) -> Factors:
    """Record in ``folder`` how far each element of each record has moved in any training under nudges.

    Return the largest factor of each whole tensor.
    """
    noisy: _NoisySteps = current().state.pop("noise")
    for name, moved in noisy.moved.items():
        write_record(record_at(folder, noise_of(name)), moved.items())
    return_freed_memory(current().device)
    return noisy.factors


def read_noise(folder: str, factors: Factors) -> Noise:
    """Return the noise of gradients, updates and buffers in the slices that this rank holds."""
    model = loaded_subject(current()).model
    parts = parts_of(model)
    tensors = [(name, parts.of(name, tensor)) for name, _, tensor in named_tensors(model)]
    found: dict[str, Any] = {}
    for snapshot in NOISY:
        file = record_at(folder, noise_of(snapshot.name))
        if file.exists():
            record = Record(file)
            noises = {
                tensor: _noise_of(part, tensor, record, snapshot, folder, factors[snapshot.name][tensor])
                for tensor, part in tensors
                if tensor in record and record.shape(tensor) == part.shape
            }
            # An overflow in a nudged training says nothing about the others; the smallest tolerance then applies.
            found[snapshot.name] = {tensor: noise for tensor, noise in noises.items() if math.isfinite(noise.distance)}
    return Noise(**found)


def _noise_of(part: Part, name: str, noise: Record, snapshot: Snapshot, folder: str, whole: float) -> TensorNoise:
    """Return the noise of a slice; its factor varies as if its elements did independently, or as the ``whole``."""
    moved = read_part(part, noise, name).double()
    change = comparable(read_part(part, Record(record_at(folder, snapshot.name)), name)).double()
    if snapshot.kind.values:
        change = change - comparable(read_part(part, Record(record_at(folder, "values")), name)).double()
    length = float(change.square().sum())
    if not length or change.shape != moved.shape:
        return TensorNoise(float(moved.norm()))
    return TensorNoise(float(moved.norm()), max(whole, float((moved * change).norm()) / length))


class _NoisySteps(StepObserver):
    """Nudge each step, and keep how far each element of each record has moved in any training."""

    def __init__(self, model: Module, steps: int, folder: str) -> None:
        self.model = model
        self.steps = steps
        self.nudges: Nudges
        self.addends: Mapping[Tensor, Tensor] | None = None
        self.clipping: ReferenceClipping
        self.seed = SEED
        files = {name: record_at(folder, name) for name in ("values", *(snapshot.name for snapshot in NOISY))}
        self.records = {name: Record(file) for name, file in files.items() if file.exists()}
        self.moved: dict[str, dict[str, Tensor]] = {}
        self.factors: Factors = {}
        self.norm: float | None = None
        self.own_norm: float | None = None
        """What the author's function that clips returns, if that differs from the norm that torch computes."""
        self._weights = self._products = ExitStack()

    @contextmanager
    def nudged(self) -> Iterator[None]:
        with self.nudges.outputs(), self.nudges.weights():
            yield

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        with self.nudges.outputs(), ExitStack() as self._weights, ExitStack() as self._products:
            self._weights.enter_context(self.nudges.weights())
            yield

    def after_backward(self, step: int) -> None:
        self._weights.close()  # the optimizer steps from the weights themselves
        # The numbers that an optimizer draws, such as one that rounds stochastically, are noise: on the ranks they fall
        # on other elements than in the reference.
        torch.manual_seed(self.seed + step)
        self._products.enter_context(self.nudges.products())
        if step == 0:
            self.norm, _ = gradient_norm(self.model, None)
            self.own_norm = self.clipping.norm()
        self.take("backward", step)

    def take(self, event: str, step: int = 0) -> None:
        for snapshot in snapshots_after(event, step, self.steps):
            if snapshot.noisy:
                self._add(snapshot)

    def _add(self, snapshot: Snapshot) -> None:
        reference, moved = self.records[snapshot.name], self.moved.setdefault(snapshot.name, {})
        factors = self.factors.setdefault(snapshot.name, {})
        for name, tensor in snapshot.kind.of(self.model):
            if name in reference:
                whole = reference.read_whole(name)
                own, theirs = (comparable(one).double() for one in (local_part(tensor).cpu(), whole))
                apart = (own - theirs).abs()
                if whole.is_complex():
                    apart = apart.norm(dim=-1)
                # At least the usual distance: in another run other elements are spared.
                apart = apart.clamp_min(float(apart.norm()) / math.sqrt(max(apart.numel(), 1))).float()
                moved[name] = torch.maximum(moved[name], apart) if name in moved else apart
                before = self.records["values"].read_whole(name) if snapshot.kind.values else torch.zeros_like(whole)
                factors[name] = max(factors.get(name, 0.0), _factor(own, theirs, comparable(before).double()))


def _factor(tensor: Tensor, whole: Tensor, before: Tensor) -> float:
    """Return how much longer or shorter than ``whole`` the tensor is along its direction, both seen from ``before``."""
    ours, theirs = tensor - before, whole - before
    length = float(theirs.square().sum())
    return abs(float((ours * theirs).sum()) / length - 1) if length else math.inf


def coarsest_unit(dtypes: Collection[str]) -> float:
    """Return the relative size of one unit in the last place of the coarsest of these dtypes; 0 for none."""
    known = [dtype for dtype in COMPUTED if str(dtype).removeprefix("torch.") in dtypes]
    return max((torch.finfo(dtype).eps for dtype in known), default=0.0)
