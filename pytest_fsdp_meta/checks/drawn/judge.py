"""Check that the weights a loader draws are parts of one draw of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import NormalDist
from typing import NamedTuple

from pytest_fsdp_meta.checks.sharding.facts import is_expert
from pytest_fsdp_meta.checks.values.judge import BASIC
from pytest_fsdp_meta.evidence import DrawnTensor, Spread, TensorFacts
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.registry import values_check
from pytest_fsdp_meta.judging.view import NotDeclared, NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import name_ranks


class Drawn(NamedTuple):
    """A part of a drawn tensor, with the ranks that hold it; the facts are those of the first of them."""

    ranks: tuple[int, ...]
    facts: TensorFacts
    draw: DrawnTensor


class Tested(NamedTuple):
    """The parts of one tensor that have the same size, with what their spread can be mistaken for."""

    name: str
    ranks: tuple[int, ...]
    measured: Measured
    fans: list[Fan]


@values_check(
    promise="different parts and different tensors get different random numbers, with the standard deviation that a "
    "draw of the whole tensor has; what is random is trained, where anything is",
    needs=["inventory", "draws"],
    after=[*BASIC, "replicas_equal"],
    fields=["drawn"],
    why="Parts that repeat one another, or that a shard's size scales, are finite and train, but to a worse model.",
    cause="each rank drew its own part from the same seed",
    remedy="draw the whole tensor before sharding or on the DTensor, or seed each part by its name and place",
    references=["NVIDIA-NeMo/Megatron-Bridge#5840", "modelscope/ms-swift#7944", "pytorch/torchtitan#3106"],
)
def drawn_weights_are_one_draw(view: View) -> Iterable[Finding]:
    if not view.evidence.subject.drawn:
        raise NotDeclared("drawn")
    found = {name: _parts(view, name) for name in view.names("parameter", "buffer", only=view.evidence.subject.drawn)}
    varied = {name: parts for name, parts in found.items() if any(part.draw.own.distinct > 1 for part in parts)}
    tested = list(_spreads(view, varied))
    frozen = list(_frozen(view, varied))
    yield from frozen
    if not frozen and len(varied) < 2 and not tested and all(len(parts) < 2 for parts in varied.values()):
        why = "every drawn weight is constant" if not varied else "ranks hold no different parts"
        raise NotJudged(f"{why} (first: {next(iter(found))})" if found else "no rank holds elements of them")
    unknown: list[str] = []
    yield from _equal_parts(view, varied, unknown)
    yield from _equal_tensors(varied, bool(view.evidence.subject.stages))
    if view.evidence.reference is None:
        unknown.append("there is no reference, so only the parts of each tensor were compared")
    else:
        missing = [name for name, parts in varied.items() if all(part.draw.reference is None for part in parts)]
        unknown += [f"{name} has no values in the reference, so its spread was not compared" for name in missing]
    for one in tested:
        fan = wrong_fan(one.measured, one.fans, len(tested))
        if fan is not None and not _draws_so_alone(view, one, fan):
            yield _wrong_spread(one, fan)
        elif not can_tell(one.measured, one.fans, len(tested)):
            unknown.append(f"{one.name} has too few elements ({one.measured.elements}) to compare its spread")
    if unknown:
        raise PartlyJudged(unknown[0] if len(unknown) == 1 else f"{unknown[0]}; and {len(unknown) - 1} more")


def _parts(view: View, name: str) -> list[Drawn]:
    """Return the parts of a tensor that ranks hold, each once."""
    draws = {rank: d for rank, one in enumerate(view.evidence.draws or ()) for d in one.draws if d.name == name}
    facts = dict(view.holders(name))
    places = ranks_by((rank, facts[rank].held) for rank in sorted(draws) if rank in facts)
    return [Drawn(ranks, facts[ranks[0]], draws[ranks[0]]) for ranks in places.values()]


def _frozen(view: View, by_name: dict[str, list[Drawn]]) -> Iterator[Finding]:
    """Report weights that stay random in a model that trains; a reference that freezes them as well excuses none."""
    if any(tensor.requires_grad for rank in view.evidence.inventory for tensor in rank.tensors):
        runs = view.evidence.training or ()
        unfrozen = {t.name for run in runs if run.after is not None for t in run.after.tensors if t.requires_grad}
        for name, parts in by_name.items():
            stuck = [part for part in parts if part.facts.kind == "parameter" and not part.facts.requires_grad]
            ranks = tuple(sorted(rank for part in stuck for rank in part.ranks))
            if ranks and name not in unfrozen:
                yield Finding(name, ranks, "random numbers that are frozen", "trained", **_FROZEN)


def _equal_parts(view: View, by_name: dict[str, list[Drawn]], unknown: list[str]) -> Iterator[Finding]:
    """Report parts of a tensor that have the same values, unless the reference's own have as well.

    Add to ``unknown`` what cannot be judged.
    """
    pairs = sum(len(parts) * (len(parts) - 1) // 2 for parts in by_name.values())
    by_dtensor = view.evidence.world.device_type == "cpu" and any(r.by_dtensor for r in view.evidence.draws or ())
    has_reference = view.evidence.reference is not None
    for name, parts in by_name.items():
        for same, uneven in _repeated(parts):
            ranks = tuple(sorted(rank for part in same for rank in part.ranks))
            if has_reference and any(_reference_key(part.draw, uneven) is None for part in same):
                unknown.append(f"{name} is alike on {name_ranks(ranks)}, but the reference does not draw it")
            elif not has_reference and any(map(_may_be_meant, same)):
                unknown.append(f"{name} is alike on {name_ranks(ranks)}, which a reference could show to be meant")
            elif by_dtensor:
                unknown.append(f"{name} is alike on {name_ranks(ranks)}, {BY_DTENSOR}")
            elif not uneven and not excludes_chance(same[0].draw.own, pairs):
                unknown.append(f"{name} is alike on {name_ranks(ranks)}, but so few elements may be equal by chance")
            else:
                detail = "compared by their first elements, because the parts differ in size" if uneven else ""
                yield Finding(name, ranks, "the same numbers in different parts", "other numbers in each part", detail)


def _may_be_meant(part: Drawn) -> bool:
    """Return whether an author may want parts to be equal: copies of one expert, or rows that repeat one another.

    Mamba's A_log has the same row for every channel. A part with more different values than a row has elements does
    not repeat its rows.
    """
    facts = part.facts
    if is_expert(facts):
        return True
    if facts.flat:
        return part.draw.own.distinct <= prod(facts.shape[1:])
    cut = [size for size, whole in zip(facts.local_shape, facts.shape, strict=True) if size != whole]
    return part.draw.own.distinct <= max((prod(facts.local_shape) // size for size in cut), default=0)


def _equal_tensors(by_name: dict[str, list[Drawn]], stages: bool) -> Iterator[Finding]:
    """Report tensors with the same values as another one on the same ranks, unless the reference's own are the same.

    In a pipeline with ``stages``, each stage draws its own tensors, so those of all ranks are compared.
    """
    held = [(name, part) for name, parts in by_name.items() for part in parts if part.draw.own.distinct > 1]
    pairs = len(held) * (len(held) - 1) // 2
    alike = ranks_by(
        (i, (part.facts.digest, () if stages else part.ranks)) for i, (_, part) in enumerate(held) if part.facts.digest
    )
    copies: dict[tuple[str, str], tuple[int, ...]] = {}
    on_other_stages = set[str]()
    for members in alike.values():
        first, original = held[members[0]]
        for name, part in (held[i] for i in members[1:]):
            ours, theirs = (_reference_key(one.draw, False) for one in (part, original))
            same_memory = part.facts.storage is not None and part.facts.storage == original.facts.storage
            drawn_apart = None not in (ours, theirs) and ours != theirs
            if drawn_apart and not same_memory and excludes_chance(part.draw.own, pairs):
                copies[name, first] = (*copies.get((name, first), ()), *part.ranks)
                on_other_stages |= {name} if part.ranks != original.ranks else set()
    for (name, first), ranks in copies.items():
        explanation = _ONE_SEED_FOR_STAGES if name in on_other_stages else _SEEDED_AGAIN
        yield Finding(name, tuple(sorted(ranks)), f"the same numbers as {first}", "numbers of its own", **explanation)


def _repeated(parts: Sequence[Drawn]) -> Iterator[tuple[list[Drawn], bool]]:
    """Yield the groups of parts with the same values, except where the reference's values are the same there, too.

    Parts of different sizes are compared by their first elements; the second value says whether they were.
    """
    uneven = len({(part.facts.local_shape, part.draw.own.elements) for part in parts}) > 1
    keys = [part.draw.own.head if uneven else part.facts.digest for part in parts]
    varied = [part for part, key in zip(parts, keys, strict=True) if key and part.draw.own.distinct > 1]
    groups = ranks_by((i, part.draw.own.head if uneven else part.facts.digest) for i, part in enumerate(varied))
    for members in groups.values():
        group = [varied[i] for i in members]
        theirs = {_reference_key(part.draw, uneven) for part in group}
        if len(group) > 1 and (len(theirs) > 1 or None in theirs):
            yield group, uneven


def _reference_key(draw: DrawnTensor, uneven: bool) -> str | None:
    """Return a key of the reference's values; None if it does not draw them, and so shows no structure."""
    if draw.reference is None or draw.reference.distinct <= 1:
        return None
    return draw.reference.head if uneven else draw.reference.digest


def _spreads(view: View, by_name: dict[str, list[Drawn]]) -> Iterator[Tested]:
    """Yield the spread of the parts of each tensor that have the same size; parts with the same values count once."""
    for name, parts in by_name.items():
        for indices in ranks_by((i, part.facts.local_shape) for i, part in enumerate(parts)).values():
            alike = [parts[i] for i in indices]
            # The weight beside a bias: its fan scales both.
            beside = f"{name.rpartition('.')[0]}.weight" if name.endswith(".bias") else ""
            fans = fans_of(alike[0].facts, view.evidence.inventory[alike[0].ranks[0]].by_name.get(beside))
            measured = measure_ratio({part.draw.own.digest: part.draw for part in alike}.values())
            if fans and measured is not None:
                yield Tested(name, tuple(sorted(r for part in alike for r in part.ranks)), measured, fans)


def _draws_so_alone(view: View, tested: Tested, fan: Fan) -> bool:
    """Return whether a rank that holds the whole tensor draws it with this standard deviation, too: a choice."""
    alone = [world for world in view.evidence.smaller if not world.mesh]
    measured = measure_ratio(draw for world in alone for draw in world.draws if draw.name == tested.name)
    return measured is not None and wrong_fan(measured, [fan], 1) is not None


def _wrong_spread(tested: Tested, fan: Fan) -> Finding:
    measured, of = tested.measured, f" of {fan.of}" if fan.of else ""
    return Finding(
        tested.name,
        tested.ranks,
        "a standard deviation that fits a tensor of the shard's shape",
        "one that fits the whole tensor, as in the reference",
        f"standard deviation {measured.own:.3g} instead of {measured.reference:.3g}: {math.sqrt(fan.ratio):.3g} times, "
        f"as the shard{of} with shape {fan.shard} gives it instead of {fan.whole}",
        cause="the initialisation was scaled by the fan of the local shard, which is smaller than that of the whole",
        remedy="initialise before sharding or on the DTensor, whose shape is the whole one; or compute the scale from "
        "the whole shape",
    )


_ONE_SEED_FOR_STAGES: Explanation = {
    "cause": "every stage of the pipeline draws its own layers from the same seed",
    "remedy": "add the number of the stage to the seed, or seed each tensor by its name in the whole model",
}
_FROZEN: Explanation = {
    "cause": "requires_grad is False for a weight that no checkpoint gives its values: it stays as it was drawn",
    "remedy": "train it, or load it; if a random weight is meant, draw it by a seed of its own, in the reference as "
    "well, and don't declare it drawn",
}
_SEEDED_AGAIN: Explanation = {
    "cause": "the same seed is set before each tensor, or torch restored the state of the generator after each draw",
    "remedy": "seed once; or seed each part by the name of the tensor and its place in it; of parameters that are "
    "offloaded to the CPU, draw the local parts, because torch restores the state after a draw on such a DTensor",
}
BY_DTENSOR = (
    "but the loader draws on DTensors, and on the CPU torch gives each rank the same numbers for its part; judge "
    "this on GPUs"
)


ERROR_RATE = 1e-6
"""The probability that chance alone gives a finding in a run. It is divided by the number of tests of the run."""
LEAST = 128
"""Fewest different values of a spread that is tested. Below, the logarithm of a variance is not nearly normal."""
NORMAL_KURTOSIS = 3.0
NORMAL_TAILS = 24.0
"""The variance of a normal sample's kurtosis, times the number of its elements."""
SIMILAR_TAILS = 0.1
"""Absolute: kurtoses that differ by less are the same. A normal has 3, a uniform distribution 1.8."""
EXACT = 0.02
"""Absolute, of the logarithm of a ratio of variances: ratios of large samples that differ by less are the same."""
CONSISTENT = 3.0
"""Standard errors by which a measured ratio may miss the one that a shard's size gives."""


@dataclass(frozen=True)
class Fan:
    """A size by which an initialisation scales: ``ratio`` is the variance that the shard's size gives, divided by that
    of the whole tensor's size."""

    ratio: float
    shard: tuple[int, ...]
    whole: tuple[int, ...]
    of: str = ""
    """The name of the weight whose fan it is, for a bias; empty for the tensor itself."""


@dataclass(frozen=True)
class Measured:
    """The ratio of two variances: its logarithm with the standard error, and both standard deviations.

    ``distinct`` counts the different values of the side that has fewer.
    """

    log: float
    error: float
    own: float
    reference: float
    elements: int
    distinct: int
    alike: bool = True
    """Whether both have the tails of one distribution: other weights than draws, such as trained ones, rarely do."""


def fans_of(tensor: TensorFacts, weight: TensorFacts | None) -> list[Fan]:
    """Return the sizes that a draw on the local shard would have used by mistake; ``weight`` is that of a bias."""
    if tensor.flat:
        return []
    own, of = (tensor, "") if len(tensor.shape) > 1 else (weight, weight.name if weight is not None else "")
    if own is None or own.flat or len(own.shape) < 2 or len(own.shape) != len(own.local_shape):
        return []
    whole, shard = own.shape, own.local_shape
    if not prod(shard):
        return []
    cut = [size / part for size, part in zip(whole, shard, strict=True) if size != part]
    ratios = {*cut, prod(cut), sum(_fans(whole)) / sum(_fans(shard))} if cut else set()
    return [Fan(ratio, shard, whole, of) for ratio in sorted(ratios) if ratio > 1]


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return fan-in and fan-out, as ``torch.nn.init`` counts them."""
    field = prod(shape[2:])
    return shape[1] * field, shape[0] * field


def measure_ratio(draws: Iterable[DrawnTensor]) -> Measured | None:
    """Compare the variance within these parts with that within the reference's; None if too little varies."""
    pairs = [(draw.own, draw.reference) for draw in draws if draw.reference is not None]
    if not pairs:
        return None
    own, reference = _pooled(own for own, _ in pairs), _pooled(reference for _, reference in pairs)
    if own is None or reference is None:
        return None
    # A sample underestimates heavy tails; draws with lighter tails, such as uniform ones, are tested as if normal.
    error = math.sqrt(sum((max(part.kurtosis, NORMAL_KURTOSIS) - 1) / part.distinct for part in (own, reference)))
    tails = math.sqrt(sum(NORMAL_TAILS / part.distinct for part in (own, reference)))
    elements = sum(spread.elements for spread, _ in pairs)
    return Measured(
        log=math.log(own.variance / reference.variance),
        error=error,
        own=math.sqrt(own.variance),
        reference=math.sqrt(reference.variance),
        elements=elements,
        distinct=min(own.distinct, reference.distinct),
        alike=abs(own.kurtosis - reference.kurtosis) <= SIMILAR_TAILS + 2 * CONSISTENT * tails,
    )


class _Pooled(NamedTuple):
    variance: float
    kurtosis: float
    distinct: int
    """Elements that repeat one another, such as equal columns, were not drawn one by one."""


def _pooled(spreads: Iterable[Spread]) -> _Pooled | None:
    """Return what the parts have in common, each about its own mean; None for a constant or values not finite."""
    parts = list(spreads)
    total = sum(part.elements for part in parts)
    variance = sum(part.elements * part.variance for part in parts) / total
    if not (math.isfinite(variance) and variance > 0):
        return None
    fourth = sum(part.elements * part.fourth for part in parts) / total
    return _Pooled(variance, fourth / variance**2, sum(part.distinct for part in parts))


def limit(tests: int) -> float:
    """Return the number of standard errors that chance exceeds in half of ``ERROR_RATE`` of the runs."""
    return NormalDist().inv_cdf(1 - ERROR_RATE / 2 / max(tests, 1))


def wrong_fan(measured: Measured, fans: Iterable[Fan], tests: int) -> Fan | None:
    """Return the shard's fan that explains the spread, if it is not the reference's; else None."""
    if measured.distinct < LEAST or not measured.alike or measured.log <= limit(tests) * measured.error:
        return None
    slack = max(CONSISTENT * measured.error, EXACT)
    near = [fan for fan in fans if abs(measured.log - math.log(fan.ratio)) <= slack]
    return min(near, key=lambda fan: abs(measured.log - math.log(fan.ratio)), default=None)


def can_tell(measured: Measured, fans: Iterable[Fan], tests: int) -> bool:
    """Return whether there are enough elements that the spread of the largest ratio would be a finding."""
    largest = max((fan.ratio for fan in fans), default=math.inf)
    return measured.distinct >= LEAST and math.log(largest) > (limit(tests) + CONSISTENT) * measured.error


def excludes_chance(spread: Spread, pairs: int) -> bool:
    """Return whether two draws of these values are equal by chance in less than half of ``ERROR_RATE`` of the runs."""
    return spread.surprise > math.log(2 * max(pairs, 1) / ERROR_RATE)
