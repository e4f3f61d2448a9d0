"""The calls of a traced step on all ranks: where they agree with the reference's, and where they depart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_fsdp_meta.checks.tracing.facts import AGREES, DEPARTS, INPUT, Departure, RankTrace, TracedCall

PARTS = 0.05
"""Fraction of a departure that parts of a sum may leave: what they add up to is then the reference's tensor."""
AGREE, DEPART, BETWEEN, UNKNOWN = "agree", "depart", "between", "unknown"


@dataclass(frozen=True)
class MergedCall:
    """One call on all ranks."""

    call: TracedCall
    """As it is on the rank where it is farthest off."""
    states: tuple[str, ...]
    distances: tuple[float | None, ...]
    """How many times its noise it is off on each rank; None if not known."""
    how: tuple[Departure | None, ...] = ()
    """In which way each of the ``ranks`` departs."""

    @property
    def state(self) -> str:
        """The worst state of a rank."""
        return next(state for state in (DEPART, BETWEEN, UNKNOWN, AGREE) if state in self.states)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that depart."""
        return tuple(rank for rank, state in enumerate(self.states) if state == DEPART)


def follow_step(traces: Sequence[RankTrace]) -> tuple[list[MergedCall], list[MergedCall]]:
    """Return the calls of the forward and of the backward, in order; none where the ranks' calls differ."""
    forward = _merge_ranks(traces, [trace.forward for trace in traces])
    backward = _merge_ranks(traces, [trace.backward for trace in traces])
    return forward or [], backward or []


def _merge_ranks(traces: Sequence[RankTrace], by_rank: Sequence[Sequence[TracedCall]]) -> list[MergedCall] | None:
    """Return each call of the forward, or of the backward, with its state on all ranks; None if the calls differ."""
    keys = [[(call.stage, call.module, call.turn) for call in calls] for calls in by_rank]
    if any(own != keys[0] for own in keys):
        return None
    slices: dict[tuple[int, int], list[int]] = {}
    for rank, trace in enumerate(traces):
        slices.setdefault(trace.data_parallel, []).append(rank)
    columns = list(zip(*by_rank, strict=True))
    inputs = {(calls[0].module, calls[0].turn): calls for calls in columns if calls[0].stage == INPUT}
    return [_merge_call(calls, slices.values(), inputs.get((calls[0].module, calls[0].turn))) for calls in columns]


def _merge_call(
    calls: Sequence[TracedCall], slices: Iterable[Sequence[int]], inputs: Sequence[TracedCall] | None
) -> MergedCall:
    states = [_state(call) for call in calls]
    for ranks in slices:
        if any(states[rank] == DEPART for rank in ranks) and _are_parts([calls[r] for r in ranks]):
            states = [UNKNOWN if rank in ranks else state for rank, state in enumerate(states)]
        elif inputs is not None and any(inputs[rank].split for rank in ranks) and _differ([calls[r] for r in ranks]):
            # A layer that splits its input may return one summand on each rank, to which others add what is missing.
            states = [UNKNOWN if rank in ranks else state for rank, state in enumerate(states)]
    worst = max(calls, key=lambda call: call.distance / call.noise if call.noise else 0.0)
    distances = (
        None if state == UNKNOWN or not call.noise else call.distance / call.noise
        for call, state in zip(calls, states, strict=True)
    )
    how = (call.departure for call, state in zip(calls, states, strict=True) if state == DEPART)
    worst = replace(worst, argument=next((call.argument for call in calls if call.argument), None))
    return MergedCall(worst, tuple(states), tuple(distances), tuple(how))


def _state(call: TracedCall) -> str:
    if call.compared and call.distance > DEPARTS * call.noise:
        return DEPART
    if call.compared and call.distance > AGREES * call.noise:
        return BETWEEN
    return UNKNOWN if call.unmatched else AGREE


def _are_parts(calls: Sequence[TracedCall]) -> bool:
    """Return whether the tensors of ranks with the same rows add up to the reference's."""
    if len(calls) < 2 or not all(call.sketch for call in calls):
        return False
    wanted = calls[0].expected
    summed = [sum(numbers) for numbers in zip(*(call.sketch for call in calls), strict=True)]
    left: float = max(abs(a - b) for a, b in zip(summed, wanted, strict=True))
    apart: float = max(abs(a - b) for call in calls for a, b in zip(call.sketch, wanted, strict=True))
    return left <= PARTS * apart


def _differ(calls: Sequence[TracedCall]) -> bool:
    """Return whether whole tensors of ranks with the same rows are not one tensor."""
    sketches = [call.sketch for call in calls]
    if len(calls) < 2 or not any(sketches):
        return False
    if not all(sketches):
        return True
    scale = max(abs(number) for own in sketches for number in own)
    return any(abs(a - b) > PARTS * scale for own in sketches for a, b in zip(own, sketches[0], strict=True))
