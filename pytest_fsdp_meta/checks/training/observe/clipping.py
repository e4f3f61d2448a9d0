"""Clip the gradients of the first step with the author's function: on the reference, and on each rank."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.training.observe.gradients import (
    ClipGradNorm,
    clipped_gradients,
    gradients_of,
    norm_by_clipping,
)
from pytest_fsdp_meta.checks.values.observe import comparable, compare_gradients, measure
from pytest_fsdp_meta.evidence import Clipping, Comparison, OwnClipping
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.reference_record import Record, record_at, write_record
from pytest_fsdp_meta.ranks.sending import PackedFunction, unpack_function
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import cause_of

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
    if halving == 1 and abs(norm - torch_norm) <= ALIKE * torch_norm and _are_halves(clipped, dict(whole)):
        return None
    write_record(record, clipped)
    return OwnClipping(norm, bound)


def _length(gradients: Iterable[tuple[str, Tensor]]) -> float:
    return math.hypot(*(float(gradient.double().norm()) for _, gradient in gradients))


def _are_halves(clipped: Iterable[tuple[str, Tensor]], whole: Mapping[str, Tensor]) -> bool:
    measures = (measure(comparable(gradient), comparable(whole[name]) / 2) for name, gradient in clipped)
    return all(found.apart <= ALIKE * found.truth for found in measures)


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
    bound = norms[0] / 2
    halves = compare_gradients(clipped_gradients(model, clip, bound, scale=0.5), records["gradients"])
    found: tuple[Comparison, ...] = ()
    if own is not None and own.bound is not None:
        found = compare_gradients(clipped_gradients(model, clip, own.bound), records["clipped"])
    known = (*norms, None if own is None else own.norm)
    largest = max((norm for norm in known if norm is not None and math.isfinite(norm)), default=math.inf)
    return Clipping(bound, halves, found, _changed(model, clip, 2 * largest))


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
