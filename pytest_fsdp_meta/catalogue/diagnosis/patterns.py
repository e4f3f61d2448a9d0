"""What a pattern of wrong values points to: rounded, scaled, shifted, transposed, shuffled, another tensor's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pytest_fsdp_meta.catalogue.diagnosis.multiples import multiple
from pytest_fsdp_meta.catalogue.findings import Explanation
from pytest_fsdp_meta.evidence import Comparison, TensorFacts

Cases = Sequence[tuple[int, Comparison]]
"""Comparisons of one tensor, each with its rank."""
ROUNDING = {
    "bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2
}  # fmt: skip
"""One unit in the last place, relative: what a loader that casts may be off by."""


def pattern(tensor: TensorFacts, cases: Cases, pairs: Cases) -> Explanation:
    """Cause and remedy that the pattern of what is wrong points to; none where everything is."""
    if tensor.dtype == "float32" and all(LEAST_CUT < c.max_rel < ROUNDING["bfloat16"] for _, c in cases):
        return _CUT
    odd = len(cases) < len([c for _, c in pairs if c.elements])
    if all(unwritten(c) for _, c in cases):
        return {**UNWRITTEN, "remedy": _ODD_RANKS["remedy"]} if odd else UNWRITTEN
    if _transposed(tensor, cases):
        return _TRANSPOSED
    if not odd and (factor := _agreed(tensor, cases, _multiplied)):
        return {"cause": f"it is {factor} times what it should be: {_SCALED}", "remedy": _UNSCALED}
    if not odd and tensor.dtype != "bool" and (shift := _agreed(tensor, cases, _shifted)):
        why = _CENTRED if shift.startswith("1 ") and tensor.kind == "parameter" else _SHIFTED
        return {**why, "cause": f"every element is {shift} than it should be: {why['cause']}"}
    if odd and not _shuffled(cases):
        return _ODD_RANKS if other_part(tensor, cases) else _ODD_IN_PART
    if _shuffled(cases):
        return _ODD_RANKS if _of_other_ranks(cases) else _SHUFFLED
    # A matrix that was drawn anew differs nearly everywhere; what was mixed up keeps whole rows or experts. Vectors
    # start as ones or zeros and buffers are computed: of them, a part may be right by chance.
    drawn = tensor.kind == "parameter" and len(tensor.shape) > 1
    return _IN_PART if drawn and all(c.differing < 0.9 * c.elements for _, c in cases) else {}


def _transposed(tensor: TensorFacts, cases: Cases) -> bool:
    """Whether of square matrices just as many elements are right as lie on their diagonals, the first one included."""
    rows, columns = tensor.shape[-2:] if len(tensor.shape) > 1 else (0, 1)
    right = sum(c.elements - c.differing for _, c in cases)
    first = any(c.index is not None and c.index[-2:] == (0, 1) for _, c in cases)
    return first and rows == columns > 1 and right * rows == sum(c.elements for _, c in cases)


def _agreed(tensor: TensorFacts, cases: Cases, told: Callable[[Comparison, float], str]) -> str:
    """What is ``told`` of the part of each rank, given how far rounding goes; empty where ranks differ in it."""
    if sum(c.elements for _, c in cases) < FEWEST:
        return ""
    words = {told(c, 4 * ROUNDING.get(tensor.dtype, 0.0)) for _, c in cases}
    return words.pop() if len(words) == 1 else ""


def _multiplied(comparison: Comparison, near: float) -> str:
    """By what all of it is multiplied, up to rounding: "2", "1/2"."""
    measure = comparison.measure
    return multiple(measure, near) if measure and measure.residual <= near else ""


def _shifted(comparison: Comparison, near: float) -> str:
    """What was added to every element, up to rounding: "1 more", "0.5 less".

    Every element is equally far from the truth where the distance is as long as that number allows. A truth of one
    number throughout, as norms start, is as far from any other initialisation: that is no shift.
    """
    m, widest = comparison.measure, comparison.max_abs
    if m is None or not m.elements or not 0 < m.apart < math.inf or comparison.differing < comparison.elements:
        return ""
    if comparison.expected is None or comparison.actual is None or near * max(m.actual, m.truth) > SLIGHT * m.apart:
        return ""
    shift = math.copysign(widest, comparison.actual - comparison.expected)
    total = (m.actual**2 - m.truth**2 - m.elements * shift**2) / (2 * shift)
    constant = total**2 > (1 - SLIGHT**2) * m.elements * m.truth**2
    if constant or not math.isclose(m.apart, widest * math.sqrt(m.elements), rel_tol=SLIGHT):
        return ""
    return f"{widest:.3g} {'more' if shift > 0 else 'less'}"


def _shuffled(cases: Cases) -> bool:
    """Whether the numbers are those of the truth in another order: far from them, and together of the same length."""
    measures = [c.measure for _, c in cases if c.measure is not None]
    ours, theirs, apart = (
        math.fsum(length * length for length in lengths)
        for lengths in ([m.actual for m in measures], [m.truth for m in measures], [m.apart for m in measures])
    )
    return len(measures) == len(cases) and apart > FAR * theirs > 0 and math.isclose(ours, theirs, rel_tol=1e-9)


def _of_other_ranks(cases: Cases) -> bool:
    """Whether each rank holds what another rank should hold of the same tensor."""
    lengths = [(rank, c.elements, c.measure) for rank, c in cases]
    should = {(size, m.truth): rank for rank, size, m in lengths if m is not None}
    return all(m is not None and should.get((size, m.actual), rank) != rank for rank, size, m in lengths)


def unwritten(comparison: Comparison) -> bool:
    """Whether all of it is zero, and the truth is not."""
    measure = comparison.measure
    return measure is not None and measure.actual == 0 < measure.truth


def other_part(tensor: TensorFacts, cases: Cases) -> bool:
    """Whether ranks may hold the slice of another rank, or none of the truth: nearly all differs, and by much.

    Of a matrix that was rounded, and of what was changed in part, neither can be. The weights of a norm are all near
    the ones that they started as, and near one another.
    """
    near = NEAR if len(tensor.shape) > 1 else 0.0
    return _of_other_ranks(cases) or not all(_little(c, near) for _, c in cases)


def _little(comparison: Comparison, near: float) -> bool:
    measure = comparison.measure
    if 2 * comparison.differing < comparison.elements:
        return True
    return measure is not None and math.isfinite(measure.apart) and measure.apart < near * measure.truth


def exchanged(wrong: Mapping[str, Cases]) -> dict[str, str]:
    """The tensors that hold what another of these should hold, each with the other.

    Both are wrong on the same ranks; one order of adding up gives one length, to the last bit.
    """
    owners: dict[tuple[object, ...], str] = {}
    for name, cases in wrong.items():
        if cases and all(c.measure is not None and c.measure.truth for _, c in cases):
            owners.setdefault(tuple((rank, c.elements, c.measure and c.measure.truth) for rank, c in cases), name)
    held = {
        name: tuple((rank, c.elements, c.measure and c.measure.actual) for rank, c in cases)
        for name, cases in wrong.items()
    }
    return {name: owners[key] for name, key in held.items() if owners.get(key, name) != name}


FEWEST = 8
"""Elements: any number is a multiple of another, and a few may be by chance."""
SLIGHT = 1e-2
"""Relative: no tensor that is wrong in another way is so nearly as far off in all of its elements."""
LEAST_CUT = 2.0**-14
"""Relative: what float16 leaves out is larger in one element or another; smaller is another way of computing."""
FAR = 1e-4
"""Of the squared length: less may be a few rows, or rounding."""
NEAR = 0.1
"""Of its length: another slice, or another initialisation, is farther away."""
UNWRITTEN: Explanation = {"cause": "nothing was ever written on these ranks (all zeros)"}
_ODD_IN_PART: Explanation = {
    "cause": "these ranks have it right but for some elements, or nearly: part of it was written over once it was "
    "loaded, or was read, computed or rounded otherwise than on the others",
    "remedy": "let every rank load and change it by the same code; look for what runs on some ranks only",
}
_CUT: Explanation = {
    "cause": "it was rounded through bfloat16 or float16",
    "remedy": "read, compute and cast it in float32 all the way",
}
_SCALED = "a scale was applied that the reference does not apply, or one more time, or ranks' copies were added up"
_UNSCALED = "look at the scales of quantised checkpoints, and at what is reduced over ranks while loading"
_CENTRED: Explanation = {
    "cause": "weights of norms are kept as w by some and as 1 + w by others (zero-centred gamma)",
    "remedy": "look at which of both the checkpoint has and the module computes with, and convert it once",
}
_SHIFTED: Explanation = {
    "cause": "something was added to it once it was loaded or computed",
    "remedy": "look for what changes it in place afterwards, and for where counting begins (padding, positions)",
}
_TRANSPOSED: Explanation = {
    "cause": "it is transposed: as many elements are right as lie on the diagonal, and it is square, so no shape tells",
    "remedy": "turn it while loading where the checkpoint's module has the other layout (x @ W in place of W @ x)",
}
_IN_PART: Explanation = {
    "cause": "part of it is right: rows, heads or experts were exchanged, transposed or left out",
    "remedy": "compare the order in which the checkpoint stores its parts with the one that the module wants",
}
_SHUFFLED: Explanation = {
    "cause": "it has the right numbers in another order: rows, halves (gate and up), heads (rotary layouts) or experts "
    "were exchanged or transposed, or it was cut along another dim than the one that it is sharded on",
    "remedy": f"{_IN_PART['remedy']}, and the dim of the slice with that of the placement",
}
EXCHANGED: Explanation = {
    "cause": "it holds what another tensor should hold: names were mapped crosswise (q and k, gate and up, a block and "
    "the next), or ranks took tensors in another order",
    "remedy": "compare the names in the checkpoint with those of the modules, and exchange tensors by name",
}
_ODD_RANKS: Explanation = {
    "cause": "these ranks read the slice of another rank, or only the others were given the weight",
    "remedy": "take the offset from the DTensor's own mesh coordinate, and let every rank load",
}
