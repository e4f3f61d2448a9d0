"""Infer the cause of wrong values from their pattern: rounded, scaled, shifted, transposed, reordered, swapped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pytest_fsdp_meta.evidence import Comparison, Measure, TensorFacts
from pytest_fsdp_meta.judging.expectations import is_whole
from pytest_fsdp_meta.judging.findings import Explanation, either
from pytest_fsdp_meta.judging.multiples import multiple

Cases = Sequence[tuple[int, Comparison]]
"""Comparisons of one tensor, each with its rank."""
ROUNDING = {
    "bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2
}  # fmt: skip
"""One unit in the last place by dtype (relative): the error that a cast may cause."""


def by_label(cases: Cases, label: Callable[[Measure], str]) -> dict[str, list[tuple[int, Comparison]]]:
    """Group cases that all have a measure by the label of their measure, such as a common factor."""
    groups: dict[str, list[tuple[int, Comparison]]] = {}
    for rank, comparison in cases:
        assert comparison.measure is not None
        groups.setdefault(label(comparison.measure), []).append((rank, comparison))
    return groups


def explain_pattern(tensor: TensorFacts, cases: Cases, pairs: Cases) -> Explanation:
    """Return the cause and remedy that the pattern suggests; empty if everything differs without a pattern."""
    if dtype := _rounded_through(cases):
        remedy = f"read and compute it in {tensor.dtype} throughout"
        return {"cause": f"it was rounded through {dtype}", "remedy": remedy}
    odd = len(cases) < len([c for _, c in pairs if c.elements])
    on_odd_ranks = _ODD_WHOLE if is_whole(tensor) else _ODD_RANKS
    if all(is_zero(c) for _, c in cases):
        if tensor.kind == "buffer" and tensor.persistent and not odd:
            return _ZERO_BUFFER
        return {**ZEROS, "remedy": on_odd_ranks["remedy"]} if odd else ZEROS
    if _transposed(tensor, cases):
        return _TRANSPOSED
    if not odd and (factor := _agreed(tensor, cases, _multiplied)):
        return {"cause": f"it is {factor} times the expected value: {_SCALED}", "remedy": _UNSCALED}
    if not odd and tensor.dtype != "bool" and (shift := _agreed(tensor, cases, _shifted)):
        explanation = _CENTRED if shift.startswith("1 ") and tensor.kind == "parameter" else _SHIFTED
        return {**explanation, "cause": f"every element is {shift} than expected: {explanation['cause']}"}
    if odd and not _shuffled(cases):
        return on_odd_ranks if may_be_other_slice(tensor, cases) else _ODD_IN_PART
    if _shuffled(cases):
        return _SHUFFLED if is_whole(tensor) or not _of_other_ranks(cases) else _OTHER_RANKS
    # A re-initialised matrix differs nearly everywhere; a reordered one keeps whole rows or experts. Vectors start as
    # ones or zeros and buffers are computed, so that a part of them may be right by chance.
    random = tensor.kind == "parameter" and len(tensor.shape) > 1
    if random and all(_closer_than_others(c) for _, c in cases):
        return _CLOSE
    if random and all(c.differing < 0.9 * c.elements for _, c in cases):
        return _IN_PART
    return {}


def _rounded_through(cases: Cases) -> str:
    """Return the dtype through which the wrong elements were rounded; empty if it may be chance, or ranks differ."""
    dtypes = {c.rounded for _, c in cases}
    return dtypes.pop() if len(dtypes) == 1 and any(c.varied for _, c in cases) else ""


def _transposed(tensor: TensorFacts, cases: Cases) -> bool:
    """Return whether exactly as many elements of square matrices are right as are on their diagonals."""
    rows, columns = tensor.shape[-2:] if len(tensor.shape) > 1 else (0, 1)
    right = sum(c.elements - c.differing for _, c in cases)
    first = any(c.index is not None and c.index[-2:] == (0, 1) for _, c in cases)
    return first and rows == columns > 1 and right * rows == sum(c.elements for _, c in cases)


def _agreed(tensor: TensorFacts, cases: Cases, describe: Callable[[Comparison, float], str]) -> str:
    """Return what ``describe`` says of each rank's part, given the rounding error; empty if ranks differ in it."""
    if sum(c.elements for _, c in cases) < FEWEST:
        return ""
    texts = {describe(c, 4 * ROUNDING.get(tensor.dtype, 0.0)) for _, c in cases}
    return texts.pop() if len(texts) == 1 else ""


def _multiplied(comparison: Comparison, near: float) -> str:
    """Return the factor of all elements up to rounding, like "2" or "1/2"; empty if there is none."""
    measure = comparison.measure
    return multiple(measure, near) if measure and measure.residual <= near else ""


def _shifted(comparison: Comparison, near: float) -> str:
    """Return the constant added to every element up to rounding, like "1 more" or "0.5 less"; empty if there is none.

    All elements differ by the same number if the distance is the largest that ``max_abs`` allows. A reference that is
    constant, like the initial weight of a norm, differs by one number from any other constant: that is not a shift.
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
    """Return whether the values are the reference's in another order: different elements with the same norm."""
    measures = [c.measure for _, c in cases if c.measure is not None]
    ours, theirs, apart = (
        math.fsum(length * length for length in lengths)
        for lengths in ([m.actual for m in measures], [m.truth for m in measures], [m.apart for m in measures])
    )
    return len(measures) == len(cases) and apart > FAR * theirs > 0 and math.isclose(ours, theirs, rel_tol=1e-9)


def _of_other_ranks(cases: Cases) -> bool:
    """Return whether each rank holds the part of the tensor that another rank should hold."""
    lengths = [(rank, c.elements, c.measure) for rank, c in cases]
    owners = {(size, m.truth): rank for rank, size, m in lengths if m is not None}
    return all(m is not None and owners.get((size, m.actual), rank) != rank for rank, size, m in lengths)


def is_zero(comparison: Comparison) -> bool:
    """Return whether all elements are zero and the reference's are not."""
    measure = comparison.measure
    return measure is not None and measure.actual == 0 < measure.truth


def may_be_other_slice(tensor: TensorFacts, cases: Cases) -> bool:
    """Return whether ranks may hold another rank's slice or unrelated values: most elements differ by much.

    This excludes rounded matrices and tensors that were changed in part. For vectors, small differences count too: the
    weights of a norm stay close to their initial ones, and to each other.
    """
    near = NEAR if len(tensor.shape) > 1 else 0.0
    return _of_other_ranks(cases) or not all(_little(c, near) for _, c in cases)


def _little(comparison: Comparison, near: float) -> bool:
    measure = comparison.measure
    if 2 * comparison.differing < comparison.elements:
        return True
    return measure is not None and math.isfinite(measure.apart) and measure.apart < near * measure.truth


def _closer_than_others(comparison: Comparison) -> bool:
    """Return whether the wrong elements are closer to the right ones than elements of other places would be.

    Unrelated elements of the same spread are apart by the square root of 2 times it.
    """
    measure = comparison.measure
    if measure is None or not 0 < measure.apart < math.inf:
        return False
    part = comparison.differing / comparison.elements
    return measure.apart < CLOSE * math.sqrt(2 * part) * measure.truth


def find_swapped(wrong: Mapping[str, Cases]) -> dict[str, str]:
    """Map each tensor that holds the values of another wrong tensor to that tensor.

    Both must be wrong on the same ranks. Norms are compared exactly: equal elements summed in the same order give the
    same bits.
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
"""Number of elements; fewer may have a common factor or shift by chance."""
SLIGHT = 1e-2
"""Relative; in a tensor without a common shift, differences vary by more than this."""
FAR = 1e-4
"""Fraction of the squared norm; a smaller distance may be a few rows, or rounding."""
CLOSE = 0.25
"""Fraction of the distance of unrelated elements; what was only scaled, rounded or trained a little is closer."""
NEAR = 0.1
"""Fraction of the norm; another slice or another initialisation is farther away."""
ZEROS: Explanation = {
    "cause": "it holds only zeros on these ranks: it was created or initialised with zeros (like the B of LoRA), and "
    "the weight was not loaded after that"
}
_ZERO_BUFFER: Explanation = {
    "cause": "it holds only zeros, as after its creation: nothing was loaded into it, as by code that copies "
    "parameters and leaves buffers out",
    "remedy": "load persistent buffers from the checkpoint as well: model.buffers() beside model.parameters()",
}
_CLOSE: Explanation = {
    "cause": "its wrong elements are close to the right ones, so they were not reordered or drawn: scales of quantised "
    "blocks or channels were applied to other elements, it was computed in a lower precision, or it comes from another "
    "checkpoint of the same model",
    "remedy": "compare the block size and the order of the scales with those that the checkpoint was written with, the "
    "dtypes on the way, and the checkpoint's path",
}
_ODD_IN_PART: Explanation = {
    "cause": "a part was overwritten after loading, or was read, computed or rounded differently from the other ranks",
    "remedy": "load and modify it with the same code on every rank; look for code that runs on some ranks only",
}
_SCALED = "a scale was applied that the reference does not have, or applied twice, or the copies of ranks were summed"
_UNSCALED = "check the scales of quantised checkpoints, and reductions over ranks while loading"
_CENTRED: Explanation = {
    "cause": "some implementations store norm weights as w, others as 1 + w (zero-centred gamma)",
    "remedy": "find out which form the checkpoint stores and which the module expects, and convert once",
}
_SHIFTED: Explanation = {
    "cause": "a constant was added after it was loaded or computed",
    "remedy": "look for code that modifies it in place, and for off-by-one starts (padding, positions)",
}
_TRANSPOSED: Explanation = {
    "cause": "it is transposed: only as many elements are right as are on the diagonal, and a square shape hides it",
    "remedy": "transpose it while loading if the checkpoint's module uses the other layout: x @ W instead of W @ x, or "
    "width before height",
}
_IN_PART: Explanation = {
    "cause": "a part of it is right: rows, heads or experts were reordered, transposed or left out",
    "remedy": "compare the order of the parts in the checkpoint with the order that the module expects",
}
_SHUFFLED = either(
    "it has the right values in another order: ",
    "rows, halves (gate and up), heads (rotary layouts) or experts were reordered or transposed",
    "it was sliced along another dim than its placement, or its rows were reordered for another number of ranks",
    f"{_IN_PART['remedy']}, and the dim of the slice with the dim of the placement",
)
SWAPPED = either(
    "it holds the values of another tensor: ",
    "names were swapped (q and k, gate and up, a block and the next)",
    "ranks read tensors in different orders",
    "compare the names in the checkpoint with those of the modules, and match tensors by name, not by order",
)
ELSEWHERE = either(
    "it holds the values of another tensor: ",
    "names were mapped to others, or an index is off (a block and the next)",
    "it is read by the number that the part has on this rank or stage, without the number of the first one there",
    "match tensors by their names in the whole model: add the number of the rank's or stage's first block or expert",
)
_ODD_WHOLE: Explanation = {
    "cause": "these ranks did not receive the weight that the others have: it was loaded on some ranks only, or "
    "initialised from a seed that depends on the rank",
    "remedy": "load it on every rank, or broadcast it after loading",
}
_ODD_RANKS: Explanation = {
    "cause": "these ranks read the slice of another rank, or only the others received the weight",
    "remedy": "take the offset from the DTensor's own mesh coordinate, and load on every rank",
}
_OTHER_RANKS: Explanation = {
    **_ODD_RANKS,
    "cause_alone": _SHUFFLED["cause_alone"],
    "cause_sharded": _ODD_RANKS["cause"],
}
