"""Find the place where a step starts to depart from the reference's, by the traces of all ranks.

A place is named only if nothing contradicts it; a wrong name costs more than none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import takewhile

from pytest_fsdp_meta.checks.tracing.facts import (
    AGAIN_INPUT,
    AGAIN_OUTPUT,
    AGREES,
    DEPARTS,
    GRADIENT,
    INPUT,
    OUTPUT,
    RECOMPUTED,
    Departure,
    ModuleFacts,
    RankTrace,
    TracedCall,
)
from pytest_fsdp_meta.judging.findings import Explanation
from pytest_fsdp_meta.text import first_of, grouped, name_ranks

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
    return forward, _merge_ranks(traces, [trace.backward for trace in traces])


def _merge_ranks(traces: Sequence[RankTrace], by_rank: Sequence[Sequence[TracedCall]]) -> list[MergedCall]:
    keys = [[(call.stage, call.module, call.turn) for call in calls] for calls in by_rank]
    if any(own != keys[0] for own in keys):
        return []
    slices = grouped((trace.data_parallel, rank) for rank, trace in enumerate(traces))
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


JUMP = 10.0
"""How many times farther off, in multiples of noise, a place is than all that came before. Noise grows as a difference
does, so a difference that starts earlier, below its noise, shows no jump."""
SETTINGS = 3
"""At most this many settings of a module are named."""
NEAR_ONE = 0.01
"""A factor that is nearer to 1 has more digits."""
FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"
PHASES = (FORWARD, BACKWARD, RECOMPUTATION)
NAMES = {INPUT: "the input", OUTPUT: "the output", GRADIENT: "the gradient of the output"}


@dataclass(frozen=True)
class Passed:
    """An argument that is no tensor, or not the same kind of tensor, and differs from the reference's."""

    module: str
    """Which gets it."""
    name: str
    own: str
    reference: str


@dataclass(frozen=True)
class Place:
    """Where a difference starts: inside ``module``, whose inputs agree.

    ``after`` and ``before`` are what still agrees and what departs, where that is not the module's own input and
    output: (stage, module). ``how`` says in which way it departs on each of the ranks, and ``passed`` which argument
    the module passes on that is not the reference's.
    """

    module: str
    phase: str
    ranks: tuple[int, ...]
    distance: float
    noise: float
    after: tuple[str, str] | None = None
    before: tuple[str, str] | None = None
    how: tuple[Departure | None, ...] = ()
    passed: Passed | None = None


def describe_origin(traces: Sequence[RankTrace] | None, phases: Sequence[str] = PHASES, step: int = 0) -> str:
    """Return in one line where the difference of a step starts, if that is sure and in one of these phases.

    Else return why the step could not be traced; "" if it was, or was not to be.
    """
    if traces and traces[0].step != step:
        return ""
    place = find_place(traces) if traces else None
    if traces and place is not None and place.phase in phases:
        return describe_place(place, traces)
    problem = next((trace.problem for trace in traces or () if trace.problem), "")
    return problem and f"not looked for in the modules: {problem}"


def explain_settings(traces: Sequence[RankTrace] | None, tensors: Iterable[str] = ()) -> Explanation:
    """Explain a difference of the first step by settings that differ from the reference's; return {} if none do.

    They are those of the module where the difference starts or, if that is not known, of the one module that has all
    ``tensors`` that differ.
    """
    if not traces or traces[0].step:
        return {}
    place = find_place(traces)
    modules = {place.module} if place is not None else {name.rpartition(".")[0] for name in tensors}
    if len(modules) != 1:
        return {}
    module = modules.pop()
    known = (trace.modules[module].otherwise for trace in traces if module in trace.modules)
    if not (settings := next(filter(None, known), ())):
        return {}
    texts = "; ".join(map(str, settings[:SETTINGS]))
    return {"cause": f"{module or 'the model'} is configured differently: {texts}", **_CONFIGURE}


def explain_numbers(traces: Sequence[RankTrace] | None) -> Explanation:
    """Explain a difference that starts in no module by a number that some modules have otherwise, all alike; else {}.

    In low precision, another epsilon changes what each norm returns by little more than rounding does.
    """
    if not traces or traces[0].step or find_place(traces) is not None:
        return {}
    modules = [(name, facts.otherwise) for trace in traces for name, facts in trace.modules.items()]
    # Other settings may say how something is computed, and not what.
    numbers = [(name, setting) for name, settings in modules for setting in settings if setting.number]
    if len({setting for _, setting in numbers}) != 1:
        return {}
    names = list(dict.fromkeys(name for name, _ in numbers))
    are = "is" if len(names) == 1 else "are"
    return {"cause": f"{first_of(names)} {are} configured differently: {numbers[0][1]}", **_CONFIGURE}


_CONFIGURE: Explanation = {
    "remedy": "build the module from the reference's configuration, and look for code that recreates it or changes it "
    "afterwards",
}


def find_place(traces: Sequence[RankTrace]) -> Place | None:
    """Return where the difference starts; None if nothing departs, or what departs does not fit together."""
    if any(trace.problem for trace in traces):
        return None
    handed = any(trace.handed for trace in traces)
    splitting = {name for trace in traces for name, facts in trace.modules.items() if facts.splits_output}
    forward, backward = follow_step(traces)
    if not forward:
        return None
    if any(merged.state == DEPART or (merged.state == BETWEEN and not handed) for merged in forward):
        return _first_in_forward(forward, splitting if handed else None)
    return _first_in_backward(backward, forward, splitting if handed else None)


def _first(
    merged: Sequence[MergedCall], through: str, forward: Sequence[MergedCall], splitting: Collection[str] | None
) -> tuple[MergedCall, Sequence[MergedCall]] | None:
    """Return the first call that departs, and those before it; None if that is not where a difference starts.

    ``through`` is the stage whose last call, and calls of modules around, must not agree again: a tensor that was
    compared with the wrong part of the reference's departs by itself. Where modules were handed what agrees, they
    agree again; then ``splitting`` are the layers whose weights say that the part is the right one, and ``forward``
    may show it by other tensors.
    """
    position = next((index for index, one in enumerate(merged) if one.state == DEPART), None)
    if position is None:
        return None
    first, before = merged[position], merged[:position]
    module, later = first.call.module, [one for one in merged[position:] if one.call.stage == through]
    known = [one.state for one in later if one.state != UNKNOWN]
    outputs = later if through == OUTPUT else ()
    around = [o.state for o in outputs if not o.call.module or module.startswith(f"{o.call.module}.")]
    nearest = max((one.call.distance / one.call.noise for one in before if one.state != UNKNOWN), default=0.0)
    jumps = first.call.distance >= JUMP * nearest * first.call.noise
    if any(one.state == BETWEEN for one in before) or not jumps or not known:
        return None
    agrees_again = AGREE in (*around, *known[-1:])
    if splitting is None and agrees_again:
        return None
    if splitting is not None and first.call.split and not _is_right_part(first.call, forward, splitting):
        return None
    return first, before


def _is_right_part(call: TracedCall, forward: Sequence[MergedCall], splitting: Collection[str]) -> bool:
    """Return whether a tensor is cut as it was guessed to be: as its layer's weight, or as another tensor that agrees.

    An output is cut as the input of its module, and a gradient as the output that it belongs to.
    """
    if call.stage in (OUTPUT, AGAIN_OUTPUT, GRADIENT) and call.module in splitting:
        return True
    stage = INPUT if call.stage == OUTPUT else RECOMPUTED.get(call.stage, OUTPUT)
    known = [
        one for one in forward if (one.call.stage, one.call.module, one.call.turn) == (stage, call.module, call.turn)
    ]
    return call.stage != INPUT and any(one.call.split and one.state == AGREE for one in known)


def _first_in_forward(merged: Sequence[MergedCall], splitting: Collection[str] | None) -> Place | None:
    found = _first(merged, OUTPUT, merged, splitting)
    if found is None:
        return None
    first, before = found
    call = first.call
    inputs = {(one.call.module, one.call.turn): one.state for one in before if one.call.stage == INPUT}
    if call.stage == OUTPUT and inputs.get((call.module, call.turn), AGREE) == AGREE:
        return _place(call.module, FORWARD, first)
    agreeing = [one.call for one in before if one.state == AGREE and one.call.compared]
    entered = next((one for one in merged if _is_input(one.call, call.module) and one.call.turn == call.turn), None)
    passed = None
    # What departs may be an argument that modules hand on to the modules inside them. It starts in the outermost one
    # that passes it on without having got it.
    while entered is not None and entered.call.caller is not None:
        around = entered.call.caller
        passed = Passed(entered.call.module, *entered.call.argument) if entered.call.argument else passed
        entered = next((one for one in reversed(before) if _is_input(one.call, around)), None)
        if entered is None or entered.state == AGREE:
            return replace(_place(around, FORWARD, first, agreeing[-1]), passed=passed) if agreeing else None
        if entered.call.argument is None:
            return None
    return None


def _is_input(call: TracedCall, module: str) -> bool:
    return (call.stage, call.module) == (INPUT, module)


def _place(module: str, phase: str, first: MergedCall, last: TracedCall | None = None) -> Place:
    """Return a place inside the module: between ``last``, which agrees, and the first call that departs."""
    call = first.call
    after, before = ((last.stage, last.module), (call.stage, call.module)) if last is not None else (None, None)
    return Place(module, phase, first.ranks, call.distance, call.noise, after, before, first.how)


def _first_in_backward(
    merged: Sequence[MergedCall], forward: Sequence[MergedCall], splitting: Collection[str] | None
) -> Place | None:
    found = _first(merged, GRADIENT, forward, splitting)
    if found is None:
        return None
    first, before = found
    call = first.call
    if call.stage in RECOMPUTED:
        return _first_in_recomputation(first, before, forward)
    agreeing = [one.call for one in before if one.state == AGREE and one.call.stage == GRADIENT]
    if not agreeing:
        return None
    # The gradient of a tensor is the sum of what all who use it send back.
    called, around = {one.call.module for one in forward}, reduce(_common, call.used_in, call.module)
    around = _common(around, agreeing[-1].module)
    while around and around not in called:  # a container, such as a list of blocks
        around = around.rpartition(".")[0]
    return _place(around, BACKWARD, first, agreeing[-1])


def _first_in_recomputation(
    first: MergedCall, before: Sequence[MergedCall], forward: Sequence[MergedCall]
) -> Place | None:
    """Return the module whose recomputed output departs, or whose input is not the one that the forward had."""
    call = first.call
    then = {(one.call.stage, one.call.module, one.call.turn): one.state for one in forward}
    again = {(one.call.module, one.call.turn): one.state for one in before if one.call.stage == AGAIN_INPUT}
    if then.get((RECOMPUTED[call.stage], call.module, call.turn)) != AGREE:
        return None
    if call.stage == AGAIN_INPUT and not any(one.call.stage in RECOMPUTED for one in before):
        return _place(call.module, RECOMPUTATION, first, call)
    if call.stage == AGAIN_OUTPUT and again.get((call.module, call.turn), AGREE) == AGREE:
        return _place(call.module, RECOMPUTATION, first)
    return None


def _common(one: str, other: str) -> str:
    """Return the smallest module around both; a module is around what it contains."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def describe_place(place: Place, traces: Sequence[RankTrace]) -> str:
    """Return the place in one line: where, how far off, and in which way if that is simple."""
    facts = _facts(place.module, traces)
    where = f"{place.module or 'the model'}{facts}, {place.phase}, {name_ranks(place.ranks)}: "
    off = f"is off by {place.distance:.2g} (noise {place.noise:.1g})"
    how = "".join(f"; {text}" for text in _additions(place, traces) if text)
    if place.before is not None and place.before[0] == AGAIN_INPUT:
        return f"{where}the input {off}, that of the forward agrees{how}"
    if place.after is None or place.before is None:
        return f"{where}the inputs agree, the output {off}{how}"
    return f"{where}{_name(*place.after)} agrees, {_name(*place.before)} {off}{how}"


def _additions(place: Place, traces: Sequence[RankTrace]) -> Iterator[str]:
    if passed := place.passed:
        yield f"{passed.module} gets {passed.own} as argument {passed.name}, in the reference {passed.reference}"
    # In which way the tensor departs, and on which ranks if not on all: as on the first that has one.
    texts = {rank: _describe_departure(how) for rank, how in zip(place.ranks, place.how, strict=True) if how}
    text = next(iter(texts.values()), "")
    ranks = tuple(rank for rank, own in texts.items() if own == text)
    yield text and (text if ranks == place.ranks else f"{text} (on {name_ranks(ranks)})")
    if place.phase != BACKWARD and any(place.module in traces[rank].draws for rank in place.ranks):
        yield "the module draws random numbers, the reference's does not"
    if traces[0].step:
        yield f"seen with the batch of step {traces[0].step} and the loaded weights"


def _describe_departure(how: Departure) -> str:
    if how.dtypes is not None:
        return f"its values are those of {how.dtypes[0]}, in the reference {how.dtypes[1]}"
    if how.factor is not None:
        digits = f"{how.factor:.6g}" if abs(how.factor - 1) < NEAR_ONE else f"{how.factor:.3g}"
        return f"it is {digits} times the reference's" if how.factor else "it is zero"
    if how.rows is not None:
        off, rows = how.rows
        are = f"{'is' if off == 1 else 'are'} {'zero' if how.zero else 'off'}"
        return f"{off} of its {rows} rows along the last dim {are}, and all others agree"
    if how.columns is not None:
        start, end, size = how.columns
        which = f"element {start}" if end - start == 1 else f"elements {start} to {end - 1}"
        are = "is" if end - start == 1 else "are"
        return f"{which} of the {size} that a rank holds along the last dim {are} off, and all others agree"
    if how.row_factors is not None:
        least, most = (f"{factor:.3g}" for factor in how.row_factors)
        return (
            f"each row along the last dim is another multiple of the reference's ({least} to {most}), as by a mean, a "
            "norm or a softmax of the row that is computed otherwise, or over a part of it"
        )
    if how.same_vector:
        return "all its rows along the last dim are off by the same vector, as by a missing or doubled bias"
    return ""


def _name(stage: str, module: str) -> str:
    return f"{NAMES[stage]} of {module or 'the model'}"


def _facts(module: str, traces: Sequence[RankTrace]) -> str:
    found: ModuleFacts | None = next((t.modules[module] for t in traces if module in t.modules), None)
    if found is None:
        return ""
    parts = [found.kind, *([f"{found.file}:{found.line}"] if found.file else [])]
    if found.reference:
        parts.append(f"{found.reference} in the reference")
    return f" ({', '.join(parts)})"
