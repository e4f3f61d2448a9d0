"""The short form of placements, as authors declare them and as messages show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pytest_fsdp_meta.loader.validation import SubjectError


def short_placement(placement: object) -> str:
    """Return the short form of a placement: ``S(0)``, ``R``, ``P(sum)``, or ``_S(0, 2)`` for a strided shard."""
    dim = getattr(placement, "dim", None)
    if dim is not None:
        factor = getattr(placement, "split_factor", None)
        return f"S({dim})" if factor is None else f"_S({dim}, {factor})"
    kind = type(placement).__name__
    if kind == "Partial":
        return f"P({getattr(placement, 'reduce_op', 'sum')})"
    return "R" if kind == "Replicate" else str(placement)


PLACEMENT = re.compile(
    r"(?:(?P<replicate>R|Replicate\(\))|(?:S|Shard)\((?:dim=)?(?P<dim>\d+)\)"
    r"|(?:_S|_StridedShard)\((?:dim=)?(?P<strided>\d+),\s*(?:sf=|split_factor=)?(?P<factor>\d+)\))\s*(?:,\s*|$)"
)


def parse_placements(declared: Any) -> tuple[str, ...]:
    """Return declared placements in their short form, one for each mesh dimension.

    Raises SubjectError for anything that is not a placement of a parameter.
    """
    if isinstance(declared, str):
        found, position = [], 0
        while match := PLACEMENT.match(declared, position):
            found.append(_canonical(match))
            position = match.end()
            if position == len(declared):
                return tuple(found)
        raise SubjectError(
            "placements", f"{declared!r} is not a placement; write 'S(0)', 'R' or, on two mesh dimensions, 'R, S(0)'"
        )
    if isinstance(declared, Sequence) and declared:
        return tuple(part for placement in declared for part in parse_placements(placement))
    short = short_placement(declared)
    if not PLACEMENT.fullmatch(short):
        raise SubjectError("placements", f"{declared!r} is not a placement; write 'S(0)' or use Shard(0), Replicate()")
    return (short,)


def _canonical(match: re.Match[str]) -> str:
    if match["replicate"]:
        return "R"
    return f"S({match['dim']})" if match["dim"] else f"_S({match['strided']}, {match['factor']})"
