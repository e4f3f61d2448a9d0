"""Infer the cause of wrong values from their pattern: rounded, scaled, shifted, transposed, reordered, swapped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pytest_fsdp_meta.checks.values.facts import Pattern
from pytest_fsdp_meta.evidence import Comparison, Measure, TensorFacts
from pytest_fsdp_meta.judging.findings import Explanation, either
from pytest_fsdp_meta.judging.multiples import whole

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


def explain_pattern(tensor: TensorFacts, cases: Cases, odd: bool) -> Explanation:
    """Return the cause and remedy that the pattern suggests; empty if everything differs without a pattern.

    ``odd``: other ranks have the right values.
    """
    kind, by = common_pattern(cases)
    if odd and kind in ("close", "part"):
        return _ODD_IN_PART
    # Vectors start as ones or zeros, and buffers are computed, so that a part of them may be right by chance.
    if kind == "part" and (tensor.kind != "parameter" or len(tensor.shape) < 2):
        kind = ""
    if kind == "rounded":
        return {"cause": f"it was rounded through {by}", "remedy": f"read and compute it in {tensor.dtype} throughout"}
    if kind == "zeros":
        return _ZERO_BUFFER if tensor.kind == "buffer" and tensor.persistent and not odd else ZEROS
    if kind == "times":
        short = f"{float(by):.4g}"
        of_factor = f"it is {whole(float(by), 1e-3) or (by if short == '1' else short)} times the expected value"
        return {"cause": f"{of_factor}: {_SCALED}", "remedy": _UNSCALED}
    if kind == "plus":
        is_norm = tensor.kind == "parameter" and len(tensor.shape) == 1 and not tensor.name.endswith("bias")
        explanation = _CENTRED if by in ("1", "-1") and is_norm else _SHIFTED
        shift = f"{by.removeprefix('-')} {'less' if by.startswith('-') else 'more'}"
        return {**explanation, "cause": f"every element is {shift} than expected: {explanation['cause']}"}
    return PATTERNS.get(kind, _ODD_WHOLE if odd else {})


def common_pattern(cases: Cases) -> tuple[str, str]:
    """Return kind and number of the pattern of all these ranks; empty if they differ in it by more than rounding."""
    patterns = [(c.pattern.kind, c.pattern.by) if c.pattern is not None else ("", "") for _, c in cases]
    kinds, numbers = {kind for kind, _ in patterns}, [by for kind, by in patterns if kind in ("times", "plus")]
    alike = all(math.isclose(float(by), float(numbers[0]), rel_tol=0.01) for by in numbers)
    return patterns[0] if len(kinds) == 1 and alike and (numbers or len(set(patterns)) == 1) else ("", "")


def is_zero(comparison: Comparison) -> bool:
    """Return whether all elements are zero and the reference's are not."""
    return comparison.pattern == Pattern("zeros")


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


IF_DRAWN = "if the loader draws it on purpose (a new head, training from scratch), declare Subject(drawn=...)"
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
    "cause": "it is transposed, which a square shape hides",
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
OTHER_TENSOR = either(
    "it holds the values of another tensor: ",
    "names were swapped or mapped to others (q and k, gate and up), or an index is off (a block and the next)",
    "ranks read tensors in different orders, or by the number that the part has on this rank or stage",
    "match tensors by their names in the whole model: add the number of the rank's or stage's first block or expert",
)
_ODD_WHOLE: Explanation = {
    "cause": "these ranks did not receive the weight that the others have: it was loaded on some ranks only, or "
    "initialised from a seed that depends on the rank",
    "remedy": "load it on every rank, or broadcast it after loading",
}
_OTHER_PART: Explanation = {
    "cause": "these ranks hold another part of the tensor: they read the slice of another rank",
    "remedy": "take the offset from the DTensor's own mesh coordinate",
}
_ALIKE: Explanation = {
    "cause": "these ranks hold the numbers of another rank's part: it was drawn as a DTensor and not loaded after that "
    "(on the CPU, torch then gives all ranks the same numbers), or they read the slice of another rank",
    "remedy": f"load it, with the offset from the DTensor's own mesh coordinate; {IF_DRAWN}",
}
PATTERNS: Mapping[str, Explanation] = {
    "transposed": _TRANSPOSED,
    "elsewhere": _OTHER_PART,
    "alike": _ALIKE,
    "reordered": _SHUFFLED,
    "close": _CLOSE,
    "part": _IN_PART,
}
"""Kind of a pattern -> what explains it, whatever its number."""
