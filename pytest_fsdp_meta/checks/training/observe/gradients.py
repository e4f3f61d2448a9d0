"""Read the gradients after a backward and their norm, and clip them with the author's function."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.training.facts import OwnClipping
from pytest_fsdp_meta.checks.values.observe import comparable, compare_gradients, measure, read_part
from pytest_fsdp_meta.evidence import Clipping, Comparison
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.batches import calling_field, scalar
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.reference_record import Record, record_at, write_record
from pytest_fsdp_meta.ranks.sending import PackedFunction, unpack_function
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import cause_of

LEFT_OVER = 0.05
"""Fraction of the first gradient: what may remain when it is taken out of a gradient that contains it."""
ADDED = 0.5
"""Fraction of the first gradient by which a gradient that contains it differs at least from what it should be."""
ClipGradNorm = Callable[[Iterable[Parameter], float], object]


def gradients_of(model: Module) -> list[tuple[str, Part]]:
    """Return this rank's part of every gradient, laid out like its parameter."""
    parts = parts_of(model)
    named = ((name, parts.gradient(name, tensor)) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    return [(name, part) for name, part in named if part is not None]


def without_gradient(model: Module, gradients: Iterable[tuple[str, Part]]) -> tuple[str, ...]:
    """Return the trainable parameters with a non-empty shard on this rank that are not among the ``gradients``."""
    parts, known = parts_of(model), {name for name, _ in gradients}
    trainable = ((name, t) for name, kind, t in named_tensors(model) if kind == "parameter" and t.requires_grad)
    return tuple(name for name, t in trainable if name not in known and parts.of(name, t).local.numel())


def contains(part: Part, name: str, first: Record, second: Record, clipped: bool = False) -> bool:
    """Return whether this gradient is the second step's plus all of the first's, as if it had not been zeroed.

    The norm of the sum is another one, so ``clipped`` gradients are multiples of both, by factors that are fitted.
    """
    if not (name in first and name in second and first.shape(name) == second.shape(name) == part.shape):
        return False
    ours = comparable(local_part(part.local).cpu()).double()
    old, new = (comparable(read_part(part, record, name)).double() for record in (first, second))
    if not ours.numel() or not ours.shape == old.shape == new.shape:
        return False
    if clipped:
        both = torch.stack([old.flatten(), new.flatten()], 1)
        of_old, of_new = torch.linalg.lstsq(both, ours.flatten()[:, None]).solution.flatten().tolist()
        if ours.numel() < 2 * both.shape[1] or not min(of_old, of_new) > LEFT_OVER:
            return False
        old, new = of_old * old, of_new * new
    return bool((ours - new - old).norm() <= LEFT_OVER * old.norm() and (ours - new).norm() > ADDED * old.norm() > 0)


def gradient_norm(model: Module, own: ClipGradNorm | None) -> tuple[float | None, str]:
    """Return (the norm of all gradients, why there is none) and leave the gradients unchanged.

    ``own`` is the author's function, which clips like ``clip_grad_norm_``; without it torch computes the norm.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if own is None and isinstance(model, FullyShardedDataParallel):
        # torch's function would take this rank's parts of flat parameters for all.
        return norm_by_clipping(model, lambda _, bound: model.clip_grad_norm_(bound)), ""
    if own is not None:
        return norm_by_clipping(model, own), ""
    by = next((part.by for _, part in gradients_of(model) if part.by and part.placements is None), "")
    if by:
        return None, f"ranks hold parts of some gradients, as {by} says"
    try:
        with torch.no_grad():
            # clip_grad_norm_ computes this norm and then scales the gradients by it.
            return scalar(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])), ""
    except Exception as error:  # torch raises many types for meshes or kinds of tensors that it cannot mix
        return None, f"{type(error).__name__}: {first_line(error)}"


def clipped_gradients(model: Module, clip: ClipGradNorm, bound: float, scale: float = 1.0) -> list[tuple[str, Part]]:
    """Return copies of what the author's function leaves when it clips to ``bound``, divided by ``scale``.

    The gradients themselves stay as they were.
    """
    with _kept_gradients(model) as parameters:
        with calling_field("clip_grad_norm"):
            clip(parameters, bound)
        return [(name, replace(part, local=local_part(part.local) / scale)) for name, part in gradients_of(model)]


def norm_by_clipping(model: Module, clip: ClipGradNorm) -> float:
    """Return the norm that the author's function returns, and leave the gradients unchanged."""
    with _kept_gradients(model) as parameters, calling_field("clip_grad_norm"):
        norm = clip(parameters, float("inf"))
    if isinstance(norm, (int, float)) or (isinstance(norm, Tensor) and norm.numel() == 1):
        return scalar(norm)
    shown = tuple(norm.shape) if isinstance(norm, Tensor) else type(norm).__name__
    raise SubjectError("clip_grad_norm", f"it returned {shown}, but should return the norm before clipping, a number")


@contextmanager
def _kept_gradients(model: Module) -> Iterator[list[Parameter]]:
    """Yield the parameters that have a gradient, and put all gradients back at the end, those of adapters as well."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    kept = [(parameter, parameter.grad) for parameter in parameters]
    memory = [local_part(gradient) for _, gradient in kept if gradient is not None]
    known = {local.data_ptr() for local in memory}
    memory += [part.local for _, part in gradients_of(model) if part.local.data_ptr() not in known]  # an adapter's
    copies = [(local, local.clone()) for local in memory]
    try:
        yield parameters
    finally:
        with torch.no_grad():
            for local, before in copies:
                local.copy_(before)
        for parameter, gradient in kept:
            parameter.grad = gradient  # the function may have replaced it


HALVINGS = 10
"""How often the bound is halved at most: a function that clips groups may return the norm of all of them."""
SMALLER = 1e-3
"""Relative: gradients whose norm becomes smaller by less were not clipped."""
ALIKE = 1e-3
"""Relative: clipped gradients that are this close to half of the gradients were scaled by their global norm."""
UNCHANGED = 1e-3
"""Relative: a gradient that a clip changes by less is only rounded."""


class ReferenceClipping:
    """Clip the reference's gradients with the author's function, and record what it leaves if torch's differs.

    The function may need meshes or groups of the ranks. It is then not called again, and ``problem`` has the reason.
    """

    def __init__(self, packed: bytes | None, model: Module, optimizer: Optimizer | None) -> None:
        self.problem = ""
        self.own: OwnClipping | None = None
        self.norm_before: float | None = None
        """What torch's function has returned first."""
        self._model = model
        self._clip: ClipGradNorm | None = None
        function: PackedFunction | None = None if packed is None else pickle.loads(packed)
        try:
            self._clip = None if function is None else unpack_function(function, model, optimizer)
        except Exception as error:  # unpickling imports and runs the author's code
            self.problem = f"cannot be sent there ({first_line(error)})"

    def observe(self, torch_norm: float | None, folder: str) -> None:
        """Clip to half of the function's own norm, with the gradients that the reference has now."""
        if self._clip is None or not torch_norm:
            return
        try:
            self.own = _clip_reference(self._model, self._clip, torch_norm, record_at(folder, "clipped"))
        except Exception as error:
            self._give_up(error)

    def clip(self, parameters: Iterable[Parameter], bound: float) -> object:
        """Clip as the author does, or with torch's function where the author's cannot run."""
        parameters = list(parameters)
        if self._clip is not None:
            try:
                return self._clip(parameters, bound)
            except Exception as error:
                self._give_up(error)
        norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
        if self._clip is None and not self.problem and self.norm_before is None:
            self.norm_before = float(norm)
        return norm

    def norm(self) -> float | None:
        """Return the function's norm of the gradients that the reference has now; None if torch's is used."""
        if self._clip is None:
            return None
        try:
            return norm_by_clipping(self._model, self._clip)
        except Exception as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        cause = cause_of(error)
        self._clip, self.problem = None, f"raised {type(cause).__name__} there: {first_line(cause)}"


def _clip_reference(model: Module, clip: ClipGradNorm, torch_norm: float, record: Path) -> OwnClipping | None:
    """Return what the author's function does differently from torch's, with the clipped gradients in ``record``."""
    norm = norm_by_clipping(model, clip)
    if not (math.isfinite(norm) and norm > 0):
        return None
    whole = [(name, part.local) for name, part in gradients_of(model)]
    for halving in range(1, HALVINGS + 1):
        bound = norm / 2**halving
        clipped = [(name, part.local) for name, part in clipped_gradients(model, clip, bound)]
        if _length(clipped) < (1 - SMALLER) * _length(whole):
            break
    else:
        return OwnClipping(norm)
    if halving == 1 and abs(norm - torch_norm) <= ALIKE * torch_norm:
        before = dict(whole)
        halves = [measure(comparable(gradient), comparable(before[name]) / 2) for name, gradient in clipped]
        if all(half.apart <= ALIKE * half.truth for half in halves):
            return None
    write_record(record, clipped)
    return OwnClipping(norm, bound)


def _length(gradients: Iterable[tuple[str, Tensor]]) -> float:
    return math.hypot(*(float(gradient.double().norm()) for _, gradient in gradients))


def clip_on_rank(
    model: Module,
    clip: ClipGradNorm,
    norms: tuple[float, float | None],
    own: OwnClipping | None,
    records: Mapping[str, Record],
) -> Clipping:
    """Clip this rank's gradients, and compare them with half of the reference's, its clipped ones, and themselves.

    ``norms`` are that of the reference, which torch computes, and the one that the author's function returns here.
    """
    halves = compare_gradients(clipped_gradients(model, clip, norms[0] / 2, scale=0.5), records["gradients"])
    found: tuple[Comparison, ...] = ()
    if own is not None and own.bound is not None:
        found = compare_gradients(clipped_gradients(model, clip, own.bound), records["clipped"])
    known = (*norms, None if own is None else own.norm)
    largest = max((norm for norm in known if norm is not None and math.isfinite(norm)), default=math.inf)
    return Clipping(halves, found, _changed(model, clip, 2 * largest))


def _changed(model: Module, clip: ClipGradNorm, bound: float) -> tuple[Comparison, ...]:
    """Return the gradients that clipping to this bound changes, each compared with itself."""
    clipped: Mapping[str, Part] = dict(clipped_gradients(model, clip, bound))
    comparisons = []
    for name, part in gradients_of(model):
        if name in clipped and part.local.numel():
            before, after = (comparable(local_part(own.local).cpu()) for own in (part, clipped[name]))
            found = measure(after, before, elements=part.local.numel())
            if math.isfinite(found.truth) and not found.apart <= UNCHANGED * found.truth:
                comparisons.append(Comparison(name, False, elements=found.elements, measure=found))
    return tuple(comparisons)
