"""Spill the reference's activations to disk, and compare a rank's with them as a step runs.

Nothing is gathered, and no copy of an activation is kept.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.checks.tracing.facts import (
    AGAIN_INPUT,
    AGREES,
    DEPARTS,
    GRADIENT,
    INPUT,
    OUTPUT,
    RECOMPUTED,
    Departure,
    ModuleFacts,
    TracedCall,
)
from pytest_fsdp_meta.checks.tracing.observe.matching import (
    Layout,
    Match,
    describe_departure,
    is_in_another_order,
    match,
    sketch,
)
from pytest_fsdp_meta.checks.values.observe import comparable, measure
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.module_watch import Entered, Seen
from pytest_fsdp_meta.ranks.reference_record import Record, is_array, write_record

SPILL = 2**26
"""Bytes of activations that the reference holds on the CPU before it writes them."""
FAR = 1e-5
"""Relative: a tensor that is farther off is sketched, in case it is a part of a sum."""
LOW = 1e-5
"""One unit in the last place of a dtype coarser than float32 is more than this."""
HANDED = (INPUT, AGAIN_INPUT, GRADIENT)
"""The stages at which a module can get the reference's values."""
DESCRIBED = 8
"""Departing tensors of the forward, and of the backward, that are looked at more closely: nearly all that come later
depart as well, because these do."""
HUGE = 1e4
"""Larger elements are compared as this. Masks add -1e4, the least number or -inf to scores, and mean the same."""
ROUNDED = 1e-5
"""Relative: how much numbers that are computed before a call may differ."""
MISSING, LONGEST = "nothing", 60
PERMUTED = 20.0
"""How many times the noise of the whole tensor a single slice of it may be off, and still be recognised."""


@dataclass(frozen=True)
class TracedReference:
    """What the reference's trace left beside its records: by key, how far a tensor moves if it rounds otherwise.

    A tensor without noise is not compared, because its rows are not those of the batch in order.
    """

    folder: str
    unit: float
    step: int
    backward: bool
    noise: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Key -> the key under which its tensor is recorded: what one module returns, others get."""
    arguments: Mapping[tuple[str, int], Mapping[str, object]] = field(default_factory=dict)
    """(module, turn) of each call of the forward, in order -> what it gets, as ``Entered`` has it."""
    first_gradient: str = ""
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    draws: tuple[str, ...] = ()
    problem: str = ""

    @property
    def hands_over(self) -> bool:
        """Whether modules get the reference's inputs and gradients in place of own ones that agree.

        Below float32, differences add up from module to module, and would hide what one module does. TTrace
        (arXiv 2506.09280) judges modules so.
        """
        return self.unit > LOW


def _key(seen: Seen) -> str:
    return f"{RECOMPUTED.get(seen.stage, seen.stage)} {seen.module}#{seen.turn}{seen.path}"


class _Known:
    """Remembers what was found out about a tensor while it keeps its values: what one module returns, others get."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], tuple[float, ...], str]] = {}

    def get(self, tensor: Tensor) -> str:
        found = self._found.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != _fingerprint(tensor):
            return ""
        return found[2]

    def add(self, tensor: Tensor, key: str) -> None:
        self._found[id(tensor)] = (weakref.ref(tensor), _fingerprint(tensor), key)


def _fingerprint(tensor: Tensor) -> tuple[float, ...]:
    """Return numbers that a write to the tensor changes; torch does not count a write through ``.data``."""
    values = comparable(local_part(tensor))
    values = values if values.is_floating_point() else values.double()
    return float(values.sum()), float(torch.linalg.vector_norm(values))


def _bounded(values: Tensor) -> Tensor:
    """Return the values within bounds: the elements of a mask that mean "not here" differ by dtype and would outweigh
    all others. NaN stays."""
    return values.clamp(-HUGE, HUGE)


class Spill:
    """Writes every tensor that it sees to files in a folder; one that was seen before is not written again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._files = 0
        self._known = _Known()
        self.sources: dict[str, str] = {}
        """Key -> the key of the same tensor, under which it is on disk."""
        self.norms: dict[str, float] = {}
        self.first_gradient = ""
        self.arguments: dict[tuple[str, int], Mapping[str, object]] = {}

    def enter(self, entered: Entered) -> None:
        self.arguments[entered.module, entered.turn] = entered.arguments

    def see(self, seen: Seen, tensor: Tensor) -> None:
        if not tensor.ndim or not is_array(tensor):
            return
        key = _key(seen)
        if key in self.norms:
            if seen.stage in RECOMPUTED:
                return
            raise RuntimeError("the module calls itself")
        if seen.stage == GRADIENT and not self.first_gradient:
            self.first_gradient = key
        if source := self._known.get(tensor):
            self.sources[key], self.norms[key] = source, self.norms[source]
            return
        self._known.add(tensor, key)
        local = local_part(tensor)
        self.sources[key], self.norms[key] = key, float(_bounded(comparable(local).double()).norm())
        self._waiting[key] = local.to("cpu", copy=True)
        if sum(waiting.nbytes for waiting in self._waiting.values()) > SPILL:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            write_record(self._folder / f"{self._files:05}.safetensors", self._waiting.items())
            self._files += 1
            self._waiting.clear()


@dataclass(frozen=True)
class Result:
    """A tensor beside its part of the reference's: None as ``distance`` if the part is not known."""

    distance: float | None
    split: bool = False
    sketch: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()
    departure: Departure | None = None


class TraceComparison:
    """Compares every tensor that it sees with its part of the reference's, in the order in which they come.

    The loss of a rank is a mean over its own rows, or a share of the whole, so its gradients are a multiple of the
    reference's. That multiple is taken from the first gradient of the backward.
    """

    def __init__(self, traced: TracedReference, layout: Layout) -> None:
        self.results: dict[str, Result] = {}
        self._calls: dict[tuple[str, str, int], list[tuple[str, Result]]] = {}
        self.entered: dict[tuple[str, int], Entered] = {}
        self._traced = traced
        self._layout = layout
        self._record = Record(traced.folder)
        self._known = _Known()
        self._factor: float | None = None
        self._described = {False: 0, True: 0}
        """How many departing tensors were described, by whether the backward ran."""

    def enter(self, entered: Entered) -> None:
        """Begin a call, which may get no tensor."""
        self.entered[entered.module, entered.turn] = entered
        self._calls[INPUT, entered.module, entered.turn] = []

    def see(self, seen: Seen, tensor: Tensor) -> Tensor | None:
        """Compare; return the reference's values where they take the place of agreeing ones."""
        if not tensor.ndim:
            return None  # a mean over own rows is rightly another
        key, sources = _key(seen), self._traced.sources
        again = self._known.get(tensor) if is_array(tensor) else ""
        if again and sources.get(again) == sources.get(key) and again in self.results:
            result = self.results[again]
        elif is_array(tensor):
            result = self._compare(key, tensor, seen.stage)
            self._known.add(tensor, key)
        else:
            result = Result(None)
        if seen.stage not in RECOMPUTED:
            self.results[key] = result
        self._calls.setdefault((seen.stage, seen.module, seen.turn), []).append((key, result))
        if seen.stage not in HANDED or not self._traced.hands_over or not self._agrees(key, result):
            return None
        return self._reference_values(key, tensor, seen.stage == GRADIENT)

    def _agrees(self, key: str, result: Result) -> bool:
        """Return whether the tensor agrees without being the same; nothing is known of a reference under nudges."""
        if not result.distance or not math.isfinite(result.distance):
            return False
        noise = self._traced.noise
        return not noise or (key in noise and result.distance <= AGREES * max(noise[key], self._traced.unit))

    def _reference_values(self, key: str, tensor: Tensor, is_gradient: bool) -> Tensor | None:
        """Return the reference's values, as a tensor like this one."""
        source = self._traced.sources[key]
        found = match(tensor, self._record.shape(source), self._layout)
        if found is None or not found.local.is_floating_point():
            return None
        values = self._record.read(source, found.regions).reshape(found.local.shape)
        if is_gradient and self._factor is not None:
            values = values * self._factor
        values = values.to(found.local)
        if not isinstance(tensor, DTensor):
            return values
        mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
        return DTensor.from_local(values, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

    def _compare(self, key: str, tensor: Tensor, stage: str) -> Result:
        source = self._traced.sources.get(key)
        if source is None:
            return Result(None)
        if stage == GRADIENT and self._factor is None and key != self._traced.first_gradient:
            return Result(None)  # the multiple is not known
        found = match(tensor, self._record.shape(source), self._layout)
        if found is None:
            return Result(None)
        theirs = self._record.read(source, found.regions)
        if found.local.is_floating_point() != theirs.is_floating_point():
            return Result(None)  # another form of the same, such as a mask of booleans or of what it adds to scores
        if not (found.local.is_floating_point() or found.local.is_complex()):
            # Another index that a router picks may be rounding.
            return Result(0.0 if torch.equal(found.local.cpu(), theirs) else None)
        return self._measure(key, found, theirs, source, stage)

    def _measure(self, key: str, found: Match, recorded: Tensor, source: str, stage: str) -> Result:
        ours, theirs = (_bounded(comparable(tensor).double()) for tensor in (found.local.cpu(), recorded))
        if stage == GRADIENT:
            if self._factor is None:
                first = measure(ours, theirs)
                self._factor = first.factor if math.isfinite(first.factor) and first.factor > 0 else math.nan
            ours = ours / self._factor
        measured = measure(ours, theirs)
        # A slice of small elements, such as masked rows, has the noise of the whole tensor.
        share = math.sqrt(theirs.numel() / max(1, math.prod(self._record.shape(source))))
        length = max(measured.truth, self._traced.norms[key] * share)
        if not length:
            return Result(None if measured.apart else 0.0)
        distance = measured.apart / length if math.isfinite(measured.apart) else math.inf
        if not distance > FAR:
            return Result(distance, found.split is not None)
        noise = self._traced.noise.get(key)
        if is_in_another_order(ours, found, self._record, source, PERMUTED * max(noise or 0.0, FAR)):
            return Result(None)
        allowed = AGREES * max(noise or 0.0, self._traced.unit)
        if distance > allowed and self._is_another_part(ours, found, source, allowed * length):
            return Result(None)
        whole = found.split is None and not found.placed and bool(self._layout.splits)
        sums = (sketch(ours), sketch(theirs)) if whole else ((), ())
        departure, backward = None, stage not in (INPUT, OUTPUT)
        if noise is not None and distance > DEPARTS * max(noise, self._traced.unit):
            self._described[backward] += 1
            if self._described[backward] <= DESCRIBED:
                unit = self._traced.unit
                departure = describe_departure(found.local.cpu(), recorded, (ours, theirs), max(noise, unit), unit)
        return Result(distance, found.split is not None, *sums, departure=departure)

    def _is_another_part(self, values: Tensor, found: Match, source: str, allowed: float) -> bool:
        """Return whether the values are those of other regions, as of (sequence, batch, width) that is cut twice."""
        parts = (self._record.read(source, regions) for regions in found.others)
        return any(float((values - _bounded(comparable(part).double())).norm()) <= allowed for part in parts)

    def calls(self) -> tuple[tuple[TracedCall, ...], tuple[TracedCall, ...]]:
        """Return the calls of the forward and of the backward."""
        used_in = self._used_in()
        calls = [self._call(*call, found, used_in) for call, found in self._calls.items()]
        return (
            tuple(call for call in calls if call.stage in (INPUT, OUTPUT)),
            tuple(call for call in calls if call.stage not in (INPUT, OUTPUT)),
        )

    def _used_in(self) -> dict[str, set[str]]:
        """Return by tensor, under the key that it has in ``sources``, the modules in whose forward it is seen."""
        used: dict[str, set[str]] = {}
        for (stage, module, turn), found in self._calls.items():
            if stage not in (INPUT, OUTPUT) or (caller := self.entered[module, turn].caller) is None:
                continue
            for key, _ in found:
                used.setdefault(self._traced.sources.get(key, key), set()).add(caller)
        return used

    def _call(
        self,
        stage: str,
        module: str,
        turn: int,
        found: list[tuple[str, Result]],
        used_in: Mapping[str, Collection[str]],
    ) -> TracedCall:
        noise = self._traced.noise
        compared = [
            (result.distance, max(noise[key], self._traced.unit), result)
            for key, result in found
            if result.distance is not None and key in noise
        ]
        caller, differing = None, dict[str, tuple[object, object]]()
        if stage == INPUT:
            entered = self.entered[module, turn]
            theirs = self._traced.arguments.get((module, turn), {})
            caller, differing = entered.caller, _differing(entered.arguments, theirs, self._traced.unit)
        returned = [OUTPUT + key.removeprefix(GRADIENT) for key, _ in found if stage == GRADIENT]
        users = {user for key in returned for user in used_in.get(self._traced.sources.get(key, key), ())}
        distance, allowed, worst = max(
            compared, key=lambda one: one[0] / one[1], default=(0.0, self._traced.unit, Result(None))
        )
        return TracedCall(
            stage=stage,
            module=module,
            turn=turn,
            compared=len(compared),
            unmatched=len(found) - len(compared) + len(differing),
            distance=distance,
            noise=allowed,
            split=any(result.split for _, result in found),
            sketch=worst.sketch,
            expected=worst.expected,
            departure=worst.departure,
            caller=caller,
            argument=_only(differing),
            used_in=tuple(sorted(users)),
        )


def _differing(
    ours: Mapping[str, object], theirs: Mapping[str, object], unit: float
) -> dict[str, tuple[object, object]]:
    """Return the paths whose arguments are not equal, with both; numbers may differ by rounding."""
    pairs = {path: (ours.get(path, MISSING), theirs.get(path, MISSING)) for path in {**ours, **theirs}}
    return {path: pair for path, pair in pairs.items() if not _equal(*pair, max(ROUNDED, 4 * unit))}


def _equal(own: object, other: object, tolerance: float) -> bool:
    if isinstance(own, float) and isinstance(other, float):
        return math.isclose(own, other, rel_tol=tolerance)
    return own == other


def _only(differing: Mapping[str, tuple[object, object]]) -> tuple[str, str, str] | None:
    """Return the name and the texts of the only argument that differs.

    Where several differ, they may be the same, given in another order or by name.
    """
    if len(differing) != 1:
        return None
    [(path, texts)] = differing.items()
    own, other = (text if len(text) <= LONGEST else f"{text[:LONGEST]}..." for text in map(str, texts))
    return path.removeprefix("."), own, other
