"""Run the author's own training step: look at the gradients when it steps the optimizer, and make some outputs NaN."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint
from pytest_fsdp_meta.checks.checkpoint.observe.fingerprints import fingerprint
from pytest_fsdp_meta.checks.materialisation.observe import resharded_subject
from pytest_fsdp_meta.checks.training.facts import BETWEEN, UPDATE, StepNotFinite
from pytest_fsdp_meta.checks.training.observe.beside import SCHEDULER, Beside, last_beside, last_optimizer, rates_of
from pytest_fsdp_meta.checks.training.observe.step_watches import BackwardWatch
from pytest_fsdp_meta.checks.training.observe.trained_buffers import BufferWatch
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.loader.validation import shorten
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import batch_slice, call_field, rows_of_step
from pytest_fsdp_meta.ranks.bits import COMPUTED
from pytest_fsdp_meta.ranks.inventory import reshard, take_inventory
from pytest_fsdp_meta.ranks.joined_optimizer import (
    before_steps,
    computing_optimizer,
    parts_of_optimizer,
    stepped_tensors,
    steps_after,
)
from pytest_fsdp_meta.ranks.modes import with_dropout
from pytest_fsdp_meta.ranks.module_watch import tensors_in
from pytest_fsdp_meta.ranks.optimizers import handed_over
from pytest_fsdp_meta.text import counted, first_line
from pytest_fsdp_meta.worlds import Rank, cause_of, current, doing


class AuthorStep(NamedTuple):
    """A step's loss, how many backwards it ran, and the learning rates that the optimizer stepped with."""

    loss: Tensor | float
    backwards: int
    rates: tuple[float, ...] = ()
    """Empty if they were those from before the step."""


def run_author_step(
    subject: Subject,
    optimizer: Optimizer,
    rows: dict[str, Any],
    number: int,
    observe: Callable[[], None],
    beside: Beside,
    gradient_scale: float = 1.0,
    buffers: BufferWatch | None = None,
    watch: BackwardWatch | None = None,
) -> AuthorStep:
    """Call ``Subject(train_step=...)`` for step ``number``.

    It has to step the optimizer once. ``observe`` is called when it does, before the optimizer's own hooks. All
    gradients are multiplied by ``gradient_scale``. ``buffers`` hears of backwards and of the optimizer's steps, and
    ``watch`` of backwards.
    """
    parts = parts_of_optimizer(optimizer)
    buffers = buffers or BufferWatch(nn.Module())
    steps: list[Optimizer] = []
    errors: list[Exception | None] = []
    """What ``observe`` raised, once it was called."""
    rates: list[tuple[float, ...]] = []
    every: dict[Optimizer, None] = {}
    """All optimizers that stepped."""

    def before_step(part: Optimizer) -> None:
        steps.append(part)
        if not errors:
            rates.append(rates_of(optimizer))
            errors.append(_error_of(observe))
        buffers.begin(UPDATE)

    with ExitStack() as hooked, _backwards(optimizer, gradient_scale, buffers, watch) as backwards:
        hooked.callback(register_optimizer_step_pre_hook(lambda own, *_: every.setdefault(own)).remove)
        for part in parts:
            hooked.enter_context(before_steps(part, before_step))
            after = computing_optimizer(part).register_step_post_hook(lambda *_: buffers.end())
            hooked.callback(after.remove)
        loss = call_author_step(subject, optimizer, rows, beside)
    if inspect.isawaitable(loss) or inspect.isgenerator(loss) or inspect.isasyncgen(loss):
        what = f"it returned a {type(loss).__name__} and has not run"
        raise SubjectError("train_step", f"{what}; make it a plain function, without async or yield")
    if errors and errors[0] is not None:
        raise errors[0]
    for part in parts:
        if (times := sum(part is stepped for stepped in steps)) != 1:
            which = "the optimizer" if len(parts) == 1 else f"its {type(computing_optimizer(part)).__name__}"
            done = f"stepped {which} {counted(times, 'time')}" if times else f"never stepped {which}"
            hint = _TOO_OFTEN if times else _NEVER
            held = {id(tensor) for tensor in stepped_tensors(optimizer)}
            others = [type(own).__name__ for own in every if held & set(map(id, stepped_tensors(own)))]
            if others and not steps:
                hint = f"declare the {others[0]} that it stepped as Subject(optimizer=...)"
            raise SubjectError("train_step", f"it {done} in step {number}, but should step it once; {hint}")
    if problem := _describe_no_loss(loss):
        hint = "; reduce it with .mean() or .sum()" if isinstance(loss, Tensor) and loss.numel() > 1 else ""
        raise SubjectError("train_step", f"it returned {problem}, but should return the loss, a number{hint}")
    return AuthorStep(loss if isinstance(loss, Tensor) else float(loss), len(backwards), rates[0])


def call_author_step(subject: Subject, optimizer: Optimizer, rows: dict[str, Any], beside: Beside) -> Any:
    """Call ``Subject(train_step=...)`` with what its parameters ask for; return what it returns."""
    assert subject.train_step is not None
    by_name = beside.arguments(subject, subject.train_step)
    handed = handed_over(subject, optimizer)
    return call_field("train_step", subject.train_step, subject.model, handed, rows, **by_name)


def describe_cause(error: Exception) -> str:
    """Return the type and the first line of what the author's code raised."""
    cause = cause_of(error)
    return f"{type(cause).__name__}: {first_line(cause)}"


def on_any_rank(flag: bool) -> bool:
    """Return whether it is true on any rank: all have to agree whether a further step follows."""
    flags = torch.tensor(float(flag), device=current().device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


_NEVER = "call step() of the optimizer that it gets; a GradScaler skips it after an overflow (lower its init_scale)"
_TOO_OFTEN = "declare one update: a train_step that makes one optimizer step of its rows, with all its micro-batches"


def _describe_no_loss(loss: object) -> str:
    """Return what ``train_step`` has returned, unless that can be the loss; then return ""."""
    if isinstance(loss, Tensor):
        if loss.is_meta or loss.is_complex():
            return f"a tensor {'on meta' if loss.is_meta else 'of complex numbers'}"
        return "" if loss.numel() == 1 else shorten(loss)
    if not isinstance(loss, Real):
        return type(loss).__name__
    try:
        float(loss)
    except OverflowError:
        return "a number that no float holds"
    return ""


def _error_of(observe: Callable[[], None]) -> Exception | None:
    """Return what an observer raises. It is raised after the step, which other ranks finish together with this one."""
    try:
        observe()
    except Exception as error:
        return error
    return None


@contextmanager
def _backwards(
    optimizer: Optimizer, scale: float, buffers: BufferWatch, watch: BackwardWatch | None
) -> Iterator[list[None]]:
    """Yield a list with one entry for each backward so far, and multiply the gradients of each by ``scale``.

    A backward inside of another one, as reentrant activation checkpointing runs it, continues that one.
    """
    original, found, running = torch.autograd.backward, list[None](), list[None]()

    @wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        outermost = not running
        if outermost:
            found.append(None)
            running.append(None)
            buffers.begin(BETWEEN)
            if watch is not None:
                watch.begin(tensors)
            if scale != 1.0:
                tensors, grad_tensors = _scaled(tensors, grad_tensors, scale, after_another=len(found) > 1)
        with steps_after(optimizer) if outermost else nullcontext():
            try:
                original(tensors, grad_tensors, *args, **kwargs)
            finally:
                if outermost:
                    running.clear()
                    buffers.end()
            if outermost and watch is not None:
                watch.note_gradients()

    torch.autograd.backward = backward  # Tensor.backward() looks it up here as well
    try:
        yield found
    finally:
        torch.autograd.backward = original


def _scaled(tensors: Any, grad_tensors: Any, scale: float, after_another: bool) -> tuple[list[Any], list[Any]]:
    """Return the arguments of a backward whose gradients are ``scale`` times those of the given arguments.

    A given gradient that varies is taken for the result of an earlier backward, which was scaled: a loss in chunks
    goes back to the model's output first, and from there to the parameters.
    """
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(roots))
    scaled = []
    for root, own in zip(roots, given, strict=True):
        if own is None:
            scaled.append(torch.full_like(root, scale))
        else:
            continues = after_another and own.numel() > 1 and bool((own != own.flatten()[0]).any())
            scaled.append(own if continues else own * scale)
    return roots, scaled


class _NotFinite(NamedTuple):
    """What one step, with or without NaN, has done on this rank."""

    moved: bool
    """Whether it has changed trainable parameters, or made the state of the optimizer NaN: a sign of NaN moves none."""
    nan: bool
    """Whether anything of both is NaN now."""
    changed: tuple[str, ...]
    """What else of a step it has changed: the state of the optimizer, the schedule, averages."""


def observe_not_finite() -> StepNotFinite:
    """Run the author's step with NaN in what the model returns on the ranks of the first slice of the batch.

    If that leaves all ranks as they were, run it again, with NaN on those of the last slice; and, if that does as well,
    once as it is. If the weights have moved and are numbers still, run it with NaN on all ranks. The model may be of no
    use afterwards.
    """
    rank, subject = current(), resharded_subject()
    data_parallel = batch_slice(subject, rank)
    rows = rows_of_step(subject, 0, data_parallel, rank.device)
    steps: list[_NotFinite | None] = []
    for bad in dict.fromkeys((0, data_parallel[1] - 1)):
        # Where one rank does not call the model, none may wait for another step of it.
        if steps and on_any_rank(steps[0] is None or steps[0].moved):
            break
        steps.append(_step_not_finite(subject, rank, rows, data_parallel[0] == bad))
    made = tuple(step for step in steps if step is not None)
    found = StepNotFinite(data_parallel, tuple(step.moved for step in made))
    if on_any_rank(len(made) < len(steps)):
        return found if len(made) == len(steps) else replace(found, moved=())
    if not on_any_rank(any(step.moved for step in made)):
        changed = tuple(dict.fromkeys(name for step in made for name in step.changed))
        _step_not_finite(subject, rank, rows, spoiling=False)
        return replace(found, changed=changed, kept=tuple(t.name for t in _trainable(subject, rank) if t.nan))
    if not on_any_rank(any(step.nan for step in made)):
        every = _step_not_finite(subject, rank, rows, spoiling=True)
        return replace(found, replaced=every is not None and every.moved and not every.nan)
    return found


def _step_not_finite(subject: Subject, rank: Rank, rows: dict[str, Any], spoiling: bool) -> _NotFinite | None:
    """Run a step, ``spoiling`` what the model returns; return None if it calls no model, or that returns no numbers."""
    doing("a step that is not finite")
    before, called, running = {t.name: t.digest for t in _trainable(subject, rank)}, False, 0
    optimizer = last_optimizer(subject, rank)
    assert optimizer is not None, "something is trainable"

    def enter(*_: Any) -> None:
        nonlocal running
        running += 1

    def spoil(module: Module, args: Any, output: Any) -> Any:
        nonlocal called, running
        running -= 1
        if running:
            return None
        called |= any(tensor.is_floating_point() for _, tensor in tensors_in(output))
        return _with_nan(output) if spoiling else None

    with ExitStack() as hooks:
        # A step may call the parts of the model, such as a student and its teacher, and not the model itself.
        for part in (subject.model, *subject.model.children()):
            if any(parameter.requires_grad for parameter in part.parameters()):
                hooks.callback(part.register_forward_pre_hook(enter).remove)
                hooks.callback(part.register_forward_hook(spoil).remove)
        # Not run_author_step(): here a step may well leave the optimizer alone.
        beside = last_beside(subject, rank, optimizer)
        with beside.kept_schedule(optimizer), with_dropout(subject.model, rank.device):
            held = _of_a_step(optimizer, beside)
            call_author_step(subject, optimizer, rows, beside)
            after = _of_a_step(optimizer, beside)
    reshard(subject.model)
    if not called:
        return None
    tensors = _trainable(subject, rank)
    plain = [local_part(v) for v in _states(optimizer) if isinstance(v, Tensor) and v.dtype in COMPUTED]
    spoiled = any(type(own) is Tensor and bool(own.isnan().any()) for own in plain)  # subclasses may lack operators
    changed = tuple(name for name, own in after.items() if own != held.get(name))
    moved = {tensor.name: tensor.digest for tensor in tensors} != before
    return _NotFinite(moved or spoiled, spoiled or any(tensor.nan for tensor in tensors), changed)


def _of_a_step(optimizer: Optimizer, beside: Beside) -> dict[str, list[Fingerprint]]:
    """Return what a step that is skipped leaves alone as well, by what it belongs to."""
    schedule = [value for name, value in beside.entries() if name.startswith(f"{SCHEDULER}.")]
    found = {"the state of the optimizer": _states(optimizer), "the schedule": schedule, **beside.averages()}
    return {what: [fingerprint(value) for value in values] for what, values in found.items()}


def _states(optimizer: Optimizer) -> list[Any]:
    return [value for part in parts_of_optimizer(optimizer) for own in part.state.values() for value in own.values()]


def _trainable(subject: Subject, rank: Rank) -> list[TensorFacts]:
    return [t for t in take_inventory(subject.model, rank.rank, str(rank.device)).tensors if t.requires_grad]


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
