"""full_state_dict_exports for tensors that are put together from the ranks' parts, on hand-made evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.checks.checkpoint.facts import Assembled, ExportedPart
from pytest_fsdp_meta.evidence import Comparison, Evidence, Export
from tests.checks.evidence_factory import (
    MIDDLE,
    change,
    declare,
    differ,
    equal,
    findings_of,
    healthy,
    left_out,
    verdict,
    with_reference,
)

EXPORTS = "full_state_dict_exports"
OTHER = Comparison(
    MIDDLE, False, elements=12, differing=12, max_abs=1.0, max_rel=0.5, index=(3, 0), expected=2.0, actual=1.0
)


def assembled(evidence: Evidence, changed: dict[int, ExportedPart] | None = None, **facts: Any) -> Evidence:
    """Let the export of MIDDLE be put together from a right part of each rank, with these ones ``changed``."""
    assert evidence.export is not None
    right = {rank.rank: ExportedPart(rank.rank, equal(rank.by_name[MIDDLE])) for rank in evidence.inventory}
    parts = tuple({**right, **(changed or {})}.values())
    others = tuple(comparison for comparison in evidence.export.comparisons if comparison.name != MIDDLE)
    export = Export(comparisons=others, assembled=(Assembled(MIDDLE, parts, elements=24, **facts),))
    return replace(evidence, export=export)


def on(*ranks: int, comparison: Comparison | None = OTHER, rounded: str = "") -> dict[int, ExportedPart]:
    return {rank: ExportedPart(rank, comparison, rounded) for rank in ranks}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_right_parts_pass(world):
    assert verdict(EXPORTS, assembled(healthy(world))).status == "passed"


def test_a_part_of_another_shape():
    turned = Comparison(MIDDLE, False, problem="shape (4, 3)", should_be="(6, 4), as in the reference", shape=(4, 3))
    assert findings_of(verdict(EXPORTS, assembled(healthy(), on(1, comparison=turned)))) == [
        (MIDDLE, (1,), "shape (4, 3) in the state dict", "(6, 4), as in the reference, or the rank's part of it", "")
    ]


def test_a_part_that_rounds():
    cast = replace(OTHER, cast=True, max_rel=2.0**-8)
    evidence = assembled(healthy(), on(1, comparison=cast, rounded="bfloat16"))
    found = verdict(EXPORTS, evidence)
    assert [(f.tensor, f.ranks) for f in found.findings] == [(MIDDLE, (1,))]
    # The loader itself holds the tensor in that dtype, which other checks judge.
    assert verdict(EXPORTS, change(evidence, MIDDLE, dtype="bfloat16")).findings == ()


def test_elements_that_ranks_export_with_different_values():
    """Of drawn weights, the second load has others than the reference, so only ranks can be compared."""
    differing = "values in the state dict that differ from those of"
    drawn = declare(assembled(healthy(4), on(*range(4)), diverging=(2,), before=(0,)), drawn=(MIDDLE,))
    one = (MIDDLE, (2,), f"{differing} rank 0, which exports the same elements", "", "")
    assert findings_of(verdict(EXPORTS, drawn)) == [one]
    several = assembled(healthy(4), diverging=(2, 3), before=(0, 1))
    assert [(f.ranks, f.actual) for f in verdict(EXPORTS, several).findings] == [
        ((2, 3), f"{differing} ranks 0, 1, which export the same elements")
    ]
    # A rank with wrong values is not reported again because others differ.
    wrong = assembled(healthy(4), on(2), diverging=(2,), before=(0,))
    assert [f.actual for f in verdict(EXPORTS, wrong).findings] == ["different values in the exported part"]


def test_parts_that_are_not_compared():
    found = verdict(EXPORTS, assembled(differ(healthy(), MIDDLE), on(0, 1)))
    assert (found.status, found.reason) == ("skipped", left_out("params_equal_reference", MIDDLE, rest=False))
    unreproducible = with_reference(assembled(healthy(), on(1)), unstable=(MIDDLE,))
    assert verdict(EXPORTS, unreproducible).status == "passed"
    assert verdict(EXPORTS, assembled(healthy(), on(0, 1, comparison=None))).findings == ()


def test_a_wrong_model_leaves_the_values_of_its_own_export_open():
    """A merged tensor may come from any of the model's."""
    merged = replace(OTHER, name="merged.weight")
    evidence = declare(
        replace(healthy(), export=Export(comparisons=(merged,))),
        declared=healthy().subject.declared | {"export_reference"},
    )
    (finding,) = verdict(EXPORTS, evidence).findings
    assert (finding.tensor, finding.expected) == ("merged.weight", "those of Subject(export_reference=...)")
    found = verdict(EXPORTS, differ(evidence, MIDDLE, [0]))
    assert (found.status, found.findings) == ("skipped", ())
    assert found.reason.endswith(f"values of the export are not compared: {MIDDLE} is not the reference's")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "passed"),
        ({"losses": (8.0, 1.25)}, "as loaded, its loss is 8, and that of the model "),
        ({"no_losses": "it raises ValueError"}, "it raises ValueError"),
        *(({"losses": (1.0, loss)}, f"loss {loss:.6g} of a model that loads") for loss in (1.25, math.nan, math.inf)),
        ({"live": ((1.0,), (math.nan,)), "losses": (1.0, math.nan)}, "passed"),
    ],
)
def test_an_export_after_training(change, expected):
    export = replace(healthy().export, **{"live": ((1.0,), (1.5,)), "losses": (1.0, 1.5), **change})
    reference = replace(healthy().reference, losses=(1.0, 1.0))
    found = verdict(EXPORTS, replace(healthy(1), export=export, reference=reference))
    said = found.reason.removeprefix("the export is not compared after training: ")
    assert (found.findings[0].actual if found.findings else said or found.status).startswith(expected)
